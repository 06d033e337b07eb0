"""OpenAI's chat completions, completions and responses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json

from asyncrl.agents.endpoint.dialects import Block, BlockWriter, Dialect, Event, KeptAnswer, KeptAnswers, Read
from asyncrl.agents.endpoint.reasoning import sealed, unsealed
from asyncrl.agents.endpoint.requests import (
    ApiError,
    CallParameters,
    Count,
    RequestReader,
    Settings,
    invalid,
    joined_texts,
    shown,
)
from asyncrl.messages.engine_api import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.answers import Answer
    from asyncrl.agents.endpoint.sessions import GatewayCall


# ---- chats and completions


class ChatWriter:
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"
    first: Mapping[str, Any] | None = {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def __init__(self, call: GatewayCall, model: str, *, has_usage: bool) -> None:
        self._call = call
        self._has_usage = has_usage
        self._has_begun = False
        self._num_text = [0] * len(call.choices)
        self._num_thought = [0] * len(call.choices)
        self._head: dict[str, Any] = {"id": call.name, "created": call.created_s, "model": model}

    def whole(self) -> bytes:
        choices = [
            {"index": each.index, **self._choice(each), "finish_reason": each.finish_reason}
            for each in self._call.choices
        ]
        return to_json(self._head | {"object": self.whole_object, "choices": choices, "usage": self._usage()})

    def news(self) -> bytes:
        events = b""
        for index, choice in enumerate(self._call.choices):
            if thought := choice.take_thought(self._num_thought[index]):
                self._num_thought[index] += len(thought)
                events += self._event(choice, {"delta": {"reasoning_content": thought}})
            if text := choice.take(self._num_text[index]):
                self._num_text[index] += len(text)
                events += self._event(choice, self._piece(text))
        return self._begin() + events if events else b""

    def end(self) -> bytes:
        events = self.news() or self._begin()
        for choice in self._call.choices:
            *parts, last = self._end(choice)
            events += b"".join(self._event(choice, part) for part in parts)
            events += self._event(choice, last, choice.finish_reason)
        if self._has_usage:
            events += self._chunk([], self._usage())
        return events + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def keep(self, kept: KeptAnswers) -> None:
        pass  # clients send whole chats

    def _choice(self, choice: Answer) -> dict[str, Any]:
        return {"message": choice.message, "logprobs": self._logprobs(choice)}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _end(self, choice: Answer) -> list[dict[str, Any]]:
        calls = [{"index": index, **call} for index, call in enumerate(choice.tool_calls)]
        parts: list[dict[str, Any]] = [{"delta": {"tool_calls": calls}}] if calls else []
        if choice.logprobs is not None:
            parts.append({"delta": {}, "logprobs": self._logprobs(choice)})
        return [*parts, {"delta": {}}]

    def _logprobs(self, choice: Answer) -> dict[str, Any] | None:
        return None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}

    def _begin(self) -> bytes:
        if self._has_begun or self.first is None:
            return b""
        self._has_begun = True
        return b"".join(self._event(choice, self.first) for choice in self._call.choices)

    def _event(self, choice: Answer, part: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        return self._chunk(
            [{"index": choice.index, "logprobs": None, **part, "finish_reason": finish_reason}], None
        )

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
        chunk = self._head | {"object": self.event_object, "choices": choices}
        if self._has_usage:
            chunk["usage"] = usage
        return b"data: " + to_json(chunk, inf_nan_mode="null") + b"\n\n"

    def _usage(self) -> dict[str, int]:
        prompt = self._call.num_prompt_tokens
        completion = self._call.num_completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class TextWriter(ChatWriter):
    whole_object = "text_completion"
    event_object = "text_completion"
    first = None

    def _choice(self, choice: Answer) -> dict[str, Any]:
        return {"text": choice.content or "", "logprobs": self._logprobs(choice)}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _end(self, choice: Answer) -> list[dict[str, Any]]:
        return [{"text": "", "logprobs": self._logprobs(choice)}]

    def _logprobs(self, choice: Answer) -> dict[str, Any] | None:
        if choice.logprobs is None:
            return None
        tokens = [each["token"] for each in choice.logprobs]
        tops = [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in choice.logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [each["logprob"] for each in choice.logprobs],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [0, *itertools.accumulate(map(len, tokens))][: len(tokens)],
        }


def _read_chat(reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
    asked = reader.chat(body)
    return asked, partial(ChatWriter, has_usage=asked.stream_options.get("include_usage") is True)


def _read_text(reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
    asked = reader.text(body)
    return asked, partial(TextWriter, has_usage=asked.stream_options.get("include_usage") is True)


CHAT = Dialect("chatcmpl", None, _read_chat)
TEXT = Dialect("cmpl", False, _read_text)


# ---- responses

HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
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


def _read_response(reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
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
    return reader.chat(chat), partial(
        ResponseWriter,
        echoed={name: body[name] for name in ECHOED if body.get(name) is not None},
        stored=KeptAnswer(before, messages) if asked.store else None,
        spaces={_full_name(tool): tool for tool in tools if "namespace" in tool},
        is_sealed="reasoning.encrypted_content" in asked.include,
    )


RESPONSES = Dialect("resp", True, _read_response)


def _messages(items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Merge items of one answer into one message."""
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
                why = "use message, reasoning, function_call and function_call_output, with all fields"
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
    """`stored`: None if store=false; `spaces`: namespaced tools by model name; `is_sealed`: return encrypted
    thoughts.
    """

    def __init__(
        self,
        call: GatewayCall,
        model: str,
        *,
        echoed: Mapping[str, Any],
        stored: KeptAnswer | None,
        spaces: Mapping[str, Mapping[str, Any]],
        is_sealed: bool,
    ) -> None:
        super().__init__(call, model)
        self._stored = stored
        self._spaces = spaces
        self._is_sealed = is_sealed
        head = {"id": call.name, "object": "response", "created_at": call.created_s, "model": model}
        head |= {"background": False, "error": None, "incomplete_details": None}
        self._head: dict[str, Any] = {**head, **ECHOED, **echoed}
        self._num_events = 0

    def encoded(self, events: Sequence[Event]) -> bytes:
        numbered = [{**event, "sequence_number": self._num_events + n} for n, event in enumerate(events)]
        self._num_events += len(events)
        return super().encoded(numbered)

    def failed(self, error: ApiError) -> bytes:
        """OpenAI's clients read only the `error` event."""
        fields = {name: error.error[name] for name in ("code", "message", "param")}
        return self.encoded([{"type": "error", **fields, "error": error.error}])

    def keep(self, kept: KeptAnswers) -> None:
        if self._stored is not None:
            kept.add(self.call.name, self._stored.with_answer(self.choice))

    def begin(self) -> list[Event]:
        response = self._head | {"status": "in_progress", "output": [], "usage": None}
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def open(self, block: Block) -> list[Event]:
        item = self._item(block, "") | {"status": "in_progress"}
        (part,) = item["content"]
        return [
            self._event("output_item.added", item=item | {"content": []}),
            self._of_part(block, "content_part.added", part=part),
        ]

    def delta(self, block: Block, text: str) -> list[Event]:
        logprobs: dict[str, Any] = {"logprobs": []} if block == "text" else {}
        return [self._of_part(block, f"{_PARTS[block]}.delta", delta=text, **logprobs)]

    def close(self, block: Block) -> list[Event]:
        choice = self.choice
        item = self._item(block, (choice.thought if block == "thought" else choice.content) or "")
        (part,) = item["content"]
        if block == "text":
            part["logprobs"] = choice.logprobs or []
        elif self._is_sealed:
            item["encrypted_content"] = sealed(choice.thought)
        text = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        events = [
            self._of_part(block, f"{_PARTS[block]}.done", **text),
            self._of_part(block, "content_part.done", part=part),
            self._event("output_item.done", item=item),
        ]
        self.blocks.append(item)
        return events

    def tool_call(self, number: int, call: Mapping[str, Any]) -> list[Event]:
        tool = self._spaces.get(call["function"]["name"], {})
        item = {"id": f"fc_{self.call.name}_{number}", "type": "function_call", "call_id": call["id"]}
        item |= {"status": "completed", **call["function"]}
        item |= {name: tool[name] for name in ("namespace", "name") if name in tool}
        place = {"item_id": item["id"]}
        arguments = item["arguments"]
        done = {"name": item["name"], "arguments": arguments}
        events = [
            self._event("output_item.added", item=item | {"status": "in_progress", "arguments": ""}),
            self._event("function_call_arguments.delta", **place, delta=arguments),
            self._event("function_call_arguments.done", **place, **done),
            self._event("output_item.done", item=item),
        ]
        self.blocks.append(item)
        return events

    def finish(self) -> list[Event]:
        response = self.answer()
        return [{"type": f"response.{response['status']}", "response": response}]

    def answer(self) -> dict[str, Any]:
        prompt = self.call.num_prompt_tokens
        sampled = self.choice.num_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": self.choice.num_thought_tokens},
            "total_tokens": prompt + sampled,
        }
        response = self._head | {"status": "completed", "output": self.blocks, "usage": usage}
        if self.choice.finish_reason == "length":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return response

    def _item(self, block: Block, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[block], "text": text}
        if block == "thought":
            item = {"id": self._id(block), "type": "reasoning", "status": "completed", "summary": []}
            return item | {"content": [part]}
        status = "incomplete" if self.choice.finish_reason == "length" else "completed"
        item = {"id": self._id(block), "type": "message", "role": "assistant", "status": status}
        return item | {"content": [part | {"annotations": [], "logprobs": []}]}

    def _id(self, block: Block) -> str:
        return f"{'rs' if block == 'thought' else 'msg'}_{self.call.name}"

    def _event(self, event: str, **fields: Any) -> Event:
        return {"type": f"response.{event}", "output_index": len(self.blocks), **fields}

    def _of_part(self, block: Block, event: str, **fields: Any) -> Event:
        return self._event(event, item_id=self._id(block), content_index=0, **fields)


_PARTS = {"thought": "reasoning_text", "text": "output_text"}
