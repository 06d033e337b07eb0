"""The count-based rule of other frameworks, for comparison in simulation: it bounds how many groups are in
flight, not how old they get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from asyncrl.buffer.staleness import Choice, WaitCause, after_the_last_batch
from asyncrl.errors import WouldWait
from asyncrl.messages.records import GroupId, Ticket

CountOrder = Literal["completion", "oldest_first"]


class CountRule:
    """Capacity (max_staleness + version + 1) * num_groups - accepted - running; any num_groups finished
    groups form a batch.

    This is the rule of AReaL's staleness manager (https://arxiv.org/abs/2505.24298, section 5.1). `order`
    says which finished groups go first: in order of completion, or those that started first ("oldest_first").
    No group ever waits for another, and none is looked at again once it runs: a long one is simply late. Same
    calls as StalenessRule.
    """

    def __init__(self, *, num_groups: int, num_batches: int, max_staleness: int, order: CountOrder) -> None:
        self.num_groups, self.num_batches, self.max_staleness = num_groups, num_batches, max_staleness
        self.look_ahead = max_staleness
        self.next_batch = self.served = 0
        self._key: Callable[[GroupId], int] = (
            int if order == "oldest_first" else lambda _: 0
        )  # a stable sort keeps completion order
        self._num_issued = self._num_failed = 0
        self._running: set[GroupId] = set()
        self._finished: list[GroupId] = []

    @property
    def num_ready(self) -> int:
        """Groups finished and not taken."""
        return len(self._finished)

    @property
    def num_open(self) -> int:
        """How many more groups may be started now."""
        limit = min(self.max_staleness + self.served + 1, self.num_batches) * self.num_groups
        return max(0, limit - (self._num_issued - self._num_failed))

    @property
    def waits_for(self) -> WaitCause | None:
        """What the next batch waits for; None if it can be taken now."""
        if len(self._finished) >= self.num_groups:
            return None
        return (
            "publishing"
            if len(self._finished) + len(self._running) < self.num_groups and not self.num_open
            else "generation"
        )

    def set_served_nowait(self, version: int) -> None:
        """Every engine serves `version` from now on."""
        self.served = version

    def admit_nowait(self) -> Ticket:
        """Leave to start one group, or WouldWait."""
        if self.num_open == 0:
            raise WouldWait("no capacity")
        group_id = GroupId(self._num_issued)
        self._num_issued += 1
        self._running.add(group_id)
        return Ticket(group_id, start_version=self.served)

    def finish_nowait(self, group_id: GroupId, *, oldest: int, newest: int) -> None:
        """A group has finished; its age is nobody's business here."""
        self._running.remove(group_id)
        self._finished.append(group_id)

    def fail_nowait(self, group_id: GroupId) -> None:
        """A group failed; its place is free again."""
        self._running.remove(group_id)
        self._num_failed += 1

    def take_nowait(self) -> Choice:
        """The first num_groups finished groups in the chosen order, or WouldWait."""
        if self.next_batch == self.num_batches:
            raise after_the_last_batch(self.num_batches)
        if self.waits_for is not None:
            raise WouldWait("too few groups have finished")
        self._finished.sort(key=self._key)
        taken, self._finished = self._finished[: self.num_groups], self._finished[self.num_groups :]
        self.next_batch += 1
        return Choice(self.next_batch - 1, tuple(sorted(taken)), ())
