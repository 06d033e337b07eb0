"""The gateway: an endpoint in OpenAI's and Anthropic's forms whose sessions record what was sampled. Its
routes check the key, read the call, and write the answer, whole or as a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import cast

from aiohttp import web

from asyncrl.agents.endpoint.answers import NO_RETRY, ApiError, GatewayTokenizer, invalid, shown
from asyncrl.agents.endpoint.calls.connections import Connection
from asyncrl.agents.endpoint.calls.gateway_call import CLIENT_GONE, GatewayCall, client_gone
from asyncrl.agents.endpoint.capture import GatewayStats
from asyncrl.agents.endpoint.engine_route import EngineRoute, OnBroken, SeedOf, Sent
from asyncrl.agents.endpoint.forms.anthropic import MessagesForm
from asyncrl.agents.endpoint.forms.anthropic_written import error_body, model_body
from asyncrl.agents.endpoint.forms.chat import ChatForm, Form, TextForm, Translated, Written
from asyncrl.agents.endpoint.forms.responses import ResponsesForm
from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.sessions import GatewaySession, Sessions, session_ended
from asyncrl.agents.endpoint.tool_calls import ToolFormat
from asyncrl.config import GatewayConfig
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

READ_TIMEOUT_S = web.AppKey("read_timeout_s", float)
_BACKLOG = 1024
_CLOSE_S = 2.0
"""Seconds that calls in hand have to end when the gateway closes."""
_LINGERING_S = 5.0
"""How long the rest of a body is read and dropped after the answer, so that the client can read the refusal.
"""
_EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_ROUTES = "There are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /v1/models."


class Gateway:
    """The SessionHost of a run's engines, and the HTTP endpoint that clients call with its sessions' keys.

    Life: made -> bind() takes the port, so that its address is known -> start() -> aclose() ends every
        session and connection. A request is refused, or finds its session -> its call is sampled, or is one
        that was sampled before -> answered.
    Waits: handlers sleep in the client's body, the engine, and the client's reading, all bounded by
        read_timeout_s or the session.
    Invariant: nothing that a client sends reaches an engine unchecked, and no call is answered after its
        session. Whatever a client sends is answered in its endpoint's form; errors are counted by status.
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
        on_broken: OnBroken,
        extra_routes: Sequence[web.RouteDef] = (),
    ) -> None:
        """`on_broken` ends the run. `extra_routes`: of others, beside its own."""
        self._config, self._model = config, rules.model_name
        self._sessions, self._refused = Sessions(config), Counter[int]()
        parts = tokenizer, tool_format, rules, seed_of, on_broken
        self._route = EngineRoute(self._sessions, engine, *parts)
        self.open_nowait = self._route.open_nowait
        can_turn_off = "enable_thinking" in getattr(tokenizer, "template", "")
        self._messages_form = MessagesForm(can_turn_off=can_turn_off)
        self._socket: socket.socket | None = None
        self._listener: asyncio.Server | None = None
        app = self._app(extra_routes)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=_CLOSE_S)

    def _app(self, extra_routes: Sequence[web.RouteDef]) -> web.Application:
        app = web.Application(middlewares=[self._in_form], client_max_size=self._config.max_body_bytes)
        app[READ_TIMEOUT_S] = self._config.read_timeout_s
        forms: dict[str, Form] = {
            "chat/completions": ChatForm(),
            "completions": TextForm(),
            "responses": ResponsesForm(),
            "messages": self._messages_form,
        }
        for prefix in ("/v1", "/s/{key}/v1"):
            for path, form in forms.items():
                app.router.add_post(f"{prefix}/{path}", partial(self._complete, form))
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count)
            app.router.add_get(f"{prefix}/responses/{{name}}", self._stored)
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{model:.+}}", self._models)
        app.add_routes(extra_routes)
        return app

    def add_route(
        self, engine: EnginePool, *, temperature: float, seed_of: SeedOf, on_broken: OnBroken
    ) -> EngineRoute:
        """The host of another engine's sessions, which stats() does not count. A call that asks for another
        temperature gets this one.
        """
        rules = replace(self._route.rules, temperature=temperature, on_sampling_override="use_config")
        return replace(self._route, engine=engine, rules=rules, seed_of=seed_of, on_broken=on_broken)

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
                what = f"gateway.host={host} and gateway.port={port} cannot be listened on: {error}"
                way_out = "give an address of this machine and a free port; gateway.port=none takes any."
                raise ConfigError(what, way_out=way_out) from error
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
        await self._runner.cleanup()
        await self._route.checks.aclose()
        self._socket = self._listener = None

    def stats(self) -> GatewayStats:
        """Counts so far."""
        return replace(self._route.counts, refused=dict(self._refused))

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/metrics.py."""
        names = ("calls", "extended", "realigned", "edited", "uncut")
        counts = {f"gateway/{name}": getattr(self._route.counts, name) for name in names}
        return counts | {"gateway/refused": self._refused.total()}

    # ---- routes

    @web.middleware
    async def _in_form(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in the form of the endpoint that was called."""
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
        self._refused[failure.status] += 1
        response = failure.response(error_body(failure, request.path, request.headers))
        if failure.status in (408, 500):
            response.force_close()
        return response

    async def _complete(self, form: Form, request: web.Request) -> web.StreamResponse:
        session, stream = self._sessions.find(shown_key(request)), _Stream(request)
        try:
            async with session.in_hand(), session.begun:
                async with session.reading:
                    call, is_new = await self._begin(session, form, stream)
                with stream.watched(call.left_nowait), call.attended(stream.is_there):
                    return await self._answer(session, call, stream, is_new=is_new)
        except ApiError as error:
            if error.status == CLIENT_GONE:
                return web.Response(status=CLIENT_GONE)
            if 400 <= error.status < 500 and error.status != 410:
                session.refused_nowait()
            if not stream.has_begun:
                raise
            assert stream.written is not None, "it has written the beginning"
            self._refused[error.status] += 1
            return await stream.write(stream.written.failed(error))

    async def _begin(self, session: GatewaySession, form: Form, stream: _Stream) -> tuple[GatewayCall, bool]:
        """The call, and whether it is new; `stream` knows what its client gets. A body is not kept: a call
        may wait long.
        """
        told = await self._translated(form, session, stream)
        body_hash, before = session.sent.find(told.body)
        digest, is_retry = _asked_as(form, body_hash, stream.request)
        sent = Sent(form, told.body, digest, before, is_retry=is_retry)
        call, asked, is_new = await session.route.begin(session, sent)
        stream.written = form.written(call, self._model, asked, told.given)
        return call, is_new

    async def _translated(self, form: Form, session: GatewaySession, stream: _Stream) -> Translated:
        """The body in terms of chat completions; a long one is translated beside the loop."""
        try:
            body = await read_body(stream.request)
        except ConnectionError:
            raise client_gone() from None
        if not stream.is_there():
            raise client_gone()
        translated_now = partial(form.translated, body, session.responses)
        return await session.route.in_turn(translated_now, len(body) if form.translates else 0)

    async def _answer(
        self, session: GatewaySession, call: GatewayCall, stream: _Stream, *, is_new: bool
    ) -> web.StreamResponse:
        """Sample the call, unless it is one that was sampled before, and write what came of it."""
        written = stream.written
        assert written is not None, "_begin() has made it"
        if is_new:
            sampling = session.route.sample(session, call)
            if call.is_streamed:
                await asyncio.gather(sampling, self._write_news(call, written, stream))
            else:
                await sampling
            await call.wait_done()
        else:
            await stream.until(call.wait_done())
        if session.ended is not None:  # in this very round of the loop: in_hand() has had no turn yet
            raise session_ended(session.ended)
        if stream.is_there():
            session.deliver_nowait(call)
            written.keep(session.responses)
        body = written.end() if call.is_streamed else written.whole()
        for choice in call.choices:
            choice.let_go()
        if call.is_streamed:
            return await stream.write(body)
        return web.Response(body=body, content_type="application/json")

    async def _write_news(self, call: GatewayCall, written: Written, stream: _Stream) -> None:
        """Text as it comes, until the end or until the client is gone."""
        while not call.is_done and stream.is_there():
            await call.wait_news()
            if not call.is_done and (text := written.news()):
                await stream.write(text)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        """Tokens of a chat, which is neither sampled nor recorded."""
        session = self._sessions.find(shown_key(request))
        try:
            async with session.in_hand(), session.reading:
                told = await self._translated(self._messages_form, session, _Stream(request))
                num_tokens = await session.route.count(session, told.body)
        except ApiError as error:
            if 400 <= error.status < 500 and error.status != 410:
                session.refused_nowait()
            raise
        return web.json_response({"input_tokens": num_tokens})

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        body = self._sessions.find(shown_key(request)).responses.body(request.match_info["name"])
        return web.Response(body=body, content_type="application/json")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._sessions.find(shown_key(request))
        return web.json_response(model_body(self._model, request.match_info.get("model")))

    def _http_error(self, error: web.HTTPException) -> ApiError:
        """What aiohttp refuses by itself. The address is not shown, for it may hold a key."""
        words = {
            404: f"Invalid URL. {_ROUTES}",
            413: f"The body is larger than gateway.max_body_bytes={self._config.max_body_bytes}.",
        }
        allow = {name: value for name, value in error.headers.items() if name == "Allow"}
        return ApiError(error.status, words.get(error.status, error.reason), headers=allow)


def is_connected(request: web.Request) -> bool:
    """Whether its client is there to get the answer."""
    return request.transport is not None and not request.transport.is_closing()


class _Stream:
    """One response that may be a stream of events: begun with the first of them, so that an early error has
    its own status.
    """

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self._response = web.StreamResponse(headers=_EVENT_STREAM)
        self.has_begun = False
        self.written: Written | None = None
        """What is written to it."""

    def is_there(self) -> bool:
        """Whether the client is still connected."""
        return is_connected(self.request)

    @contextlib.contextmanager
    def watched(self, left: Callable[[], None]) -> Iterator[None]:
        """`left` is called when the client goes away."""
        connection = cast("Connection", self.request.protocol)
        connection.on_lost.append(left)
        try:
            yield
        finally:
            connection.on_lost.remove(left)

    async def until(self, done: Awaitable[None]) -> None:
        """Wait as long as the client is there. Raises ApiError if it goes away: a client that asks again and
        again would else hold a place for each time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self.is_there() else 0.0) as scope:
                with self.watched(partial(scope.reschedule, 0.0)):
                    return await done
        raise client_gone()

    async def write(self, events: bytes) -> web.StreamResponse:
        """Write, if the client is there; a client that goes away is no error of the call."""
        with contextlib.suppress(ConnectionError):
            if not self.has_begun:
                self.has_begun = True
                await self._response.prepare(self.request)
            await self._response.write(events)
        return self._response


def shown_key(request: web.Request) -> str:
    """The key in the address, the bearer token, or Anthropic's x-api-key; empty if there is none."""
    key = request.match_info.get("key")
    if key is None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return key.strip()


def _asked_as(form: Form, body_hash: bytes, request: web.Request) -> tuple[bytes, bool]:
    """What tells one call from another, and whether its client says that it asks again."""
    key = request.headers.get("Idempotency-Key", "")
    digest = blake2b(
        body_hash, digest_size=16, person=form.name.encode(), key=blake2b(key.encode()).digest()
    ).digest()
    retries = request.headers.get("x-stainless-retry-count", "")  # what OpenAI's clients count retries in
    return digest, bool(key or retries.strip("0 "))


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises ApiError if it is slow or compressed, web.HTTPException if it is too large."""
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise invalid(f"Content-Encoding: {shown(encoding)} is not read. Send the body uncompressed.")
    slow_s = request.app.get(READ_TIMEOUT_S)
    try:
        async with asyncio.timeout(slow_s):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"The body of this request did not arrive within {slow_s} s.") from None
