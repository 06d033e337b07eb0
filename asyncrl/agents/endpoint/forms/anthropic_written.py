"""Anthropic's messages answers, and errors and models for all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_json

from asyncrl.agents.endpoint.answers import ApiError
from asyncrl.agents.endpoint.forms.responses_written import (
    NOT_KEPT,
    KeptResponses,
    StoredResponse,
    message_to_keep,
)
from asyncrl.agents.endpoint.reasoning import signature_of

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.calls.gateway_call import GatewayCall

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's error types by status; all others are invalid requests."""


def anthropic_error(error: ApiError) -> bytes:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": error.error["message"]}
    if error.error["code"] == NOT_KEPT:  # the client starts a new thread
        told["details"] = {"error_code": "thread_not_found"}
    return to_json({"type": "error", "error": told, "request_id": None}, inf_nan_mode="null")


def error_body(error: ApiError, path: str, headers: Mapping[str, str]) -> bytes:
    is_anthropics = "/v1/messages" in path or "anthropic-version" in headers
    return anthropic_error(error) if is_anthropics else error.body()


def model_body(model: str, name: str | None) -> dict[str, Any]:
    """Return the model, or for None the list. Raises ApiError for another name."""
    if name not in (None, model):
        raise ApiError(404, f"There is one model here, {model}.", code="model_not_found", param="model")
    told = {"id": model, "object": "model", "created": 0, "owned_by": "asyncrl"}
    told |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    if name is not None:
        return told
    return {"object": "list", "data": [told], "has_more": False, "first_id": model, "last_id": model}


class WrittenMessage:
    """A message, or its events: blocks in the order thought, text, tool calls."""

    def __init__(self, call: GatewayCall, model: str, thread: StoredResponse | None) -> None:
        (self._choice,), self._call, self._model, self._thread = call.choices, call, model, thread
        self._has_begun, self._num_blocks = False, 0
        self._open: str | None = None
        """Kind of the open block."""
        self._num_told = {"thinking": 0, "text": 0}

    def whole(self) -> bytes:
        choice = self._choice
        content: list[dict[str, Any]] = []
        if choice.thought:
            signature = signature_of(choice.thought)
            content.append({"type": "thinking", "thinking": choice.thought, "signature": signature})
        if choice.content or not (choice.tool_calls or choice.thought):
            content.append({"type": "text", "text": choice.content or ""})
        for call in choice.tool_calls:
            given = from_json(call["function"]["arguments"])
            content.append(
                {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
            )
        return to_json(self._message(content, self._usage(choice.num_tokens)) | self._ending())

    def news(self) -> bytes:
        events = b""
        for kind, take in (("thinking", self._choice.take_thought), ("text", self._choice.take)):
            if text := take(self._num_told[kind]):
                self._num_told[kind] += len(text)
                events += self._begun(kind, {kind: ""}) + self._delta(f"{kind}_delta", {kind: text})
        return self._begin() + events if events else b""

    def end(self) -> bytes:
        events = (self.news() or self._begin()) + self._ended()
        for call in self._choice.tool_calls:
            function = call["function"]
            events += self._begun("tool_use", {"id": call["id"], "name": function["name"], "input": {}})
            events += self._delta("input_json_delta", {"partial_json": function["arguments"]}) + self._ended()
        if not self._num_blocks:
            events += self._begun("text", {"text": ""}) + self._ended()
        told = {"delta": self._ending(), "usage": self._usage(self._choice.num_tokens)}
        return events + _event("message_delta", told) + _event("message_stop", {})

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"

    def keep(self, kept: KeptResponses) -> None:
        if self._thread is not None:
            messages = (*self._thread.messages, message_to_keep(self._choice))
            kept.add(self._call.name, replace(self._thread, messages=messages))

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message = self._message([], self._usage(0)) | {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"message": message}) + _event("ping", {})

    def _begun(self, kind: str, empty: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        ended, self._open = self._ended(), kind
        if kind == "thinking":
            empty = empty | {"signature": ""}
        block = {"type": kind, **empty}
        return ended + _event("content_block_start", {"index": self._num_blocks, "content_block": block})

    def _delta(self, kind: str, what: dict[str, Any]) -> bytes:
        told = {"index": self._num_blocks, "delta": {"type": kind, **what}}
        return _event("content_block_delta", told)

    def _ended(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open == "thinking":
            signature = signature_of(self._choice.thought)
            events = self._delta("signature_delta", {"signature": signature})
        events += _event("content_block_stop", {"index": self._num_blocks})
        self._open, self._num_blocks = None, self._num_blocks + 1
        return events

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self._call.name, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": content, "usage": usage}

    def _ending(self) -> dict[str, Any]:
        reason, stop = self._choice.finish_reason, self._choice.stopped_by
        if reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _usage(self, num_output: int) -> dict[str, int]:
        usage = {"input_tokens": self._call.num_prompt_tokens, "output_tokens": num_output}
        return usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _event(kind: str, told: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **told}) + b"\n\n"
