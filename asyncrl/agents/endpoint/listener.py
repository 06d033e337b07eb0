"""HTTP listener: uvicorn's protocol on our own socket, with limits."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Collection
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

BACKLOG = 1024
CLOSE_S = 2.0
MAX_HEAD = 2**16
"""Most bytes of a request's head, plus one read of the socket."""


_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(HttpToolsProtocol):
    """A client connection, closed if no whole head arrives within timeout_keep_alive seconds.

    Above `max_connections`, a new connection gets 503.
    """

    def __init__(self, max_connections: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._max_connections = max_connections
        self._num_head: int | None = None
        self.on_lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._max_connections:
            transport.set_protocol(asyncio.Protocol())
            transport.write(_FULL)
            transport.close()
            return
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        super()._unset_keepalive_if_required()
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._num_head is not None:
            self._num_head += len(data)
            if self._num_head > MAX_HEAD:
                self.send_400_response("The request head is too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head = 0
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._num_head = None
        super()._unset_keepalive_if_required()
        super().on_headers_complete()

    def _unset_keepalive_if_required(self) -> None:
        """Keep the timer; uvicorn would stop it at the first byte of a head."""


class AppServer:
    """An app on a socket. Life: listen() -> aclose()."""

    def __init__(self, app: ASGIApp, *, max_connections: int, idle_s: float) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,  # keys are in URLs
            proxy_headers=False,
            interface="asgi3",
            lifespan="off",
            ws="none",
        )
        config.load()
        config.timeout_keep_alive = idle_s  # type: ignore[assignment]
        self._state = ServerState()
        settings = {"config": config, "server_state": self._state, "app_state": {}}
        self._make = lambda: Connection(max_connections, **settings)
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> Collection[object]:
        return self._state.connections

    async def listen(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # uvicorn sends head and body separately; without this the body waits for the client's delayed ACK
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server = await loop.create_server(self._make, sock=listening, backlog=BACKLOG)

    async def aclose(self) -> None:
        """Close every connection; busy ones within CLOSE_S. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            _, late = await asyncio.wait(set(self._state.tasks), timeout=CLOSE_S)
            for task in late:
                task.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()


YOUNG = 10_000
"""New objects per garbage collection; Python's 700 are below a few calls in flight."""


def collect_less() -> None:
    """Collect garbage less often, and exclude all present objects.

    A full collection of a run's 110,000 imported objects blocks all calls for 80 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
