"""Reads tool calls that are JSON objects, keeping the exact text of their arguments. Knows no markers around
them.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic_core import from_json

from asyncrl.agents.endpoint.chat_messages import check_bounded
from asyncrl.agents.endpoint.refusals import ApiError
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.user_code import load_function

# What a tool-call format is: how a model writes tool calls into its text. Knows no particular one, no tokens,
# no HTTP.


THINKING_END = "</think>"
"""What a model writes after its reasoning; a call that it only thinks about is none."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object, as the very text that the model wrote. Ids are made by whoever answers."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """`content`: the text outside the calls, None if that is nothing. Without calls it is the whole answer,
    to the letter.
    """

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


class ToolFormat(Protocol):
    """Reads one kind of tool calls. Has no state: one object for all answers."""

    name: str
    """As in gateway.tool_format."""
    opens: tuple[str, ...]
    """Markers of calls. Where they are special tokens, AnswerText(keep_special=opens) lets them through."""

    def parse(self, text: str) -> ParsedAnswer:
        """Calls and content of a whole answer, its prefill included. An answer with a malformed call is text,
        whole. Never raises.
        """
        ...

    def hold_from(self, text: str, start: int = 0) -> int:
        """Where a tool call begins, or may begin once more text has come, with the white space before it;
        len(text) if nowhere.

        What comes before is content whatever follows, and parse(...).content begins with it. `start`: what
        hold_from said of a beginning of this text, to look at nothing twice.
        """
        ...

    def prefill_required(self) -> str | None:
        """Text that the answer is begun with, so that it is a call of some tool. None: this format cannot."""
        ...

    def prefill_named(self, name: str) -> str | None:
        """Text that the answer is begun with, so that it is a call of this tool. None: this format cannot."""
        ...


def hold_before(text: str, at: int, start: int) -> int:
    """`at`, or where the white space before it begins, but no earlier than `start`."""
    return start + len(text[start:at].rstrip()) if at > start else at


def find_marker(text: str, marker: str, start: int) -> int:
    """Where `marker` is, or where its beginning stands at the end of the text; len(text) if nowhere."""
    at = text.find(marker, start)
    if at >= 0:
        return at
    longest = min(len(text) - start, len(marker) - 1)
    return len(text) - next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


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
    """The call `{"name": ..., KEY: {...}}`, one of `keys` holding its arguments, and where it ends. Raises
    MalformedCall.
    """
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
        value = from_json(
            arguments, allow_inf_nan=False
        )  # stricter than json: no lone surrogates, which could not be sent on
        check_bounded(value, "arguments")
    except (ValueError, ApiError) as error:
        raise MalformedCall(f"the arguments are no JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedCall("the arguments are no object")
    return ToolCall(name, arguments)


def _read_object(text: str, at: int) -> tuple[dict[str, Member], int]:
    """Keys and values of the object at `at`, and where it ends. Every value is read once, so the time is
    linear.
    """
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
    except (
        ValueError,
        RecursionError,
    ) as error:  # nested deeper than the interpreter goes is as good as malformed
        raise MalformedCall(str(error)) from None


# Tool calls as Hermes, Qwen 2.5, Qwen 3 and SmolLM2 write them: JSON in <tool_call>. Knows no tokens.


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat:
    r"""`<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>`, any number of them, text before and
    between.

    A list of calls in one <tool_call> is read too. The last one need not be closed: a stop string may have
    cut it off.
    """

    name = "hermes"
    opens: tuple[str, ...] = (OPEN, CLOSE)

    def __init__(self, *, writes_lists: bool = False) -> None:
        """`writes_lists`: the model was taught `<tool_call>[...]</tool_call>` (SmolLM2), so a prefill begins
        that.
        """
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
        """Up to where the model names the tool. Without a space at the end, which is part of the next
        token.
        """
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


# Tool calls as Llama 3.1 to 3.3 write them: bare JSON, or JSON after <|python_tag|>. Knows no tokens.


PYTHON_TAG = "<|python_tag|>"

_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")
_KEYS = ("parameters", "arguments")
"""The first is what the template says, the second what the models write now and then."""


class LlamaFormat:
    """`{"name": "f", "parameters": {"x": 1}}`, several of them parted by `;`, nothing after them.

    Text may come before <|python_tag|> alone: JSON in the middle of a text is text. So is code after
    <|python_tag|>.
    """

    name = "llama"
    opens: tuple[str, ...] = (PYTHON_TAG,)

    def parse(self, text: str) -> ParsedAnswer:
        """Calls and content; text whole if a call is malformed."""
        before, tag, after = text.partition(PYTHON_TAG)
        if not tag:
            before, after = "", text
        try:
            calls = _read_tool_format_llama(after)
        except MalformedCall:
            return ParsedAnswer(text)
        return ParsedAnswer(before.rstrip() or None, tuple(calls))

    def hold_from(self, text: str, start: int = 0) -> int:
        """Everything if it begins like a call, else <|python_tag|> or its beginning at the end, or the white
        space at the end.
        """
        if text.startswith("{", skip_space(text, 0)):
            return 0
        return hold_before(text, find_marker(text, PYTHON_TAG, start), start)

    def prefill_required(self) -> str:
        """Up to where the model names the tool. Without a space at the end, which is part of the next
        token.
        """
        return '{"name":'

    def prefill_named(self, name: str) -> str:
        """Up to the parameters."""
        return f'{{"name": {json.dumps(name)}, "parameters":'


def _read_tool_format_llama(text: str) -> list[ToolCall]:
    """Calls that are the whole of `text`."""
    calls: list[ToolCall] = []
    at = skip_space(text, 0)
    while at < len(text) or not calls:
        call, at = read_call(text, at, _KEYS)
        calls.append(call)
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
    return calls


# A tool-call format of the user's own: one function. Knows nothing of how it reads.


USAGE = "parse(text) -> [(name, arguments), ...] or None"


class UserFormat:
    """`parse(text)`: the calls in a whole answer, as (name, arguments) with arguments a dict or a JSON text;
    None if it has none.

    A ValueError (json.loads raises one) says that a call is malformed, and the answer stays text. With calls
    there is no content. An answer is streamed in one piece, for only the whole of it tells.
    """

    opens: tuple[str, ...] = ()

    def __init__(self, spec: str) -> None:
        """Raises ConfigError if there is no such function, or it does not take one text."""
        self.name = spec
        self._function: Callable[[str], Any] = load_function(
            spec, "gateway.tool_format", usage=USAGE, arguments=("",)
        )

    def parse(self, text: str) -> ParsedAnswer:
        """Calls or content. Raises RolloutFailure if the function returns or raises something else."""
        try:
            found = self._function(text)
            if not found:
                return ParsedAnswer(text)
            return ParsedAnswer(None, tuple(self._call(entry) for entry in self._entries(found)))
        except (ValueError, RecursionError):
            return ParsedAnswer(text)
        except RolloutFailure:
            raise
        except Exception as error:  # the user's code: its mistake is data, like a reward function's
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name} line {frame.lineno}"
            raise self._misused(f"raised {type(error).__name__}: {error} ({place})") from error

    def hold_from(self, text: str, start: int = 0) -> int:
        """All of it."""
        return 0

    def prefill_required(self) -> None:
        """It is not known how a call begins."""

    def prefill_named(self, name: str) -> None:
        """It is not known how a call begins."""

    def _entries(self, found: Any) -> list[Any] | tuple[Any, ...]:
        if not isinstance(found, list | tuple):
            raise self._misused(f"returned {found!r:.200}")
        return found

    def _call(self, entry: Any) -> ToolCall:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise self._misused(f"returned {entry!r:.200}")
        name, arguments = entry
        if isinstance(arguments, Mapping):
            try:
                return make_call(name, json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False))
            except TypeError as error:
                raise MalformedCall(str(error)) from None
        if not isinstance(arguments, str):
            raise MalformedCall("the arguments are no object")
        return make_call(name, arguments)

    def _misused(self, what: str) -> RolloutFailure:
        return RolloutFailure(
            f"gateway.tool_format={self.name} {what}",
            rule=f"it is called as {USAGE}, and a ValueError says that a call is malformed",
            way_out="return a list of pairs, each a name and a dict of arguments, or None.",
        )


# Which tool-call format a model has: by name, or from its chat template. Knows no answers.


__all__ = ["NoFormat", "ParsedAnswer", "ToolCall", "ToolFormat", "find_tool_format"]

OTHER_FORMATS = ("<function=", "<arg_key>", "<TOOLCALL>", "functools[", "<tool_calls>")
"""In templates of models that write neither: Qwen 3 Coder and Functionary, GLM, Nemotron, Firefunction,
MiniMax. Some have <tool_call> or <|python_tag|> as well."""


class NoFormat:
    """Text is text."""

    name = "none"
    opens: tuple[str, ...] = ()

    def parse(self, text: str) -> ParsedAnswer:
        """The text."""
        return ParsedAnswer(text)

    def hold_from(self, text: str, start: int = 0) -> int:
        """Nowhere."""
        return len(text)

    def prefill_required(self) -> None:
        """There are no calls."""

    def prefill_named(self, name: str) -> None:
        """There are no calls."""


def find_tool_format(name: str, template: str) -> ToolFormat:
    """The format of gateway.tool_format=`name`; auto: what the chat template shows the model, or none. Raises
    ConfigError.
    """
    if name == "auto":
        name = _name_from(template)
    if name == "hermes":
        return HermesFormat(writes_lists=f"{OPEN}[" in template)
    if name == "llama":
        return LlamaFormat()
    if name == "none":
        return NoFormat()
    if ":" in name:
        return UserFormat(name)
    raise ConfigError(
        f"gateway.tool_format={name} is not known",
        way_out="set it to auto, hermes, llama, none, or module:function of a parser of your own.",
    )


def _name_from(template: str) -> str:
    if any(marker in template for marker in OTHER_FORMATS):
        return "none"
    if OPEN in template:
        return "hermes"
    if '"parameters"' in template and (PYTHON_TAG in template or "ipython" in template):
        return "llama"
    return "none"
