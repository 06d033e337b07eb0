"""The recipes against TRL's own code on the same logprobs and rewards: loss, gradient and advantages to
1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Same:
    """One algorithm in both languages. With `old_is_behaviour` TRL is told that its old policy is the one
    that sampled.
    """

    ours: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)
    old_is_behaviour: bool = False


SAME = {
    "GRPO": Same({"ratio": "proximal", "aggregate": "sequence"}),
    "PPO-clip around the behaviour policy": Same({}, {"loss_type": "bnpo"}, old_is_behaviour=True),
    "Dr. GRPO": Same({"ratio": "proximal", "aggregate": "constant"}, {"loss_type": "dr_grpo"}),
    "DAPO": Same({"loss": "dapo", "ratio": "proximal"}, {"loss_type": "dapo"}),
    "DAPO with KL": Same(
        {"loss": "dapo", "ratio": "proximal", "kl_coefficient": 0.3}, {"loss_type": "dapo", "beta": 0.3}
    ),
    "GRPO with KL": Same(
        {"ratio": "proximal", "aggregate": "sequence", "kl_coefficient": 0.3}, {"beta": 0.3}
    ),
    "CISPO": Same({"loss": "cispo", "ratio": "proximal"}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "CISPO around the behaviour policy": Same(
        {"loss": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.28}, old_is_behaviour=True
    ),
    "GSPO": Same(
        {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        old_is_behaviour=True,
    ),
    "GSPO over tokens": Same(
        {"loss": "gspo", "ratio": "proximal", "aggregate": "token", "clip_low": 3e-4, "clip_high": 4e-4},
        {
            "importance_sampling_level": "sequence",
            "loss_type": "dapo",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "decoupled PPO": Same({"loss": "decoupled_ppo"}, {"loss_type": "dapo", **VLLM}),
    "decoupled PPO with KL": Same(
        {"loss": "decoupled_ppo", "kl_coefficient": 0.3}, {"loss_type": "dapo", "beta": 0.3, **VLLM}
    ),
    "PPO-clip with masked weights": Same(
        {"loss": "decoupled_ppo", "correction": "mis"},
        {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_mask", **VLLM},
    ),
    "PPO-clip with truncated weights a sequence": Same(
        {"loss": "decoupled_ppo", "correction": "tis_sequence"},
        {"loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_truncate", **VLLM},
    ),
    "PPO-clip with masked weights a sequence": Same(
        {"loss": "decoupled_ppo", "correction": "mis_sequence"},
        {"loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_mask", **VLLM},
    ),
    "IcePop": Same(
        {"loss": "icepop"},
        {
            "loss_type": "dapo",
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.5,
            **VLLM,
        },
    ),
    "GSPO with truncated weights": Same(
        {"loss": "gspo", "ratio": "proximal", "correction": "tis", "clip_low": 3e-4, "clip_high": 4e-4},
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4, **VLLM},
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradient_are_those_of_trl(name: str, seed: int) -> None:
    same, sampled = SAME[name], sample(seed)
    config = AlgorithmConfig(**{"advantage": "dr_grpo", "clip_high": 0.28, **same.ours})
    ours, stats = our_loss(sampled, config)
    old_M = sampled.behaviour_M if same.old_is_behaviour else sampled.proximal_M
    theirs, metrics, _ = trl_loss(replace(sampled, proximal_M=old_M), **same.theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient(ours, sampled), gradient(theirs, sampled), atol=1e-5, rtol=1e-5)
    assert stats["clip_fraction"] > 0, "no token is clipped: the comparison proves little"
    if config.loss not in (
        "cispo",
        "gspo",
    ):  # TRL counts cispo's clips of one sign alone, and gspo's by sequence
        assert stats["clip_fraction"].item() / sum(sampled.lengths) == pytest.approx(
            metrics["clip_ratio/region_mean"]
        )


@pytest.mark.parametrize("correction", ["tis", "tis_sequence", "mis", "mis_sequence", "icepop"])
def test_before_the_first_step_reinforce_with_weights_has_the_gradient_of_trl(correction: str) -> None:
    sampled = sample(4)
    level = "sequence" if "sequence" in correction else "token"
    mode = f"{level}_{'truncate' if 'tis' in correction else 'mask'}"
    smallest = 0.5 if correction == "icepop" else None
    sampled = replace(sampled, current_M=sampled.proximal_M.clone().requires_grad_())
    ours, _ = our_loss(sampled, AlgorithmConfig(advantage="dr_grpo", loss="tis", correction=correction))
    changes = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": smallest, **VLLM}
    theirs, _, _ = trl_loss(sampled, loss_type="dapo", **changes)
    torch.testing.assert_close(gradient(ours, sampled), gradient(theirs, sampled), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_those_of_trl(seed: int) -> None:
    sampled = sample(seed)
    group_B = torch.arange(len(sampled.lengths)) // GROUP_SIZE
    _, _, theirs_B = trl_loss(sampled, trainer=RLOOTrainer)
    torch.testing.assert_close(rloo(sampled.reward_B, group_B), theirs_B, atol=1e-5, rtol=1e-5)
    # TRL divides by the deviation of a sample, size - 1 below the line, this room by that of the population.
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


@pytest.mark.parametrize("overlong_tokens", [1, 20, 100])
def test_the_length_penalty_is_that_of_trl(overlong_tokens: int) -> None:
    lengths = [0, 1, 79, 80, 81, 90, 99, 100, 101, 500]
    theirs = get_soft_overlong_punishment(100, overlong_tokens)([[0] * length for length in lengths])
    torch.testing.assert_close(
        overlong_penalty(torch.tensor(lengths), 100, overlong_tokens), torch.tensor(theirs)
    )
