"""The plan of a run, before anything starts: which processes, on which device, with how many threads and
bytes.

Bytes are estimates from the config and the model's shape. Reads file headers, config.json and the driver's
files alone: no torch, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from asyncrl.config import ModelConfig, RunConfig, TeacherConfig
from asyncrl.config.generation import ENGINES
from asyncrl.host import num_cores
from asyncrl.placement.choice import NodeDevice
from asyncrl.placement.devices import NO_DEVICE, Mode, Placement, place
from asyncrl.placement.machine import CudaDevice, Machine, this_machine
from asyncrl.placement.model_shape import ModelShape, model_shape
from asyncrl.placement.nodes import LOOPBACK, Node
from asyncrl.placement.plan_shared import shared_memory
from asyncrl.placement.process_memory import (
    PHASES,
    Memory,
    Phase,
    ProcessPlan,
    Side,
    compiles_layers,
    item_bytes,
    pinned,
    trainer_memory,
)

Given = TypeVar("Given")
EVAL_ENGINE = "engine-eval"
"""Name of the engine server that evaluates."""
TEACHER = "teacher"
"""Name of the server that scores what was sampled."""
SCORED_TOKENS = 256
"""Tokens of which it makes logprobs at once."""
OWN_BYTES = 2**29
"""What a process takes beside what the plan counts: CUDA's own memory on a device, Python's on the host."""


VLLM_PART = 0.92
"""Of a CUDA device's memory that a vLLM takes unless rollout.vllm says how much (vLLM 0.32)."""
TRAINER_ROOM = 1.25
"""Times what is planned, for a trainer beside engines that use whatever they are given."""
GRAPH_BYTES = 2**30
"""For the CUDA graphs of a vLLM that does not run eagerly."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes, where they are, and what each device has free (None: not known)."""

    placement: Placement
    processes: tuple[ProcessPlan, ...]
    shape: ModelShape
    free_bytes: Mapping[str, int | None]
    nodes: tuple[Node, ...]
    """The controller's own first."""

    @property
    def is_here(self) -> bool:
        """Whether the controller's machine is this one, and its other nodes are there."""
        return self.nodes[0].machine.is_here

    def peak_bytes(self, device: str) -> dict[Phase, int]:
        """What all processes of a device hold in each phase."""
        held = [process for process in self.processes if process.device == device]
        return {phase: sum(process.held_bytes(phase, self.holding) for process in held) for phase in PHASES}

    def total_bytes(self, device: str) -> int | None:
        """What the device has, used or not; of a host, what is free."""
        found = devices_of(self.placement, self.nodes)[device]
        return found.memory if isinstance(found, Machine) else found.total_bytes

    def share_bounds(self, room: float = 1.0) -> tuple[float, float] | None:
        """Least and most of the devices that both sides use which engines may take, so that all find `room`
        times what is planned for them, and their own; the least is above the most if they do not fit. On the
        CPU they are 0 and what is left. None: not known.
        """
        found = []
        for device in map(self.placement.hosts.label, dict.fromkeys(self.placement.ranks)):
            free, total = self.free_bytes[device], self.total_bytes(device)
            if free is None or total is None:
                return None
            engines, others = 0.0, float(total - free)
            for process in self.processes:
                if process.device == device and process.side != "start":
                    size = process.memory.total * room + (OWN_BYTES if process.threads else 0)
                    is_engine = process.side == "engine" and process.device_name != "cpu"
                    engines, others = engines + size * is_engine, others + size * (not is_engine)
            found.append((engines / total, 1 - others / total))
        return max(least for least, _ in found), min(most for _, most in found)

    def auto_share(self, least: float, most: float) -> float:
        """The part of the devices that both sides use for the engines, between these bounds: what each side
        needs, and half of what is left. Engines that page their KV cache have all but a quarter more than is
        planned for the trainer, which has no use for the rest.
        """
        half, roomy = (least + most) / 2, self.share_bounds(TRAINER_ROOM)
        is_paged = any(process.all_kv for process in self.processes if process.side == "engine")
        return round(max(half, roomy[1]) if is_paged and roomy is not None else half, 3)

    @property
    def holding(self) -> Mode:
        """How its processes hold memory: colocated where they move out for each other."""
        return "colocated" if self.placement.moves else "apart"


def engine_threads(config: RunConfig, cores: int | None = None) -> int:
    """CPU threads of each engine on a machine with so many cores (None: this one): the same whatever the
    number of engines, because results depend on it bit for bit.
    """
    given = config.rollout.threads
    return given if given != "auto" else max(1, (cores or num_cores()) // 4)


def trainer_threads(
    config: RunConfig,
    cores: int | None = None,
    *,
    num_engines: int | None = None,
    num_ranks: int | None = None,
) -> int:
    """CPU threads of each trainer rank: its part of the cores that the rollout engines leave (None: on this
    machine, where all are). Neither an eval engine nor turns change it: such a run must be the run without,
    bit for bit. Of a range of engines the most count: threads are given to a process at its start.
    """
    if config.trainer.threads != "auto":
        return config.trainer.threads
    engines = config.rollout.max_engines if num_engines is None else num_engines
    left = (cores or num_cores()) - engines * engine_threads(config, cores)
    return max(1, left // (num_ranks or config.trainer.world_size))


def threads_on(
    config: RunConfig, placement: Placement, node: int, cores: int | None = None
) -> tuple[int, int]:
    """CPU threads of each engine and of each rank on this node, with so many cores (None: what the placement
    says that it has).
    """
    if cores is None and placement.nodes:
        cores = placement.nodes[node].machine.cores
    num_engines = sum(placement.engine_node(engine) == node for engine in range(len(placement.engines)))
    num_ranks = sum(device.node == node for device in placement.ranks)
    trainer = trainer_threads(config, cores, num_engines=num_engines, num_ranks=num_ranks)
    return engine_threads(config, cores), trainer


def nodes_of(given: Machine | Sequence[Node] | None) -> tuple[Node, ...]:
    """The nodes that are given; a machine: it alone, None: this one."""
    if given is None or isinstance(given, Machine):
        return (Node("this machine", LOOPBACK, given or this_machine()),)
    return tuple(given)


def devices_of(placement: Placement, nodes: Sequence[Node]) -> dict[str, CudaDevice | Machine]:
    """What each device has, by its name for people: of a cpu, the machine."""
    found: dict[str, CudaDevice | Machine] = {}
    for number, node in enumerate(nodes):
        each = {"cpu": node.machine} | {f"cuda:{one}": device for one, device in enumerate(node.machine.cuda)}
        found |= {placement.hosts.label(NodeDevice(number, name)): has for name, has in each.items()}
    return found


def make_plan(config: RunConfig, where: Machine | Sequence[Node] | None = None) -> Plan:
    """The plan of a run on this machine, another one, or several nodes. Raises ConfigError for a placement
    that cannot be.
    """
    nodes, shape = nodes_of(where), model_shape(config.model)
    placement = place(config, nodes)
    free = {
        name: has.memory if isinstance(has, Machine) else has.free_bytes
        for name, has in devices_of(placement, nodes).items()
    }
    return Plan(placement, lay_out(config, shape, placement, nodes), shape, free, nodes)


def lay_out(
    config: RunConfig, shape: ModelShape, placement: Placement, nodes: Sequence[Node]
) -> tuple[ProcessPlan, ...]:
    """Every process with its bytes, on these nodes."""
    label, cores = placement.hosts.label, [node.machine.cores for node in nodes]
    plans = [
        ProcessPlan(
            "controller",
            "controller",
            label(NodeDevice(0, "cpu")),
            1,
            Memory(),
            "rollouts, buffer, publisher",
        )
    ]
    threads = [threads_on(config, placement, node, num) for node, num in enumerate(cores)]
    what = "weights and AdamW state" if config.trainer.lora is None else "weights, AdamW state of adapters"
    for rank, device in enumerate(placement.ranks):
        node, name = device.node, f"trainer-{rank}"
        has_compiler = nodes[node].machine.has_compiler
        memory = trainer_memory(config, shape, device.name, has_compiler=has_compiler)
        is_compiled = compiles_layers(config, shape, device.name, has_compiler=has_compiler)
        compiled = "compiled" if is_compiled else "not compiled"
        note = f"{_part(what, config.trainer.world_size)}; layers counted as {compiled}"
        if config.trainer.cpu_offload:
            shards, note = pinned(replace(memory, activations=0)), f"{note}, between uses, pinned"
            host = label(NodeDevice(node, "cpu"))
            plans.append(ProcessPlan(f"{name}/host", "shards", host, 0, shards, note, node=node))
            memory, note = Memory(activations=memory.activations), "a micro-batch, with gathered layers"
        plans.append(ProcessPlan(name, "trainer", label(device), threads[node][1], memory, note, node=node))
    engines = [
        (f"engine-{index}", placement.engine_node(index), devices, config.rollout.slots, placement.mode)
        for index, devices in enumerate(placement.engines)
    ]
    parked = {name for name, *_ in engines[config.rollout.engine_range.first :]}
    if placement.evaluation is not None:
        beside = (placement.evaluation,)
        engines.append((EVAL_ENGINE, placement.beside_node, beside, config.eval_slots, "apart"))
    for name, node, devices, slots, mode in engines:
        for one in _engine(config, shape, mode, name, devices, slots):
            where = one.device if one.device == NO_DEVICE else label(NodeDevice(node, one.device))
            num = one.threads and threads[node][0]
            note = f"{one.note}; parked at first" if name in parked else one.note
            plans.append(replace(one, device=where, node=node, threads=num, note=note))
    if config.teacher is not None and placement.teacher is not None:
        node = placement.beside_node
        one = _teacher(config, config.teacher, placement.teacher)
        where = label(NodeDevice(node, placement.teacher))
        plans.append(replace(one, device=where, node=node, threads=threads[node][0]))
    return (*plans, *shared_memory(config, shape, placement, plans))


def _teacher(config: RunConfig, settings: TeacherConfig, device: str) -> ProcessPlan:
    shape = model_shape(ModelConfig(path=settings.path, revision=settings.revision))
    item = item_bytes(config.model.dtype, device)
    facts, length = ENGINES["embedded"], config.rollout.max_length
    slots = settings.slots + 1  # and the one that every engine has
    kv = slots * facts.kv_length(length) * shape.layers * shape.cached * item
    # It needs the logits of each token that it reads, not of the last one alone, and logprobs of a part.
    work = shape.forward_bytes(facts.forward_tokens, item) + shape.vocab * 4 * facts.logit_copies * slots
    work += shape.vocab * (facts.forward_tokens * item + SCORED_TOKENS * 3 * 4)
    memory = Memory(weights=shape.num_parameters * item, activations=work, kv=kv)
    note = f"weights, KV cache of {settings.slots} x {length} tokens"
    return ProcessPlan(TEACHER, "eval", device, 1, memory, note)


def _engine(
    config: RunConfig, shape: ModelShape, mode: Mode, name: str, devices: Sequence[str], slots: int
) -> list[ProcessPlan]:
    """One engine, a line for each device that it is split over; node and threads are still to come."""
    side: Side = "eval" if name == EVAL_ENGINE else "engine"
    if devices[0] == NO_DEVICE:
        what = config.rollout.engine if config.rollout.urls is None else "not started by the run"
        return [ProcessPlan(name, side, NO_DEVICE, 0, Memory(), f"{what}, {slots} sequences at once")]
    facts, length, sync = config.rollout.facts, config.rollout.max_length, config.weight_sync.facts
    item, is_on_cpu = item_bytes(config.model.dtype, devices[0]), devices[0] == "cpu"
    weights = shape.num_parameters * item
    copies = 0
    # vLLM reads a file where it lies, and on the CPU loads it beside the weights that serve.
    loads_files = not (sync.sends_adapters or sync.is_transfer)
    if mode == "apart" and (facts.stages_weights or (is_on_cpu and loads_files)):
        # Under adapters the linear layers of the start stay, beside those that serve and those that come.
        copies = weights + (shape.num_linear * item if sync.sends_adapters else 0)
        if sync.is_one_kept and side == "engine":  # what comes, and what came before
            most = max(config.weight_sync.chunk_bytes, shape.largest_tensor * item)
            copies += 2 * min(weights, most)
    num_held = slots * (2 if config.keeps_turns else 1)
    cached = shape.cached
    if facts.pages_kv and shape.cached_latent:
        cached = shape.cached_latent * len(devices)  # which have no heads to be split by: each has all
    one_kv = facts.kv_length(length) * shape.layers * cached * item
    kv, all_kv, cache = num_held * one_kv, 0, f"{slots} x {length} tokens"
    if facts.pages_kv and not is_on_cpu:
        kv, all_kv, cache = one_kv, num_held * one_kv, f"{length} tokens at least"
    if (given := _vllm_given(config, "kv_cache_memory_bytes", int)) is not None:
        kv, all_kv, cache = given * len(devices), 0, f"{given} bytes"
    most = _vllm_given(config, "max_num_batched_tokens", int) or facts.forward_tokens
    work = shape.forward_bytes(min(most, slots * length), item)
    work += num_held * shape.vocab * 4 * facts.logit_copies
    if facts.pages_kv and not is_on_cpu:
        # Layers take new weights one by one: the largest tensor as it comes and as it is stored, and chunks.
        work = max(work, 2 * (shape.largest_tensor * item + config.weight_sync.chunk_bytes))
        if not _vllm_given(config, "enforce_eager", bool):
            work += GRAPH_BYTES * len(devices)
    memory = Memory(weights=weights, copies=copies, activations=work, kv=kv)
    note = _part(f"{config.rollout.engine}: weights, KV cache of {cache}", len(devices))
    part, all_kv = memory.split(len(devices)), -(-all_kv // len(devices))
    return [
        ProcessPlan(f"{name}/{rank}" if rank else name, side, device, 1, part, note, all_kv)
        for rank, device in enumerate(devices)
    ]


def vllm_part(config: RunConfig, process: ProcessPlan) -> float | None:
    """The fraction of its CUDA device's memory that this vLLM asks for at its start and does not exceed; None
    for what is no vLLM on CUDA.
    """
    is_engine = process.side in ("engine", "eval") and process.name != TEACHER
    if not (is_engine and config.rollout.facts.pages_kv) or process.device_name in ("cpu", NO_DEVICE):
        return None
    for kind in (float, int):
        if (given := _vllm_given(config, "gpu_memory_utilization", kind)) is not None:
            return given
    return VLLM_PART


def _vllm_given(config: RunConfig, name: str, kind: type[Given]) -> Given | None:
    """What rollout.vllm says of this option, if it is of this type."""
    given = {key.lstrip("-").replace("-", "_"): value for key, value in config.rollout.vllm.items()}
    value = given.get(name)
    return value if type(value) is kind else None


def _part(what: str, num: int) -> str:
    return what if num == 1 else f"1 / {num} of {what}"
