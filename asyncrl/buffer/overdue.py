"""What becomes of groups that are late: one policy object for each choice of buffer.on_overdue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config.generation import OnOverdue


@dataclass(frozen=True, slots=True)
class OverduePolicy:
    """buffer.on_overdue: what happens when a group that the next batch leaves behind would become too old.

    `waits`: the batch waits for stragglers, so that no group ever passes its deadline. `masks`: late groups
    are trained on; their tokens older than the batch's min_version have no loss weight. Neither: a group that
    has passed its deadline is generated again.
    """

    waits: bool = False
    masks: bool = False

    @property
    def reason(self) -> Literal["dropped", "all_masked"]:
        """Why a group is handed back once no batch can use it."""
        return "all_masked" if self.masks else "dropped"

    def last_use(self, deadline: int, newest_deadline: int | None) -> int | None:
        """Last batch that has a use for a group whose oldest token has `deadline`; None: any batch.

        `newest_deadline` of its newest token, None while it samples: a masked group is of use as long as one
        of its tokens is young enough.
        """
        return newest_deadline if self.masks else deadline


POLICIES: dict[OnOverdue, OverduePolicy] = {
    "wait": OverduePolicy(waits=True),
    "mask": OverduePolicy(masks=True),
    "drop": OverduePolicy(),
}
