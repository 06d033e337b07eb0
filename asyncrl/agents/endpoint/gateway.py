"""The gateway: an OpenAI-compatible endpoint over a SamplingEngine, whose sessions record what was sampled.
Knows no reward, no group.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from aiohttp import web

from asyncrl.agents.endpoint.app import Routes
from asyncrl.agents.endpoint.chat import Sampler, SeedOf
from asyncrl.agents.endpoint.chat_messages import OneThread
from asyncrl.agents.endpoint.choices import GatewayTokenizer
from asyncrl.agents.endpoint.connections import Connection, Crowd, TooMany
from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.sessions import GatewaySession, Lane, SessionLimits, Sessions
from asyncrl.agents.endpoint.tool_calls import ToolFormat
from asyncrl.config import GatewayConfig
from asyncrl.errors import ConfigError, RoomError
from asyncrl.messages.protocols import SamplingEngine, SessionHost

_BACKLOG = 1024
_CLOSE_S = 2.0
"""What calls that are being answered have to leave when the gateway closes."""


@dataclass(frozen=True, slots=True)
class GatewayStats:
    """`calls` were planned so far, and `extended`, `realigned` or `forked` (the rest began a session);
    `refused` counts errors by status.

    Tokens are of calls that were sampled to their end. `sessions`, `connections` and `in_flight` are of now.
    """

    sessions: int
    connections: int
    in_flight: int
    calls: int
    extended: int
    realigned: int
    forked: int
    refused: Mapping[int, int]
    prompt_tokens: int
    completion_tokens: int


class Gateway:
    """The SessionHost, and the endpoint that its sessions' keys open.

    Life:       made -> bind() takes the port, so that its address is known -> start() -> aclose() ends every
    session and connection. Waits:      none of its own; what its handlers wait for is bounded by the client's
    time (gateway.read_timeout_s) and the session. Invariant:  nothing that a client sends reaches an engine
    unchecked, and no call is answered after its session.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        tokenizer: GatewayTokenizer,
        tool_format: ToolFormat,
        rules: CallRules,
        config: GatewayConfig,
        *,
        seed_of: SeedOf,
        on_broken: Callable[[RoomError], None],
        extra_routes: Sequence[web.RouteDef] = (),
    ) -> None:
        """`seed_of`: the seed of a request from (prompt_id, sample_index, attempt, key of the call).
        `on_broken` ends the run.
        """
        self._config = config
        limits = SessionLimits(config.max_calls, config.max_concurrent_calls, config.max_rollout_tokens)
        self._sessions = Sessions(tokenizer, limits)
        self._beside = OneThread()
        self._rules, self._make_sampler = (
            rules,
            partial(Sampler, tokenizer=tokenizer, tool_format=tool_format, beside=self._beside),
        )
        self._sampler = self._make_sampler(engine, rules=rules, seed_of=seed_of, on_broken=on_broken)
        self._samplers = {"": self._sampler}
        self._routes = Routes(
            self._sessions,
            self._samplers,
            model=rules.model_name,
            max_body_bytes=config.max_body_bytes,
            max_reading=config.max_concurrent_calls,
        )
        self._extra_routes = tuple(extra_routes)
        self._socket: socket.socket | None = None
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None

    def __repr__(self) -> str:
        return (
            f"<Gateway {self._sessions.num_open} sessions, {self._sampler.counts.in_flight} calls in flight>"
        )

    def open_nowait(
        self, rollout_id: str, *, prompt_id: str, sample_index: int, attempt: int, route_key: str
    ) -> GatewaySession:
        """A new session, to be ended by whoever opened it."""
        return self._sessions.open_nowait(
            rollout_id, prompt_id=prompt_id, sample_index=sample_index, attempt=attempt, route_key=route_key
        )

    def open_for_people_nowait(
        self, key: str, rollout_id: str, *, prompt_id: str, sample_index: int
    ) -> GatewaySession:
        """A session without a limit of calls, under a key that may open the next one when this one has
        ended.
        """
        return self._sessions.open_nowait(
            rollout_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            attempt=0,
            route_key=rollout_id,
            peoples_key=key,
        )

    def lane(
        self,
        name: str,
        engine: SamplingEngine,
        *,
        temperature: float,
        seed_of: SeedOf,
        on_broken: Callable[[RoomError], None],
    ) -> SessionHost:
        """Sessions of another engine, which are none of stats(). A call that asks for another temperature
        gets this one.
        """
        rules = replace(self._rules, temperature=temperature, on_sampling_override="use_config")
        self._samplers[name] = self._make_sampler(engine, rules=rules, seed_of=seed_of, on_broken=on_broken)
        return Lane(name, self._sessions)

    def bind(self) -> str:
        """Take the port; returns the address for clients, without /v1. Idempotent. Raises ConfigError if it
        cannot be had.
        """
        if self._socket is None:
            self._socket = _bind(self._config.host, self._config.port or 0)
        if self._config.public_url is not None:
            return self._config.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(
            self._config.host, self._config.host
        )
        return f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"

    async def start(self) -> str:
        """Answer from now on; returns the address for clients."""
        url, loop = self.bind(), asyncio.get_running_loop()
        assert self._socket is not None
        runner = self._runner = web.AppRunner(
            self._routes.app(self._extra_routes), handle_signals=False, shutdown_timeout=_CLOSE_S
        )
        await runner.setup()
        crowd = Crowd(self._config.max_connections)

        def connect() -> asyncio.Protocol:
            server = runner.server
            if server is None:
                return TooMany()
            return Connection(server, loop=loop, slow_s=self._config.read_timeout_s, crowd=crowd)

        self._listener = await loop.create_server(connect, sock=self._socket, backlog=_BACKLOG)
        return url

    async def aclose(self) -> None:
        """End every session, answer what is in hand, close every connection. Idempotent."""
        self._sessions.end_all_nowait("the run has ended")
        if self._listener is not None:
            self._listener.close()
        elif self._socket is not None:
            self._socket.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket = self._listener = self._runner = None
        self._beside.close_nowait()

    def stats(self) -> GatewayStats:
        """Counts so far."""
        counts, captured = self._sampler.counts, self._sessions.counts
        server = self._runner.server if self._runner is not None else None
        return GatewayStats(
            sessions=self._sessions.num_open,
            connections=len(server.connections) if server is not None else 0,
            in_flight=counts.in_flight,
            calls=captured.calls,
            extended=captured.extended,
            realigned=captured.realigned,
            forked=captured.forked,
            refused=dict(self._routes.refused),
            prompt_tokens=counts.prompt,
            completion_tokens=counts.completion,
        )

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py."""
        captured = self._sessions.counts
        return {
            "gateway/calls": captured.calls,
            "gateway/extended": captured.extended,
            "gateway/realigned": captured.realigned,
            "gateway/forked": captured.forked,
            "gateway/refused": sum(self._routes.refused.values()),
        }


def _bind(host: str, port: int) -> socket.socket:
    family: Literal[socket.AddressFamily.AF_INET, socket.AddressFamily.AF_INET6]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"gateway.host={host} and gateway.port={port} cannot be listened on: {error.strerror or error}",
            rule="harnesses reach the model under this address",
            way_out="set gateway.port to none for any free one, or choose another; gateway.host must be an "
            "address of this machine.",
        ) from error


# How often Python looks for cycles in the process that the gateway runs in. Knows no gateway; called once, by
# whoever owns the process.
#
# A collection of everything stands still for all calls at once: some 80 ms with what the imports of a run
# leave (110,000 objects),
# again and again as sessions come and go. Almost nothing here is in a cycle: what a call leaves is freed when
# it is answered.


YOUNG = 10_000
"""Objects made and not freed yet until the young ones are looked through; Python's own is 700, less than a
few calls in flight have.
"""


def collect_less() -> None:
    """Never look again through what is there by now, and less often through what comes. Call it when all is
    imported and built.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
