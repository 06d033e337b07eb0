"""Attention of a prefill call: stretches of many sequences, those of like length in one matrix product. Knows
tensors alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl_servers.embedded.kv_attention import (
    Pass,
    SlotCache,
    attention_weights,
    mix_values,
    padded_length,
)

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
    """One call of the model over the stretches `items`, one after the other; rows after the last are
    padding.
    """

    def __init__(
        self, cache: SlotCache, items: Sequence[PrefillItem], num_heads: int, *, is_exact: bool
    ) -> None:
        self.cache, self.is_exact = cache, is_exact
        self.num_tokens = sum(item.end - item.start for item in items)
        device = cache.keys.device
        _, _, kv_heads, positions, _ = cache.keys.shape
        flat = np.concatenate(
            [
                (item.slot * kv_heads * positions)
                + np.arange(item.start, item.end)[:, None]
                + np.arange(kv_heads) * positions
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
            cached.view(-1, head_dim).index_copy_(
                0, self.flat_index, new[: self.num_tokens].reshape(-1, head_dim)
            )
        queries = query * scaling
        output = query.new_zeros(rows, heads, head_dim)
        for block in self.blocks:
            num, tokens, length = len(block.slots), block.tokens, block.length
            grouped = (
                queries[block.rows]
                .view(num, tokens, kv_heads, -1, head_dim)
                .permute(0, 2, 3, 1, 4)
                .reshape(num, kv_heads, -1, head_dim)
            )
            scores = torch.matmul(grouped, keys[:, :, :length].index_select(0, block.slots).transpose(2, 3))
            weights = attention_weights(scores.view(num, heads, tokens, length), block.invalid)
            block_values = values[:, :, :length].index_select(0, block.slots)
            mixed = mix_values(weights.view(num, kv_heads, -1, length), block_values, self.is_exact)
            in_order = mixed.view(num, heads, tokens, head_dim).transpose(1, 2).reshape(-1, heads, head_dim)
            output.index_copy_(0, block.targets, in_order[block.places])
        return output


def _group(items: Sequence[PrefillItem], num_heads: int) -> list[list[PrefillItem]]:
    """Stretches of at most QUERY_CHUNK tokens, put together where token count and length round to the
    same.
    """
    by_size: dict[tuple[int, int], list[PrefillItem]] = {}
    for item in items:
        for start in range(item.start, item.end, QUERY_CHUNK):
            end = min(start + QUERY_CHUNK, item.end)
            size = (padded_length(end - start), padded_length(end))
            by_size.setdefault(size, []).append(
                PrefillItem(item.slot, start, end, item.row + start - item.start)
            )
    groups = []
    for (tokens, length), members in by_size.items():
        most = max(1, MAX_SCORES // (num_heads * tokens * length))
        groups += [members[first : first + most] for first in range(0, len(members), most)]
    return groups


def _block(items: list[PrefillItem], device: torch.device) -> Block:
    tokens = padded_length(items[0].end - items[0].start)
    length = padded_length(items[0].end)
    starts, rows, counts = np.array(
        [(item.start, item.row, item.end - item.start) for item in items], dtype=np.int64
    ).T
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


# The forward pass of Llama-like models without the wrappers of transformers. Knows weights and rows; knows no
# request.
#
# A small model's decode step is mostly Python: half of it goes through transformers' layers of calls. Llama,
# Mistral,
# Qwen2 and Qwen3 share one plain shape (RMSNorm, rotary attention, gated MLP), which is run here on the same
# Parameter
# objects. Any other model is run through its own forward. Both are compared with the model's own at start
# (canary).


MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
STATIC_ROPE = frozenset({"default", "linear", "llama3"})
"""Kinds of rotary embedding whose angles depend on the position alone."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parameters of one decoder layer; a (weight, bias) pair for each linear map."""

    attention_norm: tuple[Tensor, float]
    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]
    value: tuple[Tensor, Tensor | None]
    output: tuple[Tensor, Tensor | None]
    query_norm: tuple[Tensor, float] | None
    key_norm: tuple[Tensor, float] | None
    mlp_norm: tuple[Tensor, float]
    gate: tuple[Tensor, Tensor | None]
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


class PlainDecoder:
    """Logits of rows of tokens. Holds the model's Parameters themselves, so that it follows every swap of
    their data.
    """

    def __init__(self, model: Any, max_length: int) -> None:
        base = model.model
        self._embedding = base.embed_tokens.weight
        self._layers = [_layer(layer) for layer in base.layers]
        self._norm = _norm(base.norm)
        self._head = _linear(model.lm_head)
        first = base.layers[0].self_attn
        self._head_dim, self._scaling = first.head_dim, first.scaling
        positions = torch.arange(max_length, device=self._embedding.device)
        cos_1PD, sin_1PD = base.rotary_emb(self._embedding[:1][None], positions[None])
        half = self._head_dim // 2
        self._cos_PD = cos_1PD[0]
        # rotate_half negates the first half of what it rolls; the sign is put into the table instead.
        self._sin_PD = torch.cat((-sin_1PD[0, :, :half], sin_1PD[0, :, half:]), dim=-1)

    @classmethod
    def of(cls, model: Any, max_length: int) -> PlainDecoder | None:
        """For this model, or None if its forward may be another one."""
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        is_plain = (
            config.model_type in MODEL_TYPES
            and config.hidden_act in ("silu", "swish")
            and rope.get("rope_type", "default") in STATIC_ROPE
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )
        return cls(model, max_length) if is_plain else None

    def forward(self, pass_: Pass, ids_R: Tensor, positions_R: Tensor, keep: Tensor | None) -> Tensor:
        """Logits of the rows `keep` (None: all), [rows, V]."""
        hidden_RH = functional.embedding(ids_R, self._embedding)
        cos_R1D, sin_R1D = self._cos_PD[positions_R].unsqueeze(1), self._sin_PD[positions_R].unsqueeze(1)
        num_rows, head_dim = len(ids_R), self._head_dim
        half = head_dim // 2
        for number, layer in enumerate(self._layers):
            normed_RH = _rms_norm(hidden_RH, layer.attention_norm)
            query = functional.linear(normed_RH, *layer.query).view(num_rows, -1, head_dim)
            key = functional.linear(normed_RH, *layer.key).view(num_rows, -1, head_dim)
            value = functional.linear(normed_RH, *layer.value).view(num_rows, -1, head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = _rms_norm(query, layer.query_norm), _rms_norm(key, layer.key_norm)
            query = query * cos_R1D + query.roll(half, -1) * sin_R1D
            key = key * cos_R1D + key.roll(half, -1) * sin_R1D
            mixed = pass_.attend(number, query, key, value, self._scaling)
            hidden_RH = hidden_RH + functional.linear(mixed.reshape(num_rows, -1), *layer.output)
            normed_RH = _rms_norm(hidden_RH, layer.mlp_norm)
            gated = functional.silu(functional.linear(normed_RH, *layer.gate)) * functional.linear(
                normed_RH, *layer.up
            )
            hidden_RH = hidden_RH + functional.linear(gated, *layer.down)
        if keep is not None:
            hidden_RH = hidden_RH[keep]
        return functional.linear(_rms_norm(hidden_RH, self._norm), *self._head)


def _rms_norm(x: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    return torch.rms_norm(x, norm[0].shape, norm[0], norm[1])


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, module.variance_epsilon


def _linear(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return module.weight, module.bias


def _layer(module: Any) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    has_norm = hasattr(attention, "q_norm")
    return _Layer(
        attention_norm=_norm(module.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        output=_linear(attention.o_proj),
        query_norm=_norm(attention.q_norm) if has_norm else None,
        key_norm=_norm(attention.k_norm) if has_norm else None,
        mlp_norm=_norm(module.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )
