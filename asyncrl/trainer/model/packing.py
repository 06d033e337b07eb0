"""Split a batch into optimizer steps and micro-batches, stored as prefix trees (tree.py) without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config.trainer_algorithm import CPU_MICRO_BATCH_TOKENS
from asyncrl.messages.trainer_api import BatchArrays, BatchHeader, TrajectoryHeader
from asyncrl.trainer.model.kernel_calls import to_device
from asyncrl.trainer.model.load_balance import Costs, PassSize, assign
from asyncrl.trainer.model.support_mask import ANY, AllowedRows, AllowedSets
from asyncrl.trainer.model.tree import IntN, Layout, TokenRange, lay_out, places_of
from asyncrl.trainer.ranks import ONE_RANK, Ranks

BoolN = npt.NDArray[np.bool_]
MOST_TOKENS = {"cpu": CPU_MICRO_BATCH_TOKENS}


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences for one forward-backward: N packed tokens, M loss tokens, S sequences, U pairs;
    int64.

    The hidden state at `predict_U` predicts `target_U`. Loss token m has pair `pair_M`, is at `source_M` in
    the batch's arrays and belongs to `sequence_M`, which is `trajectory_S` in the header.
    """

    token_ids_N: Tensor
    position_N: Tensor
    layout: Layout
    predict_U: Tensor
    target_U: Tensor
    pair_M: Tensor
    source_M: IntN
    sequence_M: Tensor
    trajectory_S: IntN
    allowed_U: AllowedRows | None = None
    routing_N: Tensor | None = None
    """int32 [N, E]: each token's experts at sampling."""

    @property
    def size(self) -> PassSize:
        num_pairs = sum(one.num_pairs for one in self.layout.passes)
        return PassSize(self.layout.num_tokens, num_pairs, len(self.target_U))


def token_ranges(header: BatchHeader, has_loss: BoolN) -> list[TokenRange]:
    ranges = []
    for index, entry in enumerate(header.trajectories):
        places = np.flatnonzero(has_loss[entry.start : entry.end])
        if len(places):
            first, last = int(places[0]), int(places[-1])
            ranges.append(TokenRange(index, entry.start, last, entry.group_index, first, len(places)))
    return ranges


def by_group(sequences: Iterable[TokenRange]) -> list[list[TokenRange]]:
    return [list(group) for _, group in groupby(sequences, key=lambda sequence: sequence.group)]


def mini_batches(header: BatchHeader, has_loss: BoolN, count: int) -> list[BoolN]:
    """Return each step's loss tokens: whole groups in admission order."""
    num_groups = header.trajectories[-1].group_index + 1
    count = min(count, num_groups)
    step_of_N = np.zeros(len(has_loss), np.int64)
    for entry in header.trajectories:
        step_of_N[entry.start : entry.end] = entry.group_index * count // num_groups
    return [chosen for step in range(count) if (chosen := has_loss & (step_of_N == step)).any()]


def rank_micro_batches(
    header: BatchHeader,
    arrays: BatchArrays,
    has_loss: BoolN,
    max_tokens: int,
    device: torch.device,
    ranks: Ranks,
    costs: Costs,
    allowed: AllowedSets | None = None,
) -> list[tuple[MicroBatch, bool]]:
    """Return this rank's micro-batches. Padding micro-batches, which keep ranks in lockstep, are flagged
    False.
    """
    max_tokens = min(max_tokens, MOST_TOKENS.get(device.type, max_tokens))
    sequences = token_ranges(header, has_loss)
    steps = assign(by_group(sequences), arrays.token_ids, costs, max_tokens, ranks.size)
    shares = [step[ranks.rank] for step in steps]
    micros = []
    for share in shares:
        if share:
            micros.append((_assemble(share, arrays, has_loss, max_tokens, device, allowed), True))
            continue
        shortest = min(sequences, key=lambda sequence: sequence.first)
        one_token = np.zeros_like(has_loss)
        one_token[shortest.start + shortest.first] = True
        filler = token_ranges(header, one_token)
        micros.append((_assemble(filler, arrays, one_token, max_tokens, device), False))
    return micros


def pack(
    header: BatchHeader, arrays: BatchArrays, has_loss: BoolN, max_tokens: int, device: torch.device
) -> list[MicroBatch]:
    micros = rank_micro_batches(header, arrays, has_loss, max_tokens, device, ONE_RANK, Costs(0.0, 0.0))
    return [micro for micro, _ in micros]


def pack_texts(texts: list[list[npt.NDArray[np.int64]]], device: torch.device) -> MicroBatch:
    """Return one micro-batch of texts by group, with every token but the first predicted."""
    entries, end = list[TrajectoryHeader](), 0
    for group, of_group in enumerate(texts):
        for text in of_group:
            start, end = end, end + len(text)
            place = {"group_index": group, "group_id": group, "start": start, "end": end}
            entries.append(TrajectoryHeader(**place, sample_index=0, prompt_id="", reward=0.0))
    token_ids = np.concatenate([text for of_group in texts for text in of_group]).astype(np.int32)
    has_loss = np.ones(end, np.bool_)
    has_loss[[entry.start for entry in entries]] = False
    nothing = {"behaviour_logprobs": np.zeros(end, np.float32), "versions": np.zeros(end, np.int32)}
    arrays = BatchArrays(token_ids=token_ids, loss_mask=has_loss, **nothing)
    header = BatchHeader(version=0, min_version=0, mask_older=False, trajectories=entries)
    (micro,) = pack(header, arrays, has_loss, end, device)
    return micro


def _assemble(
    sequences: Sequence[TokenRange],
    arrays: BatchArrays,
    has_loss: BoolN,
    max_tokens: int,
    device: torch.device,
    allowed: AllowedSets | None = None,
) -> MicroBatch:
    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(array.astype(np.int64)), device)

    sequences = sorted(sequences, key=lambda sequence: sequence.trajectory)
    layout, source_N, position_N = lay_out(sequences, arrays.token_ids, max_tokens)
    sources, predicts = list[IntN](), list[IntN]()
    for sequence, runs in zip(sequences, layout.rows, strict=True):
        offset = np.flatnonzero(has_loss[sequence.start : sequence.start + sequence.length + 1])
        sources.append(sequence.start + offset)
        predicts.append(places_of(runs)[offset - 1])
    source_M = np.concatenate(sources)
    target_M = arrays.token_ids[source_M].astype(np.int64)
    # Equal continuations share a logprob.
    pair_U, pair_M = np.unique(np.concatenate(predicts) << 32 | target_M, return_inverse=True)
    allowed_U = None
    if allowed is not None and (allowed.set_N[source_M] >= 0).any():
        both_U2, pair_M = np.unique(
            np.stack([pair_U[pair_M], allowed.set_N[source_M]], 1), axis=0, return_inverse=True
        )
        pair_U, set_U = both_U2.T
        used, number_U = np.unique(set_U, return_inverse=True)
        first = int(used[0] == ANY)
        allowed_U = AllowedRows.of(allowed.bits_KB[used[first:]], number_U - first, device)
    return MicroBatch(
        token_ids_N=tensor(arrays.token_ids[source_N]),
        position_N=tensor(position_N),
        layout=layout,
        predict_U=tensor(pair_U >> 32),
        target_U=tensor(pair_U & 0xFFFFFFFF),
        pair_M=tensor(pair_M),
        source_M=source_M,
        sequence_M=tensor(np.repeat(np.arange(len(sequences)), [len(part) for part in sources])),
        trajectory_S=np.array([sequence.trajectory for sequence in sequences], dtype=np.int64),
        allowed_U=allowed_U,
        routing_N=None
        if arrays.routing is None
        else to_device(torch.from_numpy(arrays.routing[source_N].astype(np.int32)), device),
    )
