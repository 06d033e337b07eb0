"""Tool calls in the text of an answer: found and read, or left as text to the letter."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_cases import RULES, ScriptedEngine, gateway_world, in_loop
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.agents.endpoint.requests import RequestReader
from asyncrl.agents.endpoint.tool_calls import ParsedAnswer, ToolCall, ToolFormat, find_tool_format
from asyncrl.base.errors import ConfigError, RolloutFailure

HERMES, HERMES_LISTS = find_tool_format("hermes", ""), find_tool_format("hermes", "<tool_call>[\n")
LLAMA, NONE = find_tool_format("llama", ""), find_tool_format("none", "")


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def call_text(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


F, G, P = call_text("f", '{"x": 1}'), call_text("g", "{}"), call_text("f", '{"x": 1}', "parameters")
THOUGHT = f"<think>I could write <tool_call>, or {hermes(G)}</think>"
CALL_F, CALL_G = ToolCall("f", '{"x": 1}'), ToolCall("g", "{}")
BOTH = (CALL_F, CALL_G)

TABLE: list[tuple[ToolFormat, str, str | None, tuple[ToolCall, ...]]] = [
    (HERMES, f"Let me see.\n\n{hermes(F, G)}\n", "Let me see.", BOTH),
    (HERMES, f"<tool_call>{F}</tool_call>and<tool_call>{G}</tool_call> then", "and then", BOTH),
    (HERMES, hermes('{ "arguments": {"x":1}, "id": 7, "name": "f"}'), None, (CALL_F,)),
    (HERMES, f"<tool_call>[\n{F},\n{G}\n]</tool_call>", None, BOTH),
    (HERMES, f"{hermes(F)}\n<tool_call>\n{G}\n", None, BOTH),  # a stop string may have cut the end off
    (HERMES, f"{THOUGHT}\n\n{hermes(F)}", THOUGHT, (CALL_F,)),
    (HERMES, f"{hermes(G)}</think>no", f"{hermes(G)}</think>no", ()),  # the template may write <think>
    (LLAMA, f"<|python_tag|>{P}; <|python_tag|>{G}", None, BOTH),
    (LLAMA, f"I look it up. <|python_tag|>{P}", "I look it up.", (CALL_F,)),
    (LLAMA, f"Like this: {F}", f"Like this: {F}", ()),
    (LLAMA, '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', ()),
    (NONE, hermes(F), hermes(F), ()),
]


def test_calls_are_read_with_the_text_around_them() -> None:
    for tool_format, text, content, calls in TABLE:
        assert tool_format.parse(text) == ParsedAnswer(content, calls)


MALFORMED = [
    call_text("f", '{"x": 1'),
    call_text("f", '{"x": NaN}'),
    call_text("f", '{"x": 1e999}'),
    call_text("f", '{"x": "\\ud800"}'),
    call_text("f", "[1]"),
    call_text("no such name", "{}"),
    '{"name": "f"}',
    '{"name": ["f"], "arguments": {}}',
    f"[{F}",
    "",
    "{" * 100_000,
    call_text("f", '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    call_text("f", '{"x": ' + "[" * 500 + "]" * 500 + "}"),  # no client of ours could send it back
]


@pytest.mark.parametrize("call", MALFORMED, ids=lambda call: call[:40])
def test_an_answer_with_a_malformed_call_is_text_to_the_letter(call: str) -> None:
    for text in (f" See: \n{hermes(F)}\n<tool_call>\n{call}\n</tool_call> \n", f"<tool_call>{call}"):
        assert HERMES.parse(text) == ParsedAnswer(text)
    for text in (call, f"<|python_tag|>{F};{call or '{'}"):
        assert LLAMA.parse(text) == ParsedAnswer(text)


characters = st.characters(exclude_categories=("Cs",))
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.text(characters, max_size=3) | st.sampled_from(["</tool_call>", ";", "{"])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(characters, max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
NAMES, ARGUMENTS = st.sampled_from(["f", "a.b-c"]), st.dictionaries(KEYS, json_values, max_size=3)
CALL = st.tuples(NAMES, ARGUMENTS, st.booleans(), st.sampled_from([None, 0, 2]))
MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "</think>", F, "<tool_", "<|py"]
texts = st.lists(st.sampled_from([*"<tool_>/{}[];: \nab", *MARKERS]), max_size=12).map("".join)


@in_loop
async def test_the_schema_of_the_call_gives_the_types_of_its_arguments() -> None:
    values = "\n".join(f"<parameter={key}>\n1\n</parameter>" for key in "xy")
    text = f"So:\n<tool_call>\n<function=f>\n{values}\n</function>\n</tool_call>"
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    async with gateway_world(ScriptedEngine(lambda _: text), tool_format="qwen3_coder") as world:
        _, told = await world.ask(tools=tools)
        message = told["choices"][0]["message"]
        assert message["content"] == "So:"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": 1, "y": "1"}
        _, told = await world.ask("Hello")
        assert told["choices"][0]["message"]["content"] == text, "without tools it is text"


@given(calls=st.lists(CALL, min_size=1, max_size=3))
def test_arguments_are_those_that_the_model_wrote_and_can_be_sent_back(
    calls: list[tuple[str, dict[str, Any], bool, int | None]],
) -> None:
    written = [
        (name, json.dumps(value, ensure_ascii=ascii, indent=size)) for name, value, ascii, size in calls
    ]
    for found in (
        HERMES.parse(hermes(*[call_text(*call) for call in written])).tool_calls,
        LLAMA.parse("; ".join(call_text(*call, "parameters") for call in written)).tool_calls,
    ):
        assert [(call.name, json.loads(call.arguments)) for call in found] == [call[:2] for call in calls]
        functions = [{"name": call.name, "arguments": call.arguments} for call in found]
        sent_back = [{"id": "c", "type": "function", "function": function} for function in functions]
        answer = {"role": "assistant", "content": None, "tool_calls": sent_back}
        (message,) = RequestReader(RULES).chat(json.dumps({"messages": [answer]}).encode()).messages
        assert message["content"] == "", "SmolLM2's template and others take no message without"
        read = [call["function"]["arguments"] for call in message["tool_calls"]]
        assert read == [call[1] for call in calls]


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, NONE], ids=lambda each: each.name)
@given(text=texts, cuts=st.lists(st.integers(0, 5), max_size=12))
def test_what_is_shown_before_the_end_is_how_the_content_begins(
    tool_format: ToolFormat, text: str, cuts: list[int]
) -> None:
    content = tool_format.parse(text).content or ""
    shown = at = 0
    for length in [*cuts, len(text)]:
        at += length
        start, shown = shown, tool_format.hold_from(text[:at], shown)
        assert shown >= start, "what was shown stays"
        assert content.startswith(text[:shown])


def test_plain_text_is_held_back_no_longer_than_a_marker_may_begin() -> None:
    for tool_format, shown, held in (
        (HERMES, "a <b>", " <tool"),
        (HERMES, "a", " \n"),  # white space goes if a call follows
        (LLAMA, "", ' {"'),
        (LLAMA, 'a {"name":', " "),
    ):
        assert tool_format.hold_from(shown + held) == len(shown)


def test_a_prefill_begins_a_call_of_any_tool_or_of_one() -> None:
    for tool_format, key, end in (
        (HERMES, "arguments", "\n</tool_call>"),
        (HERMES_LISTS, "arguments", "\n]</tool_call>"),
        (LLAMA, "parameters", ""),
    ):
        for name, rest in ((None, f' "f", "{key}": {{"x": 1}}}}{end}'), ("f", f' {{"x": 1}}}}{end}')):
            prefill = tool_format.prefill(name) or " "
            assert tool_format.parse(prefill + rest) == ParsedAnswer(None, (CALL_F,))
            assert not prefill.endswith((" ", "\n")), "white space at the end would split a token"


def test_auto_reads_the_format_off_the_chat_template() -> None:
    for template, name in (
        ("within <tool_call></tool_call>:\\n<tool_call>\\n{name}", "hermes"),
        ('Environment: ipython. Respond like {"name": name, "parameters": dictionary}.', "llama"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
        ('<TOOLCALL>[{"name": ...}]</TOOLCALL>', "toolcall"),
        ("functools[...]", "none"),
        ('<|python_tag|> <function=example>{"example": 1}</function> "parameters"', "none"),
    ):
        assert find_tool_format("auto", template).name == name


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


def test_a_function_of_ones_own_reads_calls_and_what_it_finds_malformed_is_text(own: Any) -> None:
    assert own("parse").parse('CALL {"x": 1}') == ParsedAnswer(None, (CALL_F,))
    assert own("as_text").parse(' {"x":1}') == ParsedAnswer(None, (CALL_F,))
    assert own("with_content").parse("Yes f") == ParsedAnswer("Yes", (CALL_F,))
    texts = (("parse", "hello"), ("parse", "CALL [1]"), ("as_text", "{"), ("no_json", "a"))
    for name, text in (*texts, ("with_content", "Yes")):
        assert own(name).parse(text) == ParsedAnswer(text)
    assert own("parse").hold_from("hello") == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong_pair", "returned [('f', {}, 1)]; it is called as parse(text) -> [(name, arguments), ...]"),
        ("raises", "raised KeyError: 'Hello there.' (own_tool_format.py line"),
    ],
)
@in_loop
async def test_a_wrong_function_fails_the_rollout_of_the_call_by_name(own: Any, name: str, said: str) -> None:
    own(name)
    async with gateway_world(tool_format=f"own_tool_format:{name}") as world:
        tools = [{"type": "function", "function": {"name": "f"}}]
        asking = asyncio.ensure_future(world.ask(tools=tools, n=2))
        with pytest.raises(RolloutFailure) as failure:
            async with world.session.while_open():
                await asyncio.Event().wait()
        assert f"gateway.tool_format=own_tool_format:{name} {said}" in str(failure.value)
        status, told = await asking
        assert (status, told["error"]["code"]) == (410, "session_ended")


@pytest.mark.usefixtures("own")
def test_a_format_that_is_not_there_or_takes_more_is_refused_at_the_start() -> None:
    for name, why in (
        ("cohere", "tool_format=cohere is not known.\n  Way out: set it to auto, llama, hermes, qwen3"),
        ("own_tool_format:nothing", "has no nothing"),
        ("own_tool_format:two", r"cannot be called as parse\(text\)"),
    ):
        with pytest.raises(ConfigError, match=why):
            find_tool_format(name, "")
