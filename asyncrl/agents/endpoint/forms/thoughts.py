"""Thoughts: what a model writes before its answer, cut from the text while that comes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

from asyncrl.agents.endpoint.tool_calls import overlap

Marks = tuple[str, str]
"""The texts that open and close a thought."""


class ThoughtCutter:
    """Parts the thought that an answer begins with from the text after it, in the pieces in which they get
    final.

    The marks go, and so does white space around the thought. One that is never closed is all there is: the
    text is empty. Marks elsewhere are text: what does not begin with the opening mark has no thought, unless
    the prompt itself ends with that mark (`is_open`).

    Life: feed() for each piece of text, finish() once after the last.
    Invariant: however the text is cut into feeds, the pieces add up to the same; nothing is handed out that
        may still be a part of a mark.
    """

    def __init__(self, marks: Marks, *, is_open: bool = False) -> None:
        self.marks = self._opens, self._closes = marks
        self._is_open = is_open
        self._state: Literal["before", "inside", "between", "behind"] = "before"
        self._held, self._has_thought = "", False

    @property
    def is_closed(self) -> bool:
        """The answer had a thought, and its end has come."""
        return self._has_thought and self._state in ("between", "behind")

    def feed(self, text: str) -> tuple[str, str]:
        """Take more text; returns what got final with it: (of the thought, of the text behind it)."""
        if self._state == "behind":
            return "", text
        self._held += text
        if self._state == "before":
            self._begin()
        thought = self._inside() if self._state == "inside" else ""
        if self._state == "between":
            self._held = self._held.lstrip()
            self._state = "behind" if self._held else "between"
        shown = ""
        if self._state == "behind":
            shown, self._held = self._held, ""
        return thought, shown

    def finish(self) -> tuple[str, str]:
        """No text comes any more: the rest of both."""
        rest, self._held = self._held, ""
        if self._state == "inside" or (self._state == "before" and self._is_open):
            return self._of_thought(rest.rstrip()), ""
        return "", rest if self._state == "before" else ""

    def _begin(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(self._opens):
            self._state, self._held = "inside", bare[len(self._opens) :]
        elif not self._opens.startswith(bare):
            self._state = "inside" if self._is_open else "behind"

    def _inside(self) -> str:
        held = self._held
        at = held.find(self._closes)
        end = at if at >= 0 else len(held) - overlap(held, self._closes)
        piece = held[:end].rstrip()
        if at >= 0:
            self._state, self._held = "between", held[at + len(self._closes) :]
        else:
            self._held = held[len(piece) :]
        return self._of_thought(piece)

    def _of_thought(self, piece: str) -> str:
        piece = piece if self._has_thought else piece.lstrip()
        self._has_thought = self._has_thought or bool(piece)
        return piece


def num_until(token_ids: Sequence[int], mark: Sequence[int]) -> int | None:
    """Tokens until the first `mark` has ended; None if it is not there."""
    first, length = tuple(mark[:1]), len(mark)
    for at, token in enumerate(token_ids):
        if first == (token,) and tuple(token_ids[at : at + length]) == tuple(mark):
            return at + length
    return None


def signature_of(thought: str) -> str:
    """What a thought is signed with, so that one that comes back changed is known. It is no secret."""
    digest = blake2b(thought.encode(), digest_size=24, person=b"asyncrl thought").digest()
    return base64.b64encode(digest).decode()


_SEALED = "asyncrl:"


def sealed(thought: str) -> str:
    """A thought as the text that clients keep for one that they may not read."""
    return _SEALED + base64.b64encode(thought.encode()).decode()


def unsealed(text: str) -> str:
    """The thought in it. Raises ValueError if sealed() has not made it."""
    if not text.startswith(_SEALED):
        raise ValueError("it was not made here")
    return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
