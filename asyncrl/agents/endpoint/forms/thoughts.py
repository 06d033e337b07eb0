"""Thoughts before an answer, cut from the text while it streams."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

from asyncrl.agents.endpoint.tool_calls import overlap

Marks = tuple[str, str]
"""Opening and closing text of a thought."""


class ThoughtCutter:
    """Splitter of an answer's leading thought from the text after it, in final pieces.

    Drops marks and white space around the thought. An unclosed thought takes the whole answer. Without an
    opening mark at its beginning, or at the end of the prompt (`is_open`), an answer is all text.

    Life: feed() for each piece of text, then finish() once.
    Invariant: the joined pieces do not depend on the split into feeds. No possible part of a mark is
        returned.
    """

    def __init__(self, marks: Marks, *, is_open: bool = False) -> None:
        self.marks = self._opens, self._closes = marks
        self._is_open = is_open
        self._state: Literal["before", "inside", "between", "behind"] = "before"
        self._held, self._has_thought = "", False

    @property
    def is_closed(self) -> bool:
        return self._has_thought and self._state in ("between", "behind")

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; return the final new pieces (thought, text after it)."""
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
    """Count tokens up to and including the first `mark`; None if absent."""
    first, length = tuple(mark[:1]), len(mark)
    for at, token in enumerate(token_ids):
        if first == (token,) and tuple(token_ids[at : at + length]) == tuple(mark):
            return at + length
    return None


def signature_of(thought: str) -> str:
    """Return a signature that detects altered thoughts. Not a secret."""
    digest = blake2b(thought.encode(), digest_size=24, person=b"asyncrl thought").digest()
    return base64.b64encode(digest).decode()


_SEALED = "asyncrl:"


def sealed(thought: str) -> str:
    return _SEALED + base64.b64encode(thought.encode()).decode()


def unsealed(text: str) -> str:
    """Raises ValueError if sealed() did not make it."""
    if not text.startswith(_SEALED):
        raise ValueError("it was not made here")
    return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
