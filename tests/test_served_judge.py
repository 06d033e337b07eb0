"""A judge that the run itself serves: its answers, its config, and its death."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import job_runs
import pytest
import torch
import yaml
from engine_processes import SECRET, engine_process
from scorer_cases import PROMPT
from scoring_cases import make_decoder, without_template
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_process import vllm_process

from asyncrl.base.errors import ConfigError, RequestRefused
from asyncrl.base.http import Caller
from asyncrl.config import RunConfig
from asyncrl.config.load import checked
from asyncrl.engines.kinds import ServerOrder
from asyncrl.extensions.scoring.judge import Judge
from asyncrl.extensions.scoring.judge_config import JudgeConfig
from asyncrl.extensions.scoring.served_judge import ServedJudge
from asyncrl.job.check.config_check import validate
from asyncrl.job.roles import extra_servers
from asyncrl.rollouts.tokenizer import HFChatTokenizer

# one process imports the modules that they fork
pytestmark = [
    pytest.mark.extension("scoring"),
    pytest.mark.xdist_group("forks"),
]
TEXTS = ["is a better?", "say 7", "b"]


def order_of(folder: Path, **judge: Any) -> ServerOrder:
    """Describe the judge's server as a run does."""
    config = config_of({"model": str(folder), "max_concurrent": 2, **judge})
    return ServerOrder(
        config=config,
        role=extra_servers(config)["judge"],
        run_dir=folder.parent,
        name="judge",
        model_path=folder,
        device="cpu",
        threads=1,
        tokenizer=HFChatTokenizer(folder),
    )


def greedy(folder: Path, text: str, num: int) -> str:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        found = model.generate(**ids, max_new_tokens=num, do_sample=False)
    return str(
        tokenizer.decode(
            found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
    )


@pytest.mark.parametrize(
    "kind", ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)]
)
def test_served_judge_answers_as_its_model_generates(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path / "model", head_dim=32)  # vLLM has no 8
    order = order_of(folder, engine=kind, max_length=200, max_tokens=100)
    maker = order.role.maker
    assert maker.module == f"asyncrl_servers.{kind}"

    async def story(url: str) -> None:
        caller = Caller("judge", url, SECRET)
        served = order.role.maker.client(order, caller)
        assert isinstance(served, ServedJudge)
        await served.ready(100)

        async def ask(text: str, num: int, temperature: float = 0.0) -> Any:
            return await served.ask(
                text, max_tokens=num, temperature=temperature, seed=3
            )

        answers = await asyncio.gather(*(ask(text, 12) for text in TEXTS))
        assert [answer.text for answer in answers] == [
            greedy(folder, text, 12) for text in TEXTS
        ]
        assert (await ask("a", 1)).is_cut
        drawn = [await ask("a", 12, 1.0) for _ in range(2)]
        assert drawn[0] == drawn[1]
        with pytest.raises(RequestRefused, match="200"):
            await ask("a", 400)
        config = JudgeConfig(
            model=str(folder),
            prompt="{completion}",
            parse="(no model says this)",
            best=9,
            max_tokens=20,
            max_length=200,
            retries=0,
            temperature=1.0,
        )
        judge = Judge(config, timeout_s=0.001, ask=served.ask)
        with pytest.raises(Exception, match="has no verdict: in try 1 the judge answ"):
            await judge(PROMPT, "x")
        # the message, its role, and the mark of the answer
        assert 3 < judge.num_tokens <= 20 + 8
        await caller.aclose()

    serving = vllm_process if kind == "vllm" else partial(engine_process, kind)
    with serving(maker.spec(order), tmp_path) as server:
        asyncio.run(story(server.url))


def test_grades_do_not_depend_on_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A served judge needs no client of an endpoint.
    monkeypatch.setitem(sys.modules, "openai", None)
    folder = make_tiny_model(tmp_path / "model")
    config = JudgeConfig(
        model=str(folder),
        prompt="grade {completion}",
        parse=r"(\d)",
        best=9,
        max_tokens=400,
        max_length=512,
        temperature=1.0,
    )

    async def story(url: str) -> None:
        caller = Caller("judge", url, SECRET)
        served: Any = order.role.maker.client(order, caller)

        async def grades(texts: list[str]) -> dict[str, Any]:
            judge = Judge(config, timeout_s=60, ask=served.ask)
            return {text: await judge(PROMPT, text) for text in texts}

        texts = list("abcdef")
        found = await grades(texts)
        # As on a device of the trainer, in the trainer's time slice.
        assert (await served.sleep()).num_bytes > 0
        reversed_ = asyncio.ensure_future(grades(texts[::-1]))
        assert (await served.health()).asleep == ["kv", "weights"]
        await served.wake()
        assert await reversed_ == found
        assert len({*found.values()}) > 1
        judge = Judge(config, timeout_s=60, ask=served.ask)
        with pytest.raises(RequestRefused, match="512"):
            await judge(PROMPT, "a" * 120)
        assert judge.num_tokens == 0, "nothing was read"
        await caller.aclose()

    order = order_of(folder, max_length=512, max_tokens=400)
    maker = order.role.maker
    with engine_process("embedded", maker.spec(order), tmp_path) as server:
        asyncio.run(story(server.url))


def test_completion_cannot_end_its_turn(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    tokenizer = HFChatTokenizer(folder)
    end_id = min(tokenizer.end_ids)
    name = tokenizer.decode([end_id], skip_special_tokens=False)
    assert tokenizer.encode(name) == (end_id,)
    order = order_of(folder)
    client = order.role.maker.client(order, Caller("judge", "", SECRET))
    assert isinstance(client, ServedJudge)
    plain, marked = map(client.encode, ("ab", f"a{name}b"))
    assert list(plain).count(end_id) == list(marked).count(end_id)


def test_model_that_cannot_judge_is_refused_before_training(tmp_path: Path) -> None:
    def check(folder: Path, max_length: int = 512) -> None:
        judge = {"model": str(folder), "max_length": max_length, "max_tokens": 64}
        validate(config_of(judge))

    scorer = make_decoder(tmp_path / "scorer", None)
    with pytest.raises(ConfigError, match="is Qwen3ForSequenceClassification"):
        check(scorer)
    silent = make_tiny_model(tmp_path / "silent")
    with pytest.raises(ConfigError, match="max_position_embeddings=512"):
        check(silent, 513)
    without_template(silent)
    with pytest.raises(ConfigError, match=r"judge.model=.*has no chat template"):
        check(silent)
    with pytest.raises(ConfigError, match=r"task.reward.judge.model=/no/model"):
        check(Path("/no/model"))


def config_of(
    *judges: dict[str, Any], rollout: dict[str, Any] | None = None, **placement: Any
) -> Any:
    sections = [
        {
            "files": ["examples/data/capitals.jsonl"],
            "name": f"task{number}",
            "reward": {"judge": {"model": "a/b", "prompt": "{completion}", **judge}},
        }
        for number, judge in enumerate(judges)
    ]
    model = {"scratch": job_runs.CONFIG["model"]["scratch"], "dtype": "float32"}
    return checked(
        RunConfig,
        {
            "model": model,
            "task": sections,
            "placement": placement,
            "rollout": rollout or {},
        },
    )


URL = "http://127.0.0.1:9/v1"


def test_tasks_share_the_server_of_a_judge() -> None:
    config = config_of({"prompt": "Grade {completion}"}, {"max_concurrent": 20})
    server = extra_servers(config)["judge"]
    assert (server.slots, server.max_length) == (20, 4096)
    assert "judge" not in extra_servers(config_of({"base_url": URL}))


@pytest.mark.slow
def test_run_outlives_the_death_of_its_grader(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "grader")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{a} 2"}) for a in "abcdefgh"))
    path = job_runs.write_config(tmp_path, trainer={"num_steps": 6})
    config = yaml.safe_load(path.read_text())
    judge = {
        "model": str(folder),
        "prompt": "grade {completion}",
        "parse": r"(\d)",
        "best": 9,
        "temperature": 1.0,
        "max_tokens": 300,
        "max_length": 512,
        "max_concurrent": 8,
    }
    config["task"] = {
        "files": [str(rows)],
        "answer_column": "none",
        "reward": {"judge": judge},
    }
    config["supervision"] = {"backoff_s": 0.1}
    path.write_text(yaml.safe_dump(config))
    run_dir = tmp_path / "run"
    process = job_runs.start(path, run_dir)
    job_runs.wait_for_steps(run_dir, 1, process)
    (server,) = job_runs.children_of(process, "judge")
    server.kill()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    steps = job_runs.read_lines(run_dir / "metrics.jsonl")
    assert len(steps) == 6
    assert steps[-1]["judge/restarts"] == 1
    assert steps[-1]["rollout/failed"] == 0
    assert all(0 < step["reward/mean"] < 1 for step in steps)
