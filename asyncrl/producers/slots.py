"""Places in the engines, given to rollouts one by one. Knows names and an order; knows no engine, no group."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count


class Slots:
    """`capacity` places for rollouts that sample.

    Life:       of an asker: ask_nowait -> holds a place at once, or waits for one -> give_back_nowait, in either case.
    Waits:      wait sleeps until the asker holds its place; wait_spare until a place is free. Both are woken by give_back_nowait.
    Invariant:  no more than `capacity` hold a place, and nobody waits while one is free: the next one goes to the smallest `order`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._queue: list[tuple[tuple[int, ...], int, str, asyncio.Future[None]]] = []  # heap; those that gave up waiting are skipped
        self._numbers = count()
        self._spare = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Slots {self.num_held}/{self.capacity} held, {self.num_waiting} wait>"

    @property
    def num_held(self) -> int:
        """Rollouts that hold a place."""
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        """Rollouts that wait for one."""
        return len(self._waiting)

    @property
    def has_spare(self) -> bool:
        """Whether a place is free; then nobody waits for it."""
        return len(self._held) < self.capacity

    def ask_nowait(self, name: str, order: tuple[int, ...]) -> None:
        """Hold a place if one is free, else wait for one. Means nothing for whoever holds a place or waits."""
        if name in self._held or name in self._waiting:
            return
        if self.has_spare:
            self._held.add(name)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        heapq.heappush(self._queue, (order, next(self._numbers), name, future))

    async def wait(self, name: str) -> None:
        """Return when the asker holds its place."""
        if name in self._waiting:
            await self._waiting[name]

    async def wait_spare(self) -> None:
        """Return when a place is free."""
        while not self.has_spare:
            await self._spare.wait()

    def give_back_nowait(self, name: str) -> None:
        """Hold no place and wait for none; the place goes to whoever is next."""
        self._waiting.pop(name, None)
        self._held.discard(name)
        while self.has_spare and self._queue:
            _, _, found, future = heapq.heappop(self._queue)
            if self._waiting.get(found) is future:
                del self._waiting[found]
                self._held.add(found)
                if not future.done():  # cancelled in this very moment: its end gives the place back
                    future.set_result(None)
        if self.has_spare:
            self._spare.set()
            self._spare = asyncio.Event()
