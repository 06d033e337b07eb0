"""Answers: text, thoughts, tool calls and logprobs of sampled tokens; and errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.agents.endpoint.tool_formats import ReasoningSplitter, ToolFormat, Tools, overlap
from asyncrl.messages.records import Completion
from asyncrl.messages.work import CONTEXT_TOKENS, ChatTokenizer

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.requests import AnyRequest

REPLACEMENT = "\ufffd"
"""Decoded incomplete or invalid character."""


class AnswerText:
    """Visible text of an answer, cut before the first stop string.

    Special tokens are omitted unless `shows_special` or in `keep_special`. No stop string spans a shown one.

    Invariant: the joined pieces do not depend on the split into feeds.
    """

    def __init__(
        self,
        texts: ChatTokenizer,
        stop: Sequence[str] = (),
        *,
        keep_special: Collection[str] = (),
        shows_special: bool = True,
        before: Sequence[int] = (),
    ) -> None:
        """`keep_special`: marks of tool calls and thoughts. `before`: the last prompt ids."""
        self._texts = texts
        self._stop = stop
        self._stop_ids = self._special(stop)
        self._marks = self._special(keep_special) | self._stop_ids
        if shows_special:
            self._marks |= texts.special_ids - texts.end_ids
        self._held = ""
        """It may begin a stop string."""
        self._context = list(before)
        self._run: list[int] = []
        self._has_unsure = False
        """The context ends in a replacement character that was not returned."""
        self.stopped_by: str | None = None

    def feed(self, token_ids: Sequence[int]) -> str:
        text = ""
        run: list[int] = []
        for token in token_ids:
            if token not in self._marks:
                run.append(token)
                continue
            text += self._add(run) + self.finish()
            run = []
            if self.stopped_by is not None:
                return text
            mark = self._texts.decode([token], skip_special_tokens=False)
            if token in self._stop_ids:
                self.stopped_by = mark
                return text
            text += mark
            self._context = [token]
        return text + self._add(run)

    def _add(self, token_ids: Sequence[int]) -> str:
        texts = self._texts
        shown = [token for token in token_ids if token in texts.text_ids and token not in texts.end_ids]
        text = self._decode(self._whole_runs(shown))
        self._has_unsure = text.endswith(REPLACEMENT)
        return self._until_stop(text[:-1] if self._has_unsure else text)

    def finish(self) -> str:
        run = self._run
        self._run = []
        text = self._until_stop(self._decode(run))
        self._has_unsure = False
        if self.stopped_by is None:
            text += self._held
            self._held = ""
        return text

    def _until_stop(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            _, end, self.stopped_by = min(found)
        else:
            end = len(held) - max((overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[end:]
        return held[:end]

    def _special(self, names: Iterable[str]) -> set[int]:
        return {
            token
            for name in names
            for token in self._texts.encode(name)
            if token not in self._texts.text_ids
            and self._texts.decode([token], skip_special_tokens=False) == name
        }

    def _whole_runs(self, tokens: list[int]) -> list[int]:
        end = len(tokens)
        while end > 0 and tokens[end - 1] in self._texts.byte_ids:
            end -= 1
        if end == 0:
            self._run += tokens
            return []
        ready = self._run + tokens[:end]
        self._run = tokens[end:]
        return ready

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return REPLACEMENT if self._has_unsure else ""
        known = len(self._texts.decode(self._context, skip_special_tokens=False)) - self._has_unsure
        together = self._context + tokens
        self._context = together[-CONTEXT_TOKENS:]
        return self._texts.decode(together, skip_special_tokens=False)[known:]


Kind = Literal["thought", "text"]


@dataclass(eq=False, repr=False)
class Answer:
    """A completion in pieces: feed(), then finish().

    Invariant: `thought` and `shown` only grow; `shown` ends as `content`, and never has a possible tool call
        or mark.
    """

    tokenizer: ChatTokenizer
    tool_format: ToolFormat
    asked: InitVar[AnyRequest]
    prefill: str
    name: str
    thoughts: ReasoningSplitter | None = None
    shows_special: InitVar[bool] = True
    before: InitVar[Sequence[int]] = ()
    """The last prompt ids."""
    finish_reason: str = ""
    num_tokens: int = 0
    content: str | None = None
    thought: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None
    completion: Completion = field(default_factory=Completion)
    """Once finished."""

    def __post_init__(self, asked: AnyRequest, shows_special: bool, before: Sequence[int]) -> None:
        self.has_logprobs = asked.logprobs
        self._has_one_call = asked.has_one_call
        self._tools: Tools = getattr(asked, "tools", ())
        marks = self.thoughts.marks if self.thoughts is not None else ()
        kept = (*self.tool_format.opens, *marks)
        self._answer = AnswerText(
            self.tokenizer, asked.stop, keep_special=kept, shows_special=shows_special, before=before
        )
        self._text = ""
        self._shown = ""
        self._held_from = 0

    @property
    def stopped_by(self) -> str | None:
        return self._answer.stopped_by

    @property
    def num_thought_tokens(self) -> int:
        """Estimate from the thought's share of the text."""
        num_characters = len(self.thought) + len(self._text)
        return round(self.num_tokens * len(self.thought) / num_characters) if num_characters else 0

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def feed(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        self._add(self._answer.feed(token_ids))

    @property
    def shown(self) -> str:
        if self.finish_reason:
            return self.content or ""
        if not self.prefill:
            piece, self._held_from = self.tool_format.show(self._text, self._held_from)
            self._shown += piece
        return self._shown

    def finish(self, completion: Completion) -> None:
        self.feed(completion.token_ids[self.num_tokens :])
        self._add(self._answer.finish(), is_last=True)
        self.completion = completion
        self.finish_reason = completion.finish_reason or ""
        parsed = self.tool_format.parse(self.prefill + self._text, self._tools)
        self.content = parsed.content
        for number, call in enumerate(parsed.tool_calls[: 1 if self._has_one_call else None]):
            function = {"name": call.name, "arguments": call.arguments}
            self.tool_calls.append({"id": f"{self.name}-{number}", "type": "function", "function": function})
        if self.tool_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def build_logprobs(self) -> None:
        """Takes 10 us a token and alternative."""

        @cache
        def shown(token: int) -> dict[str, Any]:
            text = self.tokenizer.decode((token,), skip_special_tokens=False)
            return {"token": text, "bytes": None if REPLACEMENT in text else list(text.encode())}

        found = self.completion
        tops = found.top_logprobs or [()] * len(found.token_ids)
        self.logprobs = []
        for token, logprob, others in zip(found.token_ids, found.behaviour_logprobs, tops, strict=True):
            top = [{**shown(other), "logprob": value} for other, value in others]
            self.logprobs.append({**shown(token), "logprob": logprob, "top_logprobs": top})

    def _add(self, text: str, *, is_last: bool = False) -> None:
        if self.thoughts is not None:
            thought, text = self.thoughts.feed(text, is_last=is_last)
            self.thought += thought
        self._text += text
