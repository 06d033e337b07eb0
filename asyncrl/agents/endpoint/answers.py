"""Answers: text, thoughts, tool calls and logprobs of sampled tokens; and errors."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cache, lru_cache
from typing import Any

from asyncrl.agents.endpoint.tool_formats import AnswerReader, Block, ToolFormat
from asyncrl.messages.records import Completion
from asyncrl.messages.sampling import REPLACEMENT, overlap
from asyncrl.messages.tokens import NO_COMPLETION, TOP_IDS, TOP_LOGPROBS
from asyncrl.messages.worker_api import CONTEXT_TOKENS, ChatTokenizer


class AnswerText:
    """Visible text of an answer, cut before the stop string that ended it.

    Special tokens are omitted unless `shows_special` or in `keep_special`. No stop
    string spans a shown one.

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
        thinking: tuple[str, str] | None = None,
    ) -> None:
        """`keep_special`: marks of tool calls and thoughts. `before`: the last prompt
        ids. `thinking`: of the engine's request.
        """
        self._texts = texts
        self._stop = stop
        names = tuple(keep_special)
        # hashed by its identity
        self._stop_ids = _special(texts, tuple(stop))  # type: ignore[arg-type]
        self._marks = _special(texts, names, shows_all=shows_special)  # type: ignore[arg-type]
        self._opening = thinking[0] if thinking else ""
        self._may_think = thinking is not None
        self._last: list[int] = []
        """The last token, and tokens that may begin a thought. Only the engine knows
        whether they complete a stop string: inside a thought none counts.
        """
        self._held = ""
        """It may begin a stop string."""
        self._window = list(before)
        """The last tokens, as context of later ones."""
        self._num_known = len(self._decode(before))
        """Characters of the window's text that were returned, or precede the answer."""
        self._run: list[int] = []
        """Byte tokens, which wait: a later one can change the text of all."""
        self.stopped_by: str | None = None

    def feed(self, token_ids: Sequence[int]) -> str:
        if not self._stop:
            return self._feed(token_ids)
        tokens = [*self._last, *token_ids]
        if self._may_think:
            begun = self._decode(tokens[:-1])
            self._may_think = self._opening.startswith(
                begun.lstrip().rstrip(REPLACEMENT)
            )
        # While the text may still begin a thought, nothing is released: the engine
        # ignores stop texts inside one, and reports only the end.
        num_last = len(tokens) if self._may_think else 1
        self._last = tokens[-num_last:]
        return self._feed(tokens[:-num_last])

    def finish(self, *, is_stopped: bool = False) -> str:
        """`is_stopped`: an end token or a stop string ended the answer."""
        # An answer that ends with a special token has not ended by a stop text,
        # although its text may contain one.
        last = set(self._last[-1:])
        stop = self._stop if is_stopped and last <= self._texts.text_ids else ()
        if is_stopped and last & self._stop_ids:
            self.stopped_by = self._decode([self._last.pop()])
        num_held = len(self._held)
        text = self._feed(self._last) + self._release()
        end = len(text)
        places = [
            (text.find(each, max(num_held - len(each) + 1, 0)), each) for each in stop
        ]
        if found := [(at + len(each), at, each) for at, each in places if at >= 0]:
            _, end, self.stopped_by = min(found)
        return text[:end]

    def _feed(self, token_ids: Sequence[int]) -> str:
        if self._marks.isdisjoint(token_ids):
            return self._feed_text(token_ids)
        text = ""
        for is_mark, tokens in itertools.groupby(token_ids, self._marks.__contains__):
            run = list(tokens)
            if is_mark:
                marks = [self._decode([mark]) for mark in run]
                text += self._release() + "".join(marks)
                self._window = run[-1:]
                self._num_known = len(marks[-1])
                continue
            text += self._feed_text(run)
        return text

    def _feed_text(self, token_ids: Sequence[int]) -> str:
        held = self._held + self._grown(token_ids)
        end = len(held) - max((overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[end:]
        return held[:end]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._texts.decode(token_ids, skip_special_tokens=False)

    def _release(self) -> str:
        text = self._held + self._grown((), is_last=True)
        self._held = ""
        return text

    def _grown(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the new text that no later token can change; all if `is_last`."""
        texts = self._texts
        shown = list(token_ids)
        if not (texts.text_ids.issuperset(shown) and texts.end_ids.isdisjoint(shown)):
            shown = [
                token
                for token in token_ids
                if token in texts.text_ids and token not in texts.end_ids
            ]
        end = len(shown)
        while end and not is_last and shown[end - 1] in texts.byte_ids:
            end -= 1
        # A run of bytes may be long, so it is read once, when it ends.
        if not end and not is_last:
            self._run += shown
            return ""
        self._window += self._run + shown[:end]
        self._run = shown[end:]
        new = self._decode(self._window)[self._num_known :]
        if is_last:
            return new
        sure = new.removesuffix(REPLACEMENT)
        self._window = self._window[-CONTEXT_TOKENS:]
        known = self._decode(self._window)
        self._num_known = len(known) - len(new) + len(sure)
        return sure


@lru_cache(256)
def _special(
    texts: ChatTokenizer, names: tuple[str, ...], *, shows_all: bool = False
) -> frozenset[int]:
    """Return the special tokens of these names; with `shows_all` also all others that
    end no answer.
    """
    shown = texts.special_ids - texts.end_ids if shows_all else frozenset[int]()
    return shown.union(
        token
        for name in names
        for token in texts.encode(name)
        if token not in texts.text_ids
        and texts.decode([token], skip_special_tokens=False) == name
    )


@cache
def _bytes_of_letters() -> Mapping[str, int]:
    """Byte-level vocabularies write each byte as a letter."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


@lru_cache(4)
def _pieces(tokenizer: ChatTokenizer) -> Mapping[int, str]:
    """Return the vocabulary by id. To read 150,000 tokens takes 0.2 s, in which the
    gateway answers nobody.
    """
    return {token: piece for piece, token in tokenizer.vocabulary.items()}


def part_of_character(tokenizer: ChatTokenizer, token: int) -> bytes:
    """Return the bytes of a token that is not valid Unicode. Examples: `<0xE2>` or, at
    byte level, `âĤ`.
    """
    # hashed by its identity
    piece = _pieces(tokenizer)[token]  # type: ignore[arg-type]
    if token in tokenizer.byte_ids:
        return bytes.fromhex(piece[3:5])
    return bytes(_bytes_of_letters()[letter] for letter in piece)


@dataclass(eq=False, repr=False, kw_only=True)
class Answer:
    """A completion in pieces: feed(), then finish().

    Invariant: thought, content and calls only grow; the content never has a possible
        tool call or mark.
    """

    tokenizer: ChatTokenizer
    tool_format: ToolFormat
    text: AnswerText
    prefill: InitVar[str] = ""
    options: Mapping[str, Any]
    """Of AnswerReader."""
    has_logprobs: bool = False
    is_streamed: bool = False
    """Calls that have begun stay calls if they are malformed or cut; otherwise such an
    answer is text.
    """
    finish_reason: str = ""
    num_tokens: int = 0
    logprobs: list[dict[str, object]] | None = None
    completion: Completion = NO_COMPLETION
    """Once finished."""
    reader: AnswerReader = field(init=False)
    """Of a stream, or once finished."""

    def __post_init__(self, prefill: str) -> None:
        if self.is_streamed:
            self.reader = AnswerReader(self.tool_format, **self.options)
        self._texts: list[str] = []
        self._add(prefill)

    @property
    def thought(self) -> str:
        return self.reader.thought

    @property
    def content(self) -> str | None:
        return self.reader.content or (None if self.calls else "")

    @property
    def num_thought_tokens(self) -> int:
        """Estimate from the thought's share of the text."""
        num_characters = sum(map(len, self._texts))
        return round(self.num_tokens * len(self.thought) / max(num_characters, 1))

    @property
    def calls(self) -> Sequence[Block]:
        return self.reader.calls

    @property
    def message(self) -> dict[str, object]:
        message: dict[str, object] = {
            "role": "assistant",
            "content": self.content,
            "refusal": None,
        }
        if thought := self.thought:
            message["reasoning_content"] = thought
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.text},
                }
                for call in self.calls
            ]
        return message

    def feed(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        self._add(self.text.feed(token_ids))

    def finish(self, completion: Completion) -> None:
        # A stream has fed most tokens already, by the same path.
        self.feed(completion.token_ids[self.num_tokens :])
        text = self.text.finish(is_stopped=completion.finish_reason == "stop")
        self._add(text, is_last=True)
        self.completion = completion
        self.finish_reason = completion.finish_reason or ""
        if self.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"

    def build_logprobs(self) -> None:
        """Make the logprobs of OpenAI's form, which take 10 us a token and alternative."""

        @cache
        def shown(token: int) -> dict[str, object]:
            text = self.tokenizer.decode((token,), skip_special_tokens=False)
            data = (
                part_of_character(self.tokenizer, token)
                if REPLACEMENT in text
                else text.encode()
            )
            return {"token": text, "bytes": list(data)}

        sampled = self.completion.sampled
        self.logprobs = []
        for token, logprob, others, values in zip(
            sampled.ids.tolist(),
            sampled.behaviour_logprobs.tolist(),
            sampled.column(TOP_IDS).lists(),
            sampled.column(TOP_LOGPROBS).lists(),
            strict=True,
        ):
            top = [
                {**shown(other), "logprob": value}
                for other, value in zip(others, values, strict=True)
            ]
            self.logprobs.append(
                {**shown(token), "logprob": logprob, "top_logprobs": top}
            )

    def _add(self, text: str, *, is_last: bool = False) -> None:
        self._texts.append(text)
        if self.is_streamed:
            self.reader.feed(text, is_last=is_last)
        # Parsed once, at its end: a malformed call then makes the whole answer text. A
        # stream could not take its beginning back.
        elif is_last:
            self.reader = self.tool_format.parse("".join(self._texts), **self.options)
