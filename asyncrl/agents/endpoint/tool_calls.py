"""Tool-call formats: how models write tool calls as text, and their parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from asyncrl.agents.tool_markup import (
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


class ToolFormat:
    """Parser of one tool-call format; this base, `none`, finds no calls. One instance serves all answers."""

    name = "none"
    opens: tuple[str, ...] = ()
    """Markers of calls and thoughts. If special tokens, AnswerText(keep_special=opens) shows them."""
    thinking: tuple[str, str] = ("<think>", "</think>")
    """Text before and after a thought. A call inside a thought does not count."""
    close: str | None = None
    """Text that ends each call, if any; a single-call answer stops at it."""
    joint: str | None = None
    """Text between two calls; None: one call per answer."""
    refusal: str = ""
    """Reason to refuse tools; empty if they are accepted."""

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """Parse a whole answer, including its prefill. An answer with a malformed call is all text. `tools`:
        schemas for the types of unquoted arguments.
        """
        return ParsedAnswer(text)

    def hold_from(self, text: str, start: int = 0) -> int:
        """Return the start of a tool call, or of a possible one, with the white space before it; len(text) if
        none.

        The text before it is final, and a prefix of parse(...).content. `start`: the result for a prefix of
        this text.
        """
        return len(text)

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        """Return (text[start:] that may be shown, the next start)."""
        end = self.hold_from(text, start)
        return text[start:end], end

    def prefill(self, name: str | None) -> str | None:
        """Return the beginning of an answer that forces a call of this tool, or of any; None if not
        supported. It ends without a space, which is part of the next token.
        """
        return None

    def around(self, name: str) -> tuple[str, str] | None:
        """Return the text before and after a call's JSON arguments; None if the format has no grammar. The
        first begins with prefill(None) and prefill(name).
        """
        return None

    def without_tools(self) -> ToolFormat:
        """Return the format that parses only thoughts."""
        found = ToolFormat()
        found.thinking = self.thinking
        parts = [mark for mark in self.opens if any(mark in text for text in self.thinking)]
        found.opens = (*self.thinking, *parts)
        return found


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


def hold_marker(text: str, marker: str, start: int) -> int:
    """Implement hold_from() for one marker, which may be incomplete at the end of the text."""
    at = text.find(marker, start)
    if at < 0:
        at = max(start, len(text) - overlap(text, marker))
    return start + len(text[start:at].rstrip()) if at > start else at


# ---- formats


class MarkedFormat(ToolFormat):
    """Calls after a marker, with text before and between. A stop string may have cut the last call's end."""

    def __init__(
        self,
        name: str,
        begin: str,
        read: ReadCalls,
        prefills: tuple[str, str],
        *,
        marks: Sequence[str] = (),
        around: tuple[str, str] | None = None,
        thinking: tuple[str, str] = ToolFormat.thinking,
    ) -> None:
        """`prefills`: for a call of any tool, and of NAME. `marks`: other special tokens of a call. `around`:
        text between prefill and JSON arguments, and after them.
        """
        self.name, self.thinking = name, thinking
        self.opens = tuple(dict.fromkeys([begin, *marks, *thinking]))
        self._begin, self._read, self._prefills, self._around = begin, read, prefills, around

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        calls: list[ToolCall] = []
        content: list[str] = []
        end = 0
        at = text.find(self._begin, text.find(self.thinking[1]) + 1)
        try:
            while at >= 0:
                content.append(text[end:at].rstrip())
                found, end = self._read(text, at + len(self._begin), tools)
                calls += found
                at = text.find(self._begin, end)
        except MALFORMED:
            return ParsedAnswer(text)
        if not calls:
            return ParsedAnswer(text)
        return ParsedAnswer("".join([*content, text[end:].rstrip()]) or None, tuple(calls))

    def hold_from(self, text: str, start: int = 0) -> int:
        return hold_marker(text, self._begin, start)

    def prefill(self, name: str | None) -> str:
        return self._prefills[0] if name is None else self._prefills[1].replace("NAME", name)

    def around(self, name: str) -> tuple[str, str] | None:
        around = self._around
        return None if around is None else (self.prefill(name) + around[0], around[1])


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat(MarkedFormat):
    r"""Hermes, Qwen 2.5, Qwen 3, SmolLM2: `<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>`.

    A list of calls in one <tool_call> is read too.
    """

    close, joint = CLOSE, "\n"

    def __init__(self, *, writes_lists: bool = False) -> None:
        """`writes_lists`: the model was trained on `<tool_call>[...]</tool_call>` (SmolLM2)."""
        begin, end = (f"{OPEN}[\n", f"}}\n]{CLOSE}") if writes_lists else (f"{OPEN}\n", f"}}\n{CLOSE}")
        prefills = (f'{begin}{{"name":', f'{begin}{{"name": "NAME", "arguments":')
        read = json_calls(rf"{CLOSE}|\Z")
        super().__init__("hermes", OPEN, read, prefills, marks=[CLOSE], around=(" ", end))


PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")


class LlamaFormat(ToolFormat):
    """Llama 3.1 to 3.3: `{"name": "f", "parameters": {"x": 1}}`; several are separated by `;`, with nothing
    after them.

    Text may precede only <|python_tag|>; other JSON within text, and code after <|python_tag|>, is text.
    Models sometimes write "arguments" for "parameters".
    """

    name = "llama"
    opens = (PYTHON_TAG, *ToolFormat.thinking)

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

    def hold_from(self, text: str, start: int = 0) -> int:
        return 0 if text.startswith("{", skip(SPACE, text, 0)) else hold_marker(text, PYTHON_TAG, start)

    def prefill(self, name: str | None) -> str:
        return '{"name":' if name is None else f'{{"name": {json.dumps(name)}, "parameters":'

    def around(self, name: str) -> tuple[str, str]:
        return f"{self.prefill(name)} ", "}"


class ResponseTemplateFormat(MarkedFormat):
    """A tokenizer's `response_template` (transformers 5.15 and later).

    Content is the text before the first call. Malformed answers are text; calls that transformers drops
    silently are dropped.
    """

    def __init__(self, template: Any) -> None:
        """Raises ConfigError if it parses no tool calls."""
        way_out = "set gateway.tool_format to auto or to another format."
        try:
            from transformers.utils.chat_parsing import ResponseParser
            from transformers.utils.chat_parsing.response_templates import load_response_template

            self._template = load_response_template(template or {})
            ResponseParser(self._template, prefix="", tools=[])
            opens = self._template.fields["tool_calls"].open_re
        except (ImportError, TypeError) as error:
            what = f"gateway.tool_format=response_template: this version of transformers cannot: {error}"
            raise ConfigError(what, way_out="install transformers 5.15 or later.") from error
        except (ValueError, KeyError) as error:
            what = f"the tokenizer has no response_template that reads tool calls: {error}"
            raise ConfigError(f"gateway.tool_format=response_template: {what}", way_out=way_out) from error
        self.name, self._opens = "response_template", opens

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        from transformers.utils.chat_parsing import parse_response

        begun = self._opens.search(text, text.find(self.thinking[1]) + 1)
        if begun is None:
            return ParsedAnswer(text)
        try:
            found = parse_response(text, self._template, prefix="", tools=list(tools) or None)
            functions = [call["function"] for call in found.get("tool_calls") or ()]
            calls = tuple(make_call(each["name"], each["arguments"]) for each in functions)
        except (*MALFORMED, KeyError):
            return ParsedAnswer(text)
        return ParsedAnswer(text[: begun.start()].rstrip() or None, calls) if calls else ParsedAnswer(text)

    def hold_from(self, text: str, start: int = 0) -> int:
        begun = self._opens.search(text, start, partial=True)
        at = len(text) if begun is None else begun.start()
        return start + len(text[start:at].rstrip()) if at > start else at

    def prefill(self, name: str | None) -> None:  # type: ignore[override]
        return None


USAGE = "parse(text) -> [(name, arguments), ...], (content, [(name, arguments), ...]) or None"


class UserFormat(ToolFormat):
    """User-defined `parse(text)`.

    Returns the calls of a whole answer, as (name, arguments) with arguments a dict or a JSON text, with or
    without the content before them; None if there are none. A ValueError marks a malformed call: the answer
    stays text. Answers stream in one piece.
    """

    def __init__(self, spec: str) -> None:
        """Raises ConfigError if there is no such function, or if it does not take one text."""
        self.name = spec
        self._function: Callable[[str], Any] = load_function(
            spec, "gateway.tool_format", usage=USAGE, arguments=("",)
        )

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """Raises RolloutFailure for any other exception or return type."""
        try:
            found = self._function(text) or ()
        except (ValueError, RecursionError):
            return ParsedAnswer(text)
        except Exception as error:  # an error in user code is data, as in a reward function
            raise self._misused(raised(error)) from error
        content, pairs = None, found
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str | None):
            content, pairs = found[0], found[1] or ()
        if not isinstance(pairs, list | tuple) or not all(
            isinstance(entry, list | tuple) and len(entry) == 2 for entry in pairs
        ):
            raise self._misused(f"returned {found!r:.200}")
        try:
            calls = [(name, from_json(given) if isinstance(given, str) else given) for name, given in pairs]
            tool_calls = tuple(make_call(*call) for call in calls)
        except MALFORMED:
            return ParsedAnswer(text)
        return ParsedAnswer(content or None, tool_calls) if tool_calls else ParsedAnswer(text)

    def hold_from(self, text: str, start: int = 0) -> int:
        return 0

    def _misused(self, what: str) -> RolloutFailure:
        rule = f"it is called as {USAGE}; a ValueError says that a call is malformed"
        return RolloutFailure(f"gateway.tool_format={self.name} {what}", rule=rule)


# ---- selection

_SHOWS_TOOLS = re.compile(r"\btools\b")
NO_TOOLS = (
    "the chat template never mentions `tools`, so the model would not see them. Set model.chat_template to a "
    "Jinja file that shows tools to the model."
)


def find_tool_format(name: str, template: str, response_template: Any = None) -> ToolFormat:
    """Return the format of gateway.tool_format=`name`. Raises ConfigError.

    auto: the format that the chat template shows, else the tokenizer's response template, else none.
    `template` is empty if unknown.
    """
    from asyncrl.agents.endpoint.tool_formats import FORMATS, name_from

    known = f"{', '.join(['llama', *FORMATS])}, response_template"
    is_auto, found = name == "auto", ToolFormat()
    if is_auto:
        others = (response_template or {}).get("fields", {})
        name = name_from(template) or ("response_template" if "tool_calls" in others else "none")
    if ":" in name:
        return UserFormat(name)
    if name in FORMATS:
        found = FORMATS[name](template)
    elif name == "llama":
        found = LlamaFormat()
    elif name == "response_template":
        found = ResponseTemplateFormat(response_template)
    elif name != "none":
        way_out = f"set it to auto, {known}, none, or module:function of a parser of your own."
        raise ConfigError(f"gateway.tool_format={name} is not known", way_out=way_out)
    if template and not _SHOWS_TOOLS.search(template):
        found.refusal = NO_TOOLS
    elif name == "none" and is_auto:
        found.refusal = (
            "gateway.tool_format=auto does not know the tool calls that this chat template shows. Set "
            f"it to {known}, or module:function of a parser of your own, or set model.chat_template."
        )
    elif name == "none":
        found.refusal = "gateway.tool_format is none."
    return found
