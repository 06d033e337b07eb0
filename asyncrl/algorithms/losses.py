"""What the loss is made of: surrogates, corrections for stale data, masks, KL, a teacher's advantages, and
the weights by which the losses of tokens become one number. None of them knows another.

Surrogates have one signature, which a loss of your own has too (algorithm.loss=module:function):

    surrogate(current_M, anchor_M, behaviour_M, advantage_M, sequence_M, settings) -> (loss_M, stats)

`current_M` logprobs by the weights being trained, with gradient; `anchor_M` without: those of the policy
below the line of the ratio, the behaviour or the proximal policy (algorithm.ratio); `behaviour_M` as reported
by the engine; `advantage_M`; `sequence_M` int64, 0 to S-1, ascending, whole sequences; `settings` is
asyncrl.config.AlgorithmConfig. loss_M is float32 [M] with gradient: one value a token, to be minimised, not
divided by anything (token_weights does that). stats are sums over the M tokens by name, scalars without
gradient: the caller divides them by the number of loss tokens.

Corrections, a weight on each token's loss for data of another policy than the proximal one, have another:

    correction(log_weight_M, advantage_M, sequence_M, settings) -> weight_M

`log_weight_M` = proximal - behaviour: logprobs by the trainer's weights before the batch, less those reported
by the engine. w = exp(log_weight) is the importance weight of what lies between them: staleness, and the
differences of two implementations. Nothing has a gradient. All but m2po give the same for a part of the
sequences as for all of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.config import AlgorithmConfig

TokenLoss = tuple[Tensor, dict[str, Tensor]]

LARGEST_LOG_RATIO = 20.0
"""Log ratios are clamped to so many nats before exp: e^20 = 5e8 is past every clip and cap, and e^89 is
infinite in float32, which times an advantage of 0, or a gradient of 0, would be NaN."""
SMALLEST_LOG = math.log(1e-8)
"""What stands for the log of a weight of 0."""

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
    equation 7; unequal clips: DAPO, https://arxiv.org/abs/2503.14476, equation 10; clip_delta bounds r where
    A is negative, two-sided clipping: INTELLECT-2, https://arxiv.org/abs/2505.07291.
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
    """ppo_clip with one ratio a sequence, the geometric mean of its tokens': s = exp(mean(current - anchor)),
    at each token.

    So a sequence is clipped as a whole, and clip ranges are far smaller (3e-4 and 4e-4 in the paper). Goes
    with algorithm.aggregate=sequence. https://arxiv.org/abs/2507.18071, equations 5 to 7. With
    aggregate=sequence_sum it is LUSPO, where a long sequence's tokens weigh no less:
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

    clip_fraction counts tokens whose weight was cut. There is no lower clip, as in the paper's experiments:
    clip_low is not used. MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5.
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

    phi(1) = 1; k weighs small ratios down, lambda large ones, both by the sign of A (vespo_positive,
    vespo_negative). sequence_weight is phi. A correction becomes part of W: the caller takes it off anchor.
    https://arxiv.org/abs/2602.10693; the bounds of log W, log 1e-8 and LARGEST_LOG_RATIO, are TRL's.
    """
    log_w_M = sequence_sum(current_M.detach() - anchor_M, sequence_M).clamp(SMALLEST_LOG, LARGEST_LOG_RATIO)
    (k, rate), (k_negative, rate_negative) = settings.vespo_positive, settings.vespo_negative
    is_negative_M = advantage_M < 0
    k_M = torch.where(is_negative_M, k_negative, k)
    rate_M = torch.where(is_negative_M, rate_negative, rate)
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
    """-A current: the plain policy gradient, no ratio. Stale data needs a correction beside it
    (algorithm.loss=tis or mis).

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
    """-r A, r = exp(current - anchor): no clip at all. m2po masks beside it what would go too far.

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
    """Truncated importance sampling a token: min(w, importance_cap).

    Ionides 2008, https://doi.org/10.1198/106186008X320456; for engine and trainer that differ: Yao et al.
    2025, https://fengyao.notion.site/off-policy-rl; beside a clipped loss it is decoupled PPO,
    https://arxiv.org/abs/2505.24298.
    """
    return exp_ratio(log_weight_M).clamp(max=_cap(settings))


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
    weight_M = exp_ratio(log_weight_M)
    return torch.where(weight_M <= _cap(settings), weight_M, 0.0)


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
    (counted_K,) = (log_weight_M.sign() * advantage_M.sign() > 0).nonzero(as_tuple=True)
    moment_K, order_K = log_weight_M[counted_K].double().square().sort(stable=True)
    count_K = torch.arange(1, len(moment_K) + 1, device=moment_K.device)
    mean_K = moment_K.cumsum(0) / count_K  # of the smallest 1, 2, 3...
    weight_M = torch.ones_like(log_weight_M)
    weight_M[counted_K[order_K[mean_K > settings.m2_limit]]] = 0.0
    return weight_M


def _cap(settings: AlgorithmConfig) -> float:
    assert settings.importance_cap != "auto", "the objective puts a number there"
    return settings.importance_cap


def log_of_weight(weight_M: Tensor) -> Tensor:
    """The logarithm of a correction, log 1e-8 where it masks, as in TRL. float32 [M]."""
    return weight_M.log().clamp(SMALLEST_LOG, LARGEST_LOG_RATIO)


# ---- masks: 0 where a token's surrogate is left out of the loss, else 1. KL stays, and so do the divisors.


def off_policy_mask(
    current_M: Tensor, behaviour_M: Tensor, advantage_M: Tensor, sequence_M: Tensor, limit: float
) -> Tensor:
    """0 where the advantage is negative and the mean of behaviour - current over the sequence is above
    `limit` nats.

    What the policy has moved away from, and is to avoid, teaches it little and upsets it most. Off-policy
    sequence masking, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, equation 9.
    """
    distance_M = sequence_mean(behaviour_M - current_M.detach(), sequence_M)
    return ((advantage_M >= 0) | (distance_M <= limit)).float()


def top_entropy_mask(entropy_M: Tensor, share: float) -> Tensor:
    """1 for the tokens at or above the (1 - share) quantile of the entropies of all tokens of an optimizer
    step; at least one.

    Beyond the 80/20 rule, https://arxiv.org/abs/2506.01939 (0.2). Between two tokens the quantile is
    interpolated, as torch.quantile does, which takes no more than 16 million.
    """
    if not len(entropy_M):
        return torch.ones_like(entropy_M)
    below = math.ceil(
        round((1.0 - share) * (len(entropy_M) - 1), 6)
    )  # rounded: 0.8 * 10 may be 8.000000000001
    return (entropy_M >= entropy_M.kthvalue(below + 1).values).float()


# ---- KL, and the policy between two


def kl(current_M: Tensor, reference_M: Tensor, estimator: str) -> Tensor:
    """KL(current || reference) estimated at each token, float32 [M] in nats, with gradient through current_M
    alone.

    With d = reference - current: k1 = -d, unbiased, can be negative; k2 = d^2 / 2, low variance, biased; k3 =
    exp(d) - d - 1, unbiased, never negative. http://joschu.net/blog/kl-approx.html. That holds for the
    values. As a loss without weighted_kl, k2 is the one whose gradient is that of the KL (k1's has mean 0):
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
    """kl() times r = exp(current - anchor), float32 [M]: of tokens that the anchor sampled, the estimate of
    KL(current || reference), and with it its gradient, given what stands before the token.

    With d = reference - current the gradient of r k3 is -r d times that of current, the KL's; that of r k1 is
    r (1 - d), whose 1 has mean 0. k2 has -d already, so there r has no gradient. DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556, section 3.1; TRL's use_bias_correction_kl.
    """
    ratio_M = exp_ratio(current_M - anchor_M)
    return kl(current_M, reference_M, estimator) * (ratio_M.detach() if estimator == "k2" else ratio_M)


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


def distillation(behaviour_M: Tensor, teacher_M: Tensor) -> Tensor:
    """The advantage of a token that a teacher gives it: teacher - behaviour, float32 [M] without gradient.

    In the mean over what the policy samples that is -KL(behaviour || teacher), token by token: its policy
    gradient follows the reverse KL down, each token's own term alone. Clamped to LARGEST_LOG_RATIO: one token
    that the teacher holds for impossible would outweigh all others. On-policy distillation, GKD,
    https://arxiv.org/abs/2306.13649; as an advantage: Thinking Machines 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation.
    """
    return (teacher_M - behaviour_M).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def interpolate(behaviour_M: Tensor, current_M: Tensor, staleness_M: Tensor) -> Tensor:
    """Proximal logprobs between behaviour and current ones, float32 [M] without gradient: a * behaviour + (1
    - a) * current.

    a = 1 / staleness, and 0 at staleness 0; `staleness_M` is the trainer's version - the token's, an integer.
    So a token one version old is clipped around its behaviour policy, a very old one around where the policy
    stands. A-3PO, https://arxiv.org/abs/2512.06547.
    """
    share_M = torch.where(staleness_M > 0, 1.0 / staleness_M.clamp(min=1), 0.0)
    return torch.lerp(current_M.detach(), behaviour_M, share_M)


# ---- ratios, sums over a sequence, and weights


def exp_ratio(log_ratio_M: Tensor) -> Tensor:
    """How much more probable a token, or all of a sequence, is under one policy than under another: exp of a
    difference of logprobs. float32 [M].
    """
    return log_ratio_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_sum(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """The sum over its sequence, at every token. float32 [M]."""
    # The buffer has room for M sequences, of which there are at most that many: no need to ask the device how
    # many there are.
    return torch.zeros_like(value_M).index_add(0, sequence_M, value_M)[sequence_M]


def sequence_mean(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """The mean over its sequence's tokens, at every token. float32 [M]."""
    return sequence_sum(value_M, sequence_M) / sequence_sum(torch.ones_like(value_M), sequence_M)


def token_weights(aggregate: str, tokens_S: Tensor, max_tokens: int) -> Tensor:
    """float32 [S]: what every loss token of a sequence is multiplied with, so that the plain sum is the loss
    of an optimizer step.

    `tokens_S` int64, loss tokens of all the step's sequences; one without has weight 0, and is not among
    num_sequences. `max_tokens` is rollout.max_tokens. By `aggregate`:

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
