"""Anthropic's messages requests, translated to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import to_json
from typing_extensions import TypedDict

from asyncrl.agents.endpoint.answers import invalid, shown
from asyncrl.agents.endpoint.calls.sent_messages import OPEN, Name, wrong
from asyncrl.agents.endpoint.forms.anthropic_written import WrittenMessage
from asyncrl.agents.endpoint.forms.chat import Parameters, Translated, Written
from asyncrl.agents.endpoint.forms.responses_written import StoredResponse
from asyncrl.agents.endpoint.reasoning import signature_of
from asyncrl.agents.endpoint.requests import MAX_STOPS, parse_json
from asyncrl.agents.endpoint.tool_formats import MAX_TOOLS

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.calls.gateway_call import GatewayCall
    from asyncrl.agents.endpoint.forms.responses_written import KeptResponses
    from asyncrl.agents.endpoint.requests import AnyRequest, CallRequest, RequestReader

PASSED = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "chat_template_kwargs")
"""Same meaning as in chat completions."""
_LEFT_OUT = (
    "metadata service_tier inference_geo speed cache_control context_management diagnostics betas"
    " user_profile_id workspace_id"
)
LEFT_OUT = frozenset(_LEFT_OUT.split())
"""No effect on sampling."""
_NOT_HERE = "there are no tools or files on this side"
UNSERVED = {"mcp_servers": _NOT_HERE, "container": _NOT_HERE}

BILLING = "x-anthropic-billing-header:"
"""Start of a block in Claude Code's system text that differs in each call, so that no chat would continue an
earlier one.
"""


def _blocks(content: Any) -> Any:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else block
        if kind not in ("text", "thinking", "tool_use", "tool_result"):
            why = "text, thinking, tool_use and tool_result are read; images, files and server tools are not"
            raise wrong(f"a block is {shown(kind)}: {why}")
    return content


class _TextBlock(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["text"]
    text: str


class _ThoughtBlock(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[str | None]


class _UseBlock(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Name
    input: dict[str, Any]


Texts = Annotated[list[_TextBlock], BeforeValidator(_blocks)]


class _ResultBlock(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: NotRequired[Texts]
    is_error: NotRequired[bool | None]


class _UserTurn(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    role: Literal["user"]
    content: Annotated[
        list[Annotated[_TextBlock | _ResultBlock, Field(discriminator="type")]], BeforeValidator(_blocks)
    ]


class _AssistantTurn(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    role: Literal["assistant"]
    content: Annotated[
        list[Annotated[_TextBlock | _ThoughtBlock | _UseBlock, Field(discriminator="type")]],
        BeforeValidator(_blocks),
    ]


class _SystemTurn(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    role: Literal["system"]
    content: Texts


def _client_tool(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
        why = "its server or its model knows it; give a tool with a name and an input_schema"
        raise wrong(f"a tool of type {shown(tool['type'])} is not known here: {why}")
    return tool


class _ClientTool(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: Name
    description: NotRequired[str | None]
    input_schema: dict[str, Any]
    strict: NotRequired[bool | None]


class _ToolChoice(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str]
    disable_parallel_tool_use: NotRequired[bool | None]


class _Thinking(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class _Thread(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["create", "continue"]
    previous_message_id: NotRequired[str]


class _OutputFormat(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    format: NotRequired[_OutputFormat | None]


class MessagesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    messages: Annotated[
        list[Annotated[_UserTurn | _AssistantTurn | _SystemTurn, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    system: Texts = []
    tools: Annotated[
        list[Annotated[_ClientTool, BeforeValidator(_client_tool)]], Field(max_length=MAX_TOOLS)
    ] = []
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    thread: _Thread | None = None
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=MAX_STOPS)
    ] = []
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None


PARAMETERS = Parameters(MessagesRequest, PASSED, LEFT_OUT, UNSERVED)


class MessagesForm:
    """/v1/messages and /v1/messages/count_tokens. Thoughts are always separate blocks."""

    name, translates = "msg", True

    def __init__(self, *, can_turn_off: bool) -> None:
        """`can_turn_off`: the chat template reads `enable_thinking`."""
        self._can_turn_off = can_turn_off

    def is_apart(self, configured: str) -> bool:
        return True

    def translated(self, body: bytes, kept: KeptResponses) -> Translated:
        passed, asked = PARAMETERS.sort(parse_json(body))
        system = [block for block in asked.system if not block["text"].startswith(BILLING)]
        messages = [{"role": "system", "content": _text(system)}] if system else []
        for number, turn in enumerate(asked.messages):
            if turn["role"] == "assistant":
                messages.append(_answer(turn["content"], f"messages[{number}]"))
            elif turn["role"] == "system":
                messages.append({"role": "system", "content": _text(turn["content"])})
            else:
                messages += _user_messages(turn["content"])
        if asked.messages[-1]["role"] == "assistant":
            why = "The last message is the assistant's: answers cannot be begun for the model here."
            raise invalid(why, "messages")
        tools = [_function(tool) for tool in asked.tools]
        before = _continued(asked, kept)
        if before is not None:
            tools = [dict(tool) for tool in before.tools]
        chat: dict[str, Any] = {"tools": tools}
        if asked.tool_choice is not None:
            chat["tool_choice"] = _choice(asked.tool_choice)
            if asked.tool_choice.get("disable_parallel_tool_use"):
                chat["parallel_tool_calls"] = False
        if asked.stop_sequences:
            chat["stop"] = asked.stop_sequences
        if asked.thinking is not None and asked.thinking["type"] == "disabled" and self._can_turn_off:
            chat["chat_template_kwargs"] = {"enable_thinking": False}
        wanted = asked.output_format
        if wanted is None and asked.output_config is not None:
            wanted = asked.output_config.get("format")
        if wanted is not None:
            schema = {"name": "output", "schema": wanted["schema"], "strict": True}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        new = tuple(to_json(message) for message in messages)
        chain = b",".join([*(before.chain() if before else ()), *new])
        told = StoredResponse(before, new, tools) if asked.thread else None
        return Translated(b'{"messages":[' + chain + b"]," + to_json(chat | passed)[1:], told)

    def read(self, reader: RequestReader, body: bytes) -> AnyRequest:
        return reader.chat(body)

    def written(self, call: GatewayCall, model: str, asked: CallRequest, given: Any) -> Written:
        return WrittenMessage(call, model, given)


def _continued(asked: MessagesRequest, kept: KeptResponses) -> StoredResponse | None:
    """Raises ApiError: 404."""
    if asked.thread is None or asked.thread["type"] == "create":
        return None
    if asked.system or asked.tools:
        raise invalid(
            "system and tools are those that the thread was created with: leave them out.", "thread"
        )
    return kept.get(asked.thread.get("previous_message_id", ""), "thread.previous_message_id")


def _text(blocks: Sequence[Mapping[str, Any]]) -> str:
    return "".join(block["text"] for block in blocks)


def _user_messages(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            text = _text(block.get("content") or ())
            if block.get("is_error") and not text.lstrip("<").lower().startswith(("error", "tool_use_error")):
                text = f"Error: {text}"
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += block["text"]
        else:
            messages.append({"role": "user", "content": block["text"]})
    return messages or [{"role": "user", "content": ""}]


def _answer(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Raises ApiError for an altered thought."""
    thoughts: list[str] = []
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for number, block in enumerate(blocks):
        match block["type"]:
            case "text":
                message["content"] += block["text"]
            case "thinking":
                if (signature := block.get("signature")) and signature != signature_of(block["thinking"]):
                    why = (
                        "Invalid `signature` in a `thinking` block: it was not written here, or was changed."
                    )
                    raise invalid(f"{where}.content[{number}]: {why}", f"{where}.content[{number}]")
                thoughts.append(block["thinking"])
            case _:
                function = {"name": block["name"], "arguments": to_json(block["input"]).decode()}
                call = {"id": block["id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    if any(thoughts):
        message["reasoning_content"] = "\n\n".join(thoughts)
    return message


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
    }
    function["strict"] = tool.get("strict")
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _choice(choice: Mapping[str, Any]) -> Any:
    if choice["type"] == "tool":
        if "name" not in choice:
            raise invalid("tool_choice.name: a choice of type tool names it.", "tool_choice.name")
        return {"type": "function", "function": {"name": choice["name"]}}
    return {"any": "required"}.get(choice["type"], choice["type"])
