"""The plan of a run, before anything starts: which processes, on which device, with how many threads and
bytes.

Bytes are estimates from the config and the model's shape. Reads file headers, config.json and the driver's
files alone: no torch, nothing is loaded.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from safetensors import SafetensorError, safe_open

from asyncrl.config import ModelConfig, RunConfig
from asyncrl.placement.choices import chunk_device, find_vllm_python
from asyncrl.placement.devices import NO_DEVICE, CudaDevice, Mode, Placement, find_cuda_devices, place

EVAL_ENGINE = "engine-eval"
"""Name of the engine server that evaluates."""
CPU_MICRO_BATCH_TOKENS = 2048
"""Most tokens that the trainer packs into one forward pass on the CPU."""
VLLM_CPU_BLOCK_TOKENS, VLLM_CPU_MIN_KV_BYTES = 128, 2**26
"""As asyncrl_servers/vllm/arguments.py has them."""

Phase = Literal["generation", "training", "publish"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Side = Literal["controller", "trainer", "engine", "eval", "staging", "host"]
"""Owner of the memory. staging: weights between trainer and engines, in memory that both open; host: state
that the trainer moved off a CUDA device.
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
        return sum(astuple(self))

    def split(self, num: int) -> Memory:
        """The part of one of `num` processes."""
        return Memory(*(-(-size // num) for size in astuple(self)))


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process of the run, or memory that several share."""

    name: str
    side: Side
    device: str
    threads: int
    memory: Memory
    note: str

    def held_bytes(self, phase: Phase, mode: Mode) -> int:
        """What it holds in this phase. Apart, everything at any time; in turns, what the turn leaves it."""
        memory = self.memory
        if mode == "apart":
            return memory.total
        match self.side, phase:
            case ("trainer", "generation") | ("engine", "training") | ("host", "training"):
                return 0
            case (
                "trainer",
                "publish",
            ):  # gradients are dropped, the optimizer is moved before the engines wake
                return memory.weights + memory.copies
            case "engine", "publish":  # the KV cache wakes last
                return memory.weights
            case "staging", "generation" | "training" if self.device == "cpu":
                return 0  # on a CUDA device it is made once, for good
            case "host", "publish":
                return memory.optimizer
        return memory.total


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes, where they are, and what each device has free (None: not known). `vllm_python`: the
    Python of the processes that need vLLM, None if none does.
    """

    placement: Placement
    processes: tuple[ProcessPlan, ...]
    shape: ModelShape
    free_bytes: Mapping[str, int | None]
    num_cuda: int
    vllm_python: Path | None = None

    def peak_bytes(self, device: str) -> dict[Phase, int]:
        """What all processes of a device hold in each phase."""
        held, mode = [process for process in self.processes if process.device == device], self.placement.mode
        return {phase: sum(process.held_bytes(phase, mode) for process in held) for phase in PHASES}


def engine_threads(config: RunConfig) -> int:
    """CPU threads of each engine: the same whatever the number of engines, because results depend on it bit
    for bit.
    """
    return config.rollout.threads if config.rollout.threads != "auto" else max(1, (os.cpu_count() or 1) // 4)


def trainer_threads(config: RunConfig) -> int:
    """CPU threads of each trainer rank: its part of the cores that the rollout engines leave. Neither an eval
    engine nor turns change it: such a run must be the run without, bit for bit.
    """
    if config.trainer.threads != "auto":
        return config.trainer.threads
    left = (os.cpu_count() or 1) - config.rollout.num_engines * engine_threads(config)
    return max(1, left // config.trainer.world_size)


def make_plan(config: RunConfig, cuda: Sequence[CudaDevice] | None = None) -> Plan:
    """The plan of a run on this machine; `cuda`: the devices that it shows, else they are looked for.

    Raises ConfigError for a placement that cannot be, and for a vLLM that is not there.
    """
    devices = find_cuda_devices() if cuda is None else cuda
    placement, shape = place(config, len(devices)), model_shape(config.model)
    free: dict[str, int | None] = {"cpu": psutil.virtual_memory().available}
    free |= {f"cuda:{number}": device.free_bytes for number, device in enumerate(devices)}
    needs_vllm = config.rollout.engine == "vllm" and (config.rollout.urls is None or config.eval is not None)
    python = find_vllm_python(config.rollout) if needs_vllm else None
    return Plan(placement, lay_out(config, shape, placement), shape, free, len(devices), python)


def lay_out(config: RunConfig, shape: ModelShape, placement: Placement) -> tuple[ProcessPlan, ...]:
    """Every process with its bytes."""
    plans = [ProcessPlan("controller", "controller", "cpu", 1, Memory(), "rollouts, buffer, publisher")]
    threads, ranks = trainer_threads(config), config.trainer.world_size
    what = (
        "weights and AdamW state" if config.trainer.lora is None else "weights, and AdamW state of adapters"
    )
    for rank, device in enumerate(placement.trainer):
        memory = trainer_memory(config, shape, device)
        plans.append(ProcessPlan(f"trainer-{rank}", "trainer", device, threads, memory, _part(what, ranks)))
    for index in range(len(placement.rollout)):
        devices, slots = placement.devices_of(index), config.rollout.slots
        plans += _engine(config, shape, placement.mode, f"engine-{index}", devices, slots)
    if config.eval is not None and placement.evaluation is not None:
        plans += _engine(config, shape, "apart", EVAL_ENGINE, (placement.evaluation,), config.eval.slots)
    return (*plans, *_shared(config, shape, placement, plans))


def _engine(
    config: RunConfig, shape: ModelShape, mode: Mode, name: str, devices: Sequence[str], slots: int
) -> list[ProcessPlan]:
    """One engine, a line for each device that it is split over."""
    side: Side = "eval" if name == EVAL_ENGINE else "engine"
    if devices[0] == NO_DEVICE:
        what = "simulated" if config.rollout.urls is None else "not started by the run"
        return [ProcessPlan(name, side, NO_DEVICE, 0, Memory(), f"{what}, {slots} sequences at once")]
    # vLLM leaves the next weights in staging until they serve
    is_staging, is_vllm = mode == "apart", config.rollout.engine == "vllm"
    memory = engine_memory(config, shape, devices[0], slots, is_staging=is_staging and not is_vllm)
    cache = f"KV cache of {slots} x {config.rollout.max_prompt_tokens + config.rollout.max_tokens} tokens"
    note = _part(f"{'vLLM, ' if is_vllm else ''}weights, {cache}", len(devices))
    part, threads = memory.split(len(devices)), engine_threads(config)
    names = [name, *(f"{name}/{rank}" for rank in range(1, len(devices)))]
    return [
        ProcessPlan(of, side, device, threads, part, note) for of, device in zip(names, devices, strict=True)
    ]


def _part(what: str, num: int) -> str:
    return what if num == 1 else f"1 / {num} of {what}"


def _shared(
    config: RunConfig, shape: ModelShape, placement: Placement, plans: Sequence[ProcessPlan]
) -> list[ProcessPlan]:
    """Memory that no process holds alone: weights on their way, and what turns move off a CUDA device."""
    way, lora, exported = config.weight_sync.way, config.trainer.lora, shape.num_parameters
    exported *= item_bytes(config.model.dtype, placement.trainer[0])
    if placement.mode == "colocated":
        chunk, device = (
            min(config.weight_sync.chunk_bytes, exported),
            chunk_device(config, placement) or "cpu",
        )
        shared = [ProcessPlan("staging", "staging", device, 0, Memory(weights=chunk), "a chunk of weights")]
        if placement.is_on_cuda:
            held = [plan.memory for plan in plans if plan.side == "trainer"]
            weights, optimizer = sum(each.weights for each in held), sum(each.optimizer for each in held)
            moved = Memory(weights, copies=sum(each.copies for each in held), optimizer=optimizer)
            note = "the trainer's state while the engines have the device"
            shared.append(ProcessPlan("offloaded", "host", "cpu", 0, moved, note))
        return shared
    if way.sends_adapters and lora is not None:
        exported = shape.num_adapter_parameters(lora.rank) * 4
    size, shared = Memory(weights=exported), []
    if way.is_one_kept:
        note = "the copy that the trainer sends from"
        shared.append(ProcessPlan("held", "staging", placement.trainer[0], 0, size, note))
    has_file = config.eval is not None if way.is_one_kept else not way.is_file_shared
    if has_file:
        note = "weights on their way, in shared memory"
        shared.append(ProcessPlan("staging", "staging", "cpu", 0, size, note))
    return shared


def trainer_memory(config: RunConfig, shape: ModelShape, device: str) -> Memory:
    """Of one rank: weights that compute, AdamW's two moments (and float32 masters, where they are not the
    model's own), one micro-batch.
    """
    trainer, item = config.trainer, item_bytes(config.model.dtype, device)
    trained = shape.num_parameters
    working = trained * item if item == 2 or trainer.lora is not None else 0
    if trainer.lora is not None:
        trained = shape.num_adapter_parameters(trainer.lora.rank)
    # else the model, its shards or its adapters are float32
    has_masters = item == 2 and trainer.lora is None and trainer.world_size == 1
    has_reference = config.algorithm.kl_coefficient > 0 and trainer.lora is None
    whole = Memory(
        weights=working if has_masters else working + trained * 4,
        copies=shape.num_parameters * item if has_reference else 0,
        gradients=trained * 4,
        optimizer=trained * (12 if has_masters else 8),
    )
    tokens = trainer.micro_batch_tokens
    tokens = min(tokens, CPU_MICRO_BATCH_TOKENS) if device == "cpu" else tokens
    activations = shape.activation_bytes(tokens, item, trainer.gradient_checkpointing)
    return replace(whole.split(trainer.world_size), activations=activations)


def engine_memory(
    config: RunConfig, shape: ModelShape, device: str, slots: int, *, is_staging: bool
) -> Memory:
    """Of one engine; `is_staging`: it reads the next weights beside the serving ones."""
    item = item_bytes(config.model.dtype, device)
    length = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    weights, token_bytes = shape.num_parameters * item, shape.kv_per_token * item
    kv = slots * length * token_bytes
    if config.rollout.engine == "vllm" and device == "cpu":  # whole blocks a sequence, one over, and a floor
        blocks = slots * -(-length // VLLM_CPU_BLOCK_TOKENS) + 1
        kv = max(VLLM_CPU_MIN_KV_BYTES, blocks * VLLM_CPU_BLOCK_TOKENS * token_bytes)
    return Memory(weights=weights, copies=weights if is_staging else 0, kv=kv)


def item_bytes(dtype: str, device: str) -> int:
    """Bytes of a weight where it computes."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.startswith("cuda")) else 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-like decoder: attention and gated MLP. `kv_per_token`: K plus V entries of one token in all
    layers. All 0: the model is not on disk (a hub id that is not fetched), and its memory is not known.
    """

    num_parameters: int = 0
    hidden: int = 0
    intermediate: int = 0
    layers: int = 0
    kv_per_token: int = 0

    def num_adapter_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer of the decoder, at most: seven a layer, as wide as the MLP."""
        return self.layers * rank * 7 * (self.hidden + self.intermediate)

    def activation_bytes(self, num_tokens: int, item_bytes: int, is_checkpointed: bool) -> int:
        """What one forward pass keeps for its backward pass: a layer's input alone, or about 14 vectors and 4
        of the MLP.
        """
        a_layer = self.hidden if is_checkpointed else 14 * self.hidden + 4 * self.intermediate
        return num_tokens * self.layers * a_layer * item_bytes


def model_shape(model: ModelConfig) -> ModelShape:
    """From config.json and file headers."""
    if model.scratch is not None:
        return _shape({"vocab_size": len(model.scratch.characters) + 8, **model.scratch.architecture}, 0)
    folder = Path(model.path or "")
    try:
        architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        num_stored = 0
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="numpy") as file:
                num_stored += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, ValueError, SafetensorError):
        return ModelShape()
    return _shape(architecture, num_stored)


def _shape(architecture: Mapping[str, Any], num_stored: int) -> ModelShape:
    hidden, layers = int(architecture.get("hidden_size", 0)), int(architecture.get("num_hidden_layers", 0))
    intermediate = int(architecture.get("intermediate_size", 4 * hidden))
    heads = int(architecture.get("num_attention_heads", 1))
    head_dim = int(architecture.get("head_dim") or hidden // heads)
    kv_heads = int(architecture.get("num_key_value_heads", heads))
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    embeddings = int(architecture.get("vocab_size", 0)) * hidden
    embeddings *= 1 if architecture.get("tie_word_embeddings", False) else 2
    estimate = embeddings + layers * (attention + 3 * hidden * intermediate)  # norms are too small to count
    return ModelShape(num_stored or estimate, hidden, intermediate, layers, 2 * layers * kv_heads * head_dim)


# The plan as text: what `asyncrl check` prints.


def size_text(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def plan_text(plan: Plan, config: RunConfig) -> str:
    """Processes with their bytes, how weights travel, and what each device needs of what it has free."""
    columns = [field.name for field in fields(Memory)]
    num = plan.shape.num_parameters
    size = f"{num:,} parameters" if num else "not on disk yet, so its memory is not known"
    rows = [("process", "device", "threads", columns, "what")]
    for process in plan.processes:
        sizes = [size_text(size) if size else "-" for size in astuple(process.memory)]
        rows.append((process.name, process.device, str(process.threads or "-"), sizes, process.note))
    lines = [f"model: {size}", ""]
    lines += [
        f"{name:<12} {device:<7} {threads:>7} {''.join(f'{size:>12}' for size in sizes)}  {what}"
        for name, device, threads, sizes, what in rows
    ]
    lines += ["", f"mode: {transport_text(config, plan.placement)}"]
    if plan.vllm_python is not None:
        lines.append(f"python: ours is {sys.executable}, vLLM's is {plan.vllm_python}")
    for device, free in plan.free_bytes.items():
        needs = plan.peak_bytes(device)
        if device != "cpu" and not any(needs.values()):
            lines.append(f"not used: {device}")
            continue
        by_phase = ", ".join(f"{phase} {size_text(need)}" for phase, need in needs.items())
        in_turns = f", the most of {by_phase}" if len(set(needs.values())) > 1 else ""
        has = "free is not known (no nvidia-smi)" if free is None else f"{size_text(free)} free"
        beside = ", before the Python processes (about 0.5 GiB each)" if device == "cpu" else ""
        lines.append(f"memory of {device}: {size_text(max(needs.values()))}{in_turns}; {has}{beside}")
    return "\n".join(lines)


def transport_text(config: RunConfig, placement: Placement) -> str:
    """Mode and transport in one line."""
    trainer, sync = ", ".join(dict.fromkeys(placement.trainer)), config.weight_sync
    if placement.mode == "colocated":
        device = chunk_device(config, placement)
        how = "as files in shared memory" if device is None else "through shared memory"
        how = how if device in (None, "cpu") else f"by CUDA IPC on {device}"
        return (
            f"colocated on {trainer}, in turns: weights go {how} in chunks of {size_text(sync.chunk_bytes)}"
        )
    engines = "elsewhere" if config.rollout.urls else f"on {', '.join(placement.engine_devices)}"
    words = sync.way.words(is_on_cuda=placement.is_on_cuda, disk_dir=sync.disk_dir)
    return f"apart (trainer on {trainer}, engines {engines}): {words}"
