"""Tool calls: parsers, formats of model families, and the choice of a format."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from pydantic_core import from_json

from asyncrl.agents.endpoint.reasoning import THINKING, Marks, overlap
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.user_code import load_function, raised

MAX_TOOLS = 128
MAX_SCHEMAS = 64
MALFORMED = (ValueError, TypeError, KeyError, RecursionError)
SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""`{"type": "function", "function": {"name": ..., "parameters": {...}}}` by tool."""


class ToolCall(NamedTuple):
    """`arguments`: JSON text of an object."""

    name: str
    arguments: str


ReadArguments: TypeAlias = Callable[[str, int, Mapping[str, Any]], tuple[dict[str, Any], int]]
"""(text, start, schema) -> (arguments, end)."""
ReadCalls: TypeAlias = Callable[[str, int, Tools], tuple[list[ToolCall], int]]
"""(text, start, tools) -> (calls, end)."""


# ---- parsers


def make_call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise ValueError("a call needs the name of a tool and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    from_json(text)  # no lone surrogates, limited depth
    return ToolCall(name, text)


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"a call does not continue with {pattern.pattern}")
    return found.end()


def _read_json(text: str, at: int, schema: Any = None) -> tuple[Any, int]:
    value, end = _DECODER.raw_decode(text, _skip(SPACE, text, at))
    return value, _skip(SPACE, text, end)


def json_calls(end: str) -> ReadCalls:
    """Read `{"name": ..., "arguments": {...}}`, or a list of them, up to the pattern `end`."""
    ends = re.compile(end)

    def read(text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        while not calls or text.startswith(("{", "["), at):
            value, at = _read_json(text, at)
            several = value if isinstance(value, list) else [value]
            calls += [make_call(each["name"], each["arguments"]) for each in several]
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
        begun = heads.match(text, _skip(SPACE, text, at))
        while begun:
            functions = {tool["function"]["name"]: tool["function"] for tool in tools}
            schema = functions.get(begun["name"], {}).get("parameters") or {}
            arguments, at = read_arguments(text, begun.end(), schema)
            calls.append(make_call(begun["name"], arguments))
            at = _after(tails, text, at)
            gap = gaps and gaps.match(text, at)
            begun = heads.match(text, gap.end()) if gap else None
        if not calls:
            raise ValueError("there is no call after the marker")
        return calls, _after(ends, text, at)

    return read


def tagged(pattern: str) -> ReadArguments:
    """Read tagged arguments. Groups: `key`, `value`, optionally `string` ("true": text)."""
    arguments = re.compile(pattern, re.DOTALL)

    def read(text: str, at: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        pairs: list[tuple[str, Any]] = []
        while match := arguments.match(text, at):
            at = match.end()
            groups = match.groupdict()
            is_text = groups.get("string") == "true"
            value = groups["value"] if is_text else typed(groups["value"], groups["key"], schema)
            pairs.append((groups["key"], value))
        return _unique(pairs), at

    return read


_AS_JSON = {"(": "{", ")": "}", "=": ":", "True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|.)|\"", re.DOTALL)


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
            if kind in ("raw", "key"):
                token = json.dumps(token)
            elif kind == "escaped":
                token = f'"{_ESCAPE.sub(_escape, token)}"'
            pieces.append(_AS_JSON.get(token, token))
        return json.loads("".join(pieces), strict=False, object_pairs_hook=_unique), at

    return read


def _escape(found: re.Match[str]) -> str:
    escape = found[1] or '"'
    if len(escape) > 1:
        return json.dumps(chr(int(escape[1:], 16)))[1:-1]
    return f"\\{escape}" if escape in '"\\/bfnrtu' else "'" if escape == "'" else f"\\\\{escape}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an argument is given twice")
    return found


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
    """Return the types that a schema allows; none if it is too large."""
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
            target: Any = root
            for step in path.split("/")[1:]:
                target = target.get(step) if isinstance(target, Mapping) else None
            waiting.append(target)
    return set()


# ---- formats


class ParsedAnswer(NamedTuple):
    """`content`: text outside the calls, None if empty."""

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ToolFormat:
    """Format without calls, and base of others."""

    name: str = "none"
    marks: Sequence[str] = ()
    call: str = ""
    """A call of the tool NAME up to its arguments, or with JSON ARGUMENTS. Empty: no call can be forced."""
    _: KW_ONLY
    close: str | None = None
    joint: str | None = None
    """Text between calls; None: one call per answer."""
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
            return ParsedAnswer(text)
        return ParsedAnswer(content or None, tuple(calls)) if calls else ParsedAnswer(text)

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        """Raises MALFORMED errors."""
        return text, ()

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        """Return (final text from `start` on, the next start). The joined pieces are a prefix of
        parse(...).content.
        """
        return text[start:], len(text)

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
        parts = [mark for mark in self.marks if any(mark in text for text in self.thinking)]
        return ToolFormat(thinking=self.thinking, marks=parts)


def _show_until(marker: str, text: str, start: int) -> tuple[str, int]:
    at = text.find(marker, start)
    if at < 0:
        at = max(start, len(text) - overlap(text, marker))
    shown = text[start:at].rstrip()
    return shown, start + len(shown)


@dataclass(frozen=True)
class MarkedFormat(ToolFormat):
    """Calls after the first of `marks`."""

    read: ReadCalls = json_calls("")

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        calls: list[ToolCall] = []
        content: list[str] = []
        begin = self.marks[0]
        end = 0
        at = text.find(begin, text.find(self.thinking[1]) + 1)
        while at >= 0:
            content.append(text[end:at].rstrip())
            found, end = self.read(text, at + len(begin), tools)
            calls += found
            at = text.find(begin, end)
        return "".join([*content, text[end:].rstrip()]), calls

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        return _show_until(self.marks[0], text, start)


PYTHON_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")


@dataclass(frozen=True)
class LlamaFormat(ToolFormat):
    """Llama 3.1 to 3.3: JSON objects with "parameters" or "arguments", separated by `;`.

    Text may precede only <|python_tag|>; JSON within text, and code, is text.
    """

    name: str = "llama"
    marks: Sequence[str] = (PYTHON_TAG,)
    call: str = '{"name": "NAME", "parameters": ARGUMENTS}'

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        before, tag, after = text.partition(PYTHON_TAG)
        if not tag:
            before, after = "", text
        calls: list[ToolCall] = []
        at = 0
        while at < len(after) or not calls:
            value, at = _read_json(after, at)
            arguments = value["parameters"] if "parameters" in value else value["arguments"]
            calls.append(make_call(value["name"], arguments))
            at = _skip(_BETWEEN, after, at)
        return before.rstrip(), calls

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        if text.startswith("{", _skip(SPACE, text, 0)):
            return "", 0
        return _show_until(PYTHON_TAG, text, start)


_START = "<|start|>assistant"
_MESSAGE = "<|message|>"


@dataclass(frozen=True)
class ChannelFormat(ToolFormat):
    """Messages with a head that names their channel: a thought, a call, or the user.

    `head`: pattern with a group `thought` or `call`, none for the user. `read`: returns the calls of (head,
    body, tools).

    Templates refuse thoughts sent back, so they are dropped. From an unreadable message on, or from the first
    call if a later message is unreadable, all text is content.
    """

    _: KW_ONLY
    head: str
    ends: Sequence[str]
    read: Callable[[str, str, Tools], list[ToolCall]]
    reads_calls: bool = True

    @property
    def opens(self) -> Sequence[str]:
        return (*self.ends, *self.marks, _START.removesuffix("assistant"), _MESSAGE)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        return re.compile(self.head)

    @cached_property
    def _end(self) -> re.Pattern[str]:
        return re.compile("|".join([*map(re.escape, self.ends), rf"(?={re.escape(_START)})"]))

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        calls: list[ToolCall] = []
        content: list[str] = []
        sure = (0, 0)
        try:
            for head, channel, body, end, behind in self._messages(text, 0):
                if channel == "call":
                    if not self.reads_calls:
                        raise ValueError("no tools are given")
                    calls += self.read(head, text[body:end], tools)
                elif channel != "thought":
                    content.append(text[body:end])
                if not calls:
                    sure = len(content), behind
        except MALFORMED:
            num, at = sure
            marks = "|".join(map(re.escape, self.opens))
            return ParsedAnswer("".join(content[:num]) + re.sub(marks, "", text[at:]))
        return ParsedAnswer("".join(content) or (None if calls else ""), tuple(calls))

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        pieces: list[str] = []
        shown = start
        with contextlib.suppress(ValueError):
            for _, channel, body, end, behind in self._messages(text, max(text.rfind(_START, 0, start), 0)):
                if channel == "call":
                    break
                is_open = end == behind == len(text)
                if is_open:
                    held = [overlap(text[body:], mark) for mark in (*self.ends, _START)]
                    end = max(body, end - max(held))
                if channel != "thought":
                    pieces.append(text[max(body, shown) : end])
                shown = max(shown, end if is_open else behind)
        return "".join(pieces), shown

    def _messages(self, text: str, at: int) -> Iterator[tuple[str, str | None, int, int, int]]:
        """Yield (head, channel, start and end of the body, next start)."""
        while at < len(text):
            start = at + (len(_START) if text.startswith(_START, at) else 0)
            body = text.find(_MESSAGE, start)
            head = self._head.fullmatch(text, start, max(body, start))
            if body < 0 or head is None:
                raise ValueError("this is no message")
            body += len(_MESSAGE)
            found = self._end.search(text, body)
            end, behind = found.span() if found else (len(text), len(text))
            yield head[0], head.lastgroup, body, end, behind
            at = behind

    def without_tools(self) -> ToolFormat:
        return replace(self, reads_calls=False)


@dataclass(frozen=True)
class ResponseTemplateFormat(ToolFormat):
    """`response_template` of a tokenizer, parsed by transformers."""

    name: str = "response_template"
    _: KW_ONLY
    template: Any

    @classmethod
    def of(cls, template: Any) -> ResponseTemplateFormat:
        """Raises ConfigError if the template parses no calls."""
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            loaded = load_response_template(template or {})
            ResponseParser(loaded, prefix="", tools=[])
            loaded.fields["tool_calls"]
        except (TypeError, ValueError, KeyError) as error:
            what = "gateway.tool_format=response_template: the tokenizer has no response_template that reads "
            way_out = "set gateway.tool_format to auto or to another format."
            raise ConfigError(f"{what}tool calls: {error}", way_out=way_out) from error
        return cls(template=loaded)

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        from transformers.utils.chat_parsing import parse_response

        begun = self._opening.search(text, text.find(self.thinking[1]) + 1)
        if begun is None:
            return text, ()
        found = parse_response(text, self.template, prefix="", tools=list(tools) or None)
        functions = [call["function"] for call in found.get("tool_calls") or ()]
        calls = [make_call(each["name"], each["arguments"]) for each in functions]
        return text[: begun.start()].rstrip(), calls

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        begun = self._opening.search(text, start, partial=True)
        shown = text[start : len(text) if begun is None else begun.start()].rstrip()
        return shown, start + len(shown)

    @property
    def _opening(self) -> Any:
        return self.template.fields["tool_calls"].open_re


USAGE = "parse(text) -> [(name, arguments), ...], (content, [(name, arguments), ...]) or None"


@dataclass(frozen=True)
class UserFormat(ToolFormat):
    """User-defined `parse(text)` of a whole answer."""

    _: KW_ONLY
    function: Callable[[str], Any]

    def _read(self, text: str, tools: Tools) -> tuple[str | None, Sequence[ToolCall]]:
        try:
            found: Any = self.function(text)
        except (ValueError, RecursionError):
            return text, ()
        except Exception as error:  # user errors are data
            raise self._misused(raised(error)) from error
        has_content = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str | None)
        content, pairs = found if has_content else (None, found)
        try:
            pairs = [(name, arguments) for name, arguments in pairs or ()]
        except (TypeError, ValueError):
            raise self._misused(f"returned {found!r:.200}") from None
        return content, [
            make_call(name, from_json(arguments) if isinstance(arguments, str) else arguments)
            for name, arguments in pairs
        ]

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        return "", 0

    def _misused(self, what: str) -> RolloutFailure:
        rule = f"it is called as {USAGE}; a ValueError says that a call is malformed"
        return RolloutFailure(f"gateway.tool_format={self.name} {what}", rule=rule)


# ---- families

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_JSON_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'


def _hermes(call: str) -> MarkedFormat:
    return MarkedFormat("hermes", [OPEN, CLOSE], call, json_calls(rf"{CLOSE}|\Z"), close=CLOSE, joint="\n")


def _json_list(name: str, begin: str, end: str) -> MarkedFormat:
    return MarkedFormat(name, [begin, end], f"{begin}[{_JSON_CALL}]{end}", json_calls(rf"{end}|\Z"))


_PARAMETER = (
    r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
)
_ARGUMENT = (
    r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
    r"(?=\s*(?:<arg_key>|</tool_call>|\Z))"
)
_INVOKED = (
    r'\s*<parameter name="(?P<key>[^"]*)">(?P<value>.*?)</parameter>'
    r"(?=\s*<(?:parameter name=|/invoke>)|\s*\Z)"
)
_DSML = (
    r'\s*<｜DSML｜parameter name="(?P<key>[^"]*)" string="(?P<string>true|false)">'
    r"(?P<value>.*?)</｜DSML｜parameter>"
)
_ATEM = (
    r'\s*<atem:parameter name="(?P<key>[^"]*)">(?P<value>.*?)</atem:parameter>'
    r"(?=\s*<(?:atem:parameter name=|/atem:invoke>))"
)
_QWEN3_CODER = MarkedFormat(
    "qwen3_coder",
    (OPEN, CLOSE),
    f"{OPEN}\n<function=NAME>",
    named_calls(r"<function=(?P<name>[^>\n]+)>", tagged(_PARAMETER), rf"\s*</function>\s*(?:{CLOSE}|\Z)"),
    close=CLOSE,
)
_GLM_END = rf"\s*{CLOSE}|\n\s*\Z|(?<=</arg_value>)\Z"  # a name that was cut off is no call
_GLM = MarkedFormat(
    "glm",
    (OPEN, CLOSE),
    f"{OPEN}NAME",
    named_calls(r"(?P<name>[^\s<]+)", tagged(_ARGUMENT), _GLM_END),
    close=CLOSE,
)
_MINIMAX_HEAD = r'<invoke name="(?P<name>[^"]+)">'
_MINIMAX_TAIL = r"\s*</invoke>|\n\s*\Z|(?<=</parameter>)\Z"
_MINIMAX_END = r"\s*(?:</minimax:tool_call>|\Z)"
_MINIMAX = MarkedFormat(
    "minimax",
    ("<minimax:tool_call>", "</minimax:tool_call>", "</invoke>"),
    '<minimax:tool_call>\n<invoke name="NAME">',
    named_calls(_MINIMAX_HEAD, tagged(_INVOKED), _MINIMAX_TAIL, between=r"\s*", end=_MINIMAX_END),
    close="</invoke>",
)
_DSML_HEAD = r'<｜DSML｜invoke name="(?P<name>[^"]+)">'
_DSML_END = r"\s*(?:</｜DSML｜function_calls>|\Z)"
_DEEPSEEK_V32 = MarkedFormat(
    "deepseek_v32",
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">',
    named_calls(_DSML_HEAD, tagged(_DSML), r"\s*</｜DSML｜invoke>", between=r"\s*", end=_DSML_END),
)
_BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_DEEPSEEK_HEAD = (
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?=[^\s{]))?"
    r"(?P<name>[^\s<]+)(?:<｜tool▁sep｜>|\s*```json)"
)
_DEEPSEEK_TAIL = r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>|\Z)"
_DEEPSEEK_END = r"\s*(?:<｜tool▁calls▁end｜>|\Z)"
_DEEPSEEK = MarkedFormat(
    "deepseek",
    [f"<｜tool▁{part}｜>" for part in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")],
    f"{_BEGIN}NAME<｜tool▁sep｜>ARGUMENTS{_END}",
    named_calls(_DEEPSEEK_HEAD, _read_json, _DEEPSEEK_TAIL, between=r"\s*", end=_DEEPSEEK_END),
    close="<｜tool▁call▁end｜>",
)
"""V3.1: the name, then JSON. V3 and R1: `function`, then the name and a JSON block."""
_DEEPSEEK_V3 = replace(_DEEPSEEK, call=f"{_BEGIN}function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```{_END}")
_KIMI_HEAD = (
    r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
)
_KIMI_CALL = "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
_KIMI_PARTS = ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
_KIMI_TAIL = r"<\|tool_call_end\|>|\Z"
_KIMI_END = r"\s*(?:<\|tool_calls_section_end\|>|\Z)"
_KIMI = MarkedFormat(
    "kimi",
    [f"<|tool_call{part}|>" for part in _KIMI_PARTS],
    f"<|tool_calls_section_begin|>{_KIMI_CALL}<|tool_calls_section_end|>",
    named_calls(_KIMI_HEAD, _read_json, _KIMI_TAIL, between=r"\s*", end=_KIMI_END),
    close="<|tool_call_end|>",
)
_LISTED = json_calls("")
_NAMED = named_calls(r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\s*\{)", _read_json, "")


def _read_mistral(text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
    is_list = text.startswith(("[", "{"), _skip(SPACE, text, at))
    return (_LISTED if is_list else _NAMED)(text, at, tools)


_MISTRAL = MarkedFormat(
    "mistral", ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], f"[TOOL_CALLS][{_JSON_CALL}]", _read_mistral
)
_MISTRAL_V11 = replace(
    _MISTRAL, call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", joint="", thinking=("[THINK]", "[/THINK]")
)
_GEMMA_ARGUMENTS = rewritten(r'<\|"\|>(?P<raw>.*?)<\|"\|>|(?P<key>[^:{}\[\],]+)(?=:)')
_GEMMA4 = MarkedFormat(
    "gemma4",
    ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>"),
    "<|tool_call>call:NAME",
    named_calls(r"call:(?P<name>[^\s{]+)(?=\{)", _GEMMA_ARGUMENTS, r"<tool_call\|>|\Z"),
    close="<tool_call|>",
    thinking=("<|channel>thought", "<channel|>"),
)


def _lfm2(outer: str = "") -> MarkedFormat:
    """`[f(x='a', y=1)]`, as in Python."""
    quoted = r"""(?P<quote>['"])(?P<escaped>(?:(?!(?P=quote))[^\\]|\\.)*)(?P=quote)"""
    arguments = rewritten(rf"{quoted}|(?P<key>\w+)(?=\s*=)", outer)
    head = r"\[?\s*(?P<name>[\w.-]+)(?=\()"
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    end = r"\s*\]\s*(?:<\|tool_call_end\|>|\Z)"
    read = named_calls(head, arguments, "", between=r"\s*,\s*", end=end)
    return MarkedFormat("lfm2", marks, "<|tool_call_start|>[NAME(", read)


_LFM2 = _lfm2()
_LFM2_RAW = _lfm2(r"'(?P<raw>.*?)'(?=\s*(?:,\s*\w+=|\)\s*(?:,\s*[\w.-]+\(|\]\s*(?:<\|tool_call_end\|>|\Z))))")


def _read_gpt_oss(head: str, body: str, tools: Tools) -> list[ToolCall]:
    recipient = re.search(r"\bto=functions\.([\w.-]+)", head)
    return [make_call(recipient[1] if recipient else None, json.loads(body))]


_GPT_OSS = ChannelFormat(
    name="gpt_oss",
    head=r"(?P<call>(?=[^\n]*\bto=)[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)"
    r"|(?P<thought>\s*<\|channel\|>analysis\s*)|\s*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?",
    ends=("<|end|>", "<|return|>", "<|call|>"),
    marks=("<|channel|>", "<|constrain|>"),
    read=_read_gpt_oss,
    call=" to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS",
    thinking=("<|channel|>analysis<|message|>", "<|end|>"),
)
_ATEM_CALLS = named_calls(
    r'<atem:function_calls>\s*<atem:invoke name="(?P<name>[^"]*)">',
    tagged(_ATEM),
    r"\s*</atem:invoke>",
    end=r"\s*(?:</atem:function_calls>\s*)?\Z",
)
_MUSE_GLIMMER = ChannelFormat(
    name="muse_glimmer",
    head=r"(?P<thought>\s*to=self\s*)|\s*(?:to=user)?\s*|(?P<call>[^<]*)",
    ends=("<|eom|>", "<|eot|>"),
    read=lambda head, body, tools: _ATEM_CALLS(body, 0, tools)[0],
    call=' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">',
    thinking=("to=self<|message|>", "<|eom|>"),
)
_UNKNOWN = ToolFormat()

FAMILIES: Sequence[tuple[tuple[str, ...], ToolFormat]] = [
    (("<|channel|>", "functions."), _GPT_OSS),
    (("<atem:invoke",), _MUSE_GLIMMER),
    (("<|tool_call>call:",), _GEMMA4),
    (("<｜DSML｜",), _DEEPSEEK_V32),
    (("<｜tool▁call▁begin｜>", "```json"), _DEEPSEEK_V3),
    (("<｜tool▁call▁begin｜>",), _DEEPSEEK),
    (("minimax:tool_call>",), _MINIMAX),
    (("<|tool_call_argument_begin|>",), _KIMI),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_V11),
    (("[TOOL_CALLS]",), _MISTRAL),
    (("<|tool_call_start|>", "format_arg_value", "replace("), _LFM2),
    (("<|tool_call_start|>", "format_arg_value"), _LFM2_RAW),
    (("<|tool_call_start|>",), _LFM2),
    (("<|tool_list_start|>",), _LFM2),
    (("<arg_key>",), _GLM),
    (("<function=", "<parameter="), _QWEN3_CODER),
    (("<TOOLCALL>",), _json_list("toolcall", "<TOOLCALL>", "</TOOLCALL>")),
    (("<tool_calls>",), _json_list("tool_calls", "<tool_calls>", "</tool_calls>")),
    (("<function=",), _UNKNOWN),  # Functionary
    (("functools[",), _UNKNOWN),  # Firefunction
    ((f"{OPEN}[",), _hermes(f"{OPEN}[\n{_JSON_CALL}\n]{CLOSE}")),  # SmolLM2
    ((OPEN,), _hermes(f"{OPEN}\n{_JSON_CALL}\n{CLOSE}")),
    (('"parameters"', "<|python_tag|>"), LlamaFormat()),
    (('"parameters"', "ipython"), LlamaFormat()),
]
"""(substrings of chat templates, format); the first match counts, or the last format of a name."""

NO_TOOLS = (
    "the chat template never mentions `tools`, so the model would not see them. Set model.chat_template to a "
    "Jinja file that shows tools to the model."
)


def find_tool_format(name: str, template: str, response_template: Any = None) -> ToolFormat:
    """Return the format `name`. auto: by the chat template, else the tokenizer's response template. Raises
    ConfigError.
    """
    if ":" in name:
        function = load_function(name, "gateway.tool_format", usage=USAGE, arguments=("",))
        return UserFormat(name, function=function)
    fitting = [each for shown, each in FAMILIES if all(mark in template for mark in shown)]
    named = {each.name: each for _, each in FAMILIES} | {each.name: each for each in reversed(fitting)}
    known = ", ".join([*(each for each in named if each != "none"), "response_template"])
    is_auto = name == "auto"
    if is_auto:
        name = fitting[0].name if fitting else "none"
        if name == "none" and "tool_calls" in (response_template or {}).get("fields", {}):
            name = "response_template"
    if name != "response_template" and name not in named:
        way_out = f"set it to auto, {known}, none, or module:function of a parser of your own."
        raise ConfigError(f"gateway.tool_format={name} is not known", way_out=way_out)
    refusal = ""
    if template and not re.search(r"\btools\b", template):
        refusal = NO_TOOLS
    elif name == "none" and is_auto:
        refusal = (
            "gateway.tool_format=auto does not know the tool calls that this chat template shows. Set "
            f"it to {known}, or module:function of a parser of your own, or set model.chat_template."
        )
    elif name == "none":
        refusal = "gateway.tool_format is none."
    found = named[name] if name in named else ResponseTemplateFormat.of(response_template)
    return replace(found, refusal=refusal)
