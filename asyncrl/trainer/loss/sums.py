"""Sums over an optimizer step, and the metrics of a version."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncrl.trainer.loss import step_metrics
from asyncrl.trainer.loss.objective import BatchNumbers, Float32N, Stats
from asyncrl.trainer.loss.packing import MicroBatch
from asyncrl.trainer.loss.step_metrics import Gap
from asyncrl.trainer.ranks.ranks import Ranks

MicroLoss = tuple[Tensor, Stats]
"""Loss and statistics of a micro-batch, on the device."""


class ValueLoss(NamedTuple):
    """The critic's mean loss over `size` tokens, and the share of clipped ones. Without a
    critic the size is 0.
    """

    size: int = 0
    loss: float = 0.0
    clipped: float = 0.0

    @staticmethod
    def join(parts: Sequence[ValueLoss]) -> ValueLoss:
        size = sum(part.size for part in parts)
        loss = sum(part.size * part.loss for part in parts) / max(size, 1)
        clipped = sum(part.size * part.clipped for part in parts) / max(size, 1)
        return ValueLoss(size, loss, clipped)


@dataclass
class StepSums:
    """Results of one optimizer step, over its M loss tokens in the batch's order.

    `loss` is the mean over `size` tokens or sequences, `stats` are sums, `gaps` is empty
    if they are not measured. `grad_norm` is NaN until the step is taken, and if it is
    skipped.
    """

    size: int
    logprobs_M: Float32N
    entropies_M: Float32N
    loss: float
    stats: Counter[str]
    gaps: list[Gap] = field(default_factory=list)
    value_loss: ValueLoss = ValueLoss()
    grad_norm: float = math.nan

    @classmethod
    def join(cls, parts: Sequence[StepSums]) -> StepSums:
        """Return the sums over parts of a step, or over several steps, in their order."""
        stats = Counter[str]()
        for part in parts:
            stats.update(part.stats)
        size = sum(part.size for part in parts)
        return cls(
            size=size,
            logprobs_M=np.concatenate([part.logprobs_M for part in parts]),
            entropies_M=np.concatenate([part.entropies_M for part in parts]),
            loss=sum(part.size * part.loss for part in parts) / max(size, 1),
            stats=stats,
            value_loss=ValueLoss.join([part.value_loss for part in parts]),
        )


def version_metrics(
    batch: BatchNumbers, steps: Sequence[StepSums], num_epochs: int
) -> dict[str, float]:
    """Return metrics of a batch's optimizer steps by full name. Losses and gradients are
    means over the steps that were taken.
    """
    # A skipped step changed no weight. Its NaN would hide the loss of the others.
    taken = [step for step in steps if math.isfinite(step.grad_norm)]
    seen = StepSums.join(steps)
    # Later epochs see the same tokens again, under weights that have learned from them.
    first = StepSums.join(steps[: len(steps) // num_epochs])
    # In the same order: mini-batches are cut from the batch one after the other.
    behaviour_M = batch.arrays.behaviour_logprobs[batch.has_loss]
    num_sampled = int(batch.arrays.is_sampled.sum())
    num_loss_tokens = int(batch.has_loss.sum())
    return {
        "policy/clip_fraction": 0.0,
        **{
            f"policy/{name}": value / len(seen.logprobs_M)
            for name, value in seen.stats.items()
        },
        "policy/loss": _mean([step.loss for step in taken]),
        "policy/grad_norm": _mean([step.grad_norm for step in taken]),
        **step_metrics.policy_metrics(first.logprobs_M, behaviour_M, first.entropies_M),
        **step_metrics.gap_metrics(steps[0].gaps),
        "sample/masked_fraction": 1.0 - num_loss_tokens / num_sampled,
        "tokens/trained": float(num_loss_tokens),
        "trainer/skipped_steps": float(len(steps) - len(taken)),
    }


def _mean(values: list[float]) -> float:
    """Return the mean, or NaN without values."""
    return sum(values) / len(values) if values else math.nan


def gather_tokens(
    outputs: Sequence[tuple[MicroBatch, Sequence[Tensor]]],
    shape: tuple[int, int],
    ranks: Ranks,
) -> npt.NDArray[np.float32]:
    """Return K values of each token of all ranks, float32 [K, N], 0 without loss.
    `outputs`: K tensors [M] of each micro-batch. Waits for the device.
    """
    values_KN = np.zeros(shape, np.float32)
    for micro, tensors in outputs:
        for value_N, tensor_M in zip(values_KN, tensors, strict=True):
            value_N[micro.source_M] = tensor_M.cpu().numpy()
    ranks.add_up(*values_KN)
    return values_KN


def gather_losses(
    losses: Sequence[MicroLoss], ranks: Ranks
) -> tuple[float, Counter[str]]:
    """Return the sums of losses and statistics over all ranks. Waits for the device."""
    own_loss = 0.0
    own_stats = Counter[str]()
    for micro_loss, micro_stats in losses:
        own_loss += float(micro_loss)
        read = {name: float(value) for name, value in micro_stats.items()}
        own_stats.update(read)
    loss = 0.0
    stats = Counter[str]()
    for rank_loss, rank_stats in ranks.gather((own_loss, own_stats)):
        loss += rank_loss
        stats.update(rank_stats)
    return loss, stats
