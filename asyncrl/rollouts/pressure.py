"""rollout.slots=auto: as many running rollouts as the engines' KV caches hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

TARGET = 1.0
"""Part of the KV cache that nine of ten looks should find wanted at most."""
QUANTILE = 0.9
MIN_LOOKS = 5
"""Looks between decisions: short rollouts turn over between two looks, and one look after
a push sees an empty cache.
"""
MAX_GROWTH = 1.5
"""Largest growth at once: the cache fills only as the new rollouts get longer."""
QUEUED = 1.1
"""Wanted part from which on too many rollouts wait in the engines."""
TOLERANCE = 0.5
"""Preempted sequences for each slot and turnover that cost less than fewer slots do."""
CUT = 0.85
"""Factor of a cut. The limit is near: growth stops at the free part of the cache."""
BELOW_LIMIT = 0.95
"""Part of a number that caused preemptions to which slots grow until HOLD has passed."""
HOLD = 8
"""Turnovers before a number that caused preemptions is tried again."""
BOUND_FRACTION = 0.9
"""Slots in use from which on their number holds rollouts back."""

# Measured in a simulation of a paging engine, with three distributions of lengths: these
# numbers reached 0.87 to 1.01 of the tokens a second of the best fixed number of slots.


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engines that get work report, and the rollouts of the run.

    `kv_wanted`: what running and queued sequences want of the fullest KV cache, as a
    part of it; above 1 if they do not fit. `num_preempted`: since the processes of
    these engines began. `num_ended`: since the run began. `num_running`: rollouts that
    hold a slot.
    """

    num_engines: int
    kv_wanted: float
    num_preempted: int
    num_running: int
    num_ended: int


class SlotsRule:
    """Raise, lower or keep the slots of each engine. Pure.

    An engine whose KV cache is full preempts sequences and computes them again. A raise
    shows only after a turnover, when as many rollouts have ended as there are slots:
    new rollouts are short, and each grows to its end. So the number is raised after a
    turnover of at least MIN_LOOKS looks without many preemptions, in proportion to the
    part of the cache that was free, and cut as soon as preemptions are many. Then
    nothing is judged until the rollouts above the new number have ended, and the old
    number is not reached again for HOLD turnovers.

    Example: 10 slots of one engine, a cache that 40 rollouts fill.
        >>> rule = SlotsRule(10, most=256)
        >>> slots = []
        >>> for look in range(5 * MIN_LOOKS):
        ...     running = rule.current
        ...     slots.append(running)
        ...     now = rule.look(EngineLoad(1, running / 40, 0, running, sum(slots)))
        >>> slots[::MIN_LOOKS]
        [10, 15, 23, 35, 40]
    """

    def __init__(self, start: int, most: int) -> None:
        self.current = min(start, most)
        self._most = most
        self._limit = most
        self._num_turnovers = self._limit_until = 0
        self._is_draining = False
        self._begin(0, 0)

    def _begin(self, num_ended: int, num_preempted: int) -> None:
        self._ended_before = num_ended
        self._preempted_before = num_preempted
        self._wanted = list[float]()
        self._max_running = 0

    def look(self, load: EngineLoad) -> int:
        """Return the slots of each engine."""
        capacity = self.current * load.num_engines
        if self._is_draining:
            if load.num_running > capacity:
                return self.current
            self._is_draining = False
            self._begin(load.num_ended, load.num_preempted)
        # The count of a restarted engine begins again at 0.
        self._preempted_before = min(self._preempted_before, load.num_preempted)
        self._wanted.append(load.kv_wanted)
        self._max_running = max(self._max_running, load.num_running)
        num_preempted = load.num_preempted - self._preempted_before
        if num_preempted > TOLERANCE * capacity:
            self._limit = self.current
            self._limit_until = self._num_turnovers + HOLD
            self.current = max(1, math.floor(self.current * CUT))
            self._is_draining = True
        elif (
            load.num_ended - self._ended_before >= capacity
            and len(self._wanted) >= MIN_LOOKS
        ):
            self._turn_over(capacity)
            self._begin(load.num_ended, load.num_preempted)
        return self.current

    def _turn_over(self, capacity: int) -> None:
        self._num_turnovers += 1
        if self._num_turnovers == self._limit_until:
            self._limit = self._most
        # The look-ahead or the prompts hold rollouts back, not the slots.
        if self._max_running < BOUND_FRACTION * capacity:
            return
        wanted = sorted(self._wanted)
        most_wanted = wanted[math.ceil(QUANTILE * (len(wanted) - 1))]
        if most_wanted > QUEUED:
            self.current = max(1, math.floor(self.current / most_wanted))
            return
        growth = min(MAX_GROWTH, TARGET / max(most_wanted, 1e-3))
        most = self._most
        if self._limit < most:
            most = math.floor(self._limit * BELOW_LIMIT)
        self.current = max(self.current, min(most, math.ceil(self.current * growth)))
