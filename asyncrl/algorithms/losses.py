"""Surrogates: the loss of each token. They know no aggregation, no correction for stale data, no KL.

All have one signature, which a loss of your own has too (algorithm.loss=module:function):

    surrogate(current_M, anchor_M, behaviour_M, advantage_M, sequence_M, settings) -> (loss_M, stats)

`current_M` logprobs by the weights being trained, with gradient; `anchor_M` without: those of the policy
below the line of the ratio, the behaviour or the proximal policy (algorithm.ratio); `behaviour_M` as reported
by the engine; `advantage_M`; `sequence_M` int64, 0 to S-1, ascending, whole sequences; `settings` is
asyncrl.config.AlgorithmConfig. loss_M is float32 [M] with gradient: one value a token, to be minimised, not
divided by anything (aggregate.py does that). stats are sums over the M tokens by name, scalars without
gradient: the caller divides them by the number of loss tokens. ValueError if shapes or dtypes are others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.aggregate import LARGEST_LOG_RATIO, check_tokens, exp_ratio, sequence_mean
from asyncrl.config import AlgorithmConfig

TokenLoss = tuple[Tensor, dict[str, Tensor]]


def ppo_clip(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(current - anchor).

    clip_fraction counts tokens whose gradient the clip removed. PPO, https://arxiv.org/abs/1707.06347,
    equation 7; unequal clips: DAPO, https://arxiv.org/abs/2503.14476, equation 10.
    """
    check_tokens(sequence_M, current_M, anchor_M, behaviour_M, advantage_M)
    return _clipped(exp_ratio(current_M - anchor_M), advantage_M, settings)


def gspo(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """ppo_clip with one ratio a sequence, the geometric mean of its tokens': s = exp(mean(current - anchor)),
    at each token.

    So a sequence is clipped as a whole, and clip ranges are far smaller (3e-4 and 4e-4 in the paper). Goes
    with algorithm.aggregate=sequence. https://arxiv.org/abs/2507.18071, equations 5 to 7.
    """
    check_tokens(sequence_M, current_M, anchor_M, behaviour_M, advantage_M)
    log_ratio_M = (current_M - anchor_M).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return _clipped(sequence_mean(log_ratio_M, sequence_M).exp(), advantage_M, settings)


def cispo(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """-min(r, 1 + clip_high) A current, r = exp(current - anchor) without gradient: clips the weight, never
    the token's gradient.

    clip_fraction counts tokens whose weight was cut. There is no lower clip, as in the paper's experiments:
    clip_low is not used. MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5.
    """
    check_tokens(sequence_M, current_M, anchor_M, behaviour_M, advantage_M)
    ratio_M, largest = exp_ratio(current_M.detach() - anchor_M), 1.0 + settings.clip_high
    return -ratio_M.clamp(max=largest) * advantage_M * current_M, {"clip_fraction": (ratio_M > largest).sum()}


def reinforce(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """-A current: the plain policy gradient, no ratio. Stale data needs a correction beside it
    (algorithm.loss=tis or mis).

    Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    check_tokens(sequence_M, current_M, anchor_M, behaviour_M, advantage_M)
    return -advantage_M * current_M, {}


def importance_ratio(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """-r A, r = exp(current - anchor): no clip at all. m2po masks beside it what would go too far.

    https://arxiv.org/abs/2510.01161.
    """
    check_tokens(sequence_M, current_M, anchor_M, behaviour_M, advantage_M)
    return -exp_ratio(current_M - anchor_M) * advantage_M, {}


def _clipped(ratio_M: Tensor, advantage_M: Tensor, settings: AlgorithmConfig) -> TokenLoss:
    plain_M = ratio_M * advantage_M
    clipped_M = ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantage_M
    return -torch.minimum(plain_M, clipped_M), {
        "clip_fraction": (clipped_M.detach() < plain_M.detach()).sum()
    }


def kl(current_M: Tensor, reference_M: Tensor, estimator: str) -> Tensor:
    """KL(current || reference) estimated at each token, float32 [M] in nats, with gradient through current_M
    alone.

    With d = reference - current: k1 = -d, unbiased, can be negative; k2 = d^2 / 2, low variance, biased; k3 =
    exp(d) - d - 1, unbiased, never negative. http://joschu.net/blog/kl-approx.html. That holds for the
    values. As a loss, k2 is the one whose gradient is that of the KL (k1's has mean 0):
    https://arxiv.org/abs/2506.09477.
    """
    difference_M = reference_M.detach() - current_M
    match estimator:
        case "k1":
            return -difference_M
        case "k2":
            return difference_M.square() / 2
    return difference_M.clamp(max=LARGEST_LOG_RATIO).exp() - difference_M - 1


def kl_reward_penalty(
    policy_M: Tensor, reference_M: Tensor, sequence_M: Tensor, num_sequences: int
) -> Tensor:
    """The sum of k1 over each sequence, float32 [S] without gradient: times a coefficient it is taken from
    the reward.

    A sequence is what earns one reward: its tokens need not stand together. `policy_M` are logprobs by the
    weights before the batch. InstructGPT, https://arxiv.org/abs/2203.02155, equation 2.
    """
    return torch.zeros(num_sequences, device=policy_M.device).index_add(
        0, sequence_M, kl(policy_M, reference_M, "k1").detach()
    )


def interpolate(behaviour_M: Tensor, current_M: Tensor, staleness_M: Tensor) -> Tensor:
    """Proximal logprobs between behaviour and current ones, float32 [M] without gradient: a * behaviour + (1
    - a) * current.

    a = 1 / staleness, and 0 at staleness 0; `staleness_M` is the trainer's version - the token's, an integer.
    So a token one version old is clipped around its behaviour policy, a very old one around where the policy
    stands. A-3PO, https://arxiv.org/abs/2512.06547.
    """
    share_M = torch.where(staleness_M > 0, 1.0 / staleness_M.clamp(min=1), 0.0)
    return torch.lerp(current_M.detach(), behaviour_M, share_M)
