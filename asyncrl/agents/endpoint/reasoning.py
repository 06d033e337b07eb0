"""Thoughts in prompts, messages and streamed answers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

Marks = tuple[str, str]
"""Opening and closing text of a thought."""

THINKING: Marks = ("<think>", "</think>")


def opens_thought(prompt: str, marks: Marks) -> bool:
    return prompt.rstrip().endswith(marks[0].rstrip())


def close_thought(prompt: str, marks: Marks) -> str:
    if not opens_thought(prompt, marks):
        return ""
    return f"\n{marks[1]}\n\n" if prompt.endswith("\n") else marks[1]


def split_thought(message: Mapping[str, Any], marks: Marks) -> tuple[str, str]:
    """Return (thought, rest of the content). The opening mark may be missing."""
    begin, end = marks
    content = str(message.get("content") or "")
    apart = str(message.get("reasoning_content") or "").strip()
    before, found, after = content.partition(end)
    if not found or begin in before.lstrip().removeprefix(begin):
        return apart, content.strip()
    inner = before.strip().removeprefix(begin).strip()
    return apart if inner in ("", apart) else f"{apart}\n{inner}".strip(), after.strip()


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


class ReasoningSplitter:
    """Split a streamed answer into its leading thought and the text after it.

    Marks and outer white space are dropped. An unclosed thought takes the whole answer. Without an opening
    mark in answer or prompt (`is_open`), all is text.
    """

    def __init__(self, marks: Marks, *, is_open: bool = False) -> None:
        self.marks = marks
        self._is_open = is_open
        self._state: Literal["before", "inside", "between", "behind"] = "before"
        self._held = ""
        self._has_thought = False

    @property
    def is_closed(self) -> bool:
        return self._has_thought and self._state in ("between", "behind")

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        thought = ""
        if self._state == "before":
            self._begin()
        if self._state == "inside":
            thought = self._inside()
        if self._state == "between":
            self._held = self._held.lstrip()
            self._state = "behind" if self._held else "between"
        if self._state != "behind":
            return thought, ""
        shown, self._held = self._held, ""
        return thought, shown

    def finish(self) -> tuple[str, str]:
        rest, self._held = self._held, ""
        if self._state == "inside" or (self._state == "before" and self._is_open):
            return self._of_thought(rest.rstrip()), ""
        return "", rest if self._state == "before" else ""

    def _begin(self) -> None:
        bare = self._held.lstrip()
        if bare.startswith(self.marks[0]):
            self._state = "inside"
            self._held = bare[len(self.marks[0]) :]
        elif not self.marks[0].startswith(bare):
            self._state = "inside" if self._is_open else "behind"

    def _inside(self) -> str:
        before, found, after = self._held.partition(self.marks[1])
        if found:
            self._state = "between"
            self._held = after
            return self._of_thought(before.rstrip())
        piece = before[: len(before) - overlap(before, self.marks[1])].rstrip()
        self._held = before[len(piece) :]
        return self._of_thought(piece)

    def _of_thought(self, piece: str) -> str:
        piece = piece if self._has_thought else piece.lstrip()
        self._has_thought = self._has_thought or bool(piece)
        return piece


def num_until(token_ids: Sequence[int], mark: Sequence[int]) -> int | None:
    """Count tokens through the first `mark`, if any."""
    wanted = tuple(mark)
    for end in range(len(mark), len(token_ids) + 1):
        if token_ids[end - 1] == wanted[-1] and tuple(token_ids[end - len(mark) : end]) == wanted:
            return end
    return None


def signature_of(thought: str) -> str:
    """Return a signature that detects altered thoughts; no secret."""
    digest = blake2b(thought.encode(), digest_size=24, person=b"asyncrl thought").digest()
    return base64.b64encode(digest).decode()


_SEALED = "asyncrl:"


def sealed(thought: str) -> str:
    return _SEALED + base64.b64encode(thought.encode()).decode()


def unsealed(text: str) -> str:
    """Invert sealed(). Raises ValueError."""
    if not text.startswith(_SEALED):
        raise ValueError("it does not come from this gateway")
    return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
