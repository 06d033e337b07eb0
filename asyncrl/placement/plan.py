"""The plan of a run, before anything starts: which processes, on which device, with how many threads and bytes.

Reads file headers, config.json and the driver's files alone: no torch, nothing is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.config import RunConfig
from asyncrl.placement.chunk_way import chunk_way
from asyncrl.placement.cuda import CudaDevice, find_cuda_devices
from asyncrl.placement.devices import NO_DEVICE, Placement, place
from asyncrl.placement.interpreters import find_vllm_python
from asyncrl.placement.memory import Memory, ProcessPlan, Side, engine_memory, item_bytes, trainer_memory
from asyncrl.placement.model_shape import ModelShape, model_shape

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
    """CPU threads of each engine: the same whatever the number of engines, because results depend on it bit for bit."""
    return config.rollout.threads if config.rollout.threads != "auto" else max(1, (os.cpu_count() or 1) // 4)


def trainer_threads(config: RunConfig) -> int:
    """CPU threads of each trainer rank: its part of the cores that the rollout engines leave.

    An eval engine takes none away: a run with one must be the run without, bit for bit. Nor do turns give any: a colocated run
    must be the run apart.
    """
    if config.trainer.threads != "auto":
        return config.trainer.threads
    return max(1, ((os.cpu_count() or 1) - config.rollout.num_engines * engine_threads(config)) // config.trainer.world_size)


def make_plan(config: RunConfig, cuda: Sequence[CudaDevice] | None = None) -> Plan:
    """The plan of a run on this machine; `cuda`: the devices that it shows, else they are looked for.

    Raises ConfigError for a placement that cannot be, and for a vLLM that is not there; whether it fits is asked of
    refuse_what_cannot_fit.
    """
    devices = find_cuda_devices() if cuda is None else cuda
    placement, shape = place(config, len(devices)), model_shape(config.model)
    free: dict[str, int | None] = {"cpu": psutil.virtual_memory().available}
    free |= {f"cuda:{number}": device.free_bytes for number, device in enumerate(devices)}
    processes = lay_out(config, shape, placement)
    python = find_vllm_python(config.rollout) if any(process.has_vllm_python for process in processes) else None
    return Plan(placement, processes, shape, free, len(devices), python)


def lay_out(config: RunConfig, shape: ModelShape | None, placement: Placement) -> tuple[ProcessPlan, ...]:
    """Every process with its bytes."""
    controller = ProcessPlan("controller", "controller", "cpu", 1, Memory(), "producers, buffer, publisher; no torch")
    trainers, engines = _trainers(config, shape, placement), _engines(config, shape, placement)
    return (controller, *trainers, *engines, *_shared(config, shape, placement, trainers))


def _trainers(config: RunConfig, shape: ModelShape | None, placement: Placement) -> list[ProcessPlan]:
    ranks, threads = config.trainer.world_size, trainer_threads(config)
    what = "adapters and their AdamW state" if config.trainer.lora else "float32 weights and AdamW state"
    note = what if ranks == 1 else f"1 / {ranks} of {what}"
    return [
        ProcessPlan(
            f"trainer-{rank}", "trainer", device, threads, None if shape is None else trainer_memory(config, shape, device), note
        )
        for rank, device in enumerate(placement.trainer)
    ]  # fmt: skip


def _engines(config: RunConfig, shape: ModelShape | None, placement: Placement) -> list[ProcessPlan]:
    plans: list[ProcessPlan] = []
    for index, device in enumerate(placement.rollout):
        name = f"engine-{index}"
        if config.rollout.urls is not None:
            plans.append(ProcessPlan(name, "engine", device, 0, Memory(), f"somebody else's, at {config.rollout.urls[index]}"))
        else:
            plans += _engine(config, shape, placement, name, placement.devices_of(index), config.rollout.slots)
    if config.eval is not None and placement.evaluation is not None:
        plans += _engine(config, shape, placement, EVAL_ENGINE, (placement.evaluation,), config.eval.slots)
    return plans


def _engine(
    config: RunConfig, shape: ModelShape | None, placement: Placement, name: str, devices: Sequence[str], slots: int
) -> list[ProcessPlan]:
    """One engine, a line for each device that it is split over."""
    side: Side = "eval" if name == EVAL_ENGINE else "engine"
    if devices[0] == NO_DEVICE:
        model = config.rollout.simulated
        note = (
            f"simulated: {1000 * model.decode_step_s:g} ms a decode step and {1000 * model.per_row_s:g} ms for each of {slots} sequences, "
            f"about {model.mean_tokens:g} tokens each (sigma {model.sigma:g})"
        )
        return [ProcessPlan(name, side, NO_DEVICE, 1, Memory(), note)]
    is_vllm, is_staging = config.rollout.engine == "vllm", placement.mode == "apart" or side == "eval"
    whole = None if shape is None else engine_memory(config, shape, devices[0], slots, is_staging=is_staging)
    part = (
        None if whole is None else Memory(-(-whole.weights // len(devices)), -(-whole.copies // len(devices)), kv=whole.kv // len(devices))
    )
    length = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    note = f"{'weights twice (serving and staged), ' if is_staging and not is_vllm else ''}KV cache of {slots} x {length} tokens"
    if is_vllm:
        note = f"vLLM, {note}{'' if devices[0] == 'cpu' else ' at least'}"
    if len(devices) > 1:
        note = f"1 / {len(devices)} of {note}"
    names = [name, *(f"{name}/{rank}" for rank in range(1, len(devices)))]
    threads = engine_threads(config)
    return [ProcessPlan(n, side, device, threads, part, note, is_vllm) for n, device in zip(names, devices, strict=True)]


def _staging(exported: int) -> ProcessPlan:
    return ProcessPlan("staging", "staging", "cpu", 0, Memory(weights=exported), "weights on their way, in shared memory")


def _shared(config: RunConfig, shape: ModelShape | None, placement: Placement, trainers: Sequence[ProcessPlan]) -> list[ProcessPlan]:
    """Memory that no process holds alone: weights on their way, and what turns move off a CUDA device."""
    if shape is None:
        return []
    item = item_bytes(config.model.dtype, placement.trainer[0])
    exported = shape.num_parameters * item
    if placement.mode == "apart":
        if config.publisher.transport == "lora" and config.trainer.lora is not None:
            exported = shape.num_adapter_parameters(config.trainer.lora.rank) * 4
        if config.publisher.transport == "nccl":
            held = ProcessPlan("held", "staging", placement.trainer[0], 0, Memory(weights=exported), "the copy that the trainer sends from")
            return [held] if config.eval is None else [held, _staging(exported)]
        if config.publisher.disk_dir is not None:
            return []
        return [_staging(exported)]
    way, memory = chunk_way(config, placement), Memory(weights=min(config.publisher.chunk_bytes, exported))
    note = "a chunk of weights, in " + ("shared memory" if way.device == "cpu" else "memory that both sides open")
    chunk = ProcessPlan("staging", "staging", way.device, 0, memory, note)
    if not placement.is_on_cuda:
        return [chunk]
    memories = [trainer.memory or Memory() for trainer in trainers]
    moved = Memory(
        weights=sum(memory.weights for memory in memories),
        copies=sum(memory.copies for memory in memories),
        optimizer=sum(memory.optimizer for memory in memories),
    )
    return [chunk, ProcessPlan("offloaded", "host", "cpu", 0, moved, "the trainer's state while the engines have the device")]
