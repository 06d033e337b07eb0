"""Tool formats of model families: what a chat template writes for a call is read back as that call."""

from __future__ import annotations

import functools
import json
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.tool_calls import (
    NO_TOOLS,
    ParsedAnswer,
    ToolCall,
    ToolFormat,
    find_tool_format,
)
from asyncrl.agents.endpoint.tool_formats import FORMATS
from asyncrl.agents.tool_markup import typed
from asyncrl.base.errors import ConfigError

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


ALL = sorted(path.name.removesuffix(".jinja") for path in TEMPLATES.iterdir() if path.name.endswith(".jinja"))
KNOWING = [name for name in ALL if re.search(r"\btools\b", template(name))]
WRITING = [name for name in KNOWING if name not in ("lfm2", "lfm2_training")]
"""These two show the tools, and leave a message's calls out."""
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
    """As gateway.tool_format=auto finds it for the template."""
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
ONE_CALL = {"gptoss", "gptoss_training", "llama3_1", "llama3_2"}
NO_CONTENT = {"llama3_1", "llama3_2", "muse_glimmer", "muse_glimmer_training", "gptoss", "gptoss_training"}
"""Their templates leave out what is said beside a call, or make a thought of it (gpt-oss)."""


@pytest.mark.parametrize("name", WRITING)
def test_what_a_template_writes_for_calls_is_read_back_as_these_calls(name: str) -> None:
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


TEXT = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"], exclude_characters="<'\"\\"))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": TEXT,
        "t": TEXT.map(lambda text: text.replace(" ", "\n")),
        "n": st.integers(-(2**53), 2**53),
        "x": st.floats(-1e9, 1e9),
        "b": st.booleans(),
        "o": st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3),
        "list": st.lists(VALUES, max_size=3),
    },
)
ONE_OF_EACH = ["qwen3", "qwen3_6", "nemotron_3_nano", "glm4moe", "gptoss", "gemma4_v5", "llama3_2"]
ONE_OF_EACH += ["lfm2_v2", "lfm2_2_5", "muse_glimmer"]


@pytest.mark.parametrize("name", ONE_OF_EACH)
@settings(max_examples=40, deadline=None)
@given(arguments=ARGUMENTS)
def test_arguments_are_read_back_with_their_types(name: str, arguments: dict[str, Any]) -> None:
    calls = [("f", arguments)]
    assert calls_of(found(name).parse(written(name, calls), TOOLS)) == calls


LOST: list[tuple[str, str]] = [
    ("qwen3_6", "1\n</parameter>\n<parameter=t>\n2"),
    ("nemotron_3_nano", "1\n</parameter>\n</function>"),
    ("glm4moe", "1</arg_value>\n<arg_key>"),
    ("gemma4_v5", '<|"|>'),
    ("lfm2_2_5", "1', t='2"),
    ("muse_glimmer", '1</atem:parameter>\n<atem:parameter name="t">2'),
]


@pytest.mark.parametrize(("name", "text"), LOST)
def test_what_a_form_cannot_carry_is_lost_as_the_docs_say(name: str, text: str) -> None:
    """The template writes the same for another call, or for none."""
    calls: Calls = [("f", {"s": text})]
    assert calls_of(found(name).parse(written(name, calls), TOOLS)) != calls


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
def test_a_format_is_read_as_its_vendor_publishes_it(name: str, text: str) -> None:
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
NAMES = [*FORMATS, "llama"]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_inside_a_thought_does_not_count_and_the_thought_is_content(name: str) -> None:
    tool_format, text = find_tool_format(name, ""), raw_of(name)
    if name == "llama":  # its models do not think
        return
    opens, closes = tool_format.thinking
    thought = f"{opens}\nI could write {'a call' if name in CHANNELS else text} here.\n{closes}"
    parsed = tool_format.parse(thought + "<|start|>assistant" * (name in CHANNELS) + text, TOOLS)
    shown = None if name in CHANNELS else thought
    assert parsed == ParsedAnswer(shown, tool_format.parse(text, TOOLS).tool_calls)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_call_is_shown_and_a_cut_one_is_text_or_says_no_other_thing(name: str) -> None:
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


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_stopped_by_the_end_of_a_call_has_one_call(name: str) -> None:
    tool_format = find_tool_format(name, "")
    if tool_format.close is not None:
        first, _, _ = raw_of(name).partition(tool_format.close)
        assert calls_of(tool_format.parse(first, TOOLS))[:1] == BOTH[:1]
        assert tool_format.close in tool_format.opens, "it may be a special token"


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_call_begins_as_the_model_would_begin_it(name: str) -> None:
    tool_format, text = (
        find_tool_format(name, template(SHIPPED[name]) if name in SHIPPED else ""),
        raw_of(name),
    )
    for begun in (tool_format.prefill(None), tool_format.prefill("f")):
        assert begun is not None
        assert not begun.endswith((" ", "\n")), "white space at the end would split a token"
        if name not in ("gpt_oss", "mistral", "deepseek", "hermes", "tool_calls"):  # which have several forms
            assert text.startswith(begun)
    for published, text in (("deepseek", PUBLISHED[0][1]), ("mistral", PUBLISHED[4][1])):
        shown = "[TOOL_CALLS] [ARGS] ```json"
        assert text.startswith(str(find_tool_format(published, shown).prefill("f")))


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_around_arguments_in_json_makes_calls_that_are_read(name: str) -> None:
    texts = {"deepseek": "<｜tool▁call▁begin｜> ```json", "mistral": "[TOOL_CALLS] [ARGS]"}
    for shown in ("", texts.get(name, "")):
        tool_format = find_tool_format(name, "")
        tool_format = FORMATS[name](shown) if name in FORMATS else tool_format
        around = tool_format.around("f")
        if around is not None:
            begins = [str(tool_format.prefill(None)), str(tool_format.prefill("f"))]
            assert all(around[0].startswith(begin) for begin in begins)
            for number in (1, 2) if tool_format.joint is not None else (1,):
                text = (tool_format.joint or "").join([f"{around[0]}{F}{around[1]}"] * number)
                assert calls_of(tool_format.parse(text)) == BOTH[:1] * number
    assert (around is None) == (name in ("qwen3_coder", "glm", "gemma4", "deepseek_v32", "minimax", *NO_JSON))


NO_JSON = ("lfm2", "muse_glimmer")
PIECES = [*"<>/{}[]()|;: \n\"'ab=,", "f", "assistant", "</think>", "to=functions.f", "<|message|>"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 9), max_size=12))
def test_whatever_is_written_is_read_and_what_is_shown_before_is_how_the_content_begins(
    name: str, data: st.DataObject, cuts: list[int]
) -> None:
    tool_format, raw = find_tool_format(name, ""), raw_of(name)
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
def test_long_nonsense_is_text(name: str) -> None:
    tool_format, raw = find_tool_format(name, ""), raw_of(name)
    for filler in ("{" * 10**5, "[" * 10**5, " " * 10**6, "<" * 10**5, raw[:-1] * 10**3, "\\" * 10**5):
        text = raw[: len(raw) // 2] + filler
        parsed = tool_format.parse(text)
        assert parsed.tool_calls or parsed.content is not None


# ---- channels


def test_an_answer_in_channels_is_what_it_says_to_the_user_and_never_has_their_marks() -> None:
    thought = "<|channel|>analysis<|message|>Two and two.<|end|>"
    for tool_format in (found("gptoss"), found("gptoss").without_tools()):
        text = f"{thought}<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
        assert tool_format.parse(text) == ParsedAnswer("Four.")
        assert tool_format.show(text) == ("Four.", len(text))
        assert tool_format.show(text[:-10]) == ("Four.", len(text) - 10), "it is streamed"
        assert tool_format.parse("<|channel|>final<|message|>Fo") == ParsedAnswer("Fo")
    called = f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|message|>{F}"
    assert found("gptoss").parse(called).content == "I look."
    plain = f"I look.assistant to=functions.f{F}"
    assert found("gptoss").without_tools().parse(called) == ParsedAnswer(plain)
    assert found("gptoss").parse(called + "}") == ParsedAnswer(f"{plain}}}")
    assert found("gptoss").parse(called.replace("functions.f", "python")).tool_calls == ()
    assert found("gptoss").parse("Hello") == ParsedAnswer("Hello")


def test_without_tools_the_marks_of_thoughts_stay_and_a_call_is_text() -> None:
    plain = found("gemma4").without_tools()
    assert plain.thinking == ("<|channel>thought", "<channel|>")
    assert {"<|channel>", "<channel|>"} <= set(plain.opens)
    text = written("gemma4", CASES["plain"])
    assert plain.parse(text) == ParsedAnswer(text)


# ---- types


NESTED = {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]}
TYPED: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "5", "5"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "integer"}, "5.5", "5.5"),
    ({"type": "number"}, " 5 ", 5),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": "object"}, '{"a": 1}', {"a": 1}),
    ({"type": "object"}, "[1]", "[1]"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": 3}, "3", 3),
    (NESTED, "7", "7"),
    (NESTED, "null", None),
    ({"$ref": "#/nowhere"}, "7", 7),
    ({"anyOf": [{"$ref": "#/properties/key"}] * 9}, "7", 7),
    ({}, "7", 7),
    ({}, '"7"', '"7"'),
    ({}, "True", "True"),
    ({}, "[" * 10**5, "[" * 10**5),
]


@pytest.mark.parametrize(("schema", "raw", "value"), TYPED, ids=lambda each: str(each)[:40])
def test_an_argument_without_quotes_has_the_type_of_the_schema(schema: Any, raw: str, value: Any) -> None:
    parameters = {"properties": {"key": schema}, "$defs": {"Size": {"enum": ["7", "8"]}}}
    got = typed(raw, "key", parameters)
    assert (got, type(got)) == (value, type(value))


def test_without_a_schema_a_text_that_looks_like_a_value_is_one() -> None:
    text = written("qwen3_6", CASES["texts that look like values"])
    assert calls_of(found("qwen3_6").parse(text)) == [("f", {"s": 75001, "t": True})]


# ---- which format a model has


def test_a_template_without_tools_is_named_where_tools_are_refused() -> None:
    for name in ("gemma3", "phi3", "deepseekv3", "cohere"):
        for setting in ("auto", "none", "hermes"):
            assert find_tool_format(setting, template(name)).refusal == NO_TOOLS
    assert "model.chat_template" in NO_TOOLS
    unknown = find_tool_format("auto", "{{ tools }}").refusal
    assert "gateway.tool_format=auto does not know" in unknown
    assert "module:function" in unknown
    assert find_tool_format("none", template("qwen3")).refusal == "gateway.tool_format is none."
    for name in ("hermes", "auto"):
        assert find_tool_format(name, template("qwen3")).refusal == ""


CALL = {"open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "content": "json", "repeats": True}
CALL["transform"] = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
RESPONSE: Any = {"start_anchor": "<assistant>", "fields": {"tool_calls": CALL, "content": {}}}


def test_a_model_of_its_own_is_read_by_the_response_template_of_its_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from asyncrl.rollouts.tokenizer import HFChatTokenizer

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    saved = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a", response_template=RESPONSE)
    saved.chat_template = "{{ tools }}"
    saved.save_pretrained(tmp_path)
    tokenizer = HFChatTokenizer(tmp_path)
    tool_format = find_tool_format("auto", tokenizer.template, tokenizer.response_template)
    assert (tool_format.name, tool_format.refusal) == ("response_template", "")
    text = 'Sure. \n<call f>{"n": 1}</call><call g_h>{}</call>'
    parsed = ParsedAnswer("Sure.", (ToolCall("f", '{"n": 1}'), ToolCall("g_h", "{}")))
    assert tool_format.parse(text, TOOLS) == parsed
    for length in range(len(text)):
        assert tool_format.hold_from(text[:length]) <= len("Sure.")
    for malformed in ("<call f>{</call>", "<call f>[]</call>", "Hello"):
        assert tool_format.parse(malformed) == ParsedAnswer(malformed)
    assert tool_format.prefill(None) is None
    assert find_tool_format("auto", template("qwen3"), RESPONSE).name == "hermes", "ours is stricter"
    assert find_tool_format("auto", "{{ tools }}", {"fields": {"content": {}}}).name == "none"
    with pytest.raises(ConfigError, match="has no response_template that reads tool calls"):
        find_tool_format("response_template", "")
