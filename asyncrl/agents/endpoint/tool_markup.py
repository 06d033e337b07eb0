"""Parsers of tool calls: JSON, tagged text, Python."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic_core import from_json

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""`{"type": "function", "function": {"name": ..., "parameters": {...}}}` by tool."""

SPACE = re.compile(r"[ \t\n\r]*")
MALFORMED = (ValueError, TypeError, KeyError, RecursionError)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: JSON text of an object."""

    name: str
    arguments: str


ReadArguments: TypeAlias = Callable[[str, int, Mapping[str, Any]], tuple[dict[str, Any], int]]
"""(text, start, schema) -> (arguments, end)."""
ReadCalls: TypeAlias = Callable[[str, int, Tools], tuple[list[ToolCall], int]]
"""(text, start, tools) -> (calls, end)."""


def read_json(text: str, at: int) -> tuple[Any, int]:
    value, end = _DECODER.raw_decode(text, skip(SPACE, text, at))
    return value, skip(SPACE, text, end)


def skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


# ---- calls

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def make_call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise ValueError("a call needs the name of a tool and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    from_json(text)  # no lone surrogates, limited depth
    return ToolCall(name, text)


def call_of(value: Any, keys: Sequence[str]) -> ToolCall:
    """Return the call `{"name": ..., KEY: {...}}` with a key of `keys`."""
    (arguments,) = [value[key] for key in keys if key in value]
    return make_call(value.get("name"), arguments)


def json_calls(end: str) -> ReadCalls:
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
    """Read calls that begin with their name. Patterns: `head` has a group `name`, `tail` ends a call,
    `between` separates calls, `end` follows the last.
    """
    heads, tails, ends = map(re.compile, (head, tail, end))
    gaps = None if between is None else re.compile(between)

    def read(text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        begun = heads.match(text, skip(SPACE, text, at))
        while begun:
            functions = [tool.get("function", tool) for tool in tools]
            schemas = [each.get("parameters") for each in functions if each.get("name") == begun["name"]]
            schema = schemas[0] if schemas and isinstance(schemas[0], Mapping) else {}
            arguments, at = read_arguments(text, begun.end(), schema)
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
        raise ValueError(f"a call does not continue with {pattern.pattern}")
    return found.end()


# ---- arguments


def json_arguments(text: str, at: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    value, end = read_json(text, at)
    return value, end


def tagged(pattern: str) -> ReadArguments:
    """Read tagged arguments. Groups: `key`, `value`, optionally `string` ("true": text)."""
    arguments = re.compile(pattern, re.DOTALL)

    def read(text: str, at: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while match := arguments.match(text, at):
            at = match.end()
            groups = match.groupdict()
            key, raw = groups["key"], groups["value"]
            if key in found:
                raise ValueError("an argument is given twice")
            found[key] = raw if groups.get("string") == "true" else typed(raw, key, schema)
        return found, at

    return read


def rewritten(tokens: str, outer: str = "") -> ReadArguments:
    """Read `{key:value}` or `(key=value)` by rewriting its tokens to JSON.

    `tokens`: pattern of strings (group `raw`, or `escaped` with Python escapes) and unquoted keys (`key`).
    `outer`: tokens outside of lists and objects.
    """
    inner = rf"[ \t\n\r]+|{tokens}|(?P<word>[-+.\w]+)|(?P<mark>[{{}}()\[\],:=])"
    in_depth = re.compile(inner, re.DOTALL)
    at_top = re.compile(f"{outer}|{inner}", re.DOTALL) if outer else in_depth

    def read(text: str, at: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        pieces: list[str] = []
        depth = 0
        while depth or not pieces:
            match = (at_top if depth == 1 else in_depth).match(text, at)
            if match is None:
                raise ValueError("the arguments do not end")
            at = match.end()
            kind = match.lastgroup or ""
            token = match[kind] if kind else ""
            if kind == "mark":
                depth += (token in "{([") - (token in "})]")
            pieces.append(_REWRITE[kind](token) if kind in _REWRITE else _AS_JSON.get(token, token))
        return json.loads("".join(pieces), strict=False, object_pairs_hook=_unique), at

    return read


_AS_JSON = {"(": "{", ")": "}", "=": ":", "True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|.)|\"", re.DOTALL)


def _escaped(text: str) -> str:
    return f'"{_ESCAPE.sub(_escape, text)}"'


def _escape(found: re.Match[str]) -> str:
    escape = found[1] or '"'
    if len(escape) > 1:
        return json.dumps(chr(int(escape[1:], 16)))[1:-1]
    return f"\\{escape}" if escape in '"\\/bfnrtu' else "'" if escape == "'" else f"\\\\{escape}"


_REWRITE: Mapping[str, Callable[[str], str]] = {"raw": json.dumps, "key": json.dumps, "escaped": _escaped}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return found


# ---- types of unquoted arguments

MAX_SCHEMAS = 64
_TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}


def typed(raw: str, key: str, schema: Mapping[str, Any]) -> Any:
    """Parse `raw` as JSON if the parameter's type allows it; otherwise it is text.

    Without a type, quoted strings stay text, because templates write text unquoted.
    """
    properties = schema.get("properties")
    types = _types(properties.get(key), schema) if isinstance(properties, Mapping) else set()
    if types == {"string"}:
        return raw
    try:
        value = json.loads(_AS_JSON.get(raw.strip(), raw) if types else raw)
    except (ValueError, RecursionError):
        return raw
    if isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value)):
        return raw
    found = _TYPES[type(value)]
    if found == "number" and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
    return value if not types or found in types or (found == "integer" and "number" in types) else raw


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    waiting = [schema]
    for _ in range(MAX_SCHEMAS):
        if not waiting:
            return found
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        declared = part.get("type") or []
        found.update([declared] if isinstance(declared, str) else declared)
        if not declared:
            values = part.get("enum") or [part[key] for key in ("const",) if key in part]
            found.update(_TYPES.get(type(value), "string") for value in values[:MAX_SCHEMAS])
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += (part.get(key) or [])[:MAX_SCHEMAS]
        if isinstance(path := part.get("$ref"), str):
            waiting.append(_at_path(root, path))
    return set()


def _at_path(root: Any, path: str) -> Any:
    for step in path.split("/")[1:]:
        root = root.get(step) if isinstance(root, Mapping) else None
    return root
