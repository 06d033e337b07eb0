"""Answers as OpenAI writes them: bodies, and the events of a stream. Knows no session and no HTTP library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import to_json

from asyncrl.gateway.calls import Call
from asyncrl.gateway.choices import Choice

END_OF_STREAM = b"data: [DONE]\n\n"


def body(call: Call, model: str) -> bytes:
    """The whole answer."""
    choices = [_chat_choice(choice) if call.kind == "chat" else _text_choice(choice) for choice in call.choices]
    return to_json(_head(call, model, "chat.completion") | {"choices": choices, "usage": usage(call)})


def event(payload: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + to_json(payload, inf_nan_mode="null") + b"\n\n"


class Events:
    """The events of one streamed answer."""

    def __init__(self, call: Call, model: str, *, include_usage: bool) -> None:
        self._call, self._include_usage = call, include_usage
        self._head = _head(call, model, "chat.completion.chunk") | ({"usage": None} if include_usage else {})

    def start(self) -> bytes:
        """Before any text: who speaks."""
        if self._call.kind == "text":
            return b""
        return b"".join(self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}) for choice in self._call.choices)

    def news(self) -> bytes:
        """Text that may be shown by now and was not yet; maybe nothing."""
        return b"".join(self._text(choice, text) for choice in self._call.choices if (text := choice.take()))

    def end(self) -> bytes:
        """After the last text: tool calls, logprobs, why it ended, usage."""
        events = [each for choice in self._call.choices for each in self._choice_end(choice)]
        if self._include_usage:
            events.append(event(self._head | {"choices": [], "usage": usage(self._call)}))
        return b"".join([*events, END_OF_STREAM])

    def again(self) -> bytes:
        """All text at once, for whoever asks a second time."""
        return b"".join(self._text(choice, choice.content) for choice in self._call.choices if choice.content)

    def _choice_end(self, choice: Choice) -> Iterator[bytes]:
        if self._call.kind == "text":
            yield self._event(
                {"index": choice.index, "text": "", "logprobs": _text_logprobs(choice), "finish_reason": choice.finish_reason}
            )
            return
        if choice.tool_calls:
            yield self._chunk(choice, {"tool_calls": [{"index": index, **call} for index, call in enumerate(choice.tool_calls)]})
        if choice.logprobs is not None:  # the engines tell them with the last token
            yield self._chunk(choice, {}, logprobs={"content": choice.logprobs, "refusal": None})
        yield self._chunk(choice, {}, finish_reason=choice.finish_reason)

    def _text(self, choice: Choice, text: str) -> bytes:
        if self._call.kind == "text":
            return self._event({"index": choice.index, "text": text, "logprobs": None, "finish_reason": None})
        return self._chunk(choice, {"content": text})

    def _chunk(self, choice: Choice, delta: Mapping[str, Any], *, logprobs: Any = None, finish_reason: str | None = None) -> bytes:
        return self._event({"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        return event(self._head | {"choices": [choice]})


def usage(call: Call) -> dict[str, int]:
    """Tokens; those of the prompt once, as OpenAI counts them."""
    prompt, completion = call.num_prompt_tokens, call.num_completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(call: Call, model: str, kind: str) -> dict[str, Any]:
    return {"id": call.name, "object": kind if call.kind == "chat" else "text_completion", "created": call.created_s, "model": model}


def _chat_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
    return {"index": choice.index, "message": choice.message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _text_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.content or "",
        "logprobs": _text_logprobs(choice),
        "finish_reason": choice.finish_reason,
    }


def _text_logprobs(choice: Choice) -> dict[str, Any] | None:
    """The older form: lists beside each other."""
    if choice.logprobs is None:
        return None
    tokens = [each["token"] for each in choice.logprobs]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    values = [each["logprob"] for each in choice.logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
