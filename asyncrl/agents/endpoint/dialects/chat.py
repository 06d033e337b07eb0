"""OpenAI's chat completions and completions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from asyncrl.agents.endpoint.answers import Answer, ApiError
from asyncrl.agents.endpoint.dialects.dialect import KeptAnswers, Writer

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.dialects.dialect import Read
    from asyncrl.agents.endpoint.requests import AnyRequest, RequestReader
    from asyncrl.agents.endpoint.sessions import GatewayCall


class ChatDialect:
    """/v1/chat/completions."""

    name = "chatcmpl"
    splits_thoughts: bool | None = None
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"
    first: Mapping[str, Any] | None = {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def read(self, reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
        return reader.chat(body), None

    def writer(self, call: GatewayCall, model: str, asked: AnyRequest, data: Any) -> Writer:
        return ChoicesWriter(self, call, model, has_usage=asked.stream_options.get("include_usage") is True)

    def choice(self, choice: Answer) -> dict[str, Any]:
        return {"message": choice.message, "logprobs": self._logprobs(choice)}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def end(self, choice: Answer) -> list[dict[str, Any]]:
        calls = [{"index": index, **call} for index, call in enumerate(choice.tool_calls)]
        parts: list[dict[str, Any]] = [{"delta": {"tool_calls": calls}}] if calls else []
        if choice.logprobs is not None:
            parts.append({"delta": {}, "logprobs": self._logprobs(choice)})
        return [*parts, {"delta": {}}]

    def _logprobs(self, choice: Answer) -> dict[str, Any] | None:
        return None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}


class TextDialect(ChatDialect):
    """/v1/completions."""

    name = "cmpl"
    splits_thoughts: bool | None = False
    whole_object = "text_completion"
    event_object = "text_completion"
    first = None

    def read(self, reader: RequestReader, body: dict[str, Any], kept: KeptAnswers) -> Read:
        return reader.text(body), None

    def choice(self, choice: Answer) -> dict[str, Any]:
        return {"text": choice.content or "", "logprobs": self._logprobs(choice)}

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def end(self, choice: Answer) -> list[dict[str, Any]]:
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


class ChoicesWriter:
    def __init__(self, dialect: ChatDialect, call: GatewayCall, model: str, *, has_usage: bool) -> None:
        self._call = call
        self._dialect = dialect
        self._has_usage = has_usage
        self._first = dialect.first
        self._num_text = [0] * len(call.choices)
        self._num_thought = [0] * len(call.choices)
        self._head: dict[str, Any] = {"id": call.name, "created": call.created_s, "model": model}

    def whole(self) -> bytes:
        choices = [
            {"index": each.index, **self._dialect.choice(each), "finish_reason": each.finish_reason}
            for each in self._call.choices
        ]
        body = {"object": self._dialect.whole_object, "choices": choices, "usage": self._usage()}
        return to_json(self._head | body)

    def news(self) -> bytes:
        events = b""
        for index, choice in enumerate(self._call.choices):
            if thought := choice.take_thought(self._num_thought[index]):
                self._num_thought[index] += len(thought)
                events += self._event(choice, {"delta": {"reasoning_content": thought}})
            if text := choice.take(self._num_text[index]):
                self._num_text[index] += len(text)
                events += self._event(choice, self._dialect.piece(text))
        return self._begin() + events if events else b""

    def end(self) -> bytes:
        events = self.news() or self._begin()
        for choice in self._call.choices:
            *parts, last = self._dialect.end(choice)
            events += b"".join(self._event(choice, part) for part in parts)
            events += self._event(choice, last, choice.finish_reason)
        if self._has_usage:
            events += self._chunk([], self._usage())
        return events + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def keep(self, kept: KeptAnswers) -> None:
        pass  # clients send whole chats

    def _begin(self) -> bytes:
        first = self._first
        self._first = None
        return b"".join(self._event(choice, first) for choice in self._call.choices if first)

    def _event(self, choice: Answer, part: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        return self._chunk(
            [{"index": choice.index, "logprobs": None, **part, "finish_reason": finish_reason}], None
        )

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
        chunk = self._head | {"object": self._dialect.event_object, "choices": choices}
        if self._has_usage:
            chunk["usage"] = usage
        return b"data: " + to_json(chunk, inf_nan_mode="null") + b"\n\n"

    def _usage(self) -> dict[str, int]:
        prompt = self._call.num_prompt_tokens
        completion = self._call.num_completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
