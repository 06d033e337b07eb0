"""Section `algorithm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
)

from asyncrl.config.fields import (
    Fraction,
    FrozenConfig,
    NotWith,
    OnlyWith,
    PositiveFraction,
)

GROUP_ADVANTAGES = (
    "grpo",
    "grpo_sample",
    "lite_ppo",
    "dr_grpo",
    "rloo",
    "leave_one_out",
    "reinforce_pp_baseline",
    "gigpo",
)
TURN_ADVANTAGES = ("rloo", "leave_one_out", "gigpo")
"""Built-in advantages that credit turns with what follows them."""

NOT_PER_PART = ("dr_grpo", "rloo", "leave_one_out", "gigpo", "gae")
"""Advantages of whose parts a sum is the advantage of the sum, or that are of tokens."""


class AlgorithmConfig(FrozenConfig):
    """Advantages and loss (docs/algorithms.md)."""

    advantage: str = "grpo"
    """Built-in name (grpo, grpo_sample, lite_ppo, dr_grpo, rloo, leave_one_out,
    reinforce_pp, reinforce_pp_baseline, gigpo, gae) or `module:function`. gae needs
    `critic`, gigpo needs `turn_discount`.
    """
    rewards: Annotated[
        Literal["sum", "normalize_then_sum"],
        NotWith("advantage", NOT_PER_PART),
        NotWith("turn_discount"),
        NotWith("overlong_tokens"),
        NotWith("kl_in", ("reward",)),
        NotWith("reward_weight", (0,)),
    ] = "sum"
    """Several parts of a reward: compare their sum, or compare each part by itself, sum
    the results by the parts' weights, and normalize them over the batch (GDPO).
    """
    loss: str = "ppo_clip"
    """Built-in name (ppo_clip, dapo, decoupled_ppo, reinforce, tis, mis, icepop, cispo,
    gspo, luspo, vespo, age_clip, m2po) or `module:function`.
    """
    ratio: Literal["auto", "behaviour", "proximal"] = "auto"
    """Policy in the denominator of the loss's ratio (auto = as in the loss's paper)."""
    correction: Literal[
        "auto",
        "none",
        "tis",
        "tis_sequence",
        "mis",
        "mis_sequence",
        "icepop",
        "age_clip",
        "m2po",
    ] = "auto"
    """Weight of the step from behaviour to proximal policy: truncated (tis) or masked
    (mis) importance weights per token or sequence, icepop, m2po, or a clip range that
    grows with a token's age (age_clip) (auto = as in the loss's paper).
    """
    aggregate: Literal["auto", "token", "sequence", "sequence_sum", "constant"] = "auto"
    """Mean over tokens, over sequences of their token means (sequence) or token sums
    (sequence_sum), or sum over sequences * rollout.max_tokens (constant) (auto = as in
    the loss's paper).
    """
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The probability ratio is clipped above 1 + clip_high."""
    clip_delta: float | None = Field(default=None, gt=1)
    """Two-sided clip: maximum ratio of a token with a negative advantage; above 1 +
    clip_high (none = off).
    """
    off_policy_mask: PositiveFloat | None = None
    """Off-policy sequence masking: mask tokens with a negative advantage if their
    sequence's mean of behaviour - current logprob exceeds this, in nats (none = off).
    """
    top_entropy: PositiveFraction = 1.0
    """Train only this fraction of a step's loss tokens, with the highest entropy (1 =
    all).
    """
    importance_cap: PositiveFloat | Literal["auto"] = "auto"
    """Largest importance weight towards the behaviour policy (tis, mis, icepop,
    decoupled_ppo) (auto = 5 for the correction icepop, else 2).
    """
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """Proximal logprobs: recomputed with the weights before the batch, or interpolated
    between behaviour and current by staleness.
    """
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the initial weights (0 = off)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence (http://joschu.net/blog/kl-approx.html)."""
    kl_weighted: bool = True
    """Multiply the KL term by the importance weight, so that its gradient is the
    current policy's KL on stale data.
    """
    kl_in: Annotated[Literal["loss", "reward"], NotWith("reward_weight", (0,))] = "loss"
    """Add the KL term to each token's loss, or subtract it from the reward (estimator
    k1).
    """
    distill_weight: NonNegativeFloat = 0.0
    """Weight of the distance to the teacher: in advantages, or in the loss for a
    distill_loss over the teacher's likeliest tokens (0 = off).
    """
    distill_loss: Annotated[
        Literal["reverse_kl", "forward_kl", "topk_reverse_kl", "jsd"],
        OnlyWith("distill_weight"),
    ] = "reverse_kl"
    """Distance to the teacher: KL(student || teacher) or KL(teacher || student) by
    sampled tokens; or KL(student || teacher) or the generalised JSD over the teacher's
    likeliest tokens and one bucket for all others.
    """
    distill_top_k: Annotated[
        int, Field(ge=1, le=1024), OnlyWith("distill_loss", ("topk_reverse_kl", "jsd"))
    ] = 16
    """The teacher's likeliest tokens that topk_reverse_kl and jsd compare."""
    distill_beta: Annotated[Fraction, OnlyWith("distill_loss", ("jsd",))] = 0.5
    """Beta of jsd: 0 is KL(teacher || student), 1 KL(student || teacher)."""
    reward_weight: NonNegativeFloat = 1.0
    """Weight of the reward's advantage (0 = only distillation)."""
    router_replay: bool = False
    """Route each token to the experts that the engine used (R3,
    https://arxiv.org/abs/2510.11370).
    """
    overlong_tokens: Annotated[NonNegativeInt, NotWith("reward_weight", (0,))] = 0
    """Samples longer than rollout.max_tokens - overlong_tokens are penalised, linearly by up to 1 (0 =
    off)."""
    gae_lambda: Annotated[Fraction, OnlyWith("advantage", ("gae",))] = 0.95
    """Lambda of gae: 0 trusts the critic's next value, 1 the rewards that followed."""
    discount: Annotated[PositiveFraction, OnlyWith("advantage", ("gae",))] = 1.0
    """Discount of gae per sampled token."""
    whiten_advantages: Annotated[bool, OnlyWith("advantage", ("gae",))] = True
    """Give the advantages of gae mean 0 and deviation 1 over the batch's loss tokens.
    """
    turn_discount: Fraction | None = None
    """Credit each turn of an agent with its own and all later rewards, discounted by
    this per turn. For rloo, gigpo and `module:function` (none = one reward per rollout,
    or a turn's own).
    """

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def num_distill_ids(self) -> int:
        """The ids that distillation compares at each token (0: only the sampled one)."""
        is_over_ids = self.distill_loss in ("topk_reverse_kl", "jsd")
        return self.distill_top_k if self.distill_weight > 0 and is_over_ids else 0

    def conflicts(self) -> Iterator[str]:
        # The reward is one number per rollout, so the penalty is a sum over its tokens.
        # Only the sum of k1 is the log ratio of the whole answer.
        is_kl_in_reward = self.kl_coefficient > 0 and self.kl_in == "reward"
        if is_kl_in_reward and self.kl_estimator != "k1":
            yield f".kl_in=reward is estimator k1, not {self.kl_estimator}; set .kl_estimator=k1"
        if self.reward_weight == self.distill_weight == 0:
            yield (
                ".reward_weight=0 and .distill_weight=0 leave nothing to learn from; set .reward_weight=1"
            )
        # Masked tokens are states of gae too, and nobody computes their logprobs.
        if self.needs_critic and is_kl_in_reward:
            yield ".advantage=gae has no KL in its rewards; set .kl_in=loss"
        if self.needs_critic and self.reward_weight == 0:
            yield (
                ".advantage=gae with .reward_weight=0 trains a critic for nothing; set .reward_weight=1, or "
                ".advantage=grpo and critic=none"
            )
        is_known = self.advantage in TURN_ADVANTAGES or ":" in self.advantage
        if self.turn_discount is not None and not is_known:
            yield (
                f".turn_discount is for the advantages {', '.join(TURN_ADVANTAGES)} and module:function: "
                f"{self.advantage} would compare a turn with other turns of its rollout; set "
                ".advantage=rloo, or remove it"
            )
        if self.advantage == "gigpo" and self.turn_discount is None:
            yield ".advantage=gigpo needs .turn_discount; set .turn_discount=0.95, as in the paper"
