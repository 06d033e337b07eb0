# mypy: ignore-errors
"""Triton kernels of decoding over pages. Needs Triton, which comes with torch for CUDA.

One program reads one key-value head of one row, or one of SPLITS parts of its positions (flash decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Positions read at once."""
MIN_QUERIES = 16
"""Tensor cores multiply at least 16 rows."""
WANTED_PROGRAMS = 256
"""About two for each multiprocessor of an H100; fewer rows are split until there are as many."""
MAX_SPLITS = 16


@triton.jit
def _attend(
    query,
    key,
    value,
    keys,
    values,
    table,
    lengths,
    mixed,
    logsums,
    scale,
    value_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Write the row's new key and value, and attend over all its positions. A row of length 0 writes
    nothing.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    at_D = tl.arange(0, HEAD_DIM)
    at_Q = tl.arange(0, QUERIES)
    head_Q = (row * KV_HEADS + head) * GROUP + at_Q
    is_query_Q = at_Q < GROUP
    place_QD = head_Q[:, None] * HEAD_DIM + at_D[None, :]
    query_QD = tl.load(query + place_QD, mask=is_query_Q[:, None], other=0.0)
    key_D = tl.load(key + (row * KV_HEADS + head) * HEAD_DIM + at_D)
    value_D = tl.load(value + row * value_stride + head * HEAD_DIM + at_D)
    newest = length - 1
    if split == 0:
        if length > 0:
            page = tl.load(table + row * table_stride + newest // PAGE).to(tl.int64)
            place_D = ((page * KV_HEADS + head) * PAGE + newest % PAGE) * HEAD_DIM + at_D
            tl.store(keys + place_D, key_D)
            tl.store(values + place_D, value_D)
    # The first part starts with the newest position, which is not read back from the cache.
    score_Q = tl.sum(query_QD.to(tl.float32) * key_D.to(tl.float32)[None, :], axis=1) * scale
    is_first = split == 0
    most_Q = tl.where(is_first, score_Q, float("-inf"))
    total_Q = tl.where(is_first, 1.0, 0.0) + tl.zeros([QUERIES], tl.float32)
    newest_D = tl.where(is_first, value_D.to(tl.float32), 0.0)
    sum_QD = newest_D[None, :] + tl.zeros([QUERIES, HEAD_DIM], tl.float32)
    part = tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK
    end = tl.minimum(split * part + part, newest)
    for start in range(split * part, end, BLOCK):
        position_B = start + tl.arange(0, BLOCK)
        is_read_B = position_B < end
        page_B = tl.load(table + row * table_stride + position_B // PAGE, mask=is_read_B, other=0).to(tl.int64)
        place_B = (page_B * KV_HEADS + head) * PAGE + position_B % PAGE
        place_BD = place_B[:, None] * HEAD_DIM + at_D[None, :]
        key_BD = tl.load(keys + place_BD, mask=is_read_B[:, None], other=0.0)
        score_QB = tl.dot(query_QD, tl.trans(key_BD), input_precision="ieee") * scale
        score_QB = tl.where(is_read_B[None, :], score_QB, float("-inf"))
        new_most_Q = tl.maximum(most_Q, tl.max(score_QB, axis=1))
        shrink_Q = tl.exp(most_Q - new_most_Q)
        weight_QB = tl.exp(score_QB - new_most_Q[:, None])
        value_BD = tl.load(values + place_BD, mask=is_read_B[:, None], other=0.0)
        product_QD = tl.dot(weight_QB.to(value_BD.dtype), value_BD, input_precision="ieee")
        sum_QD = sum_QD * shrink_Q[:, None] + product_QD
        total_Q = total_Q * shrink_Q + tl.sum(weight_QB, axis=1)
        most_Q = new_most_Q
    found_QD = sum_QD / tl.maximum(total_Q, 1e-30)[:, None]
    if SPLITS == 1:
        tl.store(mixed + place_QD, found_QD.to(mixed.dtype.element_ty), mask=is_query_Q[:, None])
    else:
        part_Q = head_Q * SPLITS + split
        part_QD = part_Q[:, None] * HEAD_DIM + at_D[None, :]
        tl.store(mixed + part_QD, found_QD, mask=is_query_Q[:, None])
        # A part without positions has the log-sum-exp -inf, so its weight is 0.
        tl.store(logsums + part_Q, most_Q + tl.log(total_Q), mask=is_query_Q)


@triton.jit
def _join(parts, logsums, output, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Weigh the parts of one query head."""
    at_S = tl.program_id(0) * SPLITS + tl.arange(0, SPLITS)
    at_D = tl.arange(0, HEAD_DIM)
    logsum_S = tl.load(logsums + at_S)
    weight_S = tl.exp(logsum_S - tl.max(logsum_S, axis=0))
    part_SD = tl.load(parts + at_S[:, None] * HEAD_DIM + at_D[None, :])
    sum_D = tl.sum(part_SD * weight_S[:, None], axis=0) / tl.sum(weight_S, axis=0)
    tl.store(output + tl.program_id(0) * HEAD_DIM + at_D, sum_D.to(output.dtype.element_ty))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """Compute asyncrl::decode_attention."""
    rows, heads, head_dim = query.shape
    _, kv_heads, page, _ = keys.shape
    splits = 1
    while rows * kv_heads * splits < WANTED_PROGRAMS and splits < MAX_SPLITS:
        splits *= 2
    output = torch.empty_like(query)
    parts, logsums = output, output
    if splits > 1:
        parts = query.new_empty((rows, heads, splits, head_dim), dtype=torch.float32)
        logsums = query.new_empty((rows, heads, splits), dtype=torch.float32)
    group = heads // kv_heads
    _attend[rows, kv_heads, splits](
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
        value.stride(0),
        table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        QUERIES=max(MIN_QUERIES, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PAGE=page,
        BLOCK=BLOCK,
        SPLITS=splits,
    )
    if splits > 1:
        _join[(rows * heads,)](parts, logsums, output, HEAD_DIM=head_dim, SPLITS=splits)
    return output
