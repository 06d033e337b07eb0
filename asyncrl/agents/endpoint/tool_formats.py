"""Tool-call formats of model families, as data: start, syntax and end of calls."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from copy import copy

from asyncrl.agents.endpoint.tool_calls import (
    CLOSE,
    OPEN,
    HermesFormat,
    MarkedFormat,
    ParsedAnswer,
    ToolFormat,
    overlap,
)
from asyncrl.agents.tool_markup import (
    MALFORMED,
    SPACE,
    ToolCall,
    Tools,
    Values,
    json_arguments,
    json_calls,
    make_call,
    named_calls,
    python_string,
    skip,
    tagged,
)

# ---- formats with channels

_START, _MESSAGE = "<|start|>assistant", "<|message|>"


class ChannelFormat(ToolFormat):
    """An answer in messages, each with a head that names its channel: a thought, a call, or the user.

    Content is the user's text without thoughts, which the templates refuse when sent back. From an unreadable
    message on, or from the first call if a later one is unreadable, all is content, without the marks.
    """

    def __init__(
        self,
        name: str,
        head: str,
        read: Callable[[str, str, Tools], list[ToolCall]],
        prefills: tuple[str, str],
        *,
        ends: Sequence[str],
        marks: Sequence[str],
        thinking: tuple[str, str],
        has_json: bool = False,
    ) -> None:
        """`head`: pattern with a group named `thought` or `call`, none for the user. `read`: returns the
        calls of (head, body, tools). `ends`: possible ends of a message.
        """
        self.name, self.thinking, self._prefills = name, thinking, prefills
        self.opens, self._ends = (*ends, *marks, _START.removesuffix("assistant"), _MESSAGE), ends
        self._marks = re.compile("|".join(map(re.escape, self.opens)))
        self._head = re.compile(head)
        self._end = re.compile("|".join([*map(re.escape, ends), rf"(?={re.escape(_START)})"]))
        self._read, self._reads_calls, self._has_json = read, True, has_json

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        calls: list[ToolCall] = []
        content: list[str] = []
        at, sure = 0, None
        try:
            while at < len(text):
                head, channel, body, end, behind = self._message_at(text, at)
                if channel == "call":
                    sure = sure or (len(content), at)
                    if not self._reads_calls:
                        raise ValueError("no tools are given")
                    calls += self._read(head, text[body:end], tools)
                elif channel != "thought":
                    content.append(text[body:end])
                at = behind
        except MALFORMED:
            num, at = sure or (len(content), at)
            return ParsedAnswer("".join(content[:num]) + self._marks.sub("", text[at:]))
        return ParsedAnswer("".join(content) or (None if calls else ""), tuple(calls))

    def show(self, text: str, start: int = 0) -> tuple[str, int]:
        pieces: list[str] = []
        at, shown = max(text.rfind(_START, 0, start), 0), start
        with contextlib.suppress(ValueError):  # an incomplete or invalid head
            while at < len(text):
                _, channel, body, end, behind = self._message_at(text, at)
                if channel == "call":
                    break
                if is_open := end == behind == len(text):
                    held = [overlap(text[body:], mark) for mark in (*self._ends, _START)]
                    end = max(body, end - max(held))
                if channel != "thought":
                    pieces.append(text[max(body, shown) : end])
                at = behind
                shown = max(shown, end if is_open else behind)
        return "".join(pieces), shown

    def _message_at(self, text: str, at: int) -> tuple[str, str | None, int, int, int]:
        """Return (head, channel, start and end of the body, start of the next message)."""
        at += len(_START) if text.startswith(_START, at) else 0
        body = text.find(_MESSAGE, at)
        head = self._head.fullmatch(text, at, max(body, at))
        if body < 0 or head is None:
            raise ValueError("this is no message")
        body += len(_MESSAGE)
        end = self._end.search(text, body)
        ends = (len(text), len(text)) if end is None else (end.start(), end.end())
        return head[0], head.lastgroup, body, *ends

    def hold_from(self, text: str, start: int = 0) -> int:
        return self.show(text, start)[1]

    def prefill(self, name: str | None) -> str:
        return self._prefills[0] if name is None else self._prefills[1].replace("NAME", name)

    def around(self, name: str) -> tuple[str, str] | None:
        return (self.prefill(name), "") if self._has_json else None

    def without_tools(self) -> ToolFormat:
        found = copy(self)
        found._reads_calls = False
        return found


_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


def _harmony(head: str, body: str, tools: Tools) -> list[ToolCall]:
    recipient = _RECIPIENT.search(head)
    return [make_call(recipient[1] if recipient else None, json.loads(body))]


_ATEM = r'\s*<atem:parameter name="(?P<key>[^"]*)">(?P<value>.*?)</atem:parameter>'
_read_atem = named_calls(
    r'<atem:function_calls>\s*<atem:invoke name="(?P<name>[^"]*)">',
    tagged(_ATEM + r"(?=\s*<(?:atem:parameter name=|/atem:invoke>))"),
    r"\s*</atem:invoke>",
    end=r"\s*(?:</atem:function_calls>|\Z)",
)


def _muse(head: str, body: str, tools: Tools) -> list[ToolCall]:
    calls, end = _read_atem(body, 0, tools)
    if body[end:].strip():
        raise ValueError("there is text after a call")
    return calls


# ---- the table


def _hermes(template: str) -> ToolFormat:
    return HermesFormat(writes_lists=f"{OPEN}[" in template)


def _closed(tool_format: ToolFormat, close: str) -> ToolFormat:
    tool_format.close = close
    tool_format.opens = tuple(dict.fromkeys([*tool_format.opens, close]))
    return tool_format


def _json_lists(name: str, begin: str, end: str) -> Callable[[str], ToolFormat]:
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
    # a name that was cut off is no call: a line or an argument must have ended before the end
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
    """V3 and R1: `function`, then the name and a JSON block; V3.1: the name, then JSON."""
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
    """`[TOOL_CALLS] [{"name": ...}, ...]`; since tokenizer version 11, `[TOOL_CALLS]NAME[ARGS]{...}` for each
    call.
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
    """`[f(x='a', y=1)]`, as in Python. Some LFM 2.5 templates write texts without escapes."""
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
        r"(?P<call>(?=[^\n]*\bto=)[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)"
        r"|(?P<thought>\s*<\|channel\|>analysis\s*)|\s*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?",
        _harmony,
        (" to=functions.", " to=functions.NAME<|channel|>commentary json<|message|>"),
        ends=("<|end|>", "<|return|>", "<|call|>"),
        marks=("<|channel|>", "<|constrain|>"),
        thinking=("<|channel|>analysis<|message|>", "<|end|>"),
        has_json=True,
    )


def _muse_glimmer(template: str) -> ToolFormat:
    return ChannelFormat(
        "muse_glimmer",
        r"(?P<thought>\s*to=self\s*)|\s*(?:to=user)?\s*|(?P<call>[^<]*)",
        _muse,
        (" to=", ' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">'),
        ends=("<|eom|>", "<|eot|>"),
        marks=(),
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
"""Builders from the chat template's text, empty if unknown."""

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
"""Substrings of chat templates, by format. The first match counts: some also have <tool_call>."""


def name_from(template: str) -> str:
    fits = (name for name, marks in _SHOWN if all(mark in template for mark in marks))
    return next(fits, "")
