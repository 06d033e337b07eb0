"""OpenAI's form of errors and answers: whole bodies, and the events of a stream. An endpoint is a form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic_core import to_json

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.answer_text import Answer
    from asyncrl.agents.endpoint.requests import CallRequest, RequestReader
    from asyncrl.agents.endpoint.sessions import GatewayCall

NO_RETRY = {"x-should-retry": "false"}
"""Tells an OpenAI client not to retry."""

END_OF_STREAM = b"data: [DONE]\n\n"
_LONGEST_SHOWN = 80
_CODES = {404: "unknown_url", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}


class ApiError(Exception):
    """One call is answered with an error; the session and the run go on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.headers = status, dict(headers or {})
        code = code or _CODES.get(status)
        self.error = {"message": message, "type": type, "param": param, "code": code}
        super().__init__(message)

    def body(self) -> bytes:
        return to_json({"error": self.error}, inf_nan_mode="null")

    def response(self) -> web.Response:
        return web.Response(
            body=self.body(), status=self.status, headers=self.headers, content_type="application/json"
        )


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """400: the call cannot be answered."""
    return ApiError(400, message, code=code, param=param)


def too_long(message: str, param: str) -> ApiError:
    """400 as OpenAI says it of a prompt that does not fit."""
    return invalid(message, param, code="context_length_exceeded")


def unknown_key() -> ApiError:
    """401. The key itself is never shown: answers end up in logs."""
    why = "Unknown or missing session key. Send `Authorization: Bearer KEY`, or call /s/KEY/v1/...."
    return ApiError(401, why, code="invalid_api_key")


def session_ended(reason: str) -> ApiError:
    """410: the rollout is over, and so is its key."""
    return ApiError(410, f"This session has ended: {reason}", code="session_ended", headers=NO_RETRY)


def rate_limited(message: str, *, retry_after_s: int | None) -> ApiError:
    """429; `retry_after_s` None says that waiting does not help."""
    headers = NO_RETRY if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, type="requests", code="rate_limit_exceeded", headers=headers)


def shown(value: object) -> str:
    """A value of a call, short enough for a message."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    text = repr(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


# ---- answers


class ChatForm:
    """/v1/chat/completions: how a body is read, and what a choice is in its answers."""

    name, whole_object, event_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    first: Mapping[str, Any] | None = {"delta": {"role": "assistant", "content": "", "refusal": None}}
    """The first event of a choice: who speaks."""

    def read(self, reader: RequestReader, body: bytes) -> CallRequest:
        return reader.chat(body)

    def whole(self, choice: Answer) -> dict[str, Any]:
        return {"message": choice.message, "logprobs": self._logprobs(choice)}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def end(self, choice: Answer) -> list[dict[str, Any]]:
        """After the last text: tool calls, logprobs (the engines report them with the last token)."""
        calls = [{"index": index, **call} for index, call in enumerate(choice.tool_calls)]
        parts: list[dict[str, Any]] = [{"delta": {"tool_calls": calls}}] if calls else []
        if choice.logprobs is not None:
            parts.append({"delta": {}, "logprobs": self._logprobs(choice)})
        return [*parts, {"delta": {}}]

    def _logprobs(self, choice: Answer) -> dict[str, Any] | None:
        return None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}


class TextForm(ChatForm):
    """/v1/completions."""

    name, whole_object, event_object = "cmpl", "text_completion", "text_completion"
    first = None

    def read(self, reader: RequestReader, body: bytes) -> CallRequest:
        return reader.text(body)

    def whole(self, choice: Answer) -> dict[str, Any]:
        return {"text": choice.content or "", "logprobs": self._logprobs(choice)}

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def end(self, choice: Answer) -> list[dict[str, Any]]:
        return [{"text": "", "logprobs": self._logprobs(choice)}]

    def _logprobs(self, choice: Answer) -> dict[str, Any] | None:
        """Lists beside each other."""
        if choice.logprobs is None:
            return None
        tokens = [each["token"] for each in choice.logprobs]
        offsets = [0, *itertools.accumulate(len(token) for token in tokens)][: len(tokens)]
        values = [each["logprob"] for each in choice.logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def whole_body(call: GatewayCall, model: str) -> bytes:
    choices = [
        {"index": choice.index, **call.form.whole(choice), "finish_reason": choice.finish_reason}
        for choice in call.choices
    ]
    return to_json(_head(call, model, call.form.whole_object) | {"choices": choices, "usage": _usage(call)})


class Events:
    """The events of one streamed answer."""

    def __init__(self, call: GatewayCall, model: str, *, include_usage: bool) -> None:
        self._call, self._include_usage, self._first = call, include_usage, call.form.first
        self._num_shown = [0] * len(call.choices)
        self._head = _head(call, model, call.form.event_object) | ({"usage": None} if include_usage else {})

    def news(self) -> bytes:
        """Text that may be shown by now and was not yet; maybe nothing."""
        events = b""
        for index, choice in enumerate(self._call.choices):
            if text := choice.take(self._num_shown[index]):
                self._num_shown[index] += len(text)
                events += self._event(choice, self._call.form.piece(text))
        return self._begin() + events if events else b""

    def end(self) -> bytes:
        """The last text, and what comes after it."""
        events = self.news() or self._begin()
        for choice in self._call.choices:
            *parts, last = self._call.form.end(choice)
            events += b"".join(self._event(choice, part) for part in parts)
            events += self._event(choice, last, choice.finish_reason)
        if self._include_usage:
            events += _event(self._head | {"choices": [], "usage": _usage(self._call)})
        return events + END_OF_STREAM

    def _begin(self) -> bytes:
        first, self._first = self._first, None
        return b"".join(self._event(choice, first) for choice in self._call.choices if first)

    def _event(self, choice: Answer, part: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        of_choice = {"index": choice.index, "logprobs": None, **part, "finish_reason": finish_reason}
        return _event(self._head | {"choices": [of_choice]})


def _event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(payload, inf_nan_mode="null") + b"\n\n"


def _head(call: GatewayCall, model: str, kind: str) -> dict[str, Any]:
    return {"id": call.name, "object": kind, "created": call.created_s, "model": model}


def _usage(call: GatewayCall) -> dict[str, int]:
    """Tokens; those of the prompt once, as OpenAI counts them."""
    prompt, completion = call.num_prompt_tokens, call.num_completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
