"""Which optimizer step, and which rank of it, computes which sequences. Knows lengths; knows no weights and
no loss.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader
from asyncrl.trainer.model.packing import (
    BoolN,
    MicroBatch,
    TokenRange,
    by_group,
    common_length,
    pack,
    token_ranges,
)
from asyncrl.trainer.model.plan_check import Plan
from asyncrl.trainer.model.policy import PADDED_SPREAD_TOKENS
from asyncrl.trainer.ranks import Ranks


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
    sequences = token_ranges(header, has_loss)
    prompts = {
        group[0].group: min(common_length(group, arrays.token_ids), *(one.first for one in group))
        for group in by_group(sequences)
    }
    costs, seen = [], set[int]()
    for sequence in sequences:
        costs.append(sequence.length - (prompts[sequence.group] if sequence.group in seen else 0) + 1)
        seen.add(sequence.group)
    middles = np.cumsum(costs) - np.array(costs) / 2
    owners = np.minimum((middles * num_ranks / sum(costs)).astype(np.int64), num_ranks - 1)
    shares = [np.zeros_like(has_loss) for _ in range(num_ranks)]
    for sequence, owner in zip(sequences, owners, strict=True):
        _take(sequence, has_loss, shares[owner])
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


def _of_similar_length(header: BatchHeader, has_loss: BoolN) -> list[BoolN]:
    """Parts whose sequences fit into one forward pass on the padded plan."""
    parts: list[BoolN] = []
    longest = 0
    for sequence in sorted(token_ranges(header, has_loss), key=lambda sequence: -sequence.length):
        if not parts or longest - sequence.length > PADDED_SPREAD_TOKENS:
            parts.append(np.zeros_like(has_loss))
            longest = sequence.length
        _take(sequence, has_loss, parts[-1])
    return parts


def _shortest(header: BatchHeader, has_loss: BoolN) -> BoolN:
    """The loss token that takes the fewest tokens to compute."""
    sequence = min(token_ranges(header, has_loss), key=lambda sequence: sequence.first)
    chosen = np.zeros_like(has_loss)
    chosen[sequence.start + sequence.first] = True
    return chosen


def _take(sequence: TokenRange, has_loss: BoolN, chosen: BoolN) -> None:
    part = slice(sequence.start, sequence.start + sequence.length + 1)
    chosen[part] = has_loss[part]
