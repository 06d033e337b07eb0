"""The surrogates against numbers worked out by hand, and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import SETTINGS, Case, for_any_case, numbered, tokens
from torch import Tensor

from asyncrl.algorithms.losses import cispo, gspo, importance_ratio, ppo_clip, reinforce

SURROGATES = [ppo_clip, gspo, cispo, reinforce, importance_ratio]


def call(surrogate: Any, current_M: Tensor, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    loss_M, stats = surrogate(
        current_M, case.anchor_M, case.behaviour_M, case.advantage_M, case.sequence_M, SETTINGS
    )
    return loss_M, stats


def one_sequence(ratios: list[float], advantages: list[float]) -> tuple[Tensor, Case]:
    """(current_M with gradient at these ratios to an anchor of -3, the rest)."""
    anchor_M = torch.full((len(ratios),), -3.0)
    current_M = (anchor_M + tokens(*(math.log(ratio) for ratio in ratios))).requires_grad_()
    return current_M, Case(
        current_M, anchor_M, torch.full_like(anchor_M, -9.0), tokens(*advantages), numbered(len(ratios))
    )


def test_reinforce_is_the_plain_policy_gradient_whatever_the_ratio() -> None:
    current_M, case = one_sequence([5.0, 0.1], [2, -1])
    loss_M, stats = call(reinforce, current_M, case)
    torch.testing.assert_close(loss_M.detach(), tokens(-2 * (math.log(5) - 3), math.log(0.1) - 3))
    assert stats == {}
    loss_M.sum().backward()
    torch.testing.assert_close(current_M.grad, tokens(-2, 1))


@pytest.mark.parametrize("surrogate", SURROGATES)
@for_any_case()
def test_with_equal_logprobs_the_gradient_is_the_plain_policy_gradient_and_nothing_is_clipped(
    surrogate: Any, case: Case
) -> None:
    current_M = case.behaviour_M.clone().requires_grad_()
    loss_M, stats = call(surrogate, current_M, replace(case, anchor_M=case.behaviour_M))
    (gradient_M,) = torch.autograd.grad(loss_M.sum(), current_M)
    torch.testing.assert_close(gradient_M, -case.advantage_M)
    assert stats.get("clip_fraction", torch.tensor(0)).item() == 0


@pytest.mark.parametrize("surrogate", SURROGATES)
@for_any_case(min_sequences=2)
def test_a_batch_cut_between_sequences_has_the_same_losses_and_sums_of_statistics(
    surrogate: Any, case: Case
) -> None:
    whole_M, whole_stats = call(surrogate, case.current_M.clone().requires_grad_(), case)
    cut = case.num_sequences // 2
    parts = [case.part(0, cut), case.part(cut, case.num_sequences)]
    answers = [call(surrogate, part.current_M.clone().requires_grad_(), part) for part in parts]
    torch.testing.assert_close(torch.cat([loss_M for loss_M, _ in answers]), whole_M)
    for name, value in whole_stats.items():
        assert sum(stats[name].item() for _, stats in answers) == value.item()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_ratios_beyond_float32_give_finite_losses_and_gradients(surrogate: Any) -> None:
    current_M = tokens(-0.1, -1000.0, -0.1, -1000.0).requires_grad_()
    anchor_M = tokens(-1000.0, -0.1, -1000.0, -0.1)
    loss_M, _ = call(
        surrogate, current_M, Case(current_M, anchor_M, anchor_M, tokens(1, 0, 0, -1), numbered(1, 1, 1, 1))
    )
    loss_M.sum().backward()
    assert current_M.grad is not None
    assert torch.isfinite(loss_M).all()
    assert torch.isfinite(current_M.grad).all()


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize(
    "wrong",
    [
        {"advantage_M": tokens(1)},
        {"anchor_M": tokens(1, 1).double()},
        {"behaviour_M": tokens(1, 1)[None]},
        {"sequence_M": tokens(0, 0)},
    ],
)
def test_other_shapes_and_dtypes_are_refused(surrogate: Any, wrong: dict[str, Tensor]) -> None:
    good = Case(tokens(-1, -1), tokens(-1, -1), tokens(-1, -1), tokens(1, 1), numbered(2))
    with pytest.raises(ValueError, match="but must be torch"):
        call(surrogate, good.current_M, replace(good, **wrong))
