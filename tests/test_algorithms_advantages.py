"""grpo against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from asyncrl.algorithms.advantages import EPSILON, grpo


def groups(*sizes: int) -> torch.Tensor:
    return torch.cat([torch.full((size,), index) for index, size in enumerate(sizes)])


def test_the_advantage_is_the_reward_in_standard_deviations_of_its_own_group() -> None:
    reward_B = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 30.0])
    advantage_B = grpo(reward_B, groups(4, 2))
    std = 1.25**0.5
    expected = [
        -1.5 / (std + EPSILON),
        -0.5 / (std + EPSILON),
        0.5 / (std + EPSILON),
        1.5 / (std + EPSILON),
        -10 / (10 + EPSILON),
        10 / (10 + EPSILON),
    ]
    torch.testing.assert_close(advantage_B, torch.tensor(expected))


def test_a_group_with_equal_rewards_gets_exactly_zero_even_where_the_mean_rounds() -> None:
    reward_B = torch.tensor([0.1] * 7 + [0.0, 1.0])
    assert (reward_B[:7].sum() / 7 != reward_B[0]).item(), "0.1 in float32 summed seven times over 7 is not 0.1: the trap is real"
    advantage_B = grpo(reward_B, groups(7, 2))
    assert advantage_B[:7].tolist() == [0.0] * 7
    assert advantage_B[7] < 0 < advantage_B[8]


def test_a_group_of_one_gets_zero() -> None:
    assert grpo(torch.tensor([5.0]), torch.tensor([0])).tolist() == [0.0]


def test_an_empty_batch_stays_empty() -> None:
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize(
    ("reward_B", "group_B"),
    [
        (torch.zeros(2), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64)),
        (torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2), torch.zeros(2)),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(reward_B: torch.Tensor, group_B: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be"):
        grpo(reward_B, group_B)
