"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic_core import from_json, to_json

from asyncrl.agents.endpoint.dialects import (
    Dialect,
    Kept,
    KeptAnswers,
    Read,
    Writer,
    anthropic_error,
    blocks,
    encoded,
    kept_answer,
)
from asyncrl.agents.endpoint.requests import (
    ApiError,
    CallParameters,
    Count,
    RequestReader,
    Settings,
    Stops,
    chat_format,
    invalid,
    present,
    shown,
)

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.answers import Answer
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
    stop_sequences: Stops = []
    output_config: dict[str, Any] = {}
    thread: dict[str, Any] | None = None
    chat_template_kwargs: Settings = {}


def _read(reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
    asked = reader.checked(body, MessagesRequest)
    before = _continued(asked, kept)
    messages = [*before.messages, *_messages(asked)]
    tools = [*before.tools, *map(_function, asked.tools)]
    chat = asked.common() | {"messages": messages, "tools": tools, "stop": asked.stop_sequences}
    if asked.tool_choice is not None:
        chat["tool_choice"] = _choice(asked.tool_choice)
        chat["parallel_tool_calls"] = not asked.tool_choice.get("disable_parallel_tool_use")
    if asked.thinking.get("type") == "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": False} | asked.chat_template_kwargs
    chat["response_format"] = chat_format(asked.output_config.get("format"), name="output", strict=True)
    return reader.chat(chat), MessageWriter(Kept(messages, tools) if asked.thread else None)


MESSAGES = Dialect("msg", "messages", True, _read, MessagesRequest)


def _continued(asked: MessagesRequest, kept: KeptAnswers) -> Kept:
    """Raises ApiError: 404 if the answer is gone."""
    match asked.thread:
        case None | {"type": "create"}:
            return Kept([])
        case {"type": "continue", "previous_message_id": str(name)}:
            return kept_answer(name, "thread.previous_message_id", kept)
    raise invalid("thread: its type is create, or continue with a previous_message_id.", "thread")


def _messages(asked: MessagesRequest) -> list[dict[str, Any]]:
    system = asked.system
    if isinstance(system, list):
        system = [each for each in system if not str(each.get("text")).startswith(BILLING)]
    messages = _turn("system", system, "system") if system else []
    for number, turn in enumerate(asked.messages):
        messages += _turn(str(turn.get("role")), turn.get("content"), f"messages[{number}].content")
    if messages[-1]["role"] == "assistant":
        raise invalid("The last message is the assistant's: this server cannot continue it.", "messages")
    return messages


def _turn(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise invalid(f"{where}: it must be a text or a list of blocks, not {shown(blocks)}.", where)
    message: dict[str, Any] = {"role": role, "content": ""}
    results: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        match role, block:
            case _, {"type": "text", "text": str(text)}:
                message["content"] += text
            case "assistant", {"type": "thinking", "thinking": str(thought)}:
                thoughts = [message.get("reasoning_content"), thought]
                message["reasoning_content"] = "\n\n".join(filter(None, thoughts))
            case "assistant", {"type": "tool_use", "id": str(name), "name": tool, "input": dict(arguments)}:
                function = {"name": tool, "arguments": to_json(arguments).decode()}
                call = {"id": name, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case "user", {"type": "tool_result", "tool_use_id": str(name)}:
                (result,) = _turn("system", block.get("content") or "", f"{place}.content")
                text = f"Error: {result['content']}" if block.get("is_error") else result["content"]
                results.append({"role": "tool", "tool_call_id": name, "content": text})
            case _:
                kind = block.get("type") if isinstance(block, dict) else block
                why = "use text, thinking, tool_use and tool_result, whole and in their places"
                raise invalid(f"{place}: a block of type {shown(kind)} is not supported: {why}.", place)
    return results if results and not message["content"] else [*results, message]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    if (kind := tool.get("type") or "custom") != "custom":
        raise invalid(f"tools: this server has no tool of type {shown(kind)}.", "tools")
    function = present(tool, "name", "description", "strict") | {"parameters": tool.get("input_schema", {})}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> Any:
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "name": name}
        case {"type": "any"}:
            return "required"
    return choice.get("type")


# ---- answers

SIGNATURE = "asyncrl"
"""Some clients drop thoughts without a signature."""
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter(Writer):
    def __init__(self, continues: Kept | None) -> None:
        self.continues = continues

    def body(self, call: GatewayCall) -> dict[str, Any]:
        answer = call.answer
        content: list[dict[str, Any]] = []
        if answer.thought:
            content.append({"type": "thinking", "thinking": answer.thought, "signature": SIGNATURE})
        if answer.content or not (content or answer.tool_calls):
            content.append({"type": "text", "text": answer.content or ""})
        for each in answer.tool_calls:
            content.append(_use(each) | {"input": from_json(each["function"]["arguments"])})
        usage = _usage(call, answer.num_tokens)
        return {**_head(call), "content": content, "usage": usage, **_ending(answer)}

    async def events(self, call: GatewayCall) -> AsyncIterator[bytes]:
        answer = call.answer
        ending = {"stop_reason": None, "stop_sequence": None}
        message = {**_head(call), "content": [], "usage": _usage(call, 0), **ending}
        yield encoded({"type": "message_start", "message": message}, {"type": "ping"})
        index = 0
        async for step, kind, text in blocks(call):
            name = "thinking" if kind == "thought" else "text"
            if step == "open":
                signature = {"signature": ""} if kind == "thought" else {}
                yield _event("start", index, content_block={"type": name, name: "", **signature})
            elif step == "delta":
                yield _event("delta", index, delta={"type": f"{name}_delta", name: text})
            else:
                if kind == "thought":
                    yield _event("delta", index, delta={"type": "signature_delta", "signature": SIGNATURE})
                yield _event("stop", index)
                index += 1
        for each in answer.tool_calls:
            arguments = each["function"]["arguments"]
            yield _event("start", index, content_block=_use(each) | {"input": {}})
            yield _event("delta", index, delta={"type": "input_json_delta", "partial_json": arguments})
            yield _event("stop", index)
            index += 1
        usage = _usage(call, answer.num_tokens)
        last = {"type": "message_delta", "delta": _ending(answer), "usage": usage}
        yield encoded(last, {"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return encoded(anthropic_error(error))


def _head(call: GatewayCall) -> dict[str, Any]:
    return {"id": call.name, "type": "message", "role": "assistant", "model": call.model}


def _usage(call: GatewayCall, num_output: int) -> dict[str, int]:
    usage = {"input_tokens": call.planned.whole.length, "output_tokens": num_output}
    return usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _use(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _ending(answer: Answer) -> dict[str, Any]:
    if answer.finish_reason == "stop" and answer.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
    return {"stop_reason": _REASONS.get(answer.finish_reason, "end_turn"), "stop_sequence": None}


def _event(kind: str, index: int, **fields: Any) -> bytes:
    return encoded({"type": f"content_block_{kind}", "index": index, **fields})
