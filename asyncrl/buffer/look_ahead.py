"""buffer.look_ahead=auto: the smallest look-ahead that feeds the trainer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev

START = 2
WARM_UP = 2
"""Batches to ignore: a new process is slow."""
WINDOW, MEMORY = 5, 36
"""Batches between decisions, and at most to judge by."""
MIN_LACK_FRACTION = 0.03
"""Fraction of the time that the trainer may lack groups."""
BATCH_IN_HAND = 0.9
"""Ready batches to keep: in simulations the fewest that keep the trainer 95 % busy."""
SLACK = 0.3
"""Excess batches before lowering."""
HOLD = 96
"""Batches before a refuted change is tried again."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """`running_s`: the integral of the running groups over time."""

    interval_s: float
    lack_s: float
    running_s: float
    num_finished: int


class LookAhead:
    """Raise, lower or keep the look-ahead after each batch.

    By Little's law, the number of running groups must be (mean time of a group) / (time
    of a step), in batches, plus one ready batch. The first time is (integral of the
    running groups) / (groups finished), which counts groups that still run. The second
    excludes the time in which the trainer lacked groups with all admissible groups
    admitted.

    Engines may slow down as more groups run. So a raise must make batches come faster,
    in proportion to look_ahead + 1; otherwise it is undone in part, and not repeated
    for a while.

    Example: batches of 4 groups. A group samples for 3 s, a step takes 1 s, so 3 batches must run, and 0.9
    be ready. With the first value, 2, the trainer lacks groups for half a second of each batch.
        >>> auto = LookAhead(max_staleness=8)
        >>> auto.current
        2
        >>> for batch in range(8):
        ...     auto.note(1.5 * batch + 1.0, num_running=8, lacks=True)
        ...     now = auto.batch_taken(1.5 * (batch + 1), num_groups=4, num_ready=0)
        >>> now
        4
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.current = min(START, max_staleness)
        # Since the last batch: group-seconds, and seconds in which the trainer lacked
        # groups.
        self._now_s = self._lack_s = self._running_s = 0.0
        self._num_running, self._lacks = 0, False
        self._taken_s: float | None = None
        self._num_ready = 0
        self._batch = 0
        self._samples: deque[_Sample] = deque(maxlen=MEMORY)
        self._decide_at = WARM_UP + WINDOW
        # (look-ahead, mean time for a batch, its error) before a raise on trial
        self._trial_of: tuple[int, float, float] | None = None
        self._judge_at = 0
        # A refuted raise lowers the limit for HOLD batches. A raise after a lowering
        # forbids another lowering for as long. Without both, the value would swing on
        # noise.
        self._limit, self._limit_until = max_staleness, 0
        self._came_down, self._lower_from = False, 0

    def note(self, now_s: float, num_running: int, *, lacks: bool) -> None:
        """`lacks`: the trainer lacks groups from `now_s` on."""
        # Both values are constant between two calls, so the sum is the exact integral.
        passed_s = now_s - self._now_s
        self._running_s += passed_s * self._num_running
        self._lack_s += passed_s * self._lacks
        self._now_s, self._num_running, self._lacks = now_s, num_running, lacks

    def batch_taken(self, now_s: float, num_groups: int, num_ready: int) -> int:
        """Return the new look-ahead; the trainer left `num_ready`."""
        self.note(now_s, self._num_running, lacks=False)
        if self._taken_s is not None and self._batch >= WARM_UP:
            # Filtered and failed groups are in running_s and not counted here. That is
            # intended: for each usable group, their time must be spent too.
            num_finished = num_groups + num_ready - self._num_ready
            sample = _Sample(
                now_s - self._taken_s, self._lack_s, self._running_s, num_finished
            )
            self._samples.append(sample)
        self._taken_s, self._num_ready, self._batch = now_s, num_ready, self._batch + 1
        # Also before the warm-up ends, so that the first sample covers one batch only.
        self._lack_s = self._running_s = 0.0
        if self._batch == self._limit_until:
            self._limit = self.max_staleness
        if self._trial_of is not None and self._batch >= self._judge_at:
            self._judge(*self._trial_of)
        if self._batch >= self._decide_at and self._samples:
            self._decide_at = self._batch + WINDOW
            self._decide()
        return self.current

    def _decide(self) -> None:
        """Set the look-ahead that the recent samples ask for.

        Example: a group runs 3 s on average, and a step takes 1 s. Then 3 + 0.9 batches
        must be in the system, so 4 is the target. From 2 it is raised if the trainer
        lacked groups; from 5 it is lowered, because 3.9 < 5 - 0.3.
        """
        samples = self._samples
        interval_s = max(sum(sample.interval_s for sample in samples), 1e-9)
        lack = sum(sample.lack_s for sample in samples) / interval_s
        group_s = sum(sample.running_s for sample in samples) / max(
            1, sum(s.num_finished for s in samples)
        )
        # The time of a step as if the trainer never lacked groups. With the lack in it,
        # a starved trainer would look slow, and the look-ahead would stay small.
        step_s = interval_s * max(1 - lack, 1e-3) / len(samples)
        wanted = group_s / step_s + BATCH_IN_HAND
        target = min(math.ceil(wanted), self._limit)
        if lack > MIN_LACK_FRACTION and target > self.current:
            # A second raise during a trial is judged against the time before the first
            # one.
            if self._trial_of is None:
                self._trial_of = (self.current, *self._measured())
            if self._came_down:
                self._lower_from = self._batch + HOLD
            self.current, self._came_down = target, False
            # The next target + 1 batches still hold groups admitted under the old
            # value. Then WINDOW batches show the new one.
            self._judge_at = self._batch + target + 1 + WINDOW
        elif (
            target < self.current
            and wanted < self.current - SLACK
            and self._batch >= self._lower_from
        ):
            self.current, self._came_down = max(1, target), True
            # The times before and after a lowering do not show what the raise did.
            self._trial_of = None

    def _judge(self, look_ahead: int, interval_s: float, error: float) -> None:
        self._trial_of = None
        now_s, error_now = self._measured()
        # The error of both means is added to the gain: a raise is undone only if it
        # gained less than noise explains. If batches come 1.2 times as fast after a
        # raise from 2 to 8, then ceil(3 * 1.2) - 1 = 3 would have done.
        gain = interval_s / now_s * (1 + math.hypot(error, error_now))
        needed = max(look_ahead, math.ceil((look_ahead + 1) * gain) - 1)
        if needed < self.current:
            self._limit, self._limit_until = needed, self._batch + HOLD
            self.current = needed

    def _measured(self) -> tuple[float, float]:
        """Return the mean time of recent batches, and its relative standard error."""
        intervals = [
            max(sample.interval_s, 1e-9) for sample in list(self._samples)[-WINDOW:]
        ]
        mean = fmean(intervals)
        return mean, stdev(intervals) / math.sqrt(len(intervals)) / mean if len(
            intervals
        ) > 1 else 1.0
