"""The divergence of the current policy from a reference policy, estimated from the tokens sampled. Knows no reward."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.tokens import LARGEST_LOG_RATIO, check_tokens, check_vector


def kl(current_M: Tensor, reference_M: Tensor, estimator: str) -> Tensor:
    """KL(current || reference) estimated at each token, float32 [M] in nats, with gradient through current_M alone.

    With d = reference - current: k1 = -d, unbiased, can be negative; k2 = d^2 / 2, low variance, biased; k3 = exp(d) - d - 1,
    unbiased, never negative. http://joschu.net/blog/kl-approx.html. That holds for the values. As a loss, k2 is the one whose
    gradient is that of the KL (k1's has mean 0): https://arxiv.org/abs/2506.09477. Raises ValueError for another word, shape
    or dtype.
    """
    check_vector("current_M", current_M, torch.float32)
    check_vector("reference_M", reference_M, torch.float32, len_like=("current_M", current_M))
    difference_M = reference_M.detach() - current_M
    match estimator:
        case "k1":
            return -difference_M
        case "k2":
            return difference_M.square() / 2
        case "k3":
            return difference_M.clamp(max=LARGEST_LOG_RATIO).exp() - difference_M - 1
    raise ValueError(f"estimator={estimator!r} must be k1, k2 or k3")


def kl_reward_penalty(policy_M: Tensor, reference_M: Tensor, sequence_M: Tensor, num_sequences: int) -> Tensor:
    """The sum of k1 over each sequence, float32 [S] without gradient: times a coefficient it is taken from the reward.

    A sequence is what earns one reward: its tokens need not stand together. `policy_M` are logprobs by the weights before the
    batch. InstructGPT, https://arxiv.org/abs/2203.02155, equation 2. Raises ValueError if shapes or dtypes are others.
    """
    check_tokens(sequence_M, policy_M=policy_M, reference_M=reference_M)
    return torch.zeros(num_sequences, device=policy_M.device).index_add(0, sequence_M, kl(policy_M, reference_M, "k1").detach())
