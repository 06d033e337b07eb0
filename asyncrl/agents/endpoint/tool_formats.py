"""The tool-call formats of model families, as data: where calls begin, how each is written, how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from asyncrl.agents.endpoint.tool_calls import (
    CLOSE,
    OPEN,
    HermesFormat,
    MarkedFormat,
    ParsedAnswer,
    ToolCall,
    ToolFormat,
    json_calls,
    make_call,
    named_calls,
)
from asyncrl.agents.tool_arguments import (
    MALFORMED,
    SPACE,
    Tools,
    Values,
    json_arguments,
    python_string,
    skip,
    tagged,
)
from asyncrl.errors import ConfigError

# ---- formats that write an answer in channels


class ChannelFormat(ToolFormat):
    """An answer in messages of several channels: thoughts, calls, and what is for the user.

    Content is what the messages for the user hold, and no thought: these templates refuse to take one back
    in it. What cannot be read is text without the marks. An answer is streamed in one piece.
    """

    def __init__(
        self,
        name: str,
        message: str,
        read: Callable[[re.Match[str], Tools], list[ToolCall] | str | None],
        prefills: tuple[str, str],
        *,
        ends: Sequence[str],
        marks: Sequence[str],
        thinking: tuple[str, str],
        has_json: bool = False,
    ) -> None:
        """`message`: pattern of one, from after `<|start|>assistant` on. `read`: its calls, its text, or None
        for a thought. `ends`: what may close one.
        """
        self.name, self.thinking, self._prefills = name, thinking, prefills
        self.opens = (*ends, *marks)
        self._marks = re.compile("|".join(map(re.escape, self.opens)))
        self._message, self._read = re.compile(message, re.DOTALL), read
        self._reads_calls, self._has_json = True, has_json

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        calls: list[ToolCall] = []
        content: list[str] = []
        at = 0
        try:
            while at < len(text):
                start = at + len(_START) if text.startswith(_START, at) else at
                message = self._message.match(text, start)
                if message is None or message.end() == start:
                    raise ValueError("this is no message")
                found, at = self._read(message, tools), message.end()
                if isinstance(found, list):
                    calls += found
                else:
                    content.append(found or "")
        except MALFORMED:
            return ParsedAnswer(self._marks.sub("", text))
        if calls and not self._reads_calls:
            return ParsedAnswer(self._marks.sub("", text))
        return ParsedAnswer("".join(content) or (None if calls else ""), tuple(calls))

    def hold_from(self, text: str, start: int = 0) -> int:
        return 0

    def prefill(self, name: str | None) -> str:
        """Up to the name, or to the arguments."""
        return self._prefills[0] if name is None else self._prefills[1].replace("NAME", name)

    def around(self, name: str) -> tuple[str, str] | None:
        """Of gpt-oss, which writes arguments in JSON."""
        return (self.prefill(name), "") if self._has_json else None

    def without_tools(self) -> ToolFormat:
        """Channels are read without tools, too; an answer with a call is text."""
        found = copy(self)
        found._reads_calls = False
        return found


_START = "<|start|>assistant"
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


def _harmony(message: re.Match[str], tools: Tools) -> list[ToolCall] | str | None:
    """A call goes `to=functions.NAME`; other recipients are tools that nobody has given."""
    head, body = message["head"], message["body"]
    if "to=" in head:
        recipient = _RECIPIENT.search(head)
        return [make_call(recipient[1] if recipient else None, json.loads(body))]
    return None if "<|channel|>analysis" in head else body


_ATEM = r'\s*<atem:parameter name="(?P<key>[^"]*)">(?P<value>.*?)</atem:parameter>'
_read_atem = named_calls(
    r'<atem:function_calls>\s*<atem:invoke name="(?P<name>[^"]*)">',
    tagged(_ATEM + r"(?=\s*<(?:atem:parameter name=|/atem:invoke>))"),
    r"\s*</atem:invoke>",
    end=r"\s*(?:</atem:function_calls>|\Z)",
)


def _muse(message: re.Match[str], tools: Tools) -> list[ToolCall] | str | None:
    head, body = message["head"].strip(), message["body"]
    if head == "to=self":
        return None
    if head in ("", "to=user"):
        return body
    calls, end = _read_atem(body, 0, tools)
    if body[end:].strip():
        raise ValueError("there is text after a call")
    return calls


# ---- what transformers reads


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


# ---- the table


def _hermes(template: str) -> ToolFormat:
    return HermesFormat(writes_lists=f"{OPEN}[" in template)


def _closed(tool_format: ToolFormat, close: str) -> ToolFormat:
    tool_format.close = close
    tool_format.opens = tuple(dict.fromkeys([*tool_format.opens, close]))
    return tool_format


def _json_lists(name: str, begin: str, end: str) -> Callable[[str], ToolFormat]:
    """A list of calls, or one below the other."""
    prefills = (f'{begin}[{{"name":', f'{begin}[{{"name": "NAME", "arguments":')
    read = json_calls(rf"{re.escape(end)}|\Z")
    around = (" ", f"}}]{end}")
    return lambda template: MarkedFormat(name, begin, read, prefills, marks=[end], around=around)


_PARAMETER = (
    r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
)
_ARGUMENT = r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
_INVOKED = (
    r'\s*<parameter name="(?P<key>[^"]*)">(?P<value>.*?)</parameter>'
    r"(?=\s*<(?:parameter name=|/invoke>)|\s*\Z)"
)
_DSML = (
    r'\s*<｜DSML｜parameter name="(?P<key>[^"]*)" string="(?P<string>true|false)">(?P<value>.*?)'
    r"</｜DSML｜parameter>"
)


def _qwen3_coder(template: str) -> ToolFormat:
    tail = r"\s*</function>\s*(?:</tool_call>|\Z)"
    read = named_calls(r"<function=(?P<name>[^>\n]+)>", tagged(_PARAMETER), tail)
    prefills = (f"{OPEN}\n<function=", f"{OPEN}\n<function=NAME>")
    return _closed(MarkedFormat("qwen3_coder", OPEN, read, prefills, marks=[CLOSE]), CLOSE)


def _glm(template: str) -> ToolFormat:
    # what was cut off within a name is no call: a line, or an argument, has ended before the end
    tail = r"\s*</tool_call>|\n\s*\Z|(?<=</arg_value>)\Z"
    arguments = tagged(_ARGUMENT + r"(?=\s*(?:<arg_key>|</tool_call>|\Z))")
    read = named_calls(r"(?P<name>[^\s<]+)", arguments, tail)
    return _closed(MarkedFormat("glm", OPEN, read, (OPEN, f"{OPEN}NAME"), marks=[CLOSE]), CLOSE)


def _minimax(template: str) -> ToolFormat:
    begin, end = "<minimax:tool_call>", "</minimax:tool_call>"
    tail = r"\s*</invoke>|\n\s*\Z|(?<=</parameter>)\Z"
    head = r'<invoke name="(?P<name>[^"]+)">'
    read = named_calls(head, tagged(_INVOKED), tail, between=r"\s*", end=rf"\s*(?:{end}|\Z)")
    prefills = (f'{begin}\n<invoke name="', f'{begin}\n<invoke name="NAME">')
    return _closed(MarkedFormat("minimax", begin, read, prefills, marks=[end]), "</invoke>")


def _dsml(template: str) -> ToolFormat:
    begin, end = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    head, tail = r'<｜DSML｜invoke name="(?P<name>[^"]+)">', r"\s*</｜DSML｜invoke>"
    read = named_calls(head, tagged(_DSML), tail, between=r"\s*", end=rf"\s*(?:{end}|\Z)")
    prefills = (f'{begin}\n<｜DSML｜invoke name="', f'{begin}\n<｜DSML｜invoke name="NAME">')
    return MarkedFormat("deepseek_v32", begin, read, prefills, marks=[end, "｜DSML｜"])


def _deepseek(template: str) -> ToolFormat:
    """V3 and R1: `function`, then the name and a block of JSON; V3.1: the name, then JSON."""
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    opens, sep, close = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    head = rf"{opens}(?:function{sep}(?=[^\s{{]))?(?P<name>[^\s<]+)(?:{sep}|\s*```json)"
    tail = rf"\s*(?:```)?\s*(?:{close}|\Z)"
    read = named_calls(head, json_arguments, tail, between=r"\s*", end=rf"\s*(?:{end}|\Z)")
    first, last = (f"function{sep}", "\n```json") if "```json" in template else ("", sep)
    prefills = (f"{begin}{opens}{first}", f"{begin}{opens}{first}NAME{last}")
    marks, ends = [opens, sep, close, end], f"{close}{end}"
    around = ("\n", f"\n```{ends}") if "```json" in template else ("", ends)
    return _closed(MarkedFormat("deepseek", begin, read, prefills, marks=marks, around=around), close)


def _kimi(template: str) -> ToolFormat:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    opens, then, close = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    head = rf"{re.escape(opens)}\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*{re.escape(then)}"
    tail, last = rf"{re.escape(close)}|\Z", rf"\s*(?:{re.escape(end)}|\Z)"
    read = named_calls(head, json_arguments, tail, between=r"\s*", end=last)
    prefills = (f"{begin}{opens}functions.", f"{begin}{opens}functions.NAME:0{then}")
    marks, around = [opens, then, close, end], ("", f"{close}{end}")
    return _closed(MarkedFormat("kimi", begin, read, prefills, marks=marks, around=around), close)


def _mistral(template: str) -> ToolFormat:
    """`[TOOL_CALLS] [{"name": ...}, ...]`; since version 11 of its tokenizer `[TOOL_CALLS]NAME[ARGS]{...}`
    for each call.
    """
    begin = "[TOOL_CALLS]"
    head = r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\s*\{)"
    named, listed = named_calls(head, json_arguments, ""), json_calls("")

    def read(text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        is_list = text.startswith(("[", "{"), skip(SPACE, text, at))
        return (listed if is_list else named)(text, at, tools)

    prefills = (f'{begin}[{{"name":', f'{begin}[{{"name": "NAME", "arguments":')
    around, joint = (" ", "}]"), None
    if "[ARGS]" in template:
        prefills, around, joint = (begin, f"{begin}NAME[ARGS]"), ("", ""), ""
    thinking = ("[THINK]", "[/THINK]") if "[THINK]" in template else ToolFormat.thinking
    marks = ["[ARGS]", "[CALL_ID]"]
    found = MarkedFormat("mistral", begin, read, prefills, marks=marks, around=around, thinking=thinking)
    found.joint = joint
    return found


def _gemma4(template: str) -> ToolFormat:
    begin, close, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    values = Values([(r'<\|"\|>(.*?)<\|"\|>', str)], r"[^:{}\[\],]+")
    head, tail = r"call:(?P<name>[^\s{]+)(?=\{)", rf"{re.escape(close)}|\Z"
    read, prefills = named_calls(head, values.arguments, tail), (f"{begin}call:", f"{begin}call:NAME")
    thinking = ("<|channel>thought", "<channel|>")
    marks = [close, quote, "<|channel>"]
    return _closed(MarkedFormat("gemma4", begin, read, prefills, marks=marks, thinking=thinking), close)


def _lfm2(template: str) -> ToolFormat:
    """`[f(x='a', y=1)]`, as in Python. Some templates of LFM 2.5 write texts without escapes."""
    begin, end = "<|tool_call_start|>", "<|tool_call_end|>"
    follows = r"\s*(?:,\s*\w+=|\)\s*(?:,\s*[\w.-]+\(|\]\s*(?:<\|tool_call_end\|>|\Z)))"
    is_raw = "format_arg_value" in template and "replace(" not in template
    strings = [(r"'((?:[^'\\]|\\.)*)'", python_string), (r'"((?:[^"\\]|\\.)*)"', python_string)]
    values = Values(strings, r"\w+", outer=rf"'(.*?)'(?={follows})" if is_raw else None)
    head, last = r"\[?\s*(?P<name>[\w.-]+)(?=\()", r"\s*\]\s*(?:<\|tool_call_end\|>|\Z)"
    read = named_calls(head, values.arguments, "", between=r"\s*,\s*", end=last)
    return MarkedFormat("lfm2", begin, read, (f"{begin}[", f"{begin}[NAME("), marks=[end])


def _gpt_oss(template: str) -> ToolFormat:
    return ChannelFormat(
        "gpt_oss",
        r"(?P<head>[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)<\|message\|>"
        r"(?P<body>.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|\Z)",
        _harmony,
        (" to=functions.", " to=functions.NAME<|channel|>commentary json<|message|>"),
        ends=("<|end|>", "<|return|>", "<|call|>"),
        marks=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        thinking=("<|channel|>analysis<|message|>", "<|end|>"),
        has_json=True,
    )


def _muse_glimmer(template: str) -> ToolFormat:
    return ChannelFormat(
        "muse_glimmer",
        r"(?P<head>[^<]*)<\|message\|>(?P<body>.*?)(?:<\|eom\|>|<\|eot\|>|\Z)",
        _muse,
        (" to=", ' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">'),
        ends=("<|eom|>", "<|eot|>"),
        marks=("<|start|>", "<|message|>"),
        thinking=("to=self<|message|>", "<|eom|>"),
    )


FORMATS: dict[str, Callable[[str], ToolFormat]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "glm": _glm,
    "gpt_oss": _gpt_oss,
    "gemma4": _gemma4,
    "deepseek": _deepseek,
    "deepseek_v32": _dsml,
    "mistral": _mistral,
    "minimax": _minimax,
    "lfm2": _lfm2,
    "kimi": _kimi,
    "muse_glimmer": _muse_glimmer,
    "toolcall": _json_lists("toolcall", "<TOOLCALL>", "</TOOLCALL>"),
    "tool_calls": _json_lists("tool_calls", "<tool_calls>", "</tool_calls>"),
}
"""Made of the chat template's text, empty if it is not known."""

_SHOWN = [
    ("gpt_oss", ("<|channel|>", "functions.")),
    ("muse_glimmer", ("<atem:invoke",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("deepseek_v32", ("<｜DSML｜",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("minimax", ("minimax:tool_call>",)),
    ("kimi", ("<|tool_call_argument_begin|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("glm", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("toolcall", ("<TOOLCALL>",)),
    ("tool_calls", ("<tool_calls>",)),
    ("", ("<function=",)),  # Functionary
    ("", ("functools[",)),  # Firefunction
    ("hermes", (OPEN,)),
    ("llama", ('"parameters"', "<|python_tag|>")),
    ("llama", ('"parameters"', "ipython")),
]
"""What a chat template of each format has. The first that fits counts: some have <tool_call> as well."""


def name_from(template: str) -> str:
    """The format that the chat template shows to the model; empty if none is known."""
    fits = (name for name, marks in _SHOWN if all(mark in template for mark in marks))
    return next(fits, "")
