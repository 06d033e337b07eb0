"""Count and limit the restarts of a part."""

from __future__ import annotations

import asyncio
from collections import deque

from asyncrl.base.errors import NodeLost, RoomError
from asyncrl.config import SupervisionConfig

RESTART_WINDOW_S = 3600.0
"""Seconds of work after which a restart no longer counts."""
NODE_WAIT_S = 600.0
"""Seconds to wait for a lost node without which the run cannot continue."""


class Restarts:
    """Restart counter of one part.

    Life: works_nowait() when it works -> again_nowait() when it is lost, and for each failed start.
    Invariant: a restart counts until the part has worked for RESTART_WINDOW_S afterwards: a part that dies
        once a day never uses up max_restarts; a part that never comes up, or dies after each long recovery,
        always does. A missing node does not count while the run can do without it, nor within the first
        NODE_WAIT_S; nor does the restart that discovers it.
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self.num = 0
        self._worked_s = 0.0
        self._works_since_s: float | None = None
        self._gone_since_s: float | None = None
        self._counting: deque[float] = deque()
        """`_worked_s` at each counting restart."""

    def works_nowait(self) -> None:
        self._works_since_s, self._gone_since_s = asyncio.get_running_loop().time(), None

    def rests_nowait(self) -> None:
        """Reset the count of a part that is not needed for now."""
        self._works_since_s = self._gone_since_s = None
        self._counting.clear()

    def again_nowait(self, lost: RoomError, *, goes_on: bool = False) -> str:
        """Count a restart; return the remaining allowance as text. Raises the RoomError that ends the run.
        `goes_on`: the run can do without the part for now.
        """
        now_s = asyncio.get_running_loop().time()
        if self._works_since_s is not None:
            self._worked_s += now_s - self._works_since_s
            self._works_since_s = None
        elif isinstance(lost, NodeLost) and not self.is_node_gone and self._counting:
            self._counting.pop()
        most = self._config.max_restarts
        while self._counting and self._worked_s - self._counting[0] >= RESTART_WINDOW_S:
            self._counting.popleft()
        if not most:
            raise lost
        if words := self._waits(lost, now_s, goes_on=goes_on):
            self.num += 1
            return words
        if len(self._counting) >= most:
            within = f"within {RESTART_WINDOW_S:g} s of work"
            rule = f"{lost.rule}; supervision.max_restarts={most} is used up {within}".lstrip("; ")
            way_out = lost.way_out or f"read the log of {lost.room}, then start the run again: it goes on."
            raise RoomError(lost.room, lost.fault, rule=rule, way_out=way_out)
        self.num += 1
        self._counting.append(self._worked_s)
        return f"{self.num_counting} of {most}"

    @property
    def num_counting(self) -> int:
        return len(self._counting)

    @property
    def is_node_gone(self) -> bool:
        """Return True if its node is missing and the part has not worked since."""
        return self._gone_since_s is not None

    def _waits(self, lost: RoomError, now_s: float, *, goes_on: bool) -> str:
        if not isinstance(lost, NodeLost):
            return ""
        self._gone_since_s = now_s if self._gone_since_s is None else self._gone_since_s
        if goes_on:
            return "once the node is back; the run continues without it"
        if now_s - self._gone_since_s >= NODE_WAIT_S:
            return ""
        return f"once the node is back; the run waits for it, {NODE_WAIT_S:g} s at most"
