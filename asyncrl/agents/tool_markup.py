"""Parse tool calls and their arguments as models write them: JSON, tagged text, Python."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, TypeAlias

from pydantic_core import from_json

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tools of a call: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""
ReadArguments: TypeAlias = Callable[[str, int, Mapping[str, Any]], tuple[dict[str, Any], int]]
"""(text, start of the arguments, schema of the parameters) -> (arguments, end). Raises MALFORMED errors."""

MAX_SCHEMAS = 64
"""Limit on the parts of a parameter's schema searched for its type."""

SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
MALFORMED = (ValueError, TypeError, RecursionError)
"""Errors of text that is no tool call and stays text."""


def read_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at `at`, and the start of the following text."""
    value, end = _DECODER.raw_decode(text, skip(SPACE, text, at))
    return value, skip(SPACE, text, end)


def skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the pattern's match at `at`, or `at` without a match."""
    found = pattern.match(text, at)
    return found.end() if found else at


def json_arguments(text: str, at: int, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    value, end = read_json(text, at)
    return value, end


# ---- types of unquoted arguments


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the JSON schema of the tool's arguments, or an empty one."""
    functions = [tool.get("function", tool) for tool in tools]
    found = [each.get("parameters") for each in functions if each.get("name") == name]
    return found[0] if found and isinstance(found[0], Mapping) else {}


_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}


def typed(raw: str, key: str, parameters: Mapping[str, Any]) -> Any:
    """Return the value of `raw` by the schema: JSON of one of the parameter's types, otherwise text.

    Without a type in the schema, valid JSON is parsed except quoted strings, because templates write text
    unquoted. True, False and None count as JSON only if the schema has their type.
    """
    properties = parameters.get("properties")
    types = _types(properties.get(key), parameters) if isinstance(properties, Mapping) else set()
    if types == {"string"}:
        return raw
    try:
        value = json.loads(_PYTHON.get(raw.strip(), raw) if types else raw)
    except (ValueError, RecursionError):
        return raw
    if isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value)):
        return raw
    kind = _KINDS[type(value)]
    if kind == "number" and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
    return value if not types or kind in types or (kind == "integer" and "number" in types) else raw


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; empty if it is silent or too long."""
    found: set[str] = set()
    waiting = [schema]
    for _ in range(MAX_SCHEMAS):
        if not waiting:
            return found
        each = waiting.pop()
        if not isinstance(each, Mapping):
            continue
        declared = each.get("type")
        several = declared if isinstance(declared, list) else [declared]
        found.update(one for one in several if isinstance(one, str))
        values = [*(each.get("enum") or ()), *([each["const"]] if "const" in each else ())]
        if declared is None:
            found.update(_KINDS.get(type(value), "string") for value in values[:MAX_SCHEMAS])
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += (each.get(key) or ())[:MAX_SCHEMAS]
        if isinstance(path := each.get("$ref"), str):
            waiting.append(_at_path(root, path))
        found.update(["null"] * (each.get("nullable") is True))
    return set()


def _at_path(root: Any, path: str) -> Any:
    """Return the schema at a path such as "#/$defs/Color", or None."""
    for step in path.split("/")[1:]:
        root = root.get(step) if isinstance(root, Mapping) else None
    return root


def tagged(pattern: str) -> ReadArguments:
    """Return a reader of arguments between tags. Groups: `key`, `value`, and optionally `string` ("true":
    the value is text). Values have the schema's types.
    """
    arguments = re.compile(pattern, re.DOTALL)

    def read(text: str, at: int, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while match := arguments.match(text, at):
            groups, at = match.groupdict(), match.end()
            key, raw = groups["key"], groups["value"]
            if key in found:
                raise ValueError("an argument is given twice")
            found[key] = raw if groups.get("string") == "true" else typed(raw, key, parameters)
        return found, at

    return read


# ---- values of JSON-like languages


class Values:
    """Values of a language like JSON: `strings` are (pattern, conversion of its match), `key` a pattern of
    unquoted keys. `outer`: the strings of arguments, if lists and objects use others.
    """

    def __init__(
        self, strings: Sequence[tuple[str, Callable[[str], str]]], key: str, *, outer: str | None = None
    ) -> None:
        self._strings = [(re.compile(pattern, re.DOTALL), convert) for pattern, convert in strings]
        self._key = re.compile(key)
        self._outer = [(re.compile(outer, re.DOTALL), str), *self._strings] if outer else self._strings

    def arguments(self, text: str, at: int, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Read `{key:value}` or `(key=value)`, as ReadArguments."""
        is_object = text.startswith("{", at)
        end, colon = ("}", ":") if is_object else (")", "=")
        return self._members(text, at + 1, end, colon, self._outer)

    def _members(self, text: str, at: int, end: str, colon: str, strings: Any) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = skip(SPACE, text, at)
        while not text.startswith(end, at):
            at = self._comma(text, at) if found else at
            key, at = self._string(text, at, self._strings)
            if key is None:
                match = self._key.match(text, at)
                if not match:
                    raise ValueError("an argument has no name")
                key, at = match[0], match.end()
            at = skip(SPACE, text, at)
            if key in found or not text.startswith(colon, at):
                raise ValueError("an argument is given twice, or has no value")
            found[key], at = self._value(text, at + len(colon), strings)
        return found, at + len(end)

    def _comma(self, text: str, at: int) -> int:
        if not text.startswith(",", at):
            raise ValueError("values are parted by commas")
        return skip(SPACE, text, at + 1)

    def _value(self, text: str, at: int, strings: Any) -> tuple[Any, int]:
        at = skip(SPACE, text, at)
        value: Any
        if text.startswith("{", at):
            value, at = self._members(text, at + 1, "}", ":", self._strings)
        elif text.startswith("[", at):
            value, at = [], skip(SPACE, text, at + 1)
            while not text.startswith("]", at):
                each, at = self._value(text, self._comma(text, at) if value else at, self._strings)
                value.append(each)
            at += 1
        else:
            value, at = self._string(text, at, strings)
            if value is None:
                word = _WORD.match(text, at)
                value, at = _word(word), word.end() if word else at
        return value, skip(SPACE, text, at)

    def _string(self, text: str, at: int, strings: Any) -> tuple[str | None, int]:
        for pattern, convert in strings:
            if match := pattern.match(text, at):
                return convert(match[1]), match.end()
        return None, at


_WORD = re.compile(r"[-+.\w]+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def _word(word: re.Match[str] | None) -> Any:
    if word is None:
        raise ValueError("a value is missing")
    return _WORDS[word[0]] if word[0] in _WORDS else json.loads(word[0])


def python_string(quoted: str) -> str:
    """Return the text of a Python string in either quotes. Escapes unknown to JSON stay unchanged."""
    text = re.sub(r"\\(x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|.)|\"", _as_json, quoted, flags=re.DOTALL)
    value: str = scanstring(f'{text}"', 0, False)[0]
    return value


def _as_json(found: re.Match[str]) -> str:
    if found[1] is None:
        return '\\"'
    if len(found[1]) > 1:
        return json.dumps(chr(int(found[1][1:], 16)))[1:-1]
    return found[0] if found[1] in '"\\/bfnrtu' else found[1] if found[1] == "'" else f"\\\\{found[1]}"


# ---- calls

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str


ReadCalls: TypeAlias = Callable[[str, int, Tools], tuple[list[ToolCall], int]]
"""(text, end of a marker of calls, tools) -> (calls, end). Raises MALFORMED errors."""


def call_of(value: Any, keys: Sequence[str]) -> ToolCall:
    """Return the call `{"name": ..., KEY: {...}}`, whose arguments are under some key of `keys`."""
    (arguments,) = [value[key] for key in keys if key in value]
    return make_call(value.get("name"), arguments)


def make_call(name: Any, arguments: Any) -> ToolCall:
    """Return a call that a harness can read and send back."""
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise ValueError("a call needs the name of a tool, and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    from_json(text)  # as at its return: no lone surrogates, limited depth
    return ToolCall(name, text)


def json_calls(end: str) -> ReadCalls:
    """Return a reader of JSON objects with name and arguments, or lists of them; `end`: pattern after
    them.
    """
    ends = re.compile(end)

    def read(text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while not calls or text.startswith(("{", "["), at):
            value, at = read_json(text, at)
            several = value if isinstance(value, list) else [value]
            calls += [call_of(each, ("arguments",)) for each in several]
            if not several:
                break
        return calls, _after(ends, text, at)

    return read


def named_calls(
    head: str, read_arguments: ReadArguments, tail: str, *, between: str | None = None, end: str = ""
) -> ReadCalls:
    """Return a reader of calls that begin with their name. Patterns: `head` has a group `name`, `tail`
    ends a call, `between` separates calls (None: a single call), `end` follows the last.
    """
    heads, tails, ends = re.compile(head), re.compile(tail), re.compile(end)
    gaps = None if between is None else re.compile(between)

    def read(text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        begun = heads.match(text, skip(SPACE, text, at))
        while begun:
            arguments, at = read_arguments(text, begun.end(), parameters_of(tools, begun["name"]))
            calls.append(make_call(begun["name"], arguments))
            at = _after(tails, text, at)
            gap = gaps and gaps.match(text, at)
            begun = heads.match(text, gap.end()) if gap else None
        if not calls:
            raise ValueError("there is no call after the marker")
        return calls, _after(ends, text, at)

    return read


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"a call does not go on with {pattern.pattern}")
    return found.end()
