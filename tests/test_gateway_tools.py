"""Tool calls in the text of an answer: found, read to the letter, or left as text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_cases import RULES, gateway_world, in_loop
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.agents.endpoint.requests import RequestReader
from asyncrl.agents.endpoint.tool_calls import ParsedAnswer, ToolCall, ToolFormat, find_tool_format
from asyncrl.errors import ConfigError, RolloutFailure

HERMES = find_tool_format("hermes", "")
LLAMA = find_tool_format("llama", "")


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def call_text(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


F, G = call_text("f", '{"x": 1}'), call_text("g", "{}")
CALL_F, CALL_G = ToolCall("f", '{"x": 1}'), ToolCall("g", "{}")


def test_hermes_calls_are_read_with_the_text_before_them() -> None:
    assert HERMES.parse(hermes(F)) == ParsedAnswer(None, (CALL_F,))
    assert HERMES.parse(f"Let me see.\n\n{hermes(F, G)}\n") == ParsedAnswer("Let me see.", (CALL_F, CALL_G))
    assert HERMES.parse(f"<tool_call>{F}</tool_call>and<tool_call>{G}</tool_call> then") == ParsedAnswer(
        "and then", (CALL_F, CALL_G)
    )


def test_hermes_reads_any_order_of_keys_and_a_list_of_calls() -> None:
    assert HERMES.parse(
        '<tool_call>\n{ "arguments": {"x": 1}, "id": 7, "name": "f"}\n</tool_call> '
    ).tool_calls == (CALL_F,)
    assert HERMES.parse(f"<tool_call>[\n{F},\n{G}\n]</tool_call>") == ParsedAnswer(None, (CALL_F, CALL_G))


def test_an_empty_list_of_calls_is_no_call() -> None:
    text = "None fits. <tool_call>[]</tool_call>"
    assert HERMES.parse(text) == ParsedAnswer(text)


def test_the_last_hermes_call_need_not_be_closed_for_a_stop_string_may_have_cut_it_off() -> None:
    assert HERMES.parse(f"{hermes(F)}\n<tool_call>\n{G}\n").tool_calls == (CALL_F, CALL_G)
    unclosed = f"<tool_call>{F}<tool_call>{G}</tool_call>"
    assert HERMES.parse(unclosed) == ParsedAnswer(unclosed)


def test_a_call_that_is_only_thought_about_is_none() -> None:
    text = f"<think>I could write <tool_call>, or even {hermes(G)}</think>\n\n{hermes(F)}"
    parsed = HERMES.parse(text)
    assert parsed.tool_calls == (CALL_F,)
    assert parsed.content == text[: text.index("</think>")] + "</think>"
    assert HERMES.parse(f"I could write {hermes(G)}</think>no").tool_calls == (), (
        "the template may have written <think> already"
    )


def test_llama_calls_are_the_whole_answer_or_follow_the_python_tag() -> None:
    f, g = call_text("f", '{"x": 1}', "parameters"), call_text("g", "{}")
    assert LLAMA.parse(f" {f}") == ParsedAnswer(None, (CALL_F,))
    assert LLAMA.parse(f"{f}; {g} ;") == ParsedAnswer(None, (CALL_F, CALL_G))
    assert LLAMA.parse(f"<|python_tag|>{f}\n{g}") == ParsedAnswer(None, (CALL_F, CALL_G))
    assert LLAMA.parse(f"<|python_tag|>{f}; <|python_tag|>{g}") == ParsedAnswer(None, (CALL_F, CALL_G))
    assert LLAMA.parse(f"I look it up. <|python_tag|>{f}") == ParsedAnswer("I look it up.", (CALL_F,))
    assert LLAMA.parse('{"type": "function", "name": "g", "parameters": {}}').tool_calls == (CALL_G,)


@pytest.mark.parametrize(
    "text",
    [
        f"Like this: {F}",
        f"{F} is a call",
        '{"city": "Paris"}',
        '{"name": "f", "parameters": {}, "arguments": {}}',
        '<|python_tag|>brave_search.call(query="x")',
        "<|python_tag|>",
        "",
        " \n",
        "{",
        f"{F};{{",
    ],
)
def test_json_amid_text_code_and_other_json_is_text_for_llama(text: str) -> None:
    assert LLAMA.parse(text) == ParsedAnswer(text)


MALFORMED = [
    call_text("f", '{"x": 1'),
    call_text("f", '{"x": 1,}'),
    call_text("f", "{'x': 1}"),
    call_text("f", '{"x": NaN}'),
    call_text("f", '{"x": "\\ud800"}'),
    call_text("f", '{"x": "a\nb"}'),
    call_text("f", '"{}"'),
    call_text("f", "[1]"),
    call_text("f", "null"),
    call_text("", "{}"),
    call_text("no such name", "{}"),
    call_text("f" * 65, "{}"),
    '{"name": "f"}',
    '{"arguments": {}}',
    '{"name": 3, "arguments": {}}',
    '{"name": ["f"], "arguments": {}}',
    '{1: "name", "arguments": {}}',
    '{"name" "f", "arguments": {}}',
    "[1, 2]",
    f"[{F}",
    f"[{F} {G}]",
    "f(x=1)",
    "",
    '"',
    "{" * 100_000,
    call_text("f", '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    call_text("f", '{"x": ' + "9" * 10_000 + "}") + " {",
]


@pytest.mark.parametrize("call", MALFORMED, ids=lambda call: call[:40])
def test_an_answer_with_a_malformed_call_is_text_to_the_letter(call: str) -> None:
    for text in (f" See: \n{hermes(F)}\n<tool_call>\n{call}\n</tool_call> \n", f"<tool_call>{call}"):
        assert HERMES.parse(text) == ParsedAnswer(text)
    for text in (call, f"<|python_tag|>{F};{call or '{'}"):
        assert LLAMA.parse(text) == ParsedAnswer(text)


def test_a_large_answer_is_read() -> None:
    arguments = json.dumps({"text": "a\n" * 500_000, "more": list(range(15_000))})
    assert HERMES.parse(hermes(call_text("f", arguments))).tool_calls == (ToolCall("f", arguments),)
    assert len(HERMES.parse(hermes(*[F] * 20_000)).tool_calls) == 20_000
    many = "<tool_call>" * 100_000
    assert HERMES.parse(many) == ParsedAnswer(many)


characters = st.characters(exclude_categories=("Cs",))
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(characters, max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "</tool_call>", ";", "{"]), inner, max_size=3)
    ),
    max_leaves=8,
)
arguments_texts = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    st.dictionaries(st.text(characters, max_size=3), json_values, max_size=3),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
)
MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "</think>", F, "<tool_", "<|py"]
texts = st.lists(st.sampled_from([*"<tool_>/{}[];: \nab", *MARKERS]), max_size=12).map("".join)


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["f", "get_weather", "a.b-c"]), arguments_texts), min_size=1, max_size=3
    )
)
def test_arguments_are_the_text_that_the_model_wrote_and_can_be_sent_back(
    calls: list[tuple[str, str]],
) -> None:
    expected = tuple(ToolCall(*call) for call in calls)
    assert HERMES.parse(hermes(*[call_text(*call) for call in calls])).tool_calls == expected
    assert LLAMA.parse("; ".join(call_text(*call, "parameters") for call in calls)).tool_calls == expected
    sent_back = [
        {"id": "c", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in expected
    ]
    message = {"role": "assistant", "content": None, "tool_calls": sent_back}
    body = json.dumps({"messages": [message]}).encode()
    checked = (RequestReader(RULES).chat(body).messages or [])[0]["tool_calls"]
    assert [call["function"]["name"] for call in checked] == [call.name for call in expected]


@pytest.mark.parametrize(
    "tool_format", [HERMES, LLAMA, find_tool_format("none", "")], ids=lambda each: each.name
)
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
    assert HERMES.hold_from("I look it up.") == len("I look it up.")
    assert HERMES.hold_from("a <b> <tool") == len("a <b>")
    assert HERMES.hold_from("a <b> <tool b") == len("a <b> <tool b")
    assert HERMES.hold_from("a \n") == 1, "white space goes if a call follows"
    assert HERMES.hold_from(f"a {hermes(F)} and more") == 1
    assert (
        LLAMA.hold_from('{"') == LLAMA.hold_from(" {") == LLAMA.hold_from("<|py") == LLAMA.hold_from(" ") == 0
    )
    assert LLAMA.hold_from('a {"name": ') == len('a {"name":')
    assert LLAMA.hold_from("a <|python_tag|>{") == 1


@pytest.mark.parametrize(
    ("tool_format", "required", "named"),
    [
        (HERMES, ' "f", "arguments": {"x": 1}}\n</tool_call>', ' {"x": 1}}\n</tool_call>'),
        (
            find_tool_format("hermes", "<tool_call>[\n"),
            ' "f", "arguments": {"x": 1}}\n]</tool_call>',
            ' {"x": 1}}]</tool_call>',
        ),
        (LLAMA, ' "f", "parameters": {"x": 1}}', ' {"x": 1}}'),
    ],
    ids=["hermes", "hermes lists", "llama"],
)
def test_a_prefill_begins_a_call_of_any_tool_or_of_one(
    tool_format: ToolFormat, required: str, named: str
) -> None:
    any_tool, one_tool = tool_format.prefill(None), tool_format.prefill("f")
    assert any_tool is not None
    assert one_tool is not None
    assert (
        tool_format.parse(any_tool + required)
        == tool_format.parse(one_tool + named)
        == ParsedAnswer(None, (CALL_F,))
    )
    assert not any_tool.endswith((" ", "\n")), "white space at the end would split a token"


QWEN = """{{- "<tools>" }}{{- "within <tool_call></tool_call>:\\n<tool_call>\\n{\\"name\\": <name>}" }}"""
LLAMA_32 = (
    """{{- "Environment: ipython\\n" }}{{- 'Respond like {"name": name, "parameters": dictionary}. ' }}"""
)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN, "hermes"),
        (LLAMA_32, "llama"),
        ("{{ '<|python_tag|>' }}{{ '\"parameters\": ' }}", "llama"),
        ("{{ '<|im_start|>' + message.role }}", "none"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "none"),
        ("<tool_call>{{ name }}\n<arg_key>", "none"),
        ('<TOOLCALL>[{"name": "x", "arguments": "y"}]</TOOLCALL> "parameters" ipython', "none"),
        (
            '<|python_tag|> <function=example_function_name>{"example_name": 1}</function> "parameters"',
            "none",
        ),
    ],
)
def test_auto_reads_the_format_off_the_chat_template(template: str, name: str) -> None:
    assert find_tool_format("auto", template).name == name


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tool_format=mistral is not known\.\n  Way out: set it to auto, hermes, llama, none",
    ):
        find_tool_format("mistral", "")


PARSER = """
import json

def parse(text):
    if text.startswith("CALL "):
        name, arguments = text.removeprefix("CALL ").split(" ", 1)
        return [(name, json.loads(arguments))]
    return None

def as_text(text): return [("f", text)]
def wrong(text): return "f"
def raises(text): return {}[text]
def wrong_pair(text): return [("f", {}, 1)]
def no_json(text): return [("f", {"x": {1, 2}})]
def two(text, more): return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_tool_format.py").write_text(PARSER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: find_tool_format(f"own_tool_format:{name}", "")


def test_a_function_of_ones_own_reads_calls_from_dicts_or_texts(own: Any) -> None:
    assert own("parse").parse('CALL f {"x": 1}') == ParsedAnswer(None, (CALL_F,))
    assert own("parse").parse("hello") == ParsedAnswer("hello")
    assert own("as_text").parse(' {"x":1}') == ParsedAnswer(None, (ToolCall("f", ' {"x":1}'),))
    assert own("parse").hold_from("hello") == 0
    assert own("parse").prefill(None) is own("parse").prefill("f") is None


def test_a_call_that_ones_own_function_finds_malformed_is_text(own: Any) -> None:
    for name, text in (
        ("parse", "CALL f {'x': 1}"),
        ("parse", "CALL f"),
        ("parse", "CALL f [1]"),
        ("as_text", "{"),
        ("no_json", "a"),
    ):
        assert own(name).parse(text) == ParsedAnswer(text)


def test_a_function_that_returns_something_else_fails_the_rollout_and_says_what_it_should_be(
    own: Any,
) -> None:
    for name in ("wrong", "wrong_pair"):
        with pytest.raises(
            RolloutFailure, match=r"own_tool_format:wrong.* returned .*parse\(text\) -> \[\(name, arguments\)"
        ):
            own(name).parse("a")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong_pair", "returned ('f', {}, 1)"),
        ("raises", "raised KeyError: 'Hello there.' (own_tool_format.py line"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
@in_loop
async def test_a_wrong_function_fails_the_rollout_of_the_call_by_its_name(
    own: Any, name: str, said: str, n: int
) -> None:
    own(name)
    async with gateway_world(tool_format=f"own_tool_format:{name}") as world:
        tools = [{"type": "function", "function": {"name": "f"}}]
        asking = asyncio.ensure_future(world.ask(tools=tools, n=n))
        with pytest.raises(RolloutFailure) as failure:
            async with world.session.while_open():
                await asyncio.Event().wait()
        assert f"gateway.tool_format=own_tool_format:{name} {said}" in str(failure.value)
        status, told = await asking
        assert (status, told["error"]["code"]) == (410, "session_ended")
        assert f"own_tool_format:{name} {said}" in told["error"]["message"]
        assert world.gateway.stats().in_flight == 0


def test_a_function_that_is_not_there_or_takes_more_is_refused_at_the_start(own: Any) -> None:
    with pytest.raises(ConfigError, match="has no nothing"):
        own("nothing")
    with pytest.raises(ConfigError, match=r"cannot be called as parse\(text\)"):
        own("two")
