"""rollout.slots=auto: as many running rollouts as the engines' KV caches hold."""

from __future__ import annotations

import math
from statistics import quantiles

TARGET = 0.82
"""Part of the KV cache that nine of ten looks should find wanted at most. In the simulation
of tests/test_rollouts_pressure.py, 0.85 kept 1.18 times the slots that fill the cache.
"""
MIN_LOOKS = 5
"""Looks between decisions: short rollouts turn over between two looks, and one look after
a push sees an empty cache.
"""
MAX_GROWTH = 1.5
"""Largest factor of a raise: the cache fills only as the new rollouts get longer."""
MAX_CUT = 1.2
"""Largest factor of a cut: after a bad moment, all preempted sequences wait."""
BOUND_FRACTION = 0.9
"""Slots in use from which on their number holds rollouts back."""


class SlotsRule:
    """Raise, lower or keep the slots of each engine. Pure.

    An engine whose KV cache is full preempts sequences: they wait, and are computed again.
    So the part of the cache that running and waiting sequences want says how many slots
    fill it. A change shows only after a turnover, when as many rollouts have ended as there
    are slots: new rollouts are short, and each grows to its end. So the number changes
    after each turnover of at least MIN_LOOKS looks. Looks at rollouts above a lower number
    do not count: these rollouts must end first.

    Example: 10 slots of one engine, a cache that 40 rollouts fill.
        >>> rule = SlotsRule(10, most=256)
        >>> slots = []
        >>> for look in range(5 * MIN_LOOKS):
        ...     running = rule.current
        ...     slots.append(running)
        ...     now = rule.look(1, running / 40, running, num_ended=sum(slots))
        >>> slots[::MIN_LOOKS]
        [10, 15, 23, 33, 32]
    """

    def __init__(self, start: int, most: int) -> None:
        self.current = min(start, most)
        self._most = most
        self._ended_before = 0
        self._wanted = list[float]()
        self._most_running = 0
        """Of the looks in `_wanted`."""

    def look(
        self, num_engines: int, kv_wanted: float, num_running: int, num_ended: int
    ) -> int:
        """Return the slots of each engine.

        `kv_wanted`: what running and waiting sequences want of the fullest KV cache, as a
        part of it; above 1 if they do not fit. `num_running`: rollouts that hold a slot.
        `num_ended`: since the run began.
        """
        capacity = self.current * num_engines
        if num_running <= capacity:
            self._wanted.append(kv_wanted)
            self._most_running = max(self._most_running, num_running)
        else:
            self._ended_before = num_ended
        num_new = num_ended - self._ended_before
        if num_new >= capacity and len(self._wanted) >= MIN_LOOKS:
            most_wanted = quantiles(self._wanted, n=10, method="inclusive")[-1]
            factor = min(max(most_wanted / TARGET, 1 / MAX_GROWTH), MAX_CUT)
            # Else the look-ahead or the prompts hold rollouts back, not the slots.
            may_raise = self._most_running >= BOUND_FRACTION * capacity
            if factor > 1:
                self.current = max(1, math.floor(self.current / factor))
            elif may_raise:
                self.current = min(self._most, math.ceil(self.current / factor))
            self._ended_before = num_ended
            self._wanted.clear()
            self._most_running = 0
        return self.current
