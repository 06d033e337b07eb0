"""The routes: who calls, what is asked, how it is answered, whole or as a stream. Knows HTTP; knows no token
and no template.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from asyncrl.agents.endpoint.calls import AskedAs, Call, Kind
from asyncrl.agents.endpoint.chat import Begun, Sampler
from asyncrl.agents.endpoint.choices import Choice
from asyncrl.agents.endpoint.connections import Connection, answer_error, belongs_to
from asyncrl.agents.endpoint.refusals import (
    ApiError,
    invalid,
    is_refusal,
    of_status,
    rate_limited,
    session_ended,
    unknown_key,
)
from asyncrl.agents.endpoint.requests import CallShape
from asyncrl.agents.endpoint.sessions import GatewaySession, Sessions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Routes:
    """The endpoint of all sessions as an aiohttp app.

    Life:       a request is refused, or finds its session -> its call is sampled, or is one that was sampled
    before -> answered. Waits:      handlers sleep in the client's body, the engine, and the client's reading,
    all bounded by Connection or the session. Invariant:  whatever a client sends is answered in OpenAI's
    form; `refused` counts the errors by status.
    """

    def __init__(
        self,
        sessions: Sessions,
        samplers: Mapping[str, Sampler],
        *,
        model: str,
        max_body_bytes: int,
        max_reading: int,
    ) -> None:
        """`samplers`: by the lane of a session, who answers its calls; there may come more."""
        self._sessions, self._samplers, self._model = sessions, samplers, model
        self._max_body_bytes, self._max_reading = max_body_bytes, max_reading
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
        """Errors in OpenAI's form, and the time that a body may take."""
        connection = request.protocol
        if isinstance(connection, Connection):
            connection.expect_body(request)
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
        finally:
            if isinstance(connection, Connection):
                connection.end_body()
        self.refused[failure.status] += 1
        response = answer_error(failure)
        if failure.status == 408:
            response.force_close()
        return response

    async def _complete(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        stream = _Stream(request)
        try:
            async with session.in_hand():
                with self._reading(session):
                    body = await self._body(request)
                    shape = await self._samplers[session.lane].read(kind, body)
                    asked_as = _asked_as(kind, body, request)
                    async with session.beginning:
                        call = session.calls.find(asked_as)
                        begun = await self._begin(session, kind, shape, asked_as) if call is None else None
                call = begun.call if begun is not None else call
                assert call is not None
                with call.attended(stream.is_there):
                    return await self._answer(session, call, begun, shape, stream)
        except ApiError as error:
            if is_refusal(error):
                session.refused_nowait()
            if not stream.has_begun:
                raise
            self.refused[error.status] += 1
            return await stream.end(event(error.body()))
        except web.HTTPException:  # the body was larger than it said
            session.refused_nowait()
            raise

    async def _begin(self, session: GatewaySession, kind: Kind, shape: CallShape, asked_as: AskedAs) -> Begun:
        try:
            return await self._samplers[session.lane].begin(session, kind, shape, asked_as)
        except ApiError as error:
            if "Retry-After" in error.headers:
                session.calls.refused_nowait(asked_as.digest)
            raise

    async def _answer(
        self, session: GatewaySession, call: Call, begun: Begun | None, shape: CallShape, stream: _Stream
    ) -> web.StreamResponse:
        """Sample the call, unless it is one that was sampled before, and write what came of it."""
        sampler = self._samplers[session.lane]
        events = Events(call, self._model, include_usage=shape.include_usage) if shape.stream else None
        if begun is not None and events is not None:
            await asyncio.gather(sampler.sample(session, begun), self._write_news(call, events, stream))
        elif begun is not None:
            await sampler.sample(session, begun)
        await call.wait_done()
        if (
            session.ended is not None
        ):  # in this very round of the loop: the timeout of in_hand() has had no turn yet
            raise session_ended(session.ended)
        if stream.is_there():
            session.deliver_nowait(call)
        if events is None:
            return web.Response(body=body(call, self._model), content_type="application/json")
        text = events.news() if begun is not None else events.again()
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
            raise ApiError(
                404, f"There is one model here, {self._model}.", code="model_not_found", param="model"
            )
        return web.json_response(model if name is not None else {"object": "list", "data": [model]})

    def _session(self, request: web.Request) -> GatewaySession:
        """Whose call it is. Raises ApiError 401 or 410."""
        key = request.match_info.get("key")
        if key is None:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                raise unknown_key()
        session = self._sessions.find(key.strip())
        belongs_to(request, session.key)
        return session

    @contextmanager
    def _reading(self, session: GatewaySession) -> Iterator[None]:
        """A call that is being sent, or waits to be begun. Raises ApiError if it is one too many at once."""
        if session.num_reading >= self._max_reading:
            session.calls.refused_nowait(None)
            message = f"{session.num_reading} calls are being sent; gateway.max_concurrent_calls={self._max_reading} is the most."
            raise rate_limited(message, retry_after_s=1)
        session.num_reading += 1
        try:
            yield
        finally:
            session.num_reading -= 1

    async def _body(self, request: web.Request) -> bytes:
        """The whole body. Raises ApiError if it is too large, packed, or too slow."""
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large()
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise of_status(415, "Content-Encoding is not supported; send the body as it is.")
        return await request.read()

    def _too_large(self) -> ApiError:
        return of_status(413, f"The body is larger than gateway.max_body_bytes={self._max_body_bytes}.")

    def _http_error(self, request: web.Request, error: web.HTTPException) -> ApiError:
        if error.status == 404:
            return of_status(404, f"Invalid URL ({request.method} {_shown_path(request)}).")
        if isinstance(error, web.HTTPMethodNotAllowed):
            allowed = ", ".join(sorted(error.allowed_methods))
            failure = of_status(
                405, f"{request.method[:16]} is not allowed on {_shown_path(request)}; {allowed} is."
            )
            failure.headers["Allow"] = allowed
            return failure
        if error.status == 413:
            return self._too_large()
        return of_status(error.status, error.reason)


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


def _asked_as(kind: Kind, body: bytes, request: web.Request) -> AskedAs:
    digest = blake2b(body, digest_size=16, person=kind.encode()).digest()
    retries = request.headers.get(
        "x-stainless-retry-count", ""
    )  # what OpenAI's own clients count their retries in
    return AskedAs(digest, request.headers.get("Idempotency-Key") or None, is_retry=bool(retries.strip("0 ")))


def _shown_path(request: web.Request) -> str:
    """The path without a key in it."""
    path = request.path
    if path.startswith("/s/"):
        path = "/s/KEY/" + path[3:].partition("/")[2]
    return path[:200].encode("ascii", "backslashreplace").decode()


# Answers as OpenAI writes them: bodies, and the events of a stream. Knows no session and no HTTP library.


END_OF_STREAM = b"data: [DONE]\n\n"


def body(call: Call, model: str) -> bytes:
    """The whole answer."""
    choices = [
        _chat_choice(choice) if call.kind == "chat" else _text_choice(choice) for choice in call.choices
    ]
    return to_json(_head(call, model, "chat.completion") | {"choices": choices, "usage": usage(call)})


def event(payload: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + to_json(payload, inf_nan_mode="null") + b"\n\n"


class Events:
    """The events of one streamed answer."""

    def __init__(self, call: Call, model: str, *, include_usage: bool) -> None:
        self._call, self._include_usage = call, include_usage
        self._head = _head(call, model, "chat.completion.chunk") | ({"usage": None} if include_usage else {})

    def start(self) -> bytes:
        """Before any text: who speaks."""
        if self._call.kind == "text":
            return b""
        return b"".join(
            self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})
            for choice in self._call.choices
        )

    def news(self) -> bytes:
        """Text that may be shown by now and was not yet; maybe nothing."""
        return b"".join(self._text(choice, text) for choice in self._call.choices if (text := choice.take()))

    def end(self) -> bytes:
        """After the last text: tool calls, logprobs, why it ended, usage."""
        events = [each for choice in self._call.choices for each in self._choice_end(choice)]
        if self._include_usage:
            events.append(event(self._head | {"choices": [], "usage": usage(self._call)}))
        return b"".join([*events, END_OF_STREAM])

    def again(self) -> bytes:
        """All text at once, for whoever asks a second time."""
        return b"".join(self._text(choice, choice.content) for choice in self._call.choices if choice.content)

    def _choice_end(self, choice: Choice) -> Iterator[bytes]:
        if self._call.kind == "text":
            yield self._event(
                {
                    "index": choice.index,
                    "text": "",
                    "logprobs": _text_logprobs(choice),
                    "finish_reason": choice.finish_reason,
                }
            )
            return
        if choice.tool_calls:
            yield self._chunk(
                choice,
                {"tool_calls": [{"index": index, **call} for index, call in enumerate(choice.tool_calls)]},
            )
        if choice.logprobs is not None:  # the engines tell them with the last token
            yield self._chunk(choice, {}, logprobs={"content": choice.logprobs, "refusal": None})
        yield self._chunk(choice, {}, finish_reason=choice.finish_reason)

    def _text(self, choice: Choice, text: str) -> bytes:
        if self._call.kind == "text":
            return self._event({"index": choice.index, "text": text, "logprobs": None, "finish_reason": None})
        return self._chunk(choice, {"content": text})

    def _chunk(
        self,
        choice: Choice,
        delta: Mapping[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
    ) -> bytes:
        return self._event(
            {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        return event(self._head | {"choices": [choice]})


def usage(call: Call) -> dict[str, int]:
    """Tokens; those of the prompt once, as OpenAI counts them."""
    prompt, completion = call.num_prompt_tokens, call.num_completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(call: Call, model: str, kind: str) -> dict[str, Any]:
    return {
        "id": call.name,
        "object": kind if call.kind == "chat" else "text_completion",
        "created": call.created_s,
        "model": model,
    }


def _chat_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
    return {
        "index": choice.index,
        "message": choice.message,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _text_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.content or "",
        "logprobs": _text_logprobs(choice),
        "finish_reason": choice.finish_reason,
    }


def _text_logprobs(choice: Choice) -> dict[str, Any] | None:
    """The older form: lists beside each other."""
    if choice.logprobs is None:
        return None
    tokens = [each["token"] for each in choice.logprobs]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    values = [each["logprob"] for each in choice.logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
