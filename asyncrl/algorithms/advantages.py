"""Advantages from the rewards of a batch. One number a sample, the same for all its tokens.

A sample is a rollout, or a part of one that earned a reward of its own. Every function here takes `reward_B`
float32, finite, and `group_B` int64, the number of each sample's group (0 to num_groups - 1), and returns
float32 [B]. Where all rewards that are compared are equal, a lone one included, the advantage is exactly 0.
Standard deviations are those of the population, but for grpo_sample and lite_ppo.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.losses import sequence_sum

EPSILON = 1e-4
"""Added to the standard deviation, in units of reward, so that scores which differ by noise alone do not
become large.
"""


def grpo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Against its group, in the group's standard deviations: (reward - mean) / (std + EPSILON).

    DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
    """
    centred_B, size_B = _centred(reward_B, group_B)
    std_B = (sequence_sum(centred_B.square(), group_B) / size_B).sqrt()
    return centred_B / (std_B + EPSILON)


def grpo_sample(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """As grpo, in standard deviations of a sample: size - 1 instead of size below the line, as TRL does.

    So it is smaller by sqrt(1 - 1 / size) in a group of that size.
    """
    centred_B, size_B = _centred(reward_B, group_B)
    std_B = (sequence_sum(centred_B.square(), group_B) / (size_B - 1).clamp(min=1)).sqrt()
    return centred_B / (std_B + EPSILON)


def lite_ppo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Against its group, in standard deviations of the whole batch's rewards, that of a sample as TRL does.

    Lite PPO, https://arxiv.org/abs/2508.08221. What sets it apart from reinforce_pp_baseline: that one's
    deviation is of what is left once the groups' means are off.
    """
    std = (reward_B - reward_B.mean()).square().sum().div(max(len(reward_B) - 1, 1)).sqrt()
    return _centred(reward_B, group_B)[0] / (std + EPSILON)


def dr_grpo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Against its group, in units of reward: reward - mean. Goes with algorithm.aggregate=constant.

    Understanding R1-Zero-like training, https://arxiv.org/abs/2503.20783.
    """
    return _centred(reward_B, group_B)[0]


def rloo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Against the mean of the group's others: reward - (sum - reward) / (size - 1), which is size / (size -
    1) * dr_grpo.

    REINFORCE leave-one-out, https://arxiv.org/abs/2402.14740.
    """
    centred_B, size_B = _centred(reward_B, group_B)
    return centred_B * size_B / (size_B - 1).clamp(min=1)


def reinforce_pp(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Against the whole batch, in its standard deviations; groups play no part.

    REINFORCE++, https://arxiv.org/abs/2501.03262. The paper normalises over tokens, so long ones weigh more
    there; here every sample counts once.
    """
    return grpo(reward_B, torch.zeros_like(group_B))


def reinforce_pp_baseline(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Against its group, in standard deviations of the whole batch: (reward - mean of the group) / (std of
    these + EPSILON).

    REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262. The mean over the batch is 0 already.
    """
    centred_B = dr_grpo(reward_B, group_B)
    return centred_B / (centred_B.square().mean().sqrt() + EPSILON)


def _centred(reward_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """(reward - mean of the group, size of the group), float32 [B] both."""
    size_B = sequence_sum(torch.ones_like(reward_B), group_B)
    centred_B = reward_B - sequence_sum(reward_B, group_B) / size_B
    # Equal rewards can have a mean that rounds to another number: ask for equality itself, not for a
    # difference of 0.
    lowest_B, highest_B = (
        torch.zeros_like(reward_B).scatter_reduce(0, group_B, reward_B, how, include_self=False)[group_B]
        for how in ("amin", "amax")
    )
    return torch.where(lowest_B == highest_B, 0.0, centred_B), size_B


def overlong_penalty(length_B: Tensor, max_tokens: int, overlong_tokens: int) -> Tensor:
    """float32 [B] in [-1, 0]: 0 up to max_tokens - overlong_tokens, from there linear down to -1 at
    max_tokens, -1 beyond.

    `length_B` int64, sampled tokens of each sample; overlong_tokens from 1 to max_tokens. DAPO,
    https://arxiv.org/abs/2503.14476, equation 13.
    """
    return ((max_tokens - overlong_tokens - length_B).float() / overlong_tokens).clamp(-1.0, 0.0)
