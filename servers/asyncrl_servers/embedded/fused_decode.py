"""Decode steps of compiled layers: 9 kernels a layer, where the plain decoder launches 34.

Inductor fuses everything around four products and one opaque operator, which writes the new keys and values
into the cache and attends over all positions. Layers have the same shapes, so one compilation serves them
all, for every number of rows.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl_servers.embedded.decoder import PlainDecoder, norm_of, pinned
from asyncrl_servers.embedded.kv_attention import Ints
from asyncrl_servers.embedded.runner import DecodeGraphs, Layout, Runner

log = logging.getLogger(__name__)
MIN_HEAD_DIM = 16
"""Smallest side of a Triton product."""


@torch.library.custom_op("asyncrl::decode_attention", mutates_args=("keys", "values"), device_types="cpu")
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """Write each row's new key and value [R, kv_heads, d] into its slot, at position length - 1, and attend
    from query [R, heads, d] over all its positions.

    Row i is slot i. keys, values: [pages, kv_heads, positions, d]; table: int32 [slots, pages of a slot];
    lengths: int32 [R], with the new token. Rows of length 0 are padding: they write nothing, and their
    output is undefined.
    """
    (_, heads, _), (_, kv_heads, page, _) = query.shape, keys.shape
    rows_R = lengths.nonzero()[:, 0]
    newest_R = lengths[rows_R].long() - 1
    pages_R = table[rows_R, newest_R // page]
    keys[pages_R, :, newest_R % page] = key[rows_R]
    values[pages_R, :, newest_R % page] = value[rows_R]
    is_after_RP = torch.arange(table.shape[1] * page) > newest_R[:, None]

    def of_slots(cached: Tensor) -> Tensor:
        by_head = cached[table[rows_R]].transpose(1, 2).flatten(2, 3).float()
        return by_head.repeat_interleave(heads // kv_heads, dim=1)

    scores_RHP = (of_slots(keys) @ query[rows_R].float()[..., None])[..., 0] * scale
    weights_RHP = scores_RHP.masked_fill(is_after_RP[:, None], -torch.inf).softmax(-1)
    mixed = torch.zeros_like(query)
    mixed[rows_R] = (weights_RHP[:, :, None] @ of_slots(values))[:, :, 0].to(query.dtype)
    return mixed


@decode_attention.register_kernel("cuda")
def _(query: Tensor, key: Tensor, *others: Any) -> Tensor:
    # Triton comes with torch for CUDA only.
    from asyncrl_servers.embedded.decode_kernel import attend

    return cast(Tensor, attend(query.contiguous(), key.contiguous(), *others))


@decode_attention.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(query)


class Map(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class Layer(NamedTuple):
    """Weights of a layer. Norms are (shape, weight, epsilon)."""

    norm: tuple[Any, ...]
    mlp_norm: tuple[Any, ...]
    head_norms: tuple[tuple[Any, ...], ...]
    """Of queries and keys, if the model has them."""
    query_key_value: Map
    out: Map
    gate_up: Map
    down: Map


class Places(NamedTuple):
    """Where the rows are. cos, sin: [R, 1, d]; `sin` has the sign of rotate_half."""

    cos: Tensor
    sin: Tensor
    table: Tensor
    lengths: Tensor


def layer_step(
    hidden_RH: Tensor, added_RH: Tensor, layer: Layer, places: Places, cache: list[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Return the hidden states before the last sum, and what it adds: the next layer's norm takes the sum in
    its own kernel.
    """
    keys, values = cache
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    hidden_RH = hidden_RH + added_RH
    normed_RH = torch.rms_norm(hidden_RH, *layer.norm)
    merged = functional.linear(normed_RH, *layer.query_key_value).unflatten(1, (-1, head_dim))
    query, key, value = merged.split((merged.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if layer.head_norms:
        query, key = torch.rms_norm(query, *layer.head_norms[0]), torch.rms_norm(key, *layer.head_norms[1])
    half = head_dim // 2
    query = query * places.cos + query.roll(half, -1) * places.sin
    key = key * places.cos + key.roll(half, -1) * places.sin
    mixed = decode_attention(query, key, value, keys, values, places.table, places.lengths, scale)
    hidden_RH = hidden_RH + functional.linear(mixed.flatten(1), *layer.out)
    normed_RH = torch.rms_norm(hidden_RH, *layer.mlp_norm)
    gate, up = functional.linear(normed_RH, *layer.gate_up).chunk(2, dim=1)
    return hidden_RH, functional.linear(functional.silu(gate) * up, *layer.down)


def merge(*maps: nn.Linear) -> Map:
    """Join the maps' weights in one tensor. The maps keep views of it, so pushes still write by name."""
    merged = list[Any]()
    for name in ("weight", "bias"):
        parts = [getattr(one, name) for one in maps]
        if parts[0] is None:
            merged.append(None)
            continue
        whole = torch.cat([part.data for part in parts])
        for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = view
        merged.append(whole)
    return Map(*merged)


def why_not_fused(runner: Runner) -> str:
    """Return why the model's decode step cannot be fused; "" if it can."""
    if runner.plain is None:
        return f"model type {runner.loaded.model.config.model_type} has no plain decoder"
    if runner.is_exact:
        return "deterministic engines keep batch-invariant products"
    head_dim = runner.loaded.shape.head_dim
    if head_dim < MIN_HEAD_DIM or head_dim & (head_dim - 1):
        return f"heads of size {head_dim} are not a power of two of at least {MIN_HEAD_DIM}"
    return ""


def graph_sizes(most_rows: int) -> list[int]:
    """Return numbers of rows, up to one that holds `most_rows`: 2, 4, 8, 16, 24, 32, 48, 64, 96, ..

    One row counts as two: torch.compile would compile again for 1.
    """
    sizes = [2]
    while sizes[-1] < most_rows:
        last = sizes[-1]
        step = last if last < 16 else 1 << (last.bit_length() - 2)
        sizes.append(last + step)
    return sizes


class FusedSteps(DecodeGraphs):
    """Decode steps with merged weights and compiled layers; on CUDA one graph for each of graph_sizes().

    Weights that a push moves, and those that wake, are merged again before the next step.
    """

    min_steps = 0
    is_alone = True

    def __init__(self, runner: Runner, decoder: PlainDecoder, most_rows: int) -> None:
        self._sizes = graph_sizes(most_rows)
        self._layers = list[Layer]()
        super().__init__(runner, decoder, self._sizes[-1])
        is_cuda = runner.loaded.device.type == "cuda"
        self.layer_step = torch.compile(layer_step, fullgraph=True) if is_cuda else layer_step
        self.is_refused = not is_cuda

    def capture_all(self) -> None:
        """Capture the graphs of all sizes, largest first: smaller ones then use its memory."""
        for size in reversed(self._sizes):
            padding = np.zeros(size, np.int64)
            self.step(padding, padding)

    def drop(self) -> None:
        super().drop()
        self._layers.clear()

    @torch.inference_mode(False)  # pushes write into merged weights from other threads
    def _prepare(self) -> None:
        self._layers = [_merged(module) for module in self._runner.loaded.model.model.layers]

    def _fill(self, last_ids: Ints, lengths: Ints) -> Layout:
        """Rows beyond the last have length 0."""
        num = len(last_ids)
        inputs = np.zeros((3, self._most_rows), np.int64)
        inputs[:2, :num] = last_ids, lengths
        self._inputs.copy_(pinned(inputs, self._inputs.device), non_blocking=True)
        self._runner.cache.table_on_device()
        return next(size for size in self._sizes if size >= num), ()

    def _compute(self, layout: Layout, logits: Tensor) -> None:
        rows, cache, decoder = layout[0], self._runner.cache, self._decoder
        model = self._runner.loaded.model
        ids_R, lengths_R = self._inputs[:2, :rows].unbind()
        positions_R = (lengths_R - 1).clamp(min=0)
        places = Places(
            decoder.cos_PD[positions_R].unsqueeze(1),
            decoder.sin_PD[positions_R].unsqueeze(1),
            cache.table_on_device(),
            lengths_R.int(),
        )
        hidden_RH = functional.embedding(ids_R, model.model.embed_tokens.weight)
        added_RH = torch.zeros_like(hidden_RH)
        for one in (hidden_RH, added_RH, *places[:2], places.lengths):
            torch._dynamo.maybe_mark_dynamic(one, 0)
        for number, layer in enumerate(self._layers):
            of_layer = [cache.keys[number], cache.values[number]]
            hidden_RH, added_RH = self.layer_step(
                hidden_RH, added_RH, layer, places, of_layer, decoder.scaling
            )
        logits[:rows] = model.lm_head(torch.rms_norm(hidden_RH + added_RH, *norm_of(model.model.norm)))


def _merged(module: Any) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
    return Layer(
        norm_of(module.input_layernorm),
        norm_of(module.post_attention_layernorm),
        tuple(norm_of(one) for one in head_norms),
        merge(attention.q_proj, attention.k_proj, attention.v_proj),
        Map(attention.o_proj.weight, attention.o_proj.bias),
        merge(mlp.gate_proj, mlp.up_proj),
        Map(mlp.down_proj.weight, mlp.down_proj.bias),
    )
