"""The losses of the protocol (https://tinker-docs.thinkingmachines.ai/losses). Each is a
sum over tokens; nothing divides.

Notation: lp = logprob of a target token, q = its logprob at sampling, A = its advantage,
r = exp(lp - q), sg = stop-gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.base.http import Refused

OF_SERVER = {"max_staleness", "on_overdue"}
"""Keys of loss_fn_config that the server reads."""
BOUNDS = ("clip_low_threshold", "clip_high_threshold")

Config = Mapping[str, float]


class ScoredTargets(NamedTuple):
    """M target tokens of whole datums, float64. `datum_M` int64: the number of each
    token's datum.
    """

    lp_M: Tensor
    inputs: Mapping[str, Tensor]
    datum_M: Tensor

    @property
    def advantages(self) -> Tensor:
        """Return A [M]."""
        return self.inputs["advantages"]

    @property
    def changes(self) -> Tensor:
        """Return lp - q [M], and 0 where the advantage is 0: a prompt's q means nothing."""
        change_M = self.lp_M - self.inputs["logprobs"]
        return torch.where(self.advantages == 0, 0.0, change_M)


def cross_entropy(tokens: ScoredTargets, config: Config) -> Tensor:
    """Return -w lp."""
    return -tokens.inputs["weights"] * tokens.lp_M


def importance_sampling(tokens: ScoredTargets, config: Config) -> Tensor:
    """Return -r A."""
    return -tokens.changes.exp() * tokens.advantages


def ppo(tokens: ScoredTargets, config: Config) -> Tensor:
    """Return -min(r A, clip(r) A) (https://arxiv.org/abs/1707.06347). The thresholds are
    bounds of r itself.
    """
    return _clipped(tokens.changes.exp(), tokens.advantages, config)


def cispo(tokens: ScoredTargets, config: Config) -> Tensor:
    """Return -sg(clip(r)) lp A (https://arxiv.org/abs/2506.13585)."""
    ratio_M = tokens.changes.detach().exp().clamp(*_bounds(config))
    return -ratio_M * tokens.lp_M * tokens.advantages


def dro(tokens: ScoredTargets, config: Config) -> Tensor:
    """Return -(lp A - beta / 2 (lp - q)^2) (https://arxiv.org/abs/2405.19107).

    A token with A = 0 and q = 0 was not sampled, and has no loss: the square would train
    the targets of prompts.
    """
    q_M = tokens.inputs["logprobs"]
    is_sampled_M = (tokens.advantages != 0) | (q_M != 0)
    penalty_M = 0.5 * config["beta"] * (tokens.lp_M - q_M).square()
    return torch.where(is_sampled_M, penalty_M, 0.0) - tokens.lp_M * tokens.advantages


def gspo(tokens: ScoredTargets, config: Config) -> Tensor:
    """Return -min(r A, clip(r) A) with r = exp(sg(s) + lp - sg(lp)), where s is the mean
    of lp - q over a datum's sequence_ratio_mask (https://arxiv.org/abs/2507.18071).
    """
    mask_M = tokens.inputs["sequence_ratio_mask"]
    change_M = mask_M * (tokens.lp_M.detach() - tokens.inputs["logprobs"])
    num_datums = int(tokens.datum_M.max()) + 1
    sums = mask_M.new_zeros(2, num_datums)
    sum_D, size_D = sums.index_add(1, tokens.datum_M, torch.stack([change_M, mask_M]))
    # A datum without a mask has ratios of 1.
    mean_M = (sum_D / size_D.clamp(min=1e-9))[tokens.datum_M]
    ratio_M = (mean_M + tokens.lp_M - tokens.lp_M.detach()).exp()
    return _clipped(ratio_M, tokens.advantages, config)


def stable_reinforce(tokens: ScoredTargets, config: Config) -> Tensor:
    """Return -sg(min(r, 1)) lp A: REINFORCE whose weight falls for tokens that became
    less likely. The public service does not publish its formula.
    """
    ratio_M = tokens.changes.detach().exp().clamp(max=1.0)
    return -ratio_M * tokens.lp_M * tokens.advantages


def _clipped(ratio_M: Tensor, advantage_M: Tensor, config: Config) -> Tensor:
    clipped_M = ratio_M.clamp(*_bounds(config))
    return -torch.minimum(ratio_M * advantage_M, clipped_M * advantage_M)


def _bounds(config: Config) -> tuple[float, float]:
    low, high = (config[name] for name in BOUNDS)
    return low, high


class Loss(NamedTuple):
    """`inputs`: the names of loss_fn_inputs next to target_tokens, float32 of its shape.
    The first weights a token. `defaults`: of its loss_fn_config. `masked`: inputs that are
    0 at masked positions.
    """

    function: Callable[[ScoredTargets, Config], Tensor]
    inputs: tuple[str, ...] = ("advantages", "logprobs")
    defaults: Config = {}
    masked: tuple[str, ...] = ("advantages",)
    has_columns: bool = False
    """Whether target_tokens may be [T, K]."""


def _thresholds(low: float, high: float) -> Config:
    return dict(zip(BOUNDS, (low, high), strict=True))


LOSSES = {
    "cross_entropy": Loss(
        cross_entropy, ("weights",), masked=("weights",), has_columns=True
    ),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo, defaults=_thresholds(0.8, 1.2)),
    "cispo": Loss(cispo, defaults=_thresholds(0.0, 4.0)),
    "dro": Loss(dro, defaults={"beta": 0.05}, masked=("advantages", "logprobs")),
    # The bounds of the paper's section 5.1: 3e-4 and 4e-4 from 1.
    "gspo": Loss(
        gspo,
        ("advantages", "logprobs", "sequence_ratio_mask"),
        _thresholds(1 - 3e-4, 1 + 4e-4),
    ),
    "stable_reinforce": Loss(stable_reinforce),
}


def loss_of(name: str, given: Mapping[str, float | str]) -> tuple[Loss, Config]:
    """Return a loss and its whole config. `given`: loss_fn_config. Raises Refused."""
    loss = LOSSES.get(name)
    if loss is None:
        raise Refused(
            400,
            f"loss_fn {name!r} is unknown",
            rule=f"the losses are {', '.join(LOSSES)}",
            way_out="use one of these, or forward_backward_custom.",
        )
    config = dict(loss.defaults)
    for key, value in given.items():
        if key in OF_SERVER:
            continue
        if key not in config:
            known = ", ".join([*config, *sorted(OF_SERVER)])
            raise _wrong_config(name, f"has the unknown key {key!r}", f"keys: {known}")
        if isinstance(value, str) or not math.isfinite(value):
            raise _wrong_config(name, f"has {key}={value!r}", "it is a finite number")
        config[key] = value
    if BOUNDS[0] in config and config[BOUNDS[0]] > config[BOUNDS[1]]:
        fault = f"has the bounds {_bounds(config)}"
        raise _wrong_config(name, fault, "the low one is not above the high one")
    return loss, config


def _wrong_config(name: str, fault: str, rule: str) -> Refused:
    return Refused(400, f"loss_fn_config of {name} {fault}", rule=rule)
