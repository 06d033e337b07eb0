"""Advantages from the rewards of a batch: one number per sample, shared by its tokens.
gae has one per token.

All functions but checked_advantages, gae, whitened, gigpo and turn_rloo take `reward_B`
float64, finite, and `group_B` int64 (0 to num_groups - 1), and return float64 [B]. In
float32, rewards near 1e9 would be rounded to multiples of 64. If all compared rewards
are equal, the advantage is exactly 0. Standard deviations are of the population, except
in grpo_sample and lite_ppo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asyncrl.algorithms.losses import sequence_sum
from asyncrl.base.errors import ConfigError
from asyncrl.config import AlgorithmConfig

EPSILON = 1e-4
"""Added to the standard deviation, in units of reward, so that pure noise stays small.
"""


def checked_advantages(given: Any, reward_B: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return what an advantage function gave, as a tensor [B]. Raises ConfigError."""
    # It may be a user's function (module:function). Another shape would give tokens the
    # advantages of others, and one NaN would spoil all weights.
    is_one_each = isinstance(given, Tensor) and given.shape == reward_B.shape
    if not (is_one_each and torch.isfinite(given).all()):
        raise ConfigError(
            f"algorithm.advantage={config.advantage} returned {given}",
            rule="it returns a finite tensor, one advantage a reward",
            way_out="correct the function, or set algorithm.advantage=grpo.",
        )
    advantage_B: Tensor = given.detach()
    return advantage_B


def unchanged(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Return the rewards: demonstrations have the reward 1."""
    return reward_B


def grpo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Normalize within the group: (reward - mean) / (std + EPSILON).

    DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.
    """
    # Population, as in the paper. At group size 2 the two kinds differ by a factor of
    # 1.41.
    centred_B, size_B = _centred(reward_B, group_B)
    std_B = (sequence_sum(centred_B.square(), group_B) / size_B).sqrt()
    return centred_B / (std_B + EPSILON)


def grpo_sample(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Compute grpo with the sample standard deviation (divisor size - 1), like TRL."""
    centred_B, size_B = _centred(reward_B, group_B)
    std_B = (
        # A group of one rollout has no deviation: 0 / 0 without the clamp.
        sequence_sum(centred_B.square(), group_B) / (size_B - 1).clamp(min=1)
    ).sqrt()
    return centred_B / (std_B + EPSILON)


def lite_ppo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Center within the group and divide by the batch's sample standard deviation of
    rewards, like TRL.

    Lite PPO, https://arxiv.org/abs/2508.08221.
    """
    square_B = (reward_B - reward_B.mean()).square()
    std = square_B.sum().div(max(len(reward_B) - 1, 1)).sqrt()
    return _centred(reward_B, group_B)[0] / (std + EPSILON)


def dr_grpo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Center within the group: reward - mean. Use with algorithm.aggregate=constant.

    Understanding R1-Zero-like training, https://arxiv.org/abs/2503.20783.
    """
    return _centred(reward_B, group_B)[0]


def rloo(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Subtract the mean of the group's others: size / (size - 1) * dr_grpo.

    REINFORCE leave-one-out, https://arxiv.org/abs/2402.14740.
    """
    centred_B, size_B = _centred(reward_B, group_B)
    return centred_B * size_B / (size_B - 1).clamp(min=1)


def reinforce_pp(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Normalize over the batch, without groups.

    REINFORCE++, https://arxiv.org/abs/2501.03262. The paper normalizes over tokens;
    here every sample counts once. With kl_in=reward the paper's token t has the reward
    minus the KL from t on; here each token has the reward minus the sample's whole KL.
    """
    # All samples of the batch are one group, so prompts of unequal difficulty are
    # compared.
    return grpo(reward_B, torch.zeros_like(group_B))


def reinforce_pp_baseline(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Center within the group and normalize over the batch: centered / (std of centered
    + EPSILON).

    REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262.
    """
    # Centered rewards have mean 0 over the batch, so the root of their mean square is
    # their standard deviation.
    centred_B = dr_grpo(reward_B, group_B)
    return centred_B / (centred_B.square().mean().sqrt() + EPSILON)


def normalize_then_sum(
    value_KB: Tensor,
    weight_KB: Tensor,
    group_B: Tensor,
    advantage: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Compare K parts of a reward each by itself, sum the results by their weights, and
    normalize them over the batch: (sum - mean) / (sample std + EPSILON), float64 [B].

    `value_KB`, `weight_KB` float64; NaN is a part that does not apply to a sample: it
    adds 0, and the others are compared without it. With grpo_sample like TRL's
    normalize_then_sum. GDPO, https://arxiv.org/abs/2601.05242, equations 4 to 6.
    """
    sum_B = torch.zeros_like(value_KB[0])
    for value_B, weight_B in zip(value_KB, weight_KB, strict=True):
        has_B = ~value_B.isnan()
        _, group_P = torch.unique(group_B[has_B], return_inverse=True)
        compared_P = advantage(value_B[has_B], group_P)
        sum_B[has_B] += weight_B[has_B] * compared_P
    # All samples of the batch are one group.
    return lite_ppo(sum_B, torch.zeros_like(group_B))


@dataclass(frozen=True)
class Turns:
    """The B turns of R rollouts, all int64.

    `rollout_B`: 0 to R - 1. `turn_B`: place in the rollout, from 0, without gaps.
    `group_R`: group of each rollout. `state_B`: equal for turns of a group that started
    from the same state.
    """

    rollout_B: Tensor
    turn_B: Tensor
    group_R: Tensor
    state_B: Tensor

    def table(self, value_B: Tensor) -> Tensor:
        """Return float64 [R, T]: the values by rollout and turn, 0 after its end."""
        num_turns = int(self.turn_B.max()) + 1
        value_RT = value_B.new_zeros(len(self.group_R), num_turns).double()
        value_RT[self.rollout_B, self.turn_B] = value_B.double()
        return value_RT


def rewards_to_go(reward_B: Tensor, turns: Turns, discount: float) -> Tensor:
    """Return G_t = reward_t + discount * G_t+1 of each turn, float64 [B].

    A turn cannot change the rewards before it, so leaving them out takes variance from
    the policy gradient and no part of its mean. Sutton and Barto, Reinforcement
    Learning, second edition, section 13.3.
    """
    to_go_RT = turns.table(reward_B)
    for turn in reversed(range(to_go_RT.shape[1] - 1)):
        to_go_RT[:, turn] += discount * to_go_RT[:, turn + 1]
    return to_go_RT[turns.rollout_B, turns.turn_B]


def turn_rloo(to_go_B: Tensor, turns: Turns) -> Tensor:
    """Subtract the mean of the group's other rollouts at the same turn, float64 [B].

        advantage_i,t = G_i,t - mean over j != i of G_j,min(t, last turn of j)

    The baseline has no action of rollout i in it, so it takes nothing from the mean of
    the gradient, however the histories differ. The mean over the rollouts that have a
    turn t, i among them, does: it shrinks the gradient of turn t by 1 - 1/n_t, and late
    turns, which few rollouts reach, more than early ones. A group of one rollout gets
    0. With one reward at the end and discount 1, this is rloo.

    REINFORCE leave-one-out, https://arxiv.org/abs/2402.14740, for each turn.
    """
    to_go_RT = turns.table(to_go_B)
    last_R = torch.zeros_like(turns.group_R).scatter_reduce(
        0, turns.rollout_B, turns.turn_B, "amax"
    )
    column_T = torch.arange(to_go_RT.shape[1])
    held_RT = to_go_RT.gather(1, torch.minimum(column_T, last_R[:, None]))
    size_R = turns.group_R.bincount()[turns.group_R]
    # From the lowest of the group: equal rewards then give exactly 0, see _centred().
    index_RT = turns.group_R[:, None].expand_as(held_RT)
    lowest_RT = torch.zeros_like(held_RT).scatter_reduce(
        0, index_RT, held_RT, "amin", include_self=False
    )[turns.group_R]
    above_RT = held_RT - lowest_RT
    sum_RT = torch.zeros_like(held_RT).index_add(0, turns.group_R, above_RT)
    others_RT = sum_RT[turns.group_R] - above_RT
    advantage_RT = above_RT - others_RT / (size_R - 1).clamp(min=1)[:, None]
    return advantage_RT[turns.rollout_B, turns.turn_B]


def gigpo(reward_B: Tensor, to_go_B: Tensor, turns: Turns) -> Tensor:
    """Return grpo of the rollouts' sums of rewards, plus grpo of the rewards to go of
    turns from the same state, float64 [B].

    A state that no other turn of the group shares adds 0. GiGPO,
    https://arxiv.org/abs/2505.10978, with the standard deviation as its F_norm.
    """
    sum_R = turns.table(reward_B).sum(1)
    of_rollout_B = grpo(sum_R, turns.group_R)[turns.rollout_B]
    return of_rollout_B + grpo(to_go_B, turns.state_B)


def gae(
    reward_M: Tensor,
    value_M: Tensor,
    length_S: Tensor,
    discount: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return (advantage, return) of each sampled token, float64 [M], without whitening.

    `reward_M` and `value_M`: of the M sampled tokens of S sequences, one after the
    other; the value is that of the state before the token. `length_S` int64: sampled
    tokens of each sequence. What others wrote between two of them is part of the next
    state.

        delta_t = reward_t + discount * value_t+1 - value_t
        advantage_t = delta_t + discount * lambda * advantage_t+1
        return_t = advantage_t + value_t

    Behind the last token value and advantage are 0. GAE,
    https://arxiv.org/abs/1506.02438, equation 16.
    """
    lengths = length_S.tolist()
    reward_TS = pad_sequence([*torch.split(reward_M.double(), lengths)])
    value_TS = pad_sequence([*torch.split(value_M.double(), lengths)])
    advantage_TS = torch.zeros_like(value_TS)
    # Behind its end a shorter sequence has rewards and values of 0, so its advantages
    # there are 0 too.
    next_value_S = torch.zeros_like(value_TS[0])
    advantage_S = torch.zeros_like(value_TS[0])
    for step in reversed(range(len(value_TS))):
        delta_S = reward_TS[step] + discount * next_value_S - value_TS[step]
        advantage_S = delta_S + discount * gae_lambda * advantage_S
        advantage_TS[step] = advantage_S
        next_value_S = value_TS[step]
    position_T1 = torch.arange(len(value_TS))[:, None]
    is_token_TS = position_T1 < length_S
    # Transposed, or the tokens of all sequences would alternate.
    advantage_M = advantage_TS.t()[is_token_TS.t()]
    return advantage_M, advantage_M + value_M


def whitened(advantage_M: Tensor) -> Tensor:
    """Return (advantage - mean) / sqrt(variance + 1e-8), with the sample variance, like
    `masked_whiten` of TRL and verl.
    """
    # As in _centred(): the mean of equal numbers may round, and the division by a
    # deviation of nearly 0 would make a whole step of the rest.
    if advantage_M.min() == advantage_M.max():
        return torch.zeros_like(advantage_M)
    centred_M = advantage_M - advantage_M.mean()
    num_others = max(len(advantage_M) - 1, 1)
    variance = centred_M.square().sum() / num_others
    return centred_M * torch.rsqrt(variance + 1e-8)


def _centred(reward_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return (reward - mean of the group, size of the group), float64 [B] both."""
    size_B = sequence_sum(torch.ones_like(reward_B), group_B)
    centred_B = reward_B - sequence_sum(reward_B, group_B) / size_B
    # The mean of equal rewards may round: three times 0.9 has a mean of 0.8999999. So
    # equality is tested, and such a group has no gradient at all.
    lowest_B, highest_B = (
        torch.zeros_like(reward_B).scatter_reduce(
            0, group_B, reward_B, how, include_self=False
        )[group_B]
        for how in ("amin", "amax")
    )
    return torch.where(lowest_B == highest_B, 0.0, centred_B), size_B


def overlong_penalty(length_B: Tensor, max_tokens: int, overlong_tokens: int) -> Tensor:
    """Return float32 [B]: 0 up to max_tokens - overlong_tokens, linear down to -1 at
    max_tokens and beyond.

    `length_B` int64, sampled tokens; overlong_tokens from 1 to max_tokens. DAPO,
    https://arxiv.org/abs/2503.14476, equation 13.
    """
    return ((max_tokens - overlong_tokens - length_B).float() / overlong_tokens).clamp(
        -1.0, 0.0
    )
