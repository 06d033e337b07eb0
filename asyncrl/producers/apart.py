"""Attempts that belong to no group: those of an evaluation. What they come to goes to whoever asks, and to no buffer and no journal."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.errors import RolloutFailure, RolloutTimeout, RoomError
from asyncrl.producers.rollout import Generator, RolloutAttempt, RolloutClock
from asyncrl.types import GroupId, Prompt, Rollout

NO_GROUP = GroupId(-1)


@dataclass(frozen=True, slots=True)
class AttemptApart(RolloutAttempt):
    """One try, under a name of its own."""

    name: str = ""

    @property
    def rollout_id(self) -> str:
        """The name."""
        return self.name


class AttemptsApart:
    """Runs single attempts within a limit, without retries.

    Waits:      run sleeps in the generator, timeout_s at most (None: no limit); while the generator holds the clock, without a limit.
    """

    def __init__(self, generator: Generator, *, timeout_s: float | None) -> None:
        self._generator, self.timeout_s = generator, timeout_s
        self._broken: RoomError | None = None

    def __repr__(self) -> str:
        return f"<AttemptsApart {self._generator!r}>"

    def on_broken(self, error: RoomError) -> None:
        """A room that answers harnesses, and not us, is broken: run raises that from here on."""
        self._broken = self._broken or error

    async def run(self, name: str, prompt: Prompt, sample_index: int) -> Rollout:
        """The rollout, all its branches. Raises RolloutFailure, or RoomError if what samples is broken."""
        clock = RolloutClock(self.timeout_s)
        attempt = AttemptApart(NO_GROUP, prompt, sample_index, 0, lambda: None, clock=clock, name=name)
        limit = clock.start()
        try:
            async with limit:
                return await self._generator.run_attempt(attempt)
        except RolloutFailure as failure:
            if self._broken is not None:  # the harness failed because its calls did
                raise self._broken from failure
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            raise RolloutTimeout(f"{name} is not finished after {self.timeout_s} s") from None
        finally:
            clock.end()
