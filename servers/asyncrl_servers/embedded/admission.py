"""Plan the prefill of admitted sequences, reusing the KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl_servers.embedded.kv_attention import Ints
from asyncrl_servers.embedded.sequence import Rows, Sequence

MIN_COPIED = 32
"""Minimum prefix length worth copying from the cache."""
MIN_SHARED = 2
"""Minimum prefix length shared within a prefill, whose keys are written twice."""


class Prefill(NamedTuple):
    """Prefill of `ids` [T] in slot `row`. `num_copied` tokens are copied from slot `source`; those up to
    `num_shared` are computed for both. If all are shared, so are the next logits.
    """

    row: int
    ids: Ints
    source: int
    num_copied: int
    num_shared: int

    @property
    def is_whole(self) -> bool:
        return self.num_shared == len(self.ids)


def admit(rows: Rows, taken: list[Sequence], version: int) -> list[Prefill]:
    """Assign rows to sequences, sources before their users, and reuse prefixes in other slots."""
    if not taken:
        return []
    known = {one.admitted_ids: row for row, one in enumerate(rows.sequences) if one.next_logits_V is not None}
    standing, reads = [*known.values(), *rows.kept], dict[int, Prefill]()
    for sequence in sorted(taken, key=lambda one: len(one.token_ids)):
        ids = sequence.token_ids
        sequence.marks.append((len(ids), version))
        row, key = rows.add(sequence), ids.tobytes()
        sequence.admitted_ids = key
        if key in known:
            source, num_shared = known[key], len(ids)
        else:
            source, num_shared = _longest_start(rows, ids, standing, list(reads))
            rows.use_kept(sequence, source, num_shared)
            known[key] = row
        num_copied = min(num_shared, reads[source].num_copied) if source in reads else num_shared
        reads[row] = Prefill(row, ids, source, num_copied, num_shared)
    return list(reads.values())


def keep_next(rows: Rows, reads: list[Prefill], computed: Tensor) -> Tensor:
    """Store and return next-token logits [reads, V], `computed` or copied from the source."""
    of_jobs = iter(computed)
    found = []
    for one in reads:
        logits = rows.sequences[one.source].next_logits_V if one.is_whole else next(of_jobs).clone()
        assert logits is not None, "a source comes before those that use it"
        rows.sequences[one.row].next_logits_V = logits
        found.append(logits)
    return torch.stack(found)


def _longest_start(rows: Rows, ids: Ints, standing: list[int], read_now: list[int]) -> tuple[int, int]:
    """Return (row, length) of the longest cached prefix of `ids`, or (-1, 0)."""
    source, num_copied = rows.common_prefix(ids, standing)
    if num_copied < MIN_COPIED:
        source, num_copied = -1, 0
    beside, num_shared = rows.common_prefix(ids, read_now)
    return (beside, num_shared) if num_shared >= max(MIN_SHARED, num_copied + 1) else (source, num_copied)
