"""Advantages, losses, corrections and KL by hand, and the page that lists them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trainer_cases import assert_all_close, make_batch, make_spec

from asyncrl.algorithms import losses
from asyncrl.algorithms.advantages import (
    EPSILON,
    dr_grpo,
    grpo,
    grpo_sample,
    lite_ppo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from asyncrl.algorithms.losses import LossTokens, correct, interpolate, kl
from asyncrl.algorithms.registry import BUILT_IN_ADVANTAGES, RECIPES, resolve
from asyncrl.config import AlgorithmConfig, RunConfig
from asyncrl.trainer.loss.objective import BatchNumbers, Objective

PAGE = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text(
    encoding="utf-8"
)
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)))


def tokens(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def numbered(*lengths: int) -> Tensor:
    """sequence_M of sequences of these lengths."""
    return torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
    )


COMPARED = [{"advantage": name} for name in BUILT_IN_ADVANTAGES if name[0] != "g"]
COMPARED += [{"advantage": "grpo"}, {"advantage": "grpo_sample"}]
COMPARED += [{"advantage": "rloo", "turn_discount": 0.5}]
COMPARED += [{"advantage": "gigpo", "turn_discount": 0.5}]
COMPARED += [{"advantage": "gae", "gae_lambda": 1.0}]


@pytest.mark.parametrize("settings", COMPARED)
def test_large_rewards_have_the_advantages_of_their_differences(
    settings: dict[str, Any],
) -> None:
    header, arrays = make_batch(num_groups=3)
    spec = make_spec(Path(), Path(), algorithm=settings)
    found = []
    for offset in (0.0, 2.0**30, -(10.0**9)):
        entries = [
            one.model_copy(update={"reward": one.sample_index * 0.125 + offset})
            for one in header.trajectories
        ]
        moved = header.model_copy(update={"trajectories": entries})
        batch = BatchNumbers(moved, arrays, arrays.is_sampled)
        if settings["advantage"] == "gae":
            batch.value_N = np.zeros(len(arrays), np.float32)
        advantage_N = Objective(spec).advantages(batch)
        assert advantage_N.dtype == np.float32
        found.append(torch.from_numpy(advantage_N[arrays.is_sampled]))
    assert len(found[0].unique()) > 2
    assert_all_close(found[1:], [found[0]] * 2, 1e-5)


@pytest.mark.parametrize(
    ("advantage", "rewards", "sizes", "centred", "std"),
    [
        (grpo, (0, 1, 2, 3), (4,), (-1.5, -0.5, 0.5, 1.5), 1.25**0.5),
        (reinforce_pp, (0, 2, 4, 6), (2, 2), (-3, -1, 1, 3), 5**0.5),
        (reinforce_pp_baseline, (0, 2, 4, 10), (2, 2), (-1, 1, -3, 3), 5**0.5),
    ],
)
def test_advantage_by_hand(
    advantage: Any, rewards: Any, sizes: Any, centred: Any, std: float
) -> None:
    found = advantage(tokens(*rewards), numbered(*sizes))
    torch.testing.assert_close(found, tokens(*centred) / (std + EPSILON))


ADVANTAGES = [
    dr_grpo,
    grpo,
    grpo_sample,
    lite_ppo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
]


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_equal_rewards_teach_nothing(advantage: Any) -> None:
    reward_B = tokens(*[0.1] * 7, 0.0, 1.0)
    assert (reward_B[:7].sum() / 7 != reward_B[0]).item(), (
        "the mean rounds: the trap is real"
    )
    if advantage is not reinforce_pp:
        assert advantage(reward_B, numbered(7, 2))[:7].tolist() == [0.0] * 7
    assert advantage(reward_B[:7], numbered(3, 4)).tolist() == [0.0] * 7
    assert advantage(tokens(5), numbered(1)).tolist() == [0.0]


SURROGATES = [
    losses.ppo_clip,
    losses.gspo,
    losses.cispo,
    losses.vespo,
    losses.reinforce,
    losses.importance_ratio,
]


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_extreme_ratios_give_finite_losses_and_gradients(surrogate: Any) -> None:
    current_M = tokens(-0.1, -1000.0, -0.1, -1000.0).requires_grad_()
    anchor_M = tokens(-1000.0, -0.1, -1000.0, -0.1)
    case = LossTokens(
        current_M, anchor_M, anchor_M, tokens(1, 0, 0, -1), numbered(1, 1, 1, 1)
    )
    loss_M, _ = surrogate(case, AlgorithmConfig())
    (gradient_M,) = torch.autograd.grad(loss_M.sum(), current_M)
    assert torch.isfinite(torch.stack([loss_M, gradient_M])).all()


@pytest.mark.parametrize(
    "correction", ["tis", "tis_sequence", "mis", "mis_sequence", "icepop", "m2po"]
)
def test_weights_are_one_for_equal_policies_and_finite(correction: str) -> None:
    advantage_M = tokens(1, -1, 1, 1, 1)
    weight_M = correct(
        correction, tokens(0, 0, 0, 1000, -1000), advantage_M, numbered(1, 2, 1, 1), 2.0
    )
    assert weight_M[:3].tolist() == [1.0] * 3
    assert torch.isfinite(weight_M).all()


@given(
    pairs=st.lists(
        st.tuples(st.floats(-3, 3, width=32), st.floats(-4, 4, width=32)), max_size=12
    )
)
def test_m2po_masks_no_token_that_could_stay(pairs: list[tuple[float, float]]) -> None:
    log_weight_M, advantage_M = torch.tensor(pairs).reshape(-1, 2).unbind(1)
    weight_M = correct("m2po", log_weight_M, advantage_M, numbered(len(pairs)), 2.0)
    counted_M = log_weight_M.sign() * advantage_M.sign() > 0
    kept_M = log_weight_M.double()[counted_M & (weight_M == 1)].square()
    masked_M = log_weight_M.double()[counted_M & (weight_M == 0)].square()
    assert len(kept_M) + len(masked_M) == counted_M.sum()
    assert (weight_M[~counted_M] == 1).all()
    assert len(kept_M) == 0 or kept_M.mean() <= losses.M2_LIMIT + 1e-9
    if len(masked_M):
        assert torch.cat([kept_M, masked_M.min()[None]]).mean() > losses.M2_LIMIT - 1e-9


def test_interpolated_proximal_policy_follows_token_age() -> None:
    behaviour_M, current_M = (
        tokens(-4, -4, -4, -4),
        tokens(-2, -2, -2, -2).requires_grad_(),
    )
    proximal_M = interpolate(
        behaviour_M, current_M, torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    )
    assert proximal_M.tolist() == [-2.0, -4.0, -3.0, -2.5]
    assert not proximal_M.requires_grad


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_weighted_kl_has_the_gradient_of_the_kl(estimator: str, is_stale: bool) -> None:
    torch.manual_seed(0)
    logit_V, reference_V, behaviour_V = (
        torch.randn(5, dtype=torch.float64).log_softmax(0) for _ in range(3)
    )
    logit_V.requires_grad_()
    sampled_V = behaviour_V if is_stale else logit_V.detach()
    current_V = logit_V.log_softmax(0)

    def expected_gradient(probability_V: Tensor, kl_V: Tensor) -> Tensor:
        """In the mean over tokens of these probabilities."""
        return torch.autograd.grad(
            (probability_V * kl_V).sum(), logit_V, retain_graph=True
        )[0]

    exact_V = expected_gradient(current_V.exp(), current_V - reference_V)
    weighted_V = losses.weighted_kl(current_V, reference_V, sampled_V, estimator)
    torch.testing.assert_close(expected_gradient(sampled_V.exp(), weighted_V), exact_V)
    plain_V = expected_gradient(sampled_V.exp(), kl(current_V, reference_V, estimator))
    is_right = torch.allclose(plain_V, exact_V, rtol=0.05)
    assert is_right == (estimator == "k2" and not is_stale)


@pytest.mark.parametrize("difference", [-30.0, 5.0, 19.0, 21.0, 60.0])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_of_distant_policies_has_the_gradient_of_its_formula(
    estimator: str, difference: float
) -> None:
    """A token that the reference finds far likelier must become likelier."""
    reference_M = tokens(-0.5)
    current_M = (reference_M - difference).requires_grad_()
    anchor_M = current_M.detach() - 0.25

    def gradient_of(kl_M: Tensor) -> float:
        (gradient_M,) = torch.autograd.grad(kl_M.sum(), current_M)
        return float(gradient_M)

    ratio = math.exp(0.25)
    weighted_M = losses.weighted_kl(current_M, reference_M, anchor_M, estimator)
    assert gradient_of(weighted_M) == pytest.approx(-ratio * difference, rel=1e-4)
    plain = gradient_of(kl(current_M, reference_M, estimator))
    most = math.exp(min(difference, losses.LARGEST_LOG_RATIO))
    expected = {"k2": -difference, "k3": 1 - most}[estimator]
    assert plain == pytest.approx(expected, rel=1e-4)


# ---- names, and the page


@pytest.mark.extension("scoring")
def test_every_recipe_on_the_page_is_a_config() -> None:
    shown = set()
    for block in map(yaml.safe_load, BLOCKS):
        needed = {"model": {"path": "x"}, "task": {"reasoning_gym": "basic_arithmetic"}}
        algorithm = RunConfig.model_validate({**needed, **block}).algorithm
        resolve(algorithm)
        shown.add(algorithm.loss)
    assert set(RECIPES) - {"reinforce"} <= shown
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    of_losses = {row[0]: row for row in rows if row[0] in RECIPES}
    assert list(of_losses) == list(RECIPES)
    for name, (_, _, ratio, correction, aggregate, _) in of_losses.items():
        recipe = RECIPES[name]
        assert (correction, aggregate) == (recipe.correction, recipe.aggregate)
        assert ratio == (
            "none" if recipe.surrogate.endswith(":reinforce") else recipe.ratio
        )


def test_advantage_on_the_page_favors_the_best() -> None:
    found = globals()["best_of_group"](tokens(1, 3, 2, 0, 0), numbered(3, 2)).tolist()
    assert found == [-0.5, 0.5, -0.5, 0.5, 0.5]
