"""Anthropic's messages; errors and models of all dialects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic_core import from_json, to_json

from asyncrl.agents.endpoint.dialects import (
    NOT_KEPT,
    Block,
    BlockWriter,
    Dialect,
    Event,
    KeptAnswer,
    KeptAnswers,
    Read,
)
from asyncrl.agents.endpoint.reasoning import signature_of
from asyncrl.agents.endpoint.requests import (
    ApiError,
    CallParameters,
    Count,
    RequestReader,
    Settings,
    Stops,
    invalid,
    shown,
)

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.sessions import GatewayCall

BILLING = "x-anthropic-billing-header:"
"""It differs in each call of Claude Code, so no chat would continue another."""


class MessagesRequest(CallParameters):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] = ""
    max_tokens: Count | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] = {}
    thread: dict[str, Any] | None = None
    stop_sequences: Stops = []
    output_config: dict[str, Any] = {}
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: Settings = {}


def _read(reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
    asked = reader.checked(body, MessagesRequest)
    messages = _messages(asked)
    tools = [_function(tool, f"tools[{number}]") for number, tool in enumerate(asked.tools)]
    before = _continued(asked, kept)
    if before is not None:
        tools = [dict(tool) for tool in before.tools]
    chat = asked.common() | {"tools": tools, "stop": asked.stop_sequences}
    chat["messages"] = [*(before.history() if before else ()), *messages]
    if asked.tool_choice is not None:
        chat["tool_choice"] = _choice(asked.tool_choice)
        chat["parallel_tool_calls"] = not asked.tool_choice.get("disable_parallel_tool_use")
    if asked.thinking.get("type") == "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": False} | asked.chat_template_kwargs
    if (form := asked.output_format or asked.output_config.get("format")) is not None:
        chat["response_format"] = _response_format(form)
    thread = KeptAnswer(before, messages, tools) if asked.thread else None
    return reader.chat(chat), partial(MessageWriter, thread=thread)


MESSAGES = Dialect("msg", True, _read)


def _messages(asked: MessagesRequest) -> list[dict[str, Any]]:
    system = asked.system
    if isinstance(system, list):
        system = [each for each in system if not str(each.get("text")).startswith(BILLING)]
    messages = _turn("system", system, "system") if system else []
    for number, turn in enumerate(asked.messages):
        where = f"messages[{number}]"
        match turn:
            case {"role": "user" | "assistant" | "system" as role, "content": content}:
                messages += _turn(role, content, f"{where}.content")
            case _:
                raise invalid(f"{where}: it needs content and the role user, assistant or system.", where)
    if asked.messages[-1]["role"] == "assistant":
        raise invalid("The last message is the assistant's: this server cannot continue it.", "messages")
    return messages


def _turn(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise invalid(f"{where}: it must be a text or a list of blocks, not {shown(blocks)}.", where)
    messages: list[dict[str, Any]] = []
    message: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if not message:
            message = {"role": role, "content": ""}
        match role, block:
            case _, {"type": "text", "text": str(text)}:
                message["content"] += text
            case "assistant", {"type": "thinking", "thinking": str(thought)}:
                if block.get("signature") not in (None, "", signature_of(thought)):
                    why = "Invalid `signature`: this server did not write this thought."
                    raise invalid(f"{place}: {why}", place)
                thoughts = [message.get("reasoning_content"), thought]
                message["reasoning_content"] = "\n\n".join(filter(None, thoughts))
            case "assistant", {"type": "tool_use", "id": str(name), "name": tool, "input": dict(arguments)}:
                function = {"name": tool, "arguments": to_json(arguments).decode()}
                call = {"id": name, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case "user", {"type": "tool_result", "tool_use_id": str(name)}:
                (result,) = _turn("system", block.get("content") or "", f"{place}.content")
                text = result["content"]
                has_error = text.lstrip("<").lower().startswith(("error", "tool_use_error"))
                if block.get("is_error") and not has_error:
                    text = f"Error: {text}"
                messages.append({"role": "tool", "tool_call_id": name, "content": text})
                message = {}
                continue
            case _:
                kind = block.get("type") if isinstance(block, dict) else block
                why = "use text, thinking, tool_use and tool_result, whole and in their places"
                raise invalid(f"{place}: a block of type {shown(kind)} is not supported: {why}.", place)
        if not messages or messages[-1] is not message:
            messages.append(message)
    return messages or [{"role": role, "content": ""}]


def _continued(asked: MessagesRequest, kept: KeptAnswers) -> KeptAnswer | None:
    """Raises ApiError: 404 if the answer is gone."""
    match asked.thread:
        case None | {"type": "create"}:
            return None
        case {"type": "continue", "previous_message_id": str(name)}:
            if asked.system or asked.tools:
                raise invalid("A continued thread keeps its system and tools: omit them.", "thread")
            return kept.get(name, "thread.previous_message_id")
    raise invalid("thread: its type is create, or continue with a previous_message_id.", "thread")


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
    def __init__(self, call: GatewayCall, model: str, *, thread: KeptAnswer | None) -> None:
        super().__init__(call, model)
        self._thread = thread

    def failed(self, error: ApiError) -> bytes:
        return self.encoded([anthropic_error(error)])

    def keep(self, kept: KeptAnswers) -> None:
        if self._thread is not None:
            kept.add(self.call.name, self._thread.with_answer(self.choice))

    def begin(self) -> list[Event]:
        message = self.answer() | {"content": [], "usage": self._usage(0)}
        message |= {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def open(self, block: Block) -> list[Event]:
        kind = _KINDS[block]
        signature = {"signature": ""} if block == "thought" else {}
        return [self._event("start", content_block={"type": kind, kind: "", **signature})]

    def delta(self, block: Block, text: str) -> list[Event]:
        kind = _KINDS[block]
        return [self._event("delta", delta={"type": f"{kind}_delta", kind: text})]

    def close(self, block: Block) -> list[Event]:
        events: list[Event] = []
        if block == "thought":
            signature = {"signature": signature_of(self.choice.thought)}
            events.append(self._event("delta", delta={"type": "signature_delta", **signature}))
            finished = {"type": "thinking", "thinking": self.choice.thought, **signature}
        else:
            finished = {"type": "text", "text": self.choice.content or ""}
        events.append(self._event("stop"))
        self.blocks.append(finished)
        return events

    def tool_call(self, number: int, call: Mapping[str, Any]) -> list[Event]:
        arguments = call["function"]["arguments"]
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        events = [
            self._event("start", content_block={**block, "input": {}}),
            self._event("delta", delta={"type": "input_json_delta", "partial_json": arguments}),
            self._event("stop"),
        ]
        self.blocks.append({**block, "input": from_json(arguments)})
        return events

    def finish(self) -> list[Event]:
        usage = self._usage(self.choice.num_tokens)
        return [{"type": "message_delta", "delta": self._ending(), "usage": usage}, {"type": "message_stop"}]

    def answer(self) -> dict[str, Any]:
        head = {"id": self.call.name, "type": "message", "role": "assistant", "model": self.model}
        usage = self._usage(self.choice.num_tokens)
        return {**head, "content": self.blocks, "usage": usage, **self._ending()}

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"content_block_{name}", "index": len(self.blocks), **fields}

    def _ending(self) -> dict[str, Any]:
        reason = self.choice.finish_reason
        stop = self.choice.stopped_by
        if reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _usage(self, num_output: int) -> dict[str, int]:
        usage = {"input_tokens": self.call.num_prompt_tokens, "output_tokens": num_output}
        return usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


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
"""Others are invalid requests."""


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": error.error["message"]}
    if error.error["code"] == NOT_KEPT:  # the client starts a new thread
        body["details"] = {"error_code": "thread_not_found"}
    return {"type": "error", "error": body, "request_id": None}


def error_body(error: ApiError, path: str, headers: Mapping[str, str]) -> bytes:
    is_anthropics = "/v1/messages" in path or "anthropic-version" in headers
    return to_json(anthropic_error(error), inf_nan_mode="null") if is_anthropics else error.body()


def model_body(model: str, name: str | None) -> dict[str, Any]:
    """None: the list. Raises ApiError."""
    if name not in (None, model):
        why = f"This server has one model, {model}."
        raise ApiError(404, why, code="model_not_found", param="model")
    body = {"id": model, "object": "model", "created": 0, "owned_by": "asyncrl"}
    body |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    if name is not None:
        return body
    return {"object": "list", "data": [body], "has_more": False, "first_id": model, "last_id": model}
