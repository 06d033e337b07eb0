"""How many bytes each process holds, by part and by phase of a turn. Estimates, from the config and the
model's shape alone.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from asyncrl.config import ModelConfig, RunConfig
from asyncrl.placement.devices import Mode

CPU_MICRO_BATCH_TOKENS = 2048
"""Most tokens that the trainer packs into one forward pass on the CPU, whatever trainer.micro_batch_tokens
allows.
"""
VLLM_CPU_BLOCK_TOKENS = 128
VLLM_CPU_MIN_KV_BYTES = 2**26
"""As asyncrl_servers/vllm/memory.py has them."""

Phase = Literal["generation", "training", "publish"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Side = Literal["controller", "trainer", "engine", "eval", "staging", "host"]
"""Whose memory it is. staging: weights on their way, in memory that both sides open; host: what the trainer
moved off a CUDA device.
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the largest parts. `copies`: a second set of weights (staged by an engine, or the trainer's
    reference).
    """

    weights: int = 0
    copies: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process of the run, or memory that is nobody's alone. `memory`: None where the model is not on disk
    yet.
    """

    name: str
    side: Side
    device: str
    threads: int
    memory: Memory | None
    note: str
    has_vllm_python: bool = False
    """It runs under another Python than ours."""

    def held_bytes(self, phase: Phase, mode: Mode) -> int:
        """What it holds in this phase. Apart, everything at any time; in turns, what the turn leaves it."""
        memory = self.memory or Memory()
        if mode == "apart" or self.side in ("controller", "eval"):
            return memory.total
        match self.side, phase:
            case ("trainer", "generation") | ("engine", "training"):
                return 0
            case (
                "trainer",
                "publish",
            ):  # gradients are dropped and the optimizer is moved before the engines wake
                return memory.weights + memory.copies
            case "engine", "publish":  # the KV cache wakes last
                return memory.weights
            case "staging", _:  # on a device it is made once, for good
                return memory.total if phase == "publish" or self.device != "cpu" else 0
            case "host", "training":
                return 0
            case "host", "publish":
                return memory.optimizer
            case _:
                return memory.total


def peak_bytes(processes: Sequence[ProcessPlan], device: str, mode: Mode) -> dict[Phase, int]:
    """What all processes of a device hold in each phase."""
    return {
        phase: sum(process.held_bytes(phase, mode) for process in processes if process.device == device)
        for phase in PHASES
    }


def trainer_memory(config: RunConfig, shape: ModelShape, device: str) -> Memory:
    """Of one rank: weights that compute, AdamW's two moments (and float32 masters, where they are not the
    model's own), one micro-batch.
    """
    trainer, ranks, item = config.trainer, config.trainer.world_size, item_bytes(config.model.dtype, device)
    trained = (
        shape.num_parameters if trainer.lora is None else shape.num_adapter_parameters(trainer.lora.rank)
    )
    working = shape.num_parameters * item if item == 2 or trainer.lora is not None else 0
    has_masters_apart = (
        item == 2 and trainer.lora is None and ranks == 1
    )  # else the model, its shards or its adapters are float32
    weights, state = (working, trained * 12) if has_masters_apart else (working + trained * 4, trained * 8)
    has_reference = config.algorithm.kl_coefficient > 0 and trainer.lora is None
    tokens = (
        min(trainer.micro_batch_tokens, CPU_MICRO_BATCH_TOKENS)
        if device == "cpu"
        else trainer.micro_batch_tokens
    )
    return Memory(
        weights=-(-weights // ranks),
        copies=-(-shape.num_parameters * item // ranks) if has_reference else 0,
        gradients=-(-trained * 4 // ranks),
        optimizer=-(-state // ranks),
        activations=shape.activation_bytes(tokens, item, trainer.gradient_checkpointing),
    )


def engine_memory(
    config: RunConfig, shape: ModelShape, device: str, slots: int, *, is_staging: bool
) -> Memory:
    """Of one engine; `is_staging`: it reads the next weights beside the serving ones, which vLLM leaves in
    staging until they serve.
    """
    item = item_bytes(config.model.dtype, device)
    length = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    weights = shape.num_parameters * item
    if config.rollout.engine == "vllm":
        return Memory(weights=weights, kv=_vllm_kv_bytes(slots, length, shape.kv_per_token * item, device))
    return Memory(
        weights=weights, copies=weights if is_staging else 0, kv=slots * length * shape.kv_per_token * item
    )


def _vllm_kv_bytes(slots: int, length: int, token_bytes: int, device: str) -> int:
    """On the CPU what its server asks for: whole blocks a sequence, one over, and a floor. On CUDA the least:
    vLLM takes what is left.
    """
    if device != "cpu":
        return slots * length * token_bytes
    blocks = slots * -(-length // VLLM_CPU_BLOCK_TOKENS) + 1
    return max(VLLM_CPU_MIN_KV_BYTES, blocks * VLLM_CPU_BLOCK_TOKENS * token_bytes)


def item_bytes(dtype: str, device: str) -> int:
    """Bytes of a weight where it computes."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.startswith("cuda")) else 4


def size_text(size: int | None) -> str:
    """Bytes for people."""
    if size is None:
        return "?"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


# How large a model is, from its config.json and file headers alone. Loads nothing, knows no torch.


MAX_HEADER_BYTES = 100_000_000
"""The safetensors format allows no larger header."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-like decoder: attention and gated MLP. `kv_per_token`: K plus V entries of one token in all
    layers.
    """

    num_parameters: int
    hidden: int
    intermediate: int
    layers: int
    kv_per_token: int

    def num_adapter_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer of the decoder, at most: seven a layer, as wide as the MLP."""
        return self.layers * rank * 7 * (self.hidden + self.intermediate)

    def activation_bytes(self, num_tokens: int, item_bytes: int, is_checkpointed: bool) -> int:
        """What one forward pass keeps for its backward pass: a layer's input alone, or about 14 vectors and 4
        of the MLP.
        """
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
    embeddings = (
        int(architecture.get("vocab_size", 0))
        * hidden
        * (1 if architecture.get("tie_word_embeddings", False) else 2)
    )
    estimate = embeddings + layers * (attention + 3 * hidden * intermediate)  # norms are too small to count
    return ModelShape(num_stored or estimate, hidden, intermediate, layers, 2 * layers * kv_heads * head_dim)


def _count_stored(path: Path) -> int:
    """Number of weights in a safetensors file, from its header; 0 if it has none, which whoever loads the
    file will name.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
    except (OSError, ValueError, struct.error):
        return 0
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
