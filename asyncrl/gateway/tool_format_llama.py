"""Tool calls as Llama 3.1 to 3.3 write them: bare JSON, or JSON after <|python_tag|>. Knows no tokens."""

from __future__ import annotations

import json
import re

from asyncrl.gateway.tool_format import ParsedAnswer, ToolCall, find_marker, hold_before
from asyncrl.gateway.tool_format_json import MalformedCall, read_call, skip_space

PYTHON_TAG = "<|python_tag|>"

_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")
_KEYS = ("parameters", "arguments")
"""The first is what the template says, the second what the models write now and then."""


class LlamaFormat:
    """`{"name": "f", "parameters": {"x": 1}}`, several of them parted by `;`, nothing after them.

    Text may come before <|python_tag|> alone: JSON in the middle of a text is text. So is code after <|python_tag|>.
    """

    name = "llama"
    opens: tuple[str, ...] = (PYTHON_TAG,)

    def parse(self, text: str) -> ParsedAnswer:
        """Calls and content; text whole if a call is malformed."""
        before, tag, after = text.partition(PYTHON_TAG)
        if not tag:
            before, after = "", text
        try:
            calls = _read(after)
        except MalformedCall:
            return ParsedAnswer(text)
        return ParsedAnswer(before.rstrip() or None, tuple(calls))

    def hold_from(self, text: str, start: int = 0) -> int:
        """Everything if it begins like a call, else <|python_tag|> or its beginning at the end, or the white space at the end."""
        if text.startswith("{", skip_space(text, 0)):
            return 0
        return hold_before(text, find_marker(text, PYTHON_TAG, start), start)

    def prefill_required(self) -> str:
        """Up to where the model names the tool. Without a space at the end, which is part of the next token."""
        return '{"name":'

    def prefill_named(self, name: str) -> str:
        """Up to the parameters."""
        return f'{{"name": {json.dumps(name)}, "parameters":'


def _read(text: str) -> list[ToolCall]:
    """Calls that are the whole of `text`."""
    calls: list[ToolCall] = []
    at = skip_space(text, 0)
    while at < len(text) or not calls:
        call, at = read_call(text, at, _KEYS)
        calls.append(call)
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
    return calls
