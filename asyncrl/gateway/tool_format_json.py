"""Reads tool calls that are JSON objects, keeping the exact text of their arguments. Knows no markers around them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from asyncrl.gateway.errors import ApiError
from asyncrl.gateway.messages import check_bounded
from asyncrl.gateway.tool_format import ToolCall

TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
"""What a tool may be called; a call of anything else could not be sent back."""

_SPACE = re.compile(r"[ \t\n\r]*")


class MalformedCall(ValueError):  # noqa: N818  what a model writes, and no failure of ours
    """What the model wrote is no tool call. It stays text."""


@dataclass(frozen=True, slots=True)
class Member:
    """Value of a key, and where its text is."""

    value: Any
    start: int
    end: int


def skip_space(text: str, at: int) -> int:
    """Where the next thing is."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def read_calls(text: str, at: int, keys: Sequence[str]) -> tuple[list[ToolCall], int]:
    """The call at `at`, or the list of calls, and where it ends. Raises MalformedCall."""
    at = skip_space(text, at)
    if not text.startswith("[", at):
        call, at = read_call(text, at, keys)
        return [call], at
    calls: list[ToolCall] = []
    at = skip_space(text, at + 1)
    if text.startswith("]", at):
        return calls, at + 1
    while True:
        call, at = read_call(text, at, keys)
        calls.append(call)
        at = skip_space(text, at)
        if text.startswith("]", at):
            return calls, at + 1
        at = skip_space(text, _expect(text, at, ","))


def read_call(text: str, at: int, keys: Sequence[str]) -> tuple[ToolCall, int]:
    """The call `{"name": ..., KEY: {...}}`, one of `keys` holding its arguments, and where it ends. Raises MalformedCall."""
    members, end = _read_object(text, at)
    arguments = [members[key] for key in keys if key in members]
    if len(arguments) != 1 or "name" not in members:
        raise MalformedCall(f"a call needs a name and one of {', '.join(keys)}")
    return make_call(members["name"].value, text[arguments[0].start : arguments[0].end]), end


def make_call(name: Any, arguments: str) -> ToolCall:
    """A call that a harness can read and may send back. Raises MalformedCall."""
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise MalformedCall("the name is none that a tool can have")
    try:
        value = from_json(arguments, allow_inf_nan=False)  # stricter than json: no lone surrogates, which could not be sent on
        check_bounded(value, "arguments")
    except (ValueError, ApiError) as error:
        raise MalformedCall(f"the arguments are no JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedCall("the arguments are no object")
    return ToolCall(name, arguments)


def _read_object(text: str, at: int) -> tuple[dict[str, Member], int]:
    """Keys and values of the object at `at`, and where it ends. Every value is read once, so the time is linear."""
    members: dict[str, Member] = {}
    at = skip_space(text, _expect(text, at, "{"))
    if text.startswith("}", at):
        return members, at + 1
    while True:
        key, at = _read_value(text, at)
        if not isinstance(key, str):
            raise MalformedCall("a key is no text")
        start = skip_space(text, _expect(text, skip_space(text, at), ":"))
        value, end = _read_value(text, start)
        members[key] = Member(value, start, end)
        at = skip_space(text, end)
        if text.startswith("}", at):
            return members, at + 1
        at = skip_space(text, _expect(text, at, ","))


def _expect(text: str, at: int, character: str) -> int:
    """The place after `character`."""
    if not text.startswith(character, at):
        raise MalformedCall(f"{character} is missing at {at}")
    return at + 1


def _refuse(constant: str) -> Any:
    raise MalformedCall(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _read_value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:  # nested deeper than the interpreter goes is as good as malformed
        raise MalformedCall(str(error)) from None
