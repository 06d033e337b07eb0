"""Advantages from the rewards of a batch: one number per sample, shared by its tokens.

All functions but checked_advantages take `reward_B` float32, finite, and `group_B`
int64 (0 to num_groups - 1), and return float32 [B]. If all compared rewards are equal,
the advantage is exactly 0. Standard deviations are of the population, except in
grpo_sample and lite_ppo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.losses import sequence_sum
from asyncrl.base.errors import ConfigError
from asyncrl.config import AlgorithmConfig

EPSILON = 1e-4
"""Added to the standard deviation, in units of reward, so that pure noise stays small.
"""


def checked_advantages(given: Any, reward_B: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return what an advantage function gave, as float32 [B]. Raises ConfigError."""
    # It may be a user's function (module:function). Another shape would give tokens the
    # advantages of others, and one NaN would spoil all weights.
    is_one_each = isinstance(given, Tensor) and given.shape == reward_B.shape
    if not (is_one_each and torch.isfinite(given).all()):
        raise ConfigError(
            f"algorithm.advantage={config.advantage} returned {given}",
            rule="it returns a finite float32 tensor, one advantage a reward",
            way_out="correct the function, or set algorithm.advantage=grpo.",
        )
    advantage_B: Tensor = given.detach().float()
    return advantage_B


def unchanged(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Return the rewards: demonstrations have the reward 1."""
    return reward_B


def grpo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Normalize within the group: (reward - mean) / (std + EPSILON).

    DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
    """
    # Population, as in the paper. At group size 2 the two kinds differ by a factor of
    # 1.41.
    centred_B, size_B = _centred(reward_B, group_B)
    std_B = (sequence_sum(centred_B.square(), group_B) / size_B).sqrt()
    return centred_B / (std_B + EPSILON)


def grpo_sample(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Compute grpo with the sample standard deviation (divisor size - 1), like TRL."""
    centred_B, size_B = _centred(reward_B, group_B)
    std_B = (
        # A group of one rollout has no deviation: 0 / 0 without the clamp.
        sequence_sum(centred_B.square(), group_B) / (size_B - 1).clamp(min=1)
    ).sqrt()
    return centred_B / (std_B + EPSILON)


def lite_ppo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Center within the group and divide by the batch's sample standard deviation of
    rewards, like TRL.

    Lite PPO, https://arxiv.org/abs/2508.08221.
    """
    std = (
        (reward_B - reward_B.mean())
        .square()
        .sum()
        .div(max(len(reward_B) - 1, 1))
        .sqrt()
    )
    return _centred(reward_B, group_B)[0] / (std + EPSILON)


def dr_grpo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Center within the group: reward - mean. Use with algorithm.aggregate=constant.

    Understanding R1-Zero-like training, https://arxiv.org/abs/2503.20783.
    """
    return _centred(reward_B, group_B)[0]


def rloo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Subtract the mean of the group's others: size / (size - 1) * dr_grpo.

    REINFORCE leave-one-out, https://arxiv.org/abs/2402.14740.
    """
    centred_B, size_B = _centred(reward_B, group_B)
    return centred_B * size_B / (size_B - 1).clamp(min=1)


def reinforce_pp(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Normalize over the batch, without groups.

    REINFORCE++, https://arxiv.org/abs/2501.03262. The paper normalizes over tokens;
    here every sample counts once.
    """
    # All samples of the batch are one group, so prompts of unequal difficulty are
    # compared.
    return grpo(reward_B, torch.zeros_like(group_B))


def reinforce_pp_baseline(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Center within the group and normalize over the batch: centered / (std of centered
    + EPSILON).

    REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262.
    """
    # Centered rewards have mean 0 over the batch, so the root of their mean square is
    # their standard deviation.
    centred_B = dr_grpo(reward_B, group_B)
    return centred_B / (centred_B.square().mean().sqrt() + EPSILON)


def _centred(reward_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return (reward - mean of the group, size of the group), float32 [B] both."""
    size_B = sequence_sum(torch.ones_like(reward_B), group_B)
    centred_B = reward_B - sequence_sum(reward_B, group_B) / size_B
    # The mean of equal rewards may round: three times 0.9 has a mean of 0.8999999. So
    # equality is tested, and such a group has no gradient at all.
    lowest_B, highest_B = (
        torch.zeros_like(reward_B).scatter_reduce(
            0, group_B, reward_B, how, include_self=False
        )[group_B]
        for how in ("amin", "amax")
    )
    return torch.where(lowest_B == highest_B, 0.0, centred_B), size_B


def overlong_penalty(length_B: Tensor, max_tokens: int, overlong_tokens: int) -> Tensor:
    """Return float32 [B]: 0 up to max_tokens - overlong_tokens, linear down to -1 at
    max_tokens and beyond.

    `length_B` int64, sampled tokens; overlong_tokens from 1 to max_tokens. DAPO,
    https://arxiv.org/abs/2503.14476, equation 13.
    """
    return ((max_tokens - overlong_tokens - length_B).float() / overlong_tokens).clamp(
        -1.0, 0.0
    )
