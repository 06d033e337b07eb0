"""Formats of tool calls by model family, as data for one parser; and thoughts in prompts and answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic_core import from_json

from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.user_code import load_function, raised

MALFORMED = (ValueError, TypeError, KeyError, RecursionError)
_DECODER = json.JSONDecoder()
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_./:-]{1,128}")

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""`{"type": "function", "function": {"name": ..., "parameters": {...}}}` by tool."""
Found: TypeAlias = tuple[list[tuple[Any, Any]], int]
"""((name, arguments) by call, end)."""
Read: TypeAlias = Callable[[str, Any, Tools], Found]
"""From text, match of the head, and tools."""


class ToolCall(NamedTuple):
    """`arguments`: JSON text of an object."""

    name: str
    arguments: str


class ParsedAnswer(NamedTuple):
    """`content`: text outside the calls, None if empty."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


def make_call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise ValueError("a call needs the name of a tool and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    from_json(text)  # no lone surrogates, limited depth
    return ToolCall(name, text)


@cache
def _compiled(pattern: str) -> Any:
    import regex  # comes with transformers, and finds partial matches

    return regex.compile(pattern, regex.DOTALL)


# ---- thoughts

Marks = tuple[str, str]
"""Opening and closing text of a thought."""

THINKING: Marks = ("<think>", "</think>")


def opens_thought(prompt: str, marks: Marks) -> bool:
    return prompt.rstrip().endswith(marks[0].rstrip())


def close_thought(prompt: str, marks: Marks) -> str:
    if not opens_thought(prompt, marks):
        return ""
    return f"\n{marks[1]}\n\n" if prompt.endswith("\n") else marks[1]


def drop_empty_thoughts(text: str, marks: Marks) -> str:
    """Drop thoughts without text. Templates write them, or leave them out, depending on later messages."""
    begin, end = map(re.escape, map(str.strip, marks))
    return re.sub(rf"{begin}\s*{end}\s*", "", text)


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


# ---- arguments

_BETWEEN = re.compile(r"[\s;]*")


def _after(pattern: Any, text: str, at: int) -> int:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"a call does not continue with {pattern.pattern}")
    return int(found.end())


def read_json(text: str, begun: Any, tools: Tools) -> Found:
    """Read the arguments of a named call, or `{"name": ..., "arguments": {...}}` repeatedly or in a list."""
    name = begun.groupdict().get("tool")
    at = _after(_BETWEEN, text, begun.end())
    if name is not None:
        arguments, at = _DECODER.raw_decode(text, at)
        return [(name, arguments)], _after(_BETWEEN, text, at)
    values: list[Any] = []
    while not values or text.startswith("{", at):
        value, at = _DECODER.raw_decode(text, at)
        values += value if isinstance(value, list) else [value]
        at = _after(_BETWEEN, text, at)
    return [(each["name"], each["arguments" if "arguments" in each else "parameters"]) for each in values], at


def tagged(pattern: str) -> Read:
    """Read tagged arguments. Groups: `key`, `value`."""
    arguments = re.compile(pattern, re.DOTALL)

    def read(text: str, begun: Any, tools: Tools) -> Found:
        name, at = begun["tool"], begun.end()
        function: Mapping[str, Any] = next(
            (each["function"] for each in tools if each["function"]["name"] == name), {}
        )
        schemas = (function.get("parameters") or {}).get("properties") or {}
        found: dict[str, Any] = {}
        while match := arguments.match(text, at):
            at = match.end()
            key = match["key"]
            if key in found:
                raise ValueError("an argument is given twice")
            found[key] = typed(match["value"], schemas.get(key))
        return [(name, found)], at

    return read


_TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def typed(raw: str, schema: Any) -> Any:
    """Parse `raw` as JSON if the parameter's type allows it; otherwise it is text.

    Without a type, quoted strings stay text, because templates write text unquoted.
    """
    types = _types(schema)
    if types == {"string"}:
        return raw
    try:
        value = json.loads(_PYTHON_WORDS.get(raw.strip(), raw) if types else raw)
    except (ValueError, RecursionError):
        return raw
    if isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value)):
        return raw
    found = _TYPES[type(value)]
    return value if not types or found in types or (found == "integer" and "number" in types) else raw


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names; none if it allows others, too."""
    found: set[str] = set()
    schema = schema if isinstance(schema, Mapping) else {}
    for part in schema.get("anyOf") or schema.get("oneOf") or [schema]:
        declared = part.get("type") if isinstance(part, Mapping) else None
        if not declared:
            return set()
        found.update([declared] if isinstance(declared, str) else declared)
    return found


# ---- formats


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """`head`: pattern of a call up to its arguments, with a group `tool` for a name there. `read`: reads the
    arguments. `tail`: pattern of its end.

    `noise`: pattern of text that is no content: thoughts and heads of channels. Templates of channels refuse
    thoughts sent back.
    """

    name: str = "none"
    head: str = r"(?!)"
    read: Read = read_json
    tail: str = ""
    noise: str = ""
    marks: Sequence[str] = ()
    """Markers that may be special tokens."""
    call: str = ""
    """A call of the tool NAME up to its arguments, or with JSON ARGUMENTS. Empty: no call can be forced."""
    close: str | None = None
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
            calls = ()
        return ParsedAnswer(content or None, tuple(calls)) if calls else ParsedAnswer(self._clean(text))

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        """Raises MALFORMED errors."""
        head, tail = _compiled(self.head), _compiled(self.tail)
        calls: list[ToolCall] = []
        content: list[str] = []
        end = 0
        begun = head.search(text, 0 if self.noise else text.find(self.thinking[1]) + 1)
        while begun:
            content.append(self._clean(text[end : begun.start()]).rstrip())
            found, end = self.read(text, begun, tools)
            calls += [make_call(*each) for each in found]
            end = _after(tail, text, end)
            begun = head.search(text, end)
        return "".join([*content, self._clean(text[end:]).rstrip()]), calls

    def _clean(self, text: str) -> str:
        if not self.noise:
            return text
        return "".join(part.rstrip() for part in _compiled(self.noise).split(text))

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        """Return (final text from `start` on, the next start). The joined pieces are a prefix of
        parse(...).content.
        """
        begun = _compiled(self.head).search(text, start, partial=True)
        end = begun.start() if begun else len(text)
        pieces: list[str] = []
        for found in _compiled(self.noise).finditer(text, start, end, partial=True) if self.noise else ():
            is_mark = found[0] in self.marks
            if found.end() == end or (is_mark and self._may_grow(text, found.start(), end)):
                end = found.start()
                break
            pieces.append(text[start : found.start()].rstrip())
            start = found.end()
        shown = text[start:end].rstrip()
        return "".join([*pieces, shown]), start + len(shown)

    def _may_grow(self, text: str, start: int, end: int) -> bool:
        """Return whether the mark at `start`, with white space before it, may begin longer noise."""
        begins = (start, 0) if text[:start].isspace() else (start,)
        return any(_compiled(self.noise).fullmatch(text, at, end, partial=True) for at in begins)

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
        return ToolFormat(noise=self.noise, marks=self.marks if self.noise else (), thinking=self.thinking)


USAGE = "parse(text) -> [(name, arguments), ...] or None"


@dataclass(frozen=True, kw_only=True)
class UserFormat(ToolFormat):
    """User-defined `parse(text)` of a whole answer."""

    function: Callable[[str], Any]
    head: str = r"\A"

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        try:
            found = self.function(text)
        except (ValueError, RecursionError):
            return text, ()
        except Exception as error:  # user errors are data
            raise self._misused(raised(error)) from error
        try:
            pairs = [(name, arguments) for name, arguments in found or ()]
        except (TypeError, ValueError):
            raise self._misused(f"returned {found!r:.200}") from None
        return None, [make_call(*pair) for pair in pairs]

    def _misused(self, what: str) -> RolloutFailure:
        rule = f"it is called as {USAGE}; a ValueError says that a call is malformed"
        return RolloutFailure(f"gateway.tool_format={self.name} {what}", rule=rule)


# ---- families

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_JSON_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
_HERMES = ToolFormat(
    name="hermes",
    head=OPEN,
    tail=rf"{CLOSE}|\Z",
    marks=(OPEN, CLOSE),
    call=f"{OPEN}\n{_JSON_CALL}\n{CLOSE}",
    close=CLOSE,
)
_LLAMA = ToolFormat(
    name="llama",
    head=r"\A\s*(?=\{)|<\|python_tag\|>",
    tail=r"(?=<\|python_tag\|>)|\Z",
    marks=("<|python_tag|>",),
    call='{"name": "NAME", "parameters": ARGUMENTS}',
)
_QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    head=rf"{OPEN}\s*<function=(?P<tool>[^>\n]+)>",
    read=tagged(
        r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
    ),
    tail=rf"\s*</function>\s*(?:{CLOSE}|\Z)",
    marks=(OPEN, CLOSE),
    call=f"{OPEN}\n<function=NAME>",
    close=CLOSE,
)
_GLM = ToolFormat(
    name="glm",
    head=rf"{OPEN}\s*(?P<tool>[^\s<]+)",
    read=tagged(
        r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        r"(?=\s*(?:<arg_key>|</tool_call>|\Z))"
    ),
    tail=rf"\s*{CLOSE}|\n\s*\Z|(?<=</arg_value>)\Z",  # a name that was cut off is no call
    marks=(OPEN, CLOSE),
    call=f"{OPEN}NAME",
    close=CLOSE,
)
_BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_DEEPSEEK = ToolFormat(
    name="deepseek",
    head=r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?=[^\s{]))?"
    r"(?P<tool>[^\s<]+)(?:<｜tool▁sep｜>|\s*```json)",
    tail=r"(?:```)?\s*(?:<｜tool▁call▁end｜>|\Z)(?:\s*<｜tool▁calls▁end｜>)?",
    marks=[f"<｜tool▁{part}｜>" for part in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")],
    call=f"{_BEGIN}NAME<｜tool▁sep｜>ARGUMENTS{_END}",
    close="<｜tool▁call▁end｜>",
)
"""V3.1: the name, then JSON. V3 and R1: `function`, then the name and a JSON block."""
_DEEPSEEK_V3 = replace(_DEEPSEEK, call=f"{_BEGIN}function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```{_END}")
_KIMI_CALL = "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
_KIMI_PARTS = ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
_KIMI = ToolFormat(
    name="kimi",
    head=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
    r"(?P<tool>[^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
    tail=r"(?:<\|tool_call_end\|>|\Z)(?:\s*<\|tool_calls_section_end\|>)?",
    marks=[f"<|tool_call{part}|>" for part in _KIMI_PARTS],
    call=f"<|tool_calls_section_begin|>{_KIMI_CALL}<|tool_calls_section_end|>",
    close="<|tool_call_end|>",
)
_MISTRAL = ToolFormat(
    name="mistral",
    head=r"\[TOOL_CALLS\]\s*(?:(?P<tool>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\s*\{))?",
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    call=f"[TOOL_CALLS][{_JSON_CALL}]",
)
_MISTRAL_V11 = replace(_MISTRAL, call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", thinking=("[THINK]", "[/THINK]"))
_START = r"(?:\A|<\|start\|>assistant)"
_END_OF_MESSAGE = r"(?:<\|(?:end|return|call)\|>|(?=<\|start\|>assistant)|\Z)"
_CONSTRAINED = r"(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?"
_GPT_OSS = ToolFormat(
    name="gpt_oss",
    head=rf"{_START}[^<]*(?:<\|channel\|>[^<]*)?\bto=functions\.(?P<tool>[\w.-]+)"
    rf"[^<]*{_CONSTRAINED}<\|message\|>",
    tail=_END_OF_MESSAGE,
    noise=rf"{_START}\s*<\|channel\|>analysis\s*<\|message\|>.*?{_END_OF_MESSAGE}"
    rf"|{_START}\s*{_CONSTRAINED}<\|message\|>"
    r"|<\|(?:end|return|call|channel|constrain|start|message)\|>",
    marks=[f"<|{name}|>" for name in "end return call channel constrain start message".split()],
    call=" to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS",
    thinking=("<|channel|>analysis<|message|>", "<|end|>"),
)

FAMILIES: Sequence[tuple[tuple[str, ...], ToolFormat]] = [
    (("<|channel|>", "functions."), _GPT_OSS),
    (("<｜tool▁call▁begin｜>", "```json"), _DEEPSEEK_V3),
    (("<｜tool▁call▁begin｜>",), _DEEPSEEK),
    (("<|tool_call_argument_begin|>",), _KIMI),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_V11),
    (("[TOOL_CALLS]",), _MISTRAL),
    (("<arg_key>",), _GLM),
    (("<function=", "<parameter="), _QWEN3_CODER),
    ((f"{OPEN}[",), replace(_HERMES, call=f"{OPEN}[\n{_JSON_CALL}\n]{CLOSE}")),  # SmolLM2
    ((OPEN,), _HERMES),
    (('"parameters"', "<|python_tag|>"), _LLAMA),
    (('"parameters"', "ipython"), _LLAMA),
]
"""(substrings of chat templates, format); the first match counts, or the last format of a name."""


def find_tool_format(name: str, template: str) -> ToolFormat:
    """Return the format `name`; auto: by the chat template. Raises ConfigError."""
    if ":" in name:
        function = load_function(name, "gateway.tool_format", usage=USAGE, arguments=("",))
        return UserFormat(name=name, function=function)
    fitting = [each for shown, each in FAMILIES if all(mark in template for mark in shown)]
    named = {each.name: each for _, each in FAMILIES} | {each.name: each for each in reversed(fitting)}
    known = ", ".join(named)
    named["none"] = ToolFormat()
    named["auto"] = fitting[0] if fitting else named["none"]
    if name not in named:
        way_out = f"set it to auto, {known}, none, or module:function of a parser of your own."
        raise ConfigError(f"gateway.tool_format={name} is not known", way_out=way_out)
    tool_format = named[name]
    if template and not re.search(r"\btools\b", template):
        why = "the chat template never mentions `tools`, so the model would not see them"
        return replace(tool_format, refusal=f"{why}. Set model.chat_template to another Jinja file.")
    if tool_format.name == "none":
        why = f"gateway.tool_format={name} knows no tool calls of this chat template. Set it to {known}, or "
        return replace(tool_format, refusal=f"{why}module:function of a parser, or set model.chat_template.")
    return tool_format
