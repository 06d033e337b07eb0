"""Sampled tokens of one completion -> what a client is told of it: text as it gets final, tool calls, logprobs. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from asyncrl.gateway.answer_text import REPLACEMENT, AnswerText, TokenTexts
from asyncrl.gateway.messages import MAX_TOOLS
from asyncrl.gateway.tool_format import ParsedAnswer, ToolFormat
from asyncrl.types import ChatRenderer, Completion


class GatewayTokenizer(ChatRenderer, TokenTexts, Protocol):
    """What the gateway needs of the tokenizer."""


class TokenNames:
    """Text and bytes of single tokens, as logprobs name them; each token is decoded once."""

    def __init__(self, tokenizer: GatewayTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def of(self, token: int) -> tuple[str, list[int] | None]:
        """Bytes are None where the token alone is no whole character."""
        if (known := self._known.get(token)) is None:
            text = self._tokenizer.decode((token,), skip_special_tokens=False)
            known = self._known[token] = (text, None if REPLACEMENT in text else list(text.encode()))
        return known


class Choice:
    """One completion of a call.

    Life:       feed(), a few tokens at a time, and take() of what may be shown by then -> finish() -> the rest by take().
    Invariant:  all that take() ever returned, joined, is `content`; nothing of a tool call is ever shown as text before it is
                known not to be one.
    """

    def __init__(
        self,
        index: int,
        tokenizer: GatewayTokenizer,
        *,
        stop: Sequence[str] = (),
        tool_format: ToolFormat | None = None,
        prefill: str = "",
        name: str,
        has_logprobs: bool,
        token_names: TokenNames | None = None,
    ) -> None:
        """`tool_format` None: the text is text. `prefill`: beginning of the answer that was not sampled. `name` makes ids of tool calls."""
        self.index, self.finish_reason = index, ""
        self.num_tokens = 0
        self.content: str | None = None
        self.tool_calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] | None = None
        self._format, self._prefill, self._name = tool_format, prefill, name
        self._has_logprobs, self._names = has_logprobs, token_names or TokenNames(tokenizer)
        keep = tool_format.opens if tool_format is not None else ()
        self._answer = AnswerText(tokenizer, stop, keep_special=keep)
        self._text = ""
        self._num_taken = 0
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

    def take(self) -> str:
        """Text that may be shown and was not yet."""
        text = (self.content or "") if self.finish_reason else self._text
        start, end = self._num_taken, len(text) if self.finish_reason else self._sure_end()
        self._num_taken = max(start, end)
        return text[start:end]

    def finish(self, completion: Completion) -> None:
        """Everything is sampled: parse it."""
        self.feed(completion.token_ids[self.num_tokens :])
        self._text += self._answer.finish()
        self._completion, self.content, self.finish_reason = completion, self._text, completion.finish_reason
        if self._format is not None:
            self._parse(self._format)
        if self._has_logprobs:
            self.logprobs = [self._logprob(*each) for each in zip(completion.token_ids, completion.behaviour_logprobs, strict=True)]

    def take_completion(self) -> Completion:
        """What was sampled, to be recorded; it is not kept any longer."""
        completion, self._completion, self._text = self._completion, None, ""
        assert completion is not None, "a completion is recorded once, after it is finished"
        return completion

    def _parse(self, tool_format: ToolFormat) -> None:
        parsed = tool_format.parse(self._prefill + self._text)
        if len(parsed.tool_calls) > MAX_TOOLS:  # the harness could not send them back
            parsed = ParsedAnswer(self._prefill + self._text)
        self.content = parsed.content
        self.tool_calls = [
            {"id": f"{self._name}-{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(parsed.tool_calls)
        ]
        if self.tool_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def _sure_end(self) -> int:
        """How much of the text so far is content, whatever follows."""
        if self._format is None:
            return len(self._text)
        return 0 if self._prefill else self._format.hold_from(self._text, self._num_taken)

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text, as_bytes = self._names.of(token)
        return {"token": text, "logprob": logprob, "bytes": as_bytes, "top_logprobs": []}
