"""The routes: who calls, what is asked, how it is answered, whole or as a stream. Knows HTTP, no template."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from aiohttp import web

from asyncrl.agents.endpoint.calls import AskedAs, Call, Kind
from asyncrl.agents.endpoint.openai_answers import Events, whole_body
from asyncrl.agents.endpoint.refusals import NO_RETRY, ApiError, invalid, session_ended, unknown_key
from asyncrl.agents.endpoint.requests import CallRequest
from asyncrl.agents.endpoint.sessions import GatewaySession, Sessions

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_LINGERING_S = 5.0
"""How long the rest of a body is read and dropped after the answer, so that the client can read the refusal.
"""
_TOO_MANY = ApiError(
    503, "Too many connections are open, and all of them are busy (gateway.max_connections)."
)
_WORKER = "a worker"


class Routes:
    """The endpoint of all sessions as an aiohttp app.

    Life:       a request is refused, or finds its session -> its call is sampled, or is one that was sampled
                before -> answered.
    Waits:      handlers sleep in the client's body, the engine, and the client's reading, all bounded by
                Connection or the session.
    Invariant:  whatever a client sends is answered in OpenAI's form; `refused` counts the errors by status.
    """

    def __init__(self, sessions: Sessions, *, model: str, max_body_bytes: int) -> None:
        self._sessions, self._model, self._max_body_bytes = sessions, model, max_body_bytes
        self.refused: Counter[int] = Counter()

    def app(self, extra_routes: Sequence[web.RouteDef]) -> web.Application:
        """The app, with routes of others beside its own."""
        app = web.Application(middlewares=[self._in_form], client_max_size=self._max_body_bytes)
        for prefix in ("/v1", "/s/{key}/v1"):
            app.add_routes(
                [
                    web.post(f"{prefix}/chat/completions", partial(self._complete, "chat")),
                    web.post(f"{prefix}/completions", partial(self._complete, "text")),
                    web.get(f"{prefix}/models", self._models),
                    web.get(f"{prefix}/models/{{model:.+}}", self._models),
                ]
            )
        app.add_routes(extra_routes)
        return app

    @web.middleware
    async def _in_form(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in OpenAI's form."""
        try:
            return await handler(request)
        except ApiError as error:
            failure = error
        except web.RequestPayloadError as error:
            failure = invalid(f"The body of this request is broken: {error}.")
        except web.HTTPException as error:
            if error.status < 400:
                raise
            failure = self._http_error(request, error)
        except Exception:
            log.exception("gateway: a call failed by a mistake of ours")
            if request.writer.output_size > 0:
                raise  # the answer has begun: aiohttp closes the connection
            why = "The gateway made a mistake; its log says which."
            failure = ApiError(500, why, type="server_error", headers=NO_RETRY)
        self.refused[failure.status] += 1
        response = failure.response()
        if failure.status in (408, 500):
            response.force_close()
        return response

    async def _complete(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        stream = _Stream(request)
        try:
            async with session.in_hand():
                async with session.reading:
                    body = await read_body(request)
                    asked = await session.route.read(kind, body)
                    call, is_new = await self._begin(session, kind, asked, _asked_as(kind, body, request))
                with call.attended(stream.is_there):
                    return await self._answer(session, call, asked, stream, is_new=is_new)
        except ApiError as error:
            if 400 <= error.status < 500 and error.status != 410:
                session.refused_nowait()
            if not stream.has_begun:
                raise
            self.refused[error.status] += 1
            return await stream.end(b"data: " + error.body() + b"\n\n")
        except web.HTTPException:  # the body was too large
            session.refused_nowait()
            raise

    async def _begin(
        self, session: GatewaySession, kind: Kind, asked: CallRequest, asked_as: AskedAs
    ) -> tuple[Call, bool]:
        """The call that this one repeats, or a new one."""
        async with session.beginning:
            call = session.calls.find(asked_as)
            if call is not None:
                return call, False
            try:
                return await session.route.begin(session, kind, asked, asked_as), True
            except ApiError as error:
                if "Retry-After" in error.headers:
                    session.calls.refused_nowait(asked_as)
                raise

    async def _answer(
        self, session: GatewaySession, call: Call, asked: CallRequest, stream: _Stream, *, is_new: bool
    ) -> web.StreamResponse:
        """Sample the call, unless it is one that was sampled before, and write what came of it."""
        events = Events(call, self._model, include_usage=asked.include_usage) if asked.stream else None
        if is_new:
            sampling = session.route.sample(session, call, is_streamed=asked.stream)
            if events is not None:
                await asyncio.gather(sampling, self._write_news(call, events, stream))
            else:
                await sampling
        await call.wait_done()
        if session.ended is not None:  # in this very round of the loop: in_hand() has had no turn yet
            raise session_ended(session.ended)
        if stream.is_there():
            session.deliver_nowait(call)
        if events is None:
            return web.Response(body=whole_body(call, self._model), content_type="application/json")
        text = events.news() if is_new else events.again()
        return await stream.end((b"" if stream.has_begun else events.start()) + text + events.end())

    async def _write_news(self, call: Call, events: Events, stream: _Stream) -> None:
        """Text as it comes, until the end or until the client is gone."""
        while not call.is_done and stream.is_there():
            await call.wait_news()
            if not call.is_done and (text := events.news()):
                await stream.write(text if stream.has_begun else events.start() + text)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "asyncrl"}
        name = request.match_info.get("model")
        if name is not None and name != self._model:
            why = f"There is one model here, {self._model}."
            raise ApiError(404, why, code="model_not_found", param="model")
        return web.json_response(model if name is not None else {"object": "list", "data": [model]})

    def _session(self, request: web.Request) -> GatewaySession:
        """Whose call it is. Raises ApiError 401 or 410."""
        key = shown_key(request)
        if not key:
            raise unknown_key()
        session = self._sessions.find(key)
        belongs_to(request, session.key)
        return session

    def _http_error(self, request: web.Request, error: web.HTTPException) -> ApiError:
        """What aiohttp refuses by itself. No key is shown."""
        path = (
            "/s/KEY/" + request.path[3:].partition("/")[2] if request.path.startswith("/s/") else request.path
        )
        shown = path[:200].encode("ascii", "backslashreplace").decode()
        if error.status == 404:
            return ApiError(404, f"Invalid URL ({request.method} {shown}).")
        if isinstance(error, web.HTTPMethodNotAllowed):
            allowed = ", ".join(sorted(error.allowed_methods))
            why = f"{request.method[:16]} is not allowed on {shown}; {allowed} is."
            return ApiError(405, why, headers={"Allow": allowed})
        if error.status == 413:
            return ApiError(413, f"The body is larger than gateway.max_body_bytes={self._max_body_bytes}.")
        return ApiError(error.status, error.reason)


class _Stream:
    """One response that may be a stream of events: begun with the first of them, so that an early error has
    its own status.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    def is_there(self) -> bool:
        """Whether the client is still connected."""
        transport = self._request.transport
        return transport is not None and not transport.is_closing()

    async def write(self, events: bytes) -> None:
        """Write, if the client is there; a client that goes away is no error of the call."""
        try:
            if self._response is None:
                self._response = web.StreamResponse(headers=_EVENT_STREAM)
                await self._response.prepare(self._request)
            await self._response.write(events)
        except ConnectionError:
            pass

    async def end(self, events: bytes) -> web.StreamResponse:
        """The last events."""
        await self.write(events)
        assert self._response is not None
        return self._response


def shown_key(request: web.Request) -> str:
    """The key in the address, or the bearer token; empty if there is none."""
    key = request.match_info.get("key")
    if key is None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else ""
    return key.strip()


def _asked_as(kind: Kind, body: bytes, request: web.Request) -> AskedAs:
    key = request.headers.get("Idempotency-Key", "")
    digest = blake2b(body, digest_size=16, person=kind.encode(), key=blake2b(key.encode()).digest()).digest()
    retries = request.headers.get("x-stainless-retry-count", "")  # what OpenAI's clients count retries in
    return AskedAs(digest, is_retry=bool(retries.strip("0 ")), has_key=bool(key))


# ---- limits of a connection: how long its client may be slow, and how many a client may have


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
