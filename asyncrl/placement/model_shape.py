"""The size of a model and of passes over it, from config.json and file headers. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from asyncrl.config import ModelConfig
from asyncrl.config.learning import MIN_SLICE, MOST_LOGITS
from asyncrl.placement.known_models import ARCHITECTURES

LAYER = re.compile(r"\.\d+\.")
"""In the name of one that is a layer's."""


QK_NORMED = ("qwen3", "gemma3", "olmo2", "olmo3", "olmoe")
"""Beginnings of model types that norm queries and keys, where no stored tensor tells."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-like decoder: attention and gated MLP. Entries of a token in one layer: `attention`, what its
    heads keep for a backward pass, `normed`, what of it is normed, `cached`, its keys and values, and
    `cached_latent`, that from which latent attention makes them (0: it is of another kind); `routed`: experts
    to which a token is sent (0: the MLP is dense), `width`: of the MLP for one token, all its experts
    together; `largest_tensor`, `largest_layer`: its parameters; `outside`: those that are in no layer but in
    embeddings and head; `is_converted`: what is stored is quantized, or in .bin files, so that no rank can
    read its part alone; `is_from_table`: config.json is not on disk, and the sizes come from known_models.py.
    All 0: config.json is not on disk and the table has no such model, so its memory is not known.
    """

    num_parameters: int = 0
    hidden: int = 0
    intermediate: int = 0
    layers: int = 0
    attention: int = 0
    normed: int = 0
    cached: int = 0
    cached_latent: int = 0
    routed: int = 0
    width: int = 0
    vocab: int = 0
    largest_tensor: int = 0
    largest_layer: int = 0
    outside: int = 0
    is_converted: bool = False
    is_from_table: bool = False

    @property
    def num_linear(self) -> int:
        """Parameters of the linear layers that no other layer shares; norms are too small to count."""
        return max(0, self.num_parameters - self.vocab * self.hidden)

    def num_adapter_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer of the decoder, at most: seven a layer, as wide as the MLP."""
        return self.layers * rank * 7 * (self.hidden + self.intermediate)

    def layer_entries(self, item_bytes: int, kind: str, *, is_compiled: bool) -> tuple[int, int]:
        """What a layer keeps of a token for its backward pass, and what that works in beside it, in entries
        of the weights' type. Compiled, on this kind of device, or operation by operation: then a norm keeps
        copies in float32, and on a CPU nothing but its input if that is float32 already.
        """
        norms, qk_norms = {2: (8, 3), 4: (4, 1) if kind == "cpu" else (6, 2)}[item_bytes]
        if is_compiled:
            norms, qk_norms = 4, 1
        kept = norms * self.hidden + self.attention + qk_norms * self.normed
        kept += 2 * self.routed * self.hidden + (3 if is_compiled else 4) * self.width
        return kept, self.width if is_compiled else 2 * self.width + self.hidden

    def step_bytes(
        self,
        num_tokens: int,
        item_bytes: int,
        kind: str,
        *,
        is_checkpointed: bool,
        is_trained: bool,
        is_compiled: bool = False,
    ) -> int:
        """Of a forward-backward on this kind of device: what each layer keeps, or its input alone, and all of
        the one that is computed once more, which comes after the head. The head has a norm before it; if
        every token is predicted, it makes a slice of float32 logits with their exponentials; then one with
        its copy in the weights' type, the gradients of hidden states, and its own before that is added up.
        """
        layer, work = (
            num_tokens * entries * item_bytes
            for entries in self.layer_entries(item_bytes, kind, is_compiled=is_compiled)
        )
        head = num_tokens * self.hidden * (item_bytes + 8)
        head += self._logits_bytes(num_tokens, item_bytes, kind, is_trained=is_trained)
        if is_checkpointed:
            return self.layers * num_tokens * self.hidden * item_bytes + max(layer + work, head)
        return self.layers * layer + max(work, head)

    def _logits_bytes(self, num_tokens: int, item_bytes: int, kind: str, *, is_trained: bool) -> int:
        logits = min(max(MOST_LOGITS[kind], MIN_SLICE * num_tokens), num_tokens * self.vocab)
        gradients = num_tokens * self.hidden * (item_bytes + 4)
        gradients += self.vocab * self.hidden * item_bytes if is_trained else 0
        return max(logits * 2 * 4, logits * (4 + item_bytes % 4) + gradients)

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

    def reduced_bytes(self, item_bytes: int, num_ranks: int) -> int:
        """At the end of a backward pass, when the layers have gone: of all that is in none, weights and
        gradients as they were computed, these in float32 to be added up over the ranks, and a rank's part of
        the sums.
        """
        return self.outside * (2 * item_bytes + 4) + -(-self.outside * 4 // num_ranks)

    def forward_bytes(self, num_tokens: int, item_bytes: int) -> int:
        """At once in a pass that keeps nothing: about 4 vectors and 3 of the MLP of a token."""
        return num_tokens * (4 * self.hidden + 3 * self.intermediate) * item_bytes


def model_shape(model: ModelConfig) -> ModelShape:
    """From config.json and file headers, in a folder or in the hub's cache; from config.json alone where the
    weights are still to be fetched, and from the table of known models where config.json is, too.
    """
    if model.scratch is not None:
        architecture = {"vocab_size": len(model.scratch.characters) + 8, **model.scratch.architecture}
        return _shape(architecture, {})
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
        known = ARCHITECTURES.get(model.path or "") if model.revision is None else None
        if known is None:
            return ModelShape()
        return _shape(known, {}, is_from_table=True)
    is_converted = "quantization_config" in architecture or (not stored and any(folder.glob("*.bin")))
    return _shape(architecture, stored, is_converted=is_converted)


def _folder(path: str, revision: str | None) -> Path:
    """Of a model, given or in the hub's cache."""
    cached = None
    if not Path(path).is_dir():
        with contextlib.suppress(ValueError, ModuleNotFoundError):  # no hub id either; no extra train
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else Path(path)


def _shape(
    architecture: Mapping[str, Any],
    stored: Mapping[str, int],
    *,
    is_converted: bool = False,
    is_from_table: bool = False,
) -> ModelShape:
    given = Sizes(architecture)
    hidden, layers, vocab = given("hidden_size"), given("num_hidden_layers"), given("vocab_size")
    intermediate = given("intermediate_size", 4 * hidden)
    kind = str(architecture.get("model_type", ""))
    has_norms = any("q_norm" in name for name in stored) if stored else kind.startswith(QK_NORMED)
    find = _latent_attention if given("kv_lora_rank") else _attention
    attention, of_token = find(given, has_norms=has_norms)
    experts = next(filter(None, map(given, EXPERTS)), 0)
    expert = given("moe_intermediate_size", intermediate) if experts else 0
    embeddings = vocab * hidden * (1 if architecture.get("tie_word_embeddings", False) else 2)
    dense, sparse = attention + 3 * hidden * intermediate, attention
    sparse += experts * hidden * (3 * expert + 1)  # and a row of the router
    num_shared = given("n_shared_experts") or given("moe_num_shared_experts")
    shared = given("shared_expert_intermediate_size", num_shared * expert)
    sparse += 3 * hidden * shared
    num_sparse, routed = 0, 0
    if experts:
        num_sparse = sum(_is_sparse(given, layer) for layer in range(layers))
        routed = given("num_experts_per_tok", given("moe_k", 1)) if num_sparse else 0
    # norms are too small to count
    estimate = embeddings + num_sparse * sparse + (layers - num_sparse) * dense
    largest = max(stored.values(), default=hidden * max(intermediate, vocab, 2 * experts * expert))
    by_layer = Counter[str]()
    for name, size in stored.items():
        found = LAYER.search(name)
        by_layer[name[: found.end()] if found else ""] += size
    outside = by_layer.pop("", 0)
    if not by_layer:
        by_layer[""] = max(sparse if num_sparse else 0, dense if num_sparse < layers else 0)
        outside = embeddings
    return ModelShape(
        num_parameters=sum(stored.values()) or estimate,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        **of_token,
        routed=routed,
        width=routed * expert + shared if num_sparse else intermediate,
        vocab=vocab,
        largest_tensor=largest,
        largest_layer=max(by_layer.values()),
        outside=outside,
        is_converted=is_converted,
        is_from_table=is_from_table,
    )


class Sizes:
    """Numbers of a config.json, in which null is as good as nothing."""

    def __init__(self, architecture: Mapping[str, Any]) -> None:
        self._architecture = architecture

    def __call__(self, name: str, default: int = 0) -> int:
        value = self._architecture.get(name)
        return default if value is None else int(value)

    def layers(self, name: str) -> Sequence[int]:
        """A list of layers."""
        return self._architecture.get(name) or ()


def _attention(given: Sizes, *, has_norms: bool) -> tuple[int, dict[str, int]]:
    """(parameters, fields of ModelShape) of one layer. It keeps queries, keys, values and what comes out."""
    hidden, heads = given("hidden_size"), given("num_attention_heads", 1)
    head_dim = given("head_dim") or hidden // heads
    queries, keys = heads * head_dim, given("num_key_value_heads", heads) * head_dim
    both = queries + keys
    return 2 * hidden * both, {"attention": 2 * both, "normed": has_norms * both, "cached": 2 * keys}


def _latent_attention(given: Sizes, *, has_norms: bool) -> tuple[int, dict[str, int]]:
    """Of the kind where queries, and keys with values, come from latents of fewer dimensions, which are
    normed (MLA, https://arxiv.org/abs/2405.04434). Values in smaller heads than keys are padded for it.
    """
    hidden, heads, latent = given("hidden_size"), given("num_attention_heads", 1), given("kv_lora_rank")
    rotary, plain, value = given("qk_rope_head_dim"), given("qk_nope_head_dim"), given("v_head_dim")
    wide, rank = heads * (plain + rotary), given("q_lora_rank")
    parameters = rank * (hidden + wide) if rank else hidden * wide
    parameters += hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
    kept = 4 * wide + (heads * value if value < plain + rotary else 0) + rank + latent
    of_token = {"attention": kept, "normed": rank + latent, "cached": 2 * wide}
    return parameters, {**of_token, "cached_latent": latent + rotary}


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What their number is called; the last one by Ernie, whose other names begin with moe as well."""


def _is_sparse(given: Sizes, layer: int) -> bool:
    """Whether a layer of a model with experts has them."""
    last = given("moe_layer_end_index", -1)
    is_dense = layer < given("first_k_dense_replace") or layer in given.layers("mlp_only_layers")
    is_dense = is_dense or layer < given("moe_layer_start_index") or 0 <= last < layer
    return not is_dense and (layer + 1) % given("decoder_sparse_step", given("moe_layer_interval", 1)) == 0
