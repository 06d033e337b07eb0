"""The plan of a run, before anything starts: which processes, on which device, with how many threads and
bytes.

Bytes are estimates from the config and the model's shape. Reads file headers, config.json and the driver's
files alone: no torch, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal, get_args

from asyncrl.config import ModelConfig, RunConfig, TeacherConfig
from asyncrl.config.generation import ENGINES
from asyncrl.config.learning import CPU_MICRO_BATCH_TOKENS
from asyncrl.placement.devices import NO_DEVICE, Mode, Placement, chunk_devices, place
from asyncrl.placement.machine import Machine, num_cores, this_machine
from asyncrl.placement.model_shape import ModelShape, model_shape

EVAL_ENGINE = "engine-eval"
"""Name of the engine server that evaluates."""
TEACHER = "teacher"
"""Name of the server that scores what was sampled."""
SCORED_TOKENS = 256
"""Tokens of which it makes logprobs at once."""

OWN_BYTES = 2**29
"""What a process takes beside what the plan counts: CUDA's own memory on a device, Python's on the host."""

Phase = Literal["start", "generation", "training", "publish"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Side = Literal["controller", "trainer", "shards", "engine", "eval", "staging", "host", "checkpoint", "start"]
"""Owner of the memory. shards: state of the trainer that trainer.cpu_offload has in host memory; eval: what
works beside both sides at any time, the teacher too; staging: weights between trainer and engines, in memory
that both open; host: state that the trainer moved off a CUDA device; checkpoint: the copy that one is written
from, at any time after the start; start: what the trainer's processes load before their weights are where
they stay.
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the largest parts. `copies`: a second set of weights (staged by an engine, or the trainer's
    reference). `activations`: of a forward pass, with logits, and what it keeps for a backward pass.
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
    all_kv: int = 0
    """Where memory.kv is what one sequence takes: what all slots would take, each at full length."""

    def held_bytes(self, phase: Phase, mode: Mode) -> int:
        """What it holds in this phase, in that of the start when the trainer has loaded its weights. Apart,
        everything at any time after it; in turns, what the turn leaves it. (In turns in which both sides
        stay, `mode` is apart.)
        """
        memory = self.memory
        match self.side, phase:
            case "start", _:
                return memory.total if phase == "start" else 0
            case (("trainer" | "shards"), "start"):
                return memory.weights + memory.copies
            case ("staging" | "host" | "checkpoint", "start"):
                return 0
            case "engine", "start" if mode == "colocated":  # they are started before it, and sleep
                return 0
        if mode == "apart":
            return memory.total
        match self.side, phase:
            case ("trainer", "generation") | ("engine", "training") | ("host", "training"):
                return 0
            case "trainer", "publish":  # no gradients, and the optimizer is moved before the engines wake
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
    """All processes, where they are, and what each device has free (None: not known)."""

    placement: Placement
    processes: tuple[ProcessPlan, ...]
    shape: ModelShape
    free_bytes: Mapping[str, int | None]
    machine: Machine

    def peak_bytes(self, device: str) -> dict[Phase, int]:
        """What all processes of a device hold in each phase."""
        held = [process for process in self.processes if process.device == device]
        return {phase: sum(process.held_bytes(phase, self.holding) for process in held) for phase in PHASES}

    def total_bytes(self, device: str) -> int | None:
        """What the device has, used or not; of the host, what is free."""
        number = device.removeprefix("cuda:")
        return self.machine.cuda[int(number)].total_bytes if number != device else self.machine.memory

    def share_bounds(self, room: float = 1.0) -> tuple[float, float] | None:
        """Least and most of the devices that both sides use which engines may take, so that all find `room`
        times what is planned for them, and their own; the least is above the most if they do not fit. On the
        CPU they are 0 and what is left. None: not known.
        """
        found = []
        for device in dict.fromkeys(self.placement.trainer):
            free, total = self.free_bytes[device], self.total_bytes(device)
            if free is None or total is None:
                return None
            engines, others = 0.0, float(total - free)
            for process in self.processes:
                if process.device == device and process.side != "start":
                    size = process.memory.total * room + (OWN_BYTES if process.threads else 0)
                    is_engine = process.side == "engine" and device != "cpu"
                    engines, others = engines + size * is_engine, others + size * (not is_engine)
            found.append((engines / total, 1 - others / total))
        return max(least for least, _ in found), min(most for _, most in found)

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


def trainer_threads(config: RunConfig, cores: int | None = None) -> int:
    """CPU threads of each trainer rank: its part of the cores that the rollout engines leave. Neither an eval
    engine nor turns change it: such a run must be the run without, bit for bit. Of a range of engines the
    most count: threads are given to a process at its start.
    """
    if config.trainer.threads != "auto":
        return config.trainer.threads
    left = (cores or num_cores()) - config.rollout.max_engines * engine_threads(config, cores)
    return max(1, left // config.trainer.world_size)


def make_plan(config: RunConfig, machine: Machine | None = None) -> Plan:
    """The plan of a run on this machine, or another one. Raises ConfigError for a placement that cannot
    be.
    """
    machine = machine or this_machine()
    placement, shape = place(config, len(machine.cuda)), model_shape(config.model)
    free: dict[str, int | None] = {"cpu": machine.memory}
    free |= {f"cuda:{number}": device.free_bytes for number, device in enumerate(machine.cuda)}
    return Plan(placement, lay_out(config, shape, placement, machine.cores), shape, free, machine)


def lay_out(
    config: RunConfig, shape: ModelShape, placement: Placement, cores: int
) -> tuple[ProcessPlan, ...]:
    """Every process with its bytes, on a machine with so many cores."""
    rollout = config.rollout.model_copy(update={"threads": engine_threads(config, cores)})
    config = config.model_copy(update={"rollout": rollout})
    plans = [ProcessPlan("controller", "controller", "cpu", 1, Memory(), "rollouts, buffer, publisher")]
    threads, ranks = trainer_threads(config, cores), config.trainer.world_size
    what = "weights and AdamW state" if config.trainer.lora is None else "weights, AdamW state of adapters"
    for rank, device in enumerate(placement.trainer):
        memory, note = trainer_memory(config, shape, device), _part(what, ranks)
        if config.trainer.cpu_offload:
            shards, note = replace(memory, activations=0), f"{note}, between uses"
            plans.append(ProcessPlan(f"trainer-{rank}/host", "shards", "cpu", 0, shards, note))
            memory, note = Memory(activations=memory.activations), "a micro-batch, with gathered layers"
        plans.append(ProcessPlan(f"trainer-{rank}", "trainer", device, threads, memory, note))
    for index, devices in enumerate(placement.engines):
        engine = _engine(config, shape, placement.mode, f"engine-{index}", devices, config.rollout.slots)
        parked = "; parked at first" if index >= config.rollout.engine_range.first else ""
        plans += [replace(one, note=one.note + parked) for one in engine]
    if config.eval is not None and placement.evaluation is not None:
        plans += _engine(config, shape, "apart", EVAL_ENGINE, (placement.evaluation,), config.eval.slots)
    if config.teacher is not None and placement.teacher is not None:
        plans.append(_teacher(config, config.teacher, placement.teacher))
    return (*plans, *_shared(config, shape, placement, plans))


def _teacher(config: RunConfig, settings: TeacherConfig, device: str) -> ProcessPlan:
    shape, item = model_shape(ModelConfig(path=settings.path)), item_bytes(config.model.dtype, device)
    facts, length = ENGINES["embedded"], config.rollout.max_length
    slots = settings.slots + 1  # and the one that every engine has
    kv = slots * facts.kv_length(length) * shape.kv_per_token * item
    # It needs the logits of each token that it reads, not of the last one alone, and logprobs of a part.
    work = shape.forward_bytes(facts.forward_tokens, item) + shape.vocab * 4 * facts.logit_copies * slots
    work += shape.vocab * (facts.forward_tokens * item + SCORED_TOKENS * 3 * 4)
    memory = Memory(weights=shape.num_parameters * item, activations=work, kv=kv)
    note = f"weights, KV cache of {settings.slots} x {length} tokens"
    return ProcessPlan(TEACHER, "eval", device, engine_threads(config), memory, note)


def _engine(
    config: RunConfig, shape: ModelShape, mode: Mode, name: str, devices: Sequence[str], slots: int
) -> list[ProcessPlan]:
    """One engine, a line for each device that it is split over."""
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
    num_held = slots * (2 if config.keeps_turns else 1)
    one_kv = facts.kv_length(length) * shape.kv_per_token * item
    kv, all_kv, cache = num_held * one_kv, 0, f"{slots} x {length} tokens"
    if facts.pages_kv and not is_on_cpu:
        kv, all_kv, cache = one_kv, num_held * one_kv, f"{length} tokens at least"
    if (given := _vllm_number(config, "kv_cache_memory_bytes")) is not None:
        kv, all_kv, cache = given * len(devices), 0, f"{given} bytes"
    most = _vllm_number(config, "max_num_batched_tokens") or facts.forward_tokens
    work = shape.forward_bytes(min(most, slots * length), item)
    work += num_held * shape.vocab * 4 * facts.logit_copies
    memory = Memory(weights=weights, copies=copies, activations=work, kv=kv)
    note = _part(f"{config.rollout.engine}: weights, KV cache of {cache}", len(devices))
    part, threads = memory.split(len(devices)), engine_threads(config)
    all_kv = -(-all_kv // len(devices))
    return [
        ProcessPlan(f"{name}/{rank}" if rank else name, side, device, threads, part, note, all_kv)
        for rank, device in enumerate(devices)
    ]


def _vllm_number(config: RunConfig, name: str) -> int | None:
    """What rollout.vllm says, if it is a number."""
    given = {key.lstrip("-").replace("-", "_"): value for key, value in config.rollout.vllm.items()}
    value = given.get(name)
    return value if type(value) is int else None


def _part(what: str, num: int) -> str:
    return what if num == 1 else f"1 / {num} of {what}"


def _shared(
    config: RunConfig, shape: ModelShape, placement: Placement, plans: Sequence[ProcessPlan]
) -> Iterator[ProcessPlan]:
    """Memory that no process holds alone, or only for a time: the model as it is loaded, weights on their
    way, and what turns move off a CUDA device.
    """
    if (loaded := _start_memory(config, shape, placement)) is not None:
        yield loaded
    sync, lora, first = config.weight_sync, config.trainer.lora, placement.trainer[0]
    size = shape.num_parameters * item_bytes(config.model.dtype, first)
    if config.checkpoint.every is not None:
        trained = num_trained(config, shape)
        copied = Memory(weights=4 * trained, optimizer=8 * trained)
        note = "the trainer's state, while a checkpoint is written and for the next"
        yield ProcessPlan("checkpoint", "checkpoint", "cpu", 0, copied, note)
    if placement.mode == "colocated":
        chunk = Memory(weights=min(sync.chunk_bytes, size))
        for device in chunk_devices(config, placement) or ("cpu",):
            yield ProcessPlan("staging", "staging", device, 0, chunk, "a chunk of weights")
        if placement.is_on_cuda and placement.moves and not config.trainer.cpu_offload:
            held = [plan.memory for plan in plans if plan.side == "trainer"]
            sums = (sum(each) for each in zip(*map(astuple, held), strict=True))
            moved = replace(Memory(*sums), gradients=0, activations=0)
            note = "the trainer's state while the engines have the device"
            yield ProcessPlan("offloaded", "host", "cpu", 0, moved, note)
        if config.eval is not None:
            note = "a version that is evaluated, in shared memory"
            yield ProcessPlan("evaluated", "eval", "cpu", 0, Memory(weights=size), note)
        return
    if sync.facts.sends_adapters and lora is not None:
        size = shape.num_adapter_parameters(lora.rank) * 4
    if sync.facts.is_one_kept:
        note = "the copy that the trainer sends from"
        yield ProcessPlan("held", "staging", first, 0, Memory(weights=size), note)
    has_file = config.eval is not None if sync.facts.is_one_kept else not sync.facts.is_file_shared
    if has_file:
        note = "weights on their way, in shared memory"
        yield ProcessPlan("staging", "staging", "cpu", 0, Memory(weights=size), note)


def num_trained(config: RunConfig, shape: ModelShape) -> int:
    """Parameters that the optimizer changes."""
    lora = config.trainer.lora
    return shape.num_parameters if lora is None else shape.num_adapter_parameters(lora.rank)


def _start_memory(config: RunConfig, shape: ModelShape, placement: Placement) -> ProcessPlan | None:
    """Host memory of the trainer's start beside the weights that stay: the whole model in the process that
    trains it on a CUDA device; of each rank a tensor, or the whole model where transformers has to convert
    what is stored. None where there is nothing beside.
    """
    trainer, device, ranks = config.trainer, placement.trainer[0], config.trainer.world_size
    is_sharded = is_trainer_sharded(config, device)
    item = 4 if trainer.lora is None else item_bytes(config.model.dtype, device)
    if is_sharded and not shape.is_converted:
        memory, note = Memory(weights=ranks * shape.largest_tensor * item), "of each rank the largest tensor"
    elif is_sharded or device != "cpu":
        has_reference = is_sharded and config.algorithm.kl_coefficient > 0 and trainer.lora is None
        copies = ranks * shape.num_parameters * item if has_reference else 0
        memory = Memory(weights=ranks * shape.num_parameters * item, copies=copies)
        note = "of each trainer process the whole model"
    else:
        return None
    return ProcessPlan("start", "start", "cpu", 0, memory, f"{note}, as it is loaded")


def trainer_memory(config: RunConfig, shape: ModelShape, device: str) -> Memory:
    """Of one rank: weights that compute, AdamW's two moments (and float32 masters, where they are not the
    model's own), one micro-batch, with what is gathered of shards meanwhile.
    """
    trainer, lora, item = config.trainer, config.trainer.lora, item_bytes(config.model.dtype, device)
    trained, is_sharded = num_trained(config, shape), is_trainer_sharded(config, device)
    has_masters = item == 2 and lora is None and not is_sharded
    has_reference = config.algorithm.kl_coefficient > 0 and lora is None
    base = shape.num_parameters * item if has_masters or lora is not None else 0
    merged = shape.num_linear * item if lora is not None and lora.merge == "step" else 0
    whole = Memory(
        weights=base + (0 if has_masters else trained * 4),
        copies=shape.num_parameters * item if has_reference else merged,
        gradients=trained * 4,
        optimizer=trained * (12 if has_masters else 8),
    )
    most = CPU_MICRO_BATCH_TOKENS if device == "cpu" else trainer.micro_batch_tokens
    # A sequence that is longer than a micro-batch is one of its own.
    tokens = max(min(trainer.micro_batch_tokens, most), config.rollout.max_length)
    kind, is_checkpointed = device.partition(":")[0], trainer.gradient_checkpointing
    is_trained = lora is None
    frees_gradients = is_trained and not is_sharded
    work = shape.step_bytes(tokens, item, kind, is_checkpointed=is_checkpointed, is_trained=frees_gradients)
    if is_sharded:
        work += shape.gathered_bytes(item, trainer.world_size, is_trained=is_trained)
    return replace(whole.split(trainer.world_size), activations=work)


def is_trainer_sharded(config: RunConfig, device: str) -> bool:
    """TrainerConfig.is_sharded, of the run."""
    is_half = item_bytes(config.model.dtype, device) == 2
    return config.trainer.is_sharded(device, "bfloat16" if is_half else "float32")


def item_bytes(dtype: str, device: str) -> int:
    """Bytes of a weight where it computes."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.startswith("cuda")) else 4
