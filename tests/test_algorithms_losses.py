"""The losses against numbers worked out by hand, and reduced to each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.algorithms.losses import decoupled_ppo, ppo_clip, tis
from asyncrl.algorithms.names import BUILT_IN_ADVANTAGES, BUILT_IN_LOSSES
from asyncrl.trainer.loading import resolve_function

SETTINGS = {"clip_low": 0.2, "clip_high": 0.3, "importance_cap": 2.0}
LOSSES = [ppo_clip, decoupled_ppo, tis]


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def call(loss: Callable[..., Any], current: torch.Tensor, proximal: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> Any:
    mask = torch.ones(current.shape, dtype=torch.bool)
    return loss(current, proximal, behaviour, advantages, mask, **SETTINGS)


def test_ppo_clip_takes_the_smaller_of_plain_and_clipped_surrogate() -> None:
    ratios = [1.5, 0.5, 1.1, 1.5, 0.5]
    current = row(*(math.log(ratio) - 3.0 for ratio in ratios))
    loss, stats = call(ppo_clip, current, row(*[0.0] * 5), row(*[-3.0] * 5), row(1, 1, 1, -1, -1))
    # clipped at 1.3; not clipped; not clipped; not clipped (a worse surrogate is kept); clipped at 0.8
    assert loss.item() == pytest.approx(-(1.3 + 0.5 + 1.1 - 1.5 - 0.8), rel=1e-5)
    assert stats["clip_fraction"].item() == 2


def test_ppo_clip_sends_no_gradient_through_a_clipped_token() -> None:
    current = row(math.log(1.5) - 1, math.log(1.2) - 1).requires_grad_()
    call(ppo_clip, current, row(0, 0), row(-1, -1), row(2, 2))[0].backward()
    torch.testing.assert_close(current.grad, row(0.0, -1.2 * 2))


def test_decoupled_ppo_clips_around_the_proximal_policy_and_caps_the_weight_towards_the_behaviour_policy() -> None:
    current = row(math.log(1.5) - 1, math.log(1.1) - 1).requires_grad_()
    proximal = row(-1, -1)
    behaviour = row(-1 - math.log(5.0), -1 - math.log(0.5))
    loss, stats = call(decoupled_ppo, current, proximal, behaviour, row(1, 1))
    assert loss.item() == pytest.approx(-(2.0 * 1.3 + 0.5 * 1.1), rel=1e-5)
    assert (stats["clip_fraction"].item(), stats["capped_fraction"].item()) == (1, 1)
    loss.backward()
    torch.testing.assert_close(current.grad, row(0.0, -0.5 * 1.1))


def test_tis_weighs_the_policy_gradient_by_the_truncated_ratio() -> None:
    current = row(-1.0, -2.0).requires_grad_()
    behaviour = row(-1.0 - math.log(5.0), -2.0 - math.log(0.5))
    loss, stats = call(tis, current, row(0, 0), behaviour, row(3, -1))
    assert loss.item() == pytest.approx(-(2.0 * 3 * -1.0 + 0.5 * -1 * -2.0), rel=1e-5)
    assert stats["clip_fraction"].item() == 1
    loss.backward()
    torch.testing.assert_close(current.grad, row(-2.0 * 3, 0.5))


@pytest.mark.parametrize("loss", LOSSES)
def test_with_all_three_logprobs_equal_the_gradient_is_the_plain_policy_gradient(loss: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    logprob_BT, advantages_BT = -torch.rand(4, 7) * 3, torch.randn(4, 7)
    current_BT = logprob_BT.clone().requires_grad_()
    call(loss, current_BT, logprob_BT, logprob_BT, advantages_BT)[0].backward()
    torch.testing.assert_close(current_BT.grad, -advantages_BT)


def test_with_the_proximal_policy_before_its_only_step_decoupled_ppo_has_the_gradient_of_tis() -> None:
    torch.manual_seed(1)
    behaviour_BT, advantages_BT = -torch.rand(4, 7) * 3, torch.randn(4, 7)
    gradients = []
    for loss in (decoupled_ppo, tis):
        current_BT = (behaviour_BT + torch.linspace(-1, 1, 28).view(4, 7)).requires_grad_()
        call(loss, current_BT, current_BT.detach(), behaviour_BT, advantages_BT)[0].backward()
        gradients.append(current_BT.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("loss", LOSSES)
def test_what_lies_outside_the_mask_has_no_influence_whatever_stands_there(loss: Callable[..., Any]) -> None:
    mask_BT = torch.tensor([[True, False, True]])
    results = []
    for rubbish in (0.0, -1e4, math.nan):
        current_BT = row(-1, rubbish, -2).requires_grad_()
        total, stats = loss(current_BT, current_BT.detach(), row(-1.5, 1e4, -1), row(1, 5, -1), mask_BT, **SETTINGS)
        total.backward()
        assert current_BT.grad is not None
        results.append((total.item(), current_BT.grad.tolist(), {name: value.item() for name, value in stats.items()}))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_statistics_are_sums_so_that_parts_add_up(loss: Callable[..., Any]) -> None:
    torch.manual_seed(2)
    parts = [-torch.rand(6, 5) * 3, -torch.rand(6, 5) * 3, -torch.rand(6, 5) * 3, torch.randn(6, 5)]
    whole, whole_stats = call(loss, *parts)
    halves = [call(loss, *(part[rows] for part in parts)) for rows in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(whole, halves[0][0] + halves[1][0])
    for name in whole_stats:
        torch.testing.assert_close(whole_stats[name], halves[0][1][name] + halves[1][1][name])


@pytest.mark.parametrize("loss", LOSSES)
def test_other_shapes_and_dtypes_are_refused_with_the_name_of_the_tensor(loss: Callable[..., Any]) -> None:
    good = row(-1, -1)
    with pytest.raises(ValueError, match="advantages_BT is torch.float32"):
        loss(good, good, good, row(1), torch.ones(1, 2, dtype=torch.bool), **SETTINGS)
    with pytest.raises(ValueError, match="mask_BT is torch.float32"):
        loss(good, good, good, good, good, **SETTINGS)
    with pytest.raises(ValueError, match="behaviour_BT is torch.float64"):
        loss(good, good, good.double(), good, torch.ones(1, 2, dtype=torch.bool), **SETTINGS)


def test_every_built_in_name_leads_to_a_function() -> None:
    for name in (*BUILT_IN_LOSSES.values(), *BUILT_IN_ADVANTAGES.values()):
        assert callable(resolve_function(name, "algorithm"))
