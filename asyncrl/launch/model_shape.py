"""Model sizes from config.json, without torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import ModelConfig
from asyncrl.config.trainer_algorithm import MIN_SLICE, MOST_LOGITS

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder with gated MLPs; all 0 if unknown."""

    num_parameters: int = 0
    hidden: int = 0
    layers: int = 0
    vocab: int = 0
    attention: int = 0
    """Queries, keys, values and output per token and layer."""
    cached: int = 0
    """Keys and values, or the latent, per token and layer."""
    active: int = 0
    """MLP width of a token's active experts."""
    embeddings: int = 0
    """Parameters of embedding and head."""
    has_experts: bool = False

    def activation_bytes(self, num_tokens: int, item: int, kind: str, *, kept: float) -> int:
        """Return the bytes kept by a forward-backward: layer inputs, `kept` (0 to 1) of the other
        activations, one layer that is recomputed, and a float32 slice of logits with gradient.
        """
        layer = num_tokens * item * (4 * self.hidden + self.attention + 3 * self.active)
        logits = min(max(MOST_LOGITS[kind], MIN_SLICE * num_tokens), num_tokens * self.vocab)
        inputs = num_tokens * self.hidden * item
        in_layers = self.layers * int(inputs + kept * (layer - inputs))
        return in_layers + (layer if kept < 1 else 0) + 2 * 4 * logits


def model_shape(model: ModelConfig) -> ModelShape:
    if model.scratch is not None:
        return _shape({"vocab_size": len(model.scratch.characters) + 8, **model.scratch.architecture})
    path = Path(model.path or "") / "config.json"
    if not path.is_file():
        with contextlib.suppress(ValueError, ModuleNotFoundError):
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(str(model.path), path.name, revision=model.revision)
            path = Path(cached) if isinstance(cached, str) else path
    try:
        architecture = json.loads(path.read_text(encoding="utf-8"))
        return _shape(architecture.get("text_config", architecture))
    except (OSError, ValueError):
        return ModelShape()


def _shape(architecture: Mapping[str, Any]) -> ModelShape:
    def size(name: str, default: int = 0) -> int:
        return int(architecture.get(name) or default)

    hidden, layers, vocab = size("hidden_size"), size("num_hidden_layers"), size("vocab_size")
    heads = size("num_attention_heads", 1)
    head_dim = size("head_dim", hidden // heads)
    keys = size("num_key_value_heads", heads) * head_dim
    attention = 2 * (heads * head_dim + keys)
    latent = size("kv_lora_rank") + size("qk_rope_head_dim") if size("kv_lora_rank") else 0
    width = active = size("intermediate_size", 4 * hidden)
    if num_experts := next(filter(None, map(size, EXPERTS)), 0):
        expert = size("moe_intermediate_size", width)
        shared = size("shared_expert_intermediate_size", size("n_shared_experts") * expert)
        width = num_experts * expert + shared
        active = size("num_experts_per_tok", size("moe_k", 1)) * expert + shared
    embeddings = vocab * hidden * (1 if architecture.get("tie_word_embeddings", False) else 2)
    return ModelShape(
        # ignores norms and routers; assumes experts in all layers
        num_parameters=embeddings + layers * hidden * (attention + 3 * width),
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        attention=attention,
        cached=latent or 2 * keys,
        active=active,
        embeddings=embeddings,
        has_experts=num_experts > 0,
    )
