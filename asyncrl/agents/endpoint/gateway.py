"""Gateway: an endpoint in OpenAI's and Anthropic's formats whose sessions record sampled tokens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from asyncrl.agents.endpoint.answers import NO_RETRY, ApiError, GatewayTokenizer, invalid, shown
from asyncrl.agents.endpoint.calls.connections import BACKLOG, AppServer, Connection
from asyncrl.agents.endpoint.calls.gateway_call import CLIENT_GONE, GatewayCall, client_gone
from asyncrl.agents.endpoint.capture import GatewayStats
from asyncrl.agents.endpoint.engine_route import EngineRoute, OnBroken, SeedOf, Sent
from asyncrl.agents.endpoint.forms.anthropic import MessagesForm, MessagesRequest
from asyncrl.agents.endpoint.forms.anthropic_written import error_body, model_body
from asyncrl.agents.endpoint.forms.chat import ChatForm, Form, TextForm, Translated, Written
from asyncrl.agents.endpoint.forms.responses import ResponsesForm, ResponsesRequest
from asyncrl.agents.endpoint.requests import CallRules, ChatRequest, TextRequest
from asyncrl.agents.endpoint.sessions import GatewaySession, Sessions, session_ended
from asyncrl.agents.endpoint.tool_formats import ToolFormat
from asyncrl.base.errors import ConfigError
from asyncrl.base.serving import Refused
from asyncrl.config import GatewayConfig
from asyncrl.engines.pool import EnginePool

Answered = Callable[[Request], Coroutine[Any, Any, Response]]

SCHEMAS: Mapping[str, type[BaseModel]] = {
    "chat/completions": ChatRequest,
    "completions": TextRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
_JSON = [(b"content-type", b"application/json")]
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_ROUTES = "There are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /v1/models."


class Gateway:
    """SessionHost of a run's engines, and the HTTP endpoint for its sessions' keys.

    Life: made -> bind() takes the port and returns the address -> start() -> aclose() ends every session and
        connection. A request is refused, or finds its session -> its call is sampled, or joins an equal call
        -> answered.
    Waits: handlers wait for the client and the engine, bounded by read_timeout_s or the session.
    Invariant: no unchecked client value reaches an engine, and no call is answered after its session ended.
        Each error has its endpoint's format and is counted by status.
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
        extra_routes: Sequence[BaseRoute] = (),
    ) -> None:
        """`on_broken` ends the run."""
        self._config, self._model = config, rules.model_name
        self._sessions, self._refused = Sessions(config), Counter[int]()
        parts = tokenizer, tool_format, rules, seed_of, on_broken
        self._route = EngineRoute(self._sessions, engine, *parts)
        self.open_nowait = self._route.open_nowait
        can_turn_off = "enable_thinking" in getattr(tokenizer, "template", "")
        self._messages_form = MessagesForm(can_turn_off=can_turn_off)
        self._socket: socket.socket | None = None
        self.listener = AppServer(
            self._app(extra_routes), most=config.max_connections, idle_s=config.read_timeout_s
        )

    def _app(self, extra_routes: Sequence[BaseRoute]) -> FastAPI:
        app = FastAPI(title="asyncrl gateway", redoc_url=None, redirect_slashes=False)
        app.openapi = partial(_openapi, app)  # type: ignore[method-assign]
        app.state.read_timeout_s = self._config.read_timeout_s
        for kind in (ApiError, HTTPException, Refused, ClientDisconnect, Exception):
            app.add_exception_handler(kind, self._failed)
        forms: dict[str, Form] = {
            "chat/completions": ChatForm(),
            "completions": TextForm(),
            "responses": ResponsesForm(),
            "messages": self._messages_form,
        }
        for prefix in ("/v1", "/s/{key}/v1"):
            add = partial(app.add_api_route, response_model=None, include_in_schema=prefix == "/v1")
            for path, form in forms.items():
                body = {"$ref": f"#/components/schemas/{SCHEMAS[path].__name__}"}
                told = {"requestBody": {"content": {"application/json": {"schema": body}}}}
                add(f"{prefix}/{path}", self._handler(form), methods=["POST"], openapi_extra=told)
            add(f"{prefix}/messages/count_tokens", self._count, methods=["POST"])
            add(f"{prefix}/responses/{{name}}", self._stored)
            add(f"{prefix}/models", self._models)
            add(f"{prefix}/models/{{model:path}}", self._models)
        app.router.routes += extra_routes
        return app

    def add_route(
        self, engine: EnginePool, *, temperature: float, seed_of: SeedOf, on_broken: OnBroken
    ) -> EngineRoute:
        """Return the host of another engine's sessions, which stats() excludes. `temperature` overrides that
        of calls.
        """
        rules = replace(self._route.rules, temperature=temperature, on_sampling_override="use_config")
        return replace(self._route, engine=engine, rules=rules, seed_of=seed_of, on_broken=on_broken)

    def bind(self) -> str:
        """Take the port; return the address for clients, without /v1. Idempotent. Raises ConfigError."""
        host, port = self._config.host, self._config.port or 0
        if self._socket is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
            except OSError as error:
                what = f"gateway.host={host} and gateway.port={port} cannot be listened on: {error}"
                way_out = "give an address of this machine and a free port; gateway.port=none takes any."
                raise ConfigError(what, way_out=way_out) from error
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # for clients that stop reading (Linux)
                slow_ms = max(1, int(self._config.read_timeout_s * 1000))
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, slow_ms)
        if self._config.public_url is not None:
            return self._config.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"

    async def start(self) -> str:
        url = self.bind()
        assert self._socket is not None
        await self.listener.listen(self._socket)
        return url

    async def aclose(self) -> None:
        """End every session and connection. Idempotent."""
        self._sessions.end_all_nowait("the run has ended")
        await self.listener.aclose()
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def stats(self) -> GatewayStats:
        return replace(self._route.counts, refused=dict(self._refused))

    def gauges(self) -> dict[str, float]:
        names = ("calls", "extended", "realigned", "edited", "uncut")
        counts = {f"gateway/{name}": getattr(self._route.counts, name) for name in names}
        return counts | {"gateway/refused": self._refused.total()}

    # ---- routes

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Answer an error in the endpoint's format, without the address: it may contain a key."""
        if isinstance(error, Refused):
            return Response(error.body.model_dump_json(), error.status, media_type="application/json")
        if isinstance(error, ClientDisconnect):
            error = client_gone()
        elif isinstance(error, HTTPException):
            why = f"Invalid URL. {_ROUTES}" if error.status_code == 404 else error.detail
            error = ApiError(error.status_code, why, headers=error.headers)
        elif not isinstance(error, ApiError):
            why = "The gateway made a mistake; its log says which."
            error = ApiError(500, why, type="server_error", headers=NO_RETRY)
        if error.status != CLIENT_GONE:
            self._refused[error.status] += 1
        headers = error.headers | ({"Connection": "close"} if error.status in (408, 500) else {})
        body = error_body(error, request.scope["path"], request.headers)
        return Response(body, error.status, headers, "application/json")

    def _handler(self, form: Form) -> Answered:
        async def answer(request: Request) -> Response:
            return _Stream(partial(self._complete, form))

        return answer

    async def _complete(self, form: Form, stream: _Stream) -> None:
        session = self._sessions.find(shown_key(stream.request))
        try:
            async with session.in_hand(), session.begun:
                async with session.reading:
                    call, is_new = await self._begin(session, form, stream)
                with stream.watched(call.left_nowait), call.attended(stream.is_there):
                    await self._answer(session, call, stream, is_new=is_new)
        except ApiError as error:
            _note_refusal(session, error)
            if not stream.has_begun:
                raise
            if error.status != CLIENT_GONE:
                assert stream.written is not None, "it has written the beginning"
                self._refused[error.status] += 1
                await stream.write(stream.written.failed(error), is_last=True)

    async def _begin(self, session: GatewaySession, form: Form, stream: _Stream) -> tuple[GatewayCall, bool]:
        told = await self._translated(form, session, stream.request)
        digest, is_retry = _asked_as(form, told.body, stream.request)
        sent = Sent(form, told.body, digest, is_retry=is_retry)
        call, asked, is_new = await session.route.begin(session, sent)
        stream.written = form.written(call, self._model, asked, told.given)
        return call, is_new

    async def _translated(self, form: Form, session: GatewaySession, request: Request) -> Translated:
        body = await read_body(request, self._config.max_body_bytes)
        translated_now = partial(form.translated, body, session.responses)
        return await session.route.in_turn(translated_now, len(body) if form.translates else 0)

    async def _answer(
        self, session: GatewaySession, call: GatewayCall, stream: _Stream, *, is_new: bool
    ) -> None:
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
        if session.ended is not None:  # just ended: in_hand() has not been cancelled yet
            raise session_ended(session.ended)
        if stream.is_there():
            session.deliver_nowait(call)
            written.keep(session.responses)
        body = written.end() if call.is_streamed else written.whole()
        for choice in call.choices:
            choice.let_go()
        await stream.write(body, is_last=True, is_stream=call.is_streamed)

    async def _write_news(self, call: GatewayCall, written: Written, stream: _Stream) -> None:
        while not call.is_done and stream.is_there():
            await call.wait_news()
            if not call.is_done and (text := written.news()):
                await stream.write(text)

    async def _count(self, request: Request) -> Response:
        session = self._sessions.find(shown_key(request))
        try:
            async with session.in_hand(), session.reading:
                told = await self._translated(self._messages_form, session, request)
                num_tokens = await session.route.count(session, told.body)
        except ApiError as error:
            _note_refusal(session, error)
            raise
        return JSONResponse({"input_tokens": num_tokens})

    async def _stored(self, request: Request) -> Response:
        body = self._sessions.find(shown_key(request)).responses.body(request.path_params["name"])
        return Response(body, media_type="application/json")

    async def _models(self, request: Request) -> Response:
        self._sessions.find(shown_key(request))
        return JSONResponse(model_body(self._model, request.path_params.get("model")))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Add body schemas for /docs: routes read bodies after the key check."""
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models = [(model, "validation") for model in SCHEMAS.values()]
        _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        app.openapi_schema["components"] = {"schemas": schemas["$defs"]}
    return app.openapi_schema


def _note_refusal(session: GatewaySession, error: ApiError) -> None:
    if 400 <= error.status < 500 and error.status not in (410, CLIENT_GONE):
        session.refused_nowait()


def is_connected(request: Request) -> bool:
    return not request.scope["connection"].transport.is_closing()


class _Stream(Response):
    """Answer of a call, whole or as events. An error before the first event has its own status."""

    def __init__(self, complete: Callable[[_Stream], Awaitable[None]]) -> None:
        super().__init__()
        self._complete = complete
        self.has_begun = False
        self.written: Written | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self.request = send, Request(scope, receive)
        await self._complete(self)

    def is_there(self) -> bool:
        return is_connected(self.request)

    @contextlib.contextmanager
    def watched(self, left: Callable[[], None]) -> Iterator[None]:
        """Call `left` when the client leaves."""
        connection: Connection = self.request.scope["connection"]
        connection.on_lost.append(left)
        try:
            yield
        finally:
            connection.on_lost.remove(left)

    async def until(self, done: Awaitable[None]) -> None:
        """Wait while the client is connected. Raises ApiError if it leaves; otherwise each retry would hold a
        place.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self.is_there() else 0.0) as scope:
                with self.watched(partial(scope.reschedule, 0.0)):
                    return await done
        raise client_gone()

    async def write(self, events: bytes, *, is_last: bool = False, is_stream: bool = True) -> None:
        """Write events or a whole body; uvicorn drops them if the client left."""
        if not self.has_begun:
            self.has_begun = True
            length = str(len(events)).encode()
            headers = _EVENT_STREAM if is_stream else [*_JSON, (b"content-length", length)]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})


def shown_key(request: Request) -> str:
    key = request.path_params.get("key")
    if key is None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return key.strip()


def _asked_as(form: Form, body: bytes, request: Request) -> tuple[bytes, bool]:
    key = request.headers.get("Idempotency-Key", "")
    digest = blake2b(
        body, digest_size=16, person=form.name.encode(), key=blake2b(key.encode()).digest()
    ).digest()
    retries = request.headers.get("x-stainless-retry-count", "")  # OpenAI clients' retry counter
    return digest, bool(key or retries.strip("0 "))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError if the body is slow, compressed or too large."""
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise invalid(f"Content-Encoding: {shown(encoding)} is not read. Send the body uncompressed.")
    slow_s, body = request.app.state.read_timeout_s, bytearray()
    try:
        async with asyncio.timeout(slow_s):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise ApiError(413, f"The body is larger than gateway.max_body_bytes={max_bytes}.")
    except TimeoutError:
        raise ApiError(408, f"The body of this request did not arrive within {slow_s} s.") from None
    return bytes(body)
