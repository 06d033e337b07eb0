"""Cuts a batch into optimizer steps, shares of ranks, and micro-batches without padding.

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

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config.learning import CPU_MICRO_BATCH_TOKENS
from asyncrl.messages.calls import BatchArrays, BatchHeader, TrajectoryHeader
from asyncrl.trainer.ranks import Ranks

BoolN = npt.NDArray[np.bool_]
IntN = npt.NDArray[np.int64]

MIN_SHARED_TOKENS = 16
"""Tokens that sharing a prefix must save: below, the second attention pass over the prefix costs more."""
MOST_TOKENS = {"cpu": CPU_MICRO_BATCH_TOKENS}
"""A micro-batch on this kind of device is no larger: it would not be faster, and take more memory."""


@dataclass(frozen=True)
class KernelPass:
    """One pass of an attention kernel: sequence i of the tokens `queries` attends to sequence i of `keys`."""

    queries: slice
    keys: slice
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool


@dataclass(frozen=True)
class Layout:
    """How attention connects the N tokens, the same for every layer: each segment to itself, then, if there
    are families, their own tokens to their prefixes. `rows` says for each sequence where its tokens stand:
    (prefix start, prefix length, own start, own length).
    """

    num_tokens: int
    rows: tuple[tuple[int, int, int, int], ...]
    passes: tuple[KernelPass, ...]

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
    token, at `length`, is predicted alone. `first`: offset of its first loss token.
    """

    trajectory: int
    start: int
    length: int
    group: int
    first: int


def token_ranges(header: BatchHeader, has_loss: BoolN) -> list[TokenRange]:
    """The sequences with a loss token, in the header's order."""
    ranges = []
    for index, entry in enumerate(header.trajectories):
        places = np.flatnonzero(has_loss[entry.start : entry.end])
        if len(places):
            first, last = int(places[0]), int(places[-1])
            ranges.append(TokenRange(index, entry.start, last, entry.group_index, first))
    return ranges


def by_group(sequences: Iterable[TokenRange]) -> list[list[TokenRange]]:
    """Neighbours of one group together."""
    return [list(group) for _, group in groupby(sequences, key=lambda sequence: sequence.group)]


def common_length(group: list[TokenRange], token_ids: npt.NDArray[np.int32]) -> int:
    """Number of first tokens that all of the group have."""
    common = min(sequence.length for sequence in group)
    first = token_ids[group[0].start :]
    for other in group[1:]:
        differs = first[:common] != token_ids[other.start : other.start + common]
        common = int(np.argmax(differs)) if differs.any() else common
    return common


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


def split_tokens(header: BatchHeader, has_loss: BoolN, num_ranks: int) -> list[BoolN]:
    """The loss tokens of each rank: whole sequences in the header's order, cut where each rank has its share
    of the tokens to read. Neighbours stay together, so that at most num_ranks - 1 groups are cut in two. No
    rank is further from its share than one sequence is long.
    """
    sequences = token_ranges(header, has_loss)
    costs = [sequence.length + 1 for sequence in sequences]
    middles = np.cumsum(costs) - np.array(costs) / 2
    owners = np.minimum((middles * num_ranks / sum(costs)).astype(np.int64), num_ranks - 1)
    shares = [np.zeros_like(has_loss) for _ in range(num_ranks)]
    for sequence, owner in zip(sequences, owners, strict=True):
        part = slice(sequence.start, sequence.start + sequence.length + 1)
        shares[owner][part] = has_loss[part]
    return shares


def rank_micro_batches(
    header: BatchHeader,
    arrays: BatchArrays,
    has_loss: BoolN,
    max_tokens: int,
    device: torch.device,
    ranks: Ranks,
) -> list[tuple[MicroBatch, bool]]:
    """Micro-batches of this rank, and whether each one counts.

    All ranks get the same number: FSDP's collectives must match. A rank that has fewer of its own gets copies
    of a short one that do not count.
    """
    if ranks.size == 1:
        return [(micro, True) for micro in pack(header, arrays, has_loss, max_tokens, device)]
    mine = split_tokens(header, has_loss, ranks.size)[ranks.rank]
    micros = pack(header, arrays, mine, max_tokens, device)
    num_missing = max(ranks.gather(len(micros))) - len(micros)
    shortest = min(token_ranges(header, has_loss), key=lambda sequence: sequence.first)
    one_token = np.zeros_like(has_loss)
    one_token[shortest.start + shortest.first] = True
    filler = pack(header, arrays, one_token, max_tokens, device)[0]
    return [(micro, True) for micro in micros] + [(filler, False)] * num_missing


def pack(
    header: BatchHeader, arrays: BatchArrays, has_loss: BoolN, max_tokens: int, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` packed tokens each, in the header's order; a longer sequence is
    alone in its own. A group may be cut in two: its prefix is then computed in both.
    """
    max_tokens = min(max_tokens, MOST_TOKENS.get(device.type, max_tokens))
    batches: list[list[TokenRange]] = []
    prefixes: dict[int, int] = {}
    num_tokens = 0
    for group in by_group(token_ranges(header, has_loss)):
        prefix = common_length(group, arrays.token_ids)
        prefix = prefixes[group[0].group] = prefix if prefix * (len(group) - 1) >= MIN_SHARED_TOKENS else 0
        for index, sequence in enumerate(group):
            added = sequence.length - (prefix if index else 0)
            if not batches or num_tokens + added > max_tokens:
                batches.append([])
                num_tokens, added = 0, sequence.length
            batches[-1].append(sequence)
            num_tokens += added
    return [_assemble(batch, prefixes, arrays, has_loss, device) for batch in batches]


def pack_texts(texts: list[list[npt.NDArray[np.int64]]], device: torch.device) -> MicroBatch:
    """One micro-batch of token ids, group by group, whose every token but the first is predicted."""
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
    sequences: list[TokenRange],
    prefixes: dict[int, int],
    arrays: BatchArrays,
    has_loss: BoolN,
    device: torch.device,
) -> MicroBatch:
    lengths, positions, sources = list[int](), list[IntN](), list[IntN]()

    def put(sequence: TokenRange, first: int, end: int) -> int:
        """Append tokens [first, end) of the sequence, if any; returns where they stand."""
        place = sum(lengths)
        if end > first:
            lengths.append(end - first)
            positions.append(np.arange(first, end))
            sources.append(sequence.start + positions[-1])
        return place

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    families: list[tuple[list[TokenRange], int, int]] = []
    """Sequences of a group, tokens of their prefix, all of their own tokens."""
    for family in by_group(sequences):
        prefix = prefixes[family[0].group] if len(family) > 1 else 0
        families.append((family, prefix, sum(sequence.length - prefix for sequence in family)))
    # With a prefix and own tokens first: those are the families of the second pass.
    families.sort(key=lambda entry: not (entry[1] and entry[2]))
    shared = [entry for entry in families if entry[1] and entry[2]]
    prefix_places = [put(family[0], 0, prefix) for family, prefix, _ in shared]
    prefix_end, rows = sum(lengths), dict[int, tuple[int, int, int, int]]()
    for index, (family, prefix, _) in enumerate(families):
        start = prefix_places[index] if index < len(shared) else put(family[0], 0, prefix)
        for sequence in family:
            own = put(sequence, prefix, sequence.length)
            rows[sequence.trajectory] = (start if prefix else 0, prefix, own, sequence.length - prefix)
    whole = slice(0, sum(lengths))
    passes = [KernelPass(whole, whole, tuple(lengths), tuple(lengths), is_causal=True)]
    if shared:
        own_lengths, prefix_lengths = tuple(own for _, _, own in shared), tuple(some for _, some, _ in shared)
        own_part = slice(prefix_end, prefix_end + sum(own_lengths))
        prefix_part = slice(0, prefix_end)
        passes.append(KernelPass(own_part, prefix_part, own_lengths, prefix_lengths, is_causal=False))
    source, predict = list[IntN](), list[IntN]()
    for sequence in sequences:
        prefix_start, prefix, own_start, _ = rows[sequence.trajectory]
        offset = np.flatnonzero(has_loss[sequence.start : sequence.start + sequence.length + 1])
        source.append(sequence.start + offset)
        before = offset - 1
        predict.append(np.where(before < prefix, prefix_start + before, own_start + before - prefix))
    source_M, source_N = np.concatenate(source), np.concatenate(sources)
    ordered = tuple(rows[sequence.trajectory] for sequence in sequences)
    return MicroBatch(
        token_ids_N=tensor(arrays.token_ids[source_N]),
        position_N=tensor(np.concatenate(positions)),
        layout=Layout(len(source_N), ordered, tuple(passes)),
        predict_M=tensor(np.concatenate(predict)),
        target_M=tensor(arrays.token_ids[source_M]),
        source_M=source_M,
        sequence_M=tensor(np.repeat(np.arange(len(sequences)), [len(part) for part in source])),
        trajectory_S=np.array([sequence.trajectory for sequence in sequences], dtype=np.int64),
    )
