# mypy: ignore-errors
"""Triton kernel of decoding over the slot cache. Triton comes with torch for CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl_servers.embedded.kv_attention import SPLITS

BLOCK = 64
"""Positions read at once."""
MIN_QUERIES = 16
"""Tensor cores multiply at least 16 rows."""


@triton.jit
def _places(pages, position, head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Return rows of the cache flattened to [pages * kv_heads * positions]. Position -1
    has page 0.
    """
    page = tl.load(pages + tl.maximum(position, 0) // PAGE).to(tl.int64)
    return (page * KV_HEADS + head) * PAGE + position % PAGE


@triton.jit
def _attend(  # noqa: PLR0913 - a kernel gets pointers, strides and sizes one by one
    query,
    key,
    value,
    keys,
    values,
    table,
    lengths,
    parts,
    logsums,
    scale,
    value_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Write the row's new key and value, and attend over a part of its positions (flash
    decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). A row of length
    0 writes nothing.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    own = row * KV_HEADS + head
    newest = tl.load(lengths + row) - 1
    pages = table + row * table_stride
    at_D = tl.arange(0, SIZE)
    at_Q = tl.arange(0, QUERIES)
    head_Q = own * GROUP + at_Q
    is_query_Q = at_Q < GROUP
    query_QD = tl.load(
        query + head_Q[:, None] * SIZE + at_D, mask=is_query_Q[:, None], other=0.0
    )
    key_D = tl.load(key + own * SIZE + at_D)
    value_D = tl.load(value + row * value_stride + head * SIZE + at_D)
    # The first part starts with the newest position, and does not read it back from the
    # cache.
    is_first = split == 0
    is_written = is_first & (newest >= 0)
    place_D = _places(pages, newest, head, KV_HEADS, PAGE) * SIZE + at_D
    tl.store(keys + place_D, key_D, mask=is_written)
    tl.store(values + place_D, value_D, mask=is_written)
    score_Q = tl.sum(query_QD.to(tl.float32) * key_D.to(tl.float32), axis=1) * scale
    most_Q = tl.where(is_first, score_Q, float("-inf"))
    total_Q = tl.exp(most_Q - score_Q)
    sum_QD = total_Q[:, None] * value_D.to(tl.float32)
    part = tl.cdiv(tl.cdiv(newest, BLOCK), SPLITS) * BLOCK
    end = tl.minimum(split * part + part, newest)
    for start in range(split * part, end, BLOCK):
        position_B = start + tl.arange(0, BLOCK)
        is_read_B = position_B < end
        place_B = _places(pages, tl.minimum(position_B, newest), head, KV_HEADS, PAGE)
        place_BD = place_B[:, None] * SIZE + at_D
        key_BD = tl.load(keys + place_BD, mask=is_read_B[:, None], other=0.0)
        score_QB = tl.dot(query_QD, tl.trans(key_BD), input_precision="ieee") * scale
        score_QB = tl.where(is_read_B, score_QB, float("-inf"))
        new_most_Q = tl.maximum(most_Q, tl.max(score_QB, axis=1))
        weight_QB = tl.exp(score_QB - new_most_Q[:, None])
        shrink_Q = tl.exp(most_Q - new_most_Q)
        value_BD = tl.load(values + place_BD, mask=is_read_B[:, None], other=0.0)
        product_QD = tl.dot(
            weight_QB.to(value_BD.dtype), value_BD, input_precision="ieee"
        )
        sum_QD = sum_QD * shrink_Q[:, None] + product_QD
        total_Q = total_Q * shrink_Q + tl.sum(weight_QB, axis=1)
        most_Q = new_most_Q
    part_Q = head_Q * SPLITS + split
    mean_QD = sum_QD / tl.maximum(total_Q, 1e-30)[:, None]
    tl.store(parts + part_Q[:, None] * SIZE + at_D, mean_QD, mask=is_query_Q[:, None])
    # A part without positions has the log-sum-exp -inf, so its weight is 0.
    tl.store(logsums + part_Q, most_Q + tl.log(total_Q), mask=is_query_Q)


def attend(*inputs: Tensor | float) -> tuple[Tensor, Tensor]:
    """Compute decode_attention of fused_decode.py."""
    query, key, value, keys, values, table, lengths, scale = inputs
    rows, heads, size = query.shape
    kv_heads, page = keys.shape[1:3]
    group = heads // kv_heads
    parts = query.new_empty((rows, heads, SPLITS, size), dtype=torch.float32)
    logsums = parts.new_empty((rows, heads, SPLITS))
    read = (query.contiguous(), key.contiguous(), value, keys, values, table, lengths)
    strides = (value.stride(0), table.stride(0))
    queries = max(MIN_QUERIES, triton.next_power_of_2(group))
    sizes = (kv_heads, group, queries, size, page, BLOCK, SPLITS)
    _attend[rows, kv_heads, SPLITS](*read, parts, logsums, scale, *strides, *sizes)
    return parts, logsums
