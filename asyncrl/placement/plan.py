"""The plan of a run, before anything starts: which processes, on which device, with how many threads and
bytes.

Reads file headers, config.json and the driver's files alone: no torch, nothing is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.config import RunConfig
from asyncrl.placement.choices import chunk_way, find_vllm_python
from asyncrl.placement.devices import NO_DEVICE, CudaDevice, Placement, find_cuda_devices, place
from asyncrl.placement.memory_plan import (
    PHASES,
    Memory,
    ModelShape,
    ProcessPlan,
    Side,
    engine_memory,
    item_bytes,
    model_shape,
    peak_bytes,
    size_text,
    trainer_memory,
)

EVAL_ENGINE = "engine-eval"
"""Name of the engine server that evaluates."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes, where they are, and what each device has free (None: not known)."""

    placement: Placement
    processes: tuple[ProcessPlan, ...]
    shape: ModelShape | None
    free_bytes: Mapping[str, int | None]
    num_cuda: int
    vllm_python: Path | None = None
    """The Python of the processes that need vLLM; None if none does."""

    @property
    def num_parameters(self) -> int | None:
        """Of the model; None while it is not on disk."""
        return None if self.shape is None else self.shape.num_parameters


def engine_threads(config: RunConfig) -> int:
    """CPU threads of each engine: the same whatever the number of engines, because results depend on it bit
    for bit.
    """
    return config.rollout.threads if config.rollout.threads != "auto" else max(1, (os.cpu_count() or 1) // 4)


def trainer_threads(config: RunConfig) -> int:
    """CPU threads of each trainer rank: its part of the cores that the rollout engines leave.

    An eval engine takes none away: a run with one must be the run without, bit for bit. Nor do turns give
    any: a colocated run must be the run apart.
    """
    if config.trainer.threads != "auto":
        return config.trainer.threads
    return max(
        1,
        ((os.cpu_count() or 1) - config.rollout.num_engines * engine_threads(config))
        // config.trainer.world_size,
    )


def make_plan(config: RunConfig, cuda: Sequence[CudaDevice] | None = None) -> Plan:
    """The plan of a run on this machine; `cuda`: the devices that it shows, else they are looked for.

    Raises ConfigError for a placement that cannot be, and for a vLLM that is not there; whether it fits is
    asked of refuse_what_cannot_fit.
    """
    devices = find_cuda_devices() if cuda is None else cuda
    placement, shape = place(config, len(devices)), model_shape(config.model)
    free: dict[str, int | None] = {"cpu": psutil.virtual_memory().available}
    free |= {f"cuda:{number}": device.free_bytes for number, device in enumerate(devices)}
    processes = lay_out(config, shape, placement)
    python = (
        find_vllm_python(config.rollout) if any(process.has_vllm_python for process in processes) else None
    )
    return Plan(placement, processes, shape, free, len(devices), python)


def lay_out(config: RunConfig, shape: ModelShape | None, placement: Placement) -> tuple[ProcessPlan, ...]:
    """Every process with its bytes."""
    controller = ProcessPlan(
        "controller", "controller", "cpu", 1, Memory(), "producers, buffer, publisher; no torch"
    )
    trainers, engines = _trainers(config, shape, placement), _engines(config, shape, placement)
    return (controller, *trainers, *engines, *_shared(config, shape, placement, trainers))


def _trainers(config: RunConfig, shape: ModelShape | None, placement: Placement) -> list[ProcessPlan]:
    ranks, threads = config.trainer.world_size, trainer_threads(config)
    what = "adapters and their AdamW state" if config.trainer.lora else "float32 weights and AdamW state"
    note = what if ranks == 1 else f"1 / {ranks} of {what}"
    return [
        ProcessPlan(
            f"trainer-{rank}",
            "trainer",
            device,
            threads,
            None if shape is None else trainer_memory(config, shape, device),
            note,
        )
        for rank, device in enumerate(placement.trainer)
    ]


def _engines(config: RunConfig, shape: ModelShape | None, placement: Placement) -> list[ProcessPlan]:
    plans: list[ProcessPlan] = []
    for index, device in enumerate(placement.rollout):
        name = f"engine-{index}"
        if config.rollout.urls is not None:
            plans.append(
                ProcessPlan(
                    name, "engine", device, 0, Memory(), f"somebody else's, at {config.rollout.urls[index]}"
                )
            )
        else:
            plans += _engine(
                config, shape, placement, name, placement.devices_of(index), config.rollout.slots
            )
    if config.eval is not None and placement.evaluation is not None:
        plans += _engine(config, shape, placement, EVAL_ENGINE, (placement.evaluation,), config.eval.slots)
    return plans


def _engine(
    config: RunConfig,
    shape: ModelShape | None,
    placement: Placement,
    name: str,
    devices: Sequence[str],
    slots: int,
) -> list[ProcessPlan]:
    """One engine, a line for each device that it is split over."""
    side: Side = "eval" if name == EVAL_ENGINE else "engine"
    if devices[0] == NO_DEVICE:
        model = config.rollout.simulated
        note = (
            f"simulated: {1000 * model.decode_step_s:g} ms a decode step and {1000 * model.per_row_s:g} ms "
            f"for each of {slots} sequences, "
            f"about {model.mean_tokens:g} tokens each (sigma {model.sigma:g})"
        )
        return [ProcessPlan(name, side, NO_DEVICE, 1, Memory(), note)]
    is_vllm, is_staging = config.rollout.engine == "vllm", placement.mode == "apart" or side == "eval"
    whole = None if shape is None else engine_memory(config, shape, devices[0], slots, is_staging=is_staging)
    part = (
        None
        if whole is None
        else Memory(
            -(-whole.weights // len(devices)), -(-whole.copies // len(devices)), kv=whole.kv // len(devices)
        )
    )
    length = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    note = (
        f"{'weights twice (serving and staged), ' if is_staging and not is_vllm else ''}KV cache of "
        f"{slots} x {length} tokens"
    )
    if is_vllm:
        note = f"vLLM, {note}{'' if devices[0] == 'cpu' else ' at least'}"
    if len(devices) > 1:
        note = f"1 / {len(devices)} of {note}"
    names = [name, *(f"{name}/{rank}" for rank in range(1, len(devices)))]
    threads = engine_threads(config)
    return [
        ProcessPlan(n, side, device, threads, part, note, is_vllm)
        for n, device in zip(names, devices, strict=True)
    ]


def _staging(exported: int) -> ProcessPlan:
    return ProcessPlan(
        "staging", "staging", "cpu", 0, Memory(weights=exported), "weights on their way, in shared memory"
    )


def _shared(
    config: RunConfig, shape: ModelShape | None, placement: Placement, trainers: Sequence[ProcessPlan]
) -> list[ProcessPlan]:
    """Memory that no process holds alone: weights on their way, and what turns move off a CUDA device."""
    if shape is None:
        return []
    item = item_bytes(config.model.dtype, placement.trainer[0])
    exported = shape.num_parameters * item
    if placement.mode == "apart":
        if config.weight_sync.way.sends_adapters and config.trainer.lora is not None:
            exported = shape.num_adapter_parameters(config.trainer.lora.rank) * 4
        if config.weight_sync.way.is_one_kept:
            held = ProcessPlan(
                "held",
                "staging",
                placement.trainer[0],
                0,
                Memory(weights=exported),
                "the copy that the trainer sends from",
            )
            return [held] if config.eval is None else [held, _staging(exported)]
        if config.weight_sync.way.is_file_shared:
            return []
        return [_staging(exported)]
    way, memory = chunk_way(config, placement), Memory(weights=min(config.weight_sync.chunk_bytes, exported))
    note = "a chunk of weights, in " + (
        "shared memory" if way.device == "cpu" else "memory that both sides open"
    )
    chunk = ProcessPlan("staging", "staging", way.device, 0, memory, note)
    if not placement.is_on_cuda:
        return [chunk]
    memories = [trainer.memory or Memory() for trainer in trainers]
    moved = Memory(
        weights=sum(memory.weights for memory in memories),
        copies=sum(memory.copies for memory in memories),
        optimizer=sum(memory.optimizer for memory in memories),
    )
    return [
        chunk,
        ProcessPlan(
            "offloaded", "host", "cpu", 0, moved, "the trainer's state while the engines have the device"
        ),
    ]


# The plan as text: what `asyncrl check` prints. Knows a plan; computes nothing new.


COLUMNS = ("weights", "copies", "gradients", "optimizer", "activations", "kv")


def plan_text(plan: Plan, config: RunConfig) -> str:
    """Processes with their bytes, mode and transport with the reason, and what each device needs of what it
    has free.
    """
    size = "not on disk yet" if plan.num_parameters is None else f"{plan.num_parameters:,} parameters"
    python = f" {'python':<6}" if plan.vllm_python is not None else ""
    header = (
        f"{'process':<12}{python} {'device':<7} {'threads':>7} "
        + " ".join(f"{column:>11}" for column in COLUMNS)
        + "  what"
    )
    rows = [_row(process, has_python=plan.vllm_python is not None) for process in plan.processes]
    lines = [f"model: {size}", "", header, *rows, ""]
    if plan.vllm_python is not None:
        lines.append(f"python: ours is {sys.executable}, vLLM's is {plan.vllm_python}")
    lines += [
        f"mode: {transport_text(config, plan.placement)}",
        f"each push: {verified_text(config)}",
        *_device_lines(plan),
    ]
    if idle := [
        device
        for device in plan.free_bytes
        if device != "cpu" and device not in {p.device for p in plan.processes}
    ]:
        lines.append(f"not used: {', '.join(idle)}")
    return "\n".join(lines)


def _row(process: ProcessPlan, *, has_python: bool) -> str:
    memory = process.memory
    sizes = [
        "?" if memory is None else size_text(size) if (size := getattr(memory, column)) else "-"
        for column in COLUMNS
    ]
    is_process = process.side not in ("staging", "host") and process.threads
    python = (
        f" {('vllm' if process.has_vllm_python else 'ours') if is_process else '-':<6}" if has_python else ""
    )
    return (
        f"{process.name:<12}{python} {process.device:<7} {process.threads or '-':>7} "
        + " ".join(f"{size:>11}" for size in sizes)
        + f"  {process.note}"
    )


def _device_lines(plan: Plan) -> list[str]:
    if plan.shape is None:
        return [
            f"memory: cannot be added up before the model is there; {size_text(plan.free_bytes['cpu'])} free"
        ]
    lines = []
    for device, free in plan.free_bytes.items():
        needs = peak_bytes(plan.processes, device, plan.placement.mode)
        peak = max(needs.values())
        if device != "cpu" and not peak:
            continue
        by_phase = ", ".join(f"{phase} {size_text(needs[phase])}" for phase in PHASES)
        in_turns = f", the most of {by_phase}" if len(set(needs.values())) > 1 else ""
        has = "free is not known (no nvidia-smi)" if free is None else f"{size_text(free)} free"
        vllm = ", a vLLM server 2.4 GiB" if plan.vllm_python is not None else ""
        beside = f", before the Python processes (about 0.5 GiB each{vllm})" if device == "cpu" else ""
        lines.append(f"memory of {device}: {size_text(peak)}{in_turns}; {has}{beside}")
    return lines


# How weights travel from the trainer to the engines, in words with the reason. Knows a placement; computes
# nothing.


def transport_text(config: RunConfig, placement: Placement) -> str:
    """Mode and transport in one line, with the reason."""
    if placement.mode == "colocated":
        return f"colocated on {placement.shared}, in turns: {_in_turns(config, placement)}"
    engines = (
        "elsewhere"
        if config.rollout.urls is not None
        else f"on {', '.join(dict.fromkeys(_all_devices(placement)))}"
    )
    sides = f"trainer on {', '.join(dict.fromkeys(placement.trainer))}, engines {engines}"
    words = config.weight_sync.way.words(
        is_on_cuda=placement.is_on_cuda, disk_dir=config.weight_sync.disk_dir
    )
    return f"apart ({sides}): {words}"


def verified_text(config: RunConfig) -> str:
    """How a push is verified and in what order engines swap, in one line."""
    checks = "the digest of what was loaded"
    if config.rollout.engine == "vllm" and config.weight_sync.canary_limit is not None:
        limit = config.weight_sync.canary_limit
        words = "0.001 nats in float32, 0.25 in bfloat16" if limit == "auto" else f"{limit} nats"
        checks += f", and the logprobs of a fixed text (canary: within {words} of the trainer's)"
    order = (
        "one engine after the other"
        if config.weight_sync.rolling and config.rollout.num_engines > 1
        else "all engines at once"
    )
    return f"{checks}; running requests: {config.weight_sync.interrupt}; {order}"


def _in_turns(config: RunConfig, placement: Placement) -> str:
    loads = (
        "an engine that has just woken has room for one set of weights, and chunks are loaded straight "
        "into it"
    )
    way = chunk_way(config, placement)
    return (
        f"weights go {way.how} in chunks of {size_text(config.weight_sync.chunk_bytes)}, because "
        f"{way.why}, and {loads}"
    )


def _all_devices(placement: Placement) -> list[str]:
    devices = [device for group in placement.parallel for device in group] or list(placement.rollout)
    return devices if devices else [NO_DEVICE]
