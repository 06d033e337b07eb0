"""Tool-call formats: how a model writes tool calls into its text, and how they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.user_code import load_function, raised

THINKING_END = "</think>"
"""What a model writes after its reasoning. A call inside the reasoning does not count."""


MAX_TOOLS = 128
"""Tools that a call may give, and calls that a message may hold."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object, as text."""

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
    thinking: tuple[str, str] = ("<think>", "</think>")
    """The texts around a thought."""

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


def overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


def _hold_marker(text: str, marker: str, start: int) -> int:
    """hold_from() for one marker: where it stands, or where a beginning of it ends the text."""
    at = text.find(marker, start)
    if at < 0:
        at = max(start, len(text) - overlap(text, marker))
    return start + len(text[start:at].rstrip()) if at > start else at


_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_MALFORMED = (ValueError, TypeError, RecursionError)
"""Raised for text that is no tool call: it stays text."""


def _read_value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at `at`, and where the next thing after it is."""
    value, end = _DECODER.raw_decode(text, _skip(_SPACE, text, at))
    return value, _skip(_SPACE, text, end)


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _call_of(value: Any, keys: Sequence[str]) -> ToolCall:
    """The call `{"name": ..., KEY: {...}}`, one of `keys` holding its arguments."""
    (arguments,) = [value[key] for key in keys if key in value]
    return _make_call(value.get("name"), arguments)


def _make_call(name: Any, arguments: Any) -> ToolCall:
    """A call that a harness can read and may send back."""
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise ValueError("a call needs the name of a tool, and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    from_json(text)  # as it is read when it is sent back: no lone surrogates, and not too deep
    return ToolCall(name, text)


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
        calls: list[ToolCall] = []
        content: list[str] = []
        end = 0
        at = text.find(OPEN, text.find(THINKING_END) + 1)
        try:
            while at >= 0:
                content.append(text[end:at].rstrip())
                value, end = _read_value(text, at + len(OPEN))
                values = value if isinstance(value, list) else [value]
                calls += [_call_of(each, ("arguments",)) for each in values]
                if text.startswith(CLOSE, end):
                    end += len(CLOSE)
                elif end < len(text):
                    return ParsedAnswer(text)
                at = text.find(OPEN, end)
        except _MALFORMED:
            return ParsedAnswer(text)
        if not calls:
            return ParsedAnswer(text)
        return ParsedAnswer("".join([*content, text[end:].rstrip()]) or None, tuple(calls))

    def hold_from(self, text: str, start: int = 0) -> int:
        return _hold_marker(text, OPEN, start)

    def prefill(self, name: str | None) -> str:
        """Up to the name, or to the arguments."""
        return self._begin + ('{"name":' if name is None else f'{{"name": {json.dumps(name)}, "arguments":')


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
        before, tag, after = text.partition(PYTHON_TAG)
        if not tag:
            before, after = "", text
        calls: list[ToolCall] = []
        at = 0
        try:
            while at < len(after) or not calls:
                value, at = _read_value(after, at)
                calls.append(_call_of(value, ("parameters", "arguments")))
                at = _skip(_BETWEEN, after, at)
        except _MALFORMED:
            return ParsedAnswer(text)
        return ParsedAnswer(before.rstrip() or None, tuple(calls))

    def hold_from(self, text: str, start: int = 0) -> int:
        """Everything if it begins like a call, else <|python_tag|>."""
        return 0 if text.startswith("{", _skip(_SPACE, text, 0)) else _hold_marker(text, PYTHON_TAG, start)

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
        """Raises RolloutFailure if the function returns or raises something else."""
        try:
            found = self._function(text) or ()
        except (ValueError, RecursionError):
            return ParsedAnswer(text)
        except Exception as error:  # the user's code: its mistake is data, like a reward function's
            raise self._misused(raised(error)) from error
        if not isinstance(found, list | tuple) or not all(
            isinstance(entry, list | tuple) and len(entry) == 2 for entry in found
        ):
            raise self._misused(f"returned {found!r:.200}")
        try:
            calls = [(name, from_json(given) if isinstance(given, str) else given) for name, given in found]
            tool_calls = tuple(_make_call(*call) for call in calls)
        except _MALFORMED:
            return ParsedAnswer(text)
        return ParsedAnswer(None, tool_calls) if tool_calls else ParsedAnswer(text)

    def hold_from(self, text: str, start: int = 0) -> int:
        return 0

    def _misused(self, what: str) -> RolloutFailure:
        rule = f"it is called as {USAGE}; a ValueError says that a call is malformed"
        return RolloutFailure(f"gateway.tool_format={self.name} {what}", rule=rule)


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
    way_out = "set it to auto, hermes, llama, none, or module:function of a parser of your own."
    raise ConfigError(f"gateway.tool_format={name} is not known", way_out=way_out)


def _name_from(template: str) -> str:
    if any(marker in template for marker in _OTHER_FORMATS):
        return "none"
    if OPEN in template:
        return "hermes"
    is_llama = '"parameters"' in template and (PYTHON_TAG in template or "ipython" in template)
    return "llama" if is_llama else "none"
