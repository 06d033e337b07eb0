"""Tool-call formats and their parsers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

from pydantic_core import from_json

from asyncrl.agents.endpoint.reasoning import THINKING, Marks, overlap
from asyncrl.agents.endpoint.tool_markup import (
    MALFORMED,
    SPACE,
    ReadCalls,
    ToolCall,
    Tools,
    call_of,
    json_calls,
    make_call,
    read_json,
    skip,
)
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.user_code import load_function, raised

MAX_TOOLS = 128


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """`content`: text outside the calls, None if empty."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ToolFormat:
    """Format without calls, and base of others."""

    name: str = "none"
    marks: Sequence[str] = ()
    call: str = ""
    """A call of the tool NAME up to its arguments, or with JSON ARGUMENTS. Empty: no call can be forced."""
    _: KW_ONLY
    close: str | None = None
    joint: str | None = None
    """Text between calls; None: one call per answer."""
    thinking: Marks = THINKING
    refusal: str = ""

    @property
    def opens(self) -> Sequence[str]:
        """Markers of calls and thoughts."""
        return (*self.marks, *self.thinking)

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """An answer with a malformed call is all text. `tools` give unquoted arguments their types."""
        try:
            content, calls = self._read(text, tools)
        except MALFORMED:
            return ParsedAnswer(text)
        return ParsedAnswer(content or None, tuple(calls)) if calls else ParsedAnswer(text)

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        """Raises MALFORMED errors."""
        return text, ()

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        """Return (final text from `start` on, the next start). The joined pieces are a prefix of
        parse(...).content.
        """
        return text[start:], len(text)

    def prefill(self, name: str | None) -> str | None:
        """Return the beginning of an answer that forces a call of this or any tool. It must not end with a
        space, part of the next token.
        """
        head = self.call.partition("ARGUMENTS")[0]
        head = head.partition("NAME")[0] if name is None else head.replace("NAME", name)
        return head.rstrip() or None

    def around(self, name: str) -> tuple[str, str] | None:
        """Return the text around a call's JSON arguments."""
        head, found, tail = self.call.partition("ARGUMENTS")
        return (head.replace("NAME", name), tail) if found else None

    def without_tools(self) -> ToolFormat:
        parts = [mark for mark in self.marks if any(mark in text for text in self.thinking)]
        return ToolFormat(thinking=self.thinking, marks=parts)


def _show_until(marker: str, text: str, start: int) -> tuple[str, int]:
    at = text.find(marker, start)
    if at < 0:
        at = max(start, len(text) - overlap(text, marker))
    shown = text[start:at].rstrip()
    return shown, start + len(shown)


@dataclass(frozen=True)
class MarkedFormat(ToolFormat):
    read: ReadCalls = json_calls("")

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        calls: list[ToolCall] = []
        content: list[str] = []
        begin = self.marks[0]
        end = 0
        at = text.find(begin, text.find(self.thinking[1]) + 1)
        while at >= 0:
            content.append(text[end:at].rstrip())
            found, end = self.read(text, at + len(begin), tools)
            calls += found
            at = text.find(begin, end)
        return "".join([*content, text[end:].rstrip()]), calls

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        return _show_until(self.marks[0], text, start)


PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")


@dataclass(frozen=True)
class LlamaFormat(ToolFormat):
    """Llama 3.1 to 3.3: JSON objects with "parameters" or "arguments", separated by `;`.

    Text may precede only <|python_tag|>; JSON within text, and code, is text.
    """

    name: str = "llama"
    marks: Sequence[str] = (PYTHON_TAG,)
    call: str = '{"name": "NAME", "parameters": ARGUMENTS}'

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        before, tag, after = text.partition(PYTHON_TAG)
        if not tag:
            before, after = "", text
        calls: list[ToolCall] = []
        at = 0
        while at < len(after) or not calls:
            value, at = read_json(after, at)
            calls.append(call_of(value, ("parameters", "arguments")))
            at = skip(_BETWEEN, after, at)
        return before.rstrip(), calls

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        if text.startswith("{", skip(SPACE, text, 0)):
            return "", 0
        return _show_until(PYTHON_TAG, text, start)


_START, _MESSAGE = "<|start|>assistant", "<|message|>"


@dataclass(frozen=True)
class ChannelFormat(ToolFormat):
    """Messages with a head that names their channel: a thought, a call, or the user.

    `head`: pattern with a group `thought` or `call`, none for the user. `read`: returns the calls of (head,
    body, tools).

    Templates refuse thoughts sent back, so they are dropped. From an unreadable message on, or from the first
    call if a later message is unreadable, all text is content.
    """

    _: KW_ONLY
    head: str
    ends: Sequence[str]
    read: Callable[[str, str, Tools], list[ToolCall]]
    reads_calls: bool = True

    @property
    def opens(self) -> Sequence[str]:
        return (*self.ends, *self.marks, _START.removesuffix("assistant"), _MESSAGE)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        return re.compile(self.head)

    @cached_property
    def _end(self) -> re.Pattern[str]:
        return re.compile("|".join([*map(re.escape, self.ends), rf"(?={re.escape(_START)})"]))

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        calls: list[ToolCall] = []
        content: list[str] = []
        sure = (0, 0)
        try:
            for head, channel, body, end, behind in self._messages(text, 0):
                if channel == "call":
                    if not self.reads_calls:
                        raise ValueError("no tools are given")
                    calls += self.read(head, text[body:end], tools)
                elif channel != "thought":
                    content.append(text[body:end])
                if not calls:
                    sure = len(content), behind
        except MALFORMED:
            num, at = sure
            marks = "|".join(map(re.escape, self.opens))
            return ParsedAnswer("".join(content[:num]) + re.sub(marks, "", text[at:]))
        return ParsedAnswer("".join(content) or (None if calls else ""), tuple(calls))

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        pieces: list[str] = []
        shown = start
        with contextlib.suppress(ValueError):
            for _, channel, body, end, behind in self._messages(text, max(text.rfind(_START, 0, start), 0)):
                if channel == "call":
                    break
                is_open = end == behind == len(text)
                if is_open:
                    held = [overlap(text[body:], mark) for mark in (*self.ends, _START)]
                    end = max(body, end - max(held))
                if channel != "thought":
                    pieces.append(text[max(body, shown) : end])
                shown = max(shown, end if is_open else behind)
        return "".join(pieces), shown

    def _messages(self, text: str, at: int) -> Iterator[tuple[str, str | None, int, int, int]]:
        """Yield (head, channel, start and end of the body, next start)."""
        while at < len(text):
            start = at + (len(_START) if text.startswith(_START, at) else 0)
            body = text.find(_MESSAGE, start)
            head = self._head.fullmatch(text, start, max(body, start))
            if body < 0 or head is None:
                raise ValueError("this is no message")
            body += len(_MESSAGE)
            found = self._end.search(text, body)
            end, behind = found.span() if found else (len(text), len(text))
            yield head[0], head.lastgroup, body, end, behind
            at = behind

    def without_tools(self) -> ToolFormat:
        return replace(self, reads_calls=False)


@dataclass(frozen=True)
class ResponseTemplateFormat(ToolFormat):
    """`response_template` of a tokenizer, parsed by transformers."""

    name: str = "response_template"
    _: KW_ONLY
    template: Any

    @classmethod
    def of(cls, template: Any) -> ResponseTemplateFormat:
        """Raises ConfigError if the template parses no calls."""
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            loaded = load_response_template(template or {})
            ResponseParser(loaded, prefix="", tools=[])
            loaded.fields["tool_calls"]
        except (TypeError, ValueError, KeyError) as error:
            what = "gateway.tool_format=response_template: the tokenizer has no response_template that reads "
            way_out = "set gateway.tool_format to auto or to another format."
            raise ConfigError(f"{what}tool calls: {error}", way_out=way_out) from error
        return cls(template=loaded)

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        from transformers.utils.chat_parsing import parse_response

        begun = self._opening.search(text, text.find(self.thinking[1]) + 1)
        if begun is None:
            return text, ()
        found = parse_response(text, self.template, prefix="", tools=list(tools) or None)
        functions = [call["function"] for call in found.get("tool_calls") or ()]
        return text[: begun.start()].rstrip(), [
            make_call(each["name"], each["arguments"]) for each in functions
        ]

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        begun = self._opening.search(text, start, partial=True)
        shown = text[start : len(text) if begun is None else begun.start()].rstrip()
        return shown, start + len(shown)

    @property
    def _opening(self) -> Any:
        return self.template.fields["tool_calls"].open_re


USAGE = "parse(text) -> [(name, arguments), ...], (content, [(name, arguments), ...]) or None"


@dataclass(frozen=True)
class UserFormat(ToolFormat):
    """User-defined `parse(text)` of a whole answer."""

    _: KW_ONLY
    function: Callable[[str], Any]

    @classmethod
    def of(cls, spec: str) -> UserFormat:
        found = load_function(spec, "gateway.tool_format", usage=USAGE, arguments=("",))
        return cls(name=spec, function=found)

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        try:
            found: Any = self.function(text)
        except (ValueError, RecursionError):
            return text, ()
        except Exception as error:  # user errors are data
            raise self._misused(raised(error)) from error
        has_content = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str | None)
        content, pairs = found if has_content else (None, found)
        try:
            pairs = [(name, arguments) for name, arguments in pairs or ()]
        except (TypeError, ValueError):
            raise self._misused(f"returned {found!r:.200}") from None
        calls = [
            make_call(name, from_json(arguments) if isinstance(arguments, str) else arguments)
            for name, arguments in pairs
        ]
        return content, calls

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        return "", 0

    def _misused(self, what: str) -> RolloutFailure:
        rule = f"it is called as {USAGE}; a ValueError says that a call is malformed"
        return RolloutFailure(f"gateway.tool_format={self.name} {what}", rule=rule)
