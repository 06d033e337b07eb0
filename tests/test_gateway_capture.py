"""Prompt ids, branches and credits of a session's completions, on a character-level template."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from gateway_capture_cases import END, CharRenderer, Message, Play, assistant, completion, plan, user

from asyncrl.agents.harness import OUTCOME
from asyncrl.base.errors import RolloutFailure
from asyncrl.messages.records import Outcome, Trajectory

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def called(arguments: object, *, id: str = "call_1", **fields: object) -> Message:
    function = {"name": "add", "arguments": arguments}
    return assistant(None, tool_calls=[{"id": id, "type": "function", "function": function, **fields}])


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}


def test_answer_is_found_by_its_text_or_its_meaning() -> None:
    four, called_add = Play(), Play()
    four.ask([user("1+2")], f"4{END}")
    called_add.ask([user("1+2")], f"<add>{END}", message=called('{"a":1,"b":2}'))
    for play, sent_back, how in (
        (four, assistant("4", refusal=None, tool_calls=None), "extended"),
        (four, {"content": " 4\n", "role": "assistant"}, "realigned"),
        (four, assistant("4", name="bob"), "extended"),
        (four, assistant("5"), "edited"),
        (four, assistant("4", tool_calls=called({})["tool_calls"]), "edited"),
        (called_add, called({"b": 2, "a": 1}, index=0), "extended"),
        (called_add, called('{"a":1,"b":3}'), "extended"),  # this template writes the name alone
        (called_add, called('{"a":1,"b":2}', id="call_2"), "extended"),
        (called_add, assistant("<sub>"), "edited"),
    ):
        assert plan(play.capture, [user("1+2"), sent_back, RESULT]).how == how


def test_other_tools_are_another_chat() -> None:
    play = Play()
    play.answer(plan(play.capture, [user("hi")], [TOOL]), f"yo{END}")
    chat = [user("hi"), assistant("yo"), user("more")]
    assert plan(play.capture, chat, [json.loads(json.dumps(TOOL, sort_keys=True))]).how == "extended"
    assert plan(play.capture, chat, None).how == plan(play.capture, chat, [TOOL, TOOL]).how == "edited"


def test_prompt_of_ids_continues_the_longest_recorded_ids() -> None:
    capture = Play().capture
    first = capture.plan_ids([1, 2, 3])
    capture.record(first, completion([4, 5]), assistant(""), "cmpl-0")
    second = capture.plan_ids([1, 2, 3, 4, 5, 6])
    assert (second.how, second.num_reused, tuple(second.prompt_ids.tolist())) == (
        "extended",
        5,
        (1, 2, 3, 4, 5, 6),
    )
    capture.record(second, completion([7]), assistant(""), "cmpl-1")
    assert capture.plan_ids([1, 2, 3, 4, 5, 6, 7]).num_reused == 7, "a cut answer may be gone on from"
    assert capture.plan_ids([1, 2, 3, 4, 5, 8]).num_reused == 5
    assert capture.plan_ids([1, 2, 3, 4]).how == capture.plan_ids([9]).how == "edited"
    (branch,) = capture.rollout(0, Outcome(), 1.0)
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert branch.loss_mask.tolist() == [False, False, False, True, True, False, True]


def test_unrenderable_chat_is_a_value_error() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for message, why in (
        (assistant("x" * 21), "too long"),
        (user("\ud800"), "surrogates"),
        ({**user("a"), "extra": nested}, "nested too deep"),
    ):
        with pytest.raises(ValueError, match=why):
            plan(Play(CharRenderer("refuses")).capture, [message])


def test_last_text_belongs_to_the_call_planned_last() -> None:
    play = Play()
    with pytest.raises(RolloutFailure, match="without a completion"):
        play.capture.last_text(shows_special=True)
    with pytest.raises(RolloutFailure, match="ended with 0 completions and not one sampled token"):
        play.capture.rollout(0, Outcome(), 1.0)
    first, second = plan(play.capture, [user("a")]), plan(play.capture, [user("b")])
    play.answer(second, f"late{END}")
    play.answer(first, f"early{END}")
    assert play.capture.last_text(shows_special=True) == "late"


# ---- branches


def forked_play() -> Play:
    """Record `1`, `2`, `3` after an edit, and `4` which continues from `1`, as chatcmpl-0 to chatcmpl-3."""
    play = Play()
    play.ask([user("a")], f"1{END}")
    play.ask([user("a"), assistant("1"), user("b")], f"2{END}")
    play.ask([user("summary")], f"3{END}", is_truncated=True)
    play.ask([user("a"), assistant("1"), user("c")], f"4{END}")
    return play


def credited(play: Play, branch: Trajectory) -> list[tuple[str, float, int]]:
    """(text, reward, unit) of each credit; together they cover the loss mask once."""
    covered = [place for credit in branch.credits for place in range(credit.start, credit.end)]
    assert covered == np.flatnonzero(branch.loss_mask).tolist()
    decode = play.renderer.decode
    return [(decode(branch.token_ids[c.start : c.end].tolist()), c.reward, c.unit) for c in branch.credits]


def test_rewards_by_turn_or_branch_define_the_units() -> None:
    play = forked_play()
    play.ask([user("z")], "")  # what sampled nothing need not be named
    by_turn = Outcome(turn_rewards={f"chatcmpl-{number}": float(number) for number in range(4)})
    by_branch = Outcome(branch_rewards={"chatcmpl-1": 0.1, "chatcmpl-2": 0.2, "chatcmpl-3": 0.3})
    for outcome, expected in (
        (by_turn, [[("1", 0.0, 0), ("2", 1.0, 1)], [("4", 3.0, 2)], [("3", 2.0, 3)]]),
        (by_branch, [[("1", 0.1, 0), ("2", 0.1, 0)], [("4", 0.3, 1)], [("3", 0.2, 2)]]),
    ):
        branches = play.capture.rollout(0, outcome, 1.5)
        assert [credited(play, branch) for branch in branches] == expected


def test_rewards_that_do_not_fit_fail_the_rollout() -> None:
    for kind, rewards in (
        ("turn", {9: 1}),  # an unknown completion
        ("turn", {0: 1, 1: 1}),  # not every completion
        ("branch", {1: 1}),  # not every branch
        ("branch", {0: 1, 1: 1, 2: 1, 3: 1}),  # a completion of two branches
        ("branch", {1: 0.5, 4: 0.6, 2: 1, 3: 1}),  # two rewards of one branch
    ):
        play = forked_play()
        if 4 in rewards:
            play.ask([user("a"), assistant("1"), user("b"), assistant("2"), user("b")], f"5{END}")
        outcome: Any = {f"{kind}_rewards": {f"chatcmpl-{number}": value for number, value in rewards.items()}}
        with pytest.raises(RolloutFailure, match=r"rewards(.|\n)*Way out: "):
            play.capture.rollout(0, Outcome(**outcome), 1.0)
    same = Outcome(branch_rewards={f"chatcmpl-{number}": 0.5 for number in (1, 2, 3, 4)})
    assert len(play.capture.rollout(0, same, 0.5)) == 3, "one reward named twice is one reward"


def test_outcome_has_finite_numbers_and_one_kind_of_parts() -> None:
    for outcome in (
        Outcome(turn_rewards={"chatcmpl-0": math.nan}),
        Outcome(1e39),  # infinite in float32
        Outcome(metrics={"steps": 1e308}),  # the mean of two overflows
        Outcome(metrics={f"answer {number}": 1.0 for number in range(257)}),
    ):
        with pytest.raises(ValueError, match="validation error"):
            OUTCOME.validate_python(outcome)
    with pytest.raises(ValueError, match="give turn_rewards or branch_rewards"):
        Outcome(turn_rewards={"chatcmpl-0": 1.0}, branch_rewards={"chatcmpl-0": 1.0})
