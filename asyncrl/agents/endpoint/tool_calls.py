"""Tool-call formats: how a model writes tool calls into its text, and how they are read. The table of model
families is in tool_formats.py.
"""

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
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.user_code import is_for_us, load_function, raised

MAX_TOOLS = 128
"""Tools that a call may give, and calls that a message may hold."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """`content`: the text outside the calls, None if that is nothing. Without calls it is the whole answer,
    to the letter; where a format has channels, what they hold for the user.
    """

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


class ToolFormat:
    """Reads one kind of tool calls; this one, `none`, reads none. One object serves all answers."""

    name = "none"
    """As in gateway.tool_format."""
    opens: tuple[str, ...] = ()
    """Markers of calls and thoughts. Where they are special tokens, AnswerText(keep_special=opens) lets them
    through.
    """
    thinking: tuple[str, str] = ("<think>", "</think>")
    """What stands before and after a thought. A call inside a thought does not count."""
    close: str | None = None
    """Text that ends each call, where there is one: an answer that may hold one call is sampled up to it."""
    joint: str | None = None
    """Text between two calls, each written as around() says; None: an answer has one."""
    refusal: str = ""
    """Why a call may give no tools; empty if it may."""

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """Calls and content of a whole answer, its prefill included. An answer with a malformed call is text,
        whole.

        `tools`: their schemas give the types of arguments that are written without quotes.
        """
        return ParsedAnswer(text)

    def hold_from(self, text: str, start: int = 0) -> int:
        """Where a tool call begins, or may begin once more text has come, with the white space before it;
        len(text) if nowhere.

        What comes before is content whatever follows, and parse(...).content begins with it. `start`: what
        hold_from said of a beginning of this text, to look at nothing twice.
        """
        return len(text)

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        """(what may be shown of text[start:] by now, where to go on once more text has come)."""
        end = self.hold_from(text, start)
        return text[start:end], end

    def prefill(self, name: str | None) -> str | None:
        """Text that the answer is begun with, so that it is a call of this tool, or of any. None: this format
        cannot. It ends without a space, which is part of the next token.
        """
        return None

    def around(self, name: str) -> tuple[str, str] | None:
        """What stands before and after the arguments of a call of this tool, a JSON object; it begins with
        prefill(None) and prefill(name). None: the format is none of which a grammar can be made.
        """
        return None

    def without_tools(self) -> ToolFormat:
        """What reads the answers of this model to a call that gives no tools: thoughts can be told, and a
        tool call is text.
        """
        found = ToolFormat()
        found.thinking = self.thinking
        parts = [mark for mark in self.opens if any(mark in text for text in self.thinking)]
        found.opens = (*self.thinking, *parts)
        return found


def overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


def hold_marker(text: str, marker: str, start: int) -> int:
    """hold_from() for one marker: where it stands, or where a beginning of it ends the text."""
    at = text.find(marker, start)
    if at < 0:
        at = max(start, len(text) - overlap(text, marker))
    return start + len(text[start:at].rstrip()) if at > start else at


# ---- formats


class MarkedFormat(ToolFormat):
    """Calls after a marker, any number of them, text before and between.

    What closes the last call may be missing: a stop string may have cut it off.
    """

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
        """`begin`: the marker. `prefills`: of a call of any tool, and of NAME. `marks`: further special
        tokens of a call. `around`: what lies between the prefill and arguments in JSON, and after them.
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
        """Up to the name, or to the arguments."""
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
        """`writes_lists`: the model was taught `<tool_call>[...]</tool_call>` (SmolLM2)."""
        begin, end = (f"{OPEN}[\n", f"}}\n]{CLOSE}") if writes_lists else (f"{OPEN}\n", f"}}\n{CLOSE}")
        prefills = (f'{begin}{{"name":', f'{begin}{{"name": "NAME", "arguments":')
        read = json_calls(rf"{CLOSE}|\Z")
        super().__init__("hermes", OPEN, read, prefills, marks=[CLOSE], around=(" ", end))


PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")


class LlamaFormat(ToolFormat):
    """Llama 3.1 to 3.3: `{"name": "f", "parameters": {"x": 1}}`, several of them parted by `;`, nothing
    after them.

    Text may come before <|python_tag|> alone: JSON in the middle of a text is text. So is code after
    <|python_tag|>. "arguments" is what the models write for "parameters" now and then.
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
        """Everything if it begins like a call, else <|python_tag|>."""
        return 0 if text.startswith("{", skip(SPACE, text, 0)) else hold_marker(text, PYTHON_TAG, start)

    def prefill(self, name: str | None) -> str:
        """Up to the name, or to the parameters."""
        return '{"name":' if name is None else f'{{"name": {json.dumps(name)}, "parameters":'

    def around(self, name: str) -> tuple[str, str]:
        return f"{self.prefill(name)} ", "}"


class ResponseTemplateFormat(MarkedFormat):
    """What the `response_template` of a tokenizer reads (transformers 5.15 and later), for models whose calls
    no format above knows.

    Content is what comes before the first call. What transformers finds malformed is text; what it leaves out
    in silence, is left out.
    """

    def __init__(self, template: Any) -> None:
        """Raises ConfigError if there is none, or if it reads no tool calls."""
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
    """`parse(text)` of the user's: the calls in a whole answer, as (name, arguments) with arguments a dict
    or a JSON text, alone or after the content beside them; None if it has none.

    A ValueError (json.loads raises one) says that a call is malformed, and the answer stays text. An answer
    is streamed in one piece, for only the whole of it tells.
    """

    def __init__(self, spec: str) -> None:
        """Raises ConfigError if there is no such function, or it does not take one text."""
        self.name = spec
        self._function: Callable[[str], Any] = load_function(
            spec, "gateway.tool_format", usage=USAGE, arguments=("",)
        )

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """Raises RolloutFailure if the function returns or raises something else."""
        try:
            found = self._function(text) or ()
        except (ValueError, RecursionError):
            return ParsedAnswer(text)
        except BaseException as error:  # the user's code: its mistake is data, like a reward function's
            if is_for_us(error):
                raise
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


# ---- which one a model has

_SHOWS_TOOLS = re.compile(r"\btools\b")
NO_TOOLS = (
    "the chat template never mentions `tools`, so the model would not see them. Set model.chat_template to a "
    "Jinja file that shows tools to the model."
)


def find_tool_format(name: str, template: str, response_template: Any = None) -> ToolFormat:
    """The format of gateway.tool_format=`name`; auto: what the chat template shows the model, else what the
    tokenizer's response template (transformers) reads, else none. Raises ConfigError.

    `template` is empty where the model is not known. A format that must refuse tools says why in `refusal`.
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
