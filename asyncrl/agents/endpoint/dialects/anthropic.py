"""Anthropic's messages; and errors and models for all clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic_core import from_json, to_json

from asyncrl.agents.endpoint.answers import ApiError, invalid, shown
from asyncrl.agents.endpoint.dialects.dialect import (
    NOT_KEPT,
    Block,
    BlockWriter,
    KeptAnswer,
    KeptAnswers,
    Writer,
)
from asyncrl.agents.endpoint.reasoning import signature_of
from asyncrl.agents.endpoint.requests import CallParameters, Count, Settings, Stops

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.gateway_call import GatewayCall
    from asyncrl.agents.endpoint.requests import AnyRequest, RequestReader

BILLING = "x-anthropic-billing-header:"
"""Start of a block in Claude Code's system text that differs in each call, so that no chat would continue an
earlier one.
"""


class MessagesRequest(CallParameters):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[Any] = ""
    max_tokens: Count | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] = {}
    thread: dict[str, Any] | None = None
    stop_sequences: Stops = []
    output_config: dict[str, Any] = {}
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: Settings = {}


class MessagesDialect:
    """/v1/messages and /v1/messages/count_tokens. Thoughts are always separate blocks."""

    name = "msg"
    splits_thoughts: bool | None = True

    def __init__(self, *, can_turn_off: bool) -> None:
        """`can_turn_off`: the chat template reads `enable_thinking`."""
        self._can_turn_off = can_turn_off

    def read(self, reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> tuple[AnyRequest, Any]:
        asked = reader.checked(body, MessagesRequest)
        messages = _messages(asked)
        tools = [_function(tool, f"tools[{number}]") for number, tool in enumerate(asked.tools)]
        before = _continued(asked, kept)
        if before is not None:
            tools = [dict(tool) for tool in before.tools]
        thread = KeptAnswer(before, messages, tools) if asked.thread else None
        chat = asked.common() | {"tools": tools, "stop": asked.stop_sequences}
        chat["messages"] = [*(before.history() if before else ()), *messages]
        if asked.tool_choice is not None:
            chat["tool_choice"] = _choice(asked.tool_choice)
            chat["parallel_tool_calls"] = not asked.tool_choice.get("disable_parallel_tool_use")
        if asked.thinking.get("type") == "disabled" and self._can_turn_off:
            chat["chat_template_kwargs"] = {"enable_thinking": False} | asked.chat_template_kwargs
        if (form := asked.output_format or asked.output_config.get("format")) is not None:
            chat["response_format"] = _response_format(form)
        return reader.chat(chat), thread

    def writer(self, call: GatewayCall, model: str, asked: AnyRequest, data: Any) -> Writer:
        return MessageWriter(call, model, data)


def _messages(asked: MessagesRequest) -> list[dict[str, Any]]:
    system = asked.system
    if isinstance(system, list):
        system = [each for each in system if not _is_billing(each)]
    messages = [{"role": "system", "content": _text(system, "system")}] if system else []
    for number, turn in enumerate(asked.messages):
        where = f"messages[{number}]"
        match turn:
            case {"role": "user", "content": content}:
                messages += _user_messages(content, f"{where}.content")
            case {"role": "assistant", "content": content}:
                messages.append(_answer(content, f"{where}.content"))
            case {"role": "system", "content": content}:
                messages.append({"role": "system", "content": _text(content, f"{where}.content")})
            case _:
                raise invalid(f"{where}: it needs content and the role user, assistant or system.", where)
    if asked.messages[-1]["role"] == "assistant":
        raise invalid("The last message is the assistant's: this server cannot continue it.", "messages")
    return messages


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(BILLING)


def _continued(asked: MessagesRequest, kept: KeptAnswers) -> KeptAnswer | None:
    """Return the answer that a thread continues. Raises ApiError: 404 if it is gone."""
    match asked.thread:
        case None | {"type": "create"}:
            return None
        case {"type": "continue", "previous_message_id": str(name)}:
            if asked.system or asked.tools:
                raise invalid("A continued thread keeps its system and tools: leave them out.", "thread")
            return kept.get(name, "thread.previous_message_id")
    raise invalid("thread: its type is create, or continue with a previous_message_id.", "thread")


def _unsupported(block: Any, where: str) -> ApiError:
    kind = block.get("type") if isinstance(block, dict) else block
    why = "text, thinking, tool_use and tool_result are read, in their places and with all their fields"
    return invalid(f"{where}: a block of type {shown(kind)} is not supported: {why}.", where)


def _blocks(content: Any, where: str) -> list[tuple[Any, str]]:
    """Return the blocks of a content with their places."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(f"{where}: it must be a text or a list of blocks, not {shown(content)}.", where)
    return [(block, f"{where}[{number}]") for number, block in enumerate(content)]


def _text(content: Any, where: str) -> str:
    text = ""
    for block, place in _blocks(content, where):
        match block:
            case {"type": "text", "text": str(part)}:
                text += part
            case _:
                raise _unsupported(block, place)
    return text


def _user_messages(content: Any, where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block, place in _blocks(content, where):
        match block:
            case {"type": "tool_result", "tool_use_id": str(name)}:
                text = _text(block.get("content") or "", f"{place}.content")
                has_error = text.lstrip("<").lower().startswith(("error", "tool_use_error"))
                if block.get("is_error") and not has_error:
                    text = f"Error: {text}"
                messages.append({"role": "tool", "tool_call_id": name, "content": text})
            case {"type": "text", "text": str(text)}:
                if messages and messages[-1]["role"] == "user":
                    messages[-1]["content"] += text
                else:
                    messages.append({"role": "user", "content": text})
            case _:
                raise _unsupported(block, place)
    return messages or [{"role": "user", "content": ""}]


def _answer(content: Any, where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    thoughts: list[str] = []
    for block, place in _blocks(content, where):
        match block:
            case {"type": "text", "text": str(text)}:
                message["content"] += text
            case {"type": "thinking", "thinking": str(thought)}:
                if block.get("signature") and block["signature"] != signature_of(thought):
                    why = "Invalid `signature` in a `thinking` block: this server did not write this thought."
                    raise invalid(f"{place}: {why}", place)
                thoughts.append(thought)
            case {"type": "tool_use", "id": str(name), "name": tool, "input": dict(arguments)}:
                function = {"name": tool, "arguments": to_json(arguments).decode()}
                call = {"id": name, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case _:
                raise _unsupported(block, place)
    if any(thoughts):
        message["reasoning_content"] = "\n\n".join(thoughts)
    return message


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if (kind := tool.get("type")) not in (None, "custom"):
        why = "Give a tool with a name and an input_schema"
        raise invalid(f"{where}: this server has no tool of type {shown(kind)}. {why}.", where)
    given = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema", {}),
        "strict": tool.get("strict"),
    }
    return {
        "type": "function",
        "function": {name: value for name, value in given.items() if value is not None},
    }


def _choice(choice: Mapping[str, Any]) -> Any:
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "auto" | "none" as kind}:
            return kind
        case {"type": "any"}:
            return "required"
    raise invalid("tool_choice: its type is auto, any, none, or tool with a name.", "tool_choice")


def _response_format(form: Any) -> dict[str, Any]:
    match form:
        case {"type": "json_schema", "schema": dict(schema)}:
            wanted = {"name": "output", "schema": schema, "strict": True}
            return {"type": "json_schema", "json_schema": wanted}
    raise invalid("output_config.format: it is of type json_schema, with a schema.", "output_config.format")


# ---- answers

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {"thought": "thinking", "text": "text"}


class MessageWriter(BlockWriter):
    def __init__(self, call: GatewayCall, model: str, thread: KeptAnswer | None) -> None:
        super().__init__(call, model)
        self._thread = thread

    def whole(self) -> bytes:
        choice = self.choice
        content: list[dict[str, Any]] = []
        if choice.thought:
            signature = signature_of(choice.thought)
            content.append({"type": "thinking", "thinking": choice.thought, "signature": signature})
        if choice.content or not (choice.tool_calls or choice.thought):
            content.append({"type": "text", "text": choice.content or ""})
        for call in choice.tool_calls:
            arguments = from_json(call["function"]["arguments"])
            content.append(_tool_use(call, arguments))
        return to_json(self._message(content, choice.num_tokens) | self._ending())

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"

    def keep(self, kept: KeptAnswers) -> None:
        if self._thread is not None:
            kept.add(self.call.name, self._thread.with_answer(self.choice))

    def begin(self) -> bytes:
        message = self._message([], 0) | {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message) + _event("ping")

    def open(self, block: Block) -> bytes:
        kind = _KINDS[block]
        signature = {"signature": ""} if block == "thought" else {}
        return self._start({"type": kind, kind: "", **signature})

    def delta(self, block: Block, text: str) -> bytes:
        return self._delta(f"{_KINDS[block]}_delta", {_KINDS[block]: text})

    def close(self, block: Block) -> bytes:
        events = b""
        if block == "thought":
            events = self._delta("signature_delta", {"signature": signature_of(self.choice.thought)})
        return events + _event("content_block_stop", index=self.index)

    def tool_call(self, number: int, call: Mapping[str, Any]) -> bytes:
        arguments = {"partial_json": call["function"]["arguments"]}
        events = self._start(_tool_use(call, {})) + self._delta("input_json_delta", arguments)
        return events + _event("content_block_stop", index=self.index)

    def finish(self) -> bytes:
        usage = self._usage(self.choice.num_tokens)
        return _event("message_delta", delta=self._ending(), usage=usage) + _event("message_stop")

    def _start(self, block: Mapping[str, Any]) -> bytes:
        return _event("content_block_start", index=self.index, content_block=block)

    def _delta(self, kind: str, part: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self.index, delta={"type": kind, **part})

    def _message(self, content: list[dict[str, Any]], num_output: int) -> dict[str, Any]:
        return {
            "id": self.call.name,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "usage": self._usage(num_output),
        }

    def _ending(self) -> dict[str, Any]:
        reason = self.choice.finish_reason
        stop = self.choice.stopped_by
        if reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _usage(self, num_output: int) -> dict[str, int]:
        usage = {"input_tokens": self.call.num_prompt_tokens, "output_tokens": num_output}
        return usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _tool_use(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"


# ---- errors and models

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
    body: dict[str, Any] = {"type": kind, "message": error.error["message"]}
    if error.error["code"] == NOT_KEPT:  # the client starts a new thread
        body["details"] = {"error_code": "thread_not_found"}
    return to_json({"type": "error", "error": body, "request_id": None}, inf_nan_mode="null")


def error_body(error: ApiError, path: str, headers: Mapping[str, str]) -> bytes:
    is_anthropics = "/v1/messages" in path or "anthropic-version" in headers
    return anthropic_error(error) if is_anthropics else error.body()


def model_body(model: str, name: str | None) -> dict[str, Any]:
    """Return the model, or for None the list. Raises ApiError for another name."""
    if name not in (None, model):
        why = f"This server has one model, {model}."
        raise ApiError(404, why, code="model_not_found", param="model")
    body = {"id": model, "object": "model", "created": 0, "owned_by": "asyncrl"}
    body |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    if name is not None:
        return body
    return {"object": "list", "data": [body], "has_more": False, "first_id": model, "last_id": model}
