"""Formats of tool calls by model family, as data for one parser; and thoughts in prompts and answers."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote

from pydantic_core import from_json

from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.user_code import load_function, raised

MALFORMED = (ValueError, TypeError, KeyError, RecursionError)
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""`{"type": "function", "function": {"name": ..., "parameters": {...}}}` by tool."""
Value = TypeVar("Value")


@dataclass
class ToolCall:
    """`arguments`: JSON text of an object; it grows while the call is sampled.

    Example: a streamed call of `add` has the arguments `{"a"`, then `{"a": 1, "b"`, then `{"a": 1, "b": 2}`.
    """

    name: str
    arguments: str = ""
    id: str | None = None
    """If the model wrote one."""


class ParsedAnswer(NamedTuple):
    """`content`: text outside the calls, None if empty."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


def check_arguments(text: str) -> None:
    """Raise ValueError unless the text is a JSON object of finite numbers and valid Unicode."""
    arguments = from_json(text, allow_inf_nan=False)
    if not isinstance(arguments, dict):
        raise ValueError("a call needs an object of arguments")
    json.dumps(arguments, allow_nan=False)  # 1e999


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


# ---- reading


class CallReader:
    """Reads an answer while it grows: `calls`, the last one with its arguments so far, and `content`.

    A format reads by a generator that yields to wait for more text. Invariant: calls and content do not
    depend on the split into feeds.
    """

    def __init__(
        self, tool_format: ToolFormat, tools: Tools = (), *, is_thinking: bool | None = None
    ) -> None:
        """`is_thinking`: whether the prompt opened a thought; None if the answer is fed at once."""
        self.tools = tools
        self.is_thinking = is_thinking
        self.text = ""
        self.at = 0
        self.calls: list[ToolCall] = []
        self.content: list[str] = []
        """Text outside the calls, as far as it was read."""
        self.is_last = False
        self.is_malformed = False
        self._steps = tool_format.steps(self)

    def feed(self, text: str, *, is_last: bool = False) -> None:
        self.text += text
        self.is_last = is_last
        try:
            next(self._steps, None)
        except MALFORMED:
            self.is_malformed = True

    def begin(self, name: Any, own_id: str | None = None) -> ToolCall:
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise ValueError("a call needs the name of a tool")
        self.calls.append(ToolCall(name, id=own_id))
        return self.calls[-1]

    def match(self, pattern: str) -> Steps[Any]:
        """Read a pattern. Return None if the text continues differently."""
        found = yield from self._find(_compiled(pattern).match)
        if found is not None:
            self.at = found.end()
        return found

    def need(self, pattern: str) -> Steps[Any]:
        found = yield from self.match(pattern)
        if found is None:
            raise ValueError(f"a call does not continue with {pattern}")
        return found

    def search(self, pattern: str) -> Steps[Any]:
        """Return the next match anywhere, None if there is none in the whole text."""
        return (yield from self._find(_compiled(pattern).search, is_search=True))

    def _find(self, find: Callable[..., Any], *, is_search: bool = False) -> Steps[Any]:
        start = self.at
        while True:
            found = find(self.text, start, partial=not self.is_last)
            is_sure = found is not None and found.end() < len(self.text)  # otherwise it may grow
            if self.is_last or is_sure or (found is None and not is_search):
                return found
            start = len(self.text) if found is None else found.start()
            # Searching a long argument again at each token would take quadratic time.
            enough = len(self.text) + (len(self.text) - start) // 16
            yield
            while len(self.text) <= enough and not self.is_last:
                yield


Steps: TypeAlias = Generator[None, None, Value]
Read: TypeAlias = Callable[[CallReader, Any], Steps[str]]
"""Reads the arguments of a call, whose head was matched. Returns the text that closes them after the tail."""

_JSON_PIECE = re.compile(r'[^"\\{}\[\]]+|\\.|["{}\[\]]', re.DOTALL)
_STRING = r'"\w+"\s*:\s*"[^"]*"'
JSON_HEAD = (
    rf'(?P<object>\{{)\s*(?:{_STRING}\s*,\s*)*?"(?:tool_)?name"\s*:\s*"(?P<tool>[^"\\]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*|(?P<reversed>(?=\{\s*"(?:arguments|parameters)"))'
)
"""`{"name": ..., "arguments": ` up to the arguments, which may also come before the name."""
JSON_END = rf"(?:\s*,\s*{_STRING})*\s*\}}"


def read_json(reader: CallReader, head: Any) -> Steps[str]:
    """Read JSON arguments as they are sampled, and the rest of the object around them."""
    groups = head.groupdict()
    if groups.get("reversed") is not None:
        whole = ToolCall("")
        yield from _grow(reader, whole)
        entry = from_json(whole.arguments)
        arguments = entry["arguments" if "arguments" in entry else "parameters"]
        call = reader.begin(entry["name"])
        call.arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        call = reader.begin(head["tool"], groups.get("id"))
        yield from _grow(reader, call)
    check_arguments(call.arguments)
    if groups.get("object"):
        yield from reader.need(JSON_END)
    return ""


def _grow(reader: CallReader, call: ToolCall) -> Steps[None]:
    """Copy text to the arguments until its brackets are closed."""
    start = reader.at
    depth = 0
    is_quoted = False
    while True:
        for piece in _JSON_PIECE.finditer(reader.text, reader.at):
            reader.at = piece.end()
            if piece[0] == '"':
                is_quoted = not is_quoted
            elif not is_quoted:
                depth += (piece[0] in ("{", "[")) - (piece[0] in ("}", "]"))
            if not depth:
                break
        call.arguments = reader.text[start : reader.at]
        if not depth and call.arguments:
            return
        if reader.is_last:
            raise ValueError("a call is cut")
        yield


def tagged(pattern: str, convert: Convert | None = None) -> Read:
    """Read arguments one by one. Groups: `key`, `value`, and `kind`, if the model writes the type."""

    def read(reader: CallReader, head: Any) -> Steps[str]:
        call = reader.begin(head["tool"])
        functions = [each["function"] for each in reader.tools]
        root = next((each.get("parameters") for each in functions if each["name"] == call.name), None)
        keys: set[str] = set()
        call.arguments = "{"
        while found := (yield from reader.match(pattern)):
            key, kind = found["key"], found.groupdict().get("kind")
            if key in keys:
                raise ValueError("an argument is given twice")
            keys.add(key)
            raw = found["value"]
            if kind is not None:
                value = raw if kind in ("true", "string") else from_json(raw)
            else:
                value = (convert or typed)(raw, property_schema(root or {}, key, root), root)
            text = json.dumps({key: value}, ensure_ascii=False)
            check_arguments(text)
            call.arguments += (", " if len(keys) > 1 else "") + text[1:-1]
        return "}"

    return read


# ---- values and schemas

Convert: TypeAlias = Callable[[str, Any, Any], Any]
"""From text, schema of the parameter, and the schema with its definitions."""
_MAX_SCHEMAS = 100
_CHOICES = ("anyOf", "oneOf")
_PYTHON = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\b(?:True|False|None)\b|[()]", re.DOTALL)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}
_ESCAPE = re.compile(r"\\(?:(?P<same>[\"\\/bfnrtu])|x(?P<hex>[0-9a-fA-F]{2})|(?P<other>.))|\"", re.DOTALL)


def from_python(text: str, *_: Any) -> Any:
    """Parse a Python literal, or JSON. Raises ValueError.

    Example: `{'k': [1, None, "it's"]}`.
    """

    def escaped(found: re.Match[str]) -> str:
        if found["hex"]:
            return f"\\u00{found['hex']}"
        if found["other"]:
            return found["other"] if found["other"] == "'" else f"\\\\{found['other']}"
        return found[0] if found["same"] else '\\"'

    def as_json(found: re.Match[str]) -> str:
        token = found[0]
        return _PYTHON_WORDS.get(token) or f'"{_ESCAPE.sub(escaped, token[1:-1])}"'

    if len(text) > 1 and text[0] == text[-1] and text[0] in ("'", '"'):  # quotes inside may not be escaped
        return json.loads(f'"{_ESCAPE.sub(escaped, text[1:-1])}"', strict=False)
    return json.loads(_PYTHON.sub(as_json, text), strict=False)


_GEMMA = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>[^\s{}\[\],:]+)(?=\s*:)|\b(?:True|False|None)\b', re.DOTALL
)


def from_gemma(text: str, *_: Any) -> Any:
    """Parse Gemma 4's values. Raises ValueError. Example: `{k:[1,null,<|"|>x<|"|>]}`."""

    def as_json(found: re.Match[str]) -> str:
        quoted = found["text"] if found["text"] is not None else found["key"]
        return _PYTHON_WORDS[found[0]] if quoted is None else json.dumps(quoted)

    return json.loads(_GEMMA.sub(as_json, text))


def from_minimax(text: str, schema: Any, root: Any) -> Any:
    """Parse MiniMax-M3's nested tags. Example: `]<]minimax[>[<item>1]<]minimax[>[</item>` is [1]."""
    parts = list(_compiled(_MINIMAX_ARGUMENT).finditer(text))
    if not parts:
        return typed(text, schema, root)
    fields: list[tuple[str, Any]] = []
    for part in parts:
        key = part["key"]
        inner = property_schema(schema, None if key == "item" else key, root)
        fields.append((key, from_minimax(part["value"], inner, root)))
    is_list = all(key == "item" for key, _ in fields)
    return [value for _, value in fields] if is_list else dict(fields)


def typed(raw: str, schema: Any, root: Any) -> Any:
    """Return text if the schema allows this text, else the JSON (or Python) value.

    A `null` that the schema allows is None. Without a schema, numbers, words and brackets are JSON, because
    templates write text unquoted.
    """
    is_text = fits(raw, schema, root)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        try:
            value = raw if is_text else from_python(raw)
        except (ValueError, RecursionError):
            return raw
    if isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value)):
        return raw
    is_value = fits(value, schema, root)
    if is_text != is_value:
        return value if is_value else raw
    if is_text:
        is_free = all(fits(each, schema, root) for each in _SAMPLES)
        return value if is_free or value is None else raw
    is_kind = fits(value, schema, root, by_kind=True)
    return value if is_kind and not fits(raw, schema, root, by_kind=True) else raw


_SAMPLES = ("\ufffe", -0.12345, False, None, ["\ufffe"], {"\ufffe": 0})


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "number", float: "number", list: "array"}
    return kinds.get(type(value), "object")


def fits(value: Any, schema: Any, root: Any, *, by_kind: bool = False, left: list[int] | None = None) -> bool:
    """Return whether a schema's types, enums and constants allow a value; `by_kind`: a value of its kind.

    `left` bounds the schemas that are read: definitions may be recursive.
    """
    left = [_MAX_SCHEMAS] if left is None else left
    left[0] -= 1
    if not isinstance(schema, Mapping) or left[0] < 0:
        return schema is not False
    inner = partial(fits, root=root, by_kind=by_kind, left=left)
    kind = _kind(value)
    declared = schema.get("type", kind)
    kinds = declared if isinstance(declared, list) else [declared]
    is_whole = kind == "number" and (by_kind or float(value).is_integer())
    if kind not in kinds and not ("integer" in kinds and is_whole):
        return value is None and schema.get("nullable") is True
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(
        _kind(each) == kind and (by_kind or each == value) for each in allowed
    ):
        return False
    if "$ref" in schema and not inner(value, _resolved(schema["$ref"], root)):
        return False
    if not all(inner(value, each) for each in schema.get("allOf", ())):
        return False
    choices = [schema[key] for key in _CHOICES if schema.get(key)]
    return all(any(inner(value, each) for each in choice) for choice in choices)


def _resolved(ref: Any, root: Any) -> Any:
    """Return the schema of a local `$ref`. Another document's allows anything."""
    found = root if str(ref).startswith("#") else {}
    try:
        for part in str(ref).split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            found = found[int(part) if isinstance(found, list) else part]
    except (KeyError, ValueError, IndexError, TypeError):
        return {}
    return found


def property_schema(schema: Any, key: str | None, root: Any, left: list[int] | None = None) -> Any:
    """Return the schema of a property, of items if the key is None."""
    left = [_MAX_SCHEMAS] if left is None else left
    left[0] -= 1
    if not isinstance(schema, Mapping) or left[0] < 0:
        return {}
    inner = partial(property_schema, key=key, root=root, left=left)
    if key is None:
        found = [schema.get("items", {})]
    else:
        properties = schema.get("properties") or {}
        found = [properties[key] if key in properties else schema.get("additionalProperties", {})]
    if "$ref" in schema:
        found.append(inner(_resolved(schema["$ref"], root)))
    found += [inner(each) for each in schema.get("allOf", ())]
    whole: Any = [] if key is None else {}
    for choice in _CHOICES:
        fitting = [each for each in schema.get(choice) or () if fits(whole, each, root, by_kind=True)]
        if fitting:
            found.append({"anyOf": [inner(each) for each in fitting]})
    return {"allOf": found}


# ---- formats


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Patterns of a block of calls: `open`; for each call `entry` (`then` for further calls), arguments and
    `tail`; `last`. Entries have the group `tool`, and `id` if the model writes ids.

    Example: in `<calls>[f(x=1), g()]</calls>` they are `<calls>[`, `f(`, `, g(`, `)` and `]</calls>`.

    `noise`: pattern of text that is no content, such as heads of channels. `has_channels`: thoughts are
    noise, and templates refuse thoughts sent back.
    """

    name: str = "none"
    open: str = r"(?!)"
    entry: str = ""
    """Empty: `open` has the group."""
    read: Read = read_json
    tail: str = ""
    then: str = ""
    """Empty: a block has one call."""
    last: str = ""
    noise: str = ""
    has_channels: bool = False
    marks: Sequence[str] = ()
    """Markers that may be special tokens."""
    call: str = ""
    """A call of the tool NAME up to its arguments, or with JSON ARGUMENTS. Empty: no call can be forced."""
    close: str | None = None
    taught: str = r"(?!)"
    """Pattern of what a prompt with tools says if its template writes no calls."""
    thinking: Marks = THINKING
    refusal: str = ""

    @property
    def opens(self) -> Sequence[str]:
        """Markers of calls and thoughts."""
        return (*self.marks, *self.thinking)

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """An answer with a malformed call is all text. `tools` give unquoted arguments their types."""
        reader = CallReader(self, tools)
        reader.feed(text, is_last=True)
        return self.parsed(reader, keeps_begun=False)

    def parsed(self, reader: CallReader, *, keeps_begun: bool) -> ParsedAnswer:
        """`keeps_begun`: a malformed call is kept with the arguments so far; no text follows it."""
        if not reader.calls or (reader.is_malformed and not keeps_begun):
            return ParsedAnswer(self._clean(reader.text))
        return ParsedAnswer("".join(reader.content) or None, tuple(reader.calls))

    def steps(self, reader: CallReader) -> Steps[None]:
        """Raises MALFORMED errors."""
        end = 0
        if not self.has_channels:
            reader.at = yield from self._end_of_thought(reader)
        while begun := (yield from reader.search(self.open)):
            reader.content.append(self._clean(reader.text[end : begun.start()]).rstrip())
            reader.at = begun.end()
            head = (yield from reader.need(self.entry)) if self.entry else begun
            while head is not None:
                closing = yield from self.read(reader, head)
                yield from reader.need(self.tail)
                reader.calls[-1].arguments += closing
                head = (yield from reader.match(self.then)) if self.then else None
            yield from reader.need(self.last)
            end = reader.at
        reader.content.append(self._clean(reader.text[end:]).rstrip())

    def _end_of_thought(self, reader: CallReader) -> Steps[int]:
        begin, close = self.thinking
        if reader.is_thinking is not None:
            while not reader.is_last and begin.startswith(reader.text.lstrip()):
                yield
            is_open = reader.is_thinking or reader.text.lstrip().startswith(begin)
            if not is_open:
                return 0
            while not reader.is_last and close not in reader.text:
                yield
        return reader.text.find(close) + 1

    def _clean(self, text: str) -> str:
        if not self.noise:
            return text
        return "".join(part.rstrip() for part in _compiled(self.noise).split(text))

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        """Return (final text from `start` on, the next start). The joined pieces are a prefix of
        parse(...).content.
        """
        begun = _compiled(self.open).search(text, start, partial=True)
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
        marks = self.marks if self.noise else ()
        return ToolFormat(
            noise=self.noise, has_channels=self.has_channels, marks=marks, thinking=self.thinking
        )


USAGE = "parse(text) -> [(name, arguments), ...] or None"


@dataclass(frozen=True, kw_only=True)
class UserFormat(ToolFormat):
    """User-defined `parse(text)` of a whole answer."""

    function: Callable[[str], Any]
    open: str = r"\A"

    def steps(self, reader: CallReader) -> Steps[None]:
        while not reader.is_last:
            yield
        try:
            found = self.function(reader.text)
        except (ValueError, RecursionError):
            return
        except Exception as error:  # user errors are data
            raise self._misused(raised(error)) from error
        try:
            pairs = [(name, arguments) for name, arguments in found or ()]
        except (TypeError, ValueError):
            raise self._misused(f"returned {found!r:.200}") from None
        for name, arguments in pairs:
            call = reader.begin(name)
            call.arguments = json.dumps(arguments, ensure_ascii=False)
            check_arguments(call.arguments)

    def _misused(self, what: str) -> RolloutFailure:
        rule = f"it is called as {USAGE}; a ValueError says that a call is malformed"
        return RolloutFailure(f"gateway.tool_format={self.name} {what}", rule=rule)


# ---- families

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_JSON_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'


def _listed(name: str, begin: str, end: str, **more: Any) -> ToolFormat:
    """Objects of names and arguments, one or several, with or without a list around them."""
    call = f"{begin}[{_JSON_CALL}]{end}"
    given = {"call": call, "close": end, "marks": (begin, end)} | more
    return ToolFormat(
        name=name,
        open=rf"{re.escape(begin)}\s*\[?\s*",
        entry=JSON_HEAD,
        then=rf"[\s,;]*(?:{JSON_HEAD})",
        last=rf"\s*\]?\s*(?:{re.escape(end)}|\Z)",
        **given,
    )


_HERMES = _listed(
    "hermes", OPEN, CLOSE, call=f"{OPEN}\n{_JSON_CALL}\n{CLOSE}", taught=rf'{OPEN}[^<]*"name"[^<]*"arguments"'
)
_GRANITE = _listed(
    "granite",
    "<|tool_call|>",
    "<|end_of_text|>",
    marks=("<|tool_call|>",),
    close=None,
    taught=r"<\|tool_call\|> followed by",
    call=f"<|tool_call|>[{_JSON_CALL}]",
)
_PHI4 = replace(
    _listed("phi4", "<|tool_call|>", "<|/tool_call|>"),
    open=r"(?:<\|tool_call\|>|functools(?=\s*\[))\s*\[?\s*",
    taught=r"<\|tool\|>",
)
_APERTUS_ENTRY = r'(?P<object>\{)\s*"(?P<tool>[^"\\]+)"\s*:\s*'
_APERTUS = replace(
    _listed("apertus", "<|tools_prefix|>", "<|tools_suffix|>"),
    entry=_APERTUS_ENTRY,
    then=rf"\s*,\s*{_APERTUS_ENTRY}",
    call='<|tools_prefix|>[{"NAME": ARGUMENTS}]<|tools_suffix|>',
    thinking=("<|inner_prefix|>", "<|inner_suffix|>"),
)
_COHERE = _listed(
    "cohere",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    call='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}\n]'
    "<|END_ACTION|>",
    marks=[f"<|{side}_{part}|>" for side in ("START", "END") for part in ("ACTION", "RESPONSE", "TEXT")],
    noise=r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",
    thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
)
_LLAMA = ToolFormat(
    name="llama",
    open=r"\A\s*(?=\{)|<\|python_tag\|>\s*",
    entry=JSON_HEAD,
    then=rf"[\s;]*(?:<\|python_tag\|>\s*)?(?:{JSON_HEAD})",
    last=r"[\s;]*\Z",
    marks=("<|python_tag|>",),
    call='{"name": "NAME", "parameters": ARGUMENTS}',
)
_QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    open=rf"{OPEN}\s*(?=<function=)",
    entry=r"<function=(?P<tool>[^>\n]+)>",
    read=tagged(
        r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
    ),
    tail=r"\s*</function>",
    last=rf"\s*(?:{CLOSE}|\Z)",
    marks=(OPEN, CLOSE),
    call=f"{OPEN}\n<function=NAME>",
    close=CLOSE,
)
_SEED_MARKS = ("<seed:tool_call>", "</seed:tool_call>")
_SEED = replace(
    _QWEN3_CODER,
    name="seed_oss",
    open=r"<seed:tool_call>\s*",
    read=tagged(
        r"\s*<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|</function>))"
    ),
    last=r"\s*(?:</seed:tool_call>|\Z)",
    marks=_SEED_MARKS,
    call="<seed:tool_call>\n<function=NAME>",
    close=_SEED_MARKS[1],
    thinking=("<seed:think>", "</seed:think>"),
)
_GLM = ToolFormat(
    name="glm",
    open=OPEN,
    entry=r"\s*(?P<tool>[^\s<{]+)",
    read=tagged(
        r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        r"(?=\s*(?:<arg_key>|</tool_call>|\Z))"
    ),
    last=rf"\s*{CLOSE}|\n\s*\Z|(?<=</arg_value>)\Z",  # a name that was cut off is no call
    marks=(OPEN, CLOSE),
    call=f"{OPEN}NAME",
    close=CLOSE,
)
_KIND = r"(?::\w+)?"
_HUNYUAN_ENTRY = rf"<tool_call{_KIND}>\s*(?P<tool>[^\s<]+)\s*<tool_sep{_KIND}>"
_HUNYUAN = ToolFormat(
    name="hunyuan",
    open=rf"<tool_calls{_KIND}>\s*",
    entry=_HUNYUAN_ENTRY,
    then=rf"\s*{_HUNYUAN_ENTRY}",
    read=tagged(
        rf"\s*<arg_key{_KIND}>(?P<key>.*?)</arg_key{_KIND}>\s*<arg_value{_KIND}>(?P<value>.*?)"
        rf"</arg_value{_KIND}>(?=\s*(?:<arg_key{_KIND}>|</tool_call{_KIND}>))"
    ),
    tail=rf"\s*</tool_call{_KIND}>",
    last=rf"\s*(?:</tool_calls{_KIND}>|\Z)",
)


def _invoked(name: str, block: str, prefix: str = "", **more: Any) -> ToolFormat:
    """Elements `invoke` and `parameter` in a block; `string="true"` marks text."""
    entry = rf'<{prefix} ?invoke name="?(?P<tool>[^">]+)"?>'
    return ToolFormat(
        name=name,
        open=rf"<{block}>\s*",
        entry=entry,
        then=rf"\s*{entry}",
        read=tagged(
            rf'\s*<{prefix} ?parameter name="?(?P<key>[^">]+)"?(?: string="(?P<kind>\w+)")?>(?P<value>.*?)'
            rf"</{prefix} ?parameter>(?=\s*(?:<{prefix} ?parameter|</{prefix} ?invoke>))"
        ),
        tail=rf"\s*</{prefix} ?invoke>",
        last=rf"\s*(?:</{block}>|\Z)",
        **more,
    )


_MINIMAX_M2 = _invoked(
    "minimax_m2",
    "minimax:tool_call",
    call='<minimax:tool_call>\n<invoke name="NAME">',
    close="</minimax:tool_call>",
    marks=("<minimax:tool_call>", "</minimax:tool_call>"),
)
_DSML = _invoked(
    "deepseek_dsml", "｜DSML｜ ?(?:function_|tool_)?calls", "｜DSML｜", marks=("｜DSML｜",), call="<｜DSML｜"
)
MINIMAX = "]<]minimax[>["
_MINIMAX = re.escape(MINIMAX)
_MINIMAX_ARGUMENT = (
    rf"\s*{_MINIMAX}<(?P<key>[^>/\s]+)>(?P<value>(?:(?!{_MINIMAX}<).|{_MINIMAX}<[^>/]+>(?&value){_MINIMAX}</[^>]+>)*+)"
    rf"{_MINIMAX}</(?P=key)>"
)
_MINIMAX_ENTRY = rf'{_MINIMAX}<invoke name="(?P<tool>[^"]+)">'
_MINIMAX_M3 = ToolFormat(
    name="minimax_m3",
    open=rf"{_MINIMAX}{OPEN}\s*",
    entry=_MINIMAX_ENTRY,
    then=rf"\s*{_MINIMAX_ENTRY}",
    read=tagged(_MINIMAX_ARGUMENT, from_minimax),
    tail=rf"\s*{_MINIMAX}</invoke>",
    last=rf"\s*(?:{_MINIMAX}{CLOSE}|(?:{_MINIMAX})?\Z)",  # a stop text cuts before CLOSE
    marks=(MINIMAX, OPEN, CLOSE),
    call=f'{MINIMAX}{OPEN}\n{MINIMAX}<invoke name="NAME">',
    close=CLOSE,
    thinking=("<mm:think>", "</mm:think>"),
)
_PYTHON_END = r"(?=\s*(?:,\s*\w+\s*=|\)\s*[\],\n<]|\)\s*\Z))"
_PYTHON_ARGUMENT = (
    r"\s*(?P<key>\w+)\s*=\s*(?P<value>"
    rf"'.*?'{_PYTHON_END}|\".*?\"{_PYTHON_END}|(?:'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"|[^\s'\"()\[\]{{}},]"
    r"|[\[({](?:(?:\s|,)*+(?&value))*+(?:\s|,)*+[\])}]|(?<=[^\s,])\s+(?=[^\s,)\]}]))++)\s*(?:,|(?=\)))"
)
_LFM2 = ToolFormat(
    name="lfm2",
    open=r"<\|tool_call_start\|>\s*\[?\s*",
    entry=r"(?P<tool>[\w.-]+)\(",
    then=r"\s*,?\s*(?P<tool>[\w.-]+)\(",
    read=tagged(_PYTHON_ARGUMENT, from_python),
    tail=r"\s*\)",
    last=r"\s*\]?\s*(?:<\|tool_call_end\|>|\Z)",
    marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    call="<|tool_call_start|>[NAME(",
    close="<|tool_call_end|>",
    taught=r"<\|tool_list_start\|>|List of tools: \[",
)
_PYTHONIC = replace(
    _LFM2,
    name="pythonic",
    open=r"(?:\A\s*|```tool_code\s*)\[?(?=[\w.]+\()",
    last=r"\s*\]?\s*(?:```|\Z)",
    marks=(),
    call="[NAME(",
    close=None,
    taught=r"(?!)",
)
"""Gemma 3 and Llama 4 with templates that write such calls."""
_GEMMA_ARGUMENT = (
    r"\s*(?P<key>[^\s{}\[\],:]+)\s*:\s*(?P<value>(?:<\|\"\|>.*?<\|\"\|>|(?!<\|\"\|>)[^\[\]{},]"
    r"|[\[{](?:[\s,]*+(?:[^\s{}\[\],:]+\s*:\s*)?(?&value))*+[\s,]*+[\]}])++)\s*(?:,|(?=\}))"
)
_GEMMA4 = ToolFormat(
    name="gemma4",
    open=r"<\|tool_call>\s*",
    entry=r"call:\s*(?P<tool>[\w.-]+)\s*\{",
    read=tagged(_GEMMA_ARGUMENT, from_gemma),
    tail=r"\s*\}",
    last=r"\s*(?:<tool_call\|>|\Z)",
    marks=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    call="<|tool_call>call:NAME{",
    close="<tool_call|>",
    thinking=("<|channel>thought", "<channel|>"),
)
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_BEGIN = f"<｜tool▁calls▁begin｜>{_CALL_BEGIN}"
_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_DEEPSEEK_ENTRY = (
    rf"(?:{_CALL_BEGIN}function<｜tool▁sep｜>(?=[^\s{{]))?+(?:{_CALL_BEGIN})?+"
    r"(?P<tool>[^\s<]+)(?:<｜tool▁sep｜>|\s*```json)\s*"
)
_DEEPSEEK = ToolFormat(
    name="deepseek",
    open=rf"(?:<｜tool▁calls▁begin｜>\s*)?(?={_CALL_BEGIN})",
    entry=_DEEPSEEK_ENTRY,
    then=rf"\s*(?={_CALL_BEGIN}){_DEEPSEEK_ENTRY}",
    tail=r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>|\Z)",
    last=r"\s*(?:<｜tool▁calls▁end｜>|(?=[^\s<])|\Z)",
    marks=[f"<｜tool▁{part}｜>" for part in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")],
    call=f"{_BEGIN}NAME<｜tool▁sep｜>ARGUMENTS{_END}",
    close="<｜tool▁call▁end｜>",
)
"""V3.1: the name, then JSON. V3 and R1: `function`, then the name and a JSON block."""
_DEEPSEEK_V3 = replace(_DEEPSEEK, call=f"{_BEGIN}function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```{_END}")
_KIMI_CALL = "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
_KIMI_PARTS = ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
_KIMI_ENTRY = (
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<tool>[^\s:<]+)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>\s*"
)
_KIMI = ToolFormat(
    name="kimi",
    open=r"(?:<\|tool_calls_section_begin\|>\s*)?(?=<\|tool_call_begin\|>)",
    entry=_KIMI_ENTRY,
    then=rf"\s*{_KIMI_ENTRY}",
    tail=r"\s*(?:<\|tool_call_end\|>|\Z)",
    last=r"\s*(?:<\|tool_calls_section_end\|>|(?=[^\s<])|\Z)",
    marks=[f"<|tool_call{part}|>" for part in _KIMI_PARTS],
    call=f"<|tool_calls_section_begin|>{_KIMI_CALL}<|tool_calls_section_end|>",
    close="<|tool_call_end|>",
)
_MISTRAL = ToolFormat(
    name="mistral",
    open=r"\[TOOL_CALLS\]\s*\[?\s*",
    entry=rf"{JSON_HEAD}|(?P<tool>[\w.-]+)(?:\[CALL_ID\](?P<id>\w*))?(?:\[ARGS\])?\s*(?=\{{)",
    then=rf"[\s,;]*(?:{JSON_HEAD})",
    last=r"\s*\]|(?=\s*[^\s\]])|\s*\Z",
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    call=f"[TOOL_CALLS][{_JSON_CALL}]",
)
_MISTRAL_V11 = replace(_MISTRAL, call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", thinking=("[THINK]", "[/THINK]"))
_SOLAR_ENTRY = r"<\|tool_call:begin\|>(?P<id>[^<]*)<\|tool_call:name\|>(?P<tool>[^<]+)<\|tool_call:args\|>\s*"
_SOLAR = ToolFormat(
    name="solar",
    open=r"<\|tool_calls\|>\s*",
    entry=_SOLAR_ENTRY,
    then=rf"\s*{_SOLAR_ENTRY}",
    tail=r"\s*(?:<\|tool_call:end\|>|\Z)",
    marks=("<|tool_calls|>", *(f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end"))),
)
_FUNCTIONARY = ToolFormat(
    name="functionary",
    open=r"(?=<function=)",
    entry=r"<function=(?P<tool>[^>]+)>\s*",
    tail=r"\s*(?:</function>|\Z)",
    call="<function=NAME>ARGUMENTS</function>",
)
_GIGACHAT = ToolFormat(
    name="gigachat",
    open=r"(?:<\|function_call\|>|function call<\|role_sep\|>)\s*",
    entry=JSON_HEAD,
    marks=("<|function_call|>", "<|role_sep|>"),
    call=f"<|function_call|>{_JSON_CALL}",
)
_MINICPM = ToolFormat(
    name="minicpm",
    open=r'(?=<function name=")',
    entry=r'<function name="(?P<tool>[^"]+)">',
    read=tagged(
        r'\s*<param name="(?P<key>[^"]+)">(?:<!\[CDATA\[(?P<value>.*?)\]\]>|(?P<value>.*?))</param>'
        r"(?=\s*(?:<param |</function>))"
    ),
    tail=r"\s*</function>",
    call='<function name="NAME">',
)
_START = r"(?:\A|<\|start\|>assistant)"
_END_OF_MESSAGE = r"(?:<\|(?:end|return|call)\|>|(?=<\|start\|>assistant)|\Z)"
_CONSTRAINED = r"(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?"
_GPT_OSS = ToolFormat(
    name="gpt_oss",
    open=rf"{_START}[^<]*(?:<\|channel\|>[^<]*)?\bto=functions\.(?P<tool>[\w.-]+)"
    rf"[^<]*{_CONSTRAINED}<\|message\|>\s*",
    last=_END_OF_MESSAGE,
    noise=rf"{_START}\s*<\|channel\|>analysis\s*<\|message\|>.*?{_END_OF_MESSAGE}"
    rf"|{_START}\s*{_CONSTRAINED}<\|message\|>"
    r"|<\|(?:end|return|call|channel|constrain|start|message)\|>",
    has_channels=True,
    marks=[f"<|{name}|>" for name in "end return call channel constrain start message".split()],
    call=" to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS",
    thinking=("<|channel|>analysis<|message|>", "<|end|>"),
)

FAMILIES: Sequence[ToolFormat] = [
    replace(_HERMES, call=f"{OPEN}[\n{_JSON_CALL}\n]{CLOSE}"),  # SmolLM2
    _HERMES,
    _QWEN3_CODER,
    _GLM,
    _GPT_OSS,
    _LLAMA,
    _DEEPSEEK_V3,
    _DEEPSEEK,
    _DSML,
    _KIMI,
    _MISTRAL_V11,
    _MISTRAL,
    _MINIMAX_M2,
    _MINIMAX_M3,
    _SEED,
    _GEMMA4,
    _LFM2,
    _PHI4,
    _GRANITE,
    _COHERE,
    _APERTUS,
    _HUNYUAN,
    _SOLAR,
    _FUNCTIONARY,
    _GIGACHAT,
    _MINICPM,
    _listed("nemotron_nano", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("minimax_m1", "<tool_calls>", "</tool_calls>", call=f"<tool_calls>\n{_JSON_CALL}\n</tool_calls>"),
    _listed("apriel", "<tool_calls>", "</tool_calls>"),
    _PYTHONIC,
]


# ---- which format a template writes

_QUESTION = {"role": "user", "content": "Question?"}
_THOUGHT = "Some thought."
_SAID = "Some answer."
_CALLS = (
    ("probe", {"text": 'a "b"\nc', "number": 3, "object": {"list": [1, "x"], "flag": True}}),
    ("probe_2", {"number": 4}),
)
_PROBE_TYPES = {"text": "string", "number": "integer", "object": "object"}
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": _PROBE_TYPES[key], "description": "A value."} for key in arguments
                },
                "required": list(arguments),
            },
        },
    }
    for name, arguments in _CALLS
]


class TemplateProbe:
    """What a chat template writes. Raises ConfigError for a template that is not Jinja."""

    def __init__(self, template: str) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            self._template = _compile_jinja_template(template)
        except Exception as error:  # of Jinja
            raise ConfigError(f"the chat template cannot be read: {error}") from None
        self.why = ""
        """Why it wrote nothing the last time."""

    def render(self, *answer: Mapping[str, Any], tools: Tools = (), is_open: bool = False) -> str:
        try:
            return str(
                self._template.render(
                    messages=[_QUESTION, *answer],
                    tools=list(tools) or None,
                    add_generation_prompt=is_open,
                    bos_token="<bos>",
                    eos_token="<eos>",
                )
            )
        except Exception as error:  # templates raise what they like
            self.why = f": it fails with {type(error).__name__}: {error}"[:200]
            return ""

    def answer(self, *answer: Mapping[str, Any], tools: Tools = ()) -> str:
        """Return what a model would have sampled, with the end of the turn."""
        whole = self.render(*answer, tools=tools)
        prompt = self.render(tools=tools, is_open=True)
        shared = os.path.commonprefix([whole, prompt])
        if shared != prompt:
            shared = re.sub(r"[<\[][^<>\[\]]*\Z", "", shared)  # no half of a mark
        return whole[len(shared) :]

    def called(self, num_calls: int, *, as_text: bool = False, own_id: str = "probe000{number}") -> str:
        """Return an answer of calls, without the end of the turn; empty if the template leaves them out."""
        calls = []
        for number, (name, arguments) in enumerate(_CALLS[:num_calls]):
            function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
            call_id = own_id.format(name=name, number=number)
            call = {"type": "function", "id": call_id, "function": function}
            calls.append(call)
        text = self.answer({"role": "assistant", "content": "", "tool_calls": calls}, tools=_PROBE_TOOLS)
        said = self.answer({"role": "assistant", "content": _SAID}, tools=_PROBE_TOOLS)
        end = os.path.commonprefix([text[::-1], said.partition(_SAID)[2][::-1]])[::-1]
        end = re.sub(r"\A[^<>]*>", "", end)
        return text.removesuffix(end) if _CALLS[0][0] in text else ""


_WAYS: Sequence[Mapping[str, Any]] = ({}, {"as_text": True}, {"own_id": "functions.{name}:{number}"})
"""What templates want a call to be. Kimi's write the id instead of the name."""


def _reads(tool_format: ToolFormat, text: str, num_calls: int) -> bool:
    calls = tool_format.parse(text, _PROBE_TOOLS).tool_calls
    found = [(call.name, json.loads(call.arguments)) for call in calls]
    return found == list(_CALLS[:num_calls])


def _written(probe: TemplateProbe, fitting: Sequence[ToolFormat]) -> ToolFormat | None:
    """Return the first format that reads what the template writes; None if none does."""
    for number, way in itertools.product((2, 1), _WAYS):  # some templates write only one call, or fail
        if text := probe.called(number, **way):
            reading = [each for each in fitting if _reads(each, text, number)]
            for tool in (_CALLS[0][0], None):
                forcing = [each for each in reading if (each.prefill(tool) or "") in text]
                if forcing:
                    return forcing[0]
            if reading:
                return replace(reading[0], call="")
    return None


def _thinking(probe: TemplateProbe, known: Marks) -> Marks:
    """Return the marks that the template writes around a thought, `known` if it writes none."""
    message = {"role": "assistant", "content": _SAID}
    thoughts = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), _THOUGHT)
    text = probe.render({**message, **thoughts}) or probe.render({**message, "reasoning_content": _THOUGHT})
    before, found, after = text.partition(_THOUGHT)
    if not found:
        before = probe.render(is_open=True)
    if before.rstrip().endswith(known[0]):
        return known
    mark = r"(?:<\|?[^<>\s|]+\|?>|\[[A-Z_]+\])"
    begin = re.search(rf"({mark})\s*\Z", before)
    end = re.match(rf"\s*({mark})", after)
    return (begin[1], end[1]) if begin and end and "think" in begin[1].lower() else known


def find_tool_format(name: str, template: str) -> ToolFormat:
    """Return the format `name`; auto: the first that reads a call which the chat template writes.

    If no format reads the template's calls, `refusal` says why, for requests with tools. Raises ConfigError.
    """
    if ":" in name:
        function = load_function(name, "gateway.tool_format", usage=USAGE, arguments=("",))
        return UserFormat(name=name, function=function)
    names = dict.fromkeys(each.name for each in FAMILIES)
    known = ", ".join(names)
    if name not in (*names, "auto", "none"):
        way_out = f"set it to auto, {known}, none, or module:function of a parser of your own."
        raise ConfigError(f"gateway.tool_format={name} is not known", way_out=way_out)
    fitting = [each for each in FAMILIES if name in ("auto", each.name)]
    default = ToolFormat() if name in ("auto", "none") else fitting[-1]
    if not template:
        return default
    probe = TemplateProbe(template)
    prompt = probe.render(tools=_PROBE_TOOLS, is_open=True)
    called = probe.called(1) or probe.called(1, as_text=True)
    tool_format = _written(probe, fitting) if called else None
    refusal = ""
    if _CALLS[0][0] not in prompt:
        refusal = f"the chat template never mentions `tools`, so the model would not see them{probe.why}"
    elif tool_format is None and not called:
        taught = [each for each in fitting if re.search(each.taught, prompt)]
        tool_format = (taught or [default])[0]
    if refusal:
        refusal += ". Set model.chat_template to another Jinja file."
    elif tool_format is None or tool_format.name == "none":
        refusal = (
            f"gateway.tool_format={name} cannot read a tool call of this chat template, which writes "
            f"{called!r:.300}{probe.why}. Set it to {known}, or module:function of a parser, or set model.chat_template."
        )
    tool_format = tool_format or default
    return replace(tool_format, refusal=refusal, thinking=_thinking(probe, tool_format.thinking))
