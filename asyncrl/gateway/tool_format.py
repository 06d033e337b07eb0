"""What a tool-call format is: how a model writes tool calls into its text. Knows no particular one, no tokens, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

THINKING_END = "</think>"
"""What a model writes after its reasoning; a call that it only thinks about is none."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object, as the very text that the model wrote. Ids are made by whoever answers."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """`content`: the text outside the calls, None if that is nothing. Without calls it is the whole answer, to the letter."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


class ToolFormat(Protocol):
    """Reads one kind of tool calls. Has no state: one object for all answers."""

    name: str
    """As in gateway.tool_format."""
    opens: tuple[str, ...]
    """Markers of calls. Where they are special tokens, AnswerText(keep_special=opens) lets them through."""

    def parse(self, text: str) -> ParsedAnswer:
        """Calls and content of a whole answer, its prefill included. An answer with a malformed call is text, whole. Never raises."""
        ...

    def hold_from(self, text: str, start: int = 0) -> int:
        """Where a tool call begins, or may begin once more text has come, with the white space before it; len(text) if nowhere.

        What comes before is content whatever follows, and parse(...).content begins with it. `start`: what hold_from said of a
        beginning of this text, to look at nothing twice.
        """
        ...

    def prefill_required(self) -> str | None:
        """Text that the answer is begun with, so that it is a call of some tool. None: this format cannot."""
        ...

    def prefill_named(self, name: str) -> str | None:
        """Text that the answer is begun with, so that it is a call of this tool. None: this format cannot."""
        ...


def hold_before(text: str, at: int, start: int) -> int:
    """`at`, or where the white space before it begins, but no earlier than `start`."""
    return start + len(text[start:at].rstrip()) if at > start else at


def find_marker(text: str, marker: str, start: int) -> int:
    """Where `marker` is, or where its beginning stands at the end of the text; len(text) if nowhere."""
    at = text.find(marker, start)
    if at >= 0:
        return at
    longest = min(len(text) - start, len(marker) - 1)
    return len(text) - next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
