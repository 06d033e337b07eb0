"""Advantages, surrogates, corrections, aggregation and KL against numbers worked out by hand, and what holds
for all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import SETTINGS, Case, for_any_case, numbered, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.advantages import (
    EPSILON,
    dr_grpo,
    grpo,
    overlong_penalty,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from asyncrl.algorithms.aggregate import token_weights
from asyncrl.algorithms.corrections import icepop, m2po, mis, mis_sequence, tis, tis_sequence
from asyncrl.algorithms.losses import cispo, gspo, importance_ratio, interpolate, kl, ppo_clip, reinforce

ADVANTAGES = [dr_grpo, grpo, reinforce_pp, reinforce_pp_baseline, rloo]
SURROGATES = [ppo_clip, gspo, cispo, reinforce, importance_ratio]
CORRECTIONS = [tis, tis_sequence, mis, mis_sequence, icepop, m2po]


# ---- advantages


@pytest.mark.parametrize(
    ("advantage", "rewards", "sizes", "centred", "std"),
    [
        (grpo, (0, 1, 2, 3), (4,), (-1.5, -0.5, 0.5, 1.5), 1.25**0.5),
        (reinforce_pp, (0, 2, 4, 6), (2, 2), (-3, -1, 1, 3), 5**0.5),
        (reinforce_pp_baseline, (0, 2, 4, 10), (2, 2), (-1, 1, -3, 3), 5**0.5),
    ],
)
def test_an_advantage_is_the_reward_less_a_mean_in_standard_deviations(
    advantage: Any, rewards: Any, sizes: Any, centred: Any, std: float
) -> None:
    found = advantage(tokens(*rewards), numbered(*sizes))
    torch.testing.assert_close(found, tokens(*centred) / (std + EPSILON))


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_equal_rewards_a_group_of_one_and_an_empty_batch_teach_exactly_nothing(advantage: Any) -> None:
    reward_B = tokens(*[0.1] * 7, 0.0, 1.0)
    assert (reward_B[:7].sum() / 7 != reward_B[0]).item(), "the mean rounds: the trap is real"
    if advantage is not reinforce_pp:
        assert advantage(reward_B, numbered(7, 2))[:7].tolist() == [0.0] * 7
    assert advantage(reward_B[:7], numbered(3, 4)).tolist() == [0.0] * 7
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
    # so that sums with the shift round alike, and EPSILON does not matter
    reward_B = (tokens(*rewards) * 16).round() / 16
    group_B = numbered(len(rewards) - 1, 1)
    advantage_B = advantage(reward_B, group_B)
    torch.testing.assert_close(advantage(reward_B + round(shift), group_B), advantage_B, atol=1e-3, rtol=1e-3)
    assert abs(advantage_B.sum().item()) < 1e-3


def test_a_length_penalty_is_off_at_zero_and_no_longer_than_the_completion() -> None:
    assert overlong_penalty(torch.tensor([0, 100, 500]), 100, overlong_tokens=0).tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="overlong_tokens=101 must be from 0 to max_tokens=100"):
        overlong_penalty(torch.tensor([1]), max_tokens=100, overlong_tokens=101)


# ---- surrogates


def loss_of(surrogate: Any, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    current_M = case.current_M if case.current_M.requires_grad else case.current_M.clone().requires_grad_()
    loss_M, stats = surrogate(
        current_M, case.anchor_M, case.behaviour_M, case.advantage_M, case.sequence_M, SETTINGS
    )
    return loss_M, stats


@pytest.mark.parametrize("surrogate", SURROGATES)
@for_any_case()
def test_with_equal_logprobs_the_gradient_is_the_plain_policy_gradient_and_nothing_is_clipped(
    surrogate: Any, case: Case
) -> None:
    current_M = case.behaviour_M.clone().requires_grad_()
    loss_M, stats = loss_of(surrogate, replace(case, current_M=current_M, anchor_M=case.behaviour_M))
    (gradient_M,) = torch.autograd.grad(loss_M.sum(), current_M)
    torch.testing.assert_close(gradient_M, -case.advantage_M)
    assert stats.get("clip_fraction", torch.tensor(0)).item() == 0


@pytest.mark.parametrize("surrogate", SURROGATES)
@for_any_case(min_sequences=2)
def test_a_batch_cut_between_sequences_has_the_same_losses_and_sums_of_statistics(
    surrogate: Any, case: Case
) -> None:
    whole_M, whole_stats = loss_of(surrogate, case)
    cut = case.num_sequences // 2
    answers = [loss_of(surrogate, part) for part in (case.part(0, cut), case.part(cut, case.num_sequences))]
    torch.testing.assert_close(torch.cat([loss_M for loss_M, _ in answers]), whole_M)
    for name, value in whole_stats.items():
        assert sum(stats[name].item() for _, stats in answers) == value.item()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_ratios_beyond_float32_give_finite_losses_and_gradients(surrogate: Any) -> None:
    current_M = tokens(-0.1, -1000.0, -0.1, -1000.0).requires_grad_()
    anchor_M = tokens(-1000.0, -0.1, -1000.0, -0.1)
    case = Case(current_M, anchor_M, anchor_M, tokens(1, 0, 0, -1), numbered(1, 1, 1, 1))
    loss_M, _ = loss_of(surrogate, case)
    (gradient_M,) = torch.autograd.grad(loss_M.sum(), current_M)
    assert torch.isfinite(loss_M).all()
    assert torch.isfinite(gradient_M).all()


@pytest.mark.parametrize(
    "wrong", [{"advantage_M": tokens(1)}, {"anchor_M": tokens(1, 1).double()}, {"sequence_M": tokens(0, 0)}]
)
def test_other_shapes_and_dtypes_are_refused(wrong: dict[str, Tensor]) -> None:
    good = Case(tokens(-1, -1), tokens(-1, -1), tokens(-1, -1), tokens(1, 1), numbered(2))
    for surrogate in SURROGATES:
        with pytest.raises(ValueError, match="but must be torch"):
            loss_of(surrogate, replace(good, **wrong))


# ---- corrections


def weights_of(correction: Any, case: Case) -> Tensor:
    weight_M: Tensor = correction(
        case.anchor_M - case.behaviour_M, case.advantage_M, case.sequence_M, SETTINGS
    )
    return weight_M


@for_any_case()
def test_m2po_leaves_a_mean_square_within_the_limit_and_masks_no_token_that_could_stay(case: Case) -> None:
    weight_M = weights_of(m2po, case)
    log_weight_M = (case.anchor_M - case.behaviour_M).double()
    counted_M = log_weight_M.sign() * case.advantage_M.sign() > 0
    kept_M = log_weight_M[counted_M & (weight_M == 1)].square()
    masked_M = log_weight_M[counted_M & (weight_M == 0)].square()
    assert len(kept_M) + len(masked_M) == counted_M.sum()
    assert (weight_M[~counted_M] == 1).all()
    assert len(kept_M) == 0 or kept_M.mean() <= SETTINGS.m2_limit + 1e-9
    if len(masked_M):
        assert torch.cat([kept_M, masked_M.min()[None]]).mean() > SETTINGS.m2_limit - 1e-9
        assert len(kept_M) == 0 or kept_M.max() <= masked_M.min()


@pytest.mark.parametrize("correction", CORRECTIONS)
@for_any_case(min_sequences=2, spread=0.75)
def test_weights_are_one_for_equal_policies_and_the_same_in_a_batch_cut_between_sequences(
    correction: Any, case: Case
) -> None:
    equal = replace(case, anchor_M=case.behaviour_M)
    assert weights_of(correction, equal).tolist() == [1.0] * len(case.behaviour_M)
    cut = case.num_sequences // 2
    parts = [case.part(0, cut), case.part(cut, case.num_sequences)]
    if correction is not m2po:
        whole_M = torch.cat([weights_of(correction, part) for part in parts])
        assert torch.equal(whole_M, weights_of(correction, case))
    extreme_M = correction(tokens(1000.0, -1000.0), tokens(1, 1), numbered(1, 1), SETTINGS)
    assert torch.isfinite(extreme_M).all()


def test_the_interpolated_proximal_policy_moves_from_behaviour_to_current_with_the_age_of_the_token() -> None:
    behaviour_M, current_M = tokens(-4, -4, -4, -4), tokens(-2, -2, -2, -2).requires_grad_()
    proximal_M = interpolate(behaviour_M, current_M, torch.tensor([0, 1, 2, 4], dtype=torch.int32))
    assert proximal_M.tolist() == [-2.0, -4.0, -3.0, -2.5]
    assert not proximal_M.requires_grad


# ---- aggregation and KL


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token", (1 + 2 + 3 + 10) / 4),
        ("sequence", ((1 + 2 + 3) / 3 + 10) / 2),
        ("constant", (1 + 2 + 3 + 10) / (2 * 8)),
    ],
)
def test_the_sum_of_weighted_losses_is_the_mean_that_the_name_says(aggregate: str, expected: float) -> None:
    step = {"num_sequences": 2, "num_loss_tokens": 4, "max_tokens": 8}
    weight_S = token_weights(aggregate, torch.tensor([3, 1]), **step)
    assert (tokens(1, 2, 3, 10) * weight_S[numbered(3, 1)]).sum().item() == pytest.approx(expected)
    parts = [token_weights(aggregate, torch.tensor([length]), **step) for length in (3, 1)]
    assert torch.equal(torch.cat(parts), weight_S), "a micro-batch of whole sequences has the same weights"


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [math.log(2), -math.log(2)], [1, 1]),
        ("k2", [math.log(2) ** 2 / 2] * 2, [math.log(2), -math.log(2)]),
        ("k3", [0.5 + math.log(2) - 1, 2 - math.log(2) - 1], [0.5, -1]),
    ],
)
def test_the_kl_estimators_where_the_current_policy_is_twice_and_half_as_sure(
    estimator: str, values: list[float], gradients: list[float]
) -> None:
    current_M = tokens(-1, -1).requires_grad_()
    kl_M = kl(current_M, tokens(-1 - math.log(2), -1 + math.log(2)), estimator)
    torch.testing.assert_close(kl_M.detach(), tokens(*values))
    torch.testing.assert_close(torch.autograd.grad(kl_M.sum(), current_M)[0], tokens(*gradients))
    far_M = tokens(-1000).requires_grad_()
    assert torch.isfinite(torch.autograd.grad(kl(far_M, tokens(-0.1), estimator).sum(), far_M)[0]).all()
