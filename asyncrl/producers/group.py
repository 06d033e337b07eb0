"""The rollouts of one prompt on their way to a group. Pure bookkeeping: knows no engine, no buffer, no clock."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.producers.rollout import FailedRollout
from asyncrl.types import Group, Prompt, Ticket, Trajectory


class RunningGroup:
    """One admitted group while its rollouts run.

    Life:       made with its ticket -> one add() a rollout, in any order -> is_complete -> group(), or None if too
                few rollouts are usable. Or cancel(), when the buffer takes the admission back.
    Invariant:  a failed rollout costs its own place alone: its siblings stay.
    """

    def __init__(self, ticket: Ticket, prompt: Prompt, group_size: int) -> None:
        self.ticket, self.prompt, self.group_size = ticket, prompt, group_size
        self.tasks: list[asyncio.Task[Any]] = []
        self._trajectories: dict[int, Trajectory] = {}
        self._failures: dict[int, FailedRollout] = {}

    def __repr__(self) -> str:
        done, failed = len(self._trajectories), len(self._failures)
        return f"<RunningGroup g{self.ticket.group_id} {done} done, {failed} failed of {self.group_size}>"

    @property
    def is_complete(self) -> bool:
        """Every rollout has ended."""
        return len(self._trajectories) + len(self._failures) == self.group_size

    @property
    def num_needed(self) -> int:
        """Fewest trajectories that can be scored against each other."""
        return min(2, self.group_size)

    def add(self, outcome: Trajectory | FailedRollout) -> None:
        """One rollout has ended."""
        if isinstance(outcome, Trajectory):
            self._trajectories[outcome.sample_index] = outcome
        else:
            self._failures[outcome.sample_index] = outcome

    def group(self) -> Group | None:
        """The finished group, trajectories by sample_index; None if fewer than num_needed are usable."""
        if len(self._trajectories) < self.num_needed:
            return None
        by_index = sorted(self._trajectories.items())
        return Group(self.ticket.group_id, self.prompt, tuple(trajectory for _, trajectory in by_index))

    def why_failed(self) -> str:
        """Why group() is None, with the last failure."""
        last = list(self._failures.values())[-1]
        return (
            f"g{self.ticket.group_id} (prompt {self.prompt.prompt_id}) has {len(self._trajectories)} usable rollouts of "
            f"{self.group_size} and needs {self.num_needed}; r{last.sample_index} failed {last.num_attempts} times, last: {last.failure}"
        )

    def cancel(self) -> None:
        """End the rollouts that still run; without waiting for them."""
        for task in self.tasks:
            task.cancel()
