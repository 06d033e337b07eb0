"""Limits of a client's connection: how long it may be slow, and how many a client may have."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from aiohttp import web

from asyncrl.agents.endpoint.refusals import ApiError

_LINGERING_S = 5.0
"""How long the rest of a body is read and dropped after the answer, so that the client can read the refusal.
"""
_TOO_MANY = ApiError(
    503, "Too many connections are open, and all of them are busy (gateway.max_connections)."
)
_WORKER = "a worker"


class Crowd:
    """All open connections by holder: a client's address until it has shown a key, then that key or a worker.

    Invariant:  never more than max_connections. A new connection takes the place of one of the holder that
                has most: the oldest idle one, or any of a client that has shown no key. Workers lose none.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._holders: dict[Connection, str] = {}
        self._held: dict[str, dict[Connection, None]] = {}

    def enter_nowait(self, connection: Connection, holder: str) -> bool:
        """False if there is no room and none can be made."""
        if len(self._holders) >= self.max_connections and not self._make_room():
            return False
        self._holders[connection] = holder
        self._held.setdefault(holder, {})[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        """It is closed. Idempotent."""
        holder = self._holders.pop(connection, None)
        if holder is not None:
            del self._held[holder][connection]
            if not self._held[holder]:
                del self._held[holder]

    def known(self, connection: Connection, holder: str) -> None:
        """It has shown a key. Nothing happens if it has left."""
        if self._holders.get(connection, holder) != holder:
            self.leave(connection)
            self.enter_nowait(connection, holder)

    def _make_room(self) -> bool:
        for holder in sorted(self._held, key=lambda name: len(self._held[name]), reverse=True):
            for connection in self._held[holder]:
                if holder != _WORKER and (holder.startswith("address ") or connection.is_idle):
                    self.leave(connection)
                    connection.force_close()
                    return True
        return False


class Connection(web.RequestHandler):
    """One connection. aiohttp closes one that is idle, or within a request's head, for `slow_s`."""

    __slots__ = ("crowd", "slow_s")

    def __init__(
        self, server: web.Server, *, loop: asyncio.AbstractEventLoop, slow_s: float, crowd: Crowd
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=slow_s,
            access_log=None,  # type: ignore[arg-type]  # keys are in URLs
            logger=logging.getLogger("asyncrl.gateway.http"),
            auto_decompress=False,
            lingering_time=min(slow_s, _LINGERING_S),
        )
        self.slow_s, self.crowd = slow_s, crowd

    @property
    def is_idle(self) -> bool:
        """It waits for a request, or for the rest of a request's head."""
        return self._waiter is not None and not self._waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio, once."""
        peer = transport.get_extra_info("peername")
        if self.crowd.enter_nowait(self, f"address {peer[0] if peer else ''}"):
            super().connection_made(transport)
            return
        assert isinstance(transport, asyncio.Transport)
        body = _TOO_MANY.body()
        head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json"
        transport.set_protocol(asyncio.Protocol())
        transport.write(f"{head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by asyncio, once."""
        self.crowd.leave(self)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called by aiohttp for bytes that are no HTTP, which are the client's affair."""


def close_slow_readers(listener: socket.socket, slow_s: float) -> None:
    """Have the kernel break a connection whose client takes nothing for so long (Linux)."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(slow_s * 1000)))


def belongs_to(request: web.BaseRequest, key: str | None) -> None:
    """The client of this request has shown a key that is known; None: the worker key."""
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.crowd.known(connection, _WORKER if key is None else f"key {key}")


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises ApiError if it is packed or too slow, web.HTTPException if it is too large."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(415, "Content-Encoding is not supported; send the body as it is.")
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    slow_s = request.protocol.slow_s if isinstance(request.protocol, Connection) else None
    try:
        async with asyncio.timeout(slow_s):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"The body of this request was not there after {slow_s} s.") from None
