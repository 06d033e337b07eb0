"""Checked messages and tools: the keys that chat templates get."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypedDict

from asyncrl.agents.endpoint.answers import shown
from asyncrl.agents.endpoint.tool_formats import MAX_TOOLS

STRICT = ConfigDict(strict=True, extra="forbid")


def wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": why})


def joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str()}:
                continue
        kind = part.get("type") if isinstance(part, dict) else part
        raise wrong(f"a part of type {shown(kind)} is not supported; this model reads text parts")
    return "".join(part["text"] for part in content)


def _parsed(arguments: Any) -> Any:
    try:
        return from_json(arguments, allow_inf_nan=False, cache_strings="keys")
    except (ValueError, TypeError) as error:
        raise wrong(f"arguments must be the text of a JSON object: {error}") from None


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}\z")]


class _Open(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")  # type: ignore[misc]


class _Strict(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]


class _CalledFunction(_Open):
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed)]


class _SentCall(_Open):
    id: Annotated[str, Field(min_length=1)]
    type: NotRequired[Literal["function"]]
    function: _CalledFunction


class _Message(_Open):
    name: NotRequired[str]
    content: Annotated[str, BeforeValidator(joined)]


class _Plain(_Message):
    role: Literal["system", "developer", "user"]


class _Assistant(_Message):
    role: Literal["assistant"]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Annotated[list[_SentCall], Field(max_length=MAX_TOOLS)]]


class _ToolResult(_Message):
    role: Literal["tool"]
    tool_call_id: Annotated[str, Field(min_length=1)]


_READ = frozenset(
    "role content name tool_call_id tool_calls reasoning_content reasoning reasoning_details".split()
)
_EMPTY = ("refusal", "audio", "annotations", "function_call", "parsed", "tool_calls", "reasoning_content")
"""Keys that clients return empty."""
_NOT_READ = {"function_call": "it is deprecated; use tool_calls", "audio": "this model reads text"}


def _tidy(message: Any, info: ValidationInfo) -> Any:
    """Keep the keys that templates get. Add empty content to tool calls for SmolLM2 and Phi 3."""
    if not isinstance(message, dict):
        return message
    kept = {key: value for key, value in message.items() if value or not (value is None or key in _EMPTY)}
    is_answer = kept.get("role") == "assistant"
    for key, why in _NOT_READ.items():
        if key in kept:
            raise wrong(f"{key} of a message is refused: {why}")
    if "tool_calls" in kept and not is_answer:
        raise wrong(f"tool_calls need the role assistant, not {shown(kept.get('role'))}")
    if info.context is not None and (ignored := kept.keys() - _READ):
        info.context(ignored)
    if not is_answer:
        return kept
    thought = kept.get("reasoning_content") or _reasoning(kept)
    return {"content": "", **kept} | ({"reasoning_content": thought} if thought else {})


def _reasoning(message: dict[str, Any]) -> str:
    match message:
        case {"reasoning": str(thought)}:
            return thought
        case {"reasoning_details": list(details)}:
            texts = (part.get("text") for part in details if isinstance(part, dict))
            return "".join(text for text in texts if isinstance(text, str))
    return ""


ChatMessage = Annotated[
    _Plain | _Assistant | _ToolResult, Field(discriminator="role"), BeforeValidator(_tidy)
]


class _Function(_Open):
    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]


class GivenTool(_Open):
    type: Literal["function"]
    function: _Function


class _JsonSchema(_Strict):
    name: Name
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]


class _JsonObjectFormat(_Strict):
    type: Literal["json_object"]


class _JsonSchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: _JsonSchema


ResponseFormat = Annotated[
    Annotated[_JsonObjectFormat | _JsonSchemaFormat, Field(discriminator="type")] | None,
    BeforeValidator(lambda value: None if value == {"type": "text"} else value),
]
"""None: any text."""
