"""A verifiers environment of many turns over a real gateway and a real engine server: what is recorded is
what was sampled.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_in_process import staging_request, weights_of
from engine_processes import SECRET, engine_process
from gateway_cases import gateway_world
from safetensors.torch import load_file, save_file
from tiny_model import TINY_ARCHITECTURE, TINY_CHARACTERS

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.harness import HarnessSpec, build_harness
from asyncrl.agents.verifiers import load_taskset
from asyncrl.config import ScratchConfig
from asyncrl.engines.own_server import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.http import Caller
from asyncrl.messages.engine_calls import GenerateRequest, GenerateResponse
from asyncrl.messages.records import Trajectory, VersionSpan
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.verifiers_task import VerifiersTask
from asyncrl.trainer.model.scratch import ScratchSpec, make_scratch_model

pytestmark = pytest.mark.slow

ENVIRONMENT = "guessing_env_for_test"
NUM_TURNS, TURN_TOKENS = 5, 2
ARGS: dict[str, Any] = {"agent": {"runtime": {"type": "subprocess"}, "max_turns": NUM_TURNS}}


class ToldEngine(EngineServer):
    """The client of an engine server, which keeps what was asked and answered, and publishes new weights
    before its third request.
    """

    def __init__(self, caller: Caller, model_dir: Path, folder: Path) -> None:
        super().__init__(caller)
        self._model_dir, self._folder = model_dir, folder
        self.answers: list[tuple[GenerateRequest, GenerateResponse]] = []

    async def generate_segment(self, request: GenerateRequest, **kwargs: Any) -> GenerateResponse:
        if len(self.answers) == 2:
            weights = {name: weight * 1.1 for name, weight in weights_of(self._model_dir).items()}
            staged = staging_request(weights, 1, self._folder)
            await self.commit(1, await self.prepare(ExportResponse(**staged.model_dump())), "abort")
        answer = await super().generate_segment(request, **kwargs)
        self.answers.append((request, answer))
        return answer


def make_model_of_digits(folder: Path) -> Path:
    """A tiny model that says digits alone: each hidden state has a large first element, which the logits of
    all other tokens fall with.
    """
    scratch = ScratchConfig(
        architecture={**TINY_ARCHITECTURE, "tie_word_embeddings": False}, characters=TINY_CHARACTERS + "GW"
    )
    make_scratch_model(ScratchSpec(out=folder, seed=0, scratch=scratch))
    tokenizer, path = HFChatTokenizer(folder), folder / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][:, 0] = 30.0
    is_digit = torch.zeros(tokenizer.vocab_size, dtype=torch.bool)
    is_digit[list(tokenizer.encode("0123456789"))] = True
    weights["lm_head.weight"][:, 0] = torch.where(is_digit, 0.0, -10.0)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@asynccontextmanager
async def told_engine(url: str, model_dir: Path, folder: Path) -> AsyncIterator[ToldEngine]:
    caller = Caller("engine-0", url, SECRET)
    try:
        engine = ToldEngine(caller, model_dir, folder)
        await engine.health(timeout_s=120)
        yield engine
    finally:
        await caller.aclose()


async def play(engine: ToldEngine, tokenizer: HFChatTokenizer) -> tuple[Outcome, Trajectory]:
    """The environment's task 3, and the one branch of it."""
    rules = {"vocab_size": tokenizer.vocab_size, "max_tokens": TURN_TOKENS, "max_prompt_tokens": 400}
    pool = EnginePool([engine], slots=4)
    async with gateway_world(pool, tokenizer=tokenizer, tool_format="none", max_length=500, **rules) as world:
        harness = build_harness(HarnessSpec(verifiers=ENVIRONMENT, args=ARGS))
        item = VerifiersTask(load_taskset(ENVIRONMENT, ARGS), size=10).prompt(3)
        session = Session(f"{world.url}/v1", world.session.key, "policy")
        outcome = await harness.run(Task("0/3", tuple(item.content), info=item.info), session)  # type: ignore[arg-type]
        (branch,) = world.session.rollout(0, outcome, outcome.reward or 0.0)
    return outcome, branch


def test_the_branch_of_an_environment_of_many_turns_holds_what_the_engine_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    model_dir = make_model_of_digits(tmp_path / "model")
    tokenizer = HFChatTokenizer(model_dir)

    async def story(url: str) -> tuple[Outcome, Trajectory, list[tuple[GenerateRequest, GenerateResponse]]]:
        async with told_engine(url, model_dir, tmp_path) as engine:
            return *await play(engine, tokenizer), engine.answers

    spec = {"name": "engine-0", "model_path": str(model_dir), "slots": 4, "max_length": 500}
    with engine_process("embedded", spec, tmp_path / "engine") as process:
        outcome, branch, answers = asyncio.run(story(process.url))

    assert outcome == Outcome(0.0, {"reward/found": 0.0, "guesses": 5.0}), "no guess of two digits is right"
    assert len(answers) == NUM_TURNS
    loss_mask, logprobs = np.zeros_like(branch.loss_mask), np.zeros_like(branch.behaviour_logprobs)
    spans = []
    for request, answer in answers:
        start, end = len(request.prompt_ids), len(request.prompt_ids) + TURN_TOKENS
        assert branch.token_ids[:end].tolist() == [*request.prompt_ids, *answer.token_ids]
        loss_mask[start:end], logprobs[start:end] = True, answer.logprobs
        spans += [
            VersionSpan(start + span.start, start + span.end, span.version, engine=0)
            for span in answer.version_spans
        ]
    assert np.array_equal(branch.loss_mask, loss_mask)
    assert branch.behaviour_logprobs.dtype == np.float32
    assert np.array_equal(branch.behaviour_logprobs, logprobs), "bit for bit"
    assert (logprobs[loss_mask] < 0).all()
    assert branch.version_spans == tuple(spans)
    assert [span.version for span in spans] == [0, 0, 1, 1, 1], "published between the turns of one rollout"
    said = tokenizer.decode(branch.token_ids[~loss_mask].tolist())
    assert said.startswith("Guess.Which number from 0 to 9?")
    assert said.count("higher") + said.count("lower") == NUM_TURNS - 1
