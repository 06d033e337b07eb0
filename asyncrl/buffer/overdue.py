"""buffer.on_overdue: what happens when the next batch could be formed but a group left behind would become
too old. One class a policy, one line of POLICIES.
"""

from __future__ import annotations

from typing import Literal

OnOverdue = Literal["wait", "mask", "drop"]
HandBackReason = Literal["dropped", "all_masked"]


class OverduePolicy:
    """What the staleness rule asks of a policy. Deadlines are batches: version of a token + max_staleness."""

    waits = False
    """No batch is taken while something that it would leave behind could miss its deadline."""
    masks = False
    """Late groups are trained on; their tokens older than the batch's min_version have no loss weight."""
    reason: HandBackReason = "dropped"
    """Why a group is handed back once no batch can use it."""

    def last_use(self, deadline: int, newest_deadline: int | None) -> int | None:
        """Last batch that has a use for a group whose oldest token has `deadline`; None: any batch.

        `newest_deadline` of its newest token, None while it runs.
        """
        return deadline


class Wait(OverduePolicy):
    """The batch waits for stragglers, so that no group ever passes its deadline."""

    waits = True


class Mask(OverduePolicy):
    """No batch waits; a group is of use as long as one of its tokens is young enough."""

    masks = True
    reason: HandBackReason = "all_masked"

    def last_use(self, deadline: int, newest_deadline: int | None) -> int | None:
        """That of its newest token."""
        return newest_deadline


class Drop(OverduePolicy):
    """No batch waits; a group that has passed its deadline is generated again."""


POLICIES: dict[OnOverdue, OverduePolicy] = {"wait": Wait(), "mask": Mask(), "drop": Drop()}
