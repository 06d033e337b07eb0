"""Anthropic's messages."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

from pydantic import FailFast, Field
from pydantic_core import PydanticCustomError, from_json

from asyncrl.agents.endpoint.calls import (
    ChatsByAnswer,
    GatewayCall,
    StoredChat,
    find_chat,
)
from asyncrl.agents.endpoint.dialects import (
    Dialect,
    Read,
    Writer,
    anthropic_error,
    encoded,
    grow_blocks,
    whole_blocks,
)
from asyncrl.agents.endpoint.requests import (
    ApiError,
    CallParameters,
    Count,
    Name,
    OpenDict,
    RequestReader,
    Settings,
    Stops,
    chat_format,
    invalid,
    present,
    text_of,
)

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.answers import Answer
    from asyncrl.agents.endpoint.tool_formats import Block, Part


BILLING = "x-anthropic-billing-header:"
"""It differs in each call of Claude Code, so no chat would continue another."""


class _Thinking(OpenDict):
    type: Literal["enabled", "adaptive", "disabled"]


class _Created(OpenDict):
    type: Literal["create"]


class _Continued(OpenDict):
    type: Literal["continue"]
    previous_message_id: str


class _ToolBlock(OpenDict):
    type: NotRequired[Literal["custom"] | None]
    name: Name
    description: NotRequired[str | None]
    input_schema: NotRequired[dict[str, object]]
    strict: NotRequired[bool | None]
    defer_loading: NotRequired[bool | None]


class _Turn(OpenDict):
    role: Literal["system", "user", "assistant"]
    content: str | list[object]


class MessagesRequest(CallParameters):
    messages: Annotated[list[_Turn], Field(min_length=1), FailFast()]
    system: str | list[object] = ""
    max_tokens: Count | None = None
    tools: Annotated[list[_ToolBlock], FailFast()] = []
    tool_choice: dict[str, object] = {}
    thinking: _Thinking | None = None
    stop_sequences: Stops = []
    output_config: dict[str, object] = {}
    thread: Annotated[_Created | _Continued, Field(discriminator="type")] | None = None
    chat_template_kwargs: Settings = {}


def _read(reader: RequestReader, body: dict[str, object], chats: ChatsByAnswer) -> Read:
    reader.check_nested("messages", body)
    asked = reader.checked(body, MessagesRequest)
    thread = asked.thread
    previous = None
    if thread and thread["type"] == "continue":
        previous = thread["previous_message_id"]
    before = find_chat(previous, "thread.previous_message_id", chats)
    tools = [*before.tools, *map(_function, asked.tools)]
    messages = [*before.messages, *_messages(asked)]
    chat = asked.common() | {
        "messages": messages,
        "tools": tools,
        "stop": asked.stop_sequences,
    }
    chat["parallel_tool_calls"] = not asked.tool_choice.get("disable_parallel_tool_use")
    if asked.thinking is not None and asked.thinking["type"] == "disabled":
        # Templates differ in the name of this variable.
        off = {"enable_thinking", "thinking"} & set(reader.variables)
        settings = dict.fromkeys(off, False)
        chat["chat_template_kwargs"] = settings | asked.chat_template_kwargs
    chat["reasoning_effort"] = asked.output_config.get("effort")
    chat["response_format"] = chat_format(
        asked.output_config.get("format"), name="output", strict=True
    )
    kept_chat = StoredChat(messages, tools) if thread else None
    return reader.chat(chat), MessageWriter(kept_chat)


_NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
MESSAGES = Dialect("msg", "messages", True, _read, MessagesRequest, _NAMES)


def _messages(asked: MessagesRequest) -> list[dict[str, object]]:
    messages = _turn("system", asked.system, "system") if asked.system else []
    for number, turn in enumerate(asked.messages):
        messages += _turn(turn["role"], turn["content"], f"messages[{number}].content")
    if messages and messages[-1]["role"] == "assistant":
        raise invalid(
            "The last message is the assistant's: this server cannot continue it.",
            "messages",
        )
    return messages


def _turn(role: str, content: str | list[Any], where: str) -> list[dict[str, object]]:
    """Return the tool results and the message of one turn. The chat joins the parts of
    a message; a system's are joined by nothing, like in vLLM.
    """
    blocks = [content] if isinstance(content, str) else content
    parts: list[object] = []
    texts: list[str] = []
    calls: list[dict[str, object]] = []
    results: list[dict[str, object]] = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        match role, block:
            case "assistant", {
                "type": "tool_use",
                "id": str(name),
                "name": tool,
                "input": arguments,
            }:
                function = {"name": tool, "arguments": arguments}
                calls.append({"id": _own_id(name), "function": function})
            case "user", {"type": "tool_result", "tool_use_id": str(name)}:
                result = present(block, "content", "is_error")
                results.append(
                    {"role": "tool", "tool_call_id": _own_id(name), **result}
                )
            case _:
                try:
                    texts.append(text_of(block))
                except PydanticCustomError as error:
                    raise invalid(
                        f"{place}: {error}{_way_out(block)}.", place
                    ) from None
                parts.append(block)
    message: dict[str, object] = {"role": role, "content": parts, "tool_calls": calls}
    if role == "system":
        message["content"] = "".join(
            text for text in texts if not text.startswith(BILLING)
        )
        # an empty one only sets the effort
        return [message] if message["content"] else []
    return results if results and not parts else [*results, message]


def _way_out(block: object) -> str:
    match block:
        case {"type": str(kind)} if kind.endswith(
            ("_tool_use", "_tool_result", "compaction")
        ):
            return (
                "; send calls and results of a server's tools as tool_use and tool_result, with text, "
                "and a summary as text"
            )
    return ""


def _function(tool: _ToolBlock) -> Mapping[str, object]:
    function = present(tool, "name", "description", "strict")
    if "input_schema" in tool:
        function["parameters"] = tool["input_schema"]
    is_deferred = {"defer_loading": True} if tool.get("defer_loading") else {}
    return {"type": "function", "function": function, **is_deferred}


# ---- answers

SIGNATURE = "asyncrl"
"""Some clients drop thoughts without a signature."""
PING = {"type": "ping"}
_DELTAS: Mapping[Part, tuple[str, str]] = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""(type, field of the text)."""
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter(Writer):
    def __init__(self, continues: StoredChat | None) -> None:
        self.continues = continues

    def body(self, call: GatewayCall) -> dict[str, object]:
        answer = call.answer
        content = [_block(block, block.text) for block in whole_blocks(answer)]
        usage = _usage(call, answer.num_tokens)
        return {**_head(call), "content": content, "usage": usage, **_ending(answer)}

    async def events(self, call: GatewayCall) -> AsyncIterator[bytes]:
        answer = call.answer
        ending = {"stop_reason": None, "stop_sequence": None}
        message = {**_head(call), "content": [], "usage": _usage(call, 0), **ending}
        yield encoded({"type": "message_start", "message": message}, PING)
        blocks: list[Block] = []
        async for step, block, text in grow_blocks(call, blocks):
            index = len(blocks) - 1
            if step == "ping":
                yield encoded(PING)
            elif step == "open":
                yield _event(
                    "start",
                    index,
                    content_block=_block(block, text, signature=""),
                )
            elif step == "delta":
                kind, name = _DELTAS[block.part]
                yield _event("delta", index, delta={"type": kind, name: text})
            else:
                if block.part == "thought":
                    yield _event(
                        "delta",
                        index,
                        delta={"type": "signature_delta", "signature": SIGNATURE},
                    )
                yield _event("stop", index)
        usage = _usage(call, answer.num_tokens)
        last = {"type": "message_delta", "delta": _ending(answer), "usage": usage}
        yield encoded(last, {"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return encoded(anthropic_error(error))


def _head(call: GatewayCall) -> dict[str, object]:
    return {
        "id": call.name,
        "type": "message",
        "role": "assistant",
        "model": call.model,
    }


def _usage(call: GatewayCall, num_output: int) -> dict[str, int]:
    usage = {"input_tokens": call.num_prompt, "output_tokens": num_output}
    return usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _block(block: Block, text: str, signature: str = SIGNATURE) -> dict[str, object]:
    if block.part == "thought":
        return {"type": "thinking", "thinking": text, "signature": signature}
    if block.part == "text":
        return {"type": "text", "text": text}
    # A block that begins has no arguments yet. Clients expect an object, and the deltas
    # follow.
    arguments = from_json(text or "{}")
    return {
        "type": "tool_use",
        "id": _shown_id(block.id),
        "name": block.name,
        "input": arguments,
    }


_ENCODED = "asyncrl-"
"""Beginning of the id of a call whose own id does not fit Anthropic's pattern."""


def _shown_id(own_id: str) -> str:
    """Return an id of letters, digits, _ and -. Example: Kimi's `functions.f:0`."""
    if re.fullmatch(r"[a-zA-Z0-9_-]+", own_id):
        return own_id
    return _ENCODED + base64.urlsafe_b64encode(own_id.encode()).decode().rstrip("=")


def _own_id(shown_id: str) -> str:
    """Return the id that the model wrote, from which templates write later prompts."""
    encoded = shown_id.removeprefix(_ENCODED)
    if encoded != shown_id:
        with contextlib.suppress(ValueError):
            return base64.urlsafe_b64decode(encoded + "==").decode()
    return shown_id


def _ending(answer: Answer) -> dict[str, object]:
    if answer.finish_reason == "stop" and answer.text.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.text.stopped_by}
    return {
        "stop_reason": _REASONS.get(answer.finish_reason, "end_turn"),
        "stop_sequence": None,
    }


def _event(kind: str, index: int, **fields: object) -> bytes:
    return encoded({"type": f"content_block_{kind}", "index": index, **fields})
