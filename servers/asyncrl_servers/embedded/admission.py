"""What has to be computed for sequences that get slots, and what stands in the KV cache already."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl_servers.embedded.runner import Ints
from asyncrl_servers.embedded.sequence import Rows, Sequence

MIN_SHARED = 32
"""Tokens from which copying a start that is in the cache is cheaper than computing it again."""


class Prefill(NamedTuple):
    """The tokens `ids` [T] for slot `row`, the first `num_shared` of them copied from slot `source`."""

    row: int
    ids: Ints
    source: int
    num_shared: int


class Admission(NamedTuple):
    """What has to be read, wave after wave, and (source, row) of slots whose tokens all stand in another one
    then.
    """

    waves: list[list[Prefill]]
    copies: list[tuple[int, int]]


def admit(rows: Rows, taken: list[Sequence], version: int) -> Admission:
    """Give each of these a row, under the serving `version`.

    Tokens that stand in a slot, read by the weights that serve, are copied from there: the prompt of a group,
    the turns before this one. A source that is itself read now belongs to an earlier wave.
    """
    waves, copies = [list[Prefill]()], list[tuple[int, int]]()
    if not taken:
        return Admission(waves, copies)
    known = {one.admitted_ids: row for row, one in enumerate(rows.sequences) if one.next_logits_V is not None}
    wave_of = dict.fromkeys(known.values(), -1)
    for sequence in sorted(taken, key=lambda one: len(one.token_ids)):  # equal lengths are read together
        ids = sequence.token_ids
        sequence.marks.append((len(ids), version))
        row, key = rows.add(sequence), ids.tobytes()
        sequence.admitted_ids = key
        if key in known:
            copies.append((known[key], row))
            continue
        source, num_shared = rows.common_prefix(ids, list(wave_of))
        if num_shared < MIN_SHARED:
            source, num_shared = -1, 0
        rows.use_kept(sequence, source, num_shared)
        known[key], wave_of[row] = row, wave_of.get(source, -1) + 1
        if wave_of[row] == len(waves):
            waves.append([])
        waves[wave_of[row]].append(Prefill(row, ids, source, num_shared))
    return Admission(waves, copies)
