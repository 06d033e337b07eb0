"""Which optimizer step, and which rank of it, computes which sequences. Knows lengths; knows no weights and
no loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader
from asyncrl.trainer.model.packing import IntN, MicroBatch, pack
from asyncrl.trainer.model.plan_check import Plan
from asyncrl.trainer.model.policy import PADDED_SPREAD_TOKENS
from asyncrl.trainer.ranks import Ranks

BoolN = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Sequence:
    """`first` and `last`: offsets of its first and last loss token, so that `last` tokens are read."""

    start: int
    end: int
    group: int
    first: int
    last: int


def mini_batches(header: BatchHeader, has_loss: BoolN, count: int) -> list[BoolN]:
    """The loss tokens of each optimizer step: whole groups in order of admission. One without a loss token is
    left out.
    """
    num_groups = header.trajectories[-1].group_index + 1
    count = min(count, num_groups)
    step_of_N = np.zeros(len(has_loss), np.int64)
    for entry in header.trajectories:
        step_of_N[entry.start : entry.end] = entry.group_index * count // num_groups
    return [chosen for step in range(count) if (chosen := has_loss & (step_of_N == step)).any()]


def split_tokens(header: BatchHeader, arrays: BatchArrays, has_loss: BoolN, num_ranks: int) -> list[BoolN]:
    """The loss tokens of each rank: whole sequences in the header's order, cut where each rank has its share
    of the tokens.

    What counts are the tokens to compute, those once that all of a group begin with before any carries loss.
    Neighbours stay together, so that at most num_ranks - 1 groups are cut in two. No rank is further from its
    share than one sequence is long.
    """
    sequences = _sequences(header, has_loss)
    prompts = {
        group: _prompt_length(list(of_group), arrays)
        for group, of_group in groupby(sequences, lambda one: one.group)
    }
    costs, seen = [], set[int]()
    for sequence in sequences:
        costs.append(sequence.last - (prompts[sequence.group] if sequence.group in seen else 0) + 1)
        seen.add(sequence.group)
    middles = np.cumsum(costs) - np.array(costs) / 2
    owners = np.minimum((middles * num_ranks / sum(costs)).astype(np.int64), num_ranks - 1)
    shares = [np.zeros_like(has_loss) for _ in range(num_ranks)]
    for sequence, owner in zip(sequences, owners, strict=True):
        part = slice(sequence.start, sequence.end)
        shares[owner][part] = has_loss[part]
    return shares


def rank_micro_batches(
    header: BatchHeader,
    arrays: BatchArrays,
    has_loss: BoolN,
    max_tokens: int,
    device: torch.device,
    ranks: Ranks,
    plan: Plan,
) -> list[tuple[MicroBatch, bool]]:
    """Micro-batches of this rank, and whether each one counts.

    All ranks get the same number, and each is one forward pass: FSDP's collectives must match. A rank that
    has fewer of its own gets copies of a short one that do not count.
    """
    if ranks.size == 1:
        return [(micro, True) for micro in pack(header, arrays, has_loss, max_tokens, device)]
    mine = split_tokens(header, arrays, has_loss, ranks.size)[ranks.rank]
    parts = [mine] if plan.is_packed and plan.window is None else _of_similar_length(header, mine)
    micros = [micro for part in parts for micro in pack(header, arrays, part, max_tokens, device)]
    num_missing = max(ranks.gather(len(micros))) - len(micros)
    filler = pack(header, arrays, _shortest(header, has_loss), max_tokens, device)[0]
    return [(micro, True) for micro in micros] + [(filler, False)] * num_missing


def _prompt_length(sequences: list[_Sequence], arrays: BatchArrays) -> int:
    """First tokens that all of these have, none of which carries loss: with other branches than one it may be
    less than a prompt.
    """
    first, length = sequences[0], min(sequence.first for sequence in sequences)
    for other in sequences[1:]:
        differs = (
            arrays.token_ids[first.start : first.start + length]
            != arrays.token_ids[other.start : other.start + length]
        )
        length = int(np.argmax(differs)) if differs.any() else length
    return length


def _of_similar_length(header: BatchHeader, has_loss: BoolN) -> list[BoolN]:
    """Parts whose sequences fit into one forward pass on the padded plan."""
    parts: list[BoolN] = []
    longest = 0
    for sequence in sorted(_sequences(header, has_loss), key=lambda sequence: -sequence.last):
        if not parts or longest - sequence.last > PADDED_SPREAD_TOKENS:
            parts.append(np.zeros_like(has_loss))
            longest = sequence.last
        part = slice(sequence.start, sequence.end)
        parts[-1][part] = has_loss[part]
    return parts


def _shortest(header: BatchHeader, has_loss: BoolN) -> BoolN:
    """The loss token that takes the fewest tokens to compute."""
    sequence = min(_sequences(header, has_loss), key=lambda sequence: sequence.first)
    chosen = np.zeros_like(has_loss)
    chosen[sequence.start + sequence.first] = True
    return chosen


def _sequences(header: BatchHeader, has_loss: BoolN) -> list[_Sequence]:
    sequences = []
    for entry in header.trajectories:
        places = np.flatnonzero(has_loss[entry.start : entry.end])
        if len(places):
            sequences.append(
                _Sequence(entry.start, entry.end, entry.group_index, int(places[0]), int(places[-1]))
            )
    return sequences


# What micro-batches and optimizer steps add up to. Knows numbers; knows no weights and no loss.


Float32N = npt.NDArray[np.float32]


@dataclass
class StepSums:
    """Of the micro-batches of one optimizer step; logprobs and entropies [N] are set where a token carries
    loss.
    """

    logprobs_N: Float32N
    entropies_N: Float32N
    loss: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    def add(
        self, source_M: IntN, logprob_M: Tensor, entropy_M: Tensor, loss: Tensor, stats: dict[str, float]
    ) -> None:
        """One micro-batch, whose loss tokens stand at `source_M`."""
        self.loss += float(loss.detach())
        self.logprobs_N[source_M] = logprob_M.detach().cpu().numpy()
        self.entropies_N[source_M] = entropy_M.detach().cpu().numpy()
        for name, value in stats.items():
            self.stats[name] = self.stats.get(name, 0.0) + value

    def add_up(self, ranks: Ranks) -> None:
        """Become the sums of all ranks, on all of them alike: what follows from them each decides by
        itself.
        """
        if ranks.size == 1:
            return
        ranks.add_up(self.logprobs_N, self.entropies_N)
        parts = ranks.gather({"loss": self.loss, "stats": self.stats})
        names = dict.fromkeys(name for part in parts for name in part["stats"])
        self.loss = sum(part["loss"] for part in parts)
        self.stats = {name: sum(part["stats"].get(name, 0.0) for part in parts) for name in names}


@dataclass
class BatchTotals:
    """Of the optimizer steps on one batch; logprobs and entropies of each token before the first step on
    it.
    """

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
