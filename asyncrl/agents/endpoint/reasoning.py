"""Thoughts in prompts, messages and streamed answers."""

from __future__ import annotations

from collections.abc import Mapping
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
        self._held = ""
        self._state: Literal["unknown", "thought", "text"] = "unknown"
        self._is_first = True
        """White space at the beginning of the state's text is dropped."""

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the next pieces of thought and text."""
        self._held += text
        if self._state == "unknown":
            self._begin(is_last)
        thought = self._thought(is_last) if self._state == "thought" else ""
        return thought, self._take(len(self._held)) if self._state == "text" else ""

    def _begin(self, is_last: bool) -> None:
        begin = self.marks[0]
        bare = self._held.lstrip()
        if bare.startswith(begin):
            self._state = "thought"
            self._held = bare.removeprefix(begin)
        elif is_last or not begin.startswith(bare):
            self._state = "thought" if self._is_open else "text"
            self._is_first = self._is_open

    def _thought(self, is_last: bool) -> str:
        before, found, after = self._held.partition(self.marks[1])
        if not found and not is_last:
            before = before[: len(before) - overlap(before, self.marks[1])]
        thought = self._take(len(before.rstrip()))
        if found:
            self._state = "text"
            self._is_first = True
            self._held = after
        return thought

    def _take(self, length: int) -> str:
        piece = self._held[:length]
        self._held = self._held[length:]
        if self._is_first:
            piece = piece.lstrip()
            self._is_first = not piece
        return piece
