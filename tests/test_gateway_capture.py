"""Which ids a call's prompt is made of, on a character-level template: the tree of a session's
completions.
"""

from __future__ import annotations

import copy
import json

import pytest
from gateway_capture_cases import END, START, CharRenderer, Message, Play, assistant, completion, plan, user

from asyncrl.agents.endpoint.capture import Capture, GatewayStats
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Outcome

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_call_that_goes_on_reuses_what_was_sent_and_sampled() -> None:
    play = Play()
    first = play.ask([user("hi")], f"yo{END}")
    second = plan(play.capture, [user("hi"), assistant("yo"), user("more")], None)
    assert second.how == "extended"
    assert second.prompt_ids == (
        *first.prompt_ids,
        *play.renderer.encode(f"yo{END}\n{START}user\nmore{END}\n{START}assistant\n"),
    )
    assert second.num_reused == len(first.prompt_ids) + 3
    assert play.counts == GatewayStats(calls=2, extended=1)


@pytest.mark.parametrize(
    "as_sent_back",
    [
        assistant("4", refusal=None, tool_calls=None, function_call=None, annotations=[]),
        {"content": "4", "role": "assistant"},
        assistant([{"type": "text", "text": "4"}]),
        assistant([{"type": "text", "text": ""}, {"type": "text", "text": "4"}]),
        assistant(" 4\n"),
    ],
    ids=[
        "fields that are None or empty",
        "another order of keys",
        "content in parts",
        "content in two parts",
        "white space",
    ],
)
def test_what_does_not_count_when_histories_are_compared(as_sent_back: Message) -> None:
    play = Play()
    play.ask([user("2+2")], f"4{END}", message=assistant("4"))
    assert plan(play.capture, [user("2+2"), as_sent_back, user("sure?")], None).parent is not None
    assert play.counts.forked == 0


@pytest.mark.parametrize(
    "arguments", ['{"b": 2,  "a":1}', {"a": 1, "b": 2}], ids=["spaced otherwise", "an object"]
)
def test_the_spacing_of_tool_arguments_does_not_count(arguments: object) -> None:
    def calls(arguments: object, **fields: object) -> Message:
        return assistant(
            None,
            tool_calls=[
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": arguments},
                    **fields,
                }
            ],
        )

    play = Play()
    play.ask([user("1+2")], f"<add>{END}", message=calls('{"a":1,"b":2}'))
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    assert plan(play.capture, [user("1+2"), calls(arguments, index=0), result], None).how == "extended"
    assert plan(play.capture, [user("1+2"), calls('{"a":1,"b":3}'), result], None).how == "forked", (
        "another argument is another call"
    )
    assert plan(play.capture, [user("1+2"), calls('{"a":1,"b":2'), result], None).how == "forked", (
        "what is no JSON is compared as text"
    )
    renamed = calls(arguments)
    renamed["tool_calls"][0]["id"] = "call_2"
    assert plan(play.capture, [user("1+2"), renamed, result], None).how == "forked", (
        "templates may write the id"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [user("Hi"), assistant("yo"), user("more")],
        [user(" hi"), assistant("yo"), user("more")],
        [user("hi"), assistant("yo!"), user("more")],
        [user("hi"), assistant("yo", name="bob"), user("more")],
        [{"role": "system", "content": "s"}, user("hi"), assistant("yo"), user("more")],
        [assistant("yo"), user("more")],
        [user("hi"), assistant("yo")],
        [user("hi")],
    ],
    ids=[
        "edited",
        "white space of a user",
        "edited answer",
        "a name",
        "a system message",
        "cut in front",
        "nothing new",
        "the same call",
    ],
)
def test_an_edited_history_is_written_anew(messages: list[Message]) -> None:
    play = Play()
    play.ask([user("hi")], f"yo{END}")
    planned = plan(play.capture, messages, None)
    assert (planned.how, planned.parent) == ("forked", None)
    assert planned.prompt_ids == play.renderer.encode(play.renderer.render(messages))
    assert play.counts == GatewayStats(calls=2, forked=1)


def test_other_tools_are_another_chat() -> None:
    play = Play()
    play.answer(plan(play.capture, [user("hi")], [TOOL]), f"yo{END}")
    chat = [user("hi"), assistant("yo"), user("more")]
    assert plan(play.capture, chat, [json.loads(json.dumps(TOOL, sort_keys=True))]).how == "extended"
    assert plan(play.capture, chat, None).how == "forked"
    assert plan(play.capture, chat, [TOOL, TOOL]).how == "forked"


def test_the_longest_recorded_history_wins_and_what_follows_it_may_hold_answers_of_others() -> None:
    play = Play()
    play.ask([user("a")], f"1{END}")
    second = play.ask([user("a"), assistant("1"), user("b")], f"2{END}")
    chat = [user("a"), assistant("1"), user("b"), assistant("2"), user("c"), assistant("made up"), user("d")]
    planned = plan(play.capture, chat, None)
    assert planned.num_reused == len(second.prompt_ids) + 2
    assert planned.how == "extended"
    assert planned.prompt_ids == play.renderer.encode(play.renderer.render(chat))


def test_several_choices_of_one_call_are_several_children() -> None:
    play = Play()
    planned = plan(play.capture, [user("a")], None)
    for choice, text in enumerate(("x", "y", "x")):
        ids = play.renderer.encode(text + END)
        play.capture.record(
            planned, completion(ids, -1.0 - choice), assistant(text), f"chatcmpl-0/{choice}", choice=choice
        )
    next_call = plan(play.capture, [user("a"), assistant("x"), user("b")], None)
    assert next_call.parent is not None
    assert next_call.parent.completion_id == "chatcmpl-0/0", "of two equal answers the first"
    assert len(play.capture.rollout(0, Outcome(), 1.0)) == 3


def test_a_plan_renders_once_and_twice_only_where_the_template_begins_to_write_otherwise() -> None:
    renderer = CharRenderer("strips")
    play = Play(renderer)
    chat: list[Message] = [user("a")]
    renders = []
    for text in ("1", "2", "think|3", "4", "5"):
        renderer.num_renders = 0
        play.ask(chat, text + END)
        renders.append(renderer.num_renders)
        chat += [assistant(text), user("more")]
    assert renders == [1, 1, 1, 2, 1]
    assert play.counts == GatewayStats(calls=5, extended=2, realigned=2)


@pytest.mark.parametrize("habit", ["shouts", "refuses"])
def test_a_template_that_swallows_or_refuses_the_sentinel_forks(habit: str) -> None:
    play = Play(CharRenderer(habit))  # type: ignore[arg-type]
    play.ask([user("a")], f" yo{END}")
    chat = [user("a"), assistant("yo"), user("b")]
    planned = plan(play.capture, chat, None)
    assert (planned.how, planned.parent) == ("forked", None)
    assert planned.prompt_ids == play.renderer.encode(play.renderer.render(chat))


def test_an_end_token_other_than_the_templates_is_followed_by_the_templates() -> None:
    class TwoEnds(CharRenderer):
        end_ids = frozenset({ord(END), ord("\ue002")})

    play = Play(TwoEnds())
    play.ask([user("a")], "1\ue002", message=assistant("1"))
    planned = plan(play.capture, [user("a"), assistant("1"), user("b")], None)
    assert planned.how == "realigned"
    assert "1\ue002" + END + "\n" in play.renderer.decode(planned.prompt_ids, skip_special_tokens=False)


def test_an_end_token_after_white_space_of_the_template_is_not_said_twice() -> None:
    class Spaced(CharRenderer):
        def render(self, *args: object, **kwargs: object) -> str:
            return super().render(*args, **kwargs).replace(END, " " + END)  # type: ignore[arg-type]

    play = Play(Spaced())
    play.ask([user("a")], f"1{END}")
    planned = plan(play.capture, [user("a"), assistant("1"), user("b")], None)
    assert play.renderer.decode(
        planned.prompt_ids[planned.num_reused :], skip_special_tokens=False
    ).startswith(f"\n{START}user")


# ---- prompts of ids


def test_a_prompt_of_ids_goes_on_from_the_ids_it_begins_with() -> None:
    play = Play()
    first = play.capture.plan_ids([1, 2, 3])
    assert (first.how, first.prompt_ids) == ("new", (1, 2, 3))
    play.capture.record(first, completion([4, 5]), None, "cmpl-0")
    second = play.capture.plan_ids([1, 2, 3, 4, 5, 6])
    assert (second.how, second.num_reused, second.prompt_ids) == ("extended", 5, (1, 2, 3, 4, 5, 6))
    play.capture.record(second, completion([7]), None, "cmpl-1")
    assert play.capture.plan_ids([1, 2, 3, 4, 5, 6, 7]).num_reused == 7, (
        "a cut answer may be gone on from with nothing added"
    )
    assert play.capture.plan_ids([1, 2, 3, 4, 5, 8]).num_reused == 5
    assert play.capture.plan_ids([1, 2, 3, 4]).how == "forked"
    assert play.capture.plan_ids([9]).how == "forked"
    (branch,) = play.capture.rollout(0, Outcome(), 1.0)
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert branch.loss_mask.tolist() == [False, False, False, True, True, False, True]


# ---- refusals and size


def test_a_chat_that_the_template_refuses_or_that_is_no_unicode_is_a_value_error() -> None:
    capture = Capture(CharRenderer("refuses"), GatewayStats())
    with pytest.raises(ValueError, match="too long"):
        plan(capture, [user("a"), assistant("x" * 21), user("b")], None)
    with pytest.raises(ValueError, match="surrogates"):
        plan(capture, [user("\ud800")], None)
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested too deep"):
        plan(capture, [{"role": "user", "content": "a", "extra": [nested, 1]}], None)


def test_tool_arguments_nested_without_end_are_compared_as_text() -> None:
    play = Play()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    play.ask([user("a")], f"<f>{END}", message=assistant(None, tool_calls=[call]))
    sent_back = [user("a"), assistant(None, tool_calls=[copy.deepcopy(call)]), user("b")]
    assert plan(play.capture, sent_back, None).how == "extended"


def test_what_is_held_grows_with_what_was_sent_and_sampled_and_not_with_its_square() -> None:
    play = Play()
    chat: list[Message] = [user("question 0")]
    for turn in range(200):
        planned = play.ask(chat, f"answer {turn}{END}")
        chat += [assistant(f"answer {turn}"), user(f"question {turn + 1}")]
    assert play.counts == GatewayStats(calls=200, extended=199)
    assert play.capture.num_tokens == len(planned.prompt_ids) + len(f"answer 199{END}")


def test_the_last_text_is_that_of_the_call_planned_last() -> None:
    play = Play()
    with pytest.raises(RolloutFailure, match="without one completion"):
        play.capture.last_text()
    first, second = plan(play.capture, [user("a")], None), plan(play.capture, [user("b")], None)
    play.answer(second, f"late{END}")
    play.answer(first, f"early{END}")
    assert play.capture.last_text() == "late"
