"""Attention-kernel calls of a layout; on CPU in masked tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.trainer.model.tree import Layout, Piece

Places = slice | Tensor
TILE_SIZES = (32, 64)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Short paths in B rows of Q queries with K keys; `mask` [B, 1, Q, K] is added to the scores."""

    num_rows: int
    query_R: Tensor
    key_R: Tensor
    real_queries: Tensor
    no_queries: Tensor
    mask: Tensor


@dataclass(frozen=True)
class KernelCall:
    queries: Places
    keys: Places
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool
    tiles: Tiles | None = None


@lru_cache(maxsize=16)
def calls_of(layout: Layout, device: torch.device) -> tuple[KernelCall, ...]:
    """Return the calls: on CUDA one per pass; on CPU tiles, then remaining pieces."""
    if device.type != "cpu":
        passes = layout.passes
        return tuple(_call(list(part.pieces), device, is_causal=part.is_causal) for part in passes)
    paths, *later = layout.passes
    pieces = [piece for part in later for piece in part.pieces]
    left = {
        path: [(one.key, one.num_keys) for one in pieces if 0 <= path.query - one.query < one.num_queries]
        for path in paths.pieces
    }
    calls, is_short_N = [], np.zeros(layout.num_tokens, np.bool_)
    for smallest, size in zip((0, *TILE_SIZES), TILE_SIZES, strict=False):
        short = [path for path in left if smallest < path.num_queries <= size >= _num_keys(left[path])]
        if len(short) > 1:
            calls.append(_tiled_call(short, [left[path] for path in short], size))
            for path in short:
                is_short_N[path.query : path.query + path.num_queries] = True
    for part in layout.passes:
        for piece in part.pieces:
            calls += [_call([one], device, is_causal=part.is_causal) for one in _without(piece, is_short_N)]
    return tuple(calls)


def _without(piece: Piece, is_short_N: npt.NDArray[np.bool_]) -> Iterator[Piece]:
    is_long = ~is_short_N[piece.query : piece.query + piece.num_queries]
    if not is_long.any():
        return
    edges = np.flatnonzero(np.diff(is_long, prepend=False, append=False)).tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield replace(piece, query=piece.query + start, num_queries=end - start)


Stretch = tuple[int, int]


def _num_keys(stretches: Iterable[Stretch]) -> int:
    return sum(length for _, length in stretches)


def _tiled_call(paths: list[Piece], left: list[list[Stretch]], size: int) -> KernelCall:
    number = {one: len(paths) + index for index, one in enumerate(dict.fromkeys(sum(left, [])))}
    sees = np.eye(len(paths), len(paths) + len(number), dtype=np.bool_)
    stretches, num_queries = list[list[tuple[int, int, int]]](), list[int]()
    for row in _rows_of(paths, left, size):
        own = [(paths[index].query, paths[index].num_queries, index) for index in row]
        for index in row:
            sees[index, [number[one] for one in left[index]]] = True
        others = [(*one, number[one]) for one in dict.fromkeys(one for index in row for one in left[index])]
        stretches.append([*own, *others])
        num_queries.append(sum(length for _, length, _ in own))
    num_keys = np.array([sum(length for _, length, _ in row) for row in stretches])
    starts, lengths, owners = np.array([one for row in stretches for one in row]).T
    key_BK, owner_BK = np.zeros((2, len(stretches), num_keys.max()), np.int64)
    index_K = np.arange(key_BK.shape[1])
    is_key_BK, is_own_BK = (index_K < np.array(numbers)[:, None] for numbers in (num_keys, num_queries))
    key_BK[is_key_BK] = np.arange(lengths.sum()) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    owner_BK[is_key_BK] = np.repeat(owners, lengths)
    width = max(num_queries)
    index_QK = index_K[:width, None] >= index_K
    seen_BQK = sees[np.minimum(owner_BK[:, :width], len(paths) - 1)[:, :, None], owner_BK[:, None]]
    seen_BQK &= is_key_BK[:, None] & (index_QK | ~is_own_BK[:, None])
    seen_BQK[~is_own_BK[:, :width], 0] = True  # softmax needs a key
    query_R, is_query_R = (torch.from_numpy(one[:, :width].flatten()) for one in (key_BK, is_own_BK))
    tiles = Tiles(
        num_rows=len(stretches),
        query_R=query_R,
        key_R=torch.from_numpy(key_BK.flatten()),
        real_queries=is_query_R.nonzero()[:, 0],
        no_queries=is_query_R.logical_not().nonzero()[:, 0],
        mask=torch.where(torch.from_numpy(seen_BQK)[:, None], 0.0, -torch.inf),
    )
    return KernelCall(query_R[is_query_R], tiles.key_R, (), (), is_causal=True, tiles=tiles)


def _rows_of(paths: list[Piece], left: list[list[Stretch]], size: int) -> list[list[int]]:
    rows, rooms, lefts = list[list[int]](), list[int](), list[set[Stretch]]()
    for index in sorted(range(len(paths)), key=lambda index: -paths[index].num_queries):
        length, own = paths[index].num_queries, set(left[index])
        for row, room in enumerate(rooms):
            if room >= length and _num_keys(lefts[row] | own) <= 2 * size:
                break
        else:
            row = len(rows)
            rows.append([])
            rooms.append(size)
            lefts.append(set())
        rows[row].append(index)
        rooms[row] -= length
        lefts[row] |= own
    return rows


def _call(pieces: list[Piece], device: torch.device, *, is_causal: bool) -> KernelCall:
    queries = [slice(piece.query, piece.query + piece.num_queries) for piece in pieces]
    keys = [slice(piece.key, piece.key + piece.num_keys) for piece in pieces]
    query_lengths, key_lengths = zip(*((one.num_queries, one.num_keys) for one in pieces), strict=True)
    return KernelCall(
        _gathered(queries, device), _gathered(keys, device), query_lengths, key_lengths, is_causal
    )


def _gathered(places: list[slice], device: torch.device) -> Places:
    if all(one.stop == other.start for one, other in zip(places, places[1:], strict=False)):
        return slice(places[0].start, places[-1].stop)
    return to_device(torch.cat([torch.arange(place.start, place.stop) for place in places]), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
