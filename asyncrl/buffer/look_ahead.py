"""buffer.look_ahead=auto: finds the smallest look-ahead that feeds the trainer as well as any. Is told durations, reads no clock."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from statistics import fmean, stdev

from asyncrl.types import WaitReport

START = int(os.environ.get("START", 2))
FIRST_WINDOW = int(os.environ.get("FW", 5))
WINDOW = 12
PROBE_WINDOW = int(os.environ.get("PW", 16))
MIN_LACK = float(os.environ.get("ML", .05))
FIRST_HOLD = 96
UCB = float(os.environ.get("UCB", 1.0))
RND= float(os.environ.get("RND", .25))
FS = int(os.environ.get("FS", 2))


@dataclass(slots=True)
class _Probe:
    look_ahead: int
    interval_s: float
    error: float


class LookAhead:
    """Raises, lowers or keeps the look-ahead after each batch."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.current = min(START, max_staleness)
        self._settling = FS
        self._need = FIRST_WINDOW
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
        if len(self._window) >= self._need:
            self._decide()
        return self.current

    def _decide(self) -> None:
        intervals = [w[0] for w in self._window]
        total = sum(intervals)
        lack = sum(w[1] for w in self._window) / total if total > 0 else 0.0
        mean = fmean(intervals)
        error = stdev(intervals) / len(intervals) ** 0.5 / mean if mean > 0 else 0.0
        num_spare = sorted(w[2] for w in self._window)[len(self._window) // 10]
        self._need = WINDOW
        if self._probe is not None:
            probe, self._probe = self._probe, None
            gain = (probe.interval_s / mean) * (1 + UCB * math.hypot(error, probe.error)) if mean > 0 else 1.0
            needed = max(probe.look_ahead, math.ceil((probe.look_ahead + 1) * gain - RND) - 1)
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
            self._probe = _Probe(self.current, mean, error)
            self._need = PROBE_WINDOW
            self._move(min(limit, max(self.current + 1, target)))
        elif num_spare >= 1 and self.current > 1 and self._lower_left <= 0:
            self._lowered_from = self.current
            self._move(self.current - 1)
        else:
            self._window.clear()

    def _move(self, look_ahead: int) -> None:
        self.current = look_ahead
        self._settling = look_ahead + 1
        self._window.clear()
