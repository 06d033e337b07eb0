"""The forward pass of Llama-like models without the wrappers of transformers. Knows weights and rows; knows no request.

A small model's decode step is mostly Python: half of it goes through transformers' layers of calls. Llama, Mistral,
Qwen2 and Qwen3 share one plain shape (RMSNorm, rotary attention, gated MLP), which is run here on the same Parameter
objects. Any other model is run through its own forward. Both are compared with the model's own at start (canary).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asyncrl_servers.embedded.attention import Pass

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
    """Logits of rows of tokens. Holds the model's Parameters themselves, so that it follows every swap of their data."""

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
            gated = functional.silu(functional.linear(normed_RH, *layer.gate)) * functional.linear(normed_RH, *layer.up)
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
