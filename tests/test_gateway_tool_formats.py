"""Calls in the formats of templates and vendors are parsed; malformed calls stay text."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from gateway_cases import gateway_world, in_loop
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.tool_formats import (
    FAMILIES,
    ParsedAnswer,
    ToolCall,
    ToolFormat,
    find_tool_format,
    typed,
)
from asyncrl.base.errors import ConfigError, RolloutFailure

Calls = list[tuple[str, dict[str, Any]]]


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {"type": each} for key, each in properties.items()}}


TYPES = {"s": "string", "t": "string", "n": "integer", "x": "number", "b": "boolean", "o": "object"}
PARAMETERS = {"f": schema(**TYPES, list="array", z="null"), "g_h": schema()}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]

TEMPLATES = resources.files("trl") / "chat_templates"


@functools.cache
def template(name: str) -> str:
    # the originals say what day it is: a test that runs at midnight sees one day
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return text.replace("strftime_now is defined", "false")


FILES = [path.name for path in TEMPLATES.iterdir() if path.name.endswith(".jinja")]
ALL = sorted({name.removesuffix(".jinja").removesuffix("_training") for name in FILES})
WRITING = [name for name in ALL if name != "lfm2" and re.search(r"\btools\b", template(name))]
"""lfm2 shows the tools, and leaves a message's calls out."""
ENDS = ("<|im_end|>", "<|eot_id|>", "<|return|>", "<turn|>", "<|user|>", "<|tool_response>")
ENDS += ("<|observation|>",)


def written(name: str, calls: Calls, content: str = "") -> str:
    """What the template writes for an answer with these calls, without the end of the turn."""
    from transformers.utils.chat_template_utils import render_jinja_template

    question = {"role": "user", "content": "Question?"}
    functions = [{"name": called, "arguments": arguments} for called, arguments in calls]
    sent = [{"type": "function", "id": "call12345", "function": function} for function in functions]
    answer = {"role": "assistant", "content": content, "tool_calls": sent}
    texts = [
        render_jinja_template(
            conversations=[chat],
            tools=TOOLS,
            chat_template=template(name),
            add_generation_prompt=len(chat) == 1,
            bos_token="<s>",
            eos_token="</s>",
        )[0][0]
        for chat in ([question], [question, answer])
    ]
    text = texts[1][len(os.path.commonprefix(texts)) :].rstrip("\n")
    for end in ENDS:
        text = text.removesuffix(end)
    return text


def calls_of(parsed: ParsedAnswer) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


@functools.cache
def found(name: str) -> ToolFormat:
    return find_tool_format("auto", template(name))


CASES: dict[str, Calls] = {
    "plain": [("f", {"s": "hi", "n": 5, "x": 1.5, "b": True})],
    "no arguments": [("g_h", {})],
    "parallel": [("f", {"s": "a"}), ("g_h", {}), ("f", {"n": 2})],
    "nested": [("f", {"o": {"a": [1, {"b": None}, True], "k": "v, w)"}, "list": ["x", "it's", "]", 2.5]})],
    "Unicode": [("f", {"s": "héé 日本 🙂", "o": {"ключ": "я"}})],
    "texts that look like values": [("f", {"s": "75001", "t": "true"})],
    "lines and spaces": [("f", {"s": "\na\n\nb\n", "t": "  x "})],
    "none": [("f", {"z": None})],
    "numbers": [("f", {"n": -3, "x": 1e-7, "b": False})],
    "quotes": [("f", {"s": 'it\'s "q" \\n \\ end', "t": "'"})],
    "no letters": [("f", {"list": ["\xa0 \u3000\u2028 \U000e0101"], "s": "\xa0"})],
    "markup": [("f", {"s": "</tool_call><b></arg_value></parameter>\n</parameter> [TOOL_CALLS]", "n": 1})],
}
ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}
NO_CONTENT = {"llama3_1", "llama3_2", "muse_glimmer", "gptoss"}
"""Their templates leave out what is said beside a call, or make a thought of it (gpt-oss)."""


@pytest.mark.parametrize("name", WRITING)
def test_calls_that_a_template_writes_are_read_back(name: str) -> None:
    assert found(name).refusal == ""
    for case, calls in CASES.items():
        if len(calls) > 1 and name in ONE_CALL:
            continue
        for content in ("", "Let me see."):
            text = written(name, calls, content)
            parsed = found(name).parse(text, TOOLS)
            assert calls_of(parsed) == calls, f"{case}: {text}"
            *_, said = (parsed.content or "").split("</think>")
            assert said.strip() == ("" if name in NO_CONTENT else content)


# ---- formats whose templates trl does not ship, as their vendors publish them

F, G = '{"s": "a b", "n": 1}', "{}"
BOTH: Calls = [("f", {"s": "a b", "n": 1}), ("g_h", {})]
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31, KIMI = (
    "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>",
)
LISTED = f'[{{"name": "f", "arguments": {F}}}, {{"name": "g_h", "arguments": {G}, "id": "abc"}}]'
PUBLISHED: list[tuple[str, str]] = [
    ("deepseek", f"<｜tool▁calls▁begin｜>{V3.format('f', F)}\n{V3.format('g_h', G)}<｜tool▁calls▁end｜>"),
    ("deepseek", f"<｜tool▁calls▁begin｜>{V31.format('f', F)}{V31.format('g_h', G)}<｜tool▁calls▁end｜>"),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="s" string="true">a b</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g_h">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    ("mistral", f"[TOOL_CALLS] {LISTED}"),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{F}[TOOL_CALLS]g_h[ARGS]{G}"),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abc[ARGS]{F}[TOOL_CALLS]g_h{G}"),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a b</parameter>\n'
        '<parameter name="n">1</parameter>\n</invoke>\n<invoke name="g_h">\n</invoke>\n</minimax:tool_call>',
    ),
    (
        "kimi",
        f"<|tool_calls_section_begin|>{KIMI.format('f', 0, F)}{KIMI.format('g_h', 1, G)}"
        "<|tool_calls_section_end|>",
    ),
    (
        "glm",  # since 4.7 without line feeds
        "<tool_call>f<arg_key>s</arg_key><arg_value>a b</arg_value><arg_key>n</arg_key>"
        "<arg_value>1</arg_value></tool_call><tool_call>g_h</tool_call>",
    ),
    ("lfm2", "<|tool_call_start|>[f(s='a b', n=1), g_h()]<|tool_call_end|>"),
    ("toolcall", f"<TOOLCALL>{LISTED}</TOOLCALL>"),
    ("tool_calls", f"<tool_calls>\n{LISTED[1:-1].replace('}}, ', '}}')}\n</tool_calls>"),
    ("tool_calls", f"<tool_calls>{LISTED}</tool_calls>"),
    ("hermes", f"<tool_call>\n{LISTED}\n</tool_call>"),
    (
        "gpt_oss",
        f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{F}<|call|><|start|>assistant"
        f"<|channel|>commentary to=functions.g_h<|message|>{G}",
    ),
]


@pytest.mark.parametrize(("name", "text"), PUBLISHED)
def test_calls_are_read_as_their_vendor_publishes_them(name: str, text: str) -> None:
    tool_format = find_tool_format(name, "")
    assert calls_of(tool_format.parse(text, TOOLS)) == BOTH
    if name != "gpt_oss":
        assert tool_format.parse(f"Sure. \n\n{text}", TOOLS).content == "Sure."


def raw_of(name: str) -> str:
    """Two calls, or one where the format has no more, as a format's model writes them."""
    published = [text for each, text in PUBLISHED if each == name]
    shipped = published or [written(SHIPPED[name], BOTH[:1] if name == "llama" else BOTH)]
    return shipped[0].rpartition("</think>")[2].lstrip("\n")


SHIPPED = {
    "qwen3_coder": "qwen3_6",
    "gemma4": "gemma4_v5",
    "muse_glimmer": "muse_glimmer",
    "llama": "llama3_2",
}
CHANNELS = ("gpt_oss", "muse_glimmer")
NAMES = sorted({each.name for _, each in FAMILIES} - {"none"})


@pytest.mark.parametrize("name", sorted({*NAMES} - {"llama"}))  # its models do not think
def test_call_inside_a_thought_does_not_count(name: str) -> None:
    tool_format = find_tool_format(name, "")
    text = raw_of(name)
    opens, closes = tool_format.thinking
    thought = f"{opens}\nI could write {'a call' if name in CHANNELS else text} here.\n{closes}"
    parsed = tool_format.parse(thought + "<|start|>assistant" * (name in CHANNELS) + text, TOOLS)
    shown = None if name in CHANNELS else thought
    assert parsed == ParsedAnswer(shown, tool_format.parse(text, TOOLS).tool_calls)


@pytest.mark.parametrize("name", NAMES)
def test_cut_call_is_not_shown_and_never_becomes_another(name: str) -> None:
    tool_format = find_tool_format(name, "")
    said = "" if name in ("llama", *CHANNELS) else "Let me see."
    text = said + raw_of(name)
    whole = tool_format.parse(text, TOOLS)
    assert whole.content == (said or None)
    for length in range(len(text)):
        cut = text[:length]
        assert said.startswith(tool_format.show(cut)[0])
        parsed = tool_format.parse(cut, TOOLS)
        if not parsed.tool_calls:
            assert name in CHANNELS or parsed.content == cut, "text to the letter"
        for (name_cut, arguments), (full_name, full) in zip(calls_of(parsed), calls_of(whole), strict=False):
            assert name_cut == full_name
            assert arguments.items() <= full.items()
            assert arguments == full or name in ("glm", "minimax"), "these two may end at the end of a line"


@pytest.mark.parametrize(("shown", "tool_format"), [each for each in FAMILIES if each[1].name != "none"])
def test_forced_call_is_read_back_and_stops(shown: list[str], tool_format: ToolFormat) -> None:
    raw = raw_of(tool_format.name)
    for begun in (str(tool_format.prefill(None)), str(tool_format.prefill("f"))):
        assert not begun.endswith((" ", "\n")), "white space at the end would split a token"
        if (around := tool_format.around("f")) is not None:
            assert around[0].startswith(begun)
        else:
            assert raw.startswith(begun)
    if around is not None:
        for number in (1, 2) if tool_format.joint is not None else (1,):
            text = (tool_format.joint or "").join([f"{around[0]}{F}{around[1]}"] * number)
            assert calls_of(tool_format.parse(text)) == BOTH[:1] * number
    if tool_format.close is not None:
        first, _, _ = raw.partition(tool_format.close)
        assert calls_of(tool_format.parse(first, TOOLS))[:1] == BOTH[:1]
        assert tool_format.close in tool_format.opens, "it may be a special token"


PIECES = [*"<>/{}[]()|;: \n\"'ab=,", "f", "assistant", "</think>", "to=functions.f", "<|message|>"]


@pytest.mark.parametrize("name", [*NAMES, "none"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 9), max_size=12))
def test_shown_pieces_are_a_prefix_of_the_content(name: str, data: st.DataObject, cuts: list[int]) -> None:
    tool_format = find_tool_format(name, "")
    raw = raw_of("hermes" if name == "none" else name)
    parts = [*PIECES, *tool_format.opens, *tool_format.thinking, raw, *re.split(r"(?<=[>\n])", raw)]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    content = tool_format.parse(text, TOOLS).content or ""
    shown, at, cut = "", 0, 0
    for length in [*cuts, len(text)]:
        cut += length
        piece, at = tool_format.show(text[:cut], at)
        shown += piece
        assert content.startswith(shown)


@pytest.mark.parametrize("name", NAMES)
def test_long_nonsense_is_read_in_time(name: str) -> None:
    tool_format, raw = find_tool_format(name, ""), raw_of(name)
    for filler in ("{" * 10**5, "[" * 10**5, " " * 10**6, "<" * 10**5, raw[:-1] * 10**3, "\\" * 10**5):
        text = raw[: len(raw) // 2] + filler
        parsed = tool_format.parse(text)
        assert parsed.tool_calls or parsed.content is not None


# ---- channels


def test_channels_show_only_the_text_for_the_user() -> None:
    thought = "<|channel|>analysis<|message|>Two and two.<|end|>"
    for tool_format in (found("gptoss"), found("gptoss").without_tools()):
        text = f"{thought}<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
        assert tool_format.parse(text) == ParsedAnswer("Four.")
        assert tool_format.show(text) == tool_format.show(text[:-10]) == ("Four.", len(text) - 10)
        assert tool_format.parse("<|channel|>final<|message|>Fo") == ParsedAnswer("Fo")
    called = f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|message|>{F}"
    assert found("gptoss").parse(called).content == "I look."
    plain = f"I look.assistant to=functions.f{F}"
    assert found("gptoss").without_tools().parse(called) == ParsedAnswer(plain)
    assert found("gptoss").parse(called + "}") == ParsedAnswer(f"{plain}}}")
    assert found("gptoss").parse(called.replace("functions.f", "python")).tool_calls == ()


# ---- types


NESTED = {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]}
TYPED: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "5", "5"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "boolean"}, "True", True),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": "object"}, '{"a": 1}', {"a": 1}),
    (NESTED, "null", None),
    ({"$ref": "#/nowhere"}, "7", 7),
    ({"anyOf": [{"$ref": "#/properties/key"}] * 9}, "7", 7),
    ({}, '"7"', '"7"'),
    ({}, "[" * 10**5, "[" * 10**5),
]


@pytest.mark.parametrize(("schema", "raw", "value"), TYPED, ids=lambda each: str(each)[:40])
def test_unquoted_argument_has_the_type_of_the_schema(schema: Any, raw: str, value: Any) -> None:
    got = typed(raw, schema)
    assert (got, type(got)) == (value, type(value))


# ---- Hermes and Llama

HERMES, LLAMA, NONE = (find_tool_format(name, "") for name in ("hermes", "llama", "none"))


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def call_text(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


X, G0, P = call_text("f", '{"x": 1}'), call_text("g", "{}"), call_text("f", '{"x": 1}', "parameters")
THOUGHT = f"<think>I could write <tool_call>, or {hermes(G0)}</think>"
CALL_F = ToolCall("f", '{"x": 1}')
TWO = (CALL_F, ToolCall("g", "{}"))

TABLE: list[tuple[ToolFormat, str, str | None, tuple[ToolCall, ...]]] = [
    (HERMES, f"<tool_call>{X}</tool_call>and<tool_call>{G0}</tool_call> then", "and then", TWO),
    (HERMES, hermes('{ "arguments": {"x":1}, "id": 7, "name": "f"}'), None, (CALL_F,)),
    (HERMES, f"{hermes(X)}\n<tool_call>\n{G0}\n", None, TWO),  # a stop string may have cut the end off
    (HERMES, f"{THOUGHT}\n\n{hermes(X)}", THOUGHT, (CALL_F,)),
    (HERMES, f"{hermes(G0)}</think>no", f"{hermes(G0)}</think>no", ()),  # the template may write <think>
    (LLAMA, f"<|python_tag|>{P}; <|python_tag|>{G0}", None, TWO),
    (LLAMA, f"{P}; {G0}", None, TWO),
    (LLAMA, f"I look it up. <|python_tag|>{P}", "I look it up.", (CALL_F,)),
    (LLAMA, f"Like this: {X}", f"Like this: {X}", ()),
    (LLAMA, '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', ()),
    (NONE, hermes(X), hermes(X), ()),
]


def test_calls_are_read_with_the_text_around_them() -> None:
    for tool_format, text, content, calls in TABLE:
        assert tool_format.parse(text) == ParsedAnswer(content, calls)


MALFORMED = [
    call_text("f", '{"x": 1'),
    call_text("f", '{"x": NaN}'),
    call_text("f", '{"x": 1e999}'),
    call_text("f", '{"x": "\\ud800"}'),
    '{"name": ["f"], "arguments": {}}',
    "",
    "{" * 100_000,
    call_text("f", '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    call_text("f", '{"x": ' + "[" * 500 + "]" * 500 + "}"),  # no client of ours could send it back
]


@pytest.mark.parametrize("call", MALFORMED, ids=lambda call: call[:40])
def test_answer_with_a_malformed_call_stays_text(call: str) -> None:
    for text in (f" See: \n{hermes(X)}\n<tool_call>\n{call}\n</tool_call> \n", f"<tool_call>{call}"):
        assert HERMES.parse(text) == ParsedAnswer(text)
    for text in (call, f"<|python_tag|>{X};{call or '{'}"):
        assert LLAMA.parse(text) == ParsedAnswer(text)


# ---- selection, and parsers of others


FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WRITTEN = {"open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "content": "json", "repeats": True}
FIELDS = {"tool_calls": WRITTEN | {"transform": FUNCTION}, "content": {}}
RESPONSE: Any = {"start_anchor": "<assistant>", "fields": FIELDS}


def test_response_template_of_a_tokenizer_reads_its_calls() -> None:
    tool_format = find_tool_format("auto", "{{ tools }}", RESPONSE)
    text = 'Sure. \n<call f>{"n": 1}</call><call g_h>{}</call>'
    assert tool_format.parse(text, TOOLS) == ParsedAnswer(
        "Sure.", (ToolCall("f", '{"n": 1}'), ToolCall("g_h", "{}"))
    )
    for length in range(len(text)):
        assert "Sure.".startswith(tool_format.show(text[:length])[0])
    for malformed in ("<call f>{</call>", "<call f>[]</call>", "Hello"):
        assert tool_format.parse(malformed) == ParsedAnswer(malformed)
    assert find_tool_format("auto", template("qwen3"), RESPONSE).name == "hermes", "ours is stricter"
    with pytest.raises(ConfigError, match="has no response_template that reads tool calls"):
        find_tool_format("response_template", "")


PARSER = """
import json

def parse(text): return [("f", json.loads(text[4:]))] if text.startswith("CALL") else None
def as_text(text): return [("f", text)]
def raises(text): return {}[text]
def wrong_pair(text): return [("f", {}, 1)]
def no_json(text): return [("f", {"x": {1, 2}})]
def two(text, more): return None
def with_content(text): return (text[:3], [("f", '{"x": 1}')]) if "f" in text else (text, None)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_tool_format.py").write_text(PARSER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: find_tool_format(f"own_tool_format:{name}", "")


def test_user_parser_reads_calls_and_malformed_ones_stay_text(own: Any) -> None:
    assert own("parse").parse('CALL {"x": 1}') == ParsedAnswer(None, (CALL_F,))
    assert own("as_text").parse(' {"x":1}') == ParsedAnswer(None, (CALL_F,))
    assert own("with_content").parse("Yes f") == ParsedAnswer("Yes", (CALL_F,))
    texts = (("parse", "hello"), ("parse", "CALL [1]"), ("as_text", "{"), ("no_json", "a"))
    for name, text in (*texts, ("with_content", "Yes")):
        assert own(name).parse(text) == ParsedAnswer(text)
    assert own("parse").show("hello") == ("", 0)


@in_loop
async def test_wrong_user_parser_fails_the_rollout_by_name(own: Any) -> None:
    with pytest.raises(RolloutFailure, match=r"wrong_pair returned .* it is called as parse\(text\) -> "):
        own("wrong_pair").parse("Hello")
    async with gateway_world(tool_format="own_tool_format:raises") as world:
        tools = [{"type": "function", "function": {"name": "f"}}]
        asking = asyncio.ensure_future(world.ask(tools=tools, n=2))
        with pytest.raises(
            RolloutFailure, match="tool_format=own_tool_format:raises raised KeyError: 'Hello "
        ):
            async with world.session.while_open():
                await asyncio.Event().wait()
        status, told = await asking
        assert (status, told["error"]["code"]) == (410, "session_ended")


@pytest.mark.usefixtures("own")
def test_unknown_format_is_refused_at_the_start() -> None:
    for name, why in (
        ("cohere", "tool_format=cohere is not known.\n  Way out: set it to auto, gpt_oss, "),
        ("own_tool_format:nothing", "has no attribute 'nothing'"),
        ("own_tool_format:two", r"cannot be called as parse\(text\)"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_tool_format(name, "")
