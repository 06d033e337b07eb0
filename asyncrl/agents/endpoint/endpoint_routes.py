"""The HTTP routes: checks the key, reads the call, writes the answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from aiohttp import web

from asyncrl.agents.endpoint.openai_form import (
    NO_RETRY,
    ApiError,
    ChatForm,
    Events,
    TextForm,
    invalid,
    session_ended,
    unknown_key,
    whole_body,
)
from asyncrl.agents.endpoint.sessions import GatewayCall, GatewaySession, Sessions

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

READ_TIMEOUT_S = web.AppKey("read_timeout_s", float)
_EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class EndpointRoutes:
    """The endpoint of all sessions as an aiohttp app.

    Life: a request is refused, or finds its session -> its call is sampled, or is one that was sampled before
        -> answered.
    Waits: handlers sleep in the client's body, the engine, and the client's reading, all bounded by
        read_timeout_s or the session.
    Invariant: whatever a client sends is answered in OpenAI's form; `refused` counts the errors by status.
    """

    def __init__(self, sessions: Sessions, *, model: str) -> None:
        self._sessions, self._model = sessions, model
        self._max_body_bytes, self.refused = sessions.limits.max_body_bytes, Counter[int]()

    def app(self, extra_routes: Sequence[web.RouteDef]) -> web.Application:
        """The app, with routes of others beside its own."""
        app = web.Application(middlewares=[self._in_form], client_max_size=self._max_body_bytes)
        app[READ_TIMEOUT_S] = self._sessions.limits.read_timeout_s
        for prefix in ("/v1", "/s/{key}/v1"):
            app.add_routes(
                [
                    web.post(f"{prefix}/chat/completions", partial(self._complete, ChatForm())),
                    web.post(f"{prefix}/completions", partial(self._complete, TextForm())),
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
            failure = self._http_error(error)
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

    async def _complete(self, form: ChatForm, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        stream = _Stream(request)
        try:
            async with session.in_hand():
                async with session.reading:
                    body = await read_body(request)
                    digest, is_retry = _asked_as(form, body, request)
                    begun = session.route.begin(session, form, body, digest, is_retry=is_retry)
                    call, asked, is_new = await begun
                with call.attended(stream.is_there):
                    events = None
                    if asked.stream:
                        events = Events(call, self._model, include_usage=asked.include_usage)
                    return await self._answer(session, call, events, stream, is_new=is_new)
        except ApiError as error:
            if 400 <= error.status < 500 and error.status != 410:
                session.refused_nowait()
            if not stream.has_begun:
                raise
            self.refused[error.status] += 1
            return await stream.write(b"data: " + error.body() + b"\n\n")

    async def _answer(
        self,
        session: GatewaySession,
        call: GatewayCall,
        events: Events | None,
        stream: _Stream,
        *,
        is_new: bool,
    ) -> web.StreamResponse:
        """Sample the call, unless it is one that was sampled before, and write what came of it."""
        if is_new:
            sampling = session.route.sample(session, call, is_streamed=events is not None)
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
        return await stream.write(events.end())

    async def _write_news(self, call: GatewayCall, events: Events, stream: _Stream) -> None:
        """Text as it comes, until the end or until the client is gone."""
        while not call.is_done and stream.is_there():
            await call.wait_news()
            if not call.is_done and (text := events.news()):
                await stream.write(text)

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
        return self._sessions.find(key)

    def _http_error(self, error: web.HTTPException) -> ApiError:
        """What aiohttp refuses by itself. The address is not shown, for it may hold a key."""
        why = error.reason
        if error.status == 404:
            why = "Invalid URL. There are /v1/chat/completions, /v1/completions and /v1/models."
        elif error.status == 413:
            why = f"The body is larger than gateway.max_body_bytes={self._max_body_bytes}."
        allow = {name: value for name, value in error.headers.items() if name == "Allow"}
        return ApiError(error.status, why, headers=allow)


class _Stream:
    """One response that may be a stream of events: begun with the first of them, so that an early error has
    its own status.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_EVENT_STREAM)
        self.has_begun = False

    def is_there(self) -> bool:
        """Whether the client is still connected."""
        transport = self._request.transport
        return transport is not None and not transport.is_closing()

    async def write(self, events: bytes) -> web.StreamResponse:
        """Write, if the client is there; a client that goes away is no error of the call."""
        with contextlib.suppress(ConnectionError):
            if not self.has_begun:
                self.has_begun = True
                await self._response.prepare(self._request)
            await self._response.write(events)
        return self._response


def shown_key(request: web.Request) -> str:
    """The key in the address, or the bearer token; empty if there is none."""
    key = request.match_info.get("key")
    if key is None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else ""
    return key.strip()


def _asked_as(form: ChatForm, body: bytes, request: web.Request) -> tuple[bytes, bool]:
    """What tells one call from another, and whether its client says that it asks again."""
    key = request.headers.get("Idempotency-Key", "")
    digest = blake2b(
        body, digest_size=16, person=form.name.encode(), key=blake2b(key.encode()).digest()
    ).digest()
    retries = request.headers.get("x-stainless-retry-count", "")  # what OpenAI's clients count retries in
    return digest, bool(key or retries.strip("0 "))


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises ApiError if it is too slow, web.HTTPException if it is too large."""
    slow_s = request.app.get(READ_TIMEOUT_S)
    try:
        async with asyncio.timeout(slow_s):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"The body of this request did not arrive within {slow_s} s.") from None


class Connection(web.RequestHandler):
    """One connection. aiohttp closes one that is idle, or within a request's head, for read_timeout_s. One
    more than `most` takes the place of the one that is idle longest; if none is, it is answered with 503.
    """

    __slots__ = ("_most",)

    def __init__(self, server: web.Server, most: int, **settings: Any) -> None:
        super().__init__(server, auto_decompress=False, **settings)
        self._most = most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self._manager is not None
        if len(self._manager.connections) >= self._most:
            others = [each for each in self._manager.connections if each.transport is not None]
            idle = [each for each in others if each._waiter is not None and not each._waiter.done()]
            if len(others) >= self._most and not idle:
                assert isinstance(transport, asyncio.Transport)
                transport.set_protocol(asyncio.Protocol())
                transport.write(_FULL)
                transport.close()
                return
            if len(others) >= self._most:
                idle[0].force_close()
        super().connection_made(transport)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called by aiohttp for bytes that are not HTTP. They are a mistake of the client and are not
        logged.
        """
