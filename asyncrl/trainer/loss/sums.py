"""Sums over the parts and optimizer steps of a version, and its metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from asyncrl.trainer.loss import step_metrics
from asyncrl.trainer.loss.objective import BatchNumbers, Float32N, Stats
from asyncrl.trainer.loss.packing import MicroBatch
from asyncrl.trainer.loss.step_metrics import Fresh
from asyncrl.trainer.model.policy import Scores
from asyncrl.trainer.ranks.ranks import Ranks

MicroLoss = tuple[Tensor, Stats]
"""Loss and statistics of a micro-batch, on the device."""


@dataclass
class PartSums:
    """Results of one forward_backward, over the M loss tokens of its part in the
    batch's order.

    `loss` is the mean over the part. `stats` are sums. `fresh` is None if the gap is
    not measured.
    """

    logprobs_M: Float32N
    entropies_M: Float32N
    behaviour_M: Float32N
    loss: float
    stats: Counter[str]
    fresh: Fresh | None = None


@dataclass
class StepSums:
    """Sums of one optimizer step. `grad_norm` is NaN until the step is taken, and if it
    is skipped.

    Parts of different sizes add up to the mean over all of them. Example, with a loss
    per token:

        part 1: 30 tokens   share 1.00   loss = mean of 30
        part 2: 10 tokens   share 0.25   loss = 0.75 * mean of 30 + 0.25 * mean of 10 = mean of 40
    """

    parts: list[PartSums] = field(default_factory=list)
    size: int = 0
    loss: float = 0.0
    grad_norm: float = math.nan

    def share_of(self, size: int) -> float:
        """Return the share that a further part of this size has in the mean; 1.0 for
        the first part.
        """
        return size / (self.size + size)

    def add(self, part: PartSums, size: int) -> None:
        share = self.share_of(size)
        self.loss = (1.0 - share) * self.loss + share * part.loss
        self.size += size
        self.parts.append(part)


@dataclass
class VersionSums:
    """The way from one version to the next: its batches, and its optimizer steps over
    `num_epochs`.

    `open_step` has a gradient that no optimizer step has applied.
    """

    num_epochs: int = 1
    batches: list[BatchNumbers] = field(default_factory=list)
    steps: list[StepSums] = field(default_factory=list)
    open_step: StepSums = field(default_factory=StepSums)

    def close_step(self) -> None:
        self.steps.append(self.open_step)
        self.open_step = StepSums()

    def metrics(self) -> dict[str, float]:
        """Return metrics by full name. Losses and gradients are means over the steps
        that were taken.
        """
        # A skipped step changed no weight. Its NaN would hide the loss of the others.
        taken = [step for step in self.steps if math.isfinite(step.grad_norm)]
        parts = [part for step in self.steps for part in step.parts]
        num_seen = sum(len(part.logprobs_M) for part in parts)
        stats = Counter[str]()
        for part in parts:
            stats.update(part.stats)
        # Later epochs see the same tokens again, under weights that have learned from
        # them.
        first_epoch = parts[: len(parts) // self.num_epochs]
        columns = zip(
            *(
                (one.logprobs_M, one.behaviour_M, one.entropies_M)
                for one in first_epoch
            ),
            strict=True,
        )
        num_sampled = sum(int(batch.arrays.is_sampled.sum()) for batch in self.batches)
        num_loss_tokens = sum(int(batch.has_loss.sum()) for batch in self.batches)
        return {
            "policy/clip_fraction": 0.0,
            **{f"policy/{name}": value / num_seen for name, value in stats.items()},
            "policy/loss": _mean([step.loss for step in taken]),
            "policy/grad_norm": _mean([step.grad_norm for step in taken]),
            **step_metrics.policy_metrics(*map(np.concatenate, columns)),
            **self._gap_metrics(),
            "sample/masked_fraction": 1.0 - num_loss_tokens / num_sampled,
            "tokens/trained": float(num_loss_tokens),
            "trainer/skipped_steps": float(len(self.steps) - len(taken)),
        }

    def _gap_metrics(self) -> dict[str, float]:
        # Only parts before the first step are measured, so all of them have the weights
        # of the samples.
        measured = [
            part.fresh for part in self.steps[0].parts if part.fresh is not None
        ]
        if not measured:
            return {}
        fresh = map(np.concatenate, zip(*measured, strict=True))
        return step_metrics.gap_metrics(step_metrics.measure_gaps(*fresh))


def _mean(values: list[float]) -> float:
    """Return the mean, or NaN without values."""
    return sum(values) / len(values) if values else math.nan


def gather_scores(
    outputs: Sequence[tuple[MicroBatch, Scores]], num_tokens: int, ranks: Ranks
) -> tuple[Float32N, Float32N]:
    """Return logprobs and entropies of all ranks, float32 [N], 0 without loss. Waits
    for the device.
    """
    logprobs_N = np.zeros(num_tokens, np.float32)
    entropies_N = np.zeros(num_tokens, np.float32)
    for micro, scores in outputs:
        logprobs_N[micro.source_M] = scores.logprob_M.cpu().numpy()
        entropies_N[micro.source_M] = scores.entropy_M.cpu().numpy()
    ranks.add_up(logprobs_N, entropies_N)
    return logprobs_N, entropies_N


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
