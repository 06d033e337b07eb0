"""Attention with a window, a chunk or a soft cap, over packed tokens.

A token is a query in the first sequence of the layout that contains it, where its keys
are the tokens before it. Tokens that sequences share are thus queries once, at any
window.

    sequence 1: tokens 0..99      queries 0..99
    sequence 2: 0..59, 100..139   queries 100..139; with a window of 30 the first of them has keys 31..59, 100

A kernel gets spans of queries, or blocks of at most BLOCK queries that are padded on
the left: then one mask fits all blocks with enough keys. Cost and memory grow by the
window, not by the length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.attention_kinds import AttentionKind
from asyncrl.models.devices import to_device
from asyncrl.trainer.attention.tree import IntN, Layout, places_of

BLOCK = 64
CALL_PAIRS = 2048
"""Pairs of query and key that cost about as much as one more call (measured: 0.3 ms for
two passes and a gradient of a small model on one CPU thread).
"""
MOST_KEYS = 2**14
"""Keys of one call over all its rows, which bounds the memory of keys and scores."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """B rows of at most Q queries and K keys. The last query is the last key; what is
    missing is left.
    """

    key_R: Tensor
    query_R: Tensor
    real_queries: Tensor
    no_queries: Tensor
    missing_B: Tensor
    is_ragged: bool
    window: int | None


# All layers of a kind use the same tiles, in both passes.
@lru_cache(maxsize=16)
def mask_of(tiles: Tiles) -> Tensor:
    """Return the mask [B, 1, Q, K] to add to scores; one for all rows if they lack as
    many keys.
    """
    num_rows = len(tiles.missing_B)
    key_K = torch.arange(len(tiles.key_R) // num_rows, device=tiles.key_R.device)
    behind_QK = key_K[-(len(tiles.query_R) // num_rows) :, None] - key_K
    is_seen_QK = (behind_QK >= 0) & (behind_QK < (tiles.window or len(key_K)))
    missing_B = tiles.missing_B if tiles.is_ragged else tiles.missing_B[:1]
    is_seen_BQK = is_seen_QK & (key_K >= missing_B[:, None, None])
    return torch.where(is_seen_BQK, 0.0, -torch.inf)[:, None]


@dataclass(frozen=True, eq=False)
class Span:
    """Queries [first, end) of a sequence with places `place_T`, and their keys [low,
    end).
    """

    place_T: IntN
    first: int
    end: int
    low: int

    @property
    def queries(self) -> IntN:
        return self.place_T[self.first : self.end]

    @property
    def keys(self) -> IntN:
        return self.place_T[self.low : self.end]


def spans_of(
    layout: Layout, kind: AttentionKind, block: int | None = None
) -> Iterator[Span]:
    """Yield every path of the layout as spans, cut at the borders of chunks and blocks."""
    is_known_N = np.zeros(layout.num_tokens, np.bool_)
    # The longest sequence that ends in a path contains all of it, and earlier paths.
    for runs in sorted(layout.rows, key=lambda runs: (runs[-1][0], -runs[-1][1])):
        place_T = places_of(runs)
        num_known = int(is_known_N[place_T].sum())
        length = len(place_T)
        is_known_N[place_T] = True
        chunk = kind.chunk or length
        edges = {
            num_known,
            length,
            *range(0, length, chunk),
            *range(0, length, block or length),
        }
        for first, end in pairwise(sorted(edge for edge in edges if edge >= num_known)):
            low = first - first % chunk
            if kind.window is not None:
                low = max(low, first - kind.window + 1)
            yield Span(place_T, first, end, low)


def short_spans(layout: Layout) -> list[Span]:
    """Return the paths that tiles compute faster than one call each."""
    spans = spans_of(layout, AttentionKind())
    short = [span for span in spans if span.first <= BLOCK >= span.end - span.first]
    return short if len(short) > 1 else []


def tiles_of(
    spans: Iterable[Span], window: int | None, device: torch.device
) -> Iterator[Tiles]:
    group = list[Span]()
    size = width = used = 0
    # Rows of a call are padded to the largest, so rows of about one size go together. A
    # row begins another call if the padding would cost more than a call and a quarter of
    # the work.
    for (num_queries, num_keys), span in sorted(
        ((_rounded(span), span) for span in spans),
        key=lambda pair: pair[0],
        reverse=True,
    ):
        num_rows = len(group) + 1
        size, width = max(size, num_queries), max(width, num_keys)
        used += num_queries * num_keys
        padding = num_rows * size * width - used
        is_wasteful = padding > CALL_PAIRS + used / 4
        if group and (is_wasteful or num_rows * width > MOST_KEYS):
            yield _tiles(group, window, device)
            group = []
            size, width = num_queries, num_keys
            used = size * width
        group.append(span)
    if group:
        yield _tiles(group, window, device)


def _rounded(span: Span) -> tuple[int, int]:
    """Return numbers of queries and keys in steps of the kernel's vectors."""
    return -(-len(span.queries) // 8) * 8, -(-len(span.keys) // 16) * 16


def _tiles(spans: list[Span], window: int | None, device: torch.device) -> Tiles:
    # The kernel is faster with whole vectors.
    width = -(-max(len(span.keys) for span in spans) // 16) * 16
    size = max(len(span.queries) for span in spans)
    num_missing_B = width - np.array([len(span.keys) for span in spans])
    no_queries_B = size - np.array([len(span.queries) for span in spans])
    # Even NaN must not reach another sequence: a row is padded with a token of its own.
    key_BK = np.empty((len(spans), width), np.int64)
    for key_K, span in zip(key_BK, spans, strict=True):
        keys = span.keys
        key_K[: width - len(keys)] = keys[0]
        key_K[width - len(keys) :] = keys
    is_query_BQ = np.arange(size) >= no_queries_B[:, None]
    real = np.flatnonzero(is_query_BQ)
    missing = np.flatnonzero(~is_query_BQ)
    key_R, query_R, real_queries, no_queries, missing_B = (
        to_device(array, device)
        for array in (
            key_BK.flatten(),
            key_BK[:, width - size :].flatten(),
            real,
            missing,
            num_missing_B,
        )
    )
    return Tiles(
        key_R,
        query_R,
        real_queries,
        no_queries,
        missing_B,
        bool(np.ptp(num_missing_B)),
        window,
    )


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return output [B, H, Q, D] and log-sum-exp [B, H, Q], both float32 or wider.

    The softmax is of softcap * tanh(score / softcap) + mask (Gemma 2,
    https://arxiv.org/abs/2408.00118). Key and value may have fewer heads.
    """
    num_heads = key.shape[1]
    score, _ = _scores(_by_key_head(query, num_heads), key, mask, scale, softcap)
    logsum = score.logsumexp(dim=-1)
    weight = score.sub_(logsum[..., None]).exp_()
    output = _product(weight.to(value.dtype), value)
    return output.reshape(*query.shape[:3], -1), logsum.reshape(query.shape[:3])


def dense_backward(
    tensors: list[Tensor],
    logsum: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. `tensors`: output gradient, query,
    key, value, output.
    """
    grad, query, key, value, output = tensors
    num_heads = key.shape[1]
    shape = query.shape
    grad, query, output = (
        _by_key_head(one, num_heads) for one in (grad, query, output)
    )
    score, slope = _scores(query, key, mask, scale, softcap)
    weight = score.sub_(_by_key_head(logsum[..., None], num_heads)).exp_()
    grad_value = _product(weight.to(grad.dtype).mT, grad)
    # Softmax: the gradient of a score is its weight times (gradient of the weight -
    # weighted mean of those gradients). That mean is gradient . output.
    delta = (grad.to(weight.dtype) * output).sum(dim=-1, keepdim=True)
    grad_score = (_product(grad, value.mT) - delta).mul_(weight).mul_(scale)
    if slope is not None:
        grad_score *= slope
    grad_score = grad_score.to(query.dtype)
    grad_query = _product(grad_score, key).reshape(shape)
    return grad_query, _product(grad_score.mT, query), grad_value


def _scores(
    query: Tensor, key: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the masked scores, and the derivative of the soft cap."""
    score = _product(query, key.mT).mul_(scale)
    slope = None
    if softcap is not None:
        tanh = score.div_(softcap).tanh_()
        slope = 1 - tanh.square()
        score = tanh.mul_(softcap)
    return score.add_(mask.repeat(1, 1, query.shape[2] // mask.shape[2], 1)), slope


def _by_key_head(tensor: Tensor, num_heads: int) -> Tensor:
    """Return [B, key heads, queries of all their heads, D] of [B, H, Q, D]."""
    num_rows, _, num_queries, size = tensor.shape
    return tensor.reshape(num_rows, num_heads, -1, num_queries, size).flatten(2, 3)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32, or wider."""
    wide = torch.promote_types(left.dtype, torch.float32)
    return left.to(wide) @ right.to(wide)
