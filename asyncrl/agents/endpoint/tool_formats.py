"""Formats of tool calls by model family, as data for one parser."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from pydantic_core import from_json

from asyncrl.agents.endpoint.reasoning import THINKING, Marks
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.user_code import load_function, raised

MAX_TOOLS = 128
MALFORMED = (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError)
_DECODER = json.JSONDecoder()
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

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
    """Read tagged arguments. Groups: `key`, `value`, optionally `string` ("true": text)."""
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
            key, value = match["key"], match["value"]
            if key in found:
                raise ValueError("an argument is given twice")
            is_text = match.groupdict().get("string") == "true"
            found[key] = value if is_text else typed(value, schemas.get(key))
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
    if found == "number" and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
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


_PYTHON_CALL = re.compile(r"\s*[\[,]\s*(?P<tool>[\w.-]+)\(")
_PYTHON_END = re.compile(r"\s*\)")
_PYTHON_ARGUMENT = re.compile(
    r"[\s,]*(?P<key>\w+)=(?P<value>'(?:[^'\\]|\\.)*'|.*?)"
    r"(?=,\s*\w+=|\)\s*(?:,\s*[\w.-]+\(|\]\s*(?:<\|tool_call_end\|>|\Z)))",
    re.DOTALL,
)


def read_python(text: str, begun: Any, tools: Tools) -> Found:
    """Read `[f(x='a', y=1), g()`."""
    calls: list[tuple[Any, Any]] = []
    at = begun.end()
    while call := _PYTHON_CALL.match(text, at):
        at = call.end()
        arguments: dict[str, Any] = {}
        while match := _PYTHON_ARGUMENT.match(text, at):
            at = match.end()
            arguments[match["key"]] = _literal(match["value"])
        at = _after(_PYTHON_END, text, at)
        calls.append((call["tool"], arguments))
    return calls, at


def _literal(text: str) -> Any:
    """Read JSON or Python; quoted text may contain quotes and line breaks."""
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            if text[:1] + text[-1:] != "''":
                raise
            return text[1:-1]


_GEMMA_WORD = re.compile(r"(?<=[{,])[^{}\[\],:]+(?=:)|None")


def _read_gemma(text: str, begun: Any, tools: Tools) -> Found:
    """Read `{key:<|"|>text<|"|>}`."""
    body = text[begun.end() :].partition("<tool_call|>")[0]
    parts = body.split('<|"|>')
    for number, part in enumerate(parts):
        is_text = number % 2 == 1
        parts[number] = json.dumps(part) if is_text else _GEMMA_WORD.sub(_as_json, part)
    return [(begun["tool"], json.loads("".join(parts)))], begun.end() + len(body)


def _as_json(word: re.Match[str]) -> str:
    return "null" if word[0] == "None" else json.dumps(word[0])


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
            if found.end() == end:  # it may continue
                end = found.start()
                break
            pieces.append(text[start : found.start()].rstrip())
            start = found.end()
        shown = text[start:end].rstrip()
        return "".join([*pieces, shown]), start + len(shown)

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
        marks = [mark for mark in self.marks if self.noise or any(mark in text for text in self.thinking)]
        return ToolFormat(noise=self.noise, marks=marks, thinking=self.thinking)


USAGE = "parse(text) -> [(name, arguments), ...], (content, [(name, arguments), ...]) or None"


@dataclass(frozen=True, kw_only=True)
class UserFormat(ToolFormat):
    """User-defined `parse(text)` of a whole answer."""

    function: Callable[[str], Any]
    head: str = r"\A"

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

    def _misused(self, what: str) -> RolloutFailure:
        rule = f"it is called as {USAGE}; a ValueError says that a call is malformed"
        return RolloutFailure(f"gateway.tool_format={self.name} {what}", rule=rule)


def response_template_format(template: Any) -> ToolFormat:
    """Return the format of a tokenizer's `response_template`, parsed by transformers. Raises ConfigError."""
    from transformers.utils.chat_parsing import parse_response
    from transformers.utils.chat_parsing.response_templates import load_response_template

    def read(text: str, begun: Any, tools: Tools) -> Found:
        answer = parse_response(text, loaded, prefix="", tools=list(tools) or None)
        functions = [call["function"] for call in answer["tool_calls"]]
        return [(each["name"], each["arguments"]) for each in functions], len(text)

    try:
        loaded = load_response_template(template or {})
        head = loaded.fields["tool_calls"].open_re.pattern
    except (TypeError, ValueError, KeyError) as error:
        what = "gateway.tool_format=response_template: the tokenizer has no response_template that reads "
        way_out = "set gateway.tool_format to auto or to another format."
        raise ConfigError(f"{what}tool calls: {error}", way_out=way_out) from error
    return ToolFormat(name="response_template", head=head, read=read)


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
    joint="\n",
)
_LLAMA = ToolFormat(
    name="llama",
    head=r"\A\s*(?=\{)|<\|python_tag\|>",
    tail=r"(?=<\|python_tag\|>)|\Z",
    marks=("<|python_tag|>",),
    call='{"name": "NAME", "parameters": ARGUMENTS}',
)


def _json_list(name: str, begin: str, end: str) -> ToolFormat:
    call = f"{begin}[{_JSON_CALL}]{end}"
    return ToolFormat(name=name, head=begin, tail=rf"{end}|\Z", marks=(begin, end), call=call)


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


def _invoke(prefix: str) -> str:
    return rf'<{prefix}invoke name="(?P<tool>[^"]+)">'


def _parameters(prefix: str) -> Read:
    return tagged(
        rf'\s*<{prefix}parameter name="(?P<key>[^"]*)"(?: string="(?P<string>true|false)")?>(?P<value>.*?)'
        rf"</{prefix}parameter>(?=\s*<(?:{prefix}parameter name=|/{prefix}invoke>)|\s*\Z)"
    )


_MINIMAX = ToolFormat(
    name="minimax",
    head=rf"(?:<minimax:tool_call>\s*)?{_invoke('')}",
    read=_parameters(""),
    tail=r"(?:\s*</invoke>|\n\s*\Z|(?<=</parameter>)\Z)(?:\s*</minimax:tool_call>)?",
    marks=("<minimax:tool_call>", "</minimax:tool_call>", "</invoke>"),
    call='<minimax:tool_call>\n<invoke name="NAME">',
    close="</invoke>",
)
_DEEPSEEK_V32 = ToolFormat(
    name="deepseek_v32",
    head=rf"(?:<｜DSML｜function_calls>\s*)?{_invoke('｜DSML｜')}",
    read=_parameters("｜DSML｜"),
    tail=r"\s*</｜DSML｜invoke>(?:\s*</｜DSML｜function_calls>)?",
    marks=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    call='<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">',
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
_MISTRAL_V11 = replace(
    _MISTRAL, call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", joint="", thinking=("[THINK]", "[/THINK]")
)
_GEMMA4 = ToolFormat(
    name="gemma4",
    head=r"<\|tool_call>call:(?P<tool>[^\s{]+)(?=\{)",
    read=_read_gemma,
    tail=r"<tool_call\|>|\Z",
    marks=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>"),
    call="<|tool_call>call:NAME",
    close="<tool_call|>",
    thinking=("<|channel>thought", "<channel|>"),
)
_LFM2 = ToolFormat(
    name="lfm2",
    head=r"<\|tool_call_start\|>",
    read=read_python,
    tail=r"\s*\]\s*(?:<\|tool_call_end\|>|\Z)",
    marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    call="<|tool_call_start|>[NAME(",
)

_START = r"(?:\A|<\|start\|>assistant)"
_NEXT = r"(?=<\|start\|>assistant)|\Z"


def _noise(thought: str, user: str, end: str, marks: Sequence[str]) -> str:
    """Return the pattern of thoughts, and of heads and ends of messages to the user."""
    heads = rf"{_START}\s*{thought}\s*<\|message\|>.*?(?:{end}|{_NEXT})|{_START}\s*{user}<\|message\|>"
    return "|".join([heads, *map(re.escape, marks)])


_HARMONY_END = r"<\|(?:end|return|call)\|>"
_HARMONY = [f"<|{name}|>" for name in ("end", "return", "call", "channel", "constrain", "start", "message")]
_CONSTRAINED = r"(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?"
_GPT_OSS = ToolFormat(
    name="gpt_oss",
    head=rf"{_START}[^<]*(?:<\|channel\|>[^<]*)?\bto=functions\.(?P<tool>[\w.-]+)"
    rf"[^<]*{_CONSTRAINED}<\|message\|>",
    tail=rf"{_HARMONY_END}|{_NEXT}",
    noise=_noise(r"<\|channel\|>analysis", _CONSTRAINED, _HARMONY_END, _HARMONY),
    marks=_HARMONY,
    call=" to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS",
    thinking=("<|channel|>analysis<|message|>", "<|end|>"),
)
_ATEM_END = r"<\|(?:eom|eot)\|>"
_ATEM = ("<|eom|>", "<|eot|>", "<|start|>", "<|message|>")
_MUSE_GLIMMER = ToolFormat(
    name="muse_glimmer",
    head=rf"{_START}[^<]*<\|message\|><atem:function_calls>\s*{_invoke('atem:')}",
    read=_parameters("atem:"),
    tail=rf"\s*</atem:invoke>\s*(?:</atem:function_calls>\s*)?(?:{_ATEM_END}|{_NEXT})",
    noise=_noise("to=self", r"(?:to=user\s*)?", _ATEM_END, _ATEM),
    marks=_ATEM,
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
    (("<|tool_call_start|>",), _LFM2),
    (("<|tool_list_start|>",), _LFM2),
    (("<arg_key>",), _GLM),
    (("<function=", "<parameter="), _QWEN3_CODER),
    (("<TOOLCALL>",), _json_list("toolcall", "<TOOLCALL>", "</TOOLCALL>")),
    (("<tool_calls>",), _json_list("tool_calls", "<tool_calls>", "</tool_calls>")),
    (("<function=",), _UNKNOWN),  # Functionary
    (("functools[",), _UNKNOWN),  # Firefunction
    ((f"{OPEN}[",), replace(_HERMES, call=f"{OPEN}[\n{_JSON_CALL}\n]{CLOSE}")),  # SmolLM2
    ((OPEN,), _HERMES),
    (('"parameters"', "<|python_tag|>"), _LLAMA),
    (('"parameters"', "ipython"), _LLAMA),
]
"""(substrings of chat templates, format); the first match counts, or the last format of a name."""


def find_tool_format(name: str, template: str, response_template: Any = None) -> ToolFormat:
    """Return the format `name`. auto: by the chat template, else the tokenizer's response template. Raises
    ConfigError.
    """
    if ":" in name:
        function = load_function(name, "gateway.tool_format", usage=USAGE, arguments=("",))
        return UserFormat(name=name, function=function)
    fitting = [each for shown, each in FAMILIES if all(mark in template for mark in shown)]
    named = {each.name: each for _, each in FAMILIES} | {each.name: each for each in reversed(fitting)}
    known = ", ".join([*(each for each in named if each != "none"), "response_template"])
    found = fitting[0].name if fitting else "none"
    if found == "none" and "tool_calls" in (response_template or {}).get("fields", {}):
        found = "response_template"
    chosen = found if name == "auto" else name
    tool_format = named.get(chosen)
    if chosen == "response_template":
        tool_format = response_template_format(response_template)
    if tool_format is None:
        way_out = f"set it to auto, {known}, none, or module:function of a parser of your own."
        raise ConfigError(f"gateway.tool_format={name} is not known", way_out=way_out)
    if template and not re.search(r"\btools\b", template):
        why = "the chat template never mentions `tools`, so the model would not see them"
        return replace(tool_format, refusal=f"{why}. Set model.chat_template to another Jinja file.")
    if tool_format.name == "none":
        why = f"gateway.tool_format={name} knows no tool calls of this chat template. Set it to {known}, or "
        return replace(tool_format, refusal=f"{why}module:function of a parser, or set model.chat_template.")
    return tool_format
