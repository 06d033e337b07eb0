"""How large a model is, from its config.json and file headers alone. Loads nothing, knows no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import ModelConfig

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format allows no larger header."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-like decoder: attention and gated MLP. `kv_per_token`: K plus V entries of one token in all layers."""

    num_parameters: int
    hidden: int
    intermediate: int
    layers: int
    kv_per_token: int

    def num_adapter_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer of the decoder, at most: seven a layer, as wide as the MLP."""
        return self.layers * rank * 7 * (self.hidden + self.intermediate)

    def activation_bytes(self, num_tokens: int, item_bytes: int, is_checkpointed: bool) -> int:
        """What one forward pass keeps for its backward pass: a layer's input alone, or about 14 vectors and 4 of the MLP."""
        a_layer = self.hidden if is_checkpointed else 14 * self.hidden + 4 * self.intermediate
        return num_tokens * self.layers * a_layer * item_bytes


def model_shape(model: ModelConfig) -> ModelShape | None:
    """The shape, None if the model is not on disk (a hub id that is not fetched yet)."""
    if model.scratch is not None:
        architecture = dict(model.scratch.architecture)
        architecture.setdefault("vocab_size", len(model.scratch.characters) + 8)
        return _shape(architecture, 0)
    folder = Path(model.path or "")
    try:
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _shape(architecture, sum(_count_stored(path) for path in folder.glob("*.safetensors")))


def _shape(architecture: Mapping[str, Any], num_stored: int) -> ModelShape:
    hidden, layers = int(architecture.get("hidden_size", 0)), int(architecture.get("num_hidden_layers", 0))
    intermediate = int(architecture.get("intermediate_size", 4 * hidden))
    heads = int(architecture.get("num_attention_heads", 1))
    head_dim = int(architecture.get("head_dim") or hidden // heads)
    kv_heads = int(architecture.get("num_key_value_heads", heads))
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    embeddings = int(architecture.get("vocab_size", 0)) * hidden * (1 if architecture.get("tie_word_embeddings", False) else 2)
    estimate = embeddings + layers * (attention + 3 * hidden * intermediate)  # norms are too small to count
    return ModelShape(num_stored or estimate, hidden, intermediate, layers, 2 * layers * kv_heads * head_dim)


def _count_stored(path: Path) -> int:
    """Number of weights in a safetensors file, from its header; 0 if it has none, which whoever loads the file will name."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
    except (OSError, ValueError, struct.error):
        return 0
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
