"""Attention of a prefill call: stretches of many sequences, those of like length in one matrix product. Knows tensors alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl_servers.embedded.attention import SlotCache, attention_weights, mix_values, padded_length

QUERY_CHUNK = 256
"""Query rows of one sequence taken at once."""
MAX_SCORES = 2**23
"""Most entries of one score matrix (32 MiB in float32); bounds how many stretches are taken at once."""


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """Positions [start, end) of the sequence in `slot` are rows [row, row + end - start) of the call."""

    slot: int
    start: int
    end: int
    row: int


@dataclass(frozen=True, slots=True)
class Block:
    """G stretches of at most T tokens each, padded to T; attention looks at `length` positions."""

    tokens: int
    length: int
    slots: Tensor
    """int64 [G]."""
    rows: Tensor
    """int64 [G * T]: row of the call of each query; padding repeats row 0."""
    invalid: Tensor
    """bool [G, 1, T, length]: true beyond the query's own position."""
    places: Tensor
    """int64 [K]: which of the G * T queries are no padding."""
    targets: Tensor
    """int64 [K]: their rows."""


class PrefillPass:
    """One call of the model over the stretches `items`, one after the other; rows after the last are padding."""

    def __init__(self, cache: SlotCache, items: Sequence[PrefillItem], num_heads: int, *, is_exact: bool) -> None:
        self.cache, self.is_exact = cache, is_exact
        self.num_tokens = sum(item.end - item.start for item in items)
        device = cache.keys.device
        _, _, kv_heads, positions, _ = cache.keys.shape
        flat = np.concatenate(
            [
                (item.slot * kv_heads * positions) + np.arange(item.start, item.end)[:, None] + np.arange(kv_heads) * positions
                for item in items
            ]
        )
        self.flat_index = torch.from_numpy(flat.reshape(-1)).to(device)
        """int64 [tokens * kv_heads]: row of the flattened cache that gets each key."""
        self.blocks = [_block(chunk, device) for chunk in _group(items, num_heads)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[R, heads, d] queries and [R, kv_heads, d] keys and values in, [R, heads, d] out."""
        rows, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for cached, new in ((keys, key), (values, value)):
            cached.view(-1, head_dim).index_copy_(0, self.flat_index, new[: self.num_tokens].reshape(-1, head_dim))
        queries = query * scaling
        output = query.new_zeros(rows, heads, head_dim)
        for block in self.blocks:
            num, tokens, length = len(block.slots), block.tokens, block.length
            grouped = (
                queries[block.rows].view(num, tokens, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).reshape(num, kv_heads, -1, head_dim)
            )
            scores = torch.matmul(grouped, keys[:, :, :length].index_select(0, block.slots).transpose(2, 3))
            weights = attention_weights(scores.view(num, heads, tokens, length), block.invalid)
            block_values = values[:, :, :length].index_select(0, block.slots)
            mixed = mix_values(weights.view(num, kv_heads, -1, length), block_values, self.is_exact)
            in_order = mixed.view(num, heads, tokens, head_dim).transpose(1, 2).reshape(-1, heads, head_dim)
            output.index_copy_(0, block.targets, in_order[block.places])
        return output


def _group(items: Sequence[PrefillItem], num_heads: int) -> list[list[PrefillItem]]:
    """Stretches of at most QUERY_CHUNK tokens, put together where token count and length round to the same."""
    by_size: dict[tuple[int, int], list[PrefillItem]] = {}
    for item in items:
        for start in range(item.start, item.end, QUERY_CHUNK):
            end = min(start + QUERY_CHUNK, item.end)
            size = (padded_length(end - start), padded_length(end))
            by_size.setdefault(size, []).append(PrefillItem(item.slot, start, end, item.row + start - item.start))
    groups = []
    for (tokens, length), members in by_size.items():
        most = max(1, MAX_SCORES // (num_heads * tokens * length))
        groups += [members[first : first + most] for first in range(0, len(members), most)]
    return groups


def _block(items: list[PrefillItem], device: torch.device) -> Block:
    tokens = padded_length(items[0].end - items[0].start)
    length = padded_length(items[0].end)
    starts, rows, counts = np.array([(item.start, item.row, item.end - item.start) for item in items], dtype=np.int64).T
    offsets = np.arange(tokens)
    is_real = offsets < counts[:, None]
    positions = torch.from_numpy(np.where(is_real, starts[:, None] + offsets, 0)).to(device)
    row_of = np.where(is_real, rows[:, None] + offsets, 0).reshape(-1)
    places = np.flatnonzero(is_real.reshape(-1))
    return Block(
        tokens,
        length,
        torch.tensor([item.slot for item in items], device=device),
        torch.from_numpy(row_of).to(device),
        (torch.arange(length, device=device) > positions[:, :, None])[:, None],
        torch.from_numpy(places).to(device),
        torch.from_numpy(row_of[places]).to(device),
    )
