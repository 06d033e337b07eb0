"""Parts of the loss: surrogates, corrections for stale data, masks, KL, distillation,
and token weights.

Surrogates, including user losses (algorithm.loss=module:function), have the signature

    surrogate(tokens: LossTokens, settings: AlgorithmConfig) -> (loss_M, stats)

loss_M is float32 [M], undivided: token_weights divides. stats are sums over the M
tokens by name, without gradient; the caller divides them by the number of loss tokens.

Corrections weight each token's loss for data from another policy than the proximal one,
without gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.registry import ICEPOP_FLOOR
from asyncrl.config import AlgorithmConfig

TokenLoss = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class LossTokens:
    """The M loss tokens of a micro-batch; logprobs in nats at the sampling temperature."""

    current_M: Tensor
    """Logprobs by the trained weights, with gradient."""
    anchor_M: Tensor
    """Logprobs by the policy in the ratio's denominator (algorithm.ratio)."""
    behaviour_M: Tensor
    """Logprobs by the engine."""
    advantage_M: Tensor
    sequence_M: Tensor
    """int64, 0 to S-1, ascending."""


M2_LIMIT = 0.04
"""Maximum second moment of the log ratio under m2po, in nats squared."""
LARGEST_LOG_RATIO = 20.0
"""Log ratios are clamped to this many nats before exp: e^89 is infinite in float32, and
NaN when multiplied by 0.
"""
MOST_RATIO = 10.0
"""Largest weight of a token under forward_kl: it outweighs ten that the teacher excludes,
which have -1.
"""
SMALLEST_REST = 1e-7
"""Probability of all ids that are not chosen, at least: a sum of float32 is that far
from 1. TRL has the same.
"""
SMALLEST_LOG = math.log(1e-8)
"""Replaces the log of a weight of 0."""


def ppo_clip(tokens: LossTokens, settings: AlgorithmConfig) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(current - anchor);
    with clip_delta -min(min(r, clip_delta) A, clip(...) A).

    clip_fraction counts tokens whose gradient the clip removed. PPO,
    https://arxiv.org/abs/1707.06347, equation 7; unequal clips: DAPO,
    https://arxiv.org/abs/2503.14476, equation 10; clip_delta: two-sided clipping,
    INTELLECT-2, https://arxiv.org/abs/2505.07291.
    """
    return _clipped(
        exp_ratio(tokens.current_M - tokens.anchor_M), tokens.advantage_M, settings
    )


def gspo(tokens: LossTokens, settings: AlgorithmConfig) -> TokenLoss:
    """ppo_clip with one ratio per sequence, the geometric mean over its tokens: s =
    exp(mean(current - anchor)).

    Clip ranges are far smaller (3e-4 and 4e-4 in the paper). Use with
    algorithm.aggregate=sequence. https://arxiv.org/abs/2507.18071, equations 5 to 7.
    With aggregate=sequence_sum it is LUSPO, https://arxiv.org/abs/2602.05261.
    """
    log_ratio_M = (tokens.current_M - tokens.anchor_M).clamp(
        -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO
    )
    return _clipped(
        sequence_mean(log_ratio_M, tokens.sequence_M).exp(),
        tokens.advantage_M,
        settings,
    )


def cispo(tokens: LossTokens, settings: AlgorithmConfig) -> TokenLoss:
    """-min(r, 1 + clip_high) A current, r = exp(current - anchor) without gradient:
    clips the weight only.

    clip_fraction counts tokens with a clipped weight; clip_low is unused. MiniMax-M1,
    https://arxiv.org/abs/2506.13585, equations 4 and 5.
    """
    # Without gradient: unlike a clipped ratio, a truncated weight leaves every token
    # its gradient.
    ratio_M = exp_ratio(tokens.current_M.detach() - tokens.anchor_M)
    largest = 1.0 + settings.clip_high
    loss_M = -ratio_M.clamp(max=largest) * tokens.advantage_M * tokens.current_M
    return loss_M, {"clip_fraction": (ratio_M > largest).sum()}


def vespo(tokens: LossTokens, settings: AlgorithmConfig) -> TokenLoss:
    """-phi(W) A current, phi(W) = W^k exp(lambda (1 - W)) without gradient; W =
    exp(sum(current - anchor)), the ratio of the whole sequence.

    k reduces small ratios, lambda large ones, both by the sign of A. A correction is
    part of W: the caller subtracts it from anchor. https://arxiv.org/abs/2602.10693;
    the bounds of log W are TRL's.
    """
    log_ratio_M = tokens.current_M.detach() - tokens.anchor_M
    log_w_M = sequence_sum(log_ratio_M, tokens.sequence_M).clamp(
        SMALLEST_LOG, LARGEST_LOG_RATIO
    )
    is_negative_M = tokens.advantage_M < 0
    k_M = torch.where(is_negative_M, 3.0, 2.0)
    rate_M = torch.where(is_negative_M, 2.0, 3.0)
    phi_M = (
        (k_M * log_w_M + rate_M * (1.0 - log_w_M.exp()))
        .clamp(max=LARGEST_LOG_RATIO)
        .exp()
    )
    return -phi_M * tokens.advantage_M * tokens.current_M, {
        "sequence_weight": phi_M.sum()
    }


def reinforce(tokens: LossTokens, settings: AlgorithmConfig) -> TokenLoss:
    """-A current: the plain policy gradient. Stale data needs a correction
    (algorithm.loss=tis or mis).

    Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return -tokens.advantage_M * tokens.current_M, {}


def importance_ratio(tokens: LossTokens, settings: AlgorithmConfig) -> TokenLoss:
    """-r A, r = exp(current - anchor), unclipped; m2po masks extreme tokens.

    https://arxiv.org/abs/2510.01161.
    """
    return -exp_ratio(tokens.current_M - tokens.anchor_M) * tokens.advantage_M, {}


def _clipped(
    ratio_M: Tensor, advantage_M: Tensor, settings: AlgorithmConfig
) -> TokenLoss:
    plain_M = ratio_M * advantage_M
    clipped_M = (
        ratio_M.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantage_M
    )
    # Where the clipped term is the smaller one, the minimum is a constant and the token
    # has no gradient.
    is_clipped_M = clipped_M.detach() < plain_M.detach()
    if settings.clip_delta is not None:
        # With a negative advantage, the first clip does not bound large ratios: the
        # minimum takes the unclipped product. Without clip_delta, one such token may
        # dominate the step.
        is_clipped_M |= (ratio_M > settings.clip_delta) & (advantage_M < 0)
        plain_M = ratio_M.clamp(max=settings.clip_delta) * advantage_M
    return -torch.minimum(plain_M, clipped_M), {"clip_fraction": is_clipped_M.sum()}


def correct(
    correction: str,
    log_weight_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    cap: float,
) -> Tensor:
    """Return each token's weight by algorithm.correction, float32 [M], without
    gradient.

    With log_weight = proximal - behaviour and w = exp(log_weight):

        tis     min(w, cap)                     https://doi.org/10.1198/106186008X320456
        mis     w, or 0 above cap               https://arxiv.org/abs/2510.26788
        icepop  w, or 0 outside [floor, cap]    https://arxiv.org/abs/2510.18855
        m2po    m2po()

    _sequence takes the product of w over the sequence,
    https://arxiv.org/abs/2510.26788. tis with a clipped loss is decoupled PPO,
    https://arxiv.org/abs/2505.24298. All but m2po work on any subset of sequences.
    """
    if correction == "m2po":
        return m2po(log_weight_M, advantage_M)
    # A product of ratios is a sum of logs; exp_ratio clamps the sum, not each token.
    if correction.endswith("_sequence"):
        log_weight_M = sequence_sum(log_weight_M, sequence_M)
    weight_M = exp_ratio(log_weight_M)
    if correction.startswith("tis"):
        return weight_M.clamp(max=cap)
    floor = ICEPOP_FLOOR if correction == "icepop" else 0.0
    # Masked, not truncated: a weight this far off says that engine and trainer disagree
    # on the token, so its gradient is noise.
    return torch.where((weight_M >= floor) & (weight_M <= cap), weight_M, 0.0)


def age_clip(
    log_weight_M: Tensor, advantage_M: Tensor, age_M: Tensor, low: float, high: float
) -> Tensor:
    """1 or 0: masks tokens that left the region (1 - low)^k to (1 + high)^k in the
    direction of their advantage, k = 1 + age / 2. float32 [M].

    `age_M`: the trainer's version - the token's. A fixed clip around a policy of d steps
    ago limits the sum of d steps to the range of one, so that the run learns more
    slowly. docs/results/staleness.md measures it.

    Example: tokens that became 1.5 times as likely, with a positive advantage. The
    limits are 1.2^1 and 1.2^3 = 1.73.
        >>> age_clip(torch.tensor([1.5, 1.5]).log(), torch.ones(2), torch.tensor([0, 4]), 0.2, 0.2).tolist()
        [0.0, 1.0]
    """
    k_M = 1.0 + age_M / 2.0
    is_above_M = (log_weight_M > k_M * math.log1p(high)) & (advantage_M > 0)
    is_below_M = (log_weight_M < k_M * math.log1p(-low)) & (advantage_M < 0)
    return (~(is_above_M | is_below_M)).float()


def m2po(log_weight_M: Tensor, advantage_M: Tensor) -> Tensor:
    """1 or 0: masks tokens of largest (log w)^2 until the mean of the rest is at most
    M2_LIMIT.

    Only tokens that moved in the direction of their advantage count: steps on the
    others revert their move. Needs all M tokens of an optimizer step.

    Example: the squares are 0.01, 0.04 and 0.25; the last token moved against its
    advantage. The means of the smallest are 0.01, 0.025 and 0.1, above 0.04.
        >>> log_weight_M = torch.tensor([0.1, 0.2, 0.5, -0.5])
        >>> m2po(log_weight_M, torch.ones(4)).tolist()
        [1.0, 1.0, 0.0, 1.0]

    The rule is the paper's, https://arxiv.org/abs/2510.01161. The authors' code,
    https://github.com/Infini-AI-Lab/M2PO, counts the same tokens, but caps |log w| until
    the mean of the capped squares is at most M2_LIMIT and clips the ratio at that cap,
    so it clips more tokens than this function masks.
    """
    (counted_K,) = (log_weight_M.sign() * advantage_M.sign() > 0).nonzero(as_tuple=True)
    # double, because a sum over all tokens of a step loses small moments in float32.
    # stable, so that the same tokens are masked each time if moments are equal.
    moment_K, order_K = log_weight_M[counted_K].double().square().sort(stable=True)
    count_K = torch.arange(1, len(moment_K) + 1, device=moment_K.device)
    mean_K = moment_K.cumsum(0) / count_K
    weight_M = torch.ones_like(log_weight_M)
    # Sorted ascending, the running mean only rises. So this keeps the longest prefix
    # whose mean is within the limit.
    weight_M[counted_K[order_K[mean_K > M2_LIMIT]]] = 0.0
    return weight_M


def log_of_weight(weight_M: Tensor) -> Tensor:
    """Return the log of a correction, log 1e-8 for masked tokens, like TRL. float32
    [M].
    """
    return weight_M.log().clamp(SMALLEST_LOG, LARGEST_LOG_RATIO)


# ---- masks: 0 excludes a token's surrogate from the loss. KL and divisors stay.


def off_policy_mask(tokens: LossTokens, limit: float) -> Tensor:
    """Return 0 for tokens with negative advantage in sequences whose mean of behaviour
    - current exceeds `limit` nats.

    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, equation 9.
    """
    distance_M = sequence_mean(
        tokens.behaviour_M - tokens.current_M.detach(), tokens.sequence_M
    )
    return ((tokens.advantage_M >= 0) | (distance_M <= limit)).float()


def top_entropy_mask(entropy_M: Tensor, share: float) -> Tensor:
    """Return 1 for tokens at or above the (1 - share) quantile of the step's entropies;
    at least one.

    Beyond the 80/20 rule, https://arxiv.org/abs/2506.01939. torch.quantile is limited
    to 16 million elements.
    """
    if not len(entropy_M):
        return torch.ones_like(entropy_M)
    # Rounded, since (1 - 0.7) * 10 is 3.0000000000000004, and the ceiling would drop
    # one token more. kthvalue counts from 1.
    below = math.ceil(round((1.0 - share) * (len(entropy_M) - 1), 6))
    return (entropy_M >= entropy_M.kthvalue(below + 1).values).float()


def kl(current_M: Tensor, reference_M: Tensor, estimator: str) -> Tensor:
    """Return a token-level estimate of KL(current || reference), float32 [M] in nats,
    with gradient only through current_M.

    With d = reference - current: k1 = -d, unbiased; k2 = d^2 / 2, low variance, biased;
    k3 = exp(d) - d - 1, unbiased, never negative.
    http://joschu.net/blog/kl-approx.html. As a loss without weighted_kl, only k2 has
    the KL's gradient: https://arxiv.org/abs/2506.09477.
    """
    difference_M = reference_M.detach() - current_M
    match estimator:
        case "k1":
            return -difference_M
        case "k2":
            return difference_M.square() / 2
    # Beyond the clamp exp continues as its tangent. A constant would leave only the
    # gradient of -d, which lowers a probability that is far too low already.
    exp_M = difference_M.clamp(max=LARGEST_LOG_RATIO).exp()
    beyond_M = (difference_M - LARGEST_LOG_RATIO).clamp(min=0)
    return exp_M + exp_M.detach() * beyond_M - difference_M - 1


def weighted_kl(
    current_M: Tensor, reference_M: Tensor, anchor_M: Tensor, estimator: str
) -> Tensor:
    """Return kl() times r = exp(current - anchor), float32 [M]: on the anchor's tokens
    it estimates KL(current || reference) and its gradient.

    With d = reference - current the gradient of r k3 is -r d times current's; the
    gradient of r k1 is r (1
    - d), whose 1 has mean 0. k2 has -d already, so there r has no gradient.
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1; TRL's
    use_bias_correction_kl.
    """
    ratio_M = exp_ratio(current_M - anchor_M)
    kl_M = kl(current_M, reference_M, estimator)
    if estimator == "k1":
        return ratio_M * kl_M
    if estimator == "k2":
        return ratio_M.detach() * kl_M
    # Autograd would find -r d as the difference of two terms near r exp(d), which
    # cancel in float32 only for small d. So the gradient is written down.
    slope_M = ratio_M * (current_M - reference_M)
    step_M = current_M - current_M.detach()  # 0, with the gradient of current
    return (ratio_M * kl_M).detach() + slope_M.detach() * step_M


def kl_reward_penalty(
    policy_M: Tensor, reference_M: Tensor, sequence_M: Tensor, num_sequences: int
) -> Tensor:
    """Return the sum of k1 over each sequence, float32 [S] without gradient, to
    subtract from the reward.

    `policy_M`: logprobs by the weights before the batch. InstructGPT,
    https://arxiv.org/abs/2203.02155, equation 2.
    """
    return torch.zeros(num_sequences, device=policy_M.device).index_add(
        0, sequence_M, kl(policy_M, reference_M, "k1").detach()
    )


def value_loss(
    value_M: Tensor, old_value_M: Tensor, return_M: Tensor, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the critic's loss, float32 [M], undivided, and whether the clip decides it.

    0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2), as in
    TRL and verl: a value that has moved further than value_clip towards its return has
    no gradient. https://arxiv.org/abs/1707.06347
    """
    plain_M = (value_M - return_M).square()
    if value_clip is None:
        return 0.5 * plain_M, torch.zeros_like(plain_M, dtype=torch.bool)
    lowest_M = old_value_M - value_clip
    highest_M = old_value_M + value_clip
    clipped_M = (value_M.clamp(lowest_M, highest_M) - return_M).square()
    return 0.5 * torch.maximum(plain_M, clipped_M), clipped_M > plain_M


def distillation(behaviour_M: Tensor, teacher_M: Tensor, loss: str) -> Tensor:
    """Return a teacher's token advantages, float32 [M] without gradient.

    reverse_kl: teacher - behaviour; the policy gradient reduces KL(student || teacher),
    each token's own term. Clamped, since a token that the teacher excludes would
    outweigh all others. GKD, https://arxiv.org/abs/2306.13649; as an advantage: Thinking
    Machines 2025, https://thinkingmachines.ai/blog/on-policy-distillation.

    forward_kl: the gradient of KL(teacher || student) is -E[ratio * grad log student]
    over the student's samples, ratio = teacher / behaviour. Its mean is 1, which is
    subtracted as a baseline. MOST_RATIO bounds it, since a rare token that the teacher
    expects would outweigh all others.
    """
    log_ratio_M = teacher_M - behaviour_M
    log_ratio_M = log_ratio_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if loss == "forward_kl":
        return log_ratio_M.exp().clamp(max=MOST_RATIO) - 1.0
    return log_ratio_M


def divergence(
    student_E: Tensor,
    teacher_E: Tensor,
    token_E: Tensor,
    num_tokens: int,
    beta: float,
) -> Tensor:
    """Return the generalised JSD of student and teacher for each token, [num_tokens] in
    nats, with the student's gradient; 0 for a token without entries.

    beta 0: KL(teacher || student); 1: KL(student || teacher); between:
    beta * KL(teacher || m) + (1 - beta) * KL(student || m), m = (1 - beta) * student +
    beta * teacher, as in TRL. GKD, https://arxiv.org/abs/2306.13649, equation 1.

    `student_E`, `teacher_E`: logprobs over the whole vocabulary of the E chosen ids, in
    nats; `token_E` int64: their token. All other ids are one more outcome, with the
    rest of the probability. So this is a lower bound of the divergence over the
    vocabulary. Renormalised over the chosen ids, it would be blind to what the student
    gives to all others.
    """

    def rest(logprob_E: Tensor) -> Tensor:
        zeros_M = logprob_E.new_zeros(num_tokens)
        chosen_M = zeros_M.index_add(0, token_E, logprob_E.exp())
        return (1.0 - chosen_M).clamp(min=SMALLEST_REST).log()

    term_M = _divergence_terms(rest(student_E), rest(teacher_E), beta)
    return term_M.index_add(0, token_E, _divergence_terms(student_E, teacher_E, beta))


def _divergence_terms(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return teacher.exp() * (teacher - student)
    if beta == 1:
        return student.exp() * (student - teacher)
    mixture = torch.logaddexp(
        student + math.log1p(-beta),
        teacher + math.log(beta),
    )
    of_teacher = teacher.exp() * (teacher - mixture)
    of_student = student.exp() * (student - mixture)
    return beta * of_teacher + (1.0 - beta) * of_student


def interpolate(behaviour_M: Tensor, current_M: Tensor, staleness_M: Tensor) -> Tensor:
    """Return proximal logprobs a * behaviour + (1 - a) * current, float32 [M] without
    gradient.

    a = 1 / staleness, and 0 at staleness 0, where staleness is the trainer's version -
    the token's. A-3PO, https://arxiv.org/abs/2512.06547.
    """
    share_M = torch.where(staleness_M > 0, 1.0 / staleness_M.clamp(min=1), 0.0)
    return torch.lerp(current_M.detach(), behaviour_M, share_M)


def exp_ratio(log_ratio_M: Tensor) -> Tensor:
    """Return the probability ratio of a difference of logprobs, per token or sequence.
    float32 [M].
    """
    # Beyond the clamp the gradient is 0: nothing is learned from a token whose
    # probability changed by a factor of 5e8.
    return log_ratio_M.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_sum(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """Return each token's sum over its sequence. float32 [M]."""
    # Space for M sequences avoids a device sync.
    return torch.zeros_like(value_M).index_add(0, sequence_M, value_M)[sequence_M]


def sequence_mean(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """Return each token's mean over its sequence. float32 [M]."""
    return sequence_sum(value_M, sequence_M) / sequence_sum(
        torch.ones_like(value_M), sequence_M
    )


def num_averaged(aggregate: str, tokens_S: Tensor) -> int:
    """Return the number of tokens or sequences over which token_weights() is a mean."""
    counted = tokens_S if aggregate == "token" else tokens_S > 0
    return int(counted.sum())


def token_weights(aggregate: str, tokens_S: Tensor, max_tokens: int) -> Tensor:
    """Return float32 [S]: factors for the loss tokens of each sequence; the sum is the
    step's loss.

    `tokens_S` int64: loss tokens of the step's sequences; empty ones are excluded from
    num_sequences. By `aggregate`:

        token         1 / num_loss_tokens               DAPO, https://arxiv.org/abs/2503.14476
        sequence      1 / (num_sequences * its tokens)  GRPO, https://arxiv.org/abs/2402.03300
        sequence_sum  1 / num_sequences                 LUSPO, https://arxiv.org/abs/2602.05261
        constant      1 / (num_sequences * max_tokens)  Dr. GRPO, https://arxiv.org/abs/2503.20783

    In the paper num_sequences is a constant. Here it also depends on the policy if agents
    branch, or if sequences lose all their tokens to a mask.

    Example: sequences of 1 and 4 tokens. By token both have the weight of their length;
    by sequence each token of the short one counts four times as much.
        >>> token_weights("token", torch.tensor([1, 4]), 10).tolist()
        [0.20000000298023224, 0.20000000298023224]
        >>> token_weights("sequence", torch.tensor([1, 4]), 10).tolist()
        [0.5, 0.125]
    """
    # A sequence may have lost all its tokens to the staleness mask. It has no loss, so
    # it must not make the mean of the others smaller.
    num_sequences = (tokens_S > 0).sum()
    divisor_S = {
        "token": tokens_S.sum().expand_as(tokens_S),
        "sequence": num_sequences * tokens_S,
        "sequence_sum": num_sequences.expand_as(tokens_S),
        "constant": (num_sequences * max_tokens).expand_as(tokens_S),
    }[aggregate]
    # In double: a divisor like sequences * max_tokens passes 2^24, beyond which float32
    # rounds integers.
    return torch.where(tokens_S > 0, 1.0 / divisor_S.clamp(min=1).double(), 0.0).float()
