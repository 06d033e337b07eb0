"""Cuts the running rows into stretches of like length, so that a long sequence does not make the short ones pay. Knows numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CHUNK = 8
"""Slots are ordered by length chunk by chunk; a stretch is a number of whole chunks."""
OVERHEAD_FLOATS = 30_000
"""Keys read in the time that one more stretch costs (measured: 30 us a layer, on one CPU thread)."""


def cut_rows(padded_lengths: npt.NDArray[np.int64], floats_per_position: int) -> list[tuple[int, int, int]]:
    """Stretches (start, end, length) that cover the rows [n]; each row's padded length is at most its stretch's.

    Neighbouring chunks are joined unless the positions saved are worth a stretch of their own.
    """
    n = len(padded_lengths)
    worth = OVERHEAD_FLOATS / floats_per_position
    longest = np.maximum.reduceat(padded_lengths, np.arange(0, n, CHUNK)).tolist()
    stretches = [(0, min(CHUNK, n), longest[0])]
    for index, length in enumerate(longest[1:], start=1):
        start, end, joined_length = stretches[-1]
        new_end = min(end + CHUNK, n)
        common = max(joined_length, length)
        wasted = (end - start) * (common - joined_length) + (new_end - end) * (common - length)
        if wasted <= worth:
            stretches[-1] = (start, new_end, common)
        else:
            stretches.append((index * CHUNK, new_end, length))
    return stretches


def moves_after_removal(row: int, lengths: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Moves (source, target), in order, that close the gap at `row` among rows [n] and keep the chunks ordered by length.

    All rows grow alike, so an order once made stays; each chunk hands its longest row to the one before.
    """
    n, moves, gap = len(lengths), [], row
    while gap != n - 1:
        end = min((gap // CHUNK + 1) * CHUNK, n)
        source = n - 1 if end == n else end + int(lengths[end : end + CHUNK].argmax())
        moves.append((source, gap))
        gap = source
    return moves
