"""Answers as OpenAI writes them: whole bodies, and the events of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from asyncrl.agents.endpoint.answer_text import Choice
from asyncrl.agents.endpoint.calls import Call

END_OF_STREAM = b"data: [DONE]\n\n"


def whole_body(call: Call, model: str) -> bytes:
    """The whole answer."""
    if call.kind == "chat":
        choices = [_of_choice(each, message=each.message, logprobs=_logprobs(each)) for each in call.choices]
    else:
        choices = [
            _of_choice(each, text=each.content or "", logprobs=_text_logprobs(each)) for each in call.choices
        ]
    return to_json(_head(call, model, "chat.completion") | {"choices": choices, "usage": _usage(call)})


class Events:
    """The events of one streamed answer."""

    def __init__(self, call: Call, model: str, *, include_usage: bool) -> None:
        self._call, self._include_usage, self._is_chat = call, include_usage, call.kind == "chat"
        self._head = _head(call, model, "chat.completion.chunk") | ({"usage": None} if include_usage else {})

    def start(self) -> bytes:
        """Before any text: who speaks."""
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._delta(choice, first) for choice in self._call.choices if self._is_chat)

    def news(self) -> bytes:
        """Text that may be shown by now and was not yet; maybe nothing."""
        return b"".join(self._text(choice, text) for choice in self._call.choices if (text := choice.take()))

    def again(self) -> bytes:
        """All text at once, for a client that asks a second time."""
        return b"".join(self._text(choice, choice.content) for choice in self._call.choices if choice.content)

    def end(self) -> bytes:
        """After the last text: tool calls, logprobs, why it ended, usage."""
        events = b"".join(self._end_of(choice) for choice in self._call.choices)
        if self._include_usage:
            events += event(self._head | {"choices": [], "usage": _usage(self._call)})
        return events + END_OF_STREAM

    def _end_of(self, choice: Choice) -> bytes:
        if not self._is_chat:
            return self._event(_of_choice(choice, text="", logprobs=_text_logprobs(choice)))
        events = b""
        if choice.tool_calls:
            calls = [{"index": index, **call} for index, call in enumerate(choice.tool_calls)]
            events = self._delta(choice, {"tool_calls": calls})
        if choice.logprobs is not None:  # the engines report them with the last token
            events += self._delta(choice, {}, logprobs=_logprobs(choice))
        return events + self._event(_of_choice(choice, delta={}, logprobs=None))

    def _text(self, choice: Choice, text: str) -> bytes:
        if self._is_chat:
            return self._delta(choice, {"content": text})
        return self._event({"index": choice.index, "text": text, "logprobs": None, "finish_reason": None})

    def _delta(self, choice: Choice, delta: Mapping[str, Any], *, logprobs: Any = None) -> bytes:
        return self._event(
            {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        )

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        return event(self._head | {"choices": [choice]})


def event(payload: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + to_json(payload, inf_nan_mode="null") + b"\n\n"


def _head(call: Call, model: str, chat_object: str) -> dict[str, Any]:
    kind = chat_object if call.kind == "chat" else "text_completion"
    return {"id": call.name, "object": kind, "created": call.created_s, "model": model}


def _usage(call: Call) -> dict[str, int]:
    """Tokens; those of the prompt once, as OpenAI counts them."""
    prompt, completion = call.num_prompt_tokens, call.num_completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _of_choice(choice: Choice, **content: Any) -> dict[str, Any]:
    return {"index": choice.index, **content, "finish_reason": choice.finish_reason}


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    return None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}


def _text_logprobs(choice: Choice) -> dict[str, Any] | None:
    """The older form: lists beside each other."""
    if choice.logprobs is None:
        return None
    tokens = [each["token"] for each in choice.logprobs]
    offsets = [0, *itertools.accumulate(len(token) for token in tokens)][: len(tokens)]
    values = [each["logprob"] for each in choice.logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
