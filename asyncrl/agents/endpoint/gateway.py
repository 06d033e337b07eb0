"""HTTP endpoint in OpenAI's and Anthropic's formats, and its listener: uvicorn's
protocol with limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, get_args

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from asyncrl.agents.endpoint import openapi
from asyncrl.agents.endpoint.anthropic_dialect import MESSAGES
from asyncrl.agents.endpoint.calls import GatewayCall
from asyncrl.agents.endpoint.chat_node import Deviation
from asyncrl.agents.endpoint.dialects import Dialect, Writer, error_body, model_body
from asyncrl.agents.endpoint.openai_dialects import CHAT, RESPONSES, TEXT
from asyncrl.agents.endpoint.requests import (
    NO_RETRY,
    ApiError,
    CallRules,
    dumped,
    invalid,
    shown,
    too_large,
)
from asyncrl.agents.endpoint.session import (
    EngineRoute,
    GatewaySession,
    OnBroken,
    SeedOf,
)
from asyncrl.agents.endpoint.sessions import (
    CLIENT_GONE,
    MAX_REMEMBERED,
    Sessions,
    Written,
    client_gone,
)
from asyncrl.agents.endpoint.sub_agents import Agent, agent_of
from asyncrl.agents.endpoint.tool_formats import ToolFormat
from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused
from asyncrl.base.waits import at_most, within
from asyncrl.config import GatewayConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.sampling import SamplingParameters
from asyncrl.messages.worker_api import ChatTokenizer

MAX_BODY_BYTES = 2**25
"""Size of the largest call, with screenshots; Anthropic accepts 32 MB."""
SMALL_BODY_BYTES = 2**22
"""A session has at most MAX_LARGE_BODIES larger ones in memory."""
READ_TIMEOUT_S = 30.0
"""Seconds in which a client must have sent its whole request."""
MAX_CONNECTIONS = 8192
"""Open connections; above it, idle ones are closed."""
_JSON = [(b"content-type", b"application/json")]
# The last header is for nginx, which would otherwise collect a stream and send it
# whole.
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
COUNTED = (
    *("calls", "extended", "realigned", "edited", "untrained", "refused"),
    *(f"kept_{name}" for name in get_args(Deviation)),
)
_ROUTES = "There are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /v1/models."


class Gateway:
    """SessionHost of a run's engines, and HTTP endpoint of its sessions.

    Waits: for client and engine, until READ_TIMEOUT_S, the session's end, or a
        disconnect.
    Invariant: no unchecked client value reaches an engine; no call is answered after
        its session ended.
    """

    def __init__(
        self,
        engine: EnginePool,
        tokenizer: ChatTokenizer,
        tool_format: ToolFormat,
        rules: CallRules,
        config: GatewayConfig,
        *,
        seed_of: SeedOf,
        on_broken: OnBroken,
        extra_routes: Sequence[BaseRoute] = (),
    ) -> None:
        """`on_broken` ends the run."""
        self._config = config
        self.sessions = Sessions[GatewaySession](config)
        self._route = EngineRoute(
            self.sessions, engine, tokenizer, tool_format, rules, seed_of, on_broken
        )
        self.open_nowait = self._route.open_nowait
        self._socket: socket.socket | None = None
        self.app = self._app(extra_routes)
        self.listener = AppServer(
            self.app, max_connections=MAX_CONNECTIONS, idle_s=READ_TIMEOUT_S
        )

    def _app(self, extra_routes: Sequence[BaseRoute]) -> Router:
        kinds = (ApiError, HTTPException, Refused, ClientDisconnect, Exception)
        app = FastAPI(
            openapi_url=None,
            redirect_slashes=False,
            exception_handlers=dict.fromkeys(kinds, self._failed),
        )
        add = partial(app.add_api_route, response_model=None)
        # FastAPI's layers take a fifth of a call's CPU time, so the routes of calls
        # stand before it.
        routes: list[BaseRoute] = []
        for prefix in ("/v1", "/s/{key}/v1"):
            for dialect in (CHAT, TEXT, RESPONSES, MESSAGES):
                answer = _CallEndpoint(self, dialect)
                routes.append(Route(f"{prefix}/{dialect.path}", answer))
            add(f"{prefix}/messages/count_tokens", self._count, methods=["POST"])
            add(f"{prefix}/models", self._models)
            add(f"{prefix}/models/{{model:path}}", self._models)
        app.add_api_route("/health", self._health)
        app.router.routes += [*openapi.ROUTES, *extra_routes]
        return Router([*routes, Mount("/", app)])

    def add_route(
        self,
        engine: EnginePool,
        *,
        sampling: SamplingParameters,
        seed_of: SeedOf,
        on_broken: OnBroken,
    ) -> EngineRoute:
        """Return a host of another engine's sessions, which gauges() excludes."""
        # Evaluations of different versions are compared, so agents must not change the
        # parameters.
        rules = replace(
            self._route.rules, sampling=sampling, on_sampling_override="use_config"
        )
        # This runs __post_init__ again: the new route has its own counts, locks and
        # frames. It shares the sessions and the verdicts on grammars.
        return replace(
            self._route,
            engine=engine,
            rules=rules,
            seed_of=seed_of,
            on_broken=on_broken,
        )

    def bind(self) -> str:
        """Return the clients' address, without /v1. Idempotent. Raises ConfigError."""
        host = self._config.host
        port = self._config.port or 0
        # Bound long before start(): the workers' specs contain the port, and a port in
        # use must fail before anything starts.
        if self._socket is None:
            try:
                self._socket = socket.create_server((host, port), backlog=BACKLOG)
            except OSError as error:
                raise ConfigError(
                    f"gateway.host={host} and gateway.port={port} cannot be listened on: {error}",
                    way_out="give an address of this machine and a free port; gateway.port=none takes any.",
                ) from error
        if self._config.public_url is not None:
            return self._config.public_url.rstrip("/")
        host = "127.0.0.1" if host == "0.0.0.0" else host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    async def start(self) -> str:
        url = self.bind()
        assert self._socket is not None
        await self.listener.listen(self._socket)
        return url

    async def aclose(self) -> None:
        self.sessions.end_all_nowait("the run has ended")
        await self.listener.aclose()
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def gauges(self) -> dict[str, float]:
        counts = self._route.counts
        gauges: dict[str, float] = {f"gateway/{name}": counts[name] for name in COUNTED}
        gauges["gateway/with_notes"] = self._route.reader.num_with_notes
        return gauges

    # ---- routes

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Answer an error without the address: it may contain a key."""
        if isinstance(error, Refused):
            return Response(
                error.body.model_dump_json(),
                error.status,
                media_type="application/json",
            )
        told = self._counted(error)
        await _read_rest(request)
        if told.status in (408, 500):
            told.headers["Connection"] = "close"
        body = error_body(told, request.scope["path"], request.headers)
        return Response(body, told.status, told.headers, "application/json")

    def _counted(self, error: Exception) -> ApiError:
        """Return an error as the client gets it, and count it."""
        if isinstance(error, ClientDisconnect):
            return client_gone()
        if isinstance(error, HTTPException):
            why = (
                f"Invalid URL. {_ROUTES}" if error.status_code == 404 else error.detail
            )
            error = ApiError(error.status_code, why, headers=error.headers)
        elif not isinstance(error, ApiError):
            why = "Internal error of the gateway; its log has the traceback."
            error = ApiError(500, why, type="server_error", headers=NO_RETRY)
        if error.status != CLIENT_GONE:
            self._route.counts["refused"] += 1
        return error

    async def answer(self, dialect: Dialect, request: Request, reply: _Reply) -> None:
        """Answer a call, also with an error. Raises internal errors, to be logged."""
        try:
            if request.method != "POST":
                raise ApiError(405, "A call is a POST.", headers={"Allow": "POST"})
            session = self.sessions.find(shown_key(request))
            async with session.in_hand(request.scope["connection"]) as reply.place:
                await self._complete(session, dialect, request, reply)
        except (ApiError, ClientDisconnect) as error:
            await self._tell(request, reply, error)
        except Exception as error:
            await self._tell(request, reply, error)
            raise

    async def _tell(self, request: Request, reply: _Reply, error: Exception) -> None:
        if not reply.has_begun:
            response = await self._failed(request, error)
            return await response(request.scope, request.receive, reply.send)
        told = self._counted(error)
        if told.status != CLIENT_GONE:
            await reply.write(reply.failure(told), is_last=True)

    async def _complete(
        self, session: GatewaySession, dialect: Dialect, request: Request, reply: _Reply
    ) -> None:
        body = await _call_body(session, request, reply.place)
        # Equal calls of two agents are not retries of each other.
        agent = agent_of(request)
        head = f"{dialect.name} {agent.name}\n".encode()
        digest = blake2b(head + body, digest_size=16).digest()
        # OpenAI's and Anthropic's clients count their retries.
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        connection = request.scope["connection"]
        written = session.retries.begin(digest, is_retry=is_retry)
        if written is not None:
            connection.written = written
            return await reply.write(
                written.content, is_last=True, is_stream=written.is_stream
            )
        try:
            rest, is_stream = await self._sampled(
                session, agent, dialect, body, request, reply
            )
        except ApiError as error:
            error.rename(dialect.names)
            # A client that has left may retry. Its call stays open for that retry,
            # which would otherwise get the answer of an equal call.
            if error.status != CLIENT_GONE:
                session.retries.withdraw_nowait(digest)
            raise
        # Before the write: if the connection breaks in it, connection_lost marks this
        # answer as lost, and a retry gets it.
        connection.written = Written(bytes(reply.written + rest), is_stream)
        session.retries.keep_nowait(digest, connection.written)
        await reply.write(rest, is_last=True, is_stream=is_stream)

    async def _sampled(
        self,
        session: GatewaySession,
        agent: Agent,
        dialect: Dialect,
        body: bytes,
        request: Request,
        reply: _Reply,
    ) -> tuple[bytes, bool]:
        """Record an answer; return the rest to write, and whether it is a stream.
        Raises ApiError.
        """
        asked, writer = await session.read(dialect, body)
        reply.failure = writer.failure
        call = await session.prompt(agent, dialect, asked, len(body))
        try:
            # A stream gives its place back now. It may wait long for a slot, and must
            # not hold up the heads of later streams. If sampling fails, gather raises
            # at once, and _stream soon ends by itself, because sample() always sets
            # is_sampled.
            if asked.stream:
                await reply.place.aclose()
                _, rest = await asyncio.gather(
                    session.sample(call), _stream(call, writer, reply)
                )
            else:
                await session.sample(call)
                rest = dumped(writer.body(call))
            # Nothing is awaited between this test and the record, so the capture has
            # exactly the answers that are written to connected clients.
            if not is_connected(request):
                raise client_gone()
            session.record_nowait(call, writer.continues)
        except BaseException:
            # A cancelled call gives back its number, so that its repetition has the
            # same seed.
            session.withdraw_nowait(call)
            raise
        return rest, asked.stream

    async def _count(self, request: Request) -> Response:
        session = self.sessions.find(shown_key(request))
        async with session.in_hand(request.scope["connection"]) as place:
            body = await _call_body(session, request, place)
            num_tokens = await session.count(MESSAGES, body)
            return JSONResponse({"input_tokens": num_tokens})

    async def _models(self, request: Request) -> Response:
        self.sessions.find(shown_key(request))
        return JSONResponse(
            model_body(self._route.rules, request.path_params.get("model"))
        )

    async def _health(self, request: Request) -> Response:
        if self.sessions.run_end is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse(
            {"status": f"the run is ending: {self.sessions.run_end}"}, 503
        )


def is_connected(request: Request) -> bool:
    return not request.scope["connection"].transport.is_closing()


@dataclass(frozen=True)
class _CallEndpoint:
    gateway: Gateway
    dialect: Dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.gateway.answer(self.dialect, Request(scope, receive), _Reply(send))


class _Reply:
    """Response to a call, written in pieces."""

    failure: Callable[[ApiError], bytes]
    place: AsyncExitStack
    """Among the session's open requests."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.has_begun = False
        self.written = bytearray()
        """The beginning of a stream, for a retry."""

    async def write(
        self, content: bytes, *, is_last: bool = False, is_stream: bool = True
    ) -> None:
        if not self.has_begun:
            self.has_begun = True
            length = (b"content-length", str(len(content)).encode())
            headers = _EVENT_STREAM if is_stream else [*_JSON, length]
            await self.send(
                {"type": "http.response.start", "status": 200, "headers": headers}
            )
        # One piece beyond the limit shows Retries that the answer is too long to
        # remember.
        if not is_last and len(self.written) <= MAX_REMEMBERED:
            self.written += content
        await self.send(
            {"type": "http.response.body", "body": content, "more_body": not is_last}
        )


async def _stream(call: GatewayCall, writer: Writer, reply: _Reply) -> bytes:
    """Write a stream while the call is sampled; return the rest, written once the
    answer is recorded.
    """
    rest = b""
    async for event in writer.events(call):
        if call.is_sampled:
            rest += event
        else:
            await reply.write(event)
    return rest


def shown_key(request: Request) -> str:
    key = request.path_params.get("key")
    if key is None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = (
            token
            if scheme.lower() == "bearer"
            else request.headers.get("x-api-key", "")
        )
    return key.strip()


def _large(most: int) -> ApiError:
    return ApiError(413, f"The body is larger than {most} bytes.")


async def read_body(
    request: Request, max_bytes: int, large: Callable[[int], ApiError] = _large
) -> bytes:
    """Return the body of a request. Raises ApiError: `large` (413) above `max_bytes`,
    408 after READ_TIMEOUT_S.
    """
    body = bytearray()
    is_here = not request.scope["connection"].cycle.more_body
    why = f"The body of this request did not arrive within {READ_TIMEOUT_S} s."
    late = partial(ApiError, 408, why)
    async with contextlib.nullcontext() if is_here else within(READ_TIMEOUT_S, late):
        more_body = True
        while more_body:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message["body"]
            more_body = message["more_body"]
            if len(body) > max_bytes:
                raise large(max_bytes)
    return bytes(body)


async def _call_body(
    session: GatewaySession, request: Request, place: AsyncExitStack
) -> bytes:
    """Return the decompressed body of a call. Raises ApiError."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    length = request.headers.get("content-length", "")
    is_small = length.isdecimal() and int(length) <= SMALL_BODY_BYTES
    if encoding != "identity" or not is_small:
        await place.enter_async_context(session.large_bodies)
    body = await read_body(request, MAX_BODY_BYTES, too_large)
    if encoding == "identity":
        return body
    return await asyncio.to_thread(_inflated, body, encoding)


def _inflated(body: bytes, encoding: str) -> bytes:
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(
            415,
            f"Content-Encoding {shown(encoding)} is not supported: send gzip, deflate or none.",
            headers={"Accept-Encoding": "gzip, deflate"},
        )
    # Some clients send deflate without zlib's header.
    is_bare = encoding == "deflate" and body[:1] and body[0] & 15 != zlib.DEFLATED
    inflater = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else 32 + zlib.MAX_WBITS)
    try:
        inflated = inflater.decompress(body, MAX_BODY_BYTES)
    except zlib.error as error:
        raise invalid(f"The body is not {encoding}: {error}.") from None
    if inflater.unconsumed_tail:
        raise too_large(MAX_BODY_BYTES)
    if not inflater.eof:
        raise invalid(f"The body is cut: its {encoding} data has no end.")
    return inflated


async def _read_rest(request: Request) -> None:
    """Read the rest of a body: closing with unread data would reset the connection
    before the client has read its answer.
    """
    cycle = request.scope["connection"].cycle
    async with at_most(READ_TIMEOUT_S):
        while cycle.more_body and not (cycle.keep_alive or cycle.disconnected):
            await request.receive()


BACKLOG = 1024
CLOSE_S = 2.0
"""Seconds for open requests at close."""
MAX_HEAD = 2**16


class Connection(HttpToolsProtocol):
    """A client connection, in request.scope["connection"].

    It is closed if no whole head arrives within timeout_keep_alive seconds. Above
    `max_connections` it replaces the connection that has waited longest for a first
    head, or else for a later one. If none waits, it gets 503.
    """

    def __init__(self, max_connections: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._max_connections = max_connections
        self._num_head: int | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.written: Written | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._max_connections:
            # the timer runs while a connection waits for a head
            connections: set[Any] = self.connections
            timers = {each: each.timeout_keep_alive_task for each in connections}
            ends = {
                each: (each.cycle is not None, timer.when())
                for each, timer in timers.items()
                if timer
            }
            if not ends:
                # uvicorn's protocol must not read from a connection that it does not
                # count.
                transport.set_protocol(asyncio.Protocol())
                self.transport = transport
                self._refuse(
                    ApiError(
                        503, f"{len(timers)} connections are open.", type="server_error"
                    )
                )
                return
            oldest = min(ends, key=lambda each: ends[each])
            # At once, since abort() reports the loss only in the loop's next round.
            connections.discard(oldest)
            oldest.transport.abort()
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if self.written is not None:
            # a write after the client's end shows as an error of the socket
            error = self.transport.get_extra_info("socket").getsockopt(
                socket.SOL_SOCKET, socket.SO_ERROR
            )
            self.written.is_lost = (
                exc is not None or error != 0 or not self.cycle.response_complete
            )
        super().connection_lost(exc)
        super()._unset_keepalive_if_required()
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._num_head is not None:
            self._num_head += len(data)
            # The parser has no limit and would collect an endless head.
            if self._num_head > MAX_HEAD:
                self.send_400_response("The request head is too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head = 0
        self.written = None
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._num_head = None
        super()._unset_keepalive_if_required()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            # A redirect would send clients to the proxy's inner address.
            scope["path"] = scope["path"].rstrip("/") or "/"
            await app(scope, receive, send)
            # a write that fails closes the transport before uvicorn learns of it, and
            # reports an open answer
            cycle.disconnected |= self.transport.is_closing()

        super()._start_asgi_task(cycle, answer)

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid(msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the app."""
        body = error.body()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
        self.transport.close()

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
        # uvicorn.Server would do this, but it also takes over the signals of the
        # process.
        config.load()
        config.timeout_keep_alive = idle_s  # type: ignore[assignment]
        self._state = ServerState()
        self.connections: Collection[Any] = self._state.connections
        self._make = partial(
            Connection,
            max_connections,
            config=config,
            server_state=self._state,
            app_state={},
        )
        self._server: asyncio.Server | None = None

    async def listen(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # uvicorn sends head and body separately: avoid the client's delayed ACK
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server = await loop.create_server(
            self._make, sock=listening, backlog=BACKLOG
        )

    async def aclose(self) -> None:
        """Close busy connections within CLOSE_S, others immediately. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.shutdown()
        # The gateway has ended its sessions before. So its open answers are mostly
        # errors by now, which clients should still read.
        if self._state.tasks:
            _, late = await asyncio.wait(set(self._state.tasks), timeout=CLOSE_S)
            for task in late:
                task.cancel()
        for connection in list(self.connections):
            connection.transport.abort()
