"""The gateway: an OpenAI-compatible endpoint whose sessions record what was sampled."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from aiohttp import web

from asyncrl.agents.endpoint.answer_text import GatewayTokenizer
from asyncrl.agents.endpoint.capture import GatewayStats
from asyncrl.agents.endpoint.endpoint_routes import Connection, EndpointRoutes
from asyncrl.agents.endpoint.engine_route import EngineRoute, SeedOf
from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.sessions import Sessions
from asyncrl.agents.endpoint.tool_calls import ToolFormat
from asyncrl.config import GatewayConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import ConfigError, RoomError

_BACKLOG = 1024
_CLOSE_S = 2.0
"""Seconds that calls in hand have to end when the gateway closes."""
_LINGERING_S = 5.0
"""How long the rest of a body is read and dropped after the answer, so that the client can read the refusal.
"""


class Gateway:
    """The SessionHost of a run's engines, and the HTTP endpoint that clients call with its sessions' keys.

    Life: made -> bind() takes the port, so that its address is known -> start() -> aclose() ends every
        session and connection.
    Invariant: nothing that a client sends reaches an engine unchecked, and no call is answered after its
        session.
    """

    def __init__(
        self,
        engine: EnginePool,
        tokenizer: GatewayTokenizer,
        tool_format: ToolFormat,
        rules: CallRules,
        config: GatewayConfig,
        *,
        seed_of: SeedOf,
        on_broken: Callable[[RoomError], None],
        extra_routes: Sequence[web.RouteDef] = (),
    ) -> None:
        """`on_broken` ends the run."""
        self._config, self._rules, self._extra_routes = config, rules, extra_routes
        self._sessions = Sessions(config)
        self._make_route = partial(EngineRoute, self._sessions, tokenizer=tokenizer, tool_format=tool_format)
        self._route = self._make_route(engine, rules=rules, seed_of=seed_of, on_broken=on_broken)
        self.open_nowait = self._route.open_nowait
        self._routes = EndpointRoutes(self._sessions, model=rules.model_name)
        self._socket: socket.socket | None = None
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None

    def add_route(
        self,
        engine: EnginePool,
        *,
        temperature: float,
        seed_of: SeedOf,
        on_broken: Callable[[RoomError], None],
    ) -> EngineRoute:
        """The host of another engine's sessions, which stats() does not count. A call that asks for another
        temperature gets this one.
        """
        rules = replace(self._rules, temperature=temperature, on_sampling_override="use_config")
        return self._make_route(engine, rules=rules, seed_of=seed_of, on_broken=on_broken)

    def bind(self) -> str:
        """Take the port; returns the address for clients, without /v1. Idempotent. Raises ConfigError if it
        cannot be had.
        """
        host, port = self._config.host, self._config.port or 0
        if self._socket is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            except OSError as error:
                raise ConfigError(
                    f"gateway.host={host} and gateway.port={port} cannot be listened on: {error}",
                    rule="gateway.host is an address of this machine, and the port is free",
                    way_out="set gateway.port to none for any free one, or choose another.",
                ) from error
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # of a client that takes nothing for so long (Linux)
                slow_ms = max(1, int(self._config.read_timeout_s * 1000))
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, slow_ms)
        if self._config.public_url is not None:
            return self._config.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"

    async def start(self) -> str:
        """Answer from now on; returns the address for clients."""
        url, loop, slow_s = self.bind(), asyncio.get_running_loop(), self._config.read_timeout_s
        app = self._routes.app(self._extra_routes)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        assert self._runner.server is not None
        assert self._socket is not None
        make = partial(
            Connection,
            self._runner.server,
            self._config.max_connections,
            loop=loop,
            access_log=None,  # keys are in URLs
            keepalive_timeout=slow_s,
            lingering_time=min(slow_s, _LINGERING_S),
            logger=logging.getLogger("asyncrl.gateway.http"),
        )
        self._listener = await loop.create_server(make, sock=self._socket, backlog=_BACKLOG)
        return url

    async def aclose(self) -> None:
        """End every session, answer what is in hand, close every connection. Idempotent."""
        self._sessions.end_all_nowait("the run has ended")
        for listening in (self._listener, self._socket):
            if listening is not None:
                listening.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket = self._listener = self._runner = None

    def stats(self) -> GatewayStats:
        """Counts so far."""
        server = self._runner.server if self._runner is not None else None
        return replace(
            self._route.counts,
            sessions=self._sessions.num_open,
            connections=len(server.connections) if server is not None else 0,
            refused=dict(self._routes.refused),
        )

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/metrics.py."""
        counts, refused = self._route.counts, sum(self._routes.refused.values())
        names = ("calls", "extended", "realigned", "forked")
        return {f"gateway/{name}": getattr(counts, name) for name in names} | {"gateway/refused": refused}


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
