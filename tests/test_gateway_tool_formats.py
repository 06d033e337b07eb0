"""Calls in the formats of templates and vendors are parsed; malformed calls stay text."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from costly_cases import every_third_is_quick
from gateway_capture_cases import assistant, user
from gateway_cases import ByteTokenizer, gateway_world, in_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from template_oracle import END
from template_renderers import TEMPLATES, Renderers, renderers
from token_cases import completion_of

from asyncrl.agents.endpoint.answers import Answer, AnswerText
from asyncrl.agents.endpoint.tool_formats import (
    FAMILIES,
    MINIMAX,
    MOST_TRIALS,
    AnswerReader,
    ToolFormat,
    find_tool_format,
    from_gemma,
    from_minimax,
)
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.messages.json_values import property_schema, typed
from asyncrl.rollouts.tokenizer import HFChatTokenizer

Calls = list[tuple[str, dict[str, Any]]]


def schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {key: {"type": each} for key, each in properties.items()},
    }


TYPES = {
    "s": "string",
    "t": "string",
    "n": "integer",
    "x": "number",
    "b": "boolean",
    "o": "object",
}
PARAMETERS: dict[str, Any] = {
    "f": schema(**TYPES, list="array", z="null"),
    "g_h": schema(),
}
PARAMETERS["f"]["properties"]["zip"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": parameters},
    }
    for name, parameters in PARAMETERS.items()
]


@functools.cache
def found(name: str) -> ToolFormat:
    return find_tool_format("auto", TEMPLATES[name])


WRITING = [
    name for name in TEMPLATES if not name.endswith("_training") and name != "lfm2"
]


@pytest.fixture(scope="module")
def renderer_for(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    return renderers(tmp_path_factory.mktemp("formats"))


def written(renderer: HFChatTokenizer, calls: Calls, content: str) -> str:
    """Return the template's text of an answer with these calls, without the end of the
    turn.
    """
    functions = [
        {"name": called, "arguments": arguments} for called, arguments in calls
    ]
    sent = [
        {"type": "function", "id": "call12345", "function": function}
        for function in functions
    ]
    chat = [user("Question?"), assistant(content, tool_calls=sent)]
    texts = [renderer.render(chat[:length], tools=TOOLS) for length in (1, 2)]
    text = texts[1][len(os.path.commonprefix(texts)) :]
    ends = [end.start() for end in re.finditer(rf"{END.pattern}|<\|assistant\|>", text)]
    return text[: ends[-1]].rstrip("\n")


def calls_of(read: AnswerReader) -> Calls:
    return [(call.name, json.loads(call.text)) for call in read.calls]


def parsed(tool_format: ToolFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls)"""
    read = tool_format.parse(text, TOOLS)
    return str(read.content), [(call.name, call.text) for call in read.calls]


CASES: dict[str, Calls] = {
    "plain": [("f", {"s": "hi", "n": -5, "x": 1.5, "b": True, "z": None})],
    "parallel": [("f", {"s": "a"}), ("g_h", {}), ("f", {"n": 2})],
    "nested": [
        (
            "f",
            {
                "o": {"a": [1, {"b": None}, True], "k": "v, w)"},
                "list": ["x", "it's", "]", "k: v", 2.5],
            },
        )
    ],
    "Unicode": [("f", {"s": "héé 日本 🙂", "list": ["\xa0 \u3000\u2028 \U000e0101"]})],
    "texts that look like values": [("f", {"s": "75001", "t": "true", "zip": "75001"})],
    "lines and spaces": [("f", {"s": "\na\n\nb\n", "t": "  x "})],
    "quotes": [("f", {"s": 'it\'s "q" \\n \\ end', "t": "'"})],
    "markup": [
        (
            "f",
            {
                "s": "</tool_call><b></arg_value></parameter>\n</parameter> [TOOL_CALLS]",
                "n": 1,
            },
        )
    ],
}
ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}
SILENT = {*ONE_CALL, "muse_glimmer"}
"""They omit text next to a call, or make a thought of it (gpt-oss)."""


UNESCAPED = {"lfm2_2_5", "lfm2_2_5_v2"}
"""They write text unchanged, but their models write Python."""


@pytest.mark.parametrize("name", every_third_is_quick(zip(WRITING, strict=True)))
def test_calls_that_a_template_writes_are_read_back(
    name: str, renderer_for: Renderers
) -> None:
    if found(name).refusal:
        return
    for case, calls in CASES.items():
        if (len(calls) > 1 and name in ONE_CALL) or (
            case == "quotes" and name in UNESCAPED
        ):
            continue
        for content in ("", "Let me see."):
            text = written(renderer_for(name), calls, content)
            read = found(name).parse(text, TOOLS)
            assert calls_of(read) == calls, f"{case}: {text}"
            assert (found(name).prefill(calls[0][0]) or "") in text, (
                "a forced call begins like this"
            )
            *_, said = str(read.content).split("</think>")
            assert said.strip() == ("" if name in SILENT else content)


# ---- formats whose templates trl does not ship, as their vendors publish them

F = '{"s": "a b", "n": 1}'
BOTH: Calls = [("f", {"s": "a b", "n": 1}), ("g_h", {})]
PUBLISHED = [
    (name, text)
    for name, texts in tomllib.loads(
        Path(__file__).with_name("published_calls.toml").read_text()
    ).items()
    for text in texts
]


AT_THE_BEGINNING = ("gpt_oss", "llama", "muse_glimmer", "pythonic")
"""Text never comes before their calls."""


@pytest.mark.parametrize(("name", "text"), PUBLISHED)
def test_calls_are_read_as_their_vendor_publishes_them(name: str, text: str) -> None:
    tool_format = find_tool_format(name, "")
    assert calls_of(tool_format.parse(text, TOOLS)) == BOTH
    if name not in AT_THE_BEGINNING:
        assert parsed(tool_format, f"Sure. \n\n{text}")[0] == "Sure."


RAW = dict(reversed(PUBLISHED))
NAMES = sorted({each.name for each in FAMILIES})


@pytest.mark.parametrize("name", NAMES)
def test_call_inside_a_thought_does_not_count(name: str) -> None:
    tool_format = find_tool_format(name, "")
    text = RAW[name]
    opens, closes = tool_format.thinking
    has_channels = name == "gpt_oss"
    thought = (
        f"{opens}\nI could write {'a call' if has_channels else text} here.\n{closes}"
    )
    answer = thought + "<|start|>assistant" * has_channels + text
    assert parsed(tool_format, answer) == (
        "" if has_channels else thought,
        parsed(tool_format, text)[1],
    )


MARKED = {
    "gpt_oss": f"<|start|>assistant{RAW['gpt_oss']}",
    "llama": f"<|python_tag|>{RAW['llama']}",
    "muse_glimmer": f"<|start|>assistant{RAW['muse_glimmer']}",
    "pythonic": dict(PUBLISHED)["pythonic"],
}
"""Texts of calls with a mark, for formats that need none at the beginning."""
OTHERS = [{"type": "function", "function": {"name": "h"}}]
QUOTES = MOST_TRIALS // 2


@pytest.mark.parametrize("splits_thought", [False, True])
@pytest.mark.parametrize("name", every_third_is_quick(zip(NAMES, strict=True)))
def test_calls_count_only_at_the_end_of_an_open_thought(
    name: str, splits_thought: bool
) -> None:
    tool_format = find_tool_format(name, "")
    opens, closes = tool_format.thinking
    text = MARKED.get(name, RAW[name])
    cut = text[: text.index("a b") + 1]
    quoted = f"I could write {text} here."
    for said, end, tools, num_calls in (
        ("Hm.", text, TOOLS, 2),
        ("Hm.", f"{text} \n", TOOLS, 2),
        ("", text, TOOLS, 2),
        (quoted, text, TOOLS, 2),
        (quoted * QUOTES, text, TOOLS, 2),
        ("Hm.", f"{text}{' ' * 99}No.", TOOLS, 0),
        ("Hm.", cut, TOOLS, 0),
        ("Hm.", text, OTHERS, 0),
        ("Hm.", text, [], 0),
        ("Hm.", f"{text}\n{closes}", TOOLS, 0),
        ("Hm.", f"{cut}{closes}", TOOLS, 0),
    ):
        if name == "gpt_oss" and not splits_thought:
            continue  # each channel is a message
        answer = f"{opens}\n{said}{end}"
        options = {"splits_thought": splits_thought}
        whole = tool_format.parse(answer, tools, **options)
        streamed = AnswerReader(tool_format, tools, **options)
        for character in answer:
            streamed.feed(character)
            assert not streamed.calls, "they may become a part of the thought"
        streamed.feed("", is_last=True)
        assert shown(streamed) == shown(whole)
        assert calls_of(whole) == BOTH[:num_calls]
        if not num_calls:
            said += end.partition(closes)[0]
        text_of = whole.thought if splits_thought else whole.content
        assert text_of.removeprefix(opens).removesuffix(closes).strip() == said.strip()


@pytest.mark.parametrize("name", NAMES)
def test_cut_call_never_becomes_another(name: str) -> None:
    tool_format = find_tool_format(name, "")
    said = "" if name in AT_THE_BEGINNING else "Let me see."
    text = said + RAW[name]
    whole = tool_format.parse(text, TOOLS)
    assert str(whole.content) == said
    for length in range(len(text)):
        cut = text[:length]
        read = tool_format.parse(cut, TOOLS)
        if not read.calls:
            assert tool_format.noise or str(read.content) == cut, "text to the letter"
        for (name_cut, arguments), (full_name, full) in zip(
            calls_of(read), calls_of(whole), strict=False
        ):
            assert name_cut == full_name
            assert arguments.items() <= full.items()
            assert arguments == full or name == "glm", "it may end at the end of a line"


@pytest.mark.parametrize(
    "tool_format", [each for each in FAMILIES if each.call], ids=lambda each: each.name
)
def test_forced_call_is_read_back_and_stops(tool_format: ToolFormat) -> None:
    raws = [text for name, text in PUBLISHED if name == tool_format.name]
    around = tool_format.around("f")
    for begun in (str(tool_format.prefill(None)), str(tool_format.prefill("f"))):
        assert not begun.endswith((" ", "\n")), (
            "white space at the end would split a token"
        )
        assert around is not None or any(raw.startswith(begun) for raw in raws)
        assert around is None or around[0].startswith(begun)
    for name in ("f", "mcp__x-y.z", "a:b/c:1"):
        if (around := tool_format.around(name)) is not None:
            made = calls_of(tool_format.parse(f"{around[0]}{F}{around[1]}"))
            assert made == [(name, BOTH[0][1])]
    if tool_format.close is not None:
        first, _, _ = raws[-1].partition(tool_format.close)
        assert calls_of(tool_format.parse(first, TOOLS))[:1] == BOTH[:1]
        assert tool_format.close in tool_format.opens, "it may be a special token"


PIECES = [
    *"<>/{}[]()|;: \n\"'ab=,",
    "f",
    "assistant",
    "</think>",
    "to=functions.f",
    "<|message|>",
]


@pytest.mark.parametrize(
    "name", [*every_third_is_quick(zip(NAMES, strict=True)), "none"]
)
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    cuts=st.lists(st.integers(0, 9), max_size=40),
    is_thinking=st.booleans(),
    splits_thought=st.booleans(),
)
def test_answer_does_not_depend_on_its_pieces(
    name: str,
    data: st.DataObject,
    cuts: list[int],
    is_thinking: bool,
    splits_thought: bool,
) -> None:
    tool_format = find_tool_format(name, "")
    raw = RAW.get(name, RAW["hermes"])
    parts = re.split(r"(?<=[>\n])", raw)
    place = data.draw(st.integers(0, len(parts)))
    more = st.sampled_from([*PIECES, *tool_format.opens, *parts, raw])
    inserted = data.draw(st.lists(more, max_size=9))
    text = "".join(
        [*parts[:place], *inserted, *parts[place:]]
        if data.draw(st.booleans())
        else inserted
    )
    options = {"is_thinking": is_thinking, "splits_thought": splits_thought}
    whole, streamed = (AnswerReader(tool_format, TOOLS, **options) for _ in range(2))
    whole.feed(text, is_last=True)
    at = 0
    for cut in cuts:
        seen = shown(streamed)
        streamed.feed(text[at : at + cut])
        at += cut
        assert all(map(str.startswith, shown(streamed), seen)), "it only grows"
    streamed.feed(text[at:], is_last=True)
    assert shown(streamed) == shown(whole)
    assert streamed.is_malformed == whole.is_malformed
    begun = [block.number for block, text in streamed.pieces if not text]
    assert begun == [*range(len(streamed.calls))], (
        "only the first piece of a call is empty"
    )
    if not whole.calls and not tool_format.noise and not splits_thought:
        assert str(whole.content) == text


def feed(reader: AnswerReader, text: str, size: int) -> None:
    """Feed a whole answer in pieces of this size."""
    for start in range(0, len(text), size):
        reader.feed(text[start : start + size])
    reader.feed("", is_last=True)


def shown(reader: AnswerReader) -> list[str]:
    calls = [f"{call.name} {call.text}" for call in reader.calls]
    return [str(reader.thought), str(reader.content), *calls]


WORDS = "Some words, and more. "
VALUES_IN = {"a": [1, "x y", {"b": None}], "k": "v, w"}
LONG = {
    "text": (
        "hermes",
        lambda size: f"<think>{WORDS * size}</think>{WORDS * size}" + "\n" * 20 * size,
    ),
    "JSON": (
        "hermes",
        lambda size: RAW["hermes"].replace(F, json.dumps({"o": [VALUES_IN] * size})),
    ),
    "name last": (
        "hermes",
        lambda size: LATE.replace("1", json.dumps([VALUES_IN] * size)).join(TOOL_CALL),
    ),
    "tagged": (
        "qwen3_coder",
        lambda size: RAW["qwen3_coder"].replace("a b", WORDS * size),
    ),
}


class CountingReader(AnswerReader):
    """Counts the characters that are copied, or that a pattern can meet."""

    num_characters = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "text":
            self.num_characters += len(value)
        super().__setattr__(name, value)


@pytest.mark.parametrize(("name", "write"), LONG.values())
def test_long_answer_costs_as_much_per_character(
    name: str, write: Callable[[int], str]
) -> None:
    costs = []
    for size in (100, 800):
        text = write(size)
        reader = CountingReader(find_tool_format(name, ""), TOOLS, splits_thought=True)
        feed(reader, text, 4)
        assert not reader.is_malformed
        assert sum(len(text) for _, text in reader.pieces) <= len(text), (
            "a piece is new text"
        )
        costs.append(reader.num_characters / len(text))
    assert costs[1] < 1.1 * costs[0]


@pytest.mark.parametrize("name", every_third_is_quick(zip(NAMES, strict=True)))
def test_long_nonsense_is_read_in_time(name: str) -> None:
    tool_format, raw = find_tool_format(name, ""), RAW[name]
    thought = tool_format.thinking[0] + MARKED.get(name, raw)[:-1] * 10**3
    tool_format.parse(thought, TOOLS, splits_thought=True)
    for filler in (
        "{" * 10**5,
        "[" * 10**5,
        " " * 10**5,
        "<" * 10**5,
        raw[:-1] * 10**3,
        "\\" * 10**5,
    ):
        text = raw[: len(raw) // 2] + filler
        content, calls = parsed(tool_format, text)
        assert calls or content


def test_nonsense_of_nested_keys_is_read_in_time() -> None:
    text = "<|tool_call>call:f{" + '<|"|>k<|"|>:[' * 10**4
    assert parsed(find_tool_format("gemma4", ""), text) == (text, [])


def test_channels_show_only_the_text_for_the_user() -> None:
    thought = "<|channel|>analysis<|message|>Two and two.<|end|>"
    for tool_format in (found("gptoss"), found("gptoss").without_tools):
        text = f"{thought}<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
        assert parsed(tool_format, text) == ("Four.", [])
    called = f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|message|>{F}"
    assert parsed(found("gptoss"), called)[0] == "I look."


HARMONY_HEADS = (
    "<|channel|>final",
    "<|channel|>commentary to=functions.f <|constrain|>json",
    "<|start|>assistant<|channel|>final",
    "<|start|>assistant to=functions.f<|channel|>commentary",
)


@pytest.mark.parametrize("head", HARMONY_HEADS)
@pytest.mark.parametrize("before", ["", "<|channel|>analysis<|message|>Hm.<|end|>"])
def test_head_of_a_channel_that_was_cut_is_not_text(before: str, head: str) -> None:
    """A cut may be anywhere but in a mark, which is one token."""
    mark = re.compile(r"<\|\w+\|>")
    inner = [at for each in mark.finditer(head) for at in range(*each.span())[1:]]
    for end in set(range(len(head) + 1)) - set(inner):
        for size in (1, len(before + head)):
            reader = AnswerReader(found("gptoss"), TOOLS, splits_thought=True)
            feed(reader, before + head[:end], size)
            assert (reader.content, reader.calls) == ("", [])


@pytest.mark.parametrize("name", [*NAMES, "none"])
@pytest.mark.parametrize("size", [1, 99])
def test_answer_may_close_a_thought_that_nobody_opened(name: str, size: int) -> None:
    """vLLM 0.32 drops the mark, too."""
    tool_format = find_tool_format(name, "")
    text = f"\n{tool_format.thinking[1]}\n\nFour."
    for splits_thought in (True, False):
        reader = AnswerReader(tool_format, splits_thought=splits_thought)
        feed(reader, text, size)
        assert reader.thought == ""
        assert reader.content == "Four." or not splits_thought


# ---- answers while they are sampled, and types of arguments


@pytest.mark.parametrize("is_streamed", [False, True])
def test_only_a_streamed_answer_keeps_a_call_that_was_cut(is_streamed: bool) -> None:
    ids = RAW["hermes"].partition(F)[0].encode() + F[:9].encode()
    tokenizer = ByteTokenizer()
    answer = Answer(
        tokenizer=tokenizer,
        tool_format=HERMES,
        text=AnswerText(tokenizer),
        options={},
        is_streamed=is_streamed,
    )
    for token in ids:
        answer.feed([token])
    answer.finish(completion_of([*ids], finish="length"))
    assert [call.text for call in answer.calls] == [F[:9]] * is_streamed
    assert answer.content == (None if is_streamed else ids.decode())
    assert all(re.fullmatch("[A-Z0-9]{9}", str(call.id)) for call in answer.calls)


def test_model_keeps_the_ids_that_it_wrote() -> None:
    own_ids = {
        ("kimi", 0): "functions.f:0",
        ("solar", 0): "abc",
        ("mistral", 1): "abc",
        ("apriel", 1): "abc",
    }
    for (name, number), own_id in own_ids.items():
        read = find_tool_format(name, "").parse(RAW[name], TOOLS)
        assert read.calls[number].id == own_id


VALUES = st.sampled_from(
    [1, -2.5, True, None, "1", "1.0", "true", "null", "a", "[1]", [1], {"a": 1}]
)
KINDS = [
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    "array",
    "object",
    ["string", "null"],
    ["integer", "string"],
]
LEAVES = st.one_of(
    st.sampled_from(
        [{}, {"description": "x"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    ),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(KINDS)),
    st.builds(
        lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)
    ),
    st.builds(lambda value: {"const": value}, VALUES),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda key, parts, leaf: {**leaf, key: parts},
        st.sampled_from(["anyOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
        LEAVES,
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(schema=SCHEMAS, value=VALUES)
def test_text_that_a_schema_allows_stays_text(
    schema: dict[str, Any], value: Any
) -> None:
    root = {
        "$defs": {
            "a": {"enum": ["1", "true", "null"]},
            "b": {"type": ["string", "null"]},
        }
    }
    valid = Draft202012Validator({**root, "allOf": [schema]}).is_valid
    raw = value if isinstance(value, str) else json.dumps(value)
    with contextlib.suppress(ValueError):
        value = json.loads(raw)
    read = typed(raw, schema, root)
    is_free = all(map(valid, ["q", 0.5, True, None, [], {}]))
    if valid(raw) and not is_free and not (value is None and valid(None)):
        assert read == raw
    elif valid(value):
        assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        ("dict", "{'a': .5}", {"a": 0.5}),
        (["string", "null"], "None", None),
        (["string", "boolean"], "True", "True"),
        ("string", "None", "None"),
        ("float", "1.5", 1.5),
        ("INTEGER", "2", 2),
        ("str", "2", "2"),
        ("any", "2", 2),
        ("list", r"['\d', '\/']", ["\\d", "\\/"]),
    ],
)
def test_types_have_other_names_in_python(kind: Any, raw: str, value: Any) -> None:
    assert typed(raw, {"type": kind}, {}) == value


TEXT, LIST = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
FIELDS = {
    "type": "object",
    "properties": {"item": TEXT, "list": LIST},
}


def tag(key: str, *values: str) -> str:
    return f"{MINIMAX}<{key}>{''.join(values)}{MINIMAX}</{key}>"


@pytest.mark.parametrize(
    ("read", "raw", "schema", "value"),
    [
        (from_minimax, "", LIST, []),
        (from_minimax, "", FIELDS, {}),
        (from_minimax, "", TEXT, ""),
        (from_minimax, "", {"anyOf": [LIST, TEXT]}, ""),
        (from_minimax, tag("item", "1"), LIST, [1]),
        (from_minimax, tag("each", "1") * 2, LIST, [1, 1]),
        (from_minimax, tag("item", "1"), FIELDS, {"item": "1"}),
        (from_minimax, tag("list", tag("item", "1")), FIELDS, {"list": [1]}),
        (from_minimax, tag("item", "1"), {}, [1]),
        (
            from_gemma,
            """["a",'b, c',{"k": "it's"}]""",
            {},
            ["a", "b, c", {"k": "it's"}],
        ),
        (from_gemma, "[true,-1.5,null,two words]", {}, [True, -1.5, None, "two words"]),
        (from_gemma, "7", TEXT, "7"),
        (from_gemma, "7", {}, 7),
    ],
)
def test_nested_values_follow_the_schema(
    read: Callable[[str, object, object], object], raw: str, schema: Any, value: Any
) -> None:
    assert read(raw, schema, schema) == value


_WORDS = st.sampled_from(
    ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "items"]
)
_LEAVES = st.none() | st.integers() | st.sampled_from(["string", "integer", "#/a", "#"])
ILL_FORMED = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(ILL_FORMED, st.sampled_from(["1", "null", "x", "[1]", "{'a': 1}", '"', "1e400"]))
def test_ill_formed_schema_of_a_client_ends_no_answer(schema: Any, raw: str) -> None:
    json.dumps(typed(raw, schema, schema))
    for key in ("a", None):
        typed(raw, property_schema(schema, key, schema), schema)


# ---- Hermes and Llama

HERMES, LLAMA = find_tool_format("hermes", ""), find_tool_format("llama", "")
X, G0 = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "parameters": {}}'
LATE = '{"arguments": {"x": 1}, "name": "f"}'
TOOL_CALL = ("<tool_call>", "</tool_call>")
CALL_F = ("f", '{"x": 1}')


@pytest.mark.parametrize(
    "arguments", ['{"x": 1', '{"x": 1e999}', '{"x": "\\ud800"}', "[]", "{" * 10**5]
)
def test_answer_with_a_malformed_call_stays_text(arguments: str) -> None:
    call = f'{{"name": "f", "arguments": {arguments}}}'
    text = f" See: \n<tool_call>{X}</tool_call>\n<tool_call>\n{call}\n</tool_call> \n"
    assert parsed(HERMES, text) == (text, [])
    for text in (call, f"<|python_tag|>{X};{call}"):
        assert parsed(LLAMA, text) == (text, [])


# ---- parsers of users

PARSER = """
import json

def parse(text): return [("f", json.loads(text[4:]))] if text.startswith("CALL") else None
def raises(text): return {}[text]
def two(text, more): return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_tool_format.py").write_text(PARSER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: find_tool_format(f"own_tool_format:{name}", "")


def test_user_parser_reads_calls_and_malformed_ones_stay_text(own: Any) -> None:
    assert parsed(own("parse"), 'CALL {"x": 1}') == ("", [CALL_F])
    for text in ("hello", "CALL [1]", "CALL {"):
        assert parsed(own("parse"), text) == (text, [])
    for name, why in (
        ("olmo", "=olmo is not known"),
        ("own_tool_format:two", "cannot be called"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_tool_format(name, "")


@pytest.mark.usefixtures("own")
@in_loop
async def test_wrong_user_parser_fails_the_rollout_by_name() -> None:
    async with gateway_world(tool_format="own_tool_format:raises") as world:
        tools = [{"type": "function", "function": {"name": "f"}}]
        asking = asyncio.ensure_future(world.ask(tools=tools))
        with pytest.raises(
            RolloutFailure, match="own_tool_format:raises raised KeyError: 'Hello "
        ):
            async with world.session.while_open():
                await asyncio.Event().wait()
        status, told = await asking
        assert (status, told["error"]["code"]) == (410, "session_ended")


GLM = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value>"
HARMONY = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
SECTION = "<|tool_calls_section_begin|>"
KIMI = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
ONE_X = '{"x": 1}'
RARE: list[tuple[str, str, list[str], str]] = [
    (
        "hermes",
        f"<tool_call>{X}</tool_call>and<tool_call>{G0}</tool_call> then",
        [ONE_X, "{}"],
        "and then",
    ),
    ("hermes", f"<tool_call>{LATE}</tool_call>", [ONE_X], ""),
    ("llama", f"{LATE}; {G0}", [ONE_X, "{}"], ""),
    ("llama", f"<|python_tag|>{X}; <|python_tag|>{G0}", [ONE_X, "{}"], ""),
    ("llama", f"Like this: {X}", [], f"Like this: {X}"),
    ("glm", f"{GLM} Then text.", [ONE_X], "Then text."),
    ("glm", f"{GLM}{GLM}</tool_call>", [ONE_X] * 2, ""),
    ("gpt_oss", f"{HARMONY}<|call|>", ["{}"], ""),
    ("gpt_oss", f"<|channel|>commentary{HARMONY}{{}}<|call|>", ["{}"], ""),
    ("gpt_oss", "<|channel|>final<|channel|>final<|message|>Hi<|return|>", [], "Hi"),
    ("kimi", f"{SECTION}{KIMI}<|tool_call_end|>", ["{}"], ""),
    ("kimi", f"{SECTION}{KIMI}{{}}<|tool_call_end|>{KIMI}{{}}", ["{}"] * 2, ""),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a"}, {"name": "f", "arguments": {}, "id": "a"}]',
        ["{}"] * 2,
        "",
    ),
]
"""vLLM 0.32 reads the same calls, but for GLM's second one."""


@pytest.mark.parametrize(("name", "text", "arguments", "content"), RARE)
def test_rare_forms_are_calls_with_ids_of_their_own(
    name: str, text: str, arguments: list[str], content: str
) -> None:
    tools = [{"type": "function", "function": {"name": each}} for each in "fg"]
    for size in (1, len(text)):
        reader = AnswerReader(find_tool_format(name, ""), tools)
        feed(reader, text, size)
        assert [call.text for call in reader.calls] == arguments
        assert len({call.id for call in reader.calls}) == len(arguments)
        assert reader.content.strip() == content
