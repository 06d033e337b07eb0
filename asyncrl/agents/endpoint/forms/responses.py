"""OpenAI's responses requests, translated to a chat."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import to_json
from typing_extensions import TypedDict

from asyncrl.agents.endpoint.answers import invalid, shown
from asyncrl.agents.endpoint.calls.sent_messages import OPEN, Name, wrong
from asyncrl.agents.endpoint.forms.chat import Parameters, Translated, Written
from asyncrl.agents.endpoint.forms.responses_written import (
    ECHOED,
    MAX_ECHOED,
    GivenResponse,
    KeptResponses,
    WrittenResponse,
)
from asyncrl.agents.endpoint.reasoning import unsealed
from asyncrl.agents.endpoint.requests import parse_json
from asyncrl.agents.endpoint.tool_formats import MAX_TOOLS

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.calls.gateway_call import GatewayCall
    from asyncrl.agents.endpoint.requests import AnyRequest, CallRequest, RequestReader

log = logging.getLogger(__name__)

_PASSED = (
    "model temperature top_p stream seed parallel_tool_calls chat_template_kwargs user metadata service_tier"
    " safety_identifier prompt_cache_key prompt_cache_retention"
)
PASSED = frozenset(_PASSED.split())
"""Same meaning as in chat completions."""
LEFT_OUT = frozenset(["max_tool_calls", "stream_options", "prompt_cache_options", "client_metadata"])
"""No effect here."""
UNSERVED = {
    "conversation": "give the items in input, or previous_response_id",
    "prompt": "there are no stored prompts here",
    "context_management": "nothing of a conversation is left out here",
    "moderation": "there is no moderation here",
}
KINDS = ("message", "reasoning", "function_call", "function_call_output")
_TEXTS = ("input_text", "output_text", "text")
HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
"""Type prefixes of tools that OpenAI's servers run."""


def _parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or kind not in _TEXTS or not isinstance(part.get("text"), str):
            raise wrong(f"a part is {shown(kind)}; this model reads text: {', '.join(_TEXTS)}")
    return "".join(part["text"] for part in content)


Parts = Annotated[str, BeforeValidator(_parts)]


def _item(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind not in KINDS:
        raise wrong(f"an item is {shown(kind)}; these are read: {', '.join(KINDS)}")
    return item | {"type": kind}


class _MessageItem(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["message"]
    role: Literal["user", "system", "developer", "assistant"]
    content: Parts


class _ThoughtText(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    text: str


class _ReasoningItem(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["reasoning"]
    summary: NotRequired[list[_ThoughtText]]
    content: NotRequired[list[_ThoughtText] | None]
    encrypted_content: NotRequired[str | None]


class _CallItem(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Name
    namespace: NotRequired[str | None]
    arguments: str


class _OutputItem(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Parts


Item = Annotated[
    _MessageItem | _ReasoningItem | _CallItem | _OutputItem,
    Field(discriminator="type"),
    BeforeValidator(_item),
]


def _tools(tools: Any) -> Any:
    """Return functions, without hosted tools."""
    found = []
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            found += [{"namespace": tool.get("name"), **each} for each in _tools(tool["tools"])]
        elif kind == "function":
            found.append(tool)
        elif str(kind).startswith(HOSTED):
            _log_hosted(next(each for each in HOSTED if str(kind).startswith(each)))
        else:
            raise wrong(f"a tool is of type {shown(kind)}; functions and namespaces of functions are read")
    return found if isinstance(tools, list) else tools


@cache
def _log_hosted(kind: str) -> None:
    log.warning("gateway: calls give a tool of type %s, which OpenAI's servers run: it is left out", kind)


class _FunctionTool(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    name: Name
    namespace: NotRequired[Name]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class _Format(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]
    description: NotRequired[str | None]


class _TextConfig(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    format: NotRequired[_Format | None]
    verbosity: NotRequired[str | None]


class _Reasoning(TypedDict):
    __pydantic_config__ = OPEN  # type: ignore[misc]
    effort: NotRequired[str | None]


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    input: Annotated[
        list[Item],
        BeforeValidator(
            lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given
        ),
    ] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[_FunctionTool], Field(max_length=MAX_TOOLS), BeforeValidator(_tools)] = []
    tool_choice: Any = None
    text: _TextConfig | None = None
    reasoning: _Reasoning | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] = []
    store: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    background: Literal[False] = False


PARAMETERS = Parameters(ResponsesRequest, PASSED, LEFT_OUT, UNSERVED)


class ResponsesForm:
    """/v1/responses. Thoughts are always separate items. A session keeps its responses for
    previous_response_id.
    """

    name, translates = "resp", True

    def is_apart(self, configured: str) -> bool:
        return True

    def translated(self, body: bytes, kept: KeptResponses) -> Translated:
        given = parse_json(body)
        if isinstance(items := given.get("input"), list):
            given["input"] = [kept.resolved(item, f"input[{number}]") for number, item in enumerate(items)]
        passed, asked = PARAMETERS.sort(given)
        chat = {"stream": False} | passed
        name = asked.previous_response_id
        before = None if name is None else kept.get(name, "previous_response_id")
        new = tuple(to_json(message) for message in _messages(asked.input))
        if not new:
            raise invalid("input: it must be a text that is not empty, or a list of items.", "input")
        first = (to_json({"role": "system", "content": asked.instructions}),) if asked.instructions else ()
        messages = b",".join([*first, *(before.chain() if before else ()), *new])
        is_sealed = "reasoning.encrypted_content" in asked.include
        echoed = {name: given[name] for name in ECHOED if given.get(name) is not None}
        echoed = {name: value for name, value in echoed.items() if len(to_json(value)) <= MAX_ECHOED}
        spaces = {_full_name(tool): tool for tool in asked.tools if tool.get("namespace")}
        told = GivenResponse(echoed, before, new, spaces, is_stored=asked.store, is_sealed=is_sealed)
        _translate(chat, asked)
        return Translated(b'{"messages":[' + messages + b"]," + to_json(chat)[1:], told)

    def read(self, reader: RequestReader, body: bytes) -> AnyRequest:
        return reader.chat(body)

    def written(self, call: GatewayCall, model: str, asked: CallRequest, given: Any) -> Written:
        return WrittenResponse(call, model, asked, given)


def _translate(chat: dict[str, Any], asked: ResponsesRequest) -> None:
    """Raises ApiError."""
    if asked.tools:
        chat["tools"] = [_function(tool) for tool in asked.tools]
    if asked.tool_choice is not None:
        chat["tool_choice"] = _choice(asked.tool_choice)
    if asked.max_output_tokens is not None:
        chat["max_tokens"] = asked.max_output_tokens
    if asked.top_logprobs or "message.output_text.logprobs" in asked.include:
        chat |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    if asked.reasoning and (effort := asked.reasoning.get("effort")):
        chat["reasoning_effort"] = effort
    if asked.text is None:
        return
    if (verbosity := asked.text.get("verbosity")) not in (None, "medium"):
        chat["verbosity"] = verbosity
    wanted = asked.text.get("format")
    if wanted and wanted["type"] == "json_schema":
        names = ("name", "description", "schema", "strict")
        schema = {name: wanted[name] for name in names if wanted.get(name) is not None}  # type: ignore[literal-required]
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted:
        chat["response_format"] = {"type": wanted["type"]}


def _messages(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Merge items that fit in one answer (a thought, a text, calls, in this order) into one message."""
    answer: dict[str, Any] = {}
    for number, item in enumerate(items):
        is_text, kind = item.get("role") == "assistant", item["type"]
        ends = answer.get("content") or "tool_calls" in answer
        if answer and (
            (kind == "reasoning" and (ends or "reasoning_content" in answer))
            or (is_text and ends)
            or (kind in ("message", "function_call_output") and not is_text)
        ):
            yield answer
            answer = {}
        if kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
        elif kind == "message" and not is_text:
            yield {"role": item["role"], "content": item["content"]}
        else:
            answer = answer or {"role": "assistant", "content": ""}
            _add(answer, item, f"input[{number}]")
    if answer:
        yield answer


def _add(answer: dict[str, Any], item: Mapping[str, Any], where: str) -> None:
    if item["type"] == "message":
        answer["content"] = item["content"]
    elif item["type"] == "reasoning":
        if thought := _thought(item, where):
            answer["reasoning_content"] = thought
    else:
        function = {"name": _full_name(item), "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)


def _thought(item: Mapping[str, Any], where: str) -> str:
    """Raises ApiError for content not sealed here."""
    text = "".join(part["text"] for part in item.get("content") or ())
    if not text and (hidden := item.get("encrypted_content")):
        try:
            return unsealed(hidden)
        except ValueError as error:
            name = f"{where}.encrypted_content"
            raise invalid(f"{name} cannot be read: {error}.", name) from None
    return text or "".join(part["text"] for part in item.get("summary") or ())


def _full_name(function: Mapping[str, Any]) -> str:
    space, name = function.get("namespace"), str(function["name"])
    return f"{space.rstrip('_')}__{name}" if space else name


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("description", "parameters") if tool.get(name) is not None}
    function = {"name": _full_name(tool), **function}
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    match choice:
        case str():
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise invalid("tool_choice: it must be none, auto, required, or name a function.", "tool_choice")
