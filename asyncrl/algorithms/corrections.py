"""Corrections: a weight on each token's loss for data of another policy than the proximal one. They know no
loss.

All have one signature:

    correction(proximal_M, behaviour_M, advantage_M, sequence_M, settings) -> weight_M

`proximal_M` logprobs by the trainer's weights before the batch, `behaviour_M` as reported by the engine, so
that w = exp(proximal - behaviour) is the importance weight of what lies between them: staleness, and the
differences of two implementations. weight_M is float32 [M] without gradient. `sequence_M` int64 ascending,
whole sequences; `settings` is asyncrl.config.AlgorithmConfig. All but m2po give the same for a part of the
sequences as for all of them. ValueError if shapes or dtypes are others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.aggregate import LARGEST_LOG_RATIO, check_tokens, ratio, sequence_sum
from asyncrl.config import AlgorithmConfig


def tis(
    proximal_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> Tensor:
    """Truncated importance sampling a token: min(w, importance_cap).

    Ionides 2008, https://doi.org/10.1198/106186008X320456; for engine and trainer that differ: Yao et al.
    2025, https://fengyao.notion.site/off-policy-rl; beside a clipped loss it is decoupled PPO,
    https://arxiv.org/abs/2505.24298.
    """
    check_tokens(sequence_M, proximal_M=proximal_M, behaviour_M=behaviour_M, advantage_M=advantage_M)
    return _token_weight(proximal_M, behaviour_M).clamp(max=settings.importance_cap)


def tis_sequence(
    proximal_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> Tensor:
    """Truncated importance sampling a sequence: min(product of w over the sequence, importance_cap), at each
    of its tokens.

    Unbiased but for the truncation, where weights a token are biased. https://arxiv.org/abs/2510.26788.
    """
    check_tokens(sequence_M, proximal_M=proximal_M, behaviour_M=behaviour_M, advantage_M=advantage_M)
    return _sequence_weight(proximal_M, behaviour_M, sequence_M).clamp(max=settings.importance_cap)


def mis(
    proximal_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> Tensor:
    """Masked importance sampling a token: w, and 0 where it is above importance_cap.

    https://arxiv.org/abs/2510.26788.
    """
    check_tokens(sequence_M, proximal_M=proximal_M, behaviour_M=behaviour_M, advantage_M=advantage_M)
    return _kept(_token_weight(proximal_M, behaviour_M), 0.0, settings.importance_cap)


def mis_sequence(
    proximal_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> Tensor:
    """Masked importance sampling a sequence: the product of w over it, and 0 for all of it where that is
    above importance_cap.

    https://arxiv.org/abs/2510.26788.
    """
    check_tokens(sequence_M, proximal_M=proximal_M, behaviour_M=behaviour_M, advantage_M=advantage_M)
    return _kept(_sequence_weight(proximal_M, behaviour_M, sequence_M), 0.0, settings.importance_cap)


def icepop(
    proximal_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> Tensor:
    """Masked on both sides, a token: w, and 0 where it is below importance_floor or above importance_cap.

    Ring-1T, https://arxiv.org/abs/2510.18855; INTELLECT-3, https://arxiv.org/abs/2512.16144, equation 1 (0.5
    and 5).
    """
    check_tokens(sequence_M, proximal_M=proximal_M, behaviour_M=behaviour_M, advantage_M=advantage_M)
    return _kept(_token_weight(proximal_M, behaviour_M), settings.importance_floor, settings.importance_cap)


def m2po(
    proximal_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> Tensor:
    """1 or 0: masks the tokens of largest (log w)^2 until the mean of what is left of it is at most m2_limit.
    No weight else.

    Only tokens that went where their advantage pushes them (A > 0 and w > 1, or A < 0 and w < 1) are counted
    and masked: a step on any other brings it back, and PPO's clip lets those pass too. Needs all M tokens of
    an optimizer step at once. Second-moment trust policy optimisation, https://arxiv.org/abs/2510.01161
    (0.04), and the tokens counted as in its authors' code, https://github.com/Infini-AI-Lab/M2PO.
    """
    check_tokens(sequence_M, proximal_M=proximal_M, behaviour_M=behaviour_M, advantage_M=advantage_M)
    log_weight_M = (proximal_M - behaviour_M).detach()
    (counted_K,) = (log_weight_M.sign() * advantage_M.sign() > 0).nonzero(as_tuple=True)
    moment_K, order_K = log_weight_M[counted_K].double().square().sort(stable=True)
    mean_K = moment_K.cumsum(0) / torch.arange(
        1, len(moment_K) + 1, device=moment_K.device
    )  # of the smallest 1, 2, 3...
    weight_M = torch.ones_like(log_weight_M)
    weight_M[counted_K[order_K[mean_K > settings.m2_limit]]] = 0.0
    return weight_M


def _token_weight(proximal_M: Tensor, behaviour_M: Tensor) -> Tensor:
    return ratio(proximal_M, behaviour_M).detach()


def _sequence_weight(proximal_M: Tensor, behaviour_M: Tensor, sequence_M: Tensor) -> Tensor:
    log_weight_M = sequence_sum((proximal_M - behaviour_M).detach(), sequence_M)
    return log_weight_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _kept(weight_M: Tensor, smallest: float, largest: float) -> Tensor:
    return torch.where((weight_M >= smallest) & (weight_M <= largest), weight_M, torch.zeros_like(weight_M))
