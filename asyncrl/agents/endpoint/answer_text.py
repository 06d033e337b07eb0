"""Sampled tokens of one completion -> what a client gets: text as it gets final, tool calls, logprobs.

A token may hold a part of a character, and a stop string may begin in one token and end in a later one. So
some text is held back until more tokens have come. Text that was handed out never changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from asyncrl.agents.endpoint.requests import MAX_TOOLS, CallRequest
from asyncrl.agents.endpoint.tool_calls import ParsedAnswer, ToolFormat, overlap
from asyncrl.messages.records import Completion
from asyncrl.messages.work import ChatRenderer

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


class Answer:
    """One completion of a call.

    Life: feed(), a few tokens at a time, and take() of what may be shown by then -> finish() -> the rest by
        take().
    Invariant: all that take() ever returned, joined, is `content`; nothing of a tool call is ever shown as
        text before it is known not to be one.
    """

    def __init__(
        self,
        index: int,
        tokenizer: GatewayTokenizer,
        tool_format: ToolFormat,
        asked: CallRequest,
        *,
        prefill: str,
        name: str,
    ) -> None:
        """`prefill`: beginning of the answer that was not sampled. `name` makes ids of tool calls."""
        self.index, self.finish_reason, self.num_tokens = index, "", 0
        self.content: str | None = None
        self.tool_calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] | None = None
        self._tokenizer, self._format, self._prefill, self._name = tokenizer, tool_format, prefill, name
        self._has_logprobs = asked.logprobs
        self._answer = AnswerText(tokenizer, asked.stop, keep_special=tool_format.opens)
        self._text = ""
        self._held_from = 0
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
        if not self._prefill:
            self._held_from = self._format.hold_from(self._text, self._held_from)
        return self._text[start : self._held_from]

    def finish(self, completion: Completion) -> None:
        """Everything is sampled: parse it."""
        self.feed(completion.token_ids[self.num_tokens :])
        self._text += self._answer.finish()
        self._completion, self.finish_reason = completion, completion.finish_reason
        text = self._prefill + self._text
        parsed = self._format.parse(text)
        if len(parsed.tool_calls) > MAX_TOOLS:  # the harness could not send them back
            parsed = ParsedAnswer(text)
        self.content = parsed.content
        for number, call in enumerate(parsed.tool_calls):
            function = {"name": call.name, "arguments": call.arguments}
            self.tool_calls.append({"id": f"{self._name}-{number}", "type": "function", "function": function})
        if self.tool_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        if self._has_logprobs:
            pairs = zip(completion.token_ids, completion.behaviour_logprobs, strict=True)
            self.logprobs = [self._logprob(token, logprob) for token, logprob in pairs]

    def take_completion(self) -> Completion:
        """What was sampled, to be recorded; it is not kept any longer."""
        completion, self._completion, self._text = self._completion, None, ""
        assert completion is not None, "a completion is recorded once, after it is finished"
        return completion

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode((token,), skip_special_tokens=False)
        as_bytes = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": as_bytes, "top_logprobs": []}
