"""Parts of the loss: surrogates, corrections for stale data, masks, KL, a teacher's advantages, and token
weights. They are independent.

Surrogates, including user losses (algorithm.loss=module:function), have the signature

    surrogate(current_M, anchor_M, behaviour_M, advantage_M, sequence_M, settings) -> (loss_M, stats)

`current_M`: logprobs by the trained weights, with gradient; `anchor_M`: logprobs by the policy in the ratio's
denominator, behaviour or proximal (algorithm.ratio), without gradient; `behaviour_M`: as reported by the
engine; `sequence_M` int64, 0 to S-1, ascending, whole sequences; `settings`: asyncrl.config.AlgorithmConfig.
loss_M is float32 [M] with gradient, to be minimized, not divided by anything (token_weights does that). stats
are sums over the M tokens by name, scalars without gradient: the caller divides them by the number of loss
tokens.

Corrections weight each token's loss for data from another policy than the proximal one:

    correction(log_weight_M, advantage_M, sequence_M, settings) -> weight_M

`log_weight_M` = proximal - behaviour: logprobs by the trainer's weights before the batch minus the engine's.
w = exp(log_weight) is the importance weight for staleness and implementation differences. Nothing has a
gradient. All but m2po work on any subset of the sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.config import AlgorithmConfig

TokenLoss = tuple[Tensor, dict[str, Tensor]]

ICEPOP_FLOOR = 0.5
"""Smallest importance weight that icepop keeps."""
M2_LIMIT = 0.04
"""Largest second moment of the log ratio that m2po leaves, in nats squared."""
LARGEST_LOG_RATIO = 20.0
"""Log ratios are clamped to this many nats before exp: e^20 = 5e8 exceeds every clip and cap; e^89 is
infinite in float32, and NaN when multiplied by 0.
"""
SMALLEST_LOG = math.log(1e-8)
"""Replaces the log of a weight of 0."""

# ---- surrogates


def ppo_clip(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(current - anchor); with clip_delta
    -min(min(r, clip_delta) A, clip(...) A).

    clip_fraction counts tokens whose gradient the clip removed. PPO, https://arxiv.org/abs/1707.06347,
    equation 7; unequal clips: DAPO, https://arxiv.org/abs/2503.14476, equation 10; clip_delta bounds r if A
    is negative, two-sided clipping: INTELLECT-2, https://arxiv.org/abs/2505.07291.
    """
    return _clipped(exp_ratio(current_M - anchor_M), advantage_M, settings)


def gspo(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """ppo_clip with one ratio per sequence, the geometric mean over its tokens: s = exp(mean(current -
    anchor)), at each token.

    A sequence is clipped as a whole, and clip ranges are far smaller (3e-4 and 4e-4 in the paper). Use with
    algorithm.aggregate=sequence. https://arxiv.org/abs/2507.18071, equations 5 to 7. With
    aggregate=sequence_sum it is LUSPO, which does not down-weight long sequences:
    https://arxiv.org/abs/2602.05261.
    """
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

    clip_fraction counts tokens with a clipped weight. No lower clip, as in the paper's experiments: clip_low
    is unused. MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5.
    """
    ratio_M, largest = exp_ratio(current_M.detach() - anchor_M), 1.0 + settings.clip_high
    return -ratio_M.clamp(max=largest) * advantage_M * current_M, {"clip_fraction": (ratio_M > largest).sum()}


def vespo(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """-phi(W) A current, phi(W) = W^k exp(lambda (1 - W)) without gradient; W = exp(sum(current - anchor)),
    the ratio of the whole sequence.

    phi(1) = 1; k reduces small ratios, lambda large ones, both by the sign of A. sequence_weight is phi. A
    correction is part of W: the caller subtracts it from anchor.
    https://arxiv.org/abs/2602.10693; the bounds of log W, log 1e-8 and LARGEST_LOG_RATIO, are TRL's.
    """
    log_w_M = sequence_sum(current_M.detach() - anchor_M, sequence_M).clamp(SMALLEST_LOG, LARGEST_LOG_RATIO)
    is_negative_M = advantage_M < 0
    k_M = torch.where(is_negative_M, 3.0, 2.0)
    rate_M = torch.where(is_negative_M, 2.0, 3.0)
    phi_M = (k_M * log_w_M + rate_M * (1.0 - log_w_M.exp())).clamp(max=LARGEST_LOG_RATIO).exp()
    return -phi_M * advantage_M * current_M, {"sequence_weight": phi_M.sum()}


def reinforce(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """-A current: the plain policy gradient without ratio. Stale data needs a correction (algorithm.loss=tis
    or mis).

    Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return -advantage_M * current_M, {}


def importance_ratio(
    current_M: Tensor,
    anchor_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    settings: AlgorithmConfig,
) -> TokenLoss:
    """-r A, r = exp(current - anchor), unclipped; m2po masks extreme tokens.

    https://arxiv.org/abs/2510.01161.
    """
    return -exp_ratio(current_M - anchor_M) * advantage_M, {}


def _clipped(ratio_M: Tensor, advantage_M: Tensor, settings: AlgorithmConfig) -> TokenLoss:
    plain_M = ratio_M * advantage_M
    clipped_M = ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantage_M
    is_clipped_M = clipped_M.detach() < plain_M.detach()
    if settings.clip_delta is not None:
        is_clipped_M |= (ratio_M > settings.clip_delta) & (advantage_M < 0)
        plain_M = ratio_M.clamp(max=settings.clip_delta) * advantage_M
    return -torch.minimum(plain_M, clipped_M), {"clip_fraction": is_clipped_M.sum()}


# ---- corrections


def tis(log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig) -> Tensor:
    """Truncated importance sampling per token: min(w, importance_cap).

    Ionides 2008, https://doi.org/10.1198/106186008X320456; for differing engine and trainer: Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl; with a clipped loss it is decoupled PPO,
    https://arxiv.org/abs/2505.24298.
    """
    return exp_ratio(log_weight_M).clamp(max=_cap(settings))


def tis_sequence(
    log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig
) -> Tensor:
    """Truncated importance sampling per sequence: min(product of w over the sequence, importance_cap), at
    each of its tokens.

    Unbiased except for the truncation, unlike token weights. https://arxiv.org/abs/2510.26788.
    """
    return tis(sequence_sum(log_weight_M, sequence_M), advantage_M, sequence_M, settings)


def mis(log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig) -> Tensor:
    """Masked importance sampling per token: w, or 0 above importance_cap.

    https://arxiv.org/abs/2510.26788.
    """
    weight_M = exp_ratio(log_weight_M)
    return torch.where(weight_M <= _cap(settings), weight_M, 0.0)


def mis_sequence(
    log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig
) -> Tensor:
    """Masked importance sampling per sequence: the product of w over it, or 0 above importance_cap.

    https://arxiv.org/abs/2510.26788.
    """
    return mis(sequence_sum(log_weight_M, sequence_M), advantage_M, sequence_M, settings)


def icepop(
    log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig
) -> Tensor:
    """Two-sided masking per token: w, or 0 below ICEPOP_FLOOR or above importance_cap.

    Ring-1T, https://arxiv.org/abs/2510.18855; INTELLECT-3, https://arxiv.org/abs/2512.16144, equation 1 (0.5
    and 5).
    """
    weight_M = mis(log_weight_M, advantage_M, sequence_M, settings)
    return torch.where(weight_M >= ICEPOP_FLOOR, weight_M, 0.0)


def m2po(log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, settings: AlgorithmConfig) -> Tensor:
    """1 or 0: masks tokens of largest (log w)^2 until the mean of the rest is at most M2_LIMIT. No other
    weight.

    Counts and masks only tokens that moved in the direction of their advantage (A > 0 and w > 1, or A < 0 and
    w < 1): a step on any other token reverts its move, and PPO's clip keeps those too. Needs all M tokens of
    an optimizer step. Second-moment trust policy optimisation, https://arxiv.org/abs/2510.01161 (0.04); token
    selection from its authors' code, https://github.com/Infini-AI-Lab/M2PO.
    """
    (counted_K,) = (log_weight_M.sign() * advantage_M.sign() > 0).nonzero(as_tuple=True)
    moment_K, order_K = log_weight_M[counted_K].double().square().sort(stable=True)
    count_K = torch.arange(1, len(moment_K) + 1, device=moment_K.device)
    mean_K = moment_K.cumsum(0) / count_K  # of the smallest 1, 2, 3...
    weight_M = torch.ones_like(log_weight_M)
    weight_M[counted_K[order_K[mean_K > M2_LIMIT]]] = 0.0
    return weight_M


def _cap(settings: AlgorithmConfig) -> float:
    assert settings.importance_cap != "auto", "the objective puts a number there"
    return settings.importance_cap


def log_of_weight(weight_M: Tensor) -> Tensor:
    """Return the log of a correction, log 1e-8 for masked tokens, like TRL. float32 [M]."""
    return weight_M.log().clamp(SMALLEST_LOG, LARGEST_LOG_RATIO)


# ---- masks: 0 excludes a token's surrogate from the loss. KL and divisors stay.


def off_policy_mask(
    current_M: Tensor, behaviour_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, limit: float
) -> Tensor:
    """Return 0 for tokens with negative advantage in sequences whose mean of behaviour - current exceeds
    `limit` nats.

    Negative samples far from the current policy teach little and destabilize it. Off-policy sequence masking,
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, equation 9.
    """
    distance_M = sequence_mean(behaviour_M - current_M.detach(), sequence_M)
    return ((advantage_M >= 0) | (distance_M <= limit)).float()


def top_entropy_mask(entropy_M: Tensor, share: float) -> Tensor:
    """Return 1 for tokens at or above the (1 - share) quantile of the step's entropies; at least one.

    Beyond the 80/20 rule, https://arxiv.org/abs/2506.01939 (0.2). The quantile is interpolated like
    torch.quantile, which is limited to 16 million elements.
    """
    if not len(entropy_M):
        return torch.ones_like(entropy_M)
    below = math.ceil(
        round((1.0 - share) * (len(entropy_M) - 1), 6)
    )  # rounded: 0.8 * 10 may be 8.000000000001
    return (entropy_M >= entropy_M.kthvalue(below + 1).values).float()


# ---- KL, and interpolated policies


def kl(current_M: Tensor, reference_M: Tensor, estimator: str) -> Tensor:
    """Return a token-level estimate of KL(current || reference), float32 [M] in nats, with gradient only
    through current_M.

    With d = reference - current: k1 = -d, unbiased, can be negative; k2 = d^2 / 2, low variance, biased; k3 =
    exp(d) - d - 1, unbiased, never negative. http://joschu.net/blog/kl-approx.html. That concerns values. As
    a loss without weighted_kl, only k2 has the KL's gradient (k1's has mean 0):
    https://arxiv.org/abs/2506.09477.
    """
    difference_M = reference_M.detach() - current_M
    match estimator:
        case "k1":
            return -difference_M
        case "k2":
            return difference_M.square() / 2
    return difference_M.clamp(max=LARGEST_LOG_RATIO).exp() - difference_M - 1


def weighted_kl(current_M: Tensor, reference_M: Tensor, anchor_M: Tensor, estimator: str) -> Tensor:
    """Return kl() times r = exp(current - anchor), float32 [M]: for tokens that the anchor sampled, it
    estimates KL(current || reference) and its gradient, given the preceding tokens.

    With d = reference - current the gradient of r k3 is -r d times current's, which is the KL's; the gradient
    of r k1 is r (1 - d), whose 1 has mean 0. k2 has -d already, so there r has no gradient. DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, section 3.1; TRL's use_bias_correction_kl.
    """
    ratio_M = exp_ratio(current_M - anchor_M)
    return kl(current_M, reference_M, estimator) * (ratio_M.detach() if estimator == "k2" else ratio_M)


def kl_reward_penalty(
    policy_M: Tensor, reference_M: Tensor, sequence_M: Tensor, num_sequences: int
) -> Tensor:
    """Return the sum of k1 over each sequence, float32 [S] without gradient, to subtract from the reward with
    a coefficient.

    A sequence earns one reward; its tokens need not be adjacent. `policy_M`: logprobs by the weights before
    the batch. InstructGPT, https://arxiv.org/abs/2203.02155, equation 2.
    """
    return torch.zeros(num_sequences, device=policy_M.device).index_add(
        0, sequence_M, kl(policy_M, reference_M, "k1").detach()
    )


def distillation(behaviour_M: Tensor, teacher_M: Tensor) -> Tensor:
    """Return a teacher's token advantages: teacher - behaviour, float32 [M] without gradient.

    Its mean over samples is -KL(behaviour || teacher) per token: the policy gradient reduces the reverse KL,
    each token's own term. Clamped to LARGEST_LOG_RATIO, since a token that the teacher excludes would
    outweigh all others. On-policy distillation, GKD, https://arxiv.org/abs/2306.13649; as an advantage:
    Thinking Machines 2025, https://thinkingmachines.ai/blog/on-policy-distillation.
    """
    return (teacher_M - behaviour_M).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def interpolate(behaviour_M: Tensor, current_M: Tensor, staleness_M: Tensor) -> Tensor:
    """Return proximal logprobs between behaviour and current ones, float32 [M] without gradient: a *
    behaviour + (1 - a) * current.

    a = 1 / staleness, and 0 at staleness 0; `staleness_M` is the trainer's version - the token's, an integer.
    So a token one version old is clipped around its behaviour policy, a very old one around the current
    policy. A-3PO, https://arxiv.org/abs/2512.06547.
    """
    share_M = torch.where(staleness_M > 0, 1.0 / staleness_M.clamp(min=1), 0.0)
    return torch.lerp(current_M.detach(), behaviour_M, share_M)


# ---- ratios, sums over a sequence, and weights


def exp_ratio(log_ratio_M: Tensor) -> Tensor:
    """Return the probability ratio of a difference of logprobs, per token or sequence. float32 [M]."""
    return log_ratio_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_sum(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """Return each token's sum over its sequence. float32 [M]."""
    # Space for M sequences avoids asking the device for their number.
    return torch.zeros_like(value_M).index_add(0, sequence_M, value_M)[sequence_M]


def sequence_mean(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """Return each token's mean over its sequence. float32 [M]."""
    return sequence_sum(value_M, sequence_M) / sequence_sum(torch.ones_like(value_M), sequence_M)


def token_weights(aggregate: str, tokens_S: Tensor, max_tokens: int) -> Tensor:
    """Return float32 [S]: factors for the loss tokens of each sequence, so that the plain sum is the step's
    loss.

    `tokens_S` int64: loss tokens of all the step's sequences; a sequence without has weight 0 and is excluded
    from num_sequences. `max_tokens` is rollout.max_tokens. By `aggregate`:

        token         1 / num_loss_tokens               DAPO, https://arxiv.org/abs/2503.14476
        sequence      1 / (num_sequences * its tokens)  GRPO, https://arxiv.org/abs/2402.03300
        sequence_sum  1 / num_sequences                 LUSPO, https://arxiv.org/abs/2602.05261
        constant      1 / (num_sequences * max_tokens)  Dr. GRPO, https://arxiv.org/abs/2503.20783
    """
    num_sequences = (tokens_S > 0).sum()
    divisor_S = {
        "token": tokens_S.sum().expand_as(tokens_S),
        "sequence": num_sequences * tokens_S,
        "sequence_sum": num_sequences.expand_as(tokens_S),
        "constant": (num_sequences * max_tokens).expand_as(tokens_S),
    }[aggregate]
    return torch.where(tokens_S > 0, 1.0 / divisor_S.clamp(min=1).double(), 0.0).float()
