"""From recorded completions to the branches of a rollout: what is trained, and which reward each token
answers for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gateway_capture_cases import END, Message, Play, assistant, plan, user

from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Completion, Outcome, Trajectory, VersionSpan
from asyncrl.messages.trainer_calls import Credit


def forked_play() -> Play:
    """Ids chatcmpl-0..3: `1`, then `2`, then `3` on the chat that an edit began anew, then `4` which goes on
    from `1` too.
    """
    play = Play()
    play.ask([user("a")], f"1{END}", version=3)
    play.ask([user("a"), assistant("1"), user("b")], f"2{END}", version=4)
    play.ask([user("summary")], f"3{END}", version=5, is_truncated=True)
    play.ask([user("a"), assistant("1"), user("c")], f"4{END}", version=6)
    return play


def trained(play: Play, branch: Trajectory) -> str:
    return play.renderer.decode(branch.token_ids[branch.loss_mask].tolist())


def credited(play: Play, branch: Trajectory) -> list[tuple[str, float, int]]:
    """(text, reward, unit) of each credit; together they cover the loss mask once."""
    covered = np.zeros(len(branch.token_ids), dtype=int)
    for credit in branch.credits:
        covered[credit.start : credit.end] += 1
    assert (covered == branch.loss_mask).all()
    return [
        (play.renderer.decode(branch.token_ids[c.start : c.end].tolist()), c.reward, c.unit)
        for c in branch.credits
    ]


def test_branches_run_from_root_to_leaf_and_each_token_is_trained_in_the_first_that_holds_it() -> None:
    play = forked_play()
    branches = play.capture.rollout(7, Outcome(metrics={"turns": 4.0}), 0.5)
    assert [trained(play, branch) for branch in branches] == ["12", "4", "3"]
    assert [branch.branch for branch in branches] == [0, 1, 2]
    assert [branch.is_truncated for branch in branches] == [False, False, True]
    assert [[span.version for span in branch.version_spans] for branch in branches] == [[3, 4], [6], [5]]
    for branch in branches:
        assert (branch.sample_index, branch.reward, branch.metrics, branch.credits) == (
            7,
            0.5,
            {"turns": 4.0},
            (),
        )
        assert (branch.token_ids.dtype, branch.behaviour_logprobs.dtype) == (np.int32, np.float32)
        assert (branch.behaviour_logprobs[~branch.loss_mask] == 0).all()
        assert branch.num_sampled == branch.loss_mask.sum()
    assert (
        play.renderer.decode(branches[1].token_ids.tolist()) == "user\na\nassistant\n1\nuser\nc\nassistant\n4"
    )


def test_spans_and_interruptions_are_those_of_the_completions() -> None:
    play = Play()
    planned = plan(play.capture, [user("a")], None)
    sampled = Completion(
        (1, 2, 3),
        (-1.0, -2.0, -3.0),
        (VersionSpan(0, 1, 8), VersionSpan(1, 3, 9)),
        "length",
        num_interruptions=2,
    )
    play.capture.record(planned, sampled, assistant("x"), "chatcmpl-0")
    more = plan(play.capture, [user("a"), assistant("x"), user("b")], None)
    for choice in range(2):
        again = Completion((4,), (-4.0,), (VersionSpan(0, 1, 9),), "stop", num_interruptions=1)
        play.capture.record(more, again, assistant("y"), f"chatcmpl-1/{choice}", choice=choice)
    first, second = play.capture.rollout(0, Outcome(), 0.0)
    start = len(planned.prompt_ids)
    assert first.version_spans[:2] == (VersionSpan(start, start + 1, 8), VersionSpan(start + 1, start + 3, 9))
    assert first.behaviour_logprobs[start : start + 3].tolist() == [-1.0, -2.0, -3.0]
    assert (first.num_interruptions, second.num_interruptions) == (3, 1), (
        "an interruption counts where its tokens are trained"
    )


def test_a_branch_without_a_token_of_its_own_is_left_out() -> None:
    play = Play()
    play.ask([user("a")], f"1{END}")
    play.ask([user("a"), assistant("1"), user("b")], "")
    (branch,) = play.capture.rollout(0, Outcome(), 0.0)
    assert trained(play, branch) == "1"
    assert branch.loss_mask[-1], "what was only sent, after the last sampled token, is left out too"


def test_turn_rewards_make_each_completion_a_unit() -> None:
    play = forked_play()
    rewards = {f"chatcmpl-{n}": float(n) for n in range(4)}
    branches = play.capture.rollout(0, Outcome(turn_rewards=rewards), 1.5)
    ends = [("1", 0.0, 0), ("2", 1.0, 1)], [("4", 3.0, 2)], [("3", 2.0, 3)]
    assert [credited(play, branch) for branch in branches] == [list(end) for end in ends]
    assert branches[2].credits == (
        Credit(len(branches[2].token_ids) - 2, len(branches[2].token_ids), 2.0, 3),
    )


def test_branch_rewards_make_each_branch_a_unit_named_by_any_completion_that_is_its_own() -> None:
    play = forked_play()
    rewards = {"chatcmpl-1": 0.1, "chatcmpl-2": 0.2, "chatcmpl-3": 0.3}
    branches = play.capture.rollout(0, Outcome(branch_rewards=rewards), 0.2)
    ends = [("1", 0.1, 0), ("2", 0.1, 0)], [("4", 0.3, 1)], [("3", 0.2, 2)]
    assert [credited(play, branch) for branch in branches] == [list(end) for end in ends]
    twice = Play()
    chat: list[Message] = [user("a")]
    twice.ask(chat, f"1{END}")
    twice.ask([*chat, assistant("1"), user("b")], f"2{END}")
    (branch,) = twice.capture.rollout(0, Outcome(branch_rewards={"chatcmpl-0": 0.5, "chatcmpl-1": 0.5}), 0.5)
    assert credited(twice, branch) == [("1", 0.5, 0), ("2", 0.5, 0)], (
        "naming it twice with one reward is no harm"
    )


def test_a_completion_that_sampled_nothing_need_not_be_named_and_may_be() -> None:
    play = Play()
    play.ask([user("a")], f"1{END}")
    play.ask([user("b")], "")
    for rewards in ({"chatcmpl-0": 1.0}, {"chatcmpl-0": 1.0, "chatcmpl-1": 0.0}):
        (branch,) = play.capture.rollout(0, Outcome(turn_rewards=rewards), 1.0)
        assert credited(play, branch) == [("1", 1.0, 0)]


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (
            {"turn_rewards": {"chatcmpl-9": 1.0}},
            r"turn_rewards names chatcmpl-9; this rollout has chatcmpl-0, chatcmpl-1, chatcmpl-2",
        ),
        ({"branch_rewards": {"chatcmpl-9": 1.0}}, r"branch_rewards names chatcmpl-9; this rollout has"),
        (
            {"turn_rewards": {"chatcmpl-0": 1.0, "chatcmpl-1": 1.0}},
            r"names 2 of 4 completions; not chatcmpl-3, chatcmpl-2",
        ),
        (
            {"branch_rewards": {"chatcmpl-1": 1.0}},
            r"names 1 of 3 branches; not those that end with chatcmpl-3, chatcmpl-2",
        ),
        ({"branch_rewards": {"chatcmpl-0": 1.0}}, r"names chatcmpl-0, which lies in 2 branches"),
        (
            {"turn_rewards": {"chatcmpl-0": 1.0}, "branch_rewards": {"chatcmpl-1": 1.0}},
            r"1 turn_rewards and 1 branch_rewards",
        ),
        (
            {"turn_rewards": {f"chatcmpl-{n}": math.nan for n in range(4)}},
            r"turn_rewards\['chatcmpl-0'\]=nan",
        ),
        ({"branch_rewards": {"chatcmpl-1": math.inf}}, r"branch_rewards\['chatcmpl-1'\]=inf"),
        ({"metrics": {"steps": -math.inf}}, r"metrics\['steps'\]=-inf"),
        ({"reward": math.nan}, r"outcome.reward=nan"),
        ({"reward": 1e39}, r"outcome.reward=1e\+39"),  # infinite in float32
        ({"metrics": {"steps": 1e308}}, r"metrics\['steps'\]=1e\+308"),  # the mean of two overflows
        ({"metrics": {f"answer {n}": 1.0 for n in range(257)}}, r"257 metrics: answer 0, answer 1"),
    ],
)
def test_an_outcome_that_does_not_fit_fails_the_rollout_with_the_way_out(
    outcome: dict[str, Any], why: str
) -> None:
    with pytest.raises(RolloutFailure, match=why + r"(.|\n)*Way out: "):
        forked_play().capture.rollout(0, Outcome(**outcome), 1.0)


def test_two_rewards_for_one_branch_fail_the_rollout() -> None:
    play = Play()
    play.ask([user("a")], f"1{END}")
    play.ask([user("a"), assistant("1"), user("b")], f"2{END}")
    with pytest.raises(RolloutFailure, match=r"gives branch 0 two rewards, 0.5 and 0.6 \(at chatcmpl-1\)"):
        play.capture.rollout(0, Outcome(branch_rewards={"chatcmpl-0": 0.5, "chatcmpl-1": 0.6}), 0.5)


def test_a_reward_that_is_no_finite_number_fails_the_rollout() -> None:
    with pytest.raises(RolloutFailure, match="the outcome has reward=inf"):
        forked_play().capture.rollout(0, Outcome(), math.inf)


def test_a_rollout_of_which_nothing_was_sampled_fails() -> None:
    play = Play()
    with pytest.raises(RolloutFailure, match="ended with 0 completions and not one sampled token"):
        play.capture.rollout(0, Outcome(), 1.0)
    play.ask([user("a")], "")
    with pytest.raises(RolloutFailure, match="ended with 1 completions and not one sampled token"):
        play.capture.rollout(0, Outcome(), 1.0)
