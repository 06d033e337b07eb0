"""Tool calls as Hermes, Qwen 2.5, Qwen 3 and SmolLM2 write them: JSON in <tool_call>. Knows no tokens."""

from __future__ import annotations

import json

from asyncrl.gateway.tool_format import THINKING_END, ParsedAnswer, ToolCall, find_marker, hold_before
from asyncrl.gateway.tool_format_json import MalformedCall, read_calls, skip_space

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat:
    r"""`<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>`, any number of them, text before and between.

    A list of calls in one <tool_call> is read too. The last one need not be closed: a stop string may have cut it off.
    """

    name = "hermes"
    opens: tuple[str, ...] = (OPEN, CLOSE)

    def __init__(self, *, writes_lists: bool = False) -> None:
        """`writes_lists`: the model was taught `<tool_call>[...]</tool_call>` (SmolLM2), so a prefill begins that."""
        self._begin = f"{OPEN}[\n" if writes_lists else f"{OPEN}\n"

    def parse(self, text: str) -> ParsedAnswer:
        """Calls and content; text whole if a call is malformed."""
        try:
            content, calls = _read(text)
        except MalformedCall:
            return ParsedAnswer(text)
        return ParsedAnswer(content or None, tuple(calls)) if calls else ParsedAnswer(text)

    def hold_from(self, text: str, start: int = 0) -> int:
        """The first <tool_call>, or a beginning of it at the end, or the white space at the end."""
        return hold_before(text, find_marker(text, OPEN, start), start)

    def prefill_required(self) -> str:
        """Up to where the model names the tool. Without a space at the end, which is part of the next token."""
        return f'{self._begin}{{"name":'

    def prefill_named(self, name: str) -> str:
        """Up to the arguments."""
        return f'{self._begin}{{"name": {json.dumps(name)}, "arguments":'


def _read(text: str) -> tuple[str, list[ToolCall]]:
    calls: list[ToolCall] = []
    content: list[str] = []
    end = 0
    at = text.find(OPEN, text.find(THINKING_END) + 1)
    while at >= 0:
        content.append(text[end:at].rstrip())
        found, end = read_calls(text, at + len(OPEN), ("arguments",))
        calls += found
        end = skip_space(text, end)
        if text.startswith(CLOSE, end):
            end += len(CLOSE)
        elif end < len(text):
            raise MalformedCall(f"{CLOSE} is missing")
        at = text.find(OPEN, end)
    content.append(text[end:].rstrip())
    return "".join(content), calls
