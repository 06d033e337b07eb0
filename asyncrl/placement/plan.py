"""The plan of a run, before anything starts: which processes, on which device, with how many threads and bytes.

Reads file headers and config.json alone: no torch, nothing is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config import RunConfig


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process of the run. Bytes are estimates of its largest parts; None where the model is not on disk yet."""

    name: str
    device: str
    threads: int
    weights_bytes: int | None
    other_bytes: int | None
    note: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes, and how much memory the machine has free."""

    processes: tuple[ProcessPlan, ...]
    num_parameters: int | None
    free_bytes: int

    @property
    def total_bytes(self) -> int | None:
        """Sum of the estimates, None where one is unknown."""
        parts = [size for process in self.processes for size in (process.weights_bytes, process.other_bytes)]
        known = [size for size in parts if size is not None]
        return sum(known) if len(known) == len(parts) else None


def engine_threads(config: RunConfig) -> int:
    """CPU threads of each engine: the same whatever the number of engines, because results depend on it bit for bit."""
    return config.rollout.threads if config.rollout.threads != "auto" else max(1, (os.cpu_count() or 1) // 4)


def trainer_threads(config: RunConfig) -> int:
    """CPU threads of the trainer: the cores that the engines leave."""
    if config.trainer.threads != "auto":
        return config.trainer.threads
    return max(1, (os.cpu_count() or 1) - config.rollout.num_engines * engine_threads(config))


def resolve_device(device: str) -> str:
    """The device that auto stands for: cuda where the driver lists one, else cpu. Looks at the driver's files, not at torch."""
    if device != "auto":
        return device
    return "cuda" if any(Path("/proc/driver/nvidia/gpus").glob("*")) or shutil.which("nvidia-smi") else "cpu"


def make_plan(config: RunConfig) -> Plan:
    """The plan of a run."""
    trainer_device, rollout_device = resolve_device(config.placement.trainer), resolve_device(config.placement.rollout)
    shape = _model_shape(config)
    parameters = None if shape is None else shape["parameters"]
    engine_item = _item_bytes(config.model.dtype, rollout_device)
    processes = [ProcessPlan("controller", "cpu", 1, 0, 0, "producers, buffer, publisher; no torch")]
    trainer_item = 4  # master weights, gradients and both AdamW moments are float32
    processes.append(
        ProcessPlan(
            "trainer-0", trainer_device, trainer_threads(config),
            None if parameters is None else parameters * trainer_item,
            None if parameters is None else parameters * trainer_item * 3,
            "gradients and AdamW state beside the weights; activations come on top",
        )
    )  # fmt: skip
    length = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    for index in range(config.rollout.num_engines):
        if config.rollout.engine == "simulated":
            processes.append(ProcessPlan(f"engine-{index}", "none", 1, 0, 0, "simulated: a latency model without a model"))
            continue
        kv = None if shape is None else config.rollout.slots * length * shape["kv_per_token"] * engine_item
        processes.append(
            ProcessPlan(
                f"engine-{index}", rollout_device, engine_threads(config),
                None if parameters is None else 2 * parameters * engine_item, kv,
                f"weights twice (serving and staged), KV cache of {config.rollout.slots} x {length} tokens",
            )
        )  # fmt: skip
    return Plan(tuple(processes), parameters, psutil.virtual_memory().available)


def _item_bytes(dtype: str, device: str) -> int:
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device == "cuda") else 4


def _model_shape(config: RunConfig) -> Mapping[str, int] | None:
    """Number of parameters, and K plus V entries a token; None if the model is not on disk."""
    if config.model.scratch is not None:
        architecture = dict(config.model.scratch.architecture)
        architecture.setdefault("vocab_size", len(config.model.scratch.characters) + 8)
        return {"parameters": _estimate_parameters(architecture), "kv_per_token": _kv_per_token(architecture)}
    folder = Path(config.model.path or "")
    try:
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    stored = sum(_count_stored(path) for path in folder.glob("*.safetensors"))
    return {"parameters": stored or _estimate_parameters(architecture), "kv_per_token": _kv_per_token(architecture)}


def _count_stored(path: Path) -> int:
    """Number of weights in a safetensors file, from its header."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            count = 1
            for extent in entry["shape"]:
                count *= extent
            total += count
    return total


def _kv_per_token(architecture: Mapping[str, Any]) -> int:
    heads = int(architecture.get("num_attention_heads", 1))
    head_dim = int(architecture.get("head_dim") or int(architecture.get("hidden_size", 0)) // heads)
    return 2 * int(architecture.get("num_hidden_layers", 0)) * int(architecture.get("num_key_value_heads", heads)) * head_dim


def _estimate_parameters(architecture: Mapping[str, Any]) -> int:
    """Weights of a Llama-like decoder: embeddings, attention and gated MLP; norms are too small to count."""
    hidden, layers = int(architecture.get("hidden_size", 0)), int(architecture.get("num_hidden_layers", 0))
    heads = int(architecture.get("num_attention_heads", 1))
    head_dim = int(architecture.get("head_dim") or hidden // heads)
    kv_heads = int(architecture.get("num_key_value_heads", heads))
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * int(architecture.get("intermediate_size", 4 * hidden))
    embeddings = int(architecture.get("vocab_size", 0)) * hidden * (1 if architecture.get("tie_word_embeddings", False) else 2)
    return embeddings + layers * (attention + mlp)


def plan_text(plan: Plan) -> str:
    """The plan as a table, with a last line that says whether it fits."""
    header = f"{'process':<12} {'device':<7} {'threads':>7} {'weights':>10} {'other':>10}  what"
    rows = [
        f"{p.name:<12} {p.device:<7} {p.threads:>7} {_gib(p.weights_bytes):>10} {_gib(p.other_bytes):>10}  {p.note}" for p in plan.processes
    ]
    size = "not on disk yet" if plan.num_parameters is None else f"{plan.num_parameters:,} parameters"
    total = plan.total_bytes
    if total is None:
        verdict = f"memory: cannot be added up before the model is there; {_gib(plan.free_bytes)} free"
    else:
        verdict = f"memory: {_gib(total)} of {_gib(plan.free_bytes)} free, before activations and the Python processes (about 0.5 GiB each)"
        if total > plan.free_bytes:
            verdict += "\nWARNING: this does not fit; lower rollout.slots, rollout.max_tokens or the number of engines"
    return "\n".join([f"model: {size}", "", header, *rows, "", verdict])


def _gib(size: int | None) -> str:
    if size is None:
        return "?"
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
