"""A teacher behind /v1/completions: vLLM's logprobs, and servers that cannot score."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import job_runs
import numpy as np
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from engine_in_process import make_qwen3
from launch_cases import single_node
from taught_cases import (
    QUESTION,
    ROLLOUTS,
    check_journal,
    check_tops,
    make_scoring,
    plain_logprobs,
    taught,
)
from transformers import AutoModelForCausalLM
from vllm_process import SECRET, vllm_process

from asyncrl.base.errors import ConfigError, EngineError
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig
from asyncrl.config.model_config import ScratchConfig
from asyncrl.extensions.scoring import scoring_check
from asyncrl.extensions.scoring.scoring_check import check_models
from asyncrl.extensions.scoring.teacher import ServedTeacher
from asyncrl.extensions.scoring.teacher_config import TeacherConfig
from asyncrl.job.check.config_check import validate
from asyncrl.job.roles import extra_servers
from asyncrl.launch.machine import Machine
from asyncrl.launch.placement import NO_DEVICE, place
from asyncrl.messages.engine_api import ScoreRequest
from asyncrl.messages.records import Rollout
from asyncrl.messages.tokens import DISTILL_IDS, DISTILL_LOGPROBS, SUPPORT
from asyncrl.trainer.model.random_init import ScratchSpec, make_scratch_model

pytestmark = pytest.mark.extension("scoring")

MAX_LENGTH = 300


@pytest.mark.vllm
def test_vllms_logprobs_equal_a_plain_forwards(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_qwen3(folder, vocab_size=64)
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    spec = {
        "name": "teacher",
        "slots": 4,
        "max_length": MAX_LENGTH + 1,
        "model_path": str(folder),
        "dtype": "float32",
        "device": "cpu",
    }

    async def story(url: str) -> list[Rollout]:
        caller = Caller("teacher", url, SECRET)
        scoring = make_scoring(top_k=4)
        teacher = ServedTeacher(
            caller, TeacherConfig(path="m"), max_length=MAX_LENGTH, top_k=4
        )
        try:
            await teacher.ready(400.0)
            judged = [
                scoring.annotate(teacher.score, rollout, QUESTION)
                for rollout in ROLLOUTS
            ]
            return await asyncio.gather(*judged)
        finally:
            await caller.aclose()

    with vllm_process(spec, tmp_path / "vllm") as server:
        found = asyncio.run(story(server.url))
    for rollout in found:
        for branch in rollout:
            mask = branch.loss_mask & (branch.tokens.column(SUPPORT).sizes == 0)
            expected = plain_logprobs(model, branch, 1.0)[mask[1:]]
            np.testing.assert_allclose(taught(branch.tokens)[mask], expected, atol=1e-4)
            check_tops(model, branch, 1.0, mask)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_run_learns_from_teachers_that_vllm_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_TEACHER_KEY", SECRET)
    plain: dict[str, Any] = job_runs.CONFIG["model"]["scratch"]
    wide = plain | {"architecture": plain["architecture"] | {"head_dim": 32}}
    folder = tmp_path / "teacher"
    scratch = ScratchConfig(**wide)
    make_scratch_model(ScratchSpec(out=folder, seed=11, scratch=scratch))
    length = job_runs.CONFIG["rollout"]
    spec = {
        "name": "of-others",
        "slots": 4,
        "max_length": length["max_tokens"] + length["max_prompt_tokens"] + 1,
        "model_path": str(folder),
        "dtype": "float32",
        "device": "cpu",
    }
    config = job_runs.write_config(
        tmp_path,
        algorithm={"distill_weight": 1.0, "distill_loss": "topk_reverse_kl"},
        trainer={"num_steps": 2},
    )
    with vllm_process(spec, tmp_path / "vllm") as server:
        server.wait_ready()
        values = yaml.safe_load(config.read_text())
        values["task"] = [job_runs.CONFIG["task"] | {"name": name} for name in "ab"]
        values["teacher"] = [
            {"path": str(folder), "tasks": ["a"], "engine": "vllm"},
            {
                "path": str(folder),
                "tasks": ["b"],
                "base_url": f"{server.url}/v1",
                "key_variable": "ASYNCRL_TEACHER_KEY",
            },
        ]
        config.write_text(json.dumps(values))
        run_dir = tmp_path / "run"
        ended = job_runs.run(config, run_dir)
    assert ended.returncode == 0, ended.stderr
    model = AutoModelForCausalLM.from_pretrained(folder)
    num_scored = check_journal(run_dir, dict.fromkeys("ab", model), top_k=16)
    assert [*sorted(num_scored)] == ["a", "b"]


# ---- servers that cannot score


def one_of(number: int, top_k: int) -> dict[str, Any]:
    return {str(each): {"logprob": -1.0 - each} for each in {number, *range(top_k)}}


class Endpoint:
    """Scores two tokens, unless `fault` says otherwise."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.asked = list[dict[str, Any]]()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        self.server = TestServer(app)

    async def _models(self, request: web.Request) -> web.Response:
        is_known = request.headers["authorization"] == "Bearer sk-right"
        if self.fault == "starts" and len(self.asked) < 2:
            self.asked.append({})
            return web.json_response({"error": {"message": "loads"}}, status=503)
        if self.fault == "key" or not is_known:
            return web.json_response({"error": {"message": "no"}}, status=401)
        if self.fault == "word":
            error = {"message": "wrong key", "code": "invalid_api_key"}
            return web.json_response({"error": error}, status=401)
        length = 100 if self.fault == "length" else 10_000
        return web.json_response({"data": [{"id": "m", "max_model_len": length}]})

    async def _complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append(asked)
        top_k = asked["prompt_logprobs"]
        told: Any = [None, *(one_of(token, top_k) for token in asked["prompt"][1:])]
        if self.fault == "ignored":
            told = None
        if self.fault == "busy" and len(self.asked) % 3:
            busy = {"error": {"message": "slower", "code": None}}
            return web.json_response(busy, status=429)
        if self.fault == "few":
            told = [None, *(one_of(token, 1) for token in asked["prompt"][1:])]
        if self.fault == "refused":
            body = {"error": {"message": "prompt_logprobs: 3 is too many"}}
            return web.json_response(body, status=400)
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": told}]})


def config_of(url: str, model: Path, **more: Any) -> RunConfig:
    teacher = {
        "path": str(model),
        "base_url": url,
        "key_variable": "ASYNCRL_TEACHER_KEY",
    }
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "task": {"python": "asyncrl.tasks.toy:Letters"},
            # The model has 512 positions, and a server samples a token behind a text.
            "rollout": {"max_prompt_tokens": 100, "max_tokens": 100},
            "algorithm": {
                "distill_weight": 1,
                "distill_loss": "jsd",
                "distill_top_k": 3,
            },
            "teacher": teacher | more,
        }
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("key", r"teacher at http://.* cannot score: teacher answered 401 .*: no"),
        ("word", r"cannot score: teacher answered 401 .*: wrong key"),
        ("ignored", "prompt_logprobs=3 gave 0 of 1 tokens their logprobs"),
        ("few", "prompt_logprobs=3 gave 0 of 1 tokens their logprobs"),
        ("refused", "prompt_logprobs: 3 is too many"),
        ("length", r"max_model_len=100 for texts of \d+ tokens"),
        ("gone", "cannot be reached"),
        ("", ""),
        ("starts", ""),
        ("busy", ""),
    ],
)
def test_server_that_cannot_score_is_refused_by_check(
    fault: str, words: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_TEACHER_KEY", "sk-right")
    if fault == "gone":
        monkeypatch.setattr(scoring_check, "REACH_S", 0.5)

    async def story() -> list[str]:
        endpoint = Endpoint(fault)
        await endpoint.server.start_server()
        url = f"http://127.0.0.1:{endpoint.server.port}/v1"
        if fault == "gone":
            await endpoint.server.close()
        try:
            config = config_of(url, tiny_model_dir)
            return (await asyncio.to_thread(validate, config)).lines
        finally:
            await endpoint.server.close()

    if words:
        with pytest.raises(ConfigError, match=words) as caught:
            asyncio.run(story())
        assert "teacher" in caught.value.way_out
    else:
        assert any("teacher: " in line for line in asyncio.run(story()))


def test_call_to_a_busy_server_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        endpoint = Endpoint("busy")
        await endpoint.server.start_server()
        url = f"http://127.0.0.1:{endpoint.server.port}"
        caller = Caller("teacher", url, "sk-right")
        teacher = ServedTeacher(caller, TeacherConfig(path="m"), top_k=3)
        request = ScoreRequest(token_ids=[5, 6, 7], start=1, top_k=3)
        try:
            await teacher.ready(10.0)
            answer = await teacher.score(request)
            assert answer.logprobs == [-7.0, -8.0]
            assert len(endpoint.asked) == 6
            monkeypatch.setattr(
                "asyncrl.extensions.scoring.teacher.CALL_TIMEOUT_S", 0.2
            )
            with pytest.raises(EngineError, match="slower"):
                await teacher.score(request)
        finally:
            await caller.aclose()
            await endpoint.server.close()

    asyncio.run(story())


def test_server_of_others_takes_no_device(tiny_model_dir: Path) -> None:
    config = config_of("http://127.0.0.1:1/v1", tiny_model_dir)
    nodes = single_node(Machine((), 8, 2**36, has_bfloat16=False))
    placement = place(config, nodes, extra_servers(config))
    assert placement.extra["teacher"].name == NO_DEVICE
    assert not list(check_models(config.model_copy(update={"teacher": None}), {}))


def test_ids_of_a_padded_vocabulary_are_dropped() -> None:
    """The trained model may have fewer rows than the teacher."""

    async def story() -> Rollout:
        endpoint = Endpoint("")
        await endpoint.server.start_server()
        url = f"http://127.0.0.1:{endpoint.server.port}"
        caller = Caller("teacher", url, "sk-right")
        scoring = make_scoring(top_k=4, num_ids=2)
        teacher = ServedTeacher(caller, TeacherConfig(path="m"), top_k=4)
        try:
            await teacher.ready(30.0)
            return await scoring.annotate(teacher.score, ROLLOUTS[0], QUESTION)
        finally:
            await caller.aclose()
            await endpoint.server.close()

    (branch,) = asyncio.run(story())
    ids = branch.tokens.column(DISTILL_IDS)
    assert ids.sizes.tolist() == [0, 0, 0, 2, 2, 2]
    assert ids.values.tolist() == [0, 1] * 3
    assert len(branch.tokens.column(DISTILL_LOGPROBS).values) == 6
