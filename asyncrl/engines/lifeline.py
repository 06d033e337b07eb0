"""Ends the calls that wait for a server which was given up. Knows no message and no server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Answer = TypeVar("Answer")


class CallCut(Exception):  # noqa: N818  nothing failed: somebody decided
    """The server was given up before it answered."""


class Lifeline:
    """What all calls to one process hang on.

    Life:       whole -> cut, for good: the next process gets a line of its own, so that a call knows whose it was.
    Waits:      hold sleeps in its call. cut_nowait ends all of them at once, those to come too: a frozen process
                keeps its connections, and nothing else would end them.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self._limits: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"<Lifeline {'cut' if self.is_cut else 'whole'}, {len(self._limits)} calls>"

    async def hold(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `call` returns or raises; CallCut once the line is cut."""
        if self.is_cut:
            raise CallCut
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    return await call()
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise CallCut from None

    def cut_nowait(self) -> None:
        """End all calls; idempotent."""
        self.is_cut = True
        limits, self._limits = self._limits, set()
        if limits:
            now_s = asyncio.get_running_loop().time()
            for limit in limits:
                limit.reschedule(now_s)
