"""Corrections: a weight on each token's loss for data of another policy than the proximal one. They know no
loss.

All have one signature:

    correction(log_weight_M, advantage_M, sequence_M, settings) -> weight_M

`log_weight_M` = proximal - behaviour: logprobs by the trainer's weights before the batch, less those reported
by the engine. w = exp(log_weight) is the importance weight of what lies between them: staleness, and the
differences of two implementations. Nothing has a gradient. `sequence_M` int64 ascending, whole sequences;
`settings` is asyncrl.config.AlgorithmConfig. All but m2po give the same for a part of the sequences as for
all of them. ValueError if shapes or dtypes are others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.aggregate import check_tokens, exp_ratio, sequence_sum
from asyncrl.config import AlgorithmConfig


def tis(log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig) -> Tensor:
    """Truncated importance sampling a token: min(w, importance_cap).

    Ionides 2008, https://doi.org/10.1198/106186008X320456; for engine and trainer that differ: Yao et al.
    2025, https://fengyao.notion.site/off-policy-rl; beside a clipped loss it is decoupled PPO,
    https://arxiv.org/abs/2505.24298.
    """
    check_tokens(sequence_M, log_weight_M, advantage_M)
    return exp_ratio(log_weight_M).clamp(max=settings.importance_cap)


def tis_sequence(
    log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig
) -> Tensor:
    """Truncated importance sampling a sequence: min(product of w over the sequence, importance_cap), at each
    of its tokens.

    Unbiased but for the truncation, where weights a token are biased. https://arxiv.org/abs/2510.26788.
    """
    return tis(sequence_sum(log_weight_M, sequence_M), advantage_M, sequence_M, settings)


def mis(log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig) -> Tensor:
    """Masked importance sampling a token: w, and 0 where it is above importance_cap.

    https://arxiv.org/abs/2510.26788.
    """
    check_tokens(sequence_M, log_weight_M, advantage_M)
    weight_M = exp_ratio(log_weight_M)
    return torch.where(weight_M <= settings.importance_cap, weight_M, 0.0)


def mis_sequence(
    log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig
) -> Tensor:
    """Masked importance sampling a sequence: the product of w over it, and 0 for all of it where that is
    above importance_cap.

    https://arxiv.org/abs/2510.26788.
    """
    return mis(sequence_sum(log_weight_M, sequence_M), advantage_M, sequence_M, settings)


def icepop(
    log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig
) -> Tensor:
    """Masked on both sides, a token: w, and 0 where it is below importance_floor or above importance_cap.

    Ring-1T, https://arxiv.org/abs/2510.18855; INTELLECT-3, https://arxiv.org/abs/2512.16144, equation 1 (0.5
    and 5).
    """
    weight_M = mis(log_weight_M, advantage_M, sequence_M, settings)
    return torch.where(weight_M >= settings.importance_floor, weight_M, 0.0)


def m2po(log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig) -> Tensor:
    """1 or 0: masks the tokens of largest (log w)^2 until the mean of what is left of it is at most m2_limit.
    No weight else.

    Only tokens that went where their advantage pushes them (A > 0 and w > 1, or A < 0 and w < 1) are counted
    and masked: a step on any other brings it back, and PPO's clip lets those pass too. Needs all M tokens of
    an optimizer step at once. Second-moment trust policy optimisation, https://arxiv.org/abs/2510.01161
    (0.04), and the tokens counted as in its authors' code, https://github.com/Infini-AI-Lab/M2PO.
    """
    check_tokens(sequence_M, log_weight_M, advantage_M)
    (counted_K,) = (log_weight_M.sign() * advantage_M.sign() > 0).nonzero(as_tuple=True)
    moment_K, order_K = log_weight_M[counted_K].double().square().sort(stable=True)
    count_K = torch.arange(1, len(moment_K) + 1, device=moment_K.device)
    mean_K = moment_K.cumsum(0) / count_K  # of the smallest 1, 2, 3...
    weight_M = torch.ones_like(log_weight_M)
    weight_M[counted_K[order_K[mean_K > settings.m2_limit]]] = 0.0
    return weight_M
