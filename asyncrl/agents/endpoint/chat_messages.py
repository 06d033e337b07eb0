"""Chat messages and tools as a call sends them, and as a chat template reads them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypedDict

from asyncrl.agents.endpoint.refusals import shown

MAX_TOOLS = 128


def _wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": why})


def _joined(content: Any) -> Any:
    """Text, or the text of a list of text parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong(f"a part is {shown(kind)}; this model reads text parts alone")
    return "".join(part["text"] for part in content)


def _parsed(arguments: Any) -> Any:
    """Arguments as an object, which is how templates read them."""
    if not isinstance(arguments, str):
        raise _wrong("arguments must be the text of a JSON object")
    try:
        return from_json(arguments, allow_inf_nan=False)
    except ValueError as error:
        raise _wrong(f"arguments are not JSON: {error}") from None


def _typed(call: Any) -> Any:
    return {"type": "function", **call} if isinstance(call, dict) else call


def _as_given(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Checked, and left as it is: the order of keys is part of the prompt."""
    check(value)
    return value


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}\z")]
Content = Annotated[str, BeforeValidator(_joined)]
STRICT = ConfigDict(strict=True, extra="forbid")
OPEN = ConfigDict(strict=True, extra="ignore")


class _CalledFunction(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: Name
    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed)]


class _SentCall(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _Plain(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    role: Literal["system", "developer", "user"]
    name: NotRequired[str]
    content: Content


class _Assistant(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    role: Literal["assistant"]
    name: NotRequired[str]
    content: Content
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[
        Annotated[list[Annotated[_SentCall, BeforeValidator(_typed)]], Field(max_length=MAX_TOOLS)]
    ]


class _ToolResult(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    role: Literal["tool"]
    name: NotRequired[str]
    content: Content
    tool_call_id: Annotated[str, Field(min_length=1)]


ROLES = ("system", "developer", "user", "assistant", "tool")
_SENT_BACK = ("refusal", "audio", "annotations", "function_call", "parsed")
"""Keys that OpenAI's own client writes into an answer that it got and sends back."""


def _tidy(message: Any) -> Any:
    """Without keys that say nothing. An answer of calls alone has empty content: some templates (SmolLM2,
    Phi 3) take no message without it.
    """
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    said = {name: value for name, value in message.items() if value is not None}
    if role == "assistant":
        said = {name: value for name, value in said.items() if value or name not in _SENT_BACK}
        if not said.get("tool_calls", True):
            del said["tool_calls"]
        if "content" not in said and "tool_calls" not in said:
            raise _wrong("neither content nor tool_calls; an assistant message needs one of them")
        said.setdefault("content", "")
    return said


ChatMessage = Annotated[
    _Plain | _Assistant | _ToolResult, Field(discriminator="role"), BeforeValidator(_tidy)
]


class _Described(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any]]


class _GivenTool(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["function"]
    function: _Described


Tools = Annotated[list[_GivenTool], Field(max_length=MAX_TOOLS), WrapValidator(_as_given)]
