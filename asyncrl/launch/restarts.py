"""Restart limits of a component."""

from __future__ import annotations

import asyncio
from collections import deque

from asyncrl.base.errors import NodeLost, RoomError
from asyncrl.config import SupervisionConfig

NODE_WAIT_S = 600.0
"""Seconds to wait for an indispensable lost node."""
RESTART_WINDOW_S = 3600.0
"""Seconds of work after which a restart no longer counts."""


class Restarts:
    """Restart counter of one component.

    Invariant: a restart counts until RESTART_WINDOW_S of later work. A missing node does not count while
        dispensable, nor within NODE_WAIT_S, nor does the restart that discovers it.
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self.num = 0
        self._worked_s = 0.0
        self._works_since_s: float | None = None
        self._gone_since_s: float | None = None
        self._counting: deque[float] = deque()
        """`_worked_s` at each counting restart."""

    @property
    def num_counting(self) -> int:
        return len(self._counting)

    @property
    def is_node_gone(self) -> bool:
        """Return true if its node is missing, with no work since."""
        return self._gone_since_s is not None

    def works_nowait(self) -> None:
        self._works_since_s = asyncio.get_running_loop().time()
        self._gone_since_s = None

    def rests_nowait(self) -> None:
        self._works_since_s = None
        self._gone_since_s = None
        self._counting.clear()

    def again_nowait(self, lost: RoomError, *, is_dispensable: bool = False) -> str:
        """Count a restart; return the remaining allowance as text. Raises the final RoomError."""
        now_s = asyncio.get_running_loop().time()
        if self._works_since_s is not None:
            self._worked_s += now_s - self._works_since_s
            self._works_since_s = None
        elif isinstance(lost, NodeLost) and not self.is_node_gone and self._counting:
            self._counting.pop()
        limit = self._config.max_restarts
        while self._counting and self._worked_s - self._counting[0] >= RESTART_WINDOW_S:
            self._counting.popleft()
        if not limit:
            raise lost
        if isinstance(lost, NodeLost):
            if self._gone_since_s is None:
                self._gone_since_s = now_s
            if is_dispensable or now_s - self._gone_since_s < NODE_WAIT_S:
                self.num += 1
                limit_text = "continues without it" if is_dispensable else f"waits {NODE_WAIT_S:g} s at most"
                return f"once its node is back; the run {limit_text}"
        if len(self._counting) >= limit:
            rule = f"supervision.max_restarts={limit} is used up within {RESTART_WINDOW_S:g} s of work"
            rule = f"{lost.rule}; {rule}".lstrip("; ")
            way_out = lost.way_out or f"read the log of {lost.room}, then resume the run."
            raise RoomError(lost.room, lost.fault, rule=rule, way_out=way_out)
        self.num += 1
        self._counting.append(self._worked_s)
        return f"{self.num_counting} of {limit}"
