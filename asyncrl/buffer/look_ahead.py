"""buffer.look_ahead=auto: finds the smallest look-ahead that feeds the trainer as well as any. Is told durations, reads no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.types import WaitReport

START = 2
WINDOW = 12
MIN_LACK = 0.05
FIRST_HOLD = 96


@dataclass(slots=True)
class _Probe:
    look_ahead: int
    interval_s: float


class LookAhead:
    """Raises, lowers or keeps the look-ahead after each batch."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.current = min(START, max_staleness)
        self._settling = self.current
        self._window: list[tuple[float, float, int]] = []
        self._probe: _Probe | None = None
        self._ceiling, self._ceiling_left, self._ceiling_hold = max_staleness, 0, FIRST_HOLD
        self._lower_left, self._lower_hold, self._lowered_from = 0, FIRST_HOLD, -1

    def batch_taken(self, interval_s: float, wait: WaitReport, num_spare: int) -> int:
        self._ceiling_left -= 1
        self._lower_left -= 1
        if self._settling > 0:
            self._settling -= 1
            return self.current
        self._window.append((interval_s, wait.generation_s + wait.publishing_s, num_spare))
        if len(self._window) >= WINDOW:
            self._decide()
        return self.current

    def _decide(self) -> None:
        total = sum(w[0] for w in self._window)
        lack = sum(w[1] for w in self._window) / total if total > 0 else 0.0
        mean = total / len(self._window)
        num_spare = sorted(w[2] for w in self._window)[len(self._window) // 10]
        if self._probe is not None:
            probe, self._probe = self._probe, None
            gain = probe.interval_s / mean if mean > 0 else 1.0
            needed = max(probe.look_ahead, math.ceil((probe.look_ahead + 1) * gain - 0.25) - 1)
            if needed < self.current:
                self._ceiling, self._ceiling_left = needed, self._ceiling_hold
                self._ceiling_hold *= 2
                self._move(needed)
                return
            self._ceiling_hold = FIRST_HOLD
        limit = self._ceiling if self._ceiling_left > 0 else self.max_staleness
        if lack > MIN_LACK and self.current < limit:
            if self._lowered_from == self.current + 1:
                self._lower_left = self._lower_hold
                self._lower_hold *= 2
            target = math.ceil((self.current + 1) / (1 - lack) - 0.25) - 1 if lack < 1 else self.max_staleness
            self._probe = _Probe(self.current, mean)
            self._move(min(limit, max(self.current + 1, min(target, 2 * self.current + 2))))
        elif num_spare >= 1 and self.current > 1 and self._lower_left <= 0:
            self._lowered_from = self.current
            self._move(self.current - 1)
        else:
            self._window.clear()

    def _move(self, look_ahead: int) -> None:
        self.current = look_ahead
        self._settling = look_ahead + 1
        self._window.clear()
