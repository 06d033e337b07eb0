"""The recipes against TRL's own code on the same logprobs and rewards: loss, gradient and advantages to
1e-5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import function, numbered
from torch import Tensor
from trl.rewards import get_soft_overlong_punishment
from trl_trainers import GROUP_SIZE, MAX_TOKENS, RLOOTrainer, Sampled, trl_loss

from asyncrl.algorithms import corrections
from asyncrl.algorithms.advantages import grpo, overlong_penalty, rloo
from asyncrl.algorithms.aggregate import token_weights
from asyncrl.algorithms.losses import kl, kl_reward_penalty
from asyncrl.algorithms.registry import resolve
from asyncrl.config import AlgorithmConfig

VLLM = {"use_vllm": True}


DAPO = {"loss_type": "dapo"}
GSPO = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
CLIPS = {"clip_low": 3e-4, "clip_high": 4e-4}
AROUND_BEHAVIOUR = {
    "PPO-clip": ({}, {"loss_type": "bnpo"}),
    "CISPO": ({"loss": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "GSPO": ({"loss": "gspo", **CLIPS}, GSPO),
}
"""One algorithm in both languages. TRL is told that its old policy is the one that sampled."""
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **AROUND_BEHAVIOUR,
    "GRPO with KL": ({"ratio": "proximal", "aggregate": "sequence", "kl_coefficient": 0.3}, {"beta": 0.3}),
    "Dr. GRPO": ({"ratio": "proximal", "aggregate": "constant"}, {"loss_type": "dr_grpo"}),
    "DAPO with KL": ({"loss": "dapo", "ratio": "proximal", "kl_coefficient": 0.3}, {**DAPO, "beta": 0.3}),
    "GSPO over tokens": ({"loss": "gspo", "ratio": "proximal", "aggregate": "token", **CLIPS}, DAPO | GSPO),
    "decoupled PPO": ({"loss": "decoupled_ppo"}, DAPO | VLLM),
    **{
        f"decoupled PPO with {correction}": (
            {"loss": "decoupled_ppo", "correction": correction},
            {**DAPO, **VLLM, "vllm_importance_sampling_mode": mode},
        )
        for correction, mode in (
            ("mis", "token_mask"),
            ("tis_sequence", "sequence_truncate"),
            ("mis_sequence", "sequence_mask"),
        )
    },
    "IcePop": (
        {"loss": "icepop"},
        {
            **DAPO,
            **VLLM,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.5,
        },
    ),
}


def sample(seed: int) -> Sampled:
    """Two groups whose logprobs differ enough that clips, caps and floors all bite."""
    torch.manual_seed(seed)
    lengths = [3, 5, 1, 8, 2, 6]
    count = sum(lengths)
    behaviour_M = -3 * torch.rand(count)
    proximal_M = behaviour_M + 0.6 * torch.randn(count)
    return Sampled(
        lengths=lengths,
        reward_B=torch.randint(0, 4, (len(lengths),)).float() + torch.rand(len(lengths)),
        current_M=(proximal_M + 0.3 * torch.randn(count)).requires_grad_(),
        proximal_M=proximal_M,
        behaviour_M=behaviour_M,
        reference_M=behaviour_M + torch.randn(count),
    )


def our_loss(sampled: Sampled, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss of one optimizer step with gradient, sums of statistics): the functions put together as the
    config says.
    """
    recipe, sequence_M = resolve(config), numbered(*sampled.lengths)
    group_B = torch.arange(len(sampled.lengths)) // GROUP_SIZE
    advantage_M = function(recipe.advantage)(sampled.reward_B, group_B)[sequence_M]
    anchor_M = sampled.behaviour_M if recipe.ratio == "behaviour" else sampled.proximal_M
    loss_M, stats = function(recipe.surrogate)(
        sampled.current_M, anchor_M, sampled.behaviour_M, advantage_M, sequence_M, config
    )
    if recipe.correction != "none":
        correction = getattr(corrections, recipe.correction)
        loss_M = loss_M * correction(
            sampled.proximal_M - sampled.behaviour_M, advantage_M, sequence_M, config
        )
    if config.kl_coefficient:
        loss_M = loss_M + config.kl_coefficient * kl(
            sampled.current_M, sampled.reference_M, config.kl_estimator
        )
    length_B = torch.tensor(sampled.lengths)
    weight_B = token_weights(recipe.aggregate, length_B, len(length_B), int(length_B.sum()), MAX_TOKENS)
    return (loss_M * weight_B[sequence_M]).sum(), stats


def gradient(loss: Tensor, sampled: Sampled) -> Tensor:
    return torch.autograd.grad(loss, sampled.current_M)[0]


@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    (ours_says, theirs_says), sampled = SAME[name], sample(1)
    config = AlgorithmConfig(**{"advantage": "dr_grpo", "clip_high": 0.28, **ours_says})
    ours, stats = our_loss(sampled, config)
    old_M = sampled.behaviour_M if name in AROUND_BEHAVIOUR else sampled.proximal_M
    theirs, metrics, _ = trl_loss(replace(sampled, proximal_M=old_M), **theirs_says)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient(ours, sampled), gradient(theirs, sampled), atol=1e-5, rtol=1e-5)
    assert stats["clip_fraction"] > 0, "no token is clipped: the comparison proves little"
    if config.loss not in ("cispo", "gspo"):  # TRL counts their clips of one sign alone, or by sequence
        clip_fraction = stats["clip_fraction"].item() / sum(sampled.lengths)
        assert clip_fraction == pytest.approx(metrics["clip_ratio/region_mean"])


def test_before_the_first_step_reinforce_with_weights_has_the_gradient_of_trl() -> None:
    sampled = sample(4)
    sampled = replace(sampled, current_M=sampled.proximal_M.clone().requires_grad_())
    ours, _ = our_loss(sampled, AlgorithmConfig(advantage="dr_grpo", loss="tis"))
    theirs, _, _ = trl_loss(sampled, **DAPO, **VLLM)
    torch.testing.assert_close(gradient(ours, sampled), gradient(theirs, sampled), atol=1e-5, rtol=1e-5)


def test_advantages_are_those_of_trl() -> None:
    sampled = sample(0)
    group_B = torch.arange(len(sampled.lengths)) // GROUP_SIZE
    _, _, theirs_B = trl_loss(sampled, trainer=RLOOTrainer)
    torch.testing.assert_close(rloo(sampled.reward_B, group_B), theirs_B, atol=1e-5, rtol=1e-5)
    # TRL divides by the deviation of a sample, size - 1 below the line, this folder by the population's.
    _, _, theirs_B = trl_loss(sampled, scale_rewards="group")
    bessel = ((GROUP_SIZE - 1) / GROUP_SIZE) ** 0.5
    torch.testing.assert_close(grpo(sampled.reward_B, group_B) * bessel, theirs_B, atol=1e-3, rtol=1e-3)


def test_a_kl_penalty_in_the_reward_is_that_of_trl() -> None:
    sampled = sample(0)
    penalty_B = kl_reward_penalty(
        sampled.proximal_M, sampled.reference_M, numbered(*sampled.lengths), len(sampled.lengths)
    )
    _, _, theirs_B = trl_loss(sampled, trainer=RLOOTrainer, beta=0.3)
    group_B = torch.arange(len(sampled.lengths)) // GROUP_SIZE
    torch.testing.assert_close(
        rloo(sampled.reward_B - 0.3 * penalty_B, group_B), theirs_B, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("overlong_tokens", [1, 20])
def test_the_length_penalty_is_that_of_trl(overlong_tokens: int) -> None:
    lengths = [0, 1, 79, 80, 81, 90, 99, 100, 101, 500]
    theirs = get_soft_overlong_punishment(100, overlong_tokens)([[0] * length for length in lengths])
    torch.testing.assert_close(
        overlong_penalty(torch.tensor(lengths), 100, overlong_tokens), torch.tensor(theirs)
    )
