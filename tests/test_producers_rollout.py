"""The boundary where a failure becomes data."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from asyncrl.errors import EngineError, RequestRefused, RewardFailure, RolloutFailure, RolloutTimeout
from asyncrl.producers import FailedRollout, RolloutAttempt, RolloutRunner, SingleTurn, derive_seed
from asyncrl.testing.fakes import FakeEngine, FakeScorer, FakeTokenizer
from asyncrl.testing.virtual_time import run_virtual
from asyncrl.types import GroupId, Prompt, Trajectory, VersionSpan

PROMPT = Prompt("p7", ({"role": "user", "content": "hello"},))


def single_turn(engine: FakeEngine, scorer: FakeScorer | None = None, *, max_prompt_tokens: int = 8) -> SingleTurn:
    return SingleTurn(
        engine, FakeTokenizer(), scorer or FakeScorer(), run_seed=3, max_tokens=6, max_prompt_tokens=max_prompt_tokens, temperature=0.7
    )


class Scripted:
    """A generator that plays one function an attempt."""

    def __init__(self, *attempts: Callable[[], Awaitable[Trajectory]]) -> None:
        self._attempts = attempts
        self.seen: list[RolloutAttempt] = []

    async def run_attempt(self, attempt: RolloutAttempt) -> Trajectory:
        self.seen.append(attempt)
        return await self._attempts[len(self.seen) - 1]()


async def good() -> Trajectory:
    attempt = RolloutAttempt(GroupId(0), PROMPT, 1, 0, lambda: None)
    return await single_turn(FakeEngine()).run_attempt(attempt)


def failing(error: Exception) -> Callable[[], Awaitable[Trajectory]]:
    async def attempt() -> Trajectory:
        raise error

    return attempt


async def hanging() -> Trajectory:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def run(runner: RolloutRunner) -> Trajectory | FailedRollout:
    return await runner.run(GroupId(4), PROMPT, 1, started_sampling=lambda: None, stopped_sampling=lambda: None)


def test_single_turn_records_every_token_of_prompt_and_completion() -> None:
    async def story() -> None:
        engine, scorer = FakeEngine(tokens=lambda _: 3), FakeScorer(lambda _, text: 0.5 if text == "zzz" else 0.0)
        engine.policy_version = 9
        stopped: list[float] = []
        attempt = RolloutAttempt(GroupId(4), PROMPT, 1, 0, lambda: stopped.append(asyncio.get_running_loop().time()))
        trajectory = await single_turn(engine, scorer).run_attempt(attempt)
        assert trajectory.token_ids.tolist() == [*map(ord, "hello"), *map(ord, "zzz")]
        assert trajectory.loss_mask.tolist() == [False] * 5 + [True] * 3
        assert trajectory.behaviour_logprobs.tolist() == [0.0] * 5 + [-1.0] * 3
        assert trajectory.version_spans == (VersionSpan(5, 8, 9),)
        assert (trajectory.reward, trajectory.sample_index, trajectory.is_truncated) == (0.5, 1, False)
        assert stopped == [1.0]
        request = engine.requests[0]
        assert (request.request_id, request.route_key, request.temperature) == ("g4/r1/t0/a0", "g4", 0.7)
        assert request.seed == derive_seed(3, "p7", 1, 0)

    run_virtual(story())


def test_a_completion_that_used_its_budget_is_truncated() -> None:
    async def story() -> None:
        trajectory = await single_turn(FakeEngine(tokens=lambda _: 6)).run_attempt(RolloutAttempt(GroupId(0), PROMPT, 0, 0, lambda: None))
        assert trajectory.is_truncated

    run_virtual(story())


def test_a_prompt_that_is_too_long_fails_with_the_numbers_and_is_never_cut() -> None:
    async def story() -> None:
        engine = FakeEngine()
        outcome = await run(RolloutRunner(single_turn(engine, max_prompt_tokens=4), timeout_s=1.0, retries=0))
        assert isinstance(outcome, FailedRollout)
        assert "p7 has 5 tokens; a prompt has 1 to rollout.max_prompt_tokens=4" in str(outcome.failure)
        assert not engine.requests

    run_virtual(story())


def test_a_hung_attempt_times_out_and_the_next_one_counts() -> None:
    async def story() -> None:
        generator = Scripted(hanging, good)
        runner = RolloutRunner(generator, timeout_s=10.0, retries=2)
        outcome = await run(runner)
        assert isinstance(outcome, Trajectory)
        assert asyncio.get_running_loop().time() == 11.0
        assert (runner.num_retried, runner.num_timeouts) == (1, 1)
        assert [attempt.attempt for attempt in generator.seen] == [0, 1]

    run_virtual(story())


@pytest.mark.parametrize("error", [RewardFailure("no number"), RequestRefused("too long"), RolloutFailure("bad"), KeyError("turn")])
def test_whatever_goes_wrong_in_a_rollout_is_data_after_the_last_retry(error: Exception) -> None:
    async def story() -> None:
        runner = RolloutRunner(Scripted(*[failing(error)] * 3), timeout_s=10.0, retries=2)
        outcome = await run(runner)
        assert isinstance(outcome, FailedRollout)
        assert (outcome.sample_index, outcome.num_attempts, runner.num_retried) == (1, 3, 2)
        assert str(error) in str(outcome.failure)

    run_virtual(story())


def test_a_timeout_says_which_rollout_and_which_limit() -> None:
    async def story() -> None:
        outcome = await run(RolloutRunner(Scripted(hanging), timeout_s=2.5, retries=0))
        assert isinstance(outcome, FailedRollout)
        assert isinstance(outcome.failure, RolloutTimeout)
        assert "g4/r1 (prompt p7) is not finished after 2.5 s; rollout.timeout_s=2.5" in str(outcome.failure)

    run_virtual(story())


def test_a_timeout_error_of_the_generators_own_is_not_the_rollouts_limit() -> None:
    async def story() -> None:
        outcome = await run(RolloutRunner(Scripted(failing(TimeoutError("a tool"))), timeout_s=2.5, retries=0))
        assert isinstance(outcome, FailedRollout)
        assert "raised TimeoutError: a tool" in str(outcome.failure)

    run_virtual(story())


def test_a_broken_room_passes_the_boundary() -> None:
    async def story() -> None:
        with pytest.raises(EngineError, match="engine-0: died"):
            await run(RolloutRunner(Scripted(failing(EngineError("engine-0", "died"))), timeout_s=2.5, retries=2))

    run_virtual(story())


def test_cancellation_passes_the_boundary() -> None:
    async def story() -> None:
        runner = RolloutRunner(Scripted(hanging, good), timeout_s=100.0, retries=2)
        task = asyncio.create_task(run(runner))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runner.num_retried == 0

    run_virtual(story())


def test_a_seed_depends_on_who_asks_and_on_nothing_else() -> None:
    seeds = {derive_seed(run, prompt, sample, turn, attempt) for run in (0, 1) for prompt in ("p1", "p11") for sample in (0, 1)
             for turn in (0, 1) for attempt in (0, 1)}  # fmt: skip
    assert len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "p1", 0, 0, attempt=0) == derive_seed(0, "p1", 0, 0) == 4802785385995688842, "a run repeats on another machine"
