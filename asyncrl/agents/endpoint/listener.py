"""HTTP listener: uvicorn's protocol with limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

BACKLOG = 1024
CLOSE_S = 2.0
"""Seconds for open requests at close."""
MAX_HEAD = 2**16


_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(HttpToolsProtocol):
    """A client connection, in request.scope["connection"].

    It is closed if no whole head arrives within timeout_keep_alive seconds, and gets 503 above
    `max_connections`.
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
        """Keep the timer; uvicorn stops it at a head's first byte."""


class AppServer:
    def __init__(self, app: ASGIApp, *, max_connections: int, idle_s: float) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,  # URLs contain keys
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
        # uvicorn sends head and body separately: avoid the client's delayed ACK
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server = await loop.create_server(self._make, sock=listening, backlog=BACKLOG)

    async def aclose(self) -> None:
        """Close busy connections within CLOSE_S, others immediately. Idempotent."""
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
