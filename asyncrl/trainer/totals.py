"""What micro-batches and optimizer steps add up to. Knows numbers; knows no weights and no loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncrl.trainer.packing import IntN
from asyncrl.trainer.ranks import Ranks

BoolN = npt.NDArray[np.bool_]
Float32N = npt.NDArray[np.float32]


@dataclass
class StepSums:
    """Of the micro-batches of one optimizer step; logprobs and entropies [N] are set where a token carries loss."""

    logprobs_N: Float32N
    entropies_N: Float32N
    loss: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    def add(self, source_M: IntN, logprob_M: Tensor, entropy_M: Tensor, loss: Tensor, stats: dict[str, float]) -> None:
        """One micro-batch, whose loss tokens stand at `source_M`."""
        self.loss += float(loss.detach())
        self.logprobs_N[source_M] = logprob_M.detach().cpu().numpy()
        self.entropies_N[source_M] = entropy_M.detach().cpu().numpy()
        for name, value in stats.items():
            self.stats[name] = self.stats.get(name, 0.0) + value

    def add_up(self, ranks: Ranks) -> None:
        """Become the sums of all ranks, on all of them alike: what follows from them each decides by itself."""
        if ranks.size == 1:
            return
        ranks.add_up(self.logprobs_N, self.entropies_N)
        parts = ranks.gather({"loss": self.loss, "stats": self.stats})
        names = dict.fromkeys(name for part in parts for name in part["stats"])
        self.loss = sum(part["loss"] for part in parts)
        self.stats = {name: sum(part["stats"].get(name, 0.0) for part in parts) for name in names}


@dataclass
class BatchTotals:
    """Of the optimizer steps on one batch; logprobs and entropies of each token before the first step on it."""

    logprobs_N: Float32N
    entropies_N: Float32N
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)
    gap: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_skipped: int = 0

    @property
    def loss(self) -> float:
        """Mean over the steps that were taken; NaN if all were skipped."""
        return self._mean(self.losses)

    @property
    def grad_norm(self) -> float:
        """As `loss`, of the gradient norms before they were clipped."""
        return self._mean(self.grad_norms)

    def _mean(self, values: list[float]) -> float:
        return float(np.mean(values)) if values else math.nan if self.num_skipped else 0.0

    def add(self, sums: StepSums, chosen: BoolN) -> None:
        """The statistics of one optimizer step on the tokens of `chosen`."""
        self.num_tokens += int(chosen.sum())
        for name, value in sums.stats.items():
            self.stats[name] = self.stats.get(name, 0.0) + value
