"""Assign devices to ranks, engines, eval engine and teacher. Imports no torch.

Sides on the same CUDA devices time-share them, or work concurrently if placement.share is a number. Each
rank has its own CUDA device; no engine spans two nodes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.config.placement_sync import Devices, NodesConfig, device_numbers, refuse_transport
from asyncrl.launch.machine import Node

SIZES = ("gpu_memory_utilization", "num_gpu_blocks_override")


@dataclass(frozen=True, slots=True)
class Placement:
    """None: not in the run."""

    nodes: tuple[Node, ...]
    """The controller's is first."""
    trainer: Side
    engines: tuple[Side, ...]
    mode: Literal["apart", "colocated"]
    evaluation: NodeDevice | None = None
    teacher: NodeDevice | None = None
    memory_fraction: float | None = None
    """Engines' fraction of shared devices; None: no limit."""
    resident: bool = False

    @property
    def moves(self) -> bool:
        return self.mode == "colocated" and not self.resident

    @property
    def is_on_cuda(self) -> bool:
        return self.trainer[0].name != "cpu"

    @property
    def engine_devices(self) -> Side:
        return tuple(dict.fromkeys(device for devices in self.engines for device in devices))

    @property
    def num_nodes(self) -> int:
        receivers = [*self.engine_devices, *([self.evaluation] if self.evaluation else [])]
        return len({0, *(one.node for one in (*self.trainer, *receivers) if one.name != NO_DEVICE)})

    def label(self, device: NodeDevice) -> str:
        is_plain = len(self.nodes) == 1 or device.name == NO_DEVICE
        return device.name if is_plain else f"{self.nodes[device.node].name}/{device.name}"

    @property
    def names(self) -> tuple[list[str], list[str]]:
        sides = (self.trainer, [device for devices in self.engines for device in devices])
        ranks, engines = (
            [one.name if one.name == "cpu" else self.label(one) for one in side] for side in sides
        )
        return ranks, engines

    def memory_fraction_of(self, engine: int) -> float | None:
        num = sum(self.engines[engine][0] in devices for devices in self.engines)
        return None if self.memory_fraction is None else self.memory_fraction / num

    def parts(self, *, has_engines: bool, serves_only: bool = False) -> dict[int, list[str]]:
        parts = defaultdict[int, list[str]](list, {0: []})
        used = [device for devices in self.engines for device in devices] if has_engines else []
        if not serves_only:
            used += [*self.trainer, *filter(None, (self.evaluation, self.teacher))]
        for node, name in used:
            parts[node].append(name)
        return parts


def place(config: RunConfig, nodes: Sequence[Node]) -> Placement:
    """The controller's node is first. Raises ConfigError."""
    trainer, rollout = select(config, nodes)
    is_shared = bool({*_cuda(trainer)} & {*rollout})
    share = config.placement.share
    fraction = share if isinstance(share, float) else None
    works_at_once = is_shared and fraction is not None and config.buffer.max_staleness > 0
    is_colocated = (is_shared or config.placement.rollout == "trainer") and not works_at_once
    _validate_sides(config, nodes, trainer, rollout)
    _validate_engines(config, rollout[0].name.partition(":")[0])
    if is_colocated:
        _validate_colocation(config, rollout[0].name)
    if fraction is not None:
        _validate_share(config, is_shared=is_shared)
    _validate_counts(config, trainer, rollout)
    size = config.trainer.world_size
    split = config.rollout.tensor_parallel
    dealt = tuple(rollout[index % len(rollout)] for index in range(config.rollout.max_engines * split))
    engines = tuple(dealt[start : start + split] for start in range(0, len(dealt), split))
    if takes_no_device(config):
        engines = ((NodeDevice(0, NO_DEVICE),),) * config.rollout.max_engines
    placement = Placement(
        nodes=tuple(nodes),
        trainer=tuple(trainer[index * len(trainer) // size] for index in range(size)),
        engines=engines,
        mode="colocated" if is_colocated else "apart",
        memory_fraction=fraction,
        resident=is_colocated and fraction is not None,
    )
    placement = _with_evaluation_and_teacher(config, placement)
    refuse_transport(config, *placement.names, is_turns=is_colocated, num_nodes=placement.num_nodes)
    return placement


def _cuda(devices: Sequence[NodeDevice]) -> Side:
    return tuple(device for device in devices if device.name != "cpu")


def _validate_sides(config: RunConfig, nodes: Sequence[Node], trainer: Side, rollout: Side) -> None:
    if len(nodes) > 1 and config.launcher == "local":
        raise ConfigError(
            f"launcher=local starts processes on this machine, and there are {len(nodes)} nodes",
            way_out="set launcher=ray, or describe one machine.",
        )
    shared = {*_cuda(trainer)} & {*rollout}
    if shared and {*trainer} != {*rollout}:
        labels = ", ".join(f"{nodes[node].name}/{name}" for node, name in sorted(shared))
        raise ConfigError(
            f"{_written(config)} share only {labels}; the other devices would wait for them",
            way_out="give both sides the same devices (placement.rollout=trainer), or none in common.",
        )


def _written(config: RunConfig) -> str:
    return f"placement.trainer={config.placement.trainer}, placement.rollout={config.placement.rollout}"


def _validate_colocation(config: RunConfig, device: str) -> None:
    rollout = config.rollout
    if config.buffer.max_staleness > 0 or rollout.is_scaled:
        raise ConfigError(
            f"{_written(config)} are the same devices, and "
            f"buffer.max_staleness={config.buffer.max_staleness}, rollout.num_engines={rollout.num_engines}",
            rule="time-sharing makes every batch on-policy, with a fixed number of engines",
            way_out=f"set buffer.max_staleness=0 and rollout.num_engines={rollout.max_engines}, or give "
            "placement.rollout its own devices; on CUDA, placement.share=0.4 lets both sides work at once.",
        )
    if rollout.urls is not None or (device == "cpu" and not rollout.facts.sleeps_on_cpu):
        raise ConfigError(
            f"placement.rollout={config.placement.rollout}, and rollout.engine={rollout.engine} on the CPU, "
            "or behind rollout.urls, cannot free its memory for the trainer's turn",
            way_out="set placement.rollout=cpu, or rollout.engine=embedded.",
        )


def _validate_share(config: RunConfig, *, is_shared: bool) -> None:
    share = config.placement.share
    if not is_shared or takes_no_device(config):
        raise ConfigError(
            f"placement.share={share}, and trainer and engines share no CUDA device",
            way_out="set placement.share=auto.",
        )
    if sized := vllm_sizes(config):
        raise ConfigError(
            f"placement.share={share}, and rollout.vllm has {sized[0]}, which sets the same",
            way_out=f"remove rollout.vllm.{sized[0]}.",
        )


def vllm_sizes(config: RunConfig) -> list[str]:
    return [name for name in config.rollout.vllm if name.lstrip("-").replace("-", "_") in SIZES]


def _validate_counts(config: RunConfig, trainer: Side, rollout: Side) -> None:
    size = config.trainer.world_size
    if size != len(trainer) if _cuda(trainer) else size % len(trainer):
        raise ConfigError(
            f"placement.trainer={config.placement.trainer} is {len(trainer)} devices for "
            f"trainer.world_size={size}",
            rule="each process has its own CUDA device; CPUs of several nodes have the same number each",
            way_out=f"set trainer.world_size={len(trainer)}, or change placement.trainer.",
        )
    num = config.rollout.max_engines
    split = config.rollout.tensor_parallel
    counts = Counter(device.node for device in rollout).values()
    is_uneven = any(count % split for count in counts) or len(rollout) > num * split
    if is_uneven and not takes_no_device(config):
        raise ConfigError(
            f"placement.rollout={config.placement.rollout} is {' + '.join(map(str, counts))} devices for "
            f"rollout.num_engines={num} with rollout.tensor_parallel={split}",
            rule="an engine has tensor_parallel CUDA devices of one node or a CPU, none idle",
            way_out=f"set rollout.num_engines={max(1, len(rollout) // split)} or rollout.tensor_parallel="
            f"{math.gcd(*counts)}, or change placement.rollout.",
        )


def _validate_engines(config: RunConfig, kind: str) -> None:
    rollout = config.rollout
    if rollout.deterministic is True and (rollout.urls is not None or kind != rollout.facts.exact_on):
        raise ConfigError(
            f"rollout.deterministic=true, and rollout.engine={rollout.engine} on {kind} cannot promise it",
            rule="the embedded engine can on a CPU, and a vLLM that the run starts can on CUDA",
            way_out="set rollout.deterministic=auto.",
        )


def _with_evaluation_and_teacher(config: RunConfig, placement: Placement) -> Placement:
    written = config.placement
    if config.eval_engine != "rollout" and config.rollout.facts.has_model:
        is_optional = config.eval_engine == "auto"
        device = _device_of("eval", written.eval, placement, is_optional=is_optional)
        placement = replace(placement, evaluation=device)
    elif config.eval_engine != "rollout":
        placement = replace(placement, evaluation=NodeDevice(0, NO_DEVICE))
    if config.teacher is not None:
        placement = replace(placement, teacher=_device_of("teacher", written.teacher, placement))
    return placement


def _device_of(
    name: str, form: Devices, placement: Placement, *, is_optional: bool = False
) -> NodeDevice | None:
    """Never the trainer's CUDA device. `is_optional`: None instead of an engine's."""
    engines = [one for devices in placement.engines for one in devices if one.name != NO_DEVICE]
    cuda = [device for devices in cuda_devices(placement.nodes) for device in devices]
    if form == "cpu" or (form == "auto" and (not cuda or any(one.name == "cpu" for one in engines))):
        return NodeDevice(0, "cpu")
    if form == "auto":
        used = (*placement.trainer, *engines, placement.evaluation)
        free = [device for device in cuda if device not in used]
        free.sort(key=lambda device: device.node not in {engine.node for engine in engines})
        if is_optional and not free:
            return None
        device = [*free, *sorted(engines, key=engines.count), NodeDevice(0, "cpu")][0]
    else:
        (device,) = named_devices(f"placement.{name}", form, placement.nodes)
    if device in _cuda(placement.trainer):
        raise ConfigError(
            f"placement.{name}={form} is {placement.label(device)}, which the trainer uses",
            rule=f"the {name} engine works during training, with its own weights and KV cache",
            way_out=f"set placement.{name}=cpu or another CUDA device"
            + (", or eval.engine=rollout." if name == "eval" else "."),
        )
    return device


def chunk_devices(config: RunConfig, placement: Placement) -> Side:
    """Return the devices of chunks opened by both sides; empty: chunks are files."""
    if placement.num_nodes > 1 and not placement.is_on_cuda:
        return ()
    sync = config.weight_sync
    asks_for_files = sync.transport == "shm" and placement.is_on_cuda  # auto would be ipc
    opens_memory = sync.facts.shares_device or (config.rollout.facts.opens_chunks and not asks_for_files)
    devices = tuple(dict.fromkeys(placement.trainer))
    has_all = placement.mode == "colocated" and {*placement.engine_devices} <= {*devices}
    return devices if opens_memory and has_all else ()


NO_DEVICE = "none"
"""Device of simulated and external engines."""


class NodeDevice(NamedTuple):
    node: int
    name: str


Side = tuple[NodeDevice, ...]


def takes_no_device(config: RunConfig) -> bool:
    return not config.rollout.facts.has_model or config.rollout.urls is not None


def cuda_devices(nodes: Sequence[Node]) -> list[Side]:
    return [
        tuple(NodeDevice(number, f"cuda:{index}") for index in range(len(node.machine.cuda)))
        for number, node in enumerate(nodes)
    ]


def select(config: RunConfig, nodes: Sequence[Node]) -> tuple[Side, Side]:
    """Raises ConfigError."""
    rollout = config.rollout
    num_ranks = config.trainer.world_size if any(cuda_devices(nodes)) else 1
    trainer = _Form("placement.trainer", config.placement.trainer, num_ranks, 1)
    split = rollout.tensor_parallel
    engines = _Form("placement.rollout", config.placement.rollout, rollout.max_engines * split, split)
    if engines.form == "auto" and takes_no_device(config):
        engines = engines._replace(form="cpu")
    if trainer.openness <= engines.openness:
        ranks = trainer.select(nodes, ())
        return ranks, engines.select(nodes, ranks)
    sampling = engines.select(nodes, ())
    return trainer.select(nodes, sampling), sampling


class _Form(NamedTuple):
    """`num_wanted` devices, `split` per process."""

    key: str
    form: Devices
    num_wanted: int
    split: int

    @property
    def openness(self) -> int:
        """Return 0 if nothing is open, up to 3 for everything."""
        return 1 if isinstance(self.form, NodesConfig) else {"auto": 2, "trainer": 3}.get(str(self.form), 0)

    def select(self, nodes: Sequence[Node], taken: Side) -> Side:
        cuda = cuda_devices(nodes)
        if self.form == "trainer":
            return taken
        if self.form == "cpu":
            return (NodeDevice(0, "cpu"),)
        if isinstance(self.form, NodesConfig):
            return self._of_nodes(nodes, self.form, taken)
        if self.form == "auto" and any(cuda):
            return self._free(cuda, taken) or taken
        if self.form == "auto":
            num_free = len(nodes) - len({device.node for device in taken})
            num = min(self.num_wanted, max(1, num_free))
            return self._of_nodes(nodes, NodesConfig(nodes=num, gpus=0), taken)
        if self.form == "all":
            refuse_no_cuda(self.key, self.form, nodes)
            return tuple(device for devices in cuda for device in devices)
        return named_devices(self.key, self.form, nodes)

    def _free(self, cuda: Sequence[Side], taken: Side) -> Side:
        """Take whole processes per node, from the smallest sufficient node."""
        left = [[device for device in devices if device not in taken] for devices in cuda]
        whole = [devices[: len(devices) // self.split * self.split] for devices in left]
        whole = whole if any(whole) else left
        used = {device.node for device in taken}

        def order(node: int) -> tuple[bool, bool, int]:
            num = len(whole[node])
            is_small = num < self.num_wanted
            return is_small, node in used, -num if is_small else num

        found: list[NodeDevice] = []
        for node in sorted(range(len(whole)), key=order):
            found += whole[node][: self.num_wanted - len(found)]
        return tuple(sorted(found, key=lambda device: device.node))

    def _of_nodes(self, nodes: Sequence[Node], form: NodesConfig, taken: Side) -> Side:
        """Take free devices per node, else exactly the other side's. Raises ConfigError."""
        cuda = cuda_devices(nodes)
        gpus = form.gpus if form.gpus != "auto" or any(cuda) else 0
        if gpus != 0:
            refuse_no_cuda(self.key, form, nodes)
        every = cuda if gpus != 0 else [(NodeDevice(node, "cpu"),) for node in range(len(nodes))]
        sizes = [gpus if isinstance(gpus, int) and gpus else len(devices) for devices in every]
        num = sum(map(bool, every)) if form.nodes == "all" else form.nodes
        for others in (taken, ()):
            used = {device.node for device in others}
            left = [[one for one in devices if gpus == 0 or one not in others] for devices in every]
            fitting = [node for node, devices in enumerate(left) if devices and len(devices) >= sizes[node]]
            fitting.sort(key=lambda node: (node in used, len(left[node]) - sizes[node]))
            found = tuple(one for node in sorted(fitting[:num]) for one in left[node][: sizes[node]])
            if len(fitting) >= num and (others == taken or {*found} == {*taken}):
                return found
        free = [sum(gpus == 0 or one not in taken for one in devices) for devices in every]
        each = zip(nodes, free, every, strict=True)
        raise ConfigError(
            f"{self.key}={form}, and the devices that the other side leaves are: "
            + ", ".join(f"{node.name} {num_free} of {len(devices)}" for node, num_free, devices in each),
            rule="the two sides have different devices, or exactly the same",
            way_out=f"ask for less, set {self.key}=auto, or add nodes.",
        )


def named_devices(key: str, form: Devices, nodes: Sequence[Node]) -> Side:
    """Raises ConfigError."""
    refuse_no_cuda(key, form, nodes)
    numbers = device_numbers(form) or []
    num_cuda = len(nodes[0].machine.cuda)
    if not numbers or max(numbers) >= num_cuda:
        raise ConfigError(
            f"{key}={form} is not on {nodes[0].name}, which has {num_cuda} CUDA devices",
            rule="numbers count from 0 within CUDA_VISIBLE_DEVICES",
            way_out=f"name a device that exists, or set {key}=auto.",
        )
    return tuple(NodeDevice(0, f"cuda:{number}") for number in numbers)


def refuse_no_cuda(key: str, form: Devices, nodes: Sequence[Node]) -> None:
    if not any(cuda_devices(nodes)):
        raise ConfigError(
            f"{key}={form}, and torch finds no CUDA device",
            rule="it needs the NVIDIA driver, torch with CUDA, and CUDA_VISIBLE_DEVICES",
            way_out=f"set {key}=auto, or cpu.",
        )
