"""Plan processes, devices, threads and memory of a run, without torch.

Bytes are estimates: parameters, optimizer with gradients, KV cache, one micro-batch, and weight copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Literal

from asyncrl.base.host import num_cores
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.config.generation import ENGINES, EngineCapabilities
from asyncrl.config.learning import CPU_MICRO_BATCH_TOKENS, TEACHER_SLOTS
from asyncrl.config.weight_sync import transport_words
from asyncrl.launch.device_selection import NO_DEVICE, NodeDevice, Side, cuda_devices
from asyncrl.launch.devices import Placement, place
from asyncrl.launch.model_shape import ModelShape, model_shape
from asyncrl.launch.nodes import Node

EVAL_ENGINE = "engine-eval"
TEACHER = "teacher"
OWN_BYTES = 2**29
"""Uncounted: CUDA's on a device, Python's on the host."""


@dataclass(frozen=True, slots=True)
class Memory:
    """`optimizer`: with gradients and float32 masters; `copies`: second weights, or offloaded state."""

    parameters: int = 0
    optimizer: int = 0
    kv: int = 0
    micro_batch: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def split(self, num: int) -> Memory:
        return Memory(*(-(-size // num) for size in astuple(self)))


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """`side`: whose turn it works in."""

    name: str
    side: Literal["controller", "trainer", "engine", "eval", "host"]
    device: str
    threads: int
    memory: Memory = Memory()


@dataclass(frozen=True, slots=True)
class Plan:
    placement: Placement
    processes: tuple[ProcessPlan, ...]
    shape: ModelShape
    memory: Mapping[str, tuple[int | None, int | None]]
    """(free, total) bytes by device; None: unknown."""

    def needed_bytes(self, device: str) -> int:
        """Return a device's peak: all, or with moving sides the larger side or both sides' weights."""
        here = [one for one in self.processes if one.device == device]
        everything = sum(one.memory.total for one in here)
        if not self.placement.moves:
            return everything
        turns = [[one.memory for one in here if one.side == side] for side in ("trainer", "engine")]
        trainer, engines = (sum(memory.total for memory in side) for side in turns)
        pushed = sum(memory.parameters + memory.copies for side in turns for memory in side)
        return everything - trainer - engines + max(trainer, engines, pushed)


def engine_threads(config: RunConfig, cores: int | None = None) -> int:
    """Independent of the number of engines: results depend on threads bit for bit."""
    given = config.rollout.threads
    return given if given != "auto" else max(1, (cores or num_cores()) // 4)


def trainer_threads(
    config: RunConfig, cores: int | None = None, num_engines: int | None = None, num_ranks: int | None = None
) -> int:
    """Return a rank's share of the cores beyond the most rollout engines."""
    if config.trainer.threads != "auto":
        return config.trainer.threads
    engines = config.rollout.max_engines if num_engines is None else num_engines
    left = (cores or num_cores()) - engines * engine_threads(config, cores)
    return max(1, left // (num_ranks or config.trainer.world_size))


def threads_on(config: RunConfig, placement: Placement, node: int) -> tuple[int, int]:
    cores = placement.nodes[node].machine.cores
    num_engines = sum(devices[0].node == node for devices in placement.engines)
    num_ranks = sum(device.node == node for device in placement.trainer)
    return engine_threads(config, cores), trainer_threads(config, cores, num_engines, num_ranks)


def make_plan(config: RunConfig, nodes: Sequence[Node]) -> Plan:
    """Raises ConfigError."""
    shape = model_shape(config.model)
    placement = place(config, nodes)
    memory = dict[str, tuple[int | None, int | None]]()
    for number, (node, devices) in enumerate(zip(nodes, cuda_devices(nodes), strict=True)):
        memory[placement.label(NodeDevice(number, "cpu"))] = node.machine.memory, node.machine.memory
        for device, has in zip(devices, node.machine.cuda, strict=True):
            memory[placement.label(device)] = has.free_bytes, has.total_bytes
    return Plan(placement, lay_out(config, shape, placement), shape, memory)


def lay_out(config: RunConfig, shape: ModelShape, placement: Placement) -> tuple[ProcessPlan, ...]:
    label = placement.label
    threads = [threads_on(config, placement, node) for node in range(len(placement.nodes))]
    plans = [ProcessPlan("controller", "controller", label(NodeDevice(0, "cpu")), 1)]
    for rank, device in enumerate(placement.trainer):
        name = f"trainer-{rank}"
        memory = trainer_memory(config, shape, device.name, rank)
        host = Memory()
        if config.trainer.cpu_offload:
            host = replace(memory, micro_batch=0)
            memory = Memory(micro_batch=memory.micro_batch)
        elif placement.moves and placement.is_on_cuda:  # gradients are freed, the rest moves
            gradients = 4 * num_trained(config, shape) // config.trainer.world_size
            host = Memory(copies=memory.total - memory.micro_batch - gradients)
        plans.append(ProcessPlan(name, "trainer", label(device), threads[device.node][1], memory))
        if host.total:
            plans.append(ProcessPlan(f"{name}/host", "host", label(NodeDevice(device.node, "cpu")), 0, host))

    def add(name: str, side: Literal["engine", "eval"], devices: Side, memory: Memory) -> None:
        for part, device in enumerate(devices):
            own = f"{name}/{part}" if part else name
            plans.append(ProcessPlan(own, side, label(device), threads[device.node][0], memory))

    engine = config.rollout.facts
    caches = 2 if config.keeps_turns else 1
    for number, devices in enumerate(placement.engines):
        slots = caches * config.rollout.slots
        memory = engine_memory(config, shape, engine, slots, devices, stages=placement.mode == "apart")
        add(f"engine-{number}", "engine", devices, memory)
    if placement.evaluation is not None:
        devices = (placement.evaluation,)
        memory = engine_memory(config, shape, engine, caches * config.eval_slots, devices, stages=True)
        add(EVAL_ENGINE, "eval", devices, memory)
    if (teacher := config.teacher) is not None and placement.teacher is not None:
        devices = (placement.teacher,)
        shape = model_shape(ModelConfig(path=teacher.path, revision=teacher.revision))
        memory = engine_memory(config, shape, ENGINES["embedded"], TEACHER_SLOTS + 1, devices, stages=False)
        add(TEACHER, "eval", devices, memory)
    return tuple(plans)


def num_trained(config: RunConfig, shape: ModelShape) -> int:
    """Adapters are on seven matrices per layer."""
    lora = config.trainer.lora
    if lora is None:
        return shape.num_parameters
    return shape.layers * lora.rank * 7 * (shape.hidden + shape.active)


def trainer_memory(config: RunConfig, shape: ModelShape, device: str, rank: int = 0) -> Memory:
    """A sharded rank gathers embeddings and one layer."""
    trainer = config.trainer
    lora = trainer.lora
    item = item_bytes(config.model.dtype, device)
    num = shape.num_parameters
    trained = num_trained(config, shape)
    is_sharded = trainer.is_sharded(device, "bfloat16" if item == 2 else "float32")
    has_masters = item == 2 and lora is None and not is_sharded
    has_reference = config.algorithm.kl_coefficient > 0 and lora is None
    merged = num - shape.vocab * shape.hidden if trainer.keeps_merged else 0
    base = num * item if has_masters or lora is not None else 0
    whole = Memory(
        parameters=base + (0 if has_masters else trained * 4),
        optimizer=trained * (16 if has_masters else 12),
        copies=item * (num if has_reference else merged),
    )
    kind = device.partition(":")[0]
    most = CPU_MICRO_BATCH_TOKENS if kind == "cpu" else trainer.micro_batch_tokens
    tokens = min(most, trainer.micro_batch_tokens)
    tokens = max(tokens, config.rollout.max_length)  # a longer sequence is its own micro-batch
    work = shape.activation_bytes(tokens, item, kind, is_checkpointed=trainer.gradient_checkpointing)
    if is_sharded:
        layer = (num - shape.embeddings) // max(1, shape.layers)
        work += 2 * item * (shape.embeddings + layer)
    part = whole.split(trainer.world_size)
    sent = num * item if rank == 0 and config.weight_sync.facts.is_collective else 0
    return replace(part, micro_batch=work, copies=part.copies + sent)


def engine_memory(
    config: RunConfig,
    shape: ModelShape,
    engine: EngineCapabilities,
    slots: int,
    devices: Side,
    *,
    stages: bool,
) -> Memory:
    """Per device. `stages`: new weights arrive during generation."""
    device = devices[0].name
    if device == NO_DEVICE:
        return Memory()
    item = item_bytes(config.model.dtype, device)
    length = config.rollout.max_length
    sequences = 1 if engine.pages_kv and device != "cpu" else slots
    tokens = min(engine.forward_tokens, slots * length)
    weights = shape.num_parameters * item
    whole = Memory(
        parameters=weights,
        kv=sequences * engine.kv_length(length) * shape.layers * shape.cached * item,
        micro_batch=tokens * (4 * shape.hidden + 3 * shape.active) * item
        + slots * shape.vocab * 4 * engine.logit_copies,
        copies=weights if stages and engine.stages_weights else 0,
    )
    return whole.split(len(devices))


def item_bytes(dtype: str, device: str) -> int:
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.startswith("cuda")) else 4


def size_text(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def plan_text(plan: Plan, config: RunConfig) -> str:
    num = plan.shape.num_parameters
    placement = plan.placement
    revision = f" --revision {config.model.revision}" if config.model.revision else ""
    fetch = f"hf download {config.model.path} config.json{revision}"
    size = f"{num:,} parameters" if num else f"size unknown without config.json; `{fetch}` is enough"
    columns = [*(field.name.replace("_", " ") for field in fields(Memory)), "total"]
    lines = [f"model: {size}", "", _row("process", "device", "threads", columns)]
    for one in plan.processes:
        sizes = [size_text(part) if part else "-" for part in (*astuple(one.memory), one.memory.total)]
        lines.append(_row(one.name, one.device, str(one.threads or "-"), sizes))
    sync = transport_words(config, is_on_cuda=placement.is_on_cuda)
    lines += ["", f"mode: {placement.mode}: {'time-sharing' if placement.mode == 'colocated' else sync}"]
    if config.eval is not None:
        lines.append(f"evaluation: {EVAL_ENGINE if placement.evaluation else 'rollout engines'}")
    used = {one.device for one in plan.processes}
    alike = defaultdict[str, list[str]](list)
    for device, (free, _) in plan.memory.items():
        needed = size_text(plan.needed_bytes(device)) if num else "unknown"
        has = "unknown (no nvidia-smi)" if free is None else size_text(free)
        alike[f"needs {needed}, free {has}" if device in used else "not used"].append(device)
    return "\n".join([*lines, *(f"{', '.join(devices)}: {text}" for text, devices in alike.items())])


def _row(name: str, device: str, threads: str, sizes: Sequence[str]) -> str:
    return f"{name:<14} {device:<14} {threads:>7} {''.join(f'{size:>12}' for size in sizes)}"
