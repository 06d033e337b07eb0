"""OpenAI's chat completions, completions and responses."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from asyncrl.agents.endpoint.dialects import (
    Dialect,
    Kept,
    KeptAnswers,
    Read,
    Writer,
    blocks,
    encoded,
    kept_answer,
)
from asyncrl.agents.endpoint.reasoning import sealed, unsealed
from asyncrl.agents.endpoint.requests import (
    ApiError,
    CallParameters,
    ChatRequest,
    Count,
    RequestReader,
    Settings,
    TextRequest,
    invalid,
    joined_texts,
    present,
    shown,
)
from asyncrl.messages.engine_api import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.answers import Answer, Kind
    from asyncrl.agents.endpoint.sessions import GatewayCall


# ---- chats and completions


class ChatWriter(Writer):
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._has_usage = options.get("include_usage") is True

    def body(self, call: GatewayCall) -> dict[str, Any]:
        choices = [
            {"index": choice.index, **self._choice(choice), "finish_reason": choice.finish_reason}
            for choice in call.choices
        ]
        return self._head(call, self.whole) | {"choices": choices, "usage": self._usage(call)}

    async def events(self, call: GatewayCall) -> AsyncIterator[bytes]:
        first = {"role": "assistant", "content": "", "refusal": None}
        yield b"".join(self._event(call, choice, delta=first) for choice in call.choices)
        async for choice, kind, text in call.pieces():
            name = "content" if kind == "text" else "reasoning_content"
            yield self._event(call, choice, delta={name: text})
        for choice in call.choices:
            if choice.tool_calls:
                calls = [{"index": index, **each} for index, each in enumerate(choice.tool_calls)]
                yield self._event(call, choice, delta={"tool_calls": calls})
            logprobs = self._choice(choice)["logprobs"]
            reason = choice.finish_reason
            yield self._event(call, choice, delta={}, logprobs=logprobs, finish_reason=reason)
        yield self._end(call)

    def failed(self, error: ApiError) -> bytes:
        return encoded({"error": error.error})

    def _choice(self, choice: Answer) -> dict[str, Any]:
        logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
        return {"message": choice.message, "logprobs": logprobs}

    def _event(self, call: GatewayCall, choice: Answer, **part: Any) -> bytes:
        return self._chunk(call, [{"index": choice.index, "logprobs": None, "finish_reason": None, **part}])

    def _end(self, call: GatewayCall) -> bytes:
        usage = self._chunk(call, [], self._usage(call)) if self._has_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _chunk(self, call: GatewayCall, choices: list[Any], usage: dict[str, int] | None = None) -> bytes:
        chunk = self._head(call, self.chunk) | {"choices": choices}
        return encoded(chunk | {"usage": usage} if self._has_usage else chunk)

    def _head(self, call: GatewayCall, kind: str) -> dict[str, Any]:
        return {"id": call.name, "object": kind, "created": call.created_s, "model": call.model}

    def _usage(self, call: GatewayCall) -> dict[str, int]:
        prompt = call.num_prompt_tokens
        completion = call.num_completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class TextWriter(ChatWriter):
    whole = "text_completion"
    chunk = "text_completion"

    async def events(self, call: GatewayCall) -> AsyncIterator[bytes]:
        async for choice, _, text in call.pieces():
            yield self._event(call, choice, text=text)
        for choice in call.choices:
            yield self._event(call, choice, text="", finish_reason=choice.finish_reason)
        yield self._end(call)

    def _choice(self, choice: Answer) -> dict[str, Any]:
        return {"text": choice.content or "", "logprobs": None}


def _read_chat(reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
    asked = reader.chat(body)
    return asked, ChatWriter(asked.stream_options)


def _read_text(reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
    asked = reader.text(body)
    return asked, TextWriter(asked.stream_options)


CHAT = Dialect("chatcmpl", "chat/completions", None, _read_chat, ChatRequest)
TEXT = Dialect("cmpl", "completions", False, _read_text, TextRequest)


# ---- responses

HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
NOT_ECHOED = {"input", "include", "stream", "model", "seed", "chat_template_kwargs"}


class ResponsesRequest(CallParameters):
    input: str | list[Any] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {"format": {"type": "text"}}
    reasoning: dict[str, Any] = {}
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    include: list[str] = []
    store: bool = True
    metadata: dict[str, Any] = {}
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: Settings = {}


def _read_response(reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
    asked = reader.checked(body, ResponsesRequest)
    name = asked.previous_response_id
    before = [] if name is None else kept_answer(name, "previous_response_id", kept).messages
    items = asked.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}] if items else []
    messages = _messages([_resolved(item, f"input[{n}]", kept) for n, item in enumerate(items)])
    if not messages:
        raise invalid("input: it must be a text or a list of items, not empty.", "input")
    tools = list(_functions(asked.tools, "tools", reader))
    first = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    chat = asked.common() | {
        "messages": [*first, *before, *messages],
        "tools": [_chat_tool(tool) for tool in tools],
        "tool_choice": asked.tool_choice,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "max_tokens": asked.max_output_tokens,
        "logprobs": asked.top_logprobs > 0 or "message.output_text.logprobs" in asked.include,
        "top_logprobs": asked.top_logprobs,
        "reasoning_effort": asked.reasoning.get("effort"),
        "response_format": _response_format(asked.text.get("format")),
    }
    spaces = {_full_name(tool): tool for tool in tools if "namespace" in tool}
    return reader.chat(chat), ResponseWriter(asked, spaces, [*before, *messages])


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Join items of one answer: a text to the thought before it, calls to all before them."""
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        message = _message(item, f"input[{number}]")
        last = messages[-1] if messages else message
        if last is message or not last["role"] == message["role"] == "assistant":
            messages.append(message)
        elif "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        elif "content" in message and last.keys() == {"role", "reasoning_content"}:
            last |= message
        else:
            messages.append(message)
    return messages


def _message(item: Any, where: str) -> dict[str, Any]:
    match item:
        case {"type": "message", "role": role, "content": content}:
            return {"role": role, "content": content}
        case {"type": "reasoning"}:
            return {"role": "assistant", "reasoning_content": _thought(item, where)}
        case {"type": "function_call", "call_id": str(name), "name": str(), "arguments": arguments}:
            function = {"name": _full_name(item), "arguments": arguments}
            return {
                "role": "assistant",
                "tool_calls": [{"id": name, "type": "function", "function": function}],
            }
        case {"type": "function_call_output", "call_id": str(name), "output": output}:
            return {"role": "tool", "tool_call_id": name, "content": output}
    kind = item.get("type") if isinstance(item, dict) else item
    why = "use message, reasoning, function_call and function_call_output, with all fields"
    raise invalid(f"{where}: an item of type {shown(kind)} is not supported: {why}.", where)


def _thought(item: Mapping[str, Any], where: str) -> str:
    """Raises ApiError for foreign content."""
    text = joined_texts(item.get("content"))
    if not text and isinstance(hidden := item.get("encrypted_content"), str):
        try:
            return unsealed(hidden)
        except ValueError as error:
            name = f"{where}.encrypted_content"
            raise invalid(f"{name} cannot be read: {error}.", name) from None
    return text or joined_texts(item.get("summary"))


def _resolved(item: Any, param: str, kept: KeptAnswers) -> Any:
    """Raises ApiError: 404."""
    if not isinstance(item, dict) or item.get("type") != "item_reference":
        return {"type": "message"} | item if isinstance(item, dict) and "role" in item else item
    kind, _, rest = str(item.get("id")).partition("_")
    name, _, index = rest.partition("_")
    answer = kept_answer(name, param, kept).messages[-1]
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
                reader.log_once(kind, f"tools of type {kind}, which OpenAI's servers run, are omitted")
            case _:
                given = tool.get("type") if isinstance(tool, dict) else tool
                why = "functions and namespaces of functions are read"
                raise invalid(f"{place}: a tool of type {shown(given)} is not supported: {why}.", place)


def _full_name(function: Mapping[str, Any]) -> str:
    space = function.get("namespace")
    name = str(function["name"])
    return f"{str(space).rstrip('_')}__{name}" if space else name


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = present(tool, "description", "parameters", "strict")
    return {"type": "function", "function": {"name": _full_name(tool), **given}}


def _response_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    schema = present(form, "name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": schema}


_PARTS: Mapping[Kind, tuple[str, str]] = {"thought": ("rs", "reasoning_text"), "text": ("msg", "output_text")}
"""(beginning of an item's id, type of its part)."""


class ResponseWriter(Writer):
    """`spaces`: namespaced tools by model name."""

    def __init__(
        self,
        asked: ResponsesRequest,
        spaces: Mapping[str, Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
    ) -> None:
        self.continues = Kept(messages) if asked.store else None
        self._spaces = spaces
        self._is_sealed = "reasoning.encrypted_content" in asked.include
        self._echoed = asked.model_dump(exclude=NOT_ECHOED)

    def body(self, call: GatewayCall) -> dict[str, Any]:
        (choice,) = call.choices
        kinds: list[Kind] = ["thought"] if choice.thought else []
        if choice.content or not (kinds or choice.tool_calls):
            kinds.append("text")
        usage = {
            "input_tokens": call.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.num_thought_tokens},
            "total_tokens": call.num_prompt_tokens + choice.num_tokens,
        }
        output = [*(self._item(call, kind) for kind in kinds), *self._calls(call)]
        body = self._head(call) | {"status": "completed", "output": output, "usage": usage}
        if choice.finish_reason == "length":
            body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return body

    async def events(self, call: GatewayCall) -> AsyncIterator[bytes]:
        self._numbers = itertools.count()
        event = self._event
        started = self._head(call) | {"status": "in_progress", "output": [], "usage": None}
        yield event("response.created", response=started) + event("response.in_progress", response=started)
        index = 0
        async for step, kind, text in blocks(call):
            prefix, part_type = _PARTS[kind]
            place = {"output_index": index, "item_id": f"{prefix}_{call.name}", "content_index": 0}
            fields = {"text": "", "logprobs": []} if kind == "text" else {"text": ""}
            if step == "delta":
                del fields["text"]
                yield event(f"response.{part_type}.delta", **place, **fields, delta=text)
                continue
            item = self._item(call, kind)
            (part,) = item["content"]
            if step == "open":
                begun = item | {"status": "in_progress", "content": []}
                yield event("response.output_item.added", output_index=index, item=begun)
                yield event("response.content_part.added", **place, part=part | fields)
                continue
            done = {name: part[name] for name in fields}
            yield event(f"response.{part_type}.done", **place, **done)
            yield event("response.content_part.done", **place, part=part)
            yield event("response.output_item.done", output_index=index, item=item)
            index += 1
        for item in self._calls(call):
            begun = item | {"status": "in_progress", "arguments": ""}
            place = {"output_index": index, "item_id": item["id"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield event("response.output_item.added", output_index=index, item=begun)
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **place, **done)
            yield event("response.output_item.done", output_index=index, item=item)
            index += 1
        body = self.body(call)
        yield event(f"response.{body['status']}", response=body)

    def failed(self, error: ApiError) -> bytes:
        """OpenAI's clients read only the `error` event."""
        return self._event("error", **present(error.error, "code", "message", "param"), error=error.error)

    def _head(self, call: GatewayCall) -> dict[str, Any]:
        head = {"id": call.name, "object": "response", "created_at": call.created_s, "model": call.model}
        return {**head, "background": False, "error": None, "incomplete_details": None, **self._echoed}

    def _event(self, kind: str, **fields: Any) -> bytes:
        return encoded({"type": kind, "sequence_number": next(self._numbers), **fields})

    def _item(self, call: GatewayCall, kind: Kind) -> dict[str, Any]:
        (choice,) = call.choices
        prefix, part_type = _PARTS[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{call.name}", "status": "completed"}
        if kind == "text":
            if choice.finish_reason == "length":
                item["status"] = "incomplete"
            part: dict[str, Any] = {"type": part_type, "text": choice.content or "", "annotations": []}
            part["logprobs"] = choice.logprobs or []
            return item | {"type": "message", "role": "assistant", "content": [part]}
        if self._is_sealed:
            item["encrypted_content"] = sealed(choice.thought)
        part = {"type": part_type, "text": choice.thought}
        return item | {"type": "reasoning", "summary": [], "content": [part]}

    def _calls(self, call: GatewayCall) -> Iterator[dict[str, Any]]:
        for number, each in enumerate(call.choices[0].tool_calls):
            tool = self._spaces.get(each["function"]["name"], {})
            item = {"id": f"fc_{call.name}_{number}", "type": "function_call", "call_id": each["id"]}
            item |= {"status": "completed", **each["function"]}
            yield item | {name: tool[name] for name in ("namespace", "name") if name in tool}


RESPONSES = Dialect("resp", "responses", True, _read_response, ResponsesRequest)
