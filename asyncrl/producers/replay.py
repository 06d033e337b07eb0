"""Gives recorded rollouts in place of sampled ones, where the staleness bound allows it. Knows no file and no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.producers.rollout import Generator, RolloutAttempt
from asyncrl.types import GroupId, Rollout

RECORDED_VERSION = 0
"""Recorded rollouts are of the initial weights."""


class Replay:
    """A Generator over another one, which samples whatever is not recorded.

    Invariant:  no token is older than its group's start_version: a recorded rollout is taken only in a group that was admitted while
                the recorded version was served, so that the staleness rule holds for it as for any other.
    """

    def __init__(
        self, generator: Generator, recorded: Mapping[str, tuple[Rollout, ...]], *, start_version: Callable[[GroupId], int | None]
    ) -> None:
        """`recorded`: by prompt_id the rollouts of samples 0, 1, ... `start_version`: of a group that runs."""
        self._generator, self._recorded, self._start_version = generator, recorded, start_version
        self.num_taken = 0
        """Recorded rollouts that were taken, so far."""

    def __repr__(self) -> str:
        return f"<Replay {self.num_taken} of {sum(map(len, self._recorded.values()))} taken, over {self._generator!r}>"

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        """The recorded rollout, or one that is sampled; raises what the other generator raises."""
        found = self._find(attempt)
        if found is None:
            return await self._generator.run_attempt(attempt)
        attempt.stopped_sampling()
        self.num_taken += 1
        return found

    def _find(self, attempt: RolloutAttempt) -> Rollout | None:
        recorded = self._recorded.get(attempt.prompt.prompt_id, ())
        is_first_try = attempt.attempt == 0 and attempt.partial is None
        if attempt.sample_index >= len(recorded) or not is_first_try or self._start_version(attempt.group_id) != RECORDED_VERSION:
            return None
        return recorded[attempt.sample_index]
