"""Rollouts that harnesses run: sessions, rewards and the clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rollout_cases import one_token

from asyncrl.base.errors import RolloutFailure, RolloutTimeout
from asyncrl.messages.records import GroupId, Outcome, Prompt, Rollout, Work
from asyncrl.messages.work import RolloutSession
from asyncrl.rollouts.rollout import HarnessGenerator, RolloutAttempt, RolloutRunner, Slots
from asyncrl.testing.virtual_time import run_virtual

PROMPT = Prompt("e0/3", ({"role": "user", "content": "hi"},), answer="7")


class FakeSession:
    reason = ""
    overflow: str | None = None
    num_spent = 1

    def __init__(self, key: str, log: list[str], text: str | None) -> None:
        self.key, self.log, self.text = key, log, text

    @property
    def num_completions(self) -> int:
        return int(self.text is not None)

    def end_nowait(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self.log.append("session ended")

    def while_open(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def last_text(self) -> str:
        return self.text or ""

    def rollout(self, sample_index: int, outcome: Outcome, reward: float) -> Rollout:
        if self.text is None:
            raise RolloutFailure("nothing was sampled")
        return (replace(one_token(sample_index, reward=reward), metrics=outcome.metrics),)


class FakeHost:
    def __init__(self, text: str | None = "the answer", *, overflow: str | None = None) -> None:
        self.has_score = self.shows_special = True
        self._overflow = overflow
        self.log: list[str] = []
        self.sessions: list[FakeSession] = []
        self.opened: list[tuple[str, dict[str, Any]]] = []
        self._text = text

    def open_nowait(self, rollout_id: str, **about: Any) -> RolloutSession:
        self.opened.append((rollout_id, about))
        self.sessions.append(FakeSession(f"key-{len(self.sessions)}", self.log, self._text))
        self.sessions[-1].overflow = self._overflow
        return self.sessions[-1]

    def of(self, prompt: Prompt) -> FakeHost:
        return self

    async def score(self, prompt: Prompt, completion: str) -> float:
        self.log.append(f"scored {completion!r}")
        return 0.25


class FakeQueue:
    """Its worker takes a work after `queued_s`, and `run_s` for it."""

    def __init__(self, outcome: Outcome | Exception, queued_s: float = 0.0, run_s: float = 0.0) -> None:
        self.works: list[Work] = []
        self._outcome, self._queued_s, self._run_s = outcome, queued_s, run_s

    async def run(self, work: Work, *, started: Callable[[], None]) -> Outcome:
        self.works.append(work)
        await asyncio.sleep(self._queued_s)
        started()
        await asyncio.sleep(self._run_s)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def run(host: FakeHost, queue: FakeQueue, *, retries: int = 0, **options: Any) -> Any:
    """What RolloutRunner makes of it: a Rollout, or a FailedRollout."""

    async def story() -> Any:
        generator = HarnessGenerator(host, queue, host, **options)
        runner = RolloutRunner(generator, timeout_s=10.0, retries=retries)

        class LoggingSlots(Slots):
            async def wait(self, name: str) -> None:
                host.log.append("started")

            def give_back_nowait(self, name: str) -> None:
                host.log.append("stopped")

        attempt = RolloutAttempt("g4/r2", GroupId(4), PROMPT, 2)
        return await runner.run(attempt, slots=LoggingSlots(1), order=())

    return run_virtual(story())


def test_session_ends_before_the_task_scores() -> None:
    host, queue = FakeHost(), FakeQueue(Outcome(metrics={"turns": 2.0}))
    (trajectory,) = run(host, queue)
    assert (trajectory.sample_index, trajectory.reward, trajectory.metrics) == (2, 0.25, {"turns": 2.0})
    order = ["started", "session ended", "stopped", "scored 'the answer'"]
    assert host.log[:4] == order, "the slot is free before the task scores the last text"
    assert queue.works == [Work("g4/r2", PROMPT, 2, 0, "key-0", 10.0)]
    about = {"prompt_id": "e0/3", "sample_index": 2, "attempt": 0, "route_key": "g4/r2"}
    about["shows_special"] = True
    assert host.opened == [("g4/r2", about)]


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [
        (Outcome(turn_rewards={"chatcmpl-0": 1.0, "chatcmpl-1": 0.0}), 0.5),
        (Outcome(branch_rewards={"chatcmpl-0": 0.75}), 0.75),
        (Outcome(2.0, turn_rewards={"chatcmpl-0": 1.0}), 2.0),
        (Outcome(0.0), 0.0),
    ],
)
def test_harness_reward_stands_or_the_mean_of_its_parts(outcome: Outcome, reward: float) -> None:
    host = FakeHost()
    (trajectory,) = run(host, FakeQueue(outcome))
    assert trajectory.reward == reward
    assert not any(line.startswith("scored") for line in host.log)


def test_each_attempt_has_its_own_session() -> None:
    host, queue = FakeHost(), FakeQueue(RolloutFailure("worker w is gone"))
    failed = run(host, queue, retries=1)
    assert (failed.num_attempts, str(failed.failure)) == (2, "worker w is gone.")
    assert failed.seen.rollout()[0].sample_index == 2, "what its calls have sampled can be shown"
    assert [session.reason for session in host.sessions] == ["the rollout failed: worker w is gone"] * 2
    assert [(work.key, work.attempt) for work in queue.works] == [("key-0", 0), ("key-1", 1)]


FAILED = RolloutFailure("exit code 1")
FULL = "This prompt has 9 tokens"


@pytest.mark.parametrize(
    ("outcome", "has_score", "reward"),
    [(FAILED, True, 0.25), (FAILED, False, 0.0), (Outcome(0.5), True, 0.5), (Outcome(), True, 0.25)],
)
def test_rollout_at_a_limit_is_kept_or_fails_by_config(outcome: Any, has_score: bool, reward: float) -> None:
    host = FakeHost(overflow=FULL)
    host.has_score = has_score
    (trajectory,) = run(host, FakeQueue(outcome))
    assert trajectory.reward == reward
    failed = run(FakeHost(overflow=FULL), FakeQueue(outcome), on_overflow="fail")
    assert ("exit code" if outcome is FAILED else FULL) in str(failed.failure)
    nothing = run(FakeHost(text=None, overflow=FULL), FakeQueue(FAILED))
    assert "exit code 1" in str(nothing.failure), "there is nothing to keep"


def test_queue_time_does_not_count() -> None:
    (trajectory,) = run(FakeHost(), FakeQueue(Outcome(1.0), queued_s=1000.0, run_s=9.0))
    assert trajectory.reward == 1.0
    host = FakeHost()
    failed = run(host, FakeQueue(Outcome(1.0), queued_s=1000.0, run_s=11.0))
    assert isinstance(failed.failure, RolloutTimeout)
    assert "rollout.timeout_s" in host.sessions[0].reason
