"""Which recorded answer a chat continues, what a template omits, and credits of a
session's completions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from gateway_capture_cases import (
    END,
    CharRenderer,
    Message,
    Play,
    assistant,
    completion,
    conversation,
    plan,
    user,
)
from gateway_cases import gateway_world, in_loop
from template_renderers import Renderers, renderers

from asyncrl.agents.endpoint import prefix_match
from asyncrl.agents.endpoint.capture import Capture
from asyncrl.agents.harness import OUTCOME
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import Outcome, Rollout

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}},
}
EOT = "<|eot_id|>"
IM_END = "<|im_end|>"


@pytest.fixture(scope="module")
def renderer_for(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    return renderers(tmp_path_factory.mktemp("answers"))


def called(arguments: object, *, id: str = "call_1", **fields: object) -> Message:
    function = {"name": "add", "arguments": arguments}
    return assistant(
        None,
        tool_calls=[{"id": id, "type": "function", "function": function, **fields}],
    )


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "The tool says 42"}


def test_answer_is_found_by_its_text_or_its_meaning() -> None:
    four, called_add = Play(), Play()
    four.ask([user("1+2")], f"4{END}")
    called_add.ask([user("1+2")], f"<add>{END}", called('{"a":1,"b":2}'))
    for play, sent_back, how in (
        (four, assistant("4", refusal=None, tool_calls=None), "extended"),
        (four, {"content": " 4\n", "role": "assistant"}, "realigned"),
        (four, assistant("4", name="bob"), "extended"),
        (four, assistant("5"), "edited"),
        (four, assistant("4", tool_calls=called({})["tool_calls"]), "edited"),
        (called_add, called({"b": 2, "a": 1}, index=0), "extended"),
        # this template writes only the name
        (called_add, called('{"a":1,"b":3}'), "extended"),
        (called_add, called('{"a":1,"b":2}', id="call_2"), "extended"),
        (called_add, assistant("<sub>"), "edited"),
    ):
        assert plan(play.capture, [user("1+2"), sent_back, RESULT]).how == how


def test_defaults_that_a_client_adds_to_a_call_do_not_count(
    renderer_for: Renderers,
) -> None:
    properties = {
        "all": {"type": "boolean", "default": False},
        "a": {"default": "1"},
        "b": {"default": 1},
        "c": {"default": "1"},
        "mode": {"default": "utf-8"},
        "end": {"default": ""},
    }
    function = {
        "name": "add",
        "parameters": {"type": "object", "properties": properties},
    }
    tools = [{"type": "function", "function": function}]
    play = Play(renderer_for("qwen3"))
    sampled = (
        f'<tool_call>{{"name": "add", "arguments": {{"a": "2"}}}}</tool_call>{IM_END}'
    )
    play.answer(plan(play.capture, [user("1+2")], tools), sampled, called('{"a": "2"}'))
    for arguments, how in (
        ('{"a": "2", "all": false, "b": 1.0}', "realigned"),
        ('{"a": "2", "c": "1", "mode": "utf-8", "end": ""}', "realigned"),
        ('{"a": "2", "c": 1}', "edited"),
        ('{"a": "2", "all": 0}', "edited"),
        ('{"a": "2", "b": "1"}', "edited"),
        ("{}", "edited"),
    ):
        assert (
            plan(play.capture, [user("1+2"), called(arguments), RESULT], tools).how
            == how
        )


@pytest.mark.parametrize("properties", [["a"], {"a": None}, None, "a"])
def test_tools_with_any_schema_have_a_plan(properties: object) -> None:
    parameters = {"type": "object", "properties": properties}
    function = {"name": "add", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    assert plan(Play().capture, [user("hi")], tools).how == "new"


def test_other_tools_are_another_chat() -> None:
    play = Play()
    play.answer(plan(play.capture, [user("hi")], [TOOL]), f"yo{END}")
    chat = [user("hi"), assistant("yo"), user("more")]
    assert (
        plan(play.capture, chat, [json.loads(json.dumps(TOOL, sort_keys=True))]).how
        == "extended"
    )
    assert (
        plan(play.capture, chat, None).how
        == plan(play.capture, chat, [TOOL, TOOL]).how
        == "edited"
    )


def test_other_settings_are_not_continued(renderer_for: Renderers) -> None:
    play = Play(renderer_for("gptoss"))
    low, high = {"reasoning_effort": "low"}, {"reasoning_effort": "high"}
    match = play.capture.match([user("hi")], None, settings=low)
    planned = play.capture.plan(play.renderer.encode(match.text), match)
    play.answer(planned, "<|channel|>final<|message|>yo<|return|>", assistant("yo"))
    chat = [user("hi"), assistant("yo"), user("more")]
    assert play.capture.match(chat, None, settings=low).how == "realigned"
    other = play.capture.match(chat, None, settings=high)
    assert (other.how, other.text) == (
        "edited",
        play.renderer.render(chat, settings=high),
    )


def test_prompt_of_ids_continues_the_longest_recorded_ids() -> None:
    capture = Play().capture
    first = capture.plan([1, 2, 3])
    capture.record(first, completion(first, [4, 5]), assistant(""), "cmpl-0")
    second = capture.plan([1, 2, 3, 4, 5, 6])
    assert (second.how, second.added.tolist()) == ("extended", [6])
    capture.record(second, completion(second, [7]), assistant(""), "cmpl-1")
    assert capture.plan([1, 2, 3, 4, 5, 6, 7]).added.tolist() == [], (
        "a cut answer may be gone on from"
    )
    assert capture.plan([1, 2, 3, 4, 5, 8]).added.tolist() == [8]
    assert capture.plan([1, 2, 3, 4]).how == capture.plan([9]).how == "edited"
    (branch,) = capture.rollout(0, Outcome(), 1.0)
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert branch.loss_mask.tolist() == [False, False, False, True, True, False, True]


def test_unrenderable_chat_is_a_value_error() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for message, why in (
        (user("\ud800"), "surrogates"),
        (called({"a": nested}), "nested too deep"),
    ):
        with pytest.raises(ValueError, match=why):
            plan(Play().capture, [message])


def test_last_completion_belongs_to_the_call_planned_last() -> None:
    play = Play()
    with pytest.raises(RolloutFailure, match="without a completion"):
        play.capture.last_completion()
    first, second = plan(play.capture, [user("a")]), plan(play.capture, [user("b")])
    play.answer(second, f"late{END}")
    play.answer(first, f"early{END}")
    last = play.capture.last_completion()
    assert play.renderer.decode(last.token_ids) == "late"
    assert len(last.behaviour_logprobs) == len(last.token_ids)


# ---- forms of an answer

THOUGHT = "<think>\nhm\n</think>\n\n"
FORMS = (
    assistant(f"{THOUGHT}Four."),
    assistant("<think>hm</think>Four."),
    assistant("Four.", reasoning_content="hm"),
    assistant(f"{THOUGHT}Four.", reasoning_content="hm\n"),
    assistant("Four."),
)


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "qwen3_5_think", "llama3_1"])
def test_answer_may_return_in_another_form_at_each_call(
    template: str, renderer_for: Renderers
) -> None:
    for first in FORMS:
        for second in FORMS:
            play = Play(renderer_for(template))
            play.ask([user("2+2?")], f"{THOUGHT}Four.{IM_END}")
            play.ask([user("2+2?"), first, user("Sure?")], f"{THOUGHT}Four.{IM_END}")
            last = plan(
                play.capture, [user("2+2?"), second, user("Sure?"), first, user("Why?")]
            )
            assert last.how in ("extended", "realigned")
            assert last.parent is not None
            assert last.parent.name == "chatcmpl-1"


def test_equal_answers_are_told_apart_by_their_thoughts() -> None:
    play = Play()
    for thought in ("one", "two"):
        play.ask([user("a")], f"<think>{thought}</think>yes{END}")
    found = {}
    for thought in ("two", "three", None):
        chat = [user("a"), assistant("yes", reasoning_content=thought), user("b")]
        parent = plan(play.capture, chat).parent
        found[thought] = parent and parent.name
    assert found == {"two": "chatcmpl-1", "three": None, None: "chatcmpl-0"}


CALL = '{"name": "add", "arguments": {"a": 1}}'
OTHER_ORDER = '{"arguments": {"a": 1}, "name": "add"}'


@pytest.mark.parametrize(
    ("sampled", "behind"),
    [
        (f"I add.\n<tool_call>\n{CALL}\n</tool_call>{EOT}", ""),
        (f"I add.\n<tool_call>\n{CALL}\n</tool_call>", IM_END),
        (f"I add.\n<tool_call>\n{OTHER_ORDER}</tool_call>{IM_END}", ""),
    ],
)
def test_end_of_a_call_is_not_repeated(
    sampled: str, behind: str, renderer_for: Renderers
) -> None:
    renderer = renderer_for("qwen3")
    play = Play(renderer)
    play.ask([user("1?")], sampled, called({"a": 1}))
    planned = plan(play.capture, [user("1?"), called({"a": 1}), RESULT])
    added = renderer.decode(planned.added.tolist(), skip_special_tokens=False)
    assert planned.how == "realigned"
    assert added.partition("\n<|im_start|>user")[0] == behind


CHAT = [user("1+2"), assistant("3"), user("Sure?")]


@pytest.mark.parametrize(
    ("template", "sampled", "deviation"),
    [
        ("qwen3", f"{THOUGHT}3{IM_END}", "thought"),
        ("qwen3", f"3{EOT}", "end_token"),
        ("qwen3", f"3\n{IM_END}", "form"),
        ("gptoss", "<|channel|>final<|message|>3<|return|>", "end_token"),
        ("qwen3_5_nothink", f"3{IM_END}", "opening"),
    ],
)
def test_realigned_prompt_names_its_deviation(
    template: str, sampled: str, deviation: str, renderer_for: Renderers
) -> None:
    renderer = renderer_for(template)
    kept, as_template = Play(renderer), Play(renderer)
    as_template.capture = Capture(renderer, keeps_thoughts=False)
    for play in (kept, as_template):
        play.ask(CHAT[:1], sampled, CHAT[1])
    whole = renderer.render(CHAT)
    planned = plan(kept.capture, CHAT)
    assert planned.match is not None
    assert planned.match.deviations == (deviation,)
    begun = [
        *kept.renderer.encode(renderer.render(CHAT[:1])),
        *renderer.encode(sampled),
    ]
    assert planned.prompt_ids.tolist()[: len(begun)] == begun
    end = "<|end|>" if template == "gptoss" else IM_END
    after = whole.rpartition(f"3{end}")[2]
    assert (
        renderer.decode(
            planned.prompt_ids.tolist()[len(begun) :], skip_special_tokens=False
        )
        == after
    )
    planned = plan(as_template.capture, CHAT)
    assert planned.how == "edited"
    assert (
        renderer.decode(planned.prompt_ids.tolist(), skip_special_tokens=False) == whole
    )


@pytest.mark.parametrize(
    ("template", "closed"), [("qwen3_5_think", "\n</think>\n\n"), ("qwen3", "")]
)
def test_forced_call_is_not_begun_inside_a_thought(
    template: str, closed: str, renderer_for: Renderers
) -> None:
    renderer = renderer_for(template)
    play = Play(renderer)
    planned = plan(play.capture, [user("go")], [TOOL], prefill="<tool_call>")
    shown = renderer.render([user("go")], tools=[TOOL])
    assert planned.match is not None
    assert planned.match.text == f"{shown}{closed}<tool_call>"
    play.answer(planned, f"{CALL}</tool_call>{IM_END}", called({"a": 1}))
    assert (
        plan(play.capture, [user("go"), called({"a": 1}), RESULT], [TOOL]).how
        != "edited"
    )


# ---- what a template leaves out, and its settings


def contents(chat: Sequence[Mapping[str, Any]], *, but: str = "") -> str:
    """A template that writes contents, except of one role."""
    return " ".join(message["content"] for message in chat if message["role"] != but)


def left_out(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    chat: Sequence[Mapping[str, Any]],
    text: str,
    start: int = 0,
) -> int | None:
    return prefix_match.left_out(render, chat, text, start, {})


def test_message_is_found_however_the_template_writes_it() -> None:
    said = [
        user(text)
        for text in ("one", 'the "two"', "drei \u00fc", "Four  and\nfive", "/no_think")
    ]
    habits: list[Callable[[Sequence[Mapping[str, Any]]], str]] = [
        contents,
        lambda chat: json.dumps(contents(chat)).upper(),
        lambda chat: " ".join(contents(chat).split()),
        lambda chat: contents(chat).replace("/no_think", ""),
    ]
    for habit in habits:
        assert left_out(habit, said, habit(said)) is None


@pytest.mark.parametrize("text", ["\u00df" * 60, "\u0587" * 60, "\ufb01" * 60])
def test_text_that_grows_when_folded_hides_no_message(text: str) -> None:
    chat = [{"role": "system", "content": "Be brief."}, user(text)]
    assert left_out(contents, chat, contents(chat)) is None
    assert left_out(partial(contents, but="system"), chat, text) == 0


@pytest.mark.parametrize(
    "lost", ["18", "", "open", "the door is open today", "The tool says this"]
)
def test_message_is_missed_although_its_text_is_elsewhere(lost: str) -> None:
    result = {"role": "tool", "content": lost}
    chat = [
        user("In 2018, is it open?"),
        assistant(""),
        result,
        assistant("The door is open today."),
        user("x"),
    ]
    no_tools = partial(contents, but="tool")
    assert left_out(contents, chat, contents(chat)) is None
    assert left_out(no_tools, chat, no_tools(chat)) == 2
    assert left_out(no_tools, chat, "x", 3) is None


def test_text_that_only_the_template_says_is_missed() -> None:
    default = "You are a helpful assistant."
    chat = [{"role": "system", "content": default}, user("Hi.")]
    assert (
        left_out(
            lambda chat: default + contents(chat, but="system"), chat, f"{default}Hi."
        )
        == 0
    )
    late = [user("Hi."), assistant("Yes."), {"role": "system", "content": "Be brief."}]
    first = left_out(lambda chat: contents([chat[2], *chat[:2]]), late, " the rest", 2)
    assert first == 2, "it is before the rest"
    assert (
        left_out(lambda chat: contents(chat)[:100], [user("word " * 50)], "word " * 20)
        == 0
    ), "it is cut"


@in_loop
async def test_message_that_the_template_omits_gets_400(
    renderer_for: Renderers,
) -> None:
    async with gateway_world(tokenizer=renderer_for("phi3")) as world:
        chat = [user("In 2018?"), called("{}"), {**RESULT, "content": "18"}]
        status, answer = await world.post({"messages": chat})
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "the chat template drops messages[2]" in answer["error"]["message"]


@pytest.mark.parametrize("name", ["qwen3", "cohere2"])
def test_developer_is_the_system_where_the_template_knows_none(
    name: str, renderer_for: Renderers
) -> None:
    chats = (
        [{"role": role, "content": "Be brief."}, user("Hi.")]
        for role in ("developer", "system")
    )
    as_developer, as_system = map(renderer_for(name).render, chats)
    assert as_developer == as_system
    assert "Be brief." in as_system


OFF = "<think>\n\n</think>\n\n"


def test_settings_of_run_and_call_reach_the_template(renderer_for: Renderers) -> None:
    chat = [user("Hi.")]
    plain = renderer_for("qwen3")
    no_thoughts = renderer_for("qwen3", enable_thinking=False)
    assert plain.render(chat, settings={"enable_thinking": False}).endswith(OFF)
    assert no_thoughts.render(chat, settings={"other": 1}).endswith(OFF)
    assert not no_thoughts.render(chat, settings={"enable_thinking": True}).endswith(
        OFF
    )
    reserved = {
        "messages": [],
        "add_generation_prompt": False,
        "bos_token": "x",
        "chat_template": "x",
    }
    assert plain.render(chat, settings=reserved) == plain.render(chat)
    with pytest.raises(
        ConfigError, match=r"does not read thinking(.|\n)*may set .*enable_thinking"
    ):
        renderer_for("qwen3", thinking=False)


# ---- credits, and samples that are not trained


@pytest.mark.parametrize(
    ("are_trained", "trained", "ends_with"),
    [
        ((True, False, True), "13", "3"),
        ((False, True, False), "2", "2"),
        ((True, False, False), "1", "1"),
    ],
)
def test_untrained_answers_are_context(
    are_trained: tuple[bool, ...], trained: str, ends_with: str
) -> None:
    play = conversation(*are_trained)
    rewards = {
        f"chatcmpl-{number}": 0.5 + number for number in range(3) if are_trained[number]
    }
    (branch,) = play.capture.rollout(0, Outcome(turn_rewards=rewards), 1.0)
    assert play.renderer.decode(branch.token_ids[branch.loss_mask].tolist()) == trained
    assert play.renderer.decode(branch.token_ids.tolist()).endswith(ends_with)
    assert not branch.tokens.behaviour_logprobs[~branch.loss_mask].any()
    spanned = [
        place for span in branch.tokens.spans for place in range(span.start, span.end)
    ]
    assert spanned == branch.loss_mask.nonzero()[0].tolist()
    assert [credit.reward for credit in branch.credits] == list(rewards.values())
    with pytest.raises(
        RolloutFailure, match=r"not one sampled token to train on(.|\n)*Way out"
    ):
        conversation(False, False).capture.rollout(0, Outcome(), 1.0)


@pytest.mark.parametrize(
    "names", [["chatcmpl-0", "chatcmpl-1", "chatcmpl-9"], ["chatcmpl-0"]]
)
def test_rewards_that_do_not_fit_fail_the_rollout(names: list[str]) -> None:
    with pytest.raises(RolloutFailure, match=r"its rewards name(.|\n)*Way out: "):
        conversation(True, True).capture.rollout(
            0, Outcome(turn_rewards=dict.fromkeys(names, 1.0)), 1.0
        )


def turns_of(rollout: Rollout) -> list[tuple[float, str, int, str]]:
    """(reward, tokens, unit, state) of each credit."""
    renderer = CharRenderer()
    return [
        (
            credit.reward,
            renderer.decode(branch.token_ids[credit.start : credit.end].tolist()),
            credit.unit,
            credit.state,
        )
        for branch in rollout
        for credit in branch.credits
    ]


def test_each_turn_has_a_credit_and_the_last_one_earns_the_reward() -> None:
    capture = conversation(True, False, True).capture
    states = {"chatcmpl-0": "hall", "chatcmpl-2": "hall"}
    rollout = capture.rollout(0, Outcome(turn_states=states), 0.75, by_turn=True)
    first, third, second = turns_of(rollout)
    assert first[0::2] == (0.0, 0)
    assert "1" in first[1]
    assert third[0::2] == (0.75, 2)
    assert first[3] == third[3] == "hall"
    # It has no loss, and its reward would count for the first turn.
    assert second[:3] == (0.0, "", 1)
    assert second[3]
    rewards = {f"chatcmpl-{number}": 0.5 + number for number in range(3)}
    rollout = capture.rollout(0, Outcome(turn_rewards=rewards), 9.0, by_turn=True)
    assert [turn[0] for turn in turns_of(rollout)] == [0.5, 2.5, 1.5]
    outcome = Outcome(turn_states={"chatcmpl-9": "hall"})
    with pytest.raises(RolloutFailure, match="its turn_states name"):
        capture.rollout(0, outcome, 1.0, by_turn=True)


def test_turns_of_rewritten_histories_are_in_the_order_of_the_calls() -> None:
    play = Play()
    for question in ("z", "a", "z"):
        play.ask([user(question)], f"x{END}")
    (_, _, last_unit, of_a), *of_z = turns_of(
        play.capture.rollout(0, Outcome(), 1.0, by_turn=True)
    )
    assert last_unit == 1, "branches are ordered by their ids"
    assert {unit: reward for reward, _, unit, _ in of_z} == {0: 0.0, 2: 1.0}
    states = {state for *_, state in of_z}
    assert len(states) == 1, "equal prompts are equal states"
    assert of_a not in states
    again = Play()
    again.ask([user("z")], f"other{END}")
    ((*_, of_other_rollout),) = turns_of(
        again.capture.rollout(1, Outcome(), 1.0, by_turn=True)
    )
    assert {of_other_rollout} == states


def test_outcome_has_finite_numbers() -> None:
    for outcome in (
        Outcome(turn_states={"chatcmpl-0": "a" * 257}),
        Outcome(turn_rewards={"chatcmpl-0": math.nan}),
        Outcome(1e39),  # infinite in float32
        Outcome(metrics={"steps": 1e308}),  # the mean of two overflows
        Outcome(metrics={f"answer {number}": 1.0 for number in range(257)}),
    ):
        with pytest.raises(ValueError, match="validation error"):
            OUTCOME.validate_python(outcome)
