"""Turns logprobs into the loss of one optimizer step: advantages, surrogate, correction, KL, aggregation.

Loss and advantage may be the user's: what they return is checked. The sum of what micro_loss returns over all
micro-batches of an optimizer step is its loss, so their cut never changes the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.algorithms import corrections
from asyncrl.algorithms.advantages import overlong_penalty
from asyncrl.algorithms.aggregate import token_weights
from asyncrl.algorithms.losses import interpolate, kl, kl_reward_penalty
from asyncrl.algorithms.registry import WHOLE_BATCH, resolve
from asyncrl.errors import ConfigError
from asyncrl.http import Refused
from asyncrl.messages.calls import BatchArrays, BatchHeader
from asyncrl.trainer.batch_checks import find_units
from asyncrl.trainer.model.packing import BoolN, MicroBatch
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.user_code import load_advantage, load_loss

Float32N = npt.NDArray[np.float32]


@dataclass
class BatchNumbers:
    """What is known of a batch before its first optimizer step; arrays over all its tokens [N].

    `proximal_N`: logprobs by the weights before the batch, `reference_N`: by the initial weights; None where
    not needed. `advantage_N`: that of the sample a token is part of.
    """

    header: BatchHeader
    arrays: BatchArrays
    has_loss: BoolN
    proximal_N: Float32N | None = None
    reference_N: Float32N | None = None
    advantage_N: Float32N = field(init=False)


@dataclass(frozen=True)
class StepNumbers:
    """What all micro-batches of one optimizer step share: weight_S multiplies each loss token of a
    trajectory, [S] in the header.
    """

    weight_S: Float32N
    correction_N: Float32N | None


class Objective:
    """The functions of one run. Stateless beside them."""

    def __init__(self, spec: TrainerSpec) -> None:
        """Raises ConfigError if a function cannot be found, or not be called as it will be."""
        self.spec, self.settings, self._recipe = spec, spec.algorithm, resolve(spec.algorithm)
        self._advantage = load_advantage(self._recipe.advantage)
        self._surrogate = load_loss(self._recipe.surrogate)
        has_correction = self._recipe.correction != "none"
        self._correction = getattr(corrections, self._recipe.correction) if has_correction else None
        self._is_whole_batch = self._recipe.correction in WHOLE_BATCH

    @property
    def needs_reference(self) -> bool:
        """Logprobs of the initial weights enter the loss or the reward."""
        return self.settings.kl_coefficient > 0

    @property
    def needs_proximal(self) -> bool:
        """Whether a forward pass over the batch is needed before its first step, because the logprobs of that
        step's own forward pass come too late.
        """
        is_used = self._recipe.ratio == "proximal" or self._correction is not None
        is_recomputed = is_used and self.spec.steps_per_batch > 1 and self.settings.proximal == "recompute"
        is_penalised = self.needs_reference and self.settings.kl_in == "reward"
        return is_recomputed or is_penalised or self._is_whole_batch

    def advantages(self, batch: BatchNumbers) -> Float32N:
        """float32 [N], from the rewards of the batch's units (B of them) with their penalties.

        A unit's length is all its sampled tokens, in whichever turns and branches; its KL penalty is the sum
        over all its tokens that carry loss.
        """
        settings, has_loss = self.settings, batch.has_loss
        units = find_units(batch.header, len(has_loss))
        reward_B = torch.tensor(units.rewards, dtype=torch.float32)
        if settings.overlong_tokens > 0:
            length_B = torch.from_numpy(units.count(batch.arrays.loss_mask))
            reward_B = reward_B + overlong_penalty(length_B, self.spec.max_tokens, settings.overlong_tokens)
        if self.needs_reference and settings.kl_in == "reward":
            assert batch.proximal_N is not None
            assert batch.reference_N is not None
            penalty_B = kl_reward_penalty(
                torch.from_numpy(batch.proximal_N[has_loss]),
                torch.from_numpy(batch.reference_N[has_loss]),
                torch.from_numpy(units.unit_N[has_loss]),
                len(reward_B),
            )
            reward_B = reward_B - settings.kl_coefficient * penalty_B
            if not bool(torch.isfinite(reward_B).all()):
                raise Refused(
                    422,
                    f"batch {batch.header.version}: KL penalties of its rollouts: {penalty_B.tolist()}"[:500],
                    rule="the penalty of algorithm.kl_in=reward is finite",
                    way_out="lower trainer.learning_rate and go on from a checkpoint.",
                )
        advantage_B = self._advantage(reward_B, torch.tensor(units.groups, dtype=torch.int64))
        is_one_each = isinstance(advantage_B, Tensor) and advantage_B.shape == reward_B.shape
        if not (is_one_each and bool(torch.isfinite(advantage_B).all())):
            raise ConfigError(
                f"algorithm.advantage={settings.advantage} returned {advantage_B}",
                rule="it returns a finite float32 tensor, one advantage a reward",
                way_out="correct the function, or set algorithm.advantage=grpo.",
            )
        return units.spread(advantage_B.detach().float().numpy())

    def step_numbers(self, batch: BatchNumbers, has_loss: BoolN) -> StepNumbers:
        """For the optimizer step that trains on the tokens of `has_loss` bool [N]."""
        entries = batch.header.trajectories
        tokens_S = np.array([int(has_loss[entry.start : entry.end].sum()) for entry in entries])
        weight_S = token_weights(
            self._recipe.aggregate,
            torch.from_numpy(tokens_S),
            int((tokens_S > 0).sum()),
            int(tokens_S.sum()),
            self.spec.max_tokens,
        )
        correction_N = self._whole_correction(batch, has_loss, tokens_S) if self._is_whole_batch else None
        return StepNumbers(weight_S.numpy().astype(np.float32), correction_N)

    def micro_loss(
        self, micro: MicroBatch, current_M: Tensor, batch: BatchNumbers, step: StepNumbers
    ) -> tuple[Tensor, dict[str, float]]:
        """(share of the step's loss, scalar with gradient; sums of statistics over the micro-batch's
        tokens).
        """
        device = current_M.device

        def over_tokens(values_N: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(values_N[micro.source_M]).to(device)

        behaviour_M = over_tokens(batch.arrays.behaviour_logprobs)
        advantage_M = over_tokens(batch.advantage_N)
        if self.settings.proximal == "interpolate":
            staleness_M = batch.header.version - over_tokens(batch.arrays.versions)
            proximal_M = interpolate(behaviour_M, current_M.detach(), staleness_M)
        elif batch.proximal_N is None:
            proximal_M = current_M.detach()  # before the only step both are the same numbers
        else:
            proximal_M = over_tokens(batch.proximal_N)
        anchor_M = behaviour_M if self._recipe.ratio == "behaviour" else proximal_M
        loss_M, stats = self._call_surrogate(current_M, anchor_M, behaviour_M, advantage_M, micro.sequence_M)
        if self._correction is not None:
            if step.correction_N is not None:
                weight_M = over_tokens(step.correction_N)
            else:
                log_weight_M = proximal_M - behaviour_M
                weight_M = self._correction(log_weight_M, advantage_M, micro.sequence_M, self.settings)
            loss_M, stats = loss_M * weight_M, {**stats, "importance_weight": weight_M.sum()}
        if batch.reference_N is not None:
            kl_M = kl(current_M, over_tokens(batch.reference_N), self.settings.kl_estimator)
            stats = {**stats, "kl_reference": kl_M.detach().sum()}
            if self.settings.kl_in == "loss":
                loss_M = loss_M + self.settings.kl_coefficient * kl_M
        weight_M = torch.from_numpy(step.weight_S[micro.trajectory_S]).to(device)[micro.sequence_M]
        return (loss_M * weight_M).sum(), {name: float(value) for name, value in stats.items()}

    def _whole_correction(
        self, batch: BatchNumbers, has_loss: BoolN, tokens_S: npt.NDArray[np.int64]
    ) -> Float32N:
        assert self._correction is not None
        assert batch.proximal_N is not None
        log_weight_M = batch.proximal_N[has_loss] - batch.arrays.behaviour_logprobs[has_loss]
        weight_M = self._correction(
            torch.from_numpy(log_weight_M),
            torch.from_numpy(batch.advantage_N[has_loss]),
            torch.from_numpy(np.repeat(np.cumsum(tokens_S > 0) - 1, tokens_S)),
            self.settings,
        )
        weight_N = np.zeros(len(has_loss), np.float32)
        weight_N[has_loss] = weight_M.numpy()
        return weight_N

    def _call_surrogate(self, current_M: Tensor, *others_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        answer = self._surrogate(current_M, *others_M, self.settings)
        match answer:
            case (Tensor(ndim=1, requires_grad=True) as loss_M, dict() as stats) if (
                loss_M.shape == current_M.shape and all(map(_is_number, stats.values()))
            ):
                return loss_M, stats
        raise ConfigError(
            f"algorithm.loss={self.settings.loss} returned {answer!r}"[:500],
            rule=f"it returns (a tensor [{len(current_M)}] with gradient, dict of one number each)",
            way_out="correct the function; asyncrl/algorithms/losses.py has some that fit.",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
