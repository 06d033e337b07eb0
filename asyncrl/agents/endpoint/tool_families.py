"""Tool-call formats of model families."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

from asyncrl.agents.endpoint.tool_formats import (
    ChannelFormat,
    LlamaFormat,
    MarkedFormat,
    ResponseTemplateFormat,
    ToolFormat,
    UserFormat,
)
from asyncrl.agents.endpoint.tool_markup import (
    SPACE,
    ToolCall,
    Tools,
    json_arguments,
    json_calls,
    make_call,
    named_calls,
    rewritten,
    skip,
    tagged,
)
from asyncrl.base.errors import ConfigError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_JSON_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'


def _hermes() -> list[MarkedFormat]:
    """Hermes, Qwen 2.5 and 3: a call in each <tool_call>; SmolLM2: a list of calls."""
    call = f"{OPEN}\n{_JSON_CALL}\n{CLOSE}"
    read = json_calls(rf"{CLOSE}|\Z")
    plain = MarkedFormat("hermes", [OPEN, CLOSE], call, read, close=CLOSE, joint="\n")
    return [replace(plain, call=f"{OPEN}[\n{_JSON_CALL}\n]{CLOSE}"), plain]


def _json_list(name: str, begin: str, end: str) -> MarkedFormat:
    return MarkedFormat(
        name, [begin, end], f"{begin}[{_JSON_CALL}]{end}", json_calls(rf"{re.escape(end)}|\Z")
    )


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
    r'\s*<｜DSML｜parameter name="(?P<key>[^"]*)" string="(?P<string>true|false)">(?P<value>.*?)'
    r"</｜DSML｜parameter>"
)
_ATEM = (
    r'\s*<atem:parameter name="(?P<key>[^"]*)">(?P<value>.*?)</atem:parameter>'
    r"(?=\s*<(?:atem:parameter name=|/atem:invoke>))"
)


def _qwen3_coder() -> MarkedFormat:
    tail = rf"\s*</function>\s*(?:{CLOSE}|\Z)"
    read = named_calls(r"<function=(?P<name>[^>\n]+)>", tagged(_PARAMETER), tail)
    return MarkedFormat("qwen3_coder", [OPEN, CLOSE], f"{OPEN}\n<function=NAME>", read, close=CLOSE)


def _glm() -> MarkedFormat:
    # a name that was cut off is no call
    tail = rf"\s*{CLOSE}|\n\s*\Z|(?<=</arg_value>)\Z"
    read = named_calls(r"(?P<name>[^\s<]+)", tagged(_ARGUMENT), tail)
    return MarkedFormat("glm", [OPEN, CLOSE], f"{OPEN}NAME", read, close=CLOSE)


def _minimax() -> MarkedFormat:
    begin, end = "<minimax:tool_call>", "</minimax:tool_call>"
    head = r'<invoke name="(?P<name>[^"]+)">'
    tail = r"\s*</invoke>|\n\s*\Z|(?<=</parameter>)\Z"
    read = named_calls(head, tagged(_INVOKED), tail, between=r"\s*", end=rf"\s*(?:{end}|\Z)")
    call = f'{begin}\n<invoke name="NAME">'
    return MarkedFormat("minimax", [begin, end, "</invoke>"], call, read, close="</invoke>")


def _deepseek_v32() -> MarkedFormat:
    begin, end = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    head = r'<｜DSML｜invoke name="(?P<name>[^"]+)">'
    end_pattern = rf"\s*(?:{end}|\Z)"
    read = named_calls(head, tagged(_DSML), r"\s*</｜DSML｜invoke>", between=r"\s*", end=end_pattern)
    call = f'{begin}\n<｜DSML｜invoke name="NAME">'
    return MarkedFormat("deepseek_v32", [begin, end, "｜DSML｜"], call, read)


def _deepseek() -> list[MarkedFormat]:
    """V3 and R1: `function`, then the name and a JSON block; V3.1: the name, then JSON."""
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    opens, sep, close = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    head = rf"{opens}(?:function{sep}(?=[^\s{{]))?(?P<name>[^\s<]+)(?:{sep}|\s*```json)"
    tail = rf"\s*(?:```)?\s*(?:{close}|\Z)"
    read = named_calls(head, json_arguments, tail, between=r"\s*", end=rf"\s*(?:{end}|\Z)")
    call = f"{begin}{opens}NAME{sep}ARGUMENTS{close}{end}"
    v3_1 = MarkedFormat("deepseek", [begin, opens, sep, close, end], call, read, close=close)
    v3_call = f"{begin}{opens}function{sep}NAME\n```json\nARGUMENTS\n```{close}{end}"
    return [replace(v3_1, call=v3_call), v3_1]


def _kimi() -> MarkedFormat:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    opens, then, close = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    head = rf"{re.escape(opens)}\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*{re.escape(then)}"
    last = rf"\s*(?:{re.escape(end)}|\Z)"
    read = named_calls(head, json_arguments, rf"{re.escape(close)}|\Z", between=r"\s*", end=last)
    call = f"{begin}{opens}functions.NAME:0{then}ARGUMENTS{close}{end}"
    return MarkedFormat("kimi", [begin, opens, then, close, end], call, read, close=close)


def _mistral() -> list[MarkedFormat]:
    """`[TOOL_CALLS] [{"name": ...}, ...]`; since tokenizer version 11, `[TOOL_CALLS]NAME[ARGS]{...}` for each
    call.
    """
    begin = "[TOOL_CALLS]"
    head = r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?(?=\s*\{)"
    named = named_calls(head, json_arguments, "")
    listed = json_calls("")

    def read(text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        is_list = text.startswith(("[", "{"), skip(SPACE, text, at))
        return (listed if is_list else named)(text, at, tools)

    old = MarkedFormat("mistral", [begin, "[ARGS]", "[CALL_ID]"], f"{begin}[{_JSON_CALL}]", read)
    thinking = ("[THINK]", "[/THINK]")
    return [replace(old, call=f"{begin}NAME[ARGS]ARGUMENTS", joint="", thinking=thinking), old]


def _gemma4() -> MarkedFormat:
    begin, close, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    arguments = rewritten(r'<\|"\|>(?P<raw>.*?)<\|"\|>|(?P<key>[^:{}\[\],]+)(?=:)')
    read = named_calls(r"call:(?P<name>[^\s{]+)(?=\{)", arguments, rf"{re.escape(close)}|\Z")
    marks = [begin, close, quote, "<|channel>"]
    thinking = ("<|channel>thought", "<channel|>")
    return MarkedFormat("gemma4", marks, f"{begin}call:NAME", read, close=close, thinking=thinking)


def _lfm2(outer: str = "") -> MarkedFormat:
    """`[f(x='a', y=1)]`, as in Python."""
    begin, end = "<|tool_call_start|>", "<|tool_call_end|>"
    quoted = r"""(?P<quote>['"])(?P<escaped>(?:(?!(?P=quote))[^\\]|\\.)*)(?P=quote)"""
    arguments = rewritten(rf"{quoted}|(?P<key>\w+)(?=\s*=)", outer)
    head = r"\[?\s*(?P<name>[\w.-]+)(?=\()"
    last = r"\s*\]\s*(?:<\|tool_call_end\|>|\Z)"
    read = named_calls(head, arguments, "", between=r"\s*,\s*", end=last)
    return MarkedFormat("lfm2", [begin, end], f"{begin}[NAME(", read)


_LFM2_RAW = r"'(?P<raw>.*?)'(?=\s*(?:,\s*\w+=|\)\s*(?:,\s*[\w.-]+\(|\]\s*(?:<\|tool_call_end\|>|\Z))))"


def _gpt_oss() -> ChannelFormat:
    recipients = re.compile(r"\bto=functions\.([\w.-]+)")

    def read(head: str, body: str, tools: Tools) -> list[ToolCall]:
        recipient = recipients.search(head)
        return [make_call(recipient[1] if recipient else None, json.loads(body))]

    return ChannelFormat(
        name="gpt_oss",
        head=r"(?P<call>(?=[^\n]*\bto=)[^<]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?)"
        r"|(?P<thought>\s*<\|channel\|>analysis\s*)|\s*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        marks=("<|channel|>", "<|constrain|>"),
        read=read,
        call=" to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS",
        thinking=("<|channel|>analysis<|message|>", "<|end|>"),
    )


def _muse_glimmer() -> ChannelFormat:
    begin = r'<atem:function_calls>\s*<atem:invoke name="(?P<name>[^"]*)">'
    end = r"\s*(?:</atem:function_calls>|\Z)"
    read_call = named_calls(begin, tagged(_ATEM), r"\s*</atem:invoke>", end=end)

    def read(head: str, body: str, tools: Tools) -> list[ToolCall]:
        calls, end = read_call(body, 0, tools)
        if body[end:].strip():
            raise ValueError("there is text after a call")
        return calls

    return ChannelFormat(
        name="muse_glimmer",
        head=r"(?P<thought>\s*to=self\s*)|\s*(?:to=user)?\s*|(?P<call>[^<]*)",
        ends=("<|eom|>", "<|eot|>"),
        read=read,
        call=' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">',
        thinking=("to=self<|message|>", "<|eom|>"),
    )


@cache
def families() -> list[tuple[tuple[str, ...], ToolFormat]]:
    """Return (substrings of chat templates, format); the first match counts, or the last format of a name."""
    smol_lm2, hermes = _hermes()
    deepseek_v3, deepseek = _deepseek()
    mistral_v11, mistral = _mistral()
    lfm2 = _lfm2()
    unknown = ToolFormat()
    return [
        (("<|channel|>", "functions."), _gpt_oss()),
        (("<atem:invoke",), _muse_glimmer()),
        (("<|tool_call>call:",), _gemma4()),
        (("<｜DSML｜",), _deepseek_v32()),
        (("<｜tool▁call▁begin｜>", "```json"), deepseek_v3),
        (("<｜tool▁call▁begin｜>",), deepseek),
        (("minimax:tool_call>",), _minimax()),
        (("<|tool_call_argument_begin|>",), _kimi()),
        (("[TOOL_CALLS]", "[ARGS]"), mistral_v11),
        (("[TOOL_CALLS]",), mistral),
        (("<|tool_call_start|>", "format_arg_value", "replace("), lfm2),
        (("<|tool_call_start|>", "format_arg_value"), _lfm2(_LFM2_RAW)),
        (("<|tool_call_start|>",), lfm2),
        (("<|tool_list_start|>",), lfm2),
        (("<arg_key>",), _glm()),
        (("<function=", "<parameter="), _qwen3_coder()),
        (("<TOOLCALL>",), _json_list("toolcall", "<TOOLCALL>", "</TOOLCALL>")),
        (("<tool_calls>",), _json_list("tool_calls", "<tool_calls>", "</tool_calls>")),
        (("<function=",), unknown),  # Functionary
        (("functools[",), unknown),  # Firefunction
        ((f"{OPEN}[",), smol_lm2),
        ((OPEN,), hermes),
        (('"parameters"', "<|python_tag|>"), LlamaFormat()),
        (('"parameters"', "ipython"), LlamaFormat()),
    ]


_SHOWS_TOOLS = re.compile(r"\btools\b")
NO_TOOLS = (
    "the chat template never mentions `tools`, so the model would not see them. Set model.chat_template to a "
    "Jinja file that shows tools to the model."
)


def find_tool_format(name: str, template: str, response_template: Any = None) -> ToolFormat:
    """Return the format `name`. auto: by the chat template, else the tokenizer's response template. Raises
    ConfigError.
    """
    if ":" in name:
        return UserFormat.of(name)
    fitting = [each for shown, each in families() if all(mark in template for mark in shown)]
    named = {each.name: each for _, each in families()} | {each.name: each for each in reversed(fitting)}
    known = ", ".join([*(each for each in named if each != "none"), "response_template"])
    is_auto = name == "auto"
    if is_auto:
        name = fitting[0].name if fitting else "none"
        if name == "none" and "tool_calls" in (response_template or {}).get("fields", {}):
            name = "response_template"
    if name != "response_template" and name not in named:
        way_out = f"set it to auto, {known}, none, or module:function of a parser of your own."
        raise ConfigError(f"gateway.tool_format={name} is not known", way_out=way_out)
    if template and not _SHOWS_TOOLS.search(template):
        refusal = NO_TOOLS
    elif name != "none":
        refusal = ""
    elif is_auto:
        refusal = (
            "gateway.tool_format=auto does not know the tool calls that this chat template shows. Set "
            f"it to {known}, or module:function of a parser of your own, or set model.chat_template."
        )
    else:
        refusal = "gateway.tool_format is none."
    found = named[name] if name in named else ResponseTemplateFormat.of(response_template)
    return replace(found, refusal=refusal)
