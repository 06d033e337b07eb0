"""Advantages from the rewards of a mini-batch. Knows no tokens: one number a trajectory, the same for all its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to the standard deviation, in units of reward, so that scores which differ by noise alone do not become large."""


def grpo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Reward against the other trajectories of its group: (reward - mean) / (std + EPSILON). Returns float32 [B].

    `reward_B` float32, finite; `group_B` int64, the number of each trajectory's group (0 to num_groups - 1, every one
    used). std is that of the population, so a full group has advantages of mean square 1. A group whose rewards are
    all equal, a group of one included, gets exactly 0. DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
    Raises ValueError if shapes or dtypes are others.
    """
    if reward_B.ndim != 1 or reward_B.shape != group_B.shape:
        raise ValueError(f"reward_B and group_B must be [B] alike, not {tuple(reward_B.shape)} and {tuple(group_B.shape)}")
    if reward_B.dtype != torch.float32 or group_B.dtype != torch.int64:
        raise ValueError(f"reward_B must be float32 and group_B int64, not {reward_B.dtype} and {group_B.dtype}")
    if reward_B.numel() == 0:
        return torch.zeros_like(reward_B)
    num_groups = int(group_B.max()) + 1
    count_G = torch.zeros(num_groups, device=reward_B.device).index_add(0, group_B, torch.ones_like(reward_B))
    mean_G = torch.zeros_like(count_G).index_add(0, group_B, reward_B) / count_G
    centred_B = reward_B - mean_G[group_B]
    std_G = (torch.zeros_like(count_G).index_add(0, group_B, centred_B.square()) / count_G).sqrt()
    # Equal rewards can have a mean that rounds to another number: ask for equality itself, not for std = 0.
    lowest_G = torch.full_like(count_G, torch.inf).scatter_reduce(0, group_B, reward_B, "amin")
    highest_G = torch.full_like(count_G, -torch.inf).scatter_reduce(0, group_B, reward_B, "amax")
    is_equal_B = (lowest_G == highest_G)[group_B]
    return torch.where(is_equal_B, torch.zeros_like(centred_B), centred_B / (std_G[group_B] + EPSILON))
