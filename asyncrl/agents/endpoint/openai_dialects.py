"""OpenAI's chat completions, completions and responses."""

from __future__ import annotations

import base64
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import ConfigDict, FailFast
from typing_extensions import TypedDict

from asyncrl.agents.endpoint.calls import (
    ChatsByAnswer,
    GatewayCall,
    StoredChat,
    find_chat,
)
from asyncrl.agents.endpoint.dialects import (
    Dialect,
    Read,
    Step,
    Writer,
    encoded,
    grow_blocks,
    whole_blocks,
)
from asyncrl.agents.endpoint.requests import (
    ApiError,
    CallParameters,
    ChatRequest,
    Count,
    NumTops,
    RequestReader,
    Settings,
    TextRequest,
    chat_format,
    invalid,
    present,
    shown,
)

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.answers import Answer
    from asyncrl.agents.endpoint.tool_formats import Block, Part


# ---- chats and completions


class ChatWriter(Writer):
    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    begun: Mapping[str, object] = {
        "delta": {"role": "assistant", "content": "", "refusal": None}
    }
    ended: Mapping[str, object] = {"delta": {}}

    def __init__(self, options: Mapping[str, object]) -> None:
        self._has_usage = options.get("include_usage") is True

    def body(self, call: GatewayCall) -> dict[str, object]:
        choice = {
            "index": 0,
            **self._choice(call.answer),
            "finish_reason": call.answer.finish_reason,
        }
        return self._head(call, self.whole) | {
            "choices": [choice],
            "usage": self._usage(call),
        }

    async def events(self, call: GatewayCall) -> AsyncIterator[bytes]:
        answer = call.answer
        yield self._event(call, self.begun)
        async for block, text in call.pieces():
            yield self._event(call, self._grown(block, text))
        # Logprobs are made once the answer is whole, so they come with the last chunk.
        last = {
            **self.ended,
            "logprobs": self._choice(answer)["logprobs"],
            "finish_reason": answer.finish_reason,
        }
        yield self._event(call, last)
        if self._has_usage:
            usage = {"choices": [], "usage": self._usage(call)}
            yield encoded(self._head(call, self.chunk) | usage)
        yield b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        return encoded({"error": error.error})

    def _choice(self, answer: Answer) -> dict[str, object]:
        logprobs = (
            None
            if answer.logprobs is None
            else {"content": answer.logprobs, "refusal": None}
        )
        return {"message": answer.message, "logprobs": logprobs}

    def _event(self, call: GatewayCall, part: Mapping[str, object]) -> bytes:
        choice = {"index": 0, "logprobs": None, "finish_reason": None, **part}
        return encoded(self._head(call, self.chunk) | {"choices": [choice]})

    def _grown(self, block: Block | None, text: str) -> dict[str, object]:
        """Return the delta of a piece, with at most one call: some clients read no
        more. Its first delta has the name.
        """
        if block is None:
            return {"delta": {}}
        if block.part != "call":
            name = "content" if block.part == "text" else "reasoning_content"
            return {"delta": {name: text}}
        function = (
            {"arguments": text} if text else {"name": block.name, "arguments": ""}
        )
        entry: dict[str, object] = {"index": block.number, "function": function}
        if not text:
            entry |= {"id": block.id, "type": "function"}
        return {"delta": {"tool_calls": [entry]}}

    def _head(self, call: GatewayCall, kind: str) -> dict[str, object]:
        return {
            "id": call.name,
            "object": kind,
            "created": call.created_s,
            "model": call.model,
        }

    def _usage(self, call: GatewayCall) -> dict[str, int]:
        completion = call.answer.num_tokens
        return {
            "prompt_tokens": call.num_prompt,
            "completion_tokens": completion,
            "total_tokens": call.num_prompt + completion,
        }


class TextWriter(ChatWriter):
    whole = chunk = "text_completion"
    begun = ended = {"text": ""}

    def _grown(self, block: Block | None, text: str) -> dict[str, object]:
        return {"text": text}

    def _choice(self, answer: Answer) -> dict[str, object]:
        return {"text": answer.content or "", "logprobs": None}


def _read(
    make: type[ChatWriter],
    reader: RequestReader,
    body: dict[str, object],
    chats: ChatsByAnswer,
) -> Read:
    is_text = make is TextWriter
    reader.check_nested("text" if is_text else "chat", body)
    asked = reader.text(body) if is_text else reader.chat(body)
    return asked, make(asked.stream_options)


CHAT = Dialect(
    "chatcmpl", "chat/completions", None, partial(_read, ChatWriter), ChatRequest
)
TEXT = Dialect("cmpl", "completions", False, partial(_read, TextWriter), TextRequest)


# ---- responses

NOT_ECHOED = {
    "input",
    "include",
    "stream",
    "model",
    "seed",
    "chat_template_kwargs",
    "skip_special_tokens",
}


class _Tool(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    type: str
    name: NotRequired[str]
    tools: NotRequired[list[_Tool]]


Functions = dict[str, Mapping[str, object]]


class ResponsesRequest(CallParameters):
    input: str | list[object] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[_Tool], FailFast()] = []
    tool_choice: object = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, object] = {"format": {"type": "text"}}
    reasoning: dict[str, object] = {}
    max_output_tokens: Count | None = None
    top_logprobs: NumTops = 0
    include: Annotated[list[str], FailFast()] = []
    store: bool = True
    metadata: dict[str, object] = {}
    chat_template_kwargs: Settings = {}


def _read_response(
    reader: RequestReader, body: dict[str, object], chats: ChatsByAnswer
) -> Read:
    reader.check_nested("responses", body)
    asked = reader.checked(body, ResponsesRequest)
    previous = asked.previous_response_id
    before = find_chat(previous, "previous_response_id", chats).messages
    items = asked.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}] if items else []
    messages = _messages(
        [
            _resolved(item, f"input[{number}]", chats)
            for number, item in enumerate(items)
        ]
    )
    if not messages:
        raise invalid(
            "input: it must be a text or a list of items, not empty.", "input"
        )
    functions = _functions(asked.tools, reader)
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                **present(each, "description", "parameters", "strict"),
            },
        }
        for name, each in functions.items()
    ]
    # Not part of the chat that later calls continue: as at OpenAI, each call sends its
    # own instructions.
    first = (
        [{"role": "system", "content": asked.instructions}]
        if asked.instructions
        else []
    )
    chat = asked.common() | {
        "messages": [*first, *before, *messages],
        "tools": tools,
        "max_tokens": asked.max_output_tokens,
        "logprobs": "message.output_text.logprobs" in asked.include
        or asked.top_logprobs > 0,
        "reasoning_effort": asked.reasoning.get("effort"),
        "response_format": chat_format(asked.text.get("format")),
    }
    return reader.chat(chat), ResponseWriter(asked, [*before, *messages], functions)


def _messages(items: Sequence[object]) -> list[dict[str, Any]]:
    """Join items of one answer: a text to the thought or the calls before it, calls to
    all before them.
    """
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        message = _message(item, f"input[{number}]")
        last = messages[-1] if messages else {}
        is_next_text = (
            "content" in message and "content" in last and "tool_calls" not in last
        )
        is_next = is_next_text or "reasoning_content" in message
        # a content that is not a list becomes a separate message, which the chat refuses
        contents = [each.get("content", []) for each in (last, message)]
        is_next |= not all(isinstance(content, list) for content in contents)
        if is_next or not last.get("role") == message["role"] == "assistant":
            messages.append(message)
            continue
        for key in message.keys() - {"role"}:
            last[key] = [*last.get(key, ()), *message[key]]
    return messages


def _message(item: Any, where: str) -> dict[str, Any]:
    match item:
        case {"role": "assistant", "content": str() | None as content}:
            return {"role": "assistant", "content": [content or ""]}
        case {"role": role, "content": content}:
            return {"role": role, "content": content}
        case {"type": "reasoning"}:
            thought = (
                item.get("content")
                or unsealed(item, where)
                or item.get("summary")
                or ""
            )
            return {"role": "assistant", "reasoning_content": thought}
        case {"type": "function_call", "call_id": name}:
            function = item | {"name": _flat(item.get("name"), item.get("namespace"))}
            call = {"id": name, "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case {"type": "custom_tool_call", "call_id": name, "input": str(text)}:
            # As vLLM shows free text to a model that calls functions.
            function = item | {"arguments": {"input": text}}
            return _message(function | {"type": "function_call"}, where)
        case {
            "type": "function_call_output" | "custom_tool_call_output",
            "call_id": str(name),
            "output": output,
        }:
            return {"role": "tool", "tool_call_id": name, "content": output}
    kind = item.get("type") if isinstance(item, dict) else item
    why = (
        "use message, reasoning, function_call and function_call_output, with all fields. "
        "Send the call and the result of another tool as such a pair, and a summary as a message"
    )
    raise invalid(
        f"{where}: an item of type {shown(kind)} is not supported: {why}.", where
    )


def _resolved(item: object, param: str, chats: ChatsByAnswer) -> object:
    """Return the item that an item_reference names. Raises ApiError: 404."""
    match item:
        case {"type": "item_reference", "id": str(name)}:
            # `rs_resp-3_0` is an item of the call resp-3.
            answer = find_chat(name.partition("_")[2].partition("_")[0], param, chats)
            for each in answer.items:
                if each["id"] == name:
                    return each
            raise ApiError(
                404, f"{param}: there is no item {shown(name)}.", param=param
            )
    return item


_SEALED = "asyncrl:"
"""Beginning of encrypted_content: the thought as base64, for clients that keep nothing
else.
"""


def unsealed(item: Mapping[str, object], where: str) -> str:
    """Return the thought in an item's encrypted_content. Raises ApiError if another
    server wrote it.
    """
    hidden = str(item.get("encrypted_content") or _SEALED)
    if hidden.startswith(_SEALED):
        with contextlib.suppress(ValueError):
            return base64.b64decode(
                hidden.removeprefix(_SEALED), validate=True
            ).decode()
    name = f"{where}.encrypted_content"
    raise invalid(f"{name} cannot be read: it does not come from this gateway.", name)


def _flat(name: Any, space: str | None) -> Any:
    """Return a function's name in the prompt, as in vLLM."""
    return f"{space}__{name}" if space and isinstance(name, str) else name


def _functions(
    tools: Sequence[_Tool], reader: RequestReader, space: str | None = None
) -> Functions:
    """Return the functions by their names in the prompt.

    Example: {"type": "namespace", "name": "files", "tools": [{"type": "function",
    "name": "read"}]} becomes {"files__read": {"type": "function", "name": "read",
    "namespace": "files"}}.
    """
    functions: Functions = {}
    for tool in tools:
        match tool["type"]:
            case "function":
                name = _flat(tool.get("name"), space)
                functions[name] = {**tool, "namespace": space}
            case "namespace":
                functions |= _functions(tool.get("tools", []), reader, tool.get("name"))
            case _:
                reader.log_once(
                    "tools", f"a tool that is not a function is omitted: {tool!r:.200}"
                )
    return functions


_PARTS: Mapping[Part, tuple[str, str]] = {
    "thought": ("rs", "reasoning_text"),
    "text": ("msg", "output_text"),
    "call": ("fc", "function_call_arguments"),
}
"""(beginning of an item's id, name of its events)."""


class ResponseWriter(Writer):
    def __init__(
        self,
        asked: ResponsesRequest,
        messages: Sequence[Mapping[str, object]],
        functions: Functions,
    ) -> None:
        self._functions = functions
        self.continues = StoredChat(messages) if asked.store else None
        self._is_sealed = "reasoning.encrypted_content" in asked.include
        self._blocks: list[Block] = []
        self._echoed = asked.model_dump(exclude=NOT_ECHOED)

    def body(self, call: GatewayCall) -> dict[str, object]:
        answer = call.answer
        # A stream has its blocks already, in sampled order.
        self._blocks = self._blocks or whole_blocks(answer)
        output = [self._item(call, block, block.text) for block in self._blocks]
        if self.continues is not None:
            self.continues = self.continues._replace(items=output)
        body = self._response(call, "completed") | {
            "output": output,
            "usage": {
                "input_tokens": call.num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.num_tokens,
                "output_tokens_details": {
                    "reasoning_tokens": answer.num_thought_tokens
                },
                "total_tokens": call.num_prompt + answer.num_tokens,
            },
        }
        if answer.finish_reason == "length":
            body["status"] = "incomplete"
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        return body

    async def events(self, call: GatewayCall) -> AsyncIterator[bytes]:
        self._numbers = itertools.count()
        started = self._response(call, "in_progress")
        progress = partial(self._event, "response.in_progress", response=started)
        yield self._event("response.created", response=started) + progress()
        async for step, block, text in grow_blocks(call, self._blocks):
            yield progress() if step == "ping" else self._step(call, step, block, text)
        body = self.body(call)
        yield self._event(f"response.{body['status']}", response=body)

    def _step(self, call: GatewayCall, step: Step, block: Block, text: str) -> bytes:
        event = self._event
        index = len(self._blocks) - 1
        name = _PARTS[block.part][1]
        place: dict[str, object] = {
            "output_index": index,
            "item_id": _item_id(call, block),
        }
        if block.part != "call":
            place["content_index"] = 0
        if step == "delta":
            if block.part == "text":
                place["logprobs"] = []
            return event(f"response.{name}.delta", **place, delta=text)
        item = self._item(call, block, text)
        # only calls have none
        parts = item.get("content", [])
        if step == "open":
            begun = item | {"status": "in_progress"}
            if parts:
                begun["content"] = []
            steps = event("response.output_item.added", output_index=index, item=begun)
            for part in parts:
                steps += event("response.content_part.added", **place, part=part)
            return steps
        (last,) = parts or [item]
        done = present(last, "name", "arguments", "text", "logprobs")
        steps = event(f"response.{name}.done", **place, **done)
        for part in parts:
            steps += event("response.content_part.done", **place, part=part)
        return steps + event("response.output_item.done", output_index=index, item=item)

    def failure(self, error: ApiError) -> bytes:
        """OpenAI's clients read only the `error` event."""
        return self._event(
            "error",
            **{name: error.error[name] for name in ("code", "message", "param")},
            error=error.error,
        )

    def _response(self, call: GatewayCall, status: str) -> dict[str, object]:
        """Return the response without its output."""
        return {
            "id": call.name,
            "object": "response",
            "created_at": call.created_s,
            "model": call.model,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._echoed,
        }

    def _event(self, kind: str, **fields: object) -> bytes:
        return encoded({"type": kind, "sequence_number": next(self._numbers), **fields})

    def _item(self, call: GatewayCall, block: Block, text: str) -> dict[str, Any]:
        answer = call.answer
        is_cut = answer.finish_reason == "length" and block is self._blocks[-1]
        status = "incomplete" if is_cut else "completed"
        item: dict[str, Any] = {"id": _item_id(call, block), "status": status}
        if block.part == "call":
            item |= {"type": "function_call", "call_id": block.id}
            function = self._functions.get(block.name, {})
            full_name = present(function, "name", "namespace")
            return item | {"name": block.name, "arguments": text, **full_name}
        part: dict[str, object] = {"type": _PARTS[block.part][1], "text": text}
        if block.part == "thought":
            if self._is_sealed:
                item["encrypted_content"] = (
                    _SEALED + base64.b64encode(text.encode()).decode()
                )
            return item | {"type": "reasoning", "summary": [], "content": [part]}
        part |= {
            "annotations": [],
            # They belong to all sampled tokens, not to parts of them, so the first text
            # has all.
            "logprobs": (not block.number and answer.logprobs) or [],
        }
        return item | {"type": "message", "role": "assistant", "content": [part]}


def _item_id(call: GatewayCall, block: Block) -> str:
    return f"{_PARTS[block.part][0]}_{call.name}_{block.number}"


_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
RESPONSES = Dialect("resp", "responses", True, _read_response, ResponsesRequest, _NAMES)
