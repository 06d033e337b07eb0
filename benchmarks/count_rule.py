"""The count-based rule of other frameworks, for comparison in simulation: it bounds how many groups are in
flight, not how old they get.
"""

from __future__ import annotations

from typing import Literal

from asyncrl.buffer.staleness import StalenessRule
from asyncrl.messages.records import GroupId

CountOrder = Literal["completion", "oldest_first"]


class CountRule(StalenessRule):
    """Capacity (max_staleness + version + 1) * num_groups - accepted - running; any num_groups finished
    groups form a batch.

    This is the rule of AReaL's staleness manager (https://arxiv.org/abs/2505.24298, section 5.1). `order`
    says which finished groups go first: in order of completion, or those that started first. No group ever
    waits for another, and none is looked at again once it runs: a long one is simply late.
    """

    def __init__(self, *, num_groups: int, num_batches: int, max_staleness: int, order: CountOrder) -> None:
        super().__init__(
            num_groups=num_groups,
            num_batches=num_batches,
            max_staleness=max_staleness,
            on_overdue="drop",
            look_ahead=max_staleness,
        )
        self._is_oldest_first = order == "oldest_first"

    def _note_last_use(self, group_id: GroupId, last_use: int | None) -> None:
        """No group is ever too old."""

    def fail_nowait(self, group_id: GroupId) -> None:
        """It has ended: nothing is remembered of it."""
        del self._running[group_id]

    def finish_nowait(self, group_id: GroupId, *, oldest: int, newest: int) -> bool:
        """A group has finished, however old it is."""
        self.fail_nowait(group_id)
        self._ready[group_id] = oldest
        return False

    def _pop_earliest(self) -> GroupId:
        group_id = min(self._ready) if self._is_oldest_first else next(iter(self._ready))
        del self._ready[group_id]
        return group_id
