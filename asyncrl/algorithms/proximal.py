"""The proximal policy without a forward pass of its own. Knows no versions, only how many of them lie between."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.tokens import check_vector


def interpolate(behaviour_M: Tensor, current_M: Tensor, staleness_M: Tensor) -> Tensor:
    """Proximal logprobs between behaviour and current ones, float32 [M] without gradient: a * behaviour + (1 - a) * current.

    a = 1 / staleness, and 0 at staleness 0; `staleness_M` is the trainer's version - the token's, an integer. So a token one
    version old is clipped around its behaviour policy, a very old one around where the policy stands. A-3PO,
    https://arxiv.org/abs/2512.06547. Raises ValueError if shapes or dtypes are others.
    """
    check_vector("behaviour_M", behaviour_M, torch.float32)
    check_vector("current_M", current_M, torch.float32, len_like=("behaviour_M", behaviour_M))
    if staleness_M.shape != behaviour_M.shape or staleness_M.is_floating_point():
        raise ValueError(f"staleness_M is {staleness_M.dtype} {tuple(staleness_M.shape)}, but must be integers {tuple(behaviour_M.shape)}")
    share_M = torch.where(staleness_M > 0, 1.0 / staleness_M.clamp(min=1), 0.0)
    return torch.lerp(current_M.detach(), behaviour_M, share_M)
