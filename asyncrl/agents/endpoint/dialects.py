"""Shared parts of the dialects: writers of answers, blocks of a stream, errors, and the
list of models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import BaseModel

from asyncrl.agents.endpoint.answers import Answer
from asyncrl.agents.endpoint.calls import (
    NOT_KEPT,
    ChatsByAnswer,
    GatewayCall,
    StoredChat,
)
from asyncrl.agents.endpoint.requests import ApiError, CallRules, dumped
from asyncrl.agents.endpoint.tool_formats import Block

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.requests import AnyRequest, RequestReader

Event = Mapping[str, object]


class Writer(ABC):
    """Form of one call's answer."""

    continues: StoredChat | None = None
    """Chat before the answer, if later calls may name the answer by its id."""

    @abstractmethod
    def body(self, call: GatewayCall) -> dict[str, object]: ...

    @abstractmethod
    def events(self, call: GatewayCall) -> AsyncIterator[bytes]:
        """Yield the stream: at once an event that begins it, then one at every step.

        Once the call is sampled, the rest comes without waiting.
        """

    @abstractmethod
    def failure(self, error: ApiError) -> bytes: ...


Read: TypeAlias = "tuple[AnyRequest, Writer]"


@dataclass(frozen=True, slots=True)
class Dialect:
    """`name` begins the ids of its calls. `splits_thoughts` None: per
    gateway.thoughts_field. `read` raises ApiError.
    """

    name: str
    path: str
    splits_thoughts: bool | None
    read: Callable[[RequestReader, dict[str, object], ChatsByAnswer], Read]
    body: type[BaseModel]
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a chat's parameters that differ."""


def encoded(*events: Event) -> bytes:
    """Encode server-sent events."""
    texts = []
    for event in events:
        # Chunks of chats have no type, and OpenAI sends them as data lines only.
        if "type" in event:
            texts.append(f"event: {event['type']}\n".encode())
        texts.append(b"data: %b\n\n" % dumped(event))
    return b"".join(texts)


Step = Literal["open", "delta", "close", "ping"]


def whole_blocks(answer: Answer) -> list[Block]:
    """Return a thought, a text and the calls of an answer, or an empty text."""
    texts = [
        Block("thought", 0, [answer.thought]),
        Block("text", 0, [answer.content or ""]),
    ]
    return [*(each for each in texts if each.text), *answer.calls] or texts[1:]


async def grow_blocks(
    call: GatewayCall, blocks: list[Block]
) -> AsyncIterator[tuple[Step, Block, str]]:
    """Append to `blocks` while a call is sampled, in the order in which it was sampled;
    yield the steps. A block may already have more text than its steps have passed on.

    An answer without any block gets an empty text.
    """
    empty = Block("text")
    async for block, text in call.pieces():
        if block is None:
            yield "ping", empty, ""
            continue
        if block not in blocks[-1:]:
            for last in blocks[-1:]:
                yield "close", last, last.text
            blocks.append(block)
            yield "open", block, ""
        if text:
            yield "delta", block, text
    if not blocks:
        blocks.append(empty)
        yield "open", empty, ""
    yield "close", blocks[-1], blocks[-1].text


# ---- errors and models

ANTHROPIC_ERRORS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Others are invalid requests below 500, and api_error from there on."""


def anthropic_error(error: ApiError) -> dict[str, object]:
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    body: dict[str, object] = {
        "type": ANTHROPIC_ERRORS.get(error.status, other),
        "message": error.anthropics,
    }
    if error.error["code"] == NOT_KEPT:  # clients then start a new thread
        body["details"] = {"error_code": "thread_not_found"}
    return {"type": "error", "error": body, "request_id": None}


def error_body(error: ApiError, path: str, headers: Mapping[str, str]) -> bytes:
    # Both vendors' clients call /v1/models. Anthropic's always send this header.
    is_anthropics = "/v1/messages" in path or "anthropic-version" in headers
    return dumped(anthropic_error(error)) if is_anthropics else error.body()


def model_body(rules: CallRules, name: str | None) -> dict[str, object]:
    """Return the model `name`, or the list of models if None. Raises ApiError (404) for
    another model.
    """
    if name not in (None, *rules.models):
        why = f"This server has the models {', '.join(rules.models)}."
        raise ApiError(404, why, code="model_not_found", param="model")
    if name is not None:
        return _facts(rules, name)
    models = rules.models
    return {
        "object": "list",
        "data": [_facts(rules, model) for model in models],
        "has_more": False,
        "first_id": models[0],
        "last_id": models[-1],
    }


def _facts(rules: CallRules, model: str) -> dict[str, object]:
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "asyncrl",
        "type": "model",
        "display_name": model,
        "created_at": "1970-01-01T00:00:00Z",
        "max_model_len": rules.max_length,
        "max_input_tokens": rules.max_prompt_tokens,
        "max_tokens": rules.max_tokens,
    }
