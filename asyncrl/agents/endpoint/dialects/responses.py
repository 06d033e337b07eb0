"""OpenAI's responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json

from asyncrl.agents.endpoint.answers import ApiError, invalid, shown
from asyncrl.agents.endpoint.dialects.dialect import Block, BlockWriter, KeptAnswer, KeptAnswers, Writer
from asyncrl.agents.endpoint.reasoning import sealed, unsealed
from asyncrl.agents.endpoint.requests import CallParameters, Count, Settings
from asyncrl.messages.engine_api import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.gateway_call import GatewayCall
    from asyncrl.agents.endpoint.requests import AnyRequest, RequestReader

HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
"""Type prefixes of tools that OpenAI's servers run."""
ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
"""Request parameters that a response repeats, with their defaults."""


class ResponsesRequest(CallParameters):
    input: str | list[Any] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    include: list[str] = []
    store: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: Settings = {}


@dataclass(frozen=True, slots=True, eq=False)
class ResponseData:
    """`stored`: to keep, None with store=false; `spaces`: namespaced tools by their name for the model;
    `is_sealed`: thoughts are also returned as encrypted_content.
    """

    echoed: Mapping[str, Any]
    stored: KeptAnswer | None
    spaces: Mapping[str, Mapping[str, Any]]
    is_sealed: bool


class ResponsesDialect:
    """/v1/responses. Thoughts are always separate items. A session keeps its responses for
    previous_response_id.
    """

    name = "resp"
    splits_thoughts: bool | None = True

    def read(self, reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> tuple[AnyRequest, Any]:
        asked = reader.checked(body, ResponsesRequest)
        name = asked.previous_response_id
        before = None if name is None else kept.get(name, "previous_response_id")
        items = asked.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}] if items else []
        messages = list(_messages([_resolved(item, f"input[{n}]", kept) for n, item in enumerate(items)]))
        if not messages:
            raise invalid("input: it must be a text or a list of items, not empty.", "input")
        tools = list(_functions(asked.tools, "tools", reader))
        first = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        chat = asked.common() | {
            "messages": [*first, *(before.history() if before else ()), *messages],
            "tools": [_chat_tool(tool) for tool in tools],
            "tool_choice": asked.tool_choice,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "max_tokens": asked.max_output_tokens,
            "logprobs": asked.top_logprobs > 0 or "message.output_text.logprobs" in asked.include,
            "top_logprobs": asked.top_logprobs,
            "reasoning_effort": asked.reasoning.get("effort"),
            "response_format": _response_format(asked.text.get("format")),
        }
        data = ResponseData(
            echoed={name: body[name] for name in ECHOED if body.get(name) is not None},
            stored=KeptAnswer(before, messages) if asked.store else None,
            spaces={_full_name(tool): tool for tool in tools if "namespace" in tool},
            is_sealed="reasoning.encrypted_content" in asked.include,
        )
        return reader.chat(chat), data

    def writer(self, call: GatewayCall, model: str, asked: AnyRequest, data: Any) -> Writer:
        return ResponseWriter(call, model, data)


def _messages(items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Merge items that fit in one answer (a thought, a text, calls, in this order) into one message."""
    answer: dict[str, Any] = {}
    for number, item in enumerate(items):
        where = f"input[{number}]"
        has_end = bool(answer.get("content")) or "tool_calls" in answer
        message: dict[str, Any] | None = None
        part: dict[str, Any] = {}
        match item:
            case {"type": "message", "role": "assistant", "content": content}:
                part = {"content": content}
            case {"type": "message", "role": role, "content": content}:
                message = {"role": role, "content": content}
            case {"type": "function_call_output", "call_id": str(name), "output": output}:
                message = {"role": "tool", "tool_call_id": name, "content": output}
            case {"type": "reasoning"}:
                part = {"reasoning_content": _thought(item, where)}
                has_end = has_end or "reasoning_content" in answer
            case {"type": "function_call", "call_id": str(name), "name": str(), "arguments": arguments}:
                function = {"name": _full_name(item), "arguments": arguments}
                call = {"id": name, "type": "function", "function": function}
                part = {"tool_calls": [*answer.get("tool_calls", ()), call]}
                has_end = False
            case _:
                kind = item.get("type") if isinstance(item, dict) else item
                why = "message, reasoning, function_call and function_call_output are read, with all fields"
                raise invalid(f"{where}: an item of type {shown(kind)} is not supported: {why}.", where)
        if answer and (message is not None or has_end):
            yield answer
            answer = {}
        if message is not None:
            yield message
        else:
            answer = {"role": "assistant", "content": ""} | answer | part
    if answer:
        yield answer


def _thought(item: Mapping[str, Any], where: str) -> str:
    """Raises ApiError for content not sealed by this server."""
    text = _joined(item.get("content"))
    if not text and isinstance(hidden := item.get("encrypted_content"), str):
        try:
            return unsealed(hidden)
        except ValueError as error:
            name = f"{where}.encrypted_content"
            raise invalid(f"{name} cannot be read: {error}.", name) from None
    return text or _joined(item.get("summary"))


def _joined(parts: Any) -> str:
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _resolved(item: Any, param: str, kept: KeptAnswers) -> Any:
    """Return the item with its type, or the item that it references. Raises ApiError: 404."""
    if not isinstance(item, dict) or item.get("type") != "item_reference":
        return {"type": "message"} | item if isinstance(item, dict) and "role" in item else item
    kind, _, rest = str(item.get("id")).partition("_")
    name, _, index = rest.partition("_")
    answer = kept.get(name, param).messages[-1]
    calls = answer.get("tool_calls", [])
    match kind:
        case "rs":
            thought = {"type": "reasoning_text", "text": answer.get("reasoning_content", "")}
            return {"type": "reasoning", "content": [thought]}
        case "msg":
            return {"type": "message", "role": "assistant", "content": answer["content"]}
        case "fc" if index in map(str, range(len(calls))):
            call = calls[int(index)]
            return {"type": "function_call", "call_id": call["id"], **call["function"]}
    raise ApiError(404, f"{param}: there is no item {shown(item.get('id'))}.", param=param)


def _functions(tools: Sequence[Any], where: str, reader: RequestReader) -> Iterator[Mapping[str, Any]]:
    """Yield functions, without hosted tools."""
    for number, tool in enumerate(tools):
        place = f"{where}[{number}]"
        match tool:
            case {"type": "namespace", "name": str(name), "tools": list(inner)}:
                yield from (
                    {**each, "namespace": name} for each in _functions(inner, f"{place}.tools", reader)
                )
            case {"type": "function", "name": str()}:
                yield tool
            case {"type": str(kind)} if kind.startswith(HOSTED):
                reader.log_once(kind, f"tools of type {kind}, which OpenAI's servers run, are left out")
            case _:
                given = tool.get("type") if isinstance(tool, dict) else tool
                why = "functions and namespaces of functions are read"
                raise invalid(f"{place}: a tool of type {shown(given)} is not supported: {why}.", place)


def _full_name(function: Mapping[str, Any]) -> str:
    space = function.get("namespace")
    name = str(function["name"])
    return f"{str(space).rstrip('_')}__{name}" if space else name


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("description", "parameters", "strict")
    given = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": {"name": _full_name(tool), **given}}


def _response_format(form: Any) -> Any:
    match form:
        case {"type": "json_schema", **given}:
            names = ("name", "description", "schema", "strict")
            schema = {name: given[name] for name in names if given.get(name) is not None}
            return {"type": "json_schema", "json_schema": schema}
    return form


# ---- answers


class ResponseWriter(BlockWriter):
    def __init__(self, call: GatewayCall, model: str, data: ResponseData) -> None:
        super().__init__(call, model)
        self._data = data
        head = {"id": call.name, "object": "response", "created_at": call.created_s, "model": model}
        head |= {"background": False, "error": None, "incomplete_details": None}
        self._head: dict[str, Any] = {**head, **ECHOED, **data.echoed}
        self._num_events = 0

    def whole(self) -> bytes:
        return to_json(self._response(), inf_nan_mode="null")

    def failed(self, error: ApiError) -> bytes:
        """Report a failure. The `error` event is for OpenAI's clients, which read only it."""
        fields = {name: error.error[name] for name in ("code", "message", "param")}
        return self._event("error", **fields, error=error.error)

    def keep(self, kept: KeptAnswers) -> None:
        if self._data.stored is not None:
            kept.add(self.call.name, self._data.stored.with_answer(self.choice))

    def begin(self) -> bytes:
        response = self._head | {"status": "in_progress", "output": [], "usage": None}
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def open(self, block: Block) -> bytes:
        item = self._item(block) | {"status": "in_progress", "content": []}
        item.pop("encrypted_content", None)
        added = self._of_item("output_item.added", item=item)
        return added + self._of_part(block, "content_part.added", part=_part(block, "", []))

    def delta(self, block: Block, text: str) -> bytes:
        logprobs: dict[str, Any] = {"logprobs": []} if block == "text" else {}
        return self._of_part(block, f"{_PARTS[block]}.delta", delta=text, **logprobs)

    def close(self, block: Block) -> bytes:
        item = self._item(block)
        (part,) = item["content"]
        text = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        events = self._of_part(block, f"{_PARTS[block]}.done", **text)
        events += self._of_part(block, "content_part.done", part=part)
        return events + self._of_item("output_item.done", item=item)

    def tool_call(self, number: int, call: Mapping[str, Any]) -> bytes:
        item = self._call_item(number, call)
        name = "function_call_arguments"
        arguments = item["arguments"]
        place = {"item_id": item["id"]}
        events = self._of_item("output_item.added", item=item | {"status": "in_progress", "arguments": ""})
        events += self._of_item(f"{name}.delta", **place, delta=arguments)
        events += self._of_item(f"{name}.done", **place, name=item["name"], arguments=arguments)
        return events + self._of_item("output_item.done", item=item)

    def finish(self) -> bytes:
        response = self._response()
        return self._event(f"response.{response['status']}", response=response)

    def _response(self) -> dict[str, Any]:
        choice = self.choice
        items = [self._item("thought")] if choice.thought else []
        if choice.content or not (choice.thought or choice.tool_calls):
            items.append(self._item("text"))
        items += [self._call_item(number, call) for number, call in enumerate(choice.tool_calls)]
        response = self._head | {"status": "completed", "output": items, "usage": self._usage()}
        if choice.finish_reason == "length":
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _usage(self) -> dict[str, Any]:
        prompt = self.call.num_prompt_tokens
        sampled = self.choice.num_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": self.choice.num_thought_tokens},
            "total_tokens": prompt + sampled,
        }

    def _item(self, block: Block) -> dict[str, Any]:
        choice = self.choice
        if block == "text":
            status = "incomplete" if choice.finish_reason == "length" else "completed"
            part = _part(block, choice.content or "", choice.logprobs or [])
            item: dict[str, Any] = {
                "id": f"msg_{self.call.name}",
                "type": "message",
                "role": "assistant",
                "status": status,
            }
            return item | {"content": [part]}
        text = choice.thought if choice.finish_reason else choice.take_thought(0)
        item = {"id": f"rs_{self.call.name}", "type": "reasoning", "status": "completed", "summary": []}
        if self._data.is_sealed:
            item["encrypted_content"] = sealed(text)
        return item | {"content": [_part(block, text, [])]}

    def _call_item(self, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        item_id = f"fc_{self.call.name}_{number}"
        item = {"id": item_id, "type": "function_call", "call_id": call["id"], "status": "completed"}
        tool = self._data.spaces.get(call["function"]["name"], {})
        return {**item, **call["function"]} | {
            name: tool[name] for name in ("namespace", "name") if name in tool
        }

    def _of_item(self, event: str, **fields: Any) -> bytes:
        return self._event(f"response.{event}", output_index=self.index, **fields)

    def _of_part(self, block: Block, event: str, **fields: Any) -> bytes:
        item_id = f"{'rs' if block == 'thought' else 'msg'}_{self.call.name}"
        return self._of_item(event, item_id=item_id, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + to_json(event, inf_nan_mode="null") + b"\n\n"


_PARTS = {"thought": "reasoning_text", "text": "output_text"}


def _part(block: Block, text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    if block == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
