"""Penalties that are added to a reward before advantages are made of it. Knows lengths alone."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.tokens import check_vector


def overlong_penalty(length_B: Tensor, max_tokens: int, overlong_tokens: int) -> Tensor:
    """float32 [B] in [-1, 0]: 0 up to max_tokens - overlong_tokens, from there linear down to -1 at max_tokens, -1 beyond.

    `length_B` int64, sampled tokens of each sample; overlong_tokens = 0 is no penalty. DAPO, https://arxiv.org/abs/2503.14476,
    equation 13. Raises ValueError for another shape or dtype, and unless 0 <= overlong_tokens <= max_tokens.
    """
    check_vector("length_B", length_B, torch.int64)
    if not 0 <= overlong_tokens <= max_tokens:
        raise ValueError(f"overlong_tokens={overlong_tokens} must be from 0 to max_tokens={max_tokens}")
    if overlong_tokens == 0:
        return torch.zeros(length_B.shape, device=length_B.device)
    return ((max_tokens - overlong_tokens - length_B).float() / overlong_tokens).clamp(-1.0, 0.0)
