"""Tool-call formats: how a model writes tool calls into its text, and how they are read."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.user_code import load_function

THINKING_END = "</think>"
"""What a model writes after its reasoning; a call that it only thinks about is none."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object, as the very text that the model wrote."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """`content`: the text outside the calls, None if that is nothing. Without calls it is the whole answer,
    to the letter.
    """

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


class ToolFormat:
    """Reads one kind of tool calls; this one, `none`, reads none. One object serves all answers."""

    name = "none"
    """As in gateway.tool_format."""
    opens: tuple[str, ...] = ()
    """Markers of calls. Where they are special tokens, AnswerText(keep_special=opens) lets them through."""

    def parse(self, text: str) -> ParsedAnswer:
        """Calls and content of a whole answer, its prefill included. An answer with a malformed call is text,
        whole.
        """
        return ParsedAnswer(text)

    def hold_from(self, text: str, start: int = 0) -> int:
        """Where a tool call begins, or may begin once more text has come, with the white space before it;
        len(text) if nowhere.

        What comes before is content whatever follows, and parse(...).content begins with it. `start`: what
        hold_from said of a beginning of this text, to look at nothing twice.
        """
        return len(text)

    def prefill(self, name: str | None) -> str | None:
        """Text that the answer is begun with, so that it is a call of this tool, or of any. None: this format
        cannot. It ends without a space, which is part of the next token.
        """
        return None


def _hold_marker(text: str, marker: str, start: int) -> int:
    """hold_from() of a marker: where it is, or where its beginning stands at the end of the text."""
    at = text.find(marker, start)
    if at < 0:
        longest = min(len(text) - start, len(marker) - 1)
        at = len(text) - next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
    return start + len(text[start:at].rstrip()) if at > start else at


# ---- calls that are JSON objects: each value is read once, and the text of the arguments is kept


_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_SPACE = re.compile(r"[ \t\n\r]*")


class MalformedCall(ValueError):  # noqa: N818  what a model writes, and no failure of ours
    """What the model wrote is no tool call. It stays text."""


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _after(text: str, at: int, character: str) -> int:
    """Where the next thing after `character` is, which must be the next one itself."""
    at = _skip_space(text, at)
    if not text.startswith(character, at):
        raise MalformedCall(f"{character} is missing at {at}")
    return _skip_space(text, at + 1)


def _refuse(constant: str) -> Any:
    raise MalformedCall(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _read_value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(str(error)) from None


def _read_call(text: str, at: int, keys: Sequence[str]) -> tuple[ToolCall, int]:
    """The call `{"name": ..., KEY: {...}}`, one of `keys` holding its arguments, and where it ends."""
    texts: dict[str, str] = {}
    name: Any = None
    at = _after(text, at, "{")
    is_done = text.startswith("}", at)
    while not is_done:
        key, at = _read_value(text, at)
        start = _after(text, at, ":")
        value, at = _read_value(text, start)
        if not isinstance(key, str):
            raise MalformedCall("a key is no text")
        texts[key] = text[start:at]
        name = value if key == "name" else name
        at = _skip_space(text, at)
        is_done = text.startswith("}", at)
        at = at if is_done else _after(text, at, ",")
    arguments = [texts[key] for key in keys if key in texts]
    if len(arguments) != 1:
        raise MalformedCall(f"a call needs one of {', '.join(keys)}")
    return _make_call(name, arguments[0]), at + 1


def _make_call(name: Any, arguments: str) -> ToolCall:
    """A call that a harness can read and may send back."""
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise MalformedCall("the name is none that a tool can have")
    try:
        value = from_json(arguments, allow_inf_nan=False)  # stricter than json: no lone surrogates
    except ValueError as error:
        raise MalformedCall(f"the arguments are no JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedCall("the arguments are no object")
    return ToolCall(name, arguments)


OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    r"""Hermes, Qwen 2.5, Qwen 3, SmolLM2: `<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>`,
    any number of them, text before and between.

    A list of calls in one <tool_call> is read too. The last one need not be closed: a stop string may have
    cut it off.
    """

    name = "hermes"
    opens = (OPEN, CLOSE)

    def __init__(self, *, writes_lists: bool = False) -> None:
        """`writes_lists`: the model was taught `<tool_call>[...]</tool_call>` (SmolLM2)."""
        self._begin = f"{OPEN}[\n" if writes_lists else f"{OPEN}\n"

    def parse(self, text: str) -> ParsedAnswer:
        """Calls and content."""
        calls: list[ToolCall] = []
        content: list[str] = []
        end = 0
        at = text.find(OPEN, text.find(THINKING_END) + 1)
        try:
            while at >= 0:
                content.append(text[end:at].rstrip())
                found, end = _read_calls(text, at + len(OPEN))
                calls += found
                end = _skip_space(text, end)
                if text.startswith(CLOSE, end):
                    end += len(CLOSE)
                elif end < len(text):
                    raise MalformedCall(f"{CLOSE} is missing")
                at = text.find(OPEN, end)
        except MalformedCall:
            return ParsedAnswer(text)
        if not calls:
            return ParsedAnswer(text)
        return ParsedAnswer("".join([*content, text[end:].rstrip()]) or None, tuple(calls))

    def hold_from(self, text: str, start: int = 0) -> int:
        """The first <tool_call>."""
        return _hold_marker(text, OPEN, start)

    def prefill(self, name: str | None) -> str:
        """Up to the name, or to the arguments."""
        return self._begin + ('{"name":' if name is None else f'{{"name": {json.dumps(name)}, "arguments":')


def _read_calls(text: str, at: int) -> tuple[list[ToolCall], int]:
    """The call at `at`, or the list of calls, and where it ends."""
    at = _skip_space(text, at)
    if not text.startswith("[", at):
        call, at = _read_call(text, at, ("arguments",))
        return [call], at
    calls: list[ToolCall] = []
    at = _after(text, at, "[")
    while not text.startswith("]", at):
        if calls:
            at = _after(text, at, ",")
        call, at = _read_call(text, at, ("arguments",))
        calls.append(call)
        at = _skip_space(text, at)
    return calls, at + 1


PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")


class LlamaFormat(ToolFormat):
    """Llama 3.1 to 3.3: `{"name": "f", "parameters": {"x": 1}}`, several of them parted by `;`, nothing
    after them.

    Text may come before <|python_tag|> alone: JSON in the middle of a text is text. So is code after
    <|python_tag|>. "arguments" is what the models write for "parameters" now and then.
    """

    name = "llama"
    opens = (PYTHON_TAG,)

    def parse(self, text: str) -> ParsedAnswer:
        """Calls and content."""
        before, tag, after = text.partition(PYTHON_TAG)
        if not tag:
            before, after = "", text
        calls: list[ToolCall] = []
        at = _skip_space(after, 0)
        try:
            while at < len(after) or not calls:
                call, at = _read_call(after, at, ("parameters", "arguments"))
                calls.append(call)
                between = _BETWEEN.match(after, at)
                at = between.end() if between else at
        except MalformedCall:
            return ParsedAnswer(text)
        return ParsedAnswer(before.rstrip() or None, tuple(calls))

    def hold_from(self, text: str, start: int = 0) -> int:
        """Everything if it begins like a call, else <|python_tag|>."""
        return 0 if text.startswith("{", _skip_space(text, 0)) else _hold_marker(text, PYTHON_TAG, start)

    def prefill(self, name: str | None) -> str:
        """Up to the name, or to the parameters."""
        return '{"name":' if name is None else f'{{"name": {json.dumps(name)}, "parameters":'


USAGE = "parse(text) -> [(name, arguments), ...] or None"


class UserFormat(ToolFormat):
    """`parse(text)` of the user's: the calls in a whole answer, as (name, arguments) with arguments a dict
    or a JSON text; None if it has none.

    A ValueError (json.loads raises one) says that a call is malformed, and the answer stays text. With calls
    there is no content. An answer is streamed in one piece, for only the whole of it tells.
    """

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
            if not isinstance(found, list | tuple):
                raise self._misused(f"returned {found!r:.200}")
            return ParsedAnswer(None, tuple(self._call(entry) for entry in found))
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

    def _call(self, entry: Any) -> ToolCall:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise self._misused(f"returned {entry!r:.200}")
        name, arguments = entry
        if isinstance(arguments, Mapping):
            try:
                arguments = json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False)
            except TypeError as error:
                raise MalformedCall(str(error)) from None
        if not isinstance(arguments, str):
            raise MalformedCall("the arguments are no object")
        return _make_call(name, arguments)

    def _misused(self, what: str) -> RolloutFailure:
        return RolloutFailure(
            f"gateway.tool_format={self.name} {what}",
            rule=f"it is called as {USAGE}, and a ValueError says that a call is malformed",
            way_out="return a list of pairs, each a name and a dict of arguments, or None.",
        )


_OTHER_FORMATS = ("<function=", "<arg_key>", "<TOOLCALL>", "functools[", "<tool_calls>")
"""In templates of models that write neither: Qwen 3 Coder and Functionary, GLM, Nemotron, Firefunction,
MiniMax. Some have <tool_call> or <|python_tag|> as well."""


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
        return ToolFormat()
    if ":" in name:
        return UserFormat(name)
    raise ConfigError(
        f"gateway.tool_format={name} is not known",
        way_out="set it to auto, hermes, llama, none, or module:function of a parser of your own.",
    )


def _name_from(template: str) -> str:
    if any(marker in template for marker in _OTHER_FORMATS):
        return "none"
    if OPEN in template:
        return "hermes"
    if '"parameters"' in template and (PYTHON_TAG in template or "ipython" in template):
        return "llama"
    return "none"
