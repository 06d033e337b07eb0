"""One rollout with its limits and retries: the one boundary where a failure becomes data. Knows no group, no buffer."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.errors import PromptUnusable, RolloutFailure, RolloutTimeout, RoomError
from asyncrl.limits import TimeLimit
from asyncrl.types import GroupId, PartialCompletion, Prompt, Rollout, RolloutJournal

log = logging.getLogger(__name__)


class RolloutClock:
    """The one budget of seconds that a rollout has for all its attempts, None for no limit.

    Life:       for each attempt: start() and entering what it returns -> hold() -> resume(): runs on with what is left; as often as
                it pleases -> end(). Outside of an attempt, and once the time is up, hold and resume mean nothing.
    Waits:      whoever holds it may wait for ever: nothing here ends that wait. The watchdog owns it, which tells of a run in
                which nothing moves and names its oldest rollouts.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._left_s = timeout_s
        self._limit: TimeLimit | None = None

    def __repr__(self) -> str:
        return f"<RolloutClock {self._left_s} s left{'' if self._limit is None else f' until {self._limit.when()}'}>"

    @property
    def left_s(self) -> float | None:
        """What the attempts to come have, or this one if it holds the clock; None for no limit."""
        return self._left_s

    def start(self) -> TimeLimit:
        """The limit of one attempt, to be entered at once."""
        self._limit = TimeLimit(self._left_s)
        return self._limit

    def hold(self) -> None:
        """Stand still."""
        if self._limit is not None and not self._limit.expired():
            self._count()
            self._limit.reschedule(None)

    def resume(self) -> None:
        """Run on, if it was held."""
        if self._limit is not None and not self._limit.expired() and self._limit.when() is None and self._left_s is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left_s)

    def end(self) -> None:
        """The attempt has ended."""
        self._count()
        self._limit = None

    def _count(self) -> None:
        if self._limit is not None and self._limit.left_s is not None:
            self._left_s = 0.0 if self._limit.expired() else self._limit.left_s


@dataclass(frozen=True, slots=True)
class RolloutAttempt:
    """One try at one prompt. `attempt` counts from 0; `stopped_sampling` tells that it needs no engine slot any more.

    `partial`: what a killed run had sampled in this very attempt; `on_segment` is told (turn, all that was sampled of it so far).
    """

    group_id: GroupId
    prompt: Prompt
    sample_index: int
    attempt: int
    stopped_sampling: Callable[[], None]
    partial: PartialCompletion | None = None
    on_segment: Callable[[int, PartialCompletion], None] = lambda turn, partial: None
    clock: RolloutClock = field(default_factory=lambda: RolloutClock(None))

    @property
    def rollout_id(self) -> str:
        """`g17/r3`, the same for all attempts."""
        return f"g{self.group_id}/r{self.sample_index}"

    def request_id(self, turn: int) -> str:
        """Unique within the run: a retry may be sent before the server has seen that the first try is gone."""
        return f"{self.rollout_id}/t{turn}/a{self.attempt}"

    def hold_clock(self) -> None:
        """What follows does not count towards rollout.timeout_s: the attempt waits for somebody who runs it."""
        self.clock.hold()

    def resume_clock(self) -> None:
        """Somebody runs it: what is left of rollout.timeout_s runs on. May come from another task, twice, and late."""
        self.clock.resume()


class Generator(Protocol):
    """A way to run a rollout: single_turn and its like."""

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        """The finished rollout, all its branches. Raises RolloutFailure (data), or RoomError (ends the run)."""
        ...


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """A rollout that failed at each of its `num_attempts`; `failure` is the last one. 0: its prompt can never be sampled."""

    sample_index: int
    num_attempts: int
    failure: RolloutFailure

    @property
    def how(self) -> str:
        """In words that its failure follows."""
        return f"failed {self.num_attempts} times, last" if self.num_attempts else "cannot be sampled"


class RolloutRunner:
    """Runs rollouts within rollout.timeout_s each, and tries failed ones again in what is left of it.

    Waits:      run sleeps in wait_slot, then in the generator, at most timeout_s for all attempts together (None = no limit). While
                the generator holds the clock, it has no limit of its own: see RolloutClock.
    Invariant:  run returns data for whatever goes wrong in a rollout; RoomError and CancelledError alone pass.
    """

    def __init__(self, generator: Generator, *, timeout_s: float | None, retries: int) -> None:
        self._generator = generator
        self.timeout_s, self.retries = timeout_s, retries
        self.num_retried = 0
        """Attempts after a failed one, so far."""
        self.num_timeouts = 0
        """Rollouts that ran past timeout_s, so far."""

    def __repr__(self) -> str:
        return f"<RolloutRunner timeout {self.timeout_s} s, {self.retries} retries, {self.num_retried} retried>"

    async def run(
        self,
        group_id: GroupId,
        prompt: Prompt,
        sample_index: int,
        *,
        wait_slot: Callable[[], Awaitable[None]],
        stopped_sampling: Callable[[], None],
        journal: RolloutJournal,
        resumed: tuple[int, PartialCompletion] | None = None,
    ) -> Rollout | FailedRollout:
        """One rollout, retries included. Each attempt begins once `wait_slot` returns.

        `resumed`: the attempt that a killed run was in, counted from 0, and what it had sampled; the budget begins in full.
        """
        number, partial = resumed or (0, None)
        clock = RolloutClock(self.timeout_s)
        while True:
            tell = functools.partial(journal.segment_nowait, group_id, sample_index, number)
            attempt = RolloutAttempt(group_id, prompt, sample_index, number, stopped_sampling, partial, tell, clock)
            partial = None
            try:
                await wait_slot()
                outcome = await self._run_attempt(attempt)
            finally:
                stopped_sampling()
            if not isinstance(outcome, RolloutFailure):
                return outcome
            log.warning("%s attempt %d of %d failed: %s", attempt.rollout_id, number + 1, self.retries + 1, outcome)
            if isinstance(outcome, PromptUnusable):
                return FailedRollout(sample_index, 0, outcome)
            if number >= self.retries or clock.left_s == 0.0:  # above it, if a killed run had more
                return FailedRollout(sample_index, number + 1, outcome)
            number += 1
            self.num_retried += 1

    async def _run_attempt(self, attempt: RolloutAttempt) -> Rollout | RolloutFailure:
        limit = attempt.clock.start()
        try:
            async with limit:
                rollout = await self._generator.run_attempt(attempt)
            check_rollout(rollout, attempt)
            return rollout
        except RoomError:
            raise
        except RolloutFailure as failure:
            return failure
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return self._timed_out(attempt)
            log.warning("%s broke", attempt.rollout_id, exc_info=True)
            broken = RolloutFailure(
                f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id}) raised {type(error).__name__}: {error}",
                rule="a rollout ends with its branches or a RolloutFailure",
                way_out="the controller's log has the traceback.",
            )
            broken.__cause__ = error
            return broken
        finally:
            attempt.clock.end()

    def _timed_out(self, attempt: RolloutAttempt) -> RolloutTimeout:
        self.num_timeouts += 1
        return RolloutTimeout(
            f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id}) is not finished after {self.timeout_s} s",
            rule=f"rollout.timeout_s={self.timeout_s} is the limit of all its attempts together; this was number {attempt.attempt + 1}",
            way_out="none needed for one; if rollout/failed keeps rising, raise rollout.timeout_s or lower rollout.max_tokens.",
        )


def check_rollout(rollout: Rollout, attempt: RolloutAttempt) -> None:
    """Raises RolloutFailure unless these are the branches of one rollout, each with a sampled token: a generator may be anybody's."""
    places = [(branch.sample_index, branch.branch) for branch in rollout]
    if not rollout or places != [(attempt.sample_index, number) for number in range(len(rollout))]:
        what = f"has branches (sample_index, branch) {places}"
    elif any(branch.reward != rollout[0].reward for branch in rollout):
        what = f"has branches with rewards {[branch.reward for branch in rollout]}"
    elif any(bool(branch.credits) != bool(rollout[0].credits) for branch in rollout):
        what = "has branches with credits and branches without"
    elif any(not branch.version_spans for branch in rollout):
        what = "has a branch without a sampled token"
    else:
        return
    raise RolloutFailure(
        f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id}) {what}",
        rule="a rollout has at least one branch; they are numbered from 0, have its one reward and tokens of their own, "
        "and all of them have credits or none",
        way_out="this is a fault of the generator: please report it.",
    )
