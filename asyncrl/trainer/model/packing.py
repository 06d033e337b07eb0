"""Cuts a batch into micro-batches without padding. Knows token ids and groups; knows no model and no loss.

The N tokens of a micro-batch lie flat, in segments that attend causally to themselves:

    [prefix of family 1][prefix of family 2] ... [own tokens of its sequence 1][of its sequence 2] ...
    [sequences without prefix]

A family is the sequences of one group that share their first tokens (the prompt, as a rule): those are stored
and computed once, and every own token of the family attends to all of them. A sequence is read up to its last
loss token, which itself is only predicted: what comes after it can change nothing. Sequences without a loss
token are left out.

Nothing here asks what a prompt is: loss tokens may stand anywhere after the first token, with others (tool
output, context that another branch has trained) between them, in a shared prefix too. A group has one family
at most, so where its rollouts have branches that begin differently, less is shared than could be.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, TrajectoryHeader

BoolN = npt.NDArray[np.bool_]
IntN = npt.NDArray[np.int64]

MIN_SHARED_TOKENS = 16
"""Tokens that sharing a prefix must save: below, the second attention pass over the prefix costs more."""
MOST_TOKENS = {"cpu": 2048}
"""A micro-batch on this kind of device is no larger: it would not be faster, and its activations leave the
caches.
"""


@dataclass(frozen=True)
class Layout:
    """How attention connects the N tokens: plain numbers, the same for every layer.

    `segments` cover [0, N) in order, none is empty. The first `num_prefix_tokens` tokens are the families'
    prefixes, the next `num_family_tokens` the own tokens of the same families in the same order; `families`
    holds (prefix tokens, own tokens) of each. `rows` says for each sequence where its tokens stand: (prefix
    start, prefix length, own start, own length).
    """

    segments: tuple[tuple[int, int], ...]
    families: tuple[tuple[int, int], ...]
    num_prefix_tokens: int
    num_family_tokens: int
    rows: tuple[tuple[int, int, int, int], ...]
    cache: dict[tuple[int, ...], Tensor] = field(default_factory=dict, compare=False, repr=False)
    """What a kernel makes of it once for all layers."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.segments[-1][1]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(prefix + own for _, prefix, _, own in self.rows)


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences for one forward-backward: N packed tokens, M loss tokens, S sequences. Tensors on the
    device, int64.

    Loss token m, `target_M`, is predicted by the hidden state at `predict_M` (two may have the same, at a
    prefix's end). It stands at `source_M` in the batch's arrays and belongs to sequence `sequence_M`, which
    is `trajectory_S` in the header.
    """

    token_ids_N: Tensor
    position_N: Tensor
    layout: Layout
    predict_M: Tensor
    target_M: Tensor
    source_M: IntN
    sequence_M: Tensor
    trajectory_S: IntN


@dataclass(frozen=True)
class TokenRange:
    """A sequence with a loss token: tokens [start, start + length) of the arrays are read, the last loss
    token, at `length`, is predicted alone. `first`: offset of its first loss token. The first `prefix` tokens
    are those of the whole group.
    """

    trajectory: int
    start: int
    length: int
    group: int
    first: int
    prefix: int = 0


def pack(
    header: BatchHeader, arrays: BatchArrays, has_loss: BoolN, max_tokens: int, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` packed tokens each, in the header's order; a longer sequence is
    alone in its own.
    """
    max_tokens = min(max_tokens, MOST_TOKENS.get(device.type, max_tokens))
    sequences = []
    for group in by_group(token_ranges(header, has_loss)):
        prefix = common_length(group, arrays.token_ids)
        is_shared = prefix * (len(group) - 1) >= MIN_SHARED_TOKENS
        sequences += [replace(sequence, prefix=prefix if is_shared else 0) for sequence in group]
    return [_assemble(batch, arrays, has_loss, device) for batch in _cut(sequences, max_tokens)]


def pack_texts(texts: list[list[npt.NDArray[np.int64]]], device: torch.device) -> MicroBatch:
    """One micro-batch of token ids, group by group, whose every token but the first is predicted."""
    rows = [(group, text) for group, of_group in enumerate(texts) for text in of_group]
    ends = np.cumsum([len(text) for _, text in rows]).tolist()
    entries = [
        TrajectoryHeader(
            group_index=group, group_id=group, sample_index=0, prompt_id="", start=start, end=end, reward=0.0
        )
        for (group, _), start, end in zip(rows, [0, *ends], ends, strict=False)
    ]
    has_loss = np.ones(ends[-1], np.bool_)
    has_loss[[entry.start for entry in entries]] = False
    arrays = BatchArrays(
        token_ids=np.concatenate([text for _, text in rows]).astype(np.int32),
        loss_mask=has_loss,
        behaviour_logprobs=np.zeros(ends[-1], np.float32),
        versions=np.zeros(ends[-1], np.int32),
    )
    header = BatchHeader(version=0, min_version=0, mask_older=False, trajectories=entries)
    (micro,) = pack(header, arrays, has_loss, ends[-1], device)
    return micro


def token_ranges(header: BatchHeader, has_loss: BoolN) -> list[TokenRange]:
    """The sequences with a loss token, in the header's order."""
    ranges = []
    for index, entry in enumerate(header.trajectories):
        places = np.flatnonzero(has_loss[entry.start : entry.end])
        if len(places):
            ranges.append(
                TokenRange(index, entry.start, int(places[-1]), entry.group_index, first=int(places[0]))
            )
    return ranges


def _cut(sequences: list[TokenRange], max_tokens: int) -> list[list[TokenRange]]:
    """Fill one micro-batch after the other. A group may be cut in two: its prefix is then computed in
    both.
    """
    batches: list[list[TokenRange]] = []
    num_tokens = 0
    for sequence in sequences:
        is_followed = bool(batches) and batches[-1][-1].group == sequence.group
        added = sequence.length - (sequence.prefix if is_followed else 0)
        if not batches or num_tokens + added > max_tokens:
            batches.append([])
            num_tokens, added = 0, sequence.length
        batches[-1].append(sequence)
        num_tokens += added
    return batches


def by_group(sequences: list[TokenRange]) -> list[list[TokenRange]]:
    """Neighbours of one group together."""
    return [list(group) for _, group in groupby(sequences, key=lambda sequence: sequence.group)]


def common_length(group: list[TokenRange], token_ids: npt.NDArray[np.int32]) -> int:
    """Number of first tokens that all of the group have."""
    first, common = group[0], min(sequence.length for sequence in group)
    for other in group[1:]:
        differs = (
            token_ids[first.start : first.start + common] != token_ids[other.start : other.start + common]
        )
        common = int(np.argmax(differs)) if differs.any() else common
    return common


def _assemble(
    sequences: list[TokenRange], arrays: BatchArrays, has_loss: BoolN, device: torch.device
) -> MicroBatch:
    with_prefix = [
        (family, common_length(family, arrays.token_ids) if len(family) > 1 and family[0].prefix else 0)
        for family in by_group(sequences)
    ]
    with_prefix.sort(key=lambda entry: entry[1] == 0)
    lengths: list[int] = []
    sources: list[IntN] = []
    positions: list[IntN] = []

    def put(start: int, first: int, end: int) -> int:
        """Append tokens [first, end) of the sequence at `start`; returns where they stand."""
        place = sum(lengths)
        if end > first:
            lengths.append(end - first)
            positions.append(np.arange(first, end))
            sources.append(start + positions[-1])
        return place

    prefix_places = [put(family[0].start, 0, prefix) for family, prefix in with_prefix if prefix]
    num_prefix_tokens = sum(lengths)
    rows: dict[int, tuple[int, int, int, int]] = {}
    families = []
    for index, (family, prefix) in enumerate(with_prefix):
        for sequence in family:
            place = put(sequence.start, prefix, sequence.length)
            rows[sequence.trajectory] = (
                prefix_places[index] if prefix else 0,
                prefix,
                place,
                sequence.length - prefix,
            )
        if prefix:
            families.append((prefix, sum(sequence.length - prefix for sequence in family)))
    ends = np.cumsum(lengths).tolist()
    layout = Layout(
        segments=tuple(zip([0, *ends[:-1]], ends, strict=True)),
        families=tuple(families),
        num_prefix_tokens=num_prefix_tokens,
        num_family_tokens=sum(own for _, own in families),
        rows=tuple(rows[sequence.trajectory] for sequence in sequences),
    )
    source_M, predict_M, sequence_M = _loss_places(sequences, layout, has_loss)
    source_N = np.concatenate(sources)

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return MicroBatch(
        token_ids_N=tensor(arrays.token_ids[source_N]),
        position_N=tensor(np.concatenate(positions)),
        layout=layout,
        predict_M=tensor(predict_M),
        target_M=tensor(arrays.token_ids[source_M]),
        source_M=source_M,
        sequence_M=tensor(sequence_M),
        trajectory_S=np.array([sequence.trajectory for sequence in sequences], dtype=np.int64),
    )


def _loss_places(sequences: list[TokenRange], layout: Layout, has_loss: BoolN) -> tuple[IntN, IntN, IntN]:
    """Of each loss token: where it stands in the arrays, the packed place that predicts it, its sequence's
    number.
    """
    source, predict, number = [], [], []
    for index, (sequence, (prefix_start, prefix, own_start, _)) in enumerate(
        zip(sequences, layout.rows, strict=True)
    ):
        offset = np.flatnonzero(has_loss[sequence.start : sequence.start + sequence.length + 1]).astype(
            np.int64
        )
        before = offset - 1
        source.append(sequence.start + offset)
        predict.append(np.where(before < prefix, prefix_start + before, own_start + before - prefix))
        number.append(np.full(len(offset), index, dtype=np.int64))
    return np.concatenate(source), np.concatenate(predict), np.concatenate(number)
