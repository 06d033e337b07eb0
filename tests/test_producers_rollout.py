"""Failures of a rollout become data, and every token is counted once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, FakeScorer
from journal_cases import admit, make_partial, make_prompt, with_journal
from producer_cases import HARNESS_PROMPT, FakeHost, run_harness
from rollout_cases import scored, single_turn, virtual
from token_cases import completion_of

from asyncrl.base.errors import (
    EngineError,
    RequestRefused,
    RewardFailure,
    RolloutFailure,
    RolloutTimeout,
)
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import (
    Completion,
    GroupId,
    Outcome,
    Prompt,
    Rollout,
    VersionSpan,
    Work,
)
from asyncrl.messages.sampling import SamplingParameters, SamplingRequest
from asyncrl.rollouts.rollout import (
    FailedRollout,
    RolloutAttempt,
    RolloutRunner,
    Score,
    Slots,
    derive_seed,
)

PROMPT = Prompt("p7", ({"role": "user", "content": "hello"},))


class Scripted:
    """A generator that plays one function an attempt."""

    def __init__(self, *attempts: Callable[[], Awaitable[Rollout]]) -> None:
        self._attempts = iter(attempts)

    async def sample(self, attempt: RolloutAttempt) -> Score:
        return scored(await next(self._attempts)())


async def good() -> Rollout:
    score = await single_turn(FakeEngine()).sample(
        RolloutAttempt("g0/r1", GroupId(0), PROMPT, 1)
    )
    return await score()


def failing(error: Exception) -> Callable[[], Awaitable[Rollout]]:
    async def attempt() -> Rollout:
        raise error

    return attempt


async def hanging() -> Rollout:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def run(runner: RolloutRunner) -> Rollout | FailedRollout:
    return await runner.run(
        RolloutAttempt("g4/r1", GroupId(4), PROMPT, 1), slots=Slots(1), order=()
    )


@virtual
async def test_single_turn_records_every_token() -> None:
    engine = FakeEngine(tokens=lambda _: 3)
    scorer = FakeScorer(lambda _, text: 0.5 if text == "zzz" else 0.0, latency_s=5.0)
    engine.policy_version = 9
    generator = single_turn(
        engine, scorer, run_seed=3, sampling=SamplingParameters(temperature=0.7)
    )
    score = await generator.sample(RolloutAttempt("g4/r1", GroupId(4), PROMPT, 1))
    assert asyncio.get_running_loop().time() == 1.0, (
        "a slow reward is not part of sampling"
    )
    (trajectory,) = await score()
    assert trajectory.token_ids.tolist() == [*map(ord, "hello"), *map(ord, "zzz")]
    assert trajectory.loss_mask.tolist() == [False] * 5 + [True] * 3
    assert trajectory.tokens.behaviour_logprobs.tolist() == [0.0] * 5 + [-1.0] * 3
    assert trajectory.tokens.spans == (VersionSpan(5, 8, 9),)
    assert (trajectory.reward, trajectory.sample_index, trajectory.is_truncated) == (
        0.5,
        1,
        False,
    )
    (request,) = engine.requests
    assert (request.request_id, request.route_key, request.temperature) == (
        "g4/r1/t0/a0",
        "g4",
        0.7,
    )
    assert request.seed == derive_seed(3, "p7", 1, 0)


@pytest.mark.parametrize(
    "error",
    [
        RewardFailure("no number"),
        RequestRefused("too long"),
        KeyError("turn"),
        TimeoutError("a tool's own"),
    ],
)
@virtual
async def test_rollout_errors_are_data_after_the_last_retry(error: Exception) -> None:
    runner = RolloutRunner(Scripted(*[failing(error)] * 3), timeout_s=10.0, retries=2)
    outcome = await run(runner)
    assert isinstance(outcome, FailedRollout)
    assert (outcome.sample_index, outcome.num_attempts, runner.num_retried) == (1, 3, 2)
    assert str(error) in str(outcome.failure)


class Spends(FakeEngine):
    """Samples 2 tokens, is interrupted, and samples one more; then fails, hangs or
    returns all.
    """

    def __init__(self, *ends: str) -> None:
        super().__init__()
        self._ends, self.spent = iter(ends), 0
        self.hangs = asyncio.Event()

    async def generate(self, request: SamplingRequest, **options: Any) -> Completion:
        before = options["partial"] or completion_of(())
        options["on_spent"](2)
        tokens = before.token_ids + (98, 99)
        prompt, spans = request.prompt_ids, [VersionSpan(0, len(tokens), 5)]
        kept = completion_of(tokens, spans=spans, num_interruptions=1, prompt=prompt)
        options["on_segment"](kept)
        options["on_spent"](1)
        self.spent += 3
        match next(self._ends):
            case "refused":
                raise RequestRefused("no")
            case "hangs":
                self.hangs.set()
                await asyncio.Event().wait()
        tokens += (97,)
        spans = [VersionSpan(0, len(tokens), 5)]
        return completion_of(
            tokens, spans=spans, finish="stop", num_interruptions=1, prompt=prompt
        )


@pytest.mark.parametrize(
    ("ends", "rewards"),
    [
        (["whole"], [1.0]),
        (["refused", "whole"], [1.0]),
        (["whole", "refused", "whole"], ["bad", 1.0]),
        (["whole", "whole", "whole"], ["bad", "bad", "bad"]),
        (["refused", "refused", "refused"], []),
        (["whole", "hangs"], ["bad"]),
        (["hangs"], []),
    ],
)
@pytest.mark.parametrize("resumed", [None, 4])
def test_the_journal_counts_every_sampled_token_once(
    ends: list[str], rewards: list[Any], resumed: int | None, tmp_path: Path
) -> None:
    async def story(journal: Journal) -> None:
        engine, left = Spends(*ends), iter(rewards)
        partial = None if resumed is None else make_partial(resumed)
        group_id, prompt = GroupId(0), make_prompt(0)
        admit(journal, 0)
        if partial is not None:
            journal.add_segment_nowait(group_id, 1, 0, partial)
        runner = RolloutRunner(
            single_turn(
                engine, FakeScorer(lambda *_: next(left)), max_prompt_tokens=50
            ),
            timeout_s=None,
            retries=2,
        )
        running = asyncio.ensure_future(
            runner.run(
                RolloutAttempt("g0/r1", group_id, prompt, 1, 0, partial, journal),
                slots=Slots(1),
                order=(),
            )
        )
        if ends[-1] == "hangs":  # the group is dropped while it runs
            await engine.hangs.wait()
            running.cancel()
            journal.end_group_nowait(group_id, "requeued", "dropped")
            await asyncio.wait({running})
        elif isinstance(outcome := await running, FailedRollout):
            journal.add_failure_nowait(group_id, 1, outcome.num_attempts, "no")
        else:
            journal.add_rollout_nowait(group_id, outcome)
        state = await journal.read_resume(0)
        assert state.counted["tokens/generated"] == engine.spent + (resumed or 0)

    with_journal(tmp_path / "journal.sqlite", story)


@virtual
async def test_a_broken_part_and_cancellation_pass_the_boundary() -> None:
    broken = Scripted(failing(EngineError("engine-0", "died")))
    with pytest.raises(EngineError, match="engine-0: died"):
        await run(RolloutRunner(broken, timeout_s=2.5, retries=2))
    runner = RolloutRunner(Scripted(hanging, good), timeout_s=100.0, retries=2)
    task = asyncio.create_task(run(runner))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (runner.num_retried, runner.started_s) == (0, {})


def test_a_seed_depends_on_who_asks_and_on_nothing_else() -> None:
    seeds = {
        derive_seed(*who)
        for who in itertools.product((0, 1), ("p1", "p11"), *[(0, 1)] * 3)
    }
    assert len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)
    one = derive_seed(0, "p1", 0, 0, attempt=0)
    assert one == derive_seed(0, "p1", 0, 0) == 4802785385995688842, (
        "a run repeats on another machine"
    )


# ---- rollouts of harnesses


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [
        (Outcome(metrics={"turns": 2.0}), 0.25),
        (Outcome(turn_rewards={"chatcmpl-0": 1.0, "chatcmpl-1": 0.0}), 0.5),
        (Outcome(2.0, turn_rewards={"chatcmpl-0": 1.0}), 2.0),
        (Outcome(0.0), 0.0),
    ],
)
def test_session_ends_before_the_task_scores_it(
    outcome: Outcome, reward: float
) -> None:
    host = FakeHost(outcome)
    (trajectory,) = run_harness(host)
    assert (trajectory.sample_index, trajectory.reward, trajectory.metrics) == (
        2,
        reward,
        outcome.metrics,
    )
    scored = ["scored 'the answer'"] if reward == 0.25 else []
    assert (
        host.log[:3]
        == ["ended: its harness has finished", "slot is free", *scored, "slot is free"][
            :3
        ]
    )
    assert host.works == [Work("g4/r2", HARNESS_PROMPT, 2, 0, "key-0", 10.0)]


def test_evaluation_asks_for_the_same_task_in_each_attempt() -> None:
    host = FakeHost(RolloutFailure("lost"))
    run_harness(host, retries=1, task_seed=lambda prompt, sample: 70 + sample)
    assert [(work.attempt, work.seed) for work in host.works] == [(0, 72), (1, 72)]


@pytest.mark.parametrize("by_turn", [False, True])
def test_rollouts_have_credits_by_turn_if_the_run_wants_them(by_turn: bool) -> None:
    host = FakeHost(Outcome(1.0))
    run_harness(host, by_turn=by_turn)
    assert host.by_turn == by_turn


def test_each_attempt_has_its_own_session() -> None:
    host = FakeHost(RolloutFailure("worker w is gone"))
    failed = run_harness(host, retries=1)
    assert (failed.num_attempts, str(failed.failure)) == (2, "worker w is gone.")
    assert failed.seen()[0].sample_index == 2, (
        "what its calls have sampled can be shown"
    )
    assert host.log.count("ended: the rollout failed: worker w is gone") == 2
    assert [(work.key, work.attempt) for work in host.works] == [
        ("key-0", 0),
        ("key-1", 1),
    ]


FAILED = RolloutFailure("exit code 1")
FULL = "This prompt has 9 tokens"


@pytest.mark.parametrize(
    ("outcome", "has_score", "reward"),
    [
        (FAILED, True, 0.25),
        (FAILED, False, 0.0),
        (Outcome(0.5), True, 0.5),
        (Outcome(), True, 0.25),
    ],
)
def test_rollout_at_a_limit_is_kept(
    outcome: Any, has_score: bool, reward: float
) -> None:
    host = FakeHost(outcome, overflow=FULL)
    host.has_score = has_score
    (trajectory,) = run_harness(host)
    assert trajectory.reward == reward
    nothing = run_harness(FakeHost(FAILED, None, overflow=FULL))
    assert "exit code 1" in str(nothing.failure), "there is nothing to keep"


def test_queue_time_does_not_count() -> None:
    (trajectory,) = run_harness(FakeHost(Outcome(1.0), queued_s=1000.0, run_s=9.0))
    assert trajectory.reward == 1.0
    host = FakeHost(Outcome(1.0), queued_s=1000.0, run_s=11.0)
    assert isinstance(run_harness(host).failure, RolloutTimeout)
    assert "rollout.timeout_s" in host.log[0]
