"""One evaluation: its samples, failures and metrics."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from fakes import FakeEngine, FakeScorer
from rollout_cases import single_turn, virtual

from asyncrl.base.errors import EngineError
from asyncrl.config import EvalConfig
from asyncrl.messages.records import Prompt
from asyncrl.rollouts.evaluation import EvalResult, HeldOut, Sample
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.tasks.sources import build_task, read_eval_task


def prompt(number: int, text: str = "") -> Prompt:
    return Prompt(f"0/{number}", ({"role": "user", "content": text or f"p{number}"},))


def make_held_out(engine: Any, scorer: Any = None, prompts: Any = None, **values: Any) -> HeldOut:
    generator = single_turn(engine, scorer, run_seed=5, max_tokens=4, max_prompt_tokens=8, temperature=0.5)
    given = prompts or [prompt(number) for number in range(4)]
    return HeldOut(generator=generator, prompts=given, samples=2, slots=3, **values)


@virtual
async def test_every_prompt_is_sampled_within_the_slots() -> None:
    engine = FakeEngine()
    engine.policy_version = 7
    held_out = make_held_out(engine)
    result = await held_out.evaluate(7)
    assert asyncio.get_running_loop().time() == 3.0, "8 samples, 3 at once, 1 s each"
    assert engine.peak_running == 3
    places = [(f"0/{p}", s) for p in range(4) for s in range(2)]
    assert [(request.request_id, request.seed) for request in engine.requests] == [
        (f"eval-v7/{name}/s{s}/t0/a0", derive_seed(5, name, s, turn=0)) for name, s in places
    ]
    assert {(request.temperature, request.max_tokens) for request in engine.requests} == {(0.5, 4)}
    assert [sample.prompt_id for sample in result.samples] == [name for name, _ in places]


@virtual
async def test_samples_that_fail_are_counted_and_cost_nothing_else() -> None:
    def reward(item: Prompt, _: str) -> float | str:
        if item.prompt_id == "0/3":
            raise KeyError("answer")
        return "no" if item.prompt_id == "0/1" else 1.0

    engine = FakeEngine(latency_s=lambda request: 99.0 if "0/0/s1" in request.request_id else 1.0)
    prompts = [prompt(0), prompt(1), prompt(2, "far too long"), prompt(3), prompt(4)]
    result = await make_held_out(engine, FakeScorer(reward), prompts, rollout_timeout_s=50.0).evaluate(0)
    assert [sample.prompt_id for sample in result.samples] == ["0/0", "0/4", "0/4"]
    assert result.num_failed == 7
    assert "eval-v0/0/3/s1 (prompt 0/3) raised KeyError: 'answer'" in result.last_failure
    metrics = result.metrics()
    assert (metrics["eval/failed"], metrics["eval/reward_mean"]) == (7, 1.0)


@virtual
async def test_a_token_of_another_version_is_an_error() -> None:
    engine = FakeEngine()
    engine.policy_version = 8
    said = r"prompt 0/0 has tokens of policy_version 8; every token .* at policy_version 7"
    with pytest.raises(EngineError, match=said):
        await make_held_out(engine).evaluate(7)


def test_the_standard_error_counts_prompts_and_not_samples() -> None:
    rewards = {"a": [0.0, 1.0], "b": [1.0, 1.0], "c": [0.0]}
    samples = [Sample(name, reward, 3, reward > 0) for name, found in rewards.items() for reward in found]
    metrics = EvalResult(4, samples, num_failed=1, seconds=2.5, num_skipped=3).metrics()
    assert metrics["eval/reward_mean"] == pytest.approx(0.5), "means 0.5, 1, 0"
    assert metrics["eval/standard_error"] == pytest.approx(0.5 / math.sqrt(3))
    assert metrics["eval/truncated_fraction"] == pytest.approx(0.6)
    counts = [metrics[f"eval/{name}"] for name in ("version", "length_mean", "failed", "seconds", "skipped")]
    assert counts == [4, 3, 1, 2.5, 3]
    assert "eval/standard_error" not in EvalResult(0, samples[:2]).metrics()


def test_eval_prompts_are_the_first_of_the_task() -> None:
    task = {"python": "asyncrl.tasks.toy:Letters", "size": 20}
    few, all_of_them = (EvalConfig.model_validate({"task": task, "num_prompts": num}) for num in (5, 20))
    eval_task, prompts = read_eval_task(few)
    assert [prompt.prompt_id for prompt in prompts] == [f"0/{number}" for number in range(5)]
    assert prompts == read_eval_task(all_of_them)[1][:5]
    trained_on = build_task(few.task, 0)
    assert any(trained_on.prompt(number) != eval_task.prompt(number) for number in range(20))
