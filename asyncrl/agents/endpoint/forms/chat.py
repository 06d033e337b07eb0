"""OpenAI's chat completions and completions, and code shared by all forms."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from asyncrl.agents.endpoint.answers import Answer, ApiError
from asyncrl.agents.endpoint.requests import refused, unknown_parameter

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.calls.gateway_call import GatewayCall
    from asyncrl.agents.endpoint.forms.responses_written import KeptResponses
    from asyncrl.agents.endpoint.requests import AnyRequest, CallRequest, RequestReader


Shape = TypeVar("Shape", bound=BaseModel)


@dataclass(frozen=True)
class Parameters(Generic[Shape]):
    """Parameters of a translated endpoint.

    `passed` mean the same in a chat, `shape` is translated, `left_out` has no effect, all others are refused.
    `unserved` has the reasons.
    """

    shape: type[Shape]
    passed: Collection[str]
    left_out: Collection[str]
    unserved: Mapping[str, str]

    def sort(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], Shape]:
        """Return (passed parameters, parameters to translate). Raises ApiError."""
        passed, rest = {}, {}
        for name, value in given.items():
            if value is None or name in self.left_out:
                continue
            if name in self.passed:
                passed[name] = value
            elif why := self.unserved.get(name):
                raise unknown_parameter(name, value, why)
            else:
                rest[name] = value
        try:
            return passed, self.shape.model_validate(rest)
        except ValidationError as error:
            raise refused(error, rest) from None


@dataclass(frozen=True, slots=True, eq=False)
class Translated:
    """A body as chat completions. `given`: data for the answer."""

    body: bytes
    given: Any = None


class Written(Protocol):
    """The output of one call: whole(), or events from news(), end() and failed()."""

    def whole(self) -> bytes: ...

    def news(self) -> bytes:
        """Return new text that may be shown; possibly nothing."""

    def end(self) -> bytes:
        """Return the last text and the closing events."""

    def failed(self, error: ApiError) -> bytes:
        """Report a failure after the first event."""

    def keep(self, kept: KeptResponses) -> None:
        """Keep the delivered answer for later calls."""


class Form(Protocol):
    name: str
    """Prefix of its answers' ids."""
    translates: bool
    """translated() takes long for long bodies, and may run in a thread."""

    def is_apart(self, configured: str) -> bool:
        """`configured` is gateway.thoughts."""

    def translated(self, body: bytes, kept: KeptResponses) -> Translated:
        """Return the call as chat completions. Raises ApiError. Equal messages become equal bytes, so a
        longer chat begins with a shorter one's bytes.
        """

    def read(self, reader: RequestReader, body: bytes) -> AnyRequest:
        """Read a translated body. Raises ApiError."""

    def written(self, call: GatewayCall, model: str, asked: CallRequest, given: Any) -> Written: ...


class ChatForm:
    """/v1/chat/completions."""

    name, whole_object, event_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    translates = False
    first: Mapping[str, Any] | None = {"delta": {"role": "assistant", "content": "", "refusal": None}}

    def is_apart(self, configured: str) -> bool:
        return configured == "apart"

    def translated(self, body: bytes, kept: KeptResponses) -> Translated:
        return Translated(body)

    def read(self, reader: RequestReader, body: bytes) -> AnyRequest:
        return reader.chat(body)

    def written(self, call: GatewayCall, model: str, asked: CallRequest, given: Any) -> Written:
        return WrittenChoices(self, call, model, asked)

    def choice(self, choice: Answer) -> dict[str, Any]:
        return {"message": choice.message, "logprobs": self._logprobs(choice)}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def end(self, choice: Answer) -> list[dict[str, Any]]:
        """Return the events after the last text: tool calls, logprobs."""
        calls = [{"index": index, **call} for index, call in enumerate(choice.tool_calls)]
        parts: list[dict[str, Any]] = [{"delta": {"tool_calls": calls}}] if calls else []
        if choice.logprobs is not None:
            parts.append({"delta": {}, "logprobs": self._logprobs(choice)})
        return [*parts, {"delta": {}}]

    def _logprobs(self, choice: Answer) -> dict[str, Any] | None:
        return None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}


class TextForm(ChatForm):
    name, whole_object, event_object = "cmpl", "text_completion", "text_completion"
    first = None

    def is_apart(self, configured: str) -> bool:
        return False

    def read(self, reader: RequestReader, body: bytes) -> AnyRequest:
        return reader.text(body)

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
        offsets = [0, *itertools.accumulate(len(token) for token in tokens)][: len(tokens)]
        values = [each["logprob"] for each in choice.logprobs]
        tops = [{one["token"]: one["logprob"] for one in each["top_logprobs"]} for each in choice.logprobs]
        top = tops if any(tops) else None
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


class WrittenChoices:
    def __init__(self, form: ChatForm, call: GatewayCall, model: str, asked: CallRequest) -> None:
        self._call, self._form, self._first = call, form, form.first
        self._num_shown, self._has_usage = [0] * len(call.choices), asked.include_usage
        self._num_thought = [0] * len(call.choices)
        self._head: dict[str, Any] = {"id": call.name, "created": call.created_s, "model": model}

    def whole(self) -> bytes:
        choices = [
            {"index": each.index, **self._form.choice(each), "finish_reason": each.finish_reason}
            for each in self._call.choices
        ]
        body = {"object": self._form.whole_object, "choices": choices, "usage": self._usage()}
        return to_json(self._head | body)

    def news(self) -> bytes:
        events = b""
        for index, choice in enumerate(self._call.choices):
            if thought := choice.take_thought(self._num_thought[index]):
                self._num_thought[index] += len(thought)
                events += self._event(choice, {"delta": {"reasoning_content": thought}})
            if text := choice.take(self._num_shown[index]):
                self._num_shown[index] += len(text)
                events += self._event(choice, self._form.piece(text))
        return self._begin() + events if events else b""

    def end(self) -> bytes:
        events = self.news() or self._begin()
        for choice in self._call.choices:
            *parts, last = self._form.end(choice)
            events += b"".join(self._event(choice, part) for part in parts)
            events += self._event(choice, last, choice.finish_reason)
        if self._has_usage:
            events += self._written([], self._usage())
        return events + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def keep(self, kept: KeptResponses) -> None:
        """Keep nothing: clients send each chat whole."""

    def _begin(self) -> bytes:
        first, self._first = self._first, None
        return b"".join(self._event(choice, first) for choice in self._call.choices if first)

    def _event(self, choice: Answer, part: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        of_choice = {"index": choice.index, "logprobs": None, **part, "finish_reason": finish_reason}
        return self._written([of_choice], None)

    def _written(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
        event = self._head | {"object": self._form.event_object, "choices": choices}
        event |= {"usage": usage} if self._has_usage else {}
        return b"data: " + to_json(event, inf_nan_mode="null") + b"\n\n"

    def _usage(self) -> dict[str, int]:
        prompt, completion = self._call.num_prompt_tokens, self._call.num_completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
