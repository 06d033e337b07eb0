"""Connections of clients, and what the process is set to once it serves them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

from aiohttp import web

from asyncrl.agents.endpoint.answers import ApiError

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Connection(web.RequestHandler):
    """One connection. aiohttp closes one that is idle, or within a request's head, for read_timeout_s. One
    more than `most` takes the place of the one that is idle longest; if none is, it is answered with 503.
    """

    __slots__ = ("_most", "on_lost")

    def __init__(self, server: web.Server, most: int, **settings: Any) -> None:
        super().__init__(server, auto_decompress=False, **settings)
        self._most = most
        self.on_lost: list[Callable[[], None]] = []

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        for left in list(self.on_lost):
            left()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self._manager is not None
        others = [each for each in self._manager.connections if each.transport is not None]
        if len(others) >= self._most:
            idle = [each for each in others if each._waiter is not None and not each._waiter.done()]
            if not idle:
                assert isinstance(transport, asyncio.Transport)
                transport.set_protocol(asyncio.Protocol())
                transport.write(_FULL)
                transport.close()
                return
            idle[0].force_close()
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called by aiohttp for a request that is not HTTP. Its own answer would repeat the key."""
        if status != 400 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        response = ApiError(status, "The head of this request is malformed or too long.").response()
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called by aiohttp for bytes that are not HTTP. They are a mistake of the client and are not
        logged.
        """


YOUNG = 10_000
"""Objects made and not freed yet until Python looks for cycles among them; its own number is 700, less than a
few calls in flight have.
"""


def collect_less() -> None:
    """Exclude all present objects from garbage collection, and collect new ones less often. Call it when all
    is imported and built.

    A collection of everything stands still for all calls at once: some 80 ms with what the imports of a run
    leave (110,000 objects). Almost nothing here is in a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
