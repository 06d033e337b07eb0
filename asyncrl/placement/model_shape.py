"""The size of a model and of passes over it, from config.json and file headers. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from asyncrl.config import ModelConfig
from asyncrl.config.learning import MIN_SLICE, MOST_LOGITS

LAYER = re.compile(r"\.\d+\.")
"""In the name of one that is a layer's."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-like decoder: attention and gated MLP. `kv_per_token`: K plus V entries of one token in all
    layers; `largest_tensor`, `largest_layer`: its parameters; `outside`: those that are in no layer but in
    embeddings and head; `is_converted`: what is stored is quantized, or in .bin files, so that no rank can
    read its part alone. All 0: not even its config.json is on disk (a hub id that is not fetched), and its
    memory is not known.
    """

    num_parameters: int = 0
    hidden: int = 0
    intermediate: int = 0
    layers: int = 0
    kv_per_token: int = 0
    vocab: int = 0
    largest_tensor: int = 0
    largest_layer: int = 0
    outside: int = 0
    is_converted: bool = False

    @property
    def num_linear(self) -> int:
        """Parameters of the linear layers that no other layer shares; norms are too small to count."""
        return max(0, self.num_parameters - self.vocab * self.hidden)

    def num_adapter_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer of the decoder, at most: seven a layer, as wide as the MLP."""
        return self.layers * rank * 7 * (self.hidden + self.intermediate)

    def step_bytes(
        self, num_tokens: int, item_bytes: int, kind: str, *, is_checkpointed: bool, is_trained: bool
    ) -> int:
        """Of a forward-backward on this kind of device: of each layer about 14 vectors and 4 of its MLP; or
        its input alone, and all of the one that is computed once more, which comes after the head. The head,
        if every token is predicted, makes a slice of float32 logits with their exponentials; then one with
        its copy in the weights' type, the gradients of hidden states, and its own before that is added up.
        """
        layer = num_tokens * (14 * self.hidden + 4 * self.intermediate) * item_bytes
        logits = min(max(MOST_LOGITS[kind], MIN_SLICE * num_tokens), num_tokens * self.vocab)
        gradients = num_tokens * self.hidden * (item_bytes + 4)
        gradients += self.vocab * self.hidden * item_bytes if is_trained else 0
        head = num_tokens * self.hidden * item_bytes
        head += max(logits * 2 * 4, logits * (4 + item_bytes % 4) + gradients)
        if is_checkpointed:
            return self.layers * num_tokens * self.hidden * item_bytes + max(layer, head)
        return self.layers * layer + head

    def gathered_bytes(self, item_bytes: int, num_ranks: int, *, is_trained: bool) -> int:
        """Of what FSDP gathers from shards while a step computes: all that is in no layer, and the layer at
        work; of several ranks also the next one, on its way. If they are trained, the head's gradient until
        the end, and those of a layer: as computed, in float32 to be added up over the ranks, and a rank's
        part of the sums.
        """
        layer = self.largest_layer
        size = (self.outside + min(num_ranks, 2) * layer) * item_bytes
        if is_trained:
            size += (
                self.vocab * self.hidden * item_bytes + layer * (item_bytes + 4) + -(-layer * 4 // num_ranks)
            )
        return size

    def forward_bytes(self, num_tokens: int, item_bytes: int) -> int:
        """At once in a pass that keeps nothing: about 4 vectors and 3 of the MLP of a token."""
        return num_tokens * (4 * self.hidden + 3 * self.intermediate) * item_bytes


def model_shape(model: ModelConfig) -> ModelShape:
    """From config.json and file headers, in a folder or in the hub's cache; from config.json alone where the
    weights are still to be fetched.
    """
    if model.scratch is not None:
        architecture = {"vocab_size": len(model.scratch.characters) + 8, **model.scratch.architecture}
        return _shape(architecture, {}, is_converted=False)
    folder = _folder(model.path or "", model.revision)
    try:
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored, index = dict[str, int](), folder / "model.safetensors.index.json"
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
        is_whole = all((folder / name).is_file() for name in shards.values())
        for path in folder.glob("*.safetensors") if is_whole else ():
            with safe_open(path, framework="numpy") as file:
                stored |= {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError):
        return ModelShape()
    is_converted = "quantization_config" in architecture or (not stored and any(folder.glob("*.bin")))
    return _shape(architecture, stored, is_converted=is_converted)


def _folder(path: str, revision: str | None) -> Path:
    """Of a model, given or in the hub's cache."""
    cached = None
    if not Path(path).is_dir():
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # it is no hub id either
            cached = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else Path(path)


def _shape(architecture: Mapping[str, Any], stored: Mapping[str, int], *, is_converted: bool) -> ModelShape:
    hidden, layers = int(architecture.get("hidden_size", 0)), int(architecture.get("num_hidden_layers", 0))
    intermediate = int(architecture.get("intermediate_size", 4 * hidden))
    heads = int(architecture.get("num_attention_heads", 1))
    head_dim = int(architecture.get("head_dim") or hidden // heads)
    kv_heads = int(architecture.get("num_key_value_heads", heads))
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    vocab = int(architecture.get("vocab_size", 0))
    embeddings = vocab * hidden * (1 if architecture.get("tie_word_embeddings", False) else 2)
    estimate = embeddings + layers * (attention + 3 * hidden * intermediate)  # norms are too small to count
    largest = max(stored.values(), default=hidden * max(intermediate, vocab))
    by_layer = Counter[str]()
    for name, size in stored.items():
        found = LAYER.search(name)
        by_layer[name[: found.end()] if found else ""] += size
    outside = by_layer.pop("", 0)
    if not by_layer:
        by_layer[""], outside = attention + 3 * hidden * intermediate, embeddings
    return ModelShape(
        num_parameters=sum(stored.values()) or estimate,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        kv_per_token=2 * layers * kv_heads * head_dim,
        vocab=vocab,
        largest_tensor=largest,
        largest_layer=max(by_layer.values()),
        outside=outside,
        is_converted=is_converted,
    )
