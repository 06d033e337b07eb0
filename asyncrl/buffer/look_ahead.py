"""buffer.look_ahead=auto: finds the smallest look-ahead that feeds the trainer as well as any."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev

from asyncrl.messages.records import WaitReport

START = 2
FIRST_WINDOW, WINDOW, PROBE_WINDOW, MEMORY = 5, 12, 24, 48
"""Batches looked at before the first decision, before each later one, after a change on trial; and at most to
judge a setting.
"""
MIN_LACK_FRACTION = 0.05
"""Fraction of the time that the trainer may lack groups before anything is done: a larger look-ahead could
gain no more than this.
"""
FIRST_HOLD = 96
"""Batches until a refuted change is tried again; doubled each time."""


@dataclass(frozen=True, slots=True)
class _Sample:
    interval_s: float
    lack_s: float
    num_spare: int


@dataclass(frozen=True, slots=True)
class _Measured:
    """Mean time for a batch at one look-ahead; `error` is its standard error as a fraction."""

    look_ahead: int
    interval_s: float
    error: float


class LookAhead:
    """Raises, lowers or keeps the look-ahead, one batch after the other.

    The trainer lacks groups (waits for generation or publishing, not for stragglers) for two reasons: too few
    were started, or the engines make no more. By Little's law time for a batch ~ 1 / (look_ahead + 1) as long
    as it is the first. So:

    - lack: raise the look-ahead until this law predicts no lack; measure how much faster batches come; keep
      as much look-ahead as that gain needs by the same law, and try no more for a while. In the first trial a
      difference within the noise counts for the higher look-ahead.
    - spare: one batch more than the requested one was nearly always ready: lower by one, and go back up if
      the trainer then lacks groups.

    Straggler waits (on_overdue=wait) need no rule of their own: in simulation the time for a batch falls with
    the look-ahead and stays, it does not rise again, because what a long group holds up is the batch of its
    deadline, however much else was started.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.current = min(START, max_staleness)
        self._batch = 0
        self._settling = START  # batches after a change that still show the setting before it
        self._samples: deque[_Sample] = deque(maxlen=MEMORY)
        self._until_decision = FIRST_WINDOW
        self._trial_of: _Measured | None = None  # the setting that the present one is compared with
        self._raise_from, self._raise_hold = 0, FIRST_HOLD
        self._lower_from, self._lower_hold = 0, FIRST_HOLD
        self._came_down = False
        self._doubts = True  # the first time, what falls into the noise is given to the higher look-ahead

    def batch_taken(self, interval_s: float, wait: WaitReport, num_spare: int) -> int:
        """The look-ahead from now on.

        `interval_s`: since the batch before was taken; `wait`: how much of it the trainer waited;
        `num_spare`: batches ready when it asked, less the one it asked for.
        """
        self._batch += 1
        if self._settling > 0:
            self._settling -= 1
            return self.current
        self._samples.append(_Sample(interval_s, wait.generation_s + wait.publishing_s, num_spare))
        self._until_decision -= 1
        if self._until_decision <= 0:
            self._until_decision = WINDOW
            if self._trial_of is None or self._is_confirmed(self._trial_of):
                self._steer()
        return self.current

    def _is_confirmed(self, before: _Measured) -> bool:
        """Judge the change that was on trial. If it does not stand, go where it should have gone."""
        self._trial_of = None
        now = self._measured()
        doubt = math.hypot(before.error, now.error) if self._doubts else 0.0
        gain = before.interval_s / now.interval_s * (1 + doubt)
        needed = max(before.look_ahead, math.ceil((before.look_ahead + 1) * gain) - 1)
        self._doubts = False
        if needed >= now.look_ahead:
            self._raise_hold = FIRST_HOLD
            return True
        self._raise_from = self._batch + self._raise_hold
        self._raise_hold *= 2
        self._move(needed)
        return False

    def _steer(self) -> None:
        window = list(self._samples)[-WINDOW:]
        half = len(window) // 2
        if _lack_fraction(window[:half]) < MIN_LACK_FRACTION < _lack_fraction(window[half:]):
            self._until_decision = half  # it has just begun: judge when the window shows nothing else
            return
        lack = _lack_fraction(window)
        num_spare = sorted(sample.num_spare for sample in window)[len(window) // 10]
        if lack > MIN_LACK_FRACTION:
            if self._came_down:  # one less was too little
                self._lower_from = self._batch + self._lower_hold
                self._lower_hold *= 2
                self._move(self.current + 1)
            elif self._batch >= self._raise_from and self.current < self.max_staleness:
                without_lack = math.ceil((self.current + 1) / max(1 - lack, 1e-9) - 0.25) - 1
                measured = self._measured()
                self._move(min(self.max_staleness, max(self.current + 1, without_lack)))
                self._trial_of, self._until_decision = measured, PROBE_WINDOW
        elif num_spare >= 1 and self.current > 1 and self._batch >= self._lower_from:
            self._move(self.current - 1)
            self._came_down = True

    def _move(self, look_ahead: int) -> None:
        self.current, self._settling, self._until_decision = look_ahead, look_ahead + 1, WINDOW
        self._samples.clear()
        self._came_down = False

    def _measured(self) -> _Measured:
        # at first the change may be of the workload, and new
        samples = list(self._samples)[-WINDOW if self._doubts else 0 :]
        intervals = [max(sample.interval_s, 1e-9) for sample in samples]
        mean = fmean(intervals)
        return _Measured(self.current, mean, stdev(intervals) / math.sqrt(len(intervals)) / mean)


def _lack_fraction(samples: list[_Sample]) -> float:
    return sum(sample.lack_s for sample in samples) / max(sum(sample.interval_s for sample in samples), 1e-9)
