"""Sizes of a model, from its config.json."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import ModelConfig
from asyncrl.config.model_config import split_hub_id
from asyncrl.config.trainer_config import MIN_SLICE, MOST_LOGITS
from asyncrl.models.support import EXPERTS, has_experts, has_states

EXPERTS_ROUND = (
    "rounding of an expert depends on how many tokens are routed to it at once"
)
STATES_ROUND = (
    "rounding of layers with states depends on how many tokens they read at once"
)
QK_NORM = ("qwen3", "olmo2", "olmo3")
"""Beginnings of model types with norms of queries and keys."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder with gated MLPs; all 0 if unknown."""

    num_parameters: int = 0
    hidden: int = 0
    layers: int = 0
    vocab: int = 0
    saved: int = 0
    """Numbers per token and layer that its backward pass needs, with the layer's input.
    """
    at_end: int = 0
    """The same of final norm and head: the last output in float32, normed, and gathered
    for the loss.
    """
    cached: int = 0
    """Keys and values, or the latent, per token and layer."""
    active: int = 0
    """MLP width of a token's active experts."""
    routed: int = 0
    """Experts that read a token, in all layers."""
    embeddings: int = 0
    """Parameters of embedding and head."""
    inexact: str = ""
    """Why a token's bits depend on the tokens that are computed with it, or ''."""

    def activation_bytes(
        self, num_tokens: int, item: int, kind: str, *, kept: float
    ) -> int:
        """Return the peak of a forward-backward: saved tensors, and float32 logits of a
        slice with their gradient.
        """
        logits = self.logits_at_once(num_tokens, kind)
        return self.saved_bytes(num_tokens, item, kept=kept) + 2 * 4 * logits

    def logits_at_once(self, num_tokens: int, kind: str) -> int:
        """Return the logits in a slice of the vocabulary."""
        most = max(MOST_LOGITS[kind], MIN_SLICE * num_tokens)
        return min(most, num_tokens * self.vocab)

    def saved_bytes(self, num_tokens: int, item: int, *, kept: float) -> int:
        """Return the bytes of tensors that autograd saves: layer inputs, `kept` (0 to
        1) of the layers' other tensors, the rest of one layer, which its backward pass
        recomputes, and the tensors of final norm and head.

        Layers are compiled if they can be, as on CUDA: Inductor's partitioner
        recomputes pointwise operators, and keeps products, attention and inputs of
        norms. Counted tensors agree within 2 %; with 0 < kept < 1 this is a bound. With
        trainer.compile=false, layers in bfloat16 save 1.4 to 1.6 times as much. Numbers
        per head (log-sum-exps, scales of norms) are left out.
        """
        others = self.saved - self.hidden
        in_layers = self.layers * (self.hidden + kept * others) + (1 - kept) * others
        return int(num_tokens * item * (in_layers + self.at_end))


def model_shape(model: ModelConfig) -> ModelShape:
    architecture = read_text_architecture(model)
    return _shape(architecture) if architecture else ModelShape()


def read_text_architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the language model's part of config.json, or {}."""
    architecture = read_architecture(model)
    return dict(architecture.get("text_config", architecture))


def read_architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the contents of config.json, or {} if it is only on the hub."""
    if model.scratch is not None:
        return {
            "vocab_size": len(model.scratch.characters) + 8,
            **model.scratch.architecture,
        }
    try:
        return dict(json.loads(find_architecture(model).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def find_architecture(model: ModelConfig) -> Path:
    """Return the path of config.json, in the hub's cache if it is only there."""
    path = Path(os.path.expanduser(model.path or "")) / "config.json"  # noqa: PTH111  never raises
    if not os.path.isfile(path):  # noqa: PTH113
        with contextlib.suppress(ValueError, ModuleNotFoundError):
            from huggingface_hub import try_to_load_from_cache

            hub_id, revision = split_hub_id(str(model.path))
            cached = try_to_load_from_cache(hub_id, path.name, revision=revision)
            path = Path(cached) if isinstance(cached, str) else path
    return path


def _shape(architecture: Mapping[str, Any]) -> ModelShape:
    def size(name: str, default: int = 0) -> int:
        value = architecture.get(name) or default
        # Gemma 3n has a width for each layer.
        return max(value) if isinstance(value, list) else int(value)

    hidden, layers, vocab = (
        size("hidden_size"),
        size("num_hidden_layers"),
        size("vocab_size"),
    )
    heads = size("num_attention_heads", 1)
    head_dim = size("head_dim", hidden // heads)
    keys = size("num_key_value_heads", heads) * head_dim
    attention = 2 * (heads * head_dim + keys)
    model_type = architecture.get("model_type", "")
    # The layer's input, its norm, and both again before the MLP; gate, up, and their
    # product.
    saved, of_mlp, at_end = 4 * hidden + attention, 3, 4 * hidden
    if model_type.startswith(QK_NORM):
        saved += attention // 2  # before their norm, and rotated
    if model_type.startswith("gemma3"):
        # Uncompiled, because of its sliding windows. Four norms of a layer, and those
        # of queries and keys, save two float32 tensors each.
        saved, of_mlp, at_end = 18 * hidden + 3 * attention, 4, 5 * hidden
    latent = (
        size("kv_lora_rank") + size("qk_rope_head_dim") if size("kv_lora_rank") else 0
    )
    width = active = size("intermediate_size", 4 * hidden)
    chosen = 0
    inexact = STATES_ROUND if has_states(architecture) else ""
    if has_experts(architecture):
        inexact = EXPERTS_ROUND
        num_experts = max(map(size, EXPERTS))
        expert = size("moe_intermediate_size", width)
        shared = size(
            "shared_expert_intermediate_size", size("n_shared_experts") * expert
        )
        width = num_experts * expert + shared
        chosen = size("num_experts_per_tok", size("moe_k", 1))
        active = chosen * expert + shared
        saved += 2 * chosen * hidden  # each expert's input and output
    embeddings = (
        vocab * hidden * (1 if architecture.get("tie_word_embeddings", False) else 2)
    )
    return ModelShape(
        # ignores norms and routers; assumes experts in all layers
        num_parameters=embeddings + layers * hidden * (attention + 3 * width),
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        saved=saved + of_mlp * active,
        at_end=at_end,
        cached=latent or 2 * keys,
        active=active,
        routed=layers * chosen,
        embeddings=embeddings,
        inexact=inexact,
    )
