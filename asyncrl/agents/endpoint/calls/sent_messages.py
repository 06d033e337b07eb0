"""Messages and tools of a call: the keys that chat templates get, checked. Other keys are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypedDict

from asyncrl.agents.endpoint.answers import shown
from asyncrl.agents.endpoint.tool_formats import MAX_TOOLS


def wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": why})


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise wrong(f"a part is {shown(kind)}; this model reads text parts alone")
    return "".join(part["text"] for part in content)


def _parsed(arguments: Any) -> Any:
    try:
        return from_json(arguments, allow_inf_nan=False, cache_strings="keys")
    except (ValueError, TypeError) as error:
        raise wrong(f"arguments must be the text of a JSON object: {error}") from None


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}\z")]
Content = Annotated[str, BeforeValidator(_joined)]
OPEN = ConfigDict(strict=True, extra="ignore")
STRICT = ConfigDict(strict=True, extra="forbid")


class _CalledFunction(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed)]


class _SentCall(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    id: str
    type: NotRequired[Literal["function"]]
    function: _CalledFunction


class _Message(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: NotRequired[str]
    content: Content


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
"""Message keys that templates get, and the sources of reasoning_content."""
_EMPTY = ("refusal", "audio", "annotations", "function_call", "parsed", "tool_calls", "reasoning_content")
"""Keys that clients send back without a value."""
_NOT_READ = {"function_call": "it is deprecated; use tool_calls", "audio": "this model reads text"}


def _tidy(message: Any, info: ValidationInfo) -> Any:
    """Drop empty keys; report keys that no template gets. Add empty content to an answer with only calls:
    some templates (SmolLM2, Phi 3) require it.
    """
    if not isinstance(message, dict):
        return message
    said = {key: value for key, value in message.items() if value or not (value is None or key in _EMPTY)}
    is_answer = said.get("role") == "assistant"
    for key, why in _NOT_READ.items():
        if key in said:
            raise wrong(f"{key} of a message is refused: {why}")
    if "tool_calls" in said and not is_answer:
        raise wrong(f"tool_calls belong to a message of the assistant, not of {shown(said.get('role'))}")
    if info.context is not None and (ignored := said.keys() - _READ):
        info.context(ignored)
    if not is_answer:
        return said
    thought = said.get("reasoning_content") or _reasoning(said)
    return {"content": "", **said} | ({"reasoning_content": thought} if thought else {})


def _reasoning(message: Mapping[str, Any]) -> str:
    if isinstance(thought := message.get("reasoning"), str):
        return thought
    details = message.get("reasoning_details")
    parts = (
        [part.get("text") for part in details if isinstance(part, dict)] if isinstance(details, list) else []
    )
    return "".join(part for part in parts if isinstance(part, str))


ChatMessage = Annotated[
    _Plain | _Assistant | _ToolResult, Field(discriminator="role"), BeforeValidator(_tidy)
]


class _Described(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]


class GivenTool(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["function"]
    function: _Described


# ---- response format


class _JsonSchema(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    name: Name
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]


class _JsonObjectFormat(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["json_object"]


class _JsonSchemaFormat(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    type: Literal["json_schema"]
    json_schema: _JsonSchema


ResponseFormat = Annotated[
    Annotated[_JsonObjectFormat | _JsonSchemaFormat, Field(discriminator="type")] | None,
    BeforeValidator(lambda value: None if value == {"type": "text"} else value),
]
"""None: any text."""
