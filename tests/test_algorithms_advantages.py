"""The advantages against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithm_cases import numbered, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import EPSILON, dr_grpo, grpo, reinforce_pp, reinforce_pp_baseline, rloo

ADVANTAGES = [dr_grpo, grpo, reinforce_pp, reinforce_pp_baseline, rloo]
IN_GROUPS = [dr_grpo, grpo, reinforce_pp_baseline, rloo]
REWARD_B = tokens(0, 1, 2, 3, 10, 30)
GROUP_B = numbered(4, 2)


def test_grpo_is_the_reward_in_standard_deviations_of_its_own_group() -> None:
    std = 1.25**0.5 + EPSILON
    torch.testing.assert_close(
        grpo(REWARD_B, GROUP_B),
        tokens(-1.5 / std, -0.5 / std, 0.5 / std, 1.5 / std, -10 / 10.0001, 10 / 10.0001),
    )


def test_reinforce_pp_is_the_reward_in_standard_deviations_of_the_whole_batch() -> None:
    reward_B = tokens(0, 2, 4, 6)
    std = 5**0.5 + EPSILON
    torch.testing.assert_close(
        reinforce_pp(reward_B, numbered(2, 2)), tokens(-3 / std, -1 / std, 1 / std, 3 / std)
    )


def test_reinforce_pp_baseline_takes_the_mean_of_the_group_and_the_deviation_of_the_batch() -> None:
    std = ((1 + 1 + 9 + 9) / 4) ** 0.5 + EPSILON
    torch.testing.assert_close(
        reinforce_pp_baseline(tokens(0, 2, 4, 10), numbered(2, 2)),
        tokens(-1 / std, 1 / std, -3 / std, 3 / std),
    )


@pytest.mark.parametrize("advantage", IN_GROUPS)
def test_a_group_with_equal_rewards_gets_exactly_zero_even_where_the_mean_rounds(advantage: Any) -> None:
    reward_B = tokens(*[0.1] * 7, 0.0, 1.0)
    assert (reward_B[:7].sum() / 7 != reward_B[0]).item(), (
        "0.1 in float32 summed seven times over 7 is not 0.1: the trap is real"
    )
    advantage_B = advantage(reward_B, numbered(7, 2))
    assert advantage_B[:7].tolist() == [0.0] * 7
    assert advantage_B[7] < 0 < advantage_B[8]


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_batch_with_equal_rewards_a_group_of_one_and_an_empty_batch_teach_nothing(advantage: Any) -> None:
    assert advantage(tokens(*[0.1] * 7), numbered(3, 4)).tolist() == [0.0] * 7
    assert advantage(tokens(5), numbered(1)).tolist() == [0.0]
    assert advantage(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(max_examples=30, deadline=None)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8), shift=st.floats(-5, 5, width=32)
)
def test_a_constant_added_to_all_rewards_changes_nothing_and_advantages_sum_to_zero(
    advantage: Any, rewards: list[float], shift: float
) -> None:
    reward_B = (
        tokens(*rewards) * 16
    ).round() / 16  # so that sums with the shift round alike, and EPSILON does not matter
    moved_B = reward_B + round(shift)
    group_B = numbered(len(rewards) - 1, 1)
    advantage_B = advantage(reward_B, group_B)
    torch.testing.assert_close(advantage(moved_B, group_B), advantage_B, atol=1e-3, rtol=1e-3)
    assert abs(advantage_B.sum().item()) < 1e-3
