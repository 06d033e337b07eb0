"""One rollout with its limits and retries: the one boundary where a failure becomes data. Knows no group, no buffer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from asyncrl.errors import RolloutFailure, RolloutTimeout, RoomError
from asyncrl.types import GroupId, Prompt, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutAttempt:
    """One try at one prompt. `attempt` counts from 0; `stopped_sampling` tells that it needs no engine slot any more."""

    group_id: GroupId
    prompt: Prompt
    sample_index: int
    attempt: int
    stopped_sampling: Callable[[], None]

    @property
    def rollout_id(self) -> str:
        """`g17/r3`, the same for all attempts."""
        return f"g{self.group_id}/r{self.sample_index}"

    def request_id(self, turn: int) -> str:
        """Unique within the run: a retry may be sent before the server has seen that the first try is gone."""
        return f"{self.rollout_id}/t{turn}/a{self.attempt}"


class Generator(Protocol):
    """A way to run a rollout: single_turn and its like."""

    async def run_attempt(self, attempt: RolloutAttempt) -> Trajectory:
        """The finished rollout. Raises RolloutFailure (data), or RoomError (ends the run)."""
        ...


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """A rollout that failed at each of its `num_attempts`; `failure` is the last one."""

    sample_index: int
    num_attempts: int
    failure: RolloutFailure


class RolloutRunner:
    """Runs rollouts within rollout.timeout_s each, and tries failed ones again.

    Waits:      run sleeps in the generator, at most timeout_s an attempt (None = no limit).
    Invariant:  run returns data for whatever goes wrong in a rollout; RoomError and CancelledError alone pass.
    """

    def __init__(self, generator: Generator, *, timeout_s: float | None, retries: int) -> None:
        self._generator = generator
        self.timeout_s, self.retries = timeout_s, retries
        self.num_retried = 0
        """Attempts after a failed one, so far."""
        self.num_timeouts = 0
        """Attempts that ran past timeout_s, so far."""

    def __repr__(self) -> str:
        return f"<RolloutRunner timeout {self.timeout_s} s, {self.retries} retries, {self.num_retried} retried>"

    async def run(
        self,
        group_id: GroupId,
        prompt: Prompt,
        sample_index: int,
        *,
        started_sampling: Callable[[], None],
        stopped_sampling: Callable[[], None],
    ) -> Trajectory | FailedRollout:
        """One rollout, retries included. `started_sampling` is called before each attempt."""
        number = 0
        while True:
            attempt = RolloutAttempt(group_id, prompt, sample_index, number, stopped_sampling)
            started_sampling()
            try:
                outcome = await self._run_attempt(attempt)
            finally:
                stopped_sampling()
            if isinstance(outcome, Trajectory):
                return outcome
            log.warning("%s attempt %d of %d failed: %s", attempt.rollout_id, number + 1, self.retries + 1, outcome)
            if number == self.retries:
                return FailedRollout(sample_index, number + 1, outcome)
            number += 1
            self.num_retried += 1

    async def _run_attempt(self, attempt: RolloutAttempt) -> Trajectory | RolloutFailure:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                return await self._generator.run_attempt(attempt)
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
                rule="a rollout ends with a trajectory or a RolloutFailure",
                way_out="the controller's log has the traceback.",
            )
            broken.__cause__ = error
            return broken

    def _timed_out(self, attempt: RolloutAttempt) -> RolloutTimeout:
        self.num_timeouts += 1
        return RolloutTimeout(
            f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id}) is not finished after {self.timeout_s} s",
            rule=f"rollout.timeout_s={self.timeout_s} is the limit of an attempt, of which a rollout has {self.retries + 1}",
            way_out="none needed for one; if rollout/failed keeps rising, raise rollout.timeout_s or lower rollout.max_tokens.",
        )
