"""Model sizes from config.json and file headers, or a table, without torch."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from asyncrl.config import ModelConfig
from asyncrl.config.trainer_algorithm import MIN_SLICE, MOST_LOGITS

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
SIZES += ["num_key_value_heads", "head_dim", "tie_word_embeddings"]
KNOWN_MODELS = {
    "HuggingFaceTB/SmolLM2-135M": (49_152, 576, 1536, 30, 9, 3, 64, True),
    "HuggingFaceTB/SmolLM2-360M": (49_152, 960, 2560, 32, 15, 5, 64, True),
    "HuggingFaceTB/SmolLM2-1.7B": (49_152, 2048, 8192, 24, 32, 32, 64, True),
    "Qwen/Qwen2.5-0.5B": (151_936, 896, 4864, 24, 14, 2, 64, True),
    "Qwen/Qwen2.5-1.5B": (151_936, 1536, 8960, 28, 12, 2, 128, True),
    "Qwen/Qwen2.5-3B": (151_936, 2048, 11_008, 36, 16, 2, 128, True),
    "Qwen/Qwen2.5-7B": (152_064, 3584, 18_944, 28, 28, 4, 128, False),
    "Qwen/Qwen3-0.6B": (151_936, 1024, 3072, 28, 16, 8, 128, True),
    "Qwen/Qwen3-1.7B": (151_936, 2048, 6144, 28, 16, 8, 128, True),
    "Qwen/Qwen3-4B": (151_936, 2560, 9728, 36, 32, 8, 128, True),
    "Qwen/Qwen3-8B": (151_936, 4096, 12_288, 36, 32, 8, 128, False),
    "meta-llama/Llama-3.2-1B": (128_256, 2048, 8192, 16, 32, 8, 64, True),
    "meta-llama/Llama-3.2-3B": (128_256, 3072, 8192, 28, 24, 8, 128, True),
    "meta-llama/Llama-3.1-8B": (128_256, 4096, 14_336, 32, 32, 8, 128, False),
}
"""SIZES by hub id, for offline plans; also of `-Instruct` and `-Base` variants."""


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
    folder = _folder(model.path or "", model.revision)
    try:
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return _shape(architecture, sum(_stored(folder)))
    except (OSError, ValueError, KeyError, SafetensorError):
        name = (model.path or "").removesuffix("-Instruct").removesuffix("-Base")
        if name not in KNOWN_MODELS or model.revision is not None:
            return ModelShape()
        return _shape(dict(zip(SIZES, KNOWN_MODELS[name], strict=True)))


def _folder(path: str, revision: str | None) -> Path:
    cached = None
    if not Path(path).is_dir():
        with contextlib.suppress(ValueError, ModuleNotFoundError):
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else Path(path)


def _stored(folder: Path) -> Iterator[int]:
    index = folder / "model.safetensors.index.json"
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    is_whole = all((folder / name).is_file() for name in shards.values())
    for path in folder.glob("*.safetensors") if is_whole else ():
        with safe_open(path, framework="numpy") as file:
            yield from (math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def _shape(architecture: Mapping[str, Any], num_stored: int = 0) -> ModelShape:
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
        num_parameters=num_stored or embeddings + layers * hidden * (attention + 3 * width),
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        attention=attention,
        cached=latent or 2 * keys,
        active=active,
        embeddings=embeddings,
        has_experts=num_experts > 0,
    )
