"""Kinds of tool-call formats: how models write calls as text, and their parsers."""

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
"""Most tools of a call, and most calls in a message."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """`content`: text outside the calls, None if empty. Without calls, the whole answer verbatim; for a
    format with channels, the text for the user.
    """

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ToolFormat:
    """Parser of one tool-call format; this base, `none`, finds no calls. One instance serves all answers."""

    name: str = "none"
    marks: Sequence[str] = ()
    """Markers of calls."""
    call: str = ""
    """A call of the tool NAME, up to its arguments, or with ARGUMENTS and its end if they are JSON. Empty if
    a call cannot be forced.
    """
    _: KW_ONLY
    close: str | None = None
    """Text that ends each call, if any; a single-call answer stops at it."""
    joint: str | None = None
    """Text between two calls; None: one call per answer."""
    thinking: Marks = THINKING
    """Text before and after a thought. A call inside a thought does not count."""
    refusal: str = ""
    """Reason to refuse tools; empty if they are accepted."""

    @property
    def opens(self) -> Sequence[str]:
        """Markers of calls and thoughts. If special tokens, AnswerText(keep_special=opens) shows them."""
        return (*self.marks, *self.thinking)

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """Parse a whole answer, including its prefill. An answer with a malformed call is all text. `tools`:
        schemas for the types of unquoted arguments.
        """
        return ParsedAnswer(text)

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        """Return (text[start:] that is final, the next start). What may belong to a call is held back, with
        the white space before it.

        The joined pieces are a prefix of parse(...).content.
        """
        return text[start:], len(text)

    def prefill(self, name: str | None) -> str | None:
        """Return the beginning of an answer that forces a call of this tool, or of any; None if not
        supported. It ends without a space, which is part of the next token.
        """
        head = self.call.partition("ARGUMENTS")[0]
        head = head.partition("NAME")[0] if name is None else head.replace("NAME", name)
        return head.rstrip() or None

    def around(self, name: str) -> tuple[str, str] | None:
        """Return the text before and after a call's JSON arguments; None if the format has no grammar. The
        first begins with prefill(None) and prefill(name).
        """
        head, found, tail = self.call.partition("ARGUMENTS")
        return (head.replace("NAME", name), tail) if found else None

    def without_tools(self) -> ToolFormat:
        """Return the format that parses only thoughts."""
        parts = [mark for mark in self.marks if any(mark in text for text in self.thinking)]
        return ToolFormat(thinking=self.thinking, marks=parts)


def _show_until(marker: str, text: str, start: int) -> tuple[str, int]:
    """Implement ToolFormat.show() for one marker, which may be incomplete at the end of the text."""
    at = text.find(marker, start)
    if at < 0:
        at = max(start, len(text) - overlap(text, marker))
    shown = text[start:at].rstrip()
    return shown, start + len(shown)


@dataclass(frozen=True)
class MarkedFormat(ToolFormat):
    """Calls after the first of `marks`, with text before and between. A stop string may have cut the last
    call's end.
    """

    read: ReadCalls = json_calls("")

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        calls: list[ToolCall] = []
        content: list[str] = []
        begin = self.marks[0]
        end = 0
        at = text.find(begin, text.find(self.thinking[1]) + 1)
        try:
            while at >= 0:
                content.append(text[end:at].rstrip())
                found, end = self.read(text, at + len(begin), tools)
                calls += found
                at = text.find(begin, end)
        except MALFORMED:
            return ParsedAnswer(text)
        if not calls:
            return ParsedAnswer(text)
        return ParsedAnswer("".join([*content, text[end:].rstrip()]) or None, tuple(calls))

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        return _show_until(self.marks[0], text, start)


PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")


@dataclass(frozen=True)
class LlamaFormat(ToolFormat):
    """Llama 3.1 to 3.3: `{"name": "f", "parameters": {"x": 1}}`; several are separated by `;`, with nothing
    after them.

    Text may precede only <|python_tag|>; other JSON within text, and code after <|python_tag|>, is text.
    Models sometimes write "arguments" for "parameters".
    """

    name: str = "llama"
    marks: Sequence[str] = (PYTHON_TAG,)
    call: str = '{"name": "NAME", "parameters": ARGUMENTS}'

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        before, tag, after = text.partition(PYTHON_TAG)
        if not tag:
            before, after = "", text
        calls: list[ToolCall] = []
        at = 0
        try:
            while at < len(after) or not calls:
                value, at = read_json(after, at)
                calls.append(call_of(value, ("parameters", "arguments")))
                at = skip(_BETWEEN, after, at)
        except MALFORMED:
            return ParsedAnswer(text)
        return ParsedAnswer(before.rstrip() or None, tuple(calls))

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        if text.startswith("{", skip(SPACE, text, 0)):
            return "", 0
        return _show_until(PYTHON_TAG, text, start)


_START, _MESSAGE = "<|start|>assistant", "<|message|>"


@dataclass(frozen=True)
class ChannelFormat(ToolFormat):
    """An answer in messages, each with a head that names its channel: a thought, a call, or the user.

    `head`: pattern with a group named `thought` or `call`, none for the user. `ends`: possible ends of a
    message. `read`: returns the calls of (head, body, tools).

    Content is the user's text without thoughts, which the templates refuse when sent back. From an unreadable
    message on, or from the first call if a later one is unreadable, all is content, without the marks.
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
        with contextlib.suppress(ValueError):  # an incomplete or invalid head
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
        """Yield (head, channel, start and end of the body, start of the next message). Raises
        ValueError for an unreadable head.
        """
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
    """A tokenizer's `response_template`, parsed by transformers.

    Content is the text before the first call. Malformed answers are text; calls that transformers drops
    silently are dropped.
    """

    name: str = "response_template"
    _: KW_ONLY
    template: Any

    @classmethod
    def of(cls, template: Any) -> ResponseTemplateFormat:
        """Raises ConfigError if the template parses no tool calls."""
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

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        from transformers.utils.chat_parsing import parse_response

        begun = self._opening.search(text, text.find(self.thinking[1]) + 1)
        if begun is None:
            return ParsedAnswer(text)
        try:
            found = parse_response(text, self.template, prefix="", tools=list(tools) or None)
            functions = [call["function"] for call in found.get("tool_calls") or ()]
            calls = tuple(make_call(each["name"], each["arguments"]) for each in functions)
        except (*MALFORMED, KeyError):
            return ParsedAnswer(text)
        return ParsedAnswer(text[: begun.start()].rstrip() or None, calls) if calls else ParsedAnswer(text)

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
    """User-defined `parse(text)`.

    Returns the calls of a whole answer, as (name, arguments) with arguments a dict or a JSON text, with or
    without the content before them; None if there are none. A ValueError marks a malformed call: the answer
    stays text. Answers stream in one piece.
    """

    _: KW_ONLY
    function: Callable[[str], Any]

    @classmethod
    def of(cls, spec: str) -> UserFormat:
        """Raises ConfigError if there is no such function, or if it does not take one text."""
        found = load_function(spec, "gateway.tool_format", usage=USAGE, arguments=("",))
        return cls(name=spec, function=found)

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """Raises RolloutFailure for any other exception or return type."""
        try:
            found = self.function(text) or ()
        except (ValueError, RecursionError):
            return ParsedAnswer(text)
        except Exception as error:  # an error in user code is data, as in a reward function
            raise self._misused(raised(error)) from error
        content, pairs = None, found
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str | None):
            content, pairs = found[0], found[1] or ()
        if not isinstance(pairs, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        ):
            raise self._misused(f"returned {found!r:.200}")
        try:
            calls = tuple(
                make_call(name, from_json(arguments) if isinstance(arguments, str) else arguments)
                for name, arguments in pairs
            )
        except MALFORMED:
            return ParsedAnswer(text)
        return ParsedAnswer(content or None, calls) if calls else ParsedAnswer(text)

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        return "", 0

    def _misused(self, what: str) -> RolloutFailure:
        rule = f"it is called as {USAGE}; a ValueError says that a call is malformed"
        return RolloutFailure(f"gateway.tool_format={self.name} {what}", rule=rule)
