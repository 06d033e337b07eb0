"""The text of one answer, while its tokens come in. Knows how tokens become text; knows no tool calls, no engine, no HTTP.

A token need not be whole characters, and a stop string may begin in one token and end in a later one. So some
text has to wait until more tokens have come: what is handed out never changes any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
"""What decoding puts for bytes that are no character: maybe one that is not whole yet."""

CONTEXT_TOKENS = 4
"""Tokens decoded again before new ones. A character that is not whole yet has at most three bytes, and a token has one or more; the
mark for the space before a word needs one token before it."""


class TokenTexts(Protocol):
    """What AnswerText needs of the tokenizer."""

    end_ids: frozenset[int]
    """Tokens that end a turn."""
    text_ids: frozenset[int]
    """Tokens that are text: no special ones, and none that the vocabulary does not have."""
    byte_ids: frozenset[int]
    """Tokens that become text only as a whole run of such tokens."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids; special tokens are known by their text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids."""
        ...


class AnswerText:
    """Visible text of an answer, in the pieces in which it gets final.

    All pieces together are the decoded text, without end-of-turn and special tokens but those named in
    `keep_special`, cut before the first stop string: the one that is complete first, and of those the longest.

    Life:       feed() for each new tokens, finish() once after the last.
    Invariant:  however the tokens are cut into feeds, the pieces add up to the same text. A token is decoded at most
                CONTEXT_TOKENS + 1 times, or with its run of byte tokens.
    """

    def __init__(self, texts: TokenTexts, stop: Sequence[str] = (), *, keep_special: Collection[str] = ()) -> None:
        """`keep_special`: special tokens to be shown all the same, for whoever parses tool calls."""
        self._texts = texts
        self._kept = frozenset(token for name in keep_special for token in texts.encode(name) if _is_named(texts, token, name))
        self._stops = _StopStrings(stop)
        self._context: list[int] = []
        self._run: list[int] = []  # byte tokens whose run may go on
        self._has_unsure = False  # the context's text ends in a replacement character that was not handed out

    @property
    def is_stopped(self) -> bool:
        """A stop string was found: nothing is shown any more."""
        return self._stops.is_found

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; returns the text that got final with them."""
        if self.is_stopped:
            return ""
        text = self._decode(self._whole_runs([token for token in token_ids if self._is_shown(token)]))
        self._has_unsure = text.endswith(REPLACEMENT)
        return self._stops.feed(text[:-1] if self._has_unsure else text)

    def finish(self) -> str:
        """No token comes any more: the rest of the text."""
        if self.is_stopped:
            return ""
        run, self._run = self._run, []
        text = self._stops.feed(self._decode(run))
        self._has_unsure = False
        return text + self._stops.finish()

    def _is_shown(self, token: int) -> bool:
        return (token in self._texts.text_ids and token not in self._texts.end_ids) or token in self._kept

    def _whole_runs(self, tokens: list[int]) -> list[int]:
        """What is ready to be decoded: all but the byte tokens at the end, which wait for what comes after them."""
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


class _StopStrings:
    """Cuts a text before its first stop string. Life: feed() until is_found, or finish() at the end."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""  # the end of the text so far, which may be the beginning of a stop string
        self.is_found = False

    def feed(self, text: str) -> str:
        """Text that can be handed out: no stop string begins in it."""
        if not self._stop:
            return text
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            self.is_found = True
            return held[: min(found)[1]]
        keep = len(held) - max(_overlap(held, stop) for stop in self._stop)
        self._held = held[keep:]
        return held[:keep]

    def finish(self) -> str:
        """The text that was held and turned out to be none."""
        return "" if self.is_found else self._held


def _is_named(texts: TokenTexts, token: int, name: str) -> bool:
    return token not in texts.text_ids and texts.decode([token], skip_special_tokens=False) == name


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, but not the whole of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
