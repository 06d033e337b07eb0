"""Answers: sampled tokens -> text as it gets final, tool calls, logprobs -> OpenAI's form, whole or streamed;
and errors in that form.

A token may hold a part of a character, and a stop string may begin in one token and end in a later one. So
some text is held back until more tokens have come. Text that was handed out never changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web
from pydantic_core import to_json

from asyncrl.agents.endpoint.tool_calls import MAX_TOOLS, ParsedAnswer, ToolFormat, overlap
from asyncrl.agents.tool_arguments import Tools
from asyncrl.messages.records import Completion
from asyncrl.messages.work import ChatRenderer

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.calls.gateway_call import GatewayCall
    from asyncrl.agents.endpoint.requests import AnyRequest, CallRequest, RequestReader

REPLACEMENT = "\ufffd"
"""What decoding writes for bytes that are not a character, for instance an incomplete one."""

CONTEXT_TOKENS = 4
"""Tokens decoded again before new ones. A character that is not whole yet has at most three bytes, and a
token has one or more; the mark for the space before a word needs one token before it."""


class GatewayTokenizer(ChatRenderer, Protocol):
    """What the gateway needs of the tokenizer."""

    text_ids: frozenset[int]
    """Tokens that are text: no special ones, and none that the vocabulary does not have."""
    byte_ids: frozenset[int]
    """Tokens that become text only as a whole run of such tokens."""


class AnswerText:
    """Visible text of an answer, in the pieces in which it gets final.

    All pieces together are the decoded text, without end-of-turn and special tokens but those named in
    `keep_special`, cut before the first stop string: the one that is complete first; if two end together, the
    longer one.

    Life: feed() for each new tokens, finish() once after the last.
    Invariant: however the tokens are cut into feeds, the pieces add up to the same text. A token is decoded
        at most CONTEXT_TOKENS + 1 times, or with its run of byte tokens.
    """

    def __init__(
        self, texts: GatewayTokenizer, stop: Sequence[str] = (), *, keep_special: Collection[str] = ()
    ) -> None:
        """`keep_special`: special tokens to be shown all the same: they mark tool calls."""
        self._texts = texts
        self._kept = {
            token
            for name in keep_special
            for token in texts.encode(name)
            if token not in texts.text_ids and texts.decode([token], skip_special_tokens=False) == name
        }
        self._stop = [text for text in stop if text]
        self._held = ""  # the end of the text so far, which may be the beginning of a stop string
        self._context: list[int] = []
        self._run: list[int] = []  # byte tokens whose run may go on
        self._has_unsure = False  # the context's text ends in a replacement character that was not handed out
        self.is_stopped = False
        """A stop string was found: nothing is shown any more."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; returns the text that got final with them."""
        if self.is_stopped:
            return ""
        text = self._decode(self._whole_runs([token for token in token_ids if self._is_shown(token)]))
        self._has_unsure = text.endswith(REPLACEMENT)
        return self._until_stop(text[:-1] if self._has_unsure else text)

    def finish(self) -> str:
        """No token comes any more: the rest of the text."""
        if self.is_stopped:
            return ""
        text = self._until_stop(self._decode(self._run))
        return text if self.is_stopped else text + self._held

    def _until_stop(self, text: str) -> str:
        """Text that can be handed out: no stop string begins in it."""
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        self.is_stopped = bool(found)
        keep = len(held) - max((overlap(held, stop) for stop in self._stop), default=0)
        end = min(found)[1] if found else keep
        self._held = held[end:]
        return held[:end]

    def _is_shown(self, token: int) -> bool:
        return (token in self._texts.text_ids and token not in self._texts.end_ids) or token in self._kept

    def _whole_runs(self, tokens: list[int]) -> list[int]:
        """What is ready to be decoded: all but the byte tokens at the end, which wait for what comes after
        them.
        """
        end = len(tokens)
        while end > 0 and tokens[end - 1] in self._texts.byte_ids:
            end -= 1
        if end == 0:
            self._run += tokens
            return []
        ready, self._run = self._run + tokens[:end], tokens[end:]
        return ready

    def _decode(self, tokens: list[int]) -> str:
        """Text that these tokens add, beginning with the replacement character that was kept back."""
        if not tokens:
            return REPLACEMENT if self._has_unsure else ""
        known = len(self._texts.decode(self._context, skip_special_tokens=False)) - self._has_unsure
        together = self._context + tokens
        self._context = together[-CONTEXT_TOKENS:]
        return self._texts.decode(together, skip_special_tokens=False)[known:]


@dataclass(eq=False, repr=False)
class Answer:
    """One completion of a call.

    Life: feed(), a few tokens at a time, and take() of what may be shown by then -> finish() -> the rest by
        take().
    Invariant: all that take() ever returned, joined, is `content`; nothing of a tool call is ever shown as
        text before it is known not to be one.
    """

    index: int
    tokenizer: GatewayTokenizer
    tool_format: ToolFormat
    asked: InitVar[CallRequest]
    """An answer lives as long as its session: it keeps no more of the request than it needs."""
    _: KW_ONLY
    prefill: str
    """Beginning of the answer that was not sampled."""
    name: str
    """It makes ids of tool calls."""
    finish_reason: str = ""
    num_tokens: int = 0
    content: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None

    def __post_init__(self, asked: CallRequest) -> None:
        self._has_logprobs, self._has_one_call = asked.has_logprobs, asked.has_one_call
        self._tools: Tools = getattr(asked, "tools", ())
        self._answer = AnswerText(self.tokenizer, asked.stop, keep_special=self.tool_format.opens)
        self._text, self._held_from = "", 0
        self._completion: Completion | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message, as the client gets it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def feed(self, token_ids: Sequence[int]) -> None:
        """Some more tokens were sampled."""
        self.num_tokens += len(token_ids)
        self._text += self._answer.feed(token_ids)

    def take(self, start: int) -> str:
        """Text that may be shown, from `start` on."""
        if self.finish_reason:
            return (self.content or "")[start:]
        if not self.prefill:
            self._held_from = self.tool_format.hold_from(self._text, self._held_from)
        return self._text[start : self._held_from]

    def finish(self, completion: Completion) -> None:
        """Everything is sampled: parse it."""
        self.feed(completion.token_ids[self.num_tokens :])
        self._text += self._answer.finish()
        self._completion, self.finish_reason = completion, completion.finish_reason
        text = self.prefill + self._text
        parsed = self.tool_format.parse(text, self._tools)
        if len(parsed.tool_calls) > MAX_TOOLS:  # the harness could not send them back
            parsed = ParsedAnswer(text)
        self.content = parsed.content
        for number, call in enumerate(parsed.tool_calls[: 1 if self._has_one_call else None]):
            function = {"name": call.name, "arguments": call.arguments}
            self.tool_calls.append({"id": f"{self.name}-{number}", "type": "function", "function": function})
        if self.tool_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        if self._has_logprobs:
            pairs = zip(completion.token_ids, completion.behaviour_logprobs, strict=True)
            self.logprobs = [self._logprob(token, logprob) for token, logprob in pairs]

    def take_completion(self) -> Completion:
        """What was sampled, to be recorded; it is not kept any longer."""
        completion, self._completion, self._text, self._tools = self._completion, None, "", ()
        assert completion is not None, "a completion is recorded once, after it is finished"
        return completion

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode((token,), skip_special_tokens=False)
        as_bytes = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": as_bytes, "top_logprobs": []}


# ---- OpenAI's form of errors

NO_RETRY = {"x-should-retry": "false"}
"""Tells an OpenAI client not to retry."""
_CODES = {404: "unknown_url", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}
_LONGEST_SHOWN = 80


class ApiError(Exception):
    """One call is answered with an error in OpenAI's form; the session and the run go on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.headers = status, dict(headers or {})
        code = code or _CODES.get(status)
        self.error = {"message": message, "type": type, "param": param, "code": code}
        super().__init__(message)

    def body(self) -> bytes:
        return to_json({"error": self.error}, inf_nan_mode="null")

    def response(self) -> web.Response:
        return web.Response(
            body=self.body(), status=self.status, headers=self.headers, content_type="application/json"
        )


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """400: the call cannot be answered."""
    return ApiError(400, message, code=code, param=param)


def too_long(message: str, param: str) -> ApiError:
    """400 as OpenAI says it of a prompt that does not fit."""
    return invalid(message, param, code="context_length_exceeded")


def shown(value: object) -> str:
    """A value of a call, short enough for a message."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    text = repr(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


# ---- and of answers


class ChatForm:
    """/v1/chat/completions: how a body is read, and what a choice is in its answers."""

    name, whole_object, event_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    first: Mapping[str, Any] | None = {"delta": {"role": "assistant", "content": "", "refusal": None}}
    """The first event of a choice: who speaks."""

    def read(self, reader: RequestReader, body: bytes) -> AnyRequest:
        return reader.chat(body)

    def whole(self, choice: Answer) -> dict[str, Any]:
        return {"message": choice.message, "logprobs": self._logprobs(choice)}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def end(self, choice: Answer) -> list[dict[str, Any]]:
        """After the last text: tool calls, logprobs (the engines report them with the last token)."""
        calls = [{"index": index, **call} for index, call in enumerate(choice.tool_calls)]
        parts: list[dict[str, Any]] = [{"delta": {"tool_calls": calls}}] if calls else []
        if choice.logprobs is not None:
            parts.append({"delta": {}, "logprobs": self._logprobs(choice)})
        return [*parts, {"delta": {}}]

    def _logprobs(self, choice: Answer) -> dict[str, Any] | None:
        return None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}


class TextForm(ChatForm):
    """/v1/completions."""

    name, whole_object, event_object = "cmpl", "text_completion", "text_completion"
    first = None

    def read(self, reader: RequestReader, body: bytes) -> AnyRequest:
        return reader.text(body)

    def whole(self, choice: Answer) -> dict[str, Any]:
        return {"text": choice.content or "", "logprobs": self._logprobs(choice)}

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def end(self, choice: Answer) -> list[dict[str, Any]]:
        return [{"text": "", "logprobs": self._logprobs(choice)}]

    def _logprobs(self, choice: Answer) -> dict[str, Any] | None:
        """Lists beside each other."""
        if choice.logprobs is None:
            return None
        tokens = [each["token"] for each in choice.logprobs]
        offsets = [0, *itertools.accumulate(len(token) for token in tokens)][: len(tokens)]
        values = [each["logprob"] for each in choice.logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


class WrittenAnswer:
    """What is sent of one call: whole() at its end; or events, news() whenever there is some and end()."""

    def __init__(self, call: GatewayCall, model: str, asked: CallRequest) -> None:
        self._call, self._form, self._first = call, call.form, call.form.first
        self._num_shown, self._has_usage = [0] * len(call.choices), asked.include_usage
        self._head: dict[str, Any] = {"id": call.name, "created": call.created_s, "model": model}

    def whole(self) -> bytes:
        choices = [
            {"index": each.index, **self._form.whole(each), "finish_reason": each.finish_reason}
            for each in self._call.choices
        ]
        body = {"object": self._form.whole_object, "choices": choices, "usage": self._usage()}
        return to_json(self._head | body)

    def news(self) -> bytes:
        """Text that may be shown by now and was not yet; maybe nothing."""
        events = b""
        for index, choice in enumerate(self._call.choices):
            if text := choice.take(self._num_shown[index]):
                self._num_shown[index] += len(text)
                events += self._event(choice, self._form.piece(text))
        return self._begin() + events if events else b""

    def end(self) -> bytes:
        """The last text, and what comes after it."""
        events = self.news() or self._begin()
        for choice in self._call.choices:
            *parts, last = self._form.end(choice)
            events += b"".join(self._event(choice, part) for part in parts)
            events += self._event(choice, last, choice.finish_reason)
        if self._has_usage:
            events += self._written([], self._usage())
        return events + b"data: [DONE]\n\n"

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
        """Tokens; those of the prompt once, as OpenAI counts them."""
        prompt, completion = self._call.num_prompt_tokens, self._call.num_completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
