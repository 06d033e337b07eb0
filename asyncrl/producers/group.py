"""The rollouts of one prompt on their way to a group. Pure bookkeeping: knows no engine, no buffer, no clock."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.errors import RolloutFailure
from asyncrl.producers.rollout import FailedRollout
from asyncrl.types import Group, PartialCompletion, Prompt, Rollout, Ticket, UnfinishedGroup


class RunningGroup:
    """One admitted group while its rollouts run.

    Life:       made with its ticket -> one add() a rollout, in any order -> is_complete -> group(), or None if too
                few rollouts are usable. Or cancel(), when the buffer takes the admission back.
    Invariant:  a failed rollout costs its own place alone: its siblings stay.
    """

    def __init__(self, ticket: Ticket, prompt: Prompt, group_size: int, before: UnfinishedGroup | None = None) -> None:
        """`before`: how far a killed run had come with it."""
        self.ticket, self.prompt, self.group_size = ticket, prompt, group_size
        self.tasks: list[asyncio.Task[Any]] = []
        self._rollouts: dict[int, Rollout] = {} if before is None else dict(before.rollouts)
        failures = {} if before is None else before.failures
        self._failures = {index: FailedRollout(index, attempts, RolloutFailure(why)) for index, (attempts, why) in failures.items()}
        self._partials = {} if before is None else before.partials

    def __repr__(self) -> str:
        done, failed = len(self._rollouts), len(self._failures)
        return f"<RunningGroup g{self.ticket.group_id} {done} done, {failed} failed of {self.group_size}>"

    @property
    def to_run(self) -> list[int]:
        """Sample indices of the rollouts that have not ended."""
        return [index for index in range(self.group_size) if index not in self._rollouts and index not in self._failures]

    def resumed(self, sample_index: int) -> tuple[int, PartialCompletion] | None:
        """(number of the attempt, what it had sampled) that a rollout goes on from."""
        return self._partials.get(sample_index)

    @property
    def is_complete(self) -> bool:
        """Every rollout has ended. Those beyond group_size, if a killed run had a larger one, are the group's too."""
        return not self.to_run

    @property
    def num_needed(self) -> int:
        """Fewest rollouts that can be scored against each other."""
        return min(2, self.group_size)

    def add(self, outcome: Rollout | FailedRollout) -> None:
        """One rollout has ended."""
        if isinstance(outcome, FailedRollout):
            self._failures[outcome.sample_index] = outcome
        else:
            self._rollouts[outcome[0].sample_index] = outcome

    def group(self) -> Group | None:
        """The finished group, all branches by sample_index and number; None if fewer than num_needed rollouts are usable."""
        if len(self._rollouts) < self.num_needed:
            return None
        by_index = sorted(self._rollouts.items())
        return Group(self.ticket.group_id, self.prompt, tuple(branch for _, rollout in by_index for branch in rollout))

    @property
    def can_be_tried_again(self) -> bool:
        """False once a rollout found that the prompt can never be sampled."""
        return all(failed.num_attempts for failed in self._failures.values())

    def why_failed(self) -> str:
        """Why group() is None, with the last failure."""
        last = list(self._failures.values())[-1]
        return (
            f"g{self.ticket.group_id} (prompt {self.prompt.prompt_id}) has {len(self._rollouts)} usable rollouts of "
            f"{self.group_size} and needs {self.num_needed}; r{last.sample_index} {last.how}: {last.failure}"
        )

    def cancel(self) -> None:
        """End the rollouts that still run; without waiting for them."""
        for task in self.tasks:
            task.cancel()
