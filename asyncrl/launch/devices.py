"""Assign a device to each trainer rank, engine, eval engine and teacher, and refuse placements that cannot
work. Imports no torch. choice.py reads the forms of `placement`.

Both sides on the same CUDA devices time-share them (colocated, buffer.max_staleness=0), or work at once where
placement.share is a number. Each rank has its own CUDA device; engines are dealt over theirs, so two may
share one, and no engine spans two nodes. Both sides on the CPU work at once, unless rollout is `trainer`.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.config.operation import Devices
from asyncrl.config.weight_sync import refuse_transport
from asyncrl.launch.choice import NO_DEVICE, Hosts, NodeDevice, Side, choose, named, takes_no_device
from asyncrl.launch.machine import CudaDevice
from asyncrl.launch.nodes import Node

Mode = Literal["apart", "colocated"]
SIZES = ("gpu_memory_utilization", "num_gpu_blocks_override")
"""Options of vLLM that set its part of a device's memory."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Device names (cpu, cuda:0, ...): one per trainer rank, all of each engine, and one each for the eval
    engine and the teacher (None: there is none). Without an eval engine the rollout engines evaluate.
    """

    trainer: tuple[str, ...]
    engines: tuple[tuple[str, ...], ...]
    evaluation: str | None
    mode: Mode
    teacher: str | None = None
    share: float | None = None
    """Fraction of each shared device for the engines; None: no limit."""
    stays: bool = False
    """Colocated: both sides stay in memory during the other's turn."""
    nodes: tuple[Node, ...] = ()
    """The controller's machine first; empty: it is the only one."""
    rank_nodes: tuple[int, ...] = ()
    """Node of each rank; empty: all are on the first."""
    engine_nodes: tuple[int, ...] = ()
    beside_node: int = 0
    """Node of the eval engine and the teacher."""

    @property
    def moves(self) -> bool:
        """Return whether each side frees its memory for the other."""
        return self.mode == "colocated" and not self.stays

    def rank_node(self, rank: int) -> int:
        """Return the node of this rank."""
        return self.rank_nodes[rank] if self.rank_nodes else 0

    def engine_node(self, engine: int) -> int:
        """Return the node of this engine."""
        return self.engine_nodes[engine] if self.engine_nodes else 0

    @property
    def ranks(self) -> Side:
        """The device of each rank."""
        return tuple(NodeDevice(self.rank_node(rank), name) for rank, name in enumerate(self.trainer))

    @property
    def engine_devices(self) -> Side:
        """The devices of all engines, each once."""
        each = [(self.engine_node(index), names) for index, names in enumerate(self.engines)]
        return tuple(dict.fromkeys(NodeDevice(node, name) for node, names in each for name in names))

    @property
    def hosts(self) -> Hosts:
        """Names of the nodes."""
        return Hosts.of(self.nodes or 0)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that receive weights, with the controller's own."""
        engines = [device for device in self.engine_devices if device.name != NO_DEVICE]
        beside = [NodeDevice(self.beside_node, "")] if self.evaluation not in (None, NO_DEVICE) else []
        return len({0, *(device.node for device in (*self.ranks, *engines, *beside))})

    def share_of(self, engine: int) -> float | None:
        """Return this engine's part of `share`, which the engines on its first device divide."""
        first, node = self.engines[engine][0], self.engine_node(engine)
        each = enumerate(self.engines)
        num = sum(self.engine_node(other) == node and first in devices for other, devices in each)
        return None if self.share is None else self.share / num

    def parts(self, *, has_engines: bool, serves_only: bool = False) -> dict[int, list[str]]:
        """Return the devices of each node, one entry per process and all of a split engine. `has_engines`:
        the run starts engines; `serves_only`: it starts nothing else.
        """
        parts = defaultdict[int, list[str]](list, {0: []})
        for number, devices in enumerate(self.engines if has_engines else ()):
            parts[self.engine_node(number)] += devices
        if not serves_only:
            for node, device in self.ranks:
                parts[node].append(device)
            parts[self.beside_node] += filter(None, (self.evaluation, self.teacher))
        return parts

    @property
    def rollout(self) -> tuple[str, ...]:
        """The first device of each engine."""
        return tuple(devices[0] for devices in self.engines)

    @property
    def is_on_cuda(self) -> bool:
        """Return whether the trainer is on CUDA devices."""
        return self.trainer[0] != "cpu"


def place(config: RunConfig, nodes: int | Sequence[Node]) -> Placement:
    """Place a run on these nodes, the controller's first; a number: on this machine with that many CUDA
    devices. Raises ConfigError.
    """
    hosts, share, size = Hosts.of(nodes), config.placement.share, config.trainer.world_size
    trainer, rollout = choose(config, hosts)
    is_shared = bool({*_cuda(trainer)} & {*_cuda(rollout)})
    share = share if isinstance(share, float) else None
    works_at_once = is_shared and share is not None and config.buffer.max_staleness > 0
    is_turns = (is_shared or config.placement.rollout == "trainer") and not works_at_once
    _validate_sides(config, hosts, trainer, rollout, is_turns=is_turns)
    _validate_share(config, is_shared=is_shared)
    _validate_numbers(config, trainer, rollout)
    _validate_engines(config, rollout[0].name.partition(":")[0], is_turns=is_turns)
    takes_none, num, split = (
        takes_no_device(config),
        config.rollout.max_engines,
        config.rollout.tensor_parallel,
    )
    ranks = tuple(trainer[index * len(trainer) // size] for index in range(size))
    dealt = tuple(rollout[index % len(rollout)] for index in range(num * split))
    evaluation, teacher, beside_node = _beside(config, hosts, ranks, () if takes_none else dealt)
    names = [[one.name if one.name == "cpu" else hosts.label(one) for one in side] for side in (ranks, dealt)]
    if takes_none:
        dealt, split = (NodeDevice(0, NO_DEVICE),) * num, 1
    engines = [dealt[start : start + split] for start in range(0, len(dealt), split)]
    placement = Placement(
        trainer=tuple(device.name for device in ranks),
        engines=tuple(tuple(device.name for device in engine) for engine in engines),
        evaluation=evaluation,
        mode="colocated" if is_turns else "apart",
        teacher=teacher,
        share=share,
        stays=is_turns and share is not None,
        nodes=() if isinstance(nodes, int) else tuple(nodes),
        rank_nodes=tuple(device.node for device in ranks),
        engine_nodes=tuple(engine[0].node for engine in engines),
        beside_node=beside_node,
    )
    refuse_transport(config, *names, is_turns=is_turns, num_nodes=placement.num_nodes)
    return placement


def _cuda(devices: Sequence[NodeDevice]) -> Side:
    return tuple(device for device in devices if device.name != "cpu")


def _validate_sides(config: RunConfig, hosts: Hosts, trainer: Side, rollout: Side, *, is_turns: bool) -> None:
    """Raise ConfigError for sides that overlap in part, or that cannot time-share."""
    staleness, written = config.buffer.max_staleness, config.placement
    both = f"placement.trainer={written.trainer}, placement.rollout={written.rollout}"
    shared = {*_cuda(trainer)} & {*rollout}
    if len(hosts.names) > 1 and config.launcher == "local":
        what = f"launcher=local starts processes on this machine, and there are {len(hosts.names)} nodes"
        raise ConfigError(what, way_out="set launcher=ray, or describe one machine.")
    if shared and {*trainer} != {*rollout}:
        labels = ", ".join(map(hosts.label, sorted(shared)))
        raise ConfigError(
            f"{both} share only {labels}; the other devices would wait for them",
            way_out="give both sides the same devices (placement.rollout=trainer), or none in common.",
        )
    if is_turns and staleness > 0:
        raise ConfigError(
            f"{both} are the same devices, and buffer.max_staleness={staleness}",
            rule="time-sharing makes every batch on-policy",
            way_out="set buffer.max_staleness=0, or give placement.rollout its own devices; on CUDA, "
            "placement.share=0.4 lets both sides work at once.",
        )
    if is_turns and config.rollout.is_scaled:
        raise ConfigError(
            f"rollout.num_engines is a range, and {both} time-share devices",
            way_out=f"set rollout.num_engines={config.rollout.max_engines}, or separate the two sides.",
        )


def _validate_share(config: RunConfig, *, is_shared: bool) -> None:
    """Raise ConfigError if placement.share is a number that divides nothing, or that vLLM contradicts."""
    share = config.placement.share
    if not isinstance(share, float):
        return
    if not is_shared or takes_no_device(config):
        raise ConfigError(
            f"placement.share={share}, and trainer and engines share no CUDA device",
            way_out="set placement.share=auto.",
        )
    if again := [name for name in config.rollout.vllm if name.lstrip("-").replace("-", "_") in SIZES]:
        what = f"placement.share={share}, and rollout.vllm has {again[0]}, which sets the same"
        raise ConfigError(what, way_out=f"remove rollout.vllm.{again[0]}.")


def _validate_numbers(config: RunConfig, trainer: Side, rollout: Side) -> None:
    """Raise ConfigError if the processes of a side do not fill its devices."""
    size, num, written = config.trainer.world_size, config.rollout.max_engines, config.placement
    if size != len(trainer) if _cuda(trainer) else size % len(trainer):
        raise ConfigError(
            f"placement.trainer={written.trainer} is {len(trainer)} devices for trainer.world_size={size}",
            rule="each process has its own CUDA device; CPUs of several nodes have the same number each",
            way_out=f"set trainer.world_size={len(trainer)}, or change placement.trainer.",
        )
    split = config.rollout.tensor_parallel
    counts = Counter(device.node for device in rollout).values()
    is_uneven = any(count % split for count in counts) or len(rollout) > num * split
    if is_uneven and not takes_no_device(config):
        raise ConfigError(
            f"placement.rollout={written.rollout} is {' + '.join(map(str, counts))} devices for "
            f"rollout.num_engines={num} with rollout.tensor_parallel={split}",
            rule="an engine has tensor_parallel CUDA devices of one node or a CPU, and no device is idle",
            way_out=f"set rollout.num_engines={max(1, len(rollout) // split)} or rollout.tensor_parallel="
            f"{math.gcd(*counts)}, or change placement.rollout.",
        )


def _validate_engines(config: RunConfig, kind: str, *, is_turns: bool) -> None:
    """Raise ConfigError for what engines on this kind of device cannot do."""
    rollout = config.rollout
    if rollout.urls is not None and config.placement.rollout == "trainer":
        what = "placement.rollout=trainer has engines sleep, and the servers of rollout.urls cannot"
        raise ConfigError(what, way_out="remove rollout.urls, or set placement.rollout=auto.")
    if is_turns and kind == "cpu" and not rollout.facts.sleeps_on_cpu:
        what = f"rollout.engine={rollout.engine} on the CPU cannot free its memory for the trainer's turn"
        raise ConfigError(what, way_out="set placement.rollout=cpu, or rollout.engine=embedded.")
    if rollout.deterministic is True and (rollout.urls is not None or kind != rollout.facts.exact_on):
        raise ConfigError(
            f"rollout.deterministic=true, and rollout.engine={rollout.engine} on {kind} cannot promise it",
            rule="the embedded engine can on a CPU, and a vLLM that the run starts can on CUDA",
            way_out="set rollout.deterministic=auto.",
        )


def _beside(
    config: RunConfig, hosts: Hosts, ranks: Side, engines: Side
) -> tuple[str | None, str | None, int]:
    """Return the devices of the eval engine and the teacher, and their node, with a free CUDA device for
    each if possible. Both work during training: never on the trainer's CUDA device.
    """
    written, has_model = config.placement, config.rollout.facts.has_model
    forms = {"eval": written.eval} if config.eval_engine != "rollout" and has_model else {}
    forms |= {"teacher": written.teacher} if config.teacher is not None else {}
    node = _beside_node(config, hosts, [*forms.values()], ranks, engines)
    is_on_cpu = any(one.name == "cpu" for one in engines)
    found: dict[str, str] = {}
    for name, form in forms.items():
        here = [one for one in engines if one.node == node]
        taken = (*ranks, *engines, *(NodeDevice(node, other) for other in found.values()))
        free = [one for one in hosts.cuda[node] if one not in taken]
        if form == "cpu" or (form == "auto" and (is_on_cpu or not hosts.num_cuda[node])):
            found[name] = "cpu"
            continue
        if form == "auto" and name == "eval" and config.eval_engine == "auto" and not free:
            continue
        one = named(f"placement.{name}", form, hosts)[0] if form != "auto" else None
        one = one or [*free, *sorted(here, key=here.count), NodeDevice(node, "cpu")][0]
        if one in _cuda(ranks):
            raise ConfigError(
                f"placement.{name}={form} is {hosts.label(one)}, where the trainer works",
                rule=f"the {name} engine works during training, with its own weights and KV cache",
                way_out=f"set placement.{name}=cpu or another CUDA device"
                + (", or eval.engine=rollout." if name == "eval" else "."),
            )
        found[name] = one.name
    is_simulated = config.eval_engine != "rollout" and not has_model
    return NO_DEVICE if is_simulated else found.get("eval"), found.get("teacher"), node


def _beside_node(
    config: RunConfig, hosts: Hosts, forms: Sequence[Devices], ranks: Side, engines: Side
) -> int:
    """Return the node with the most free CUDA devices for these forms, up to their number; at a tie the node
    that has engines. Numbers and engines on CPUs choose the first node.
    """
    num = forms.count("auto")
    if not num or any(isinstance(form, int) for form in forms) or any(one.name == "cpu" for one in engines):
        return 0

    def lacks(node: int) -> tuple[bool, int, bool, int]:
        num_free = sum(one not in (*ranks, *engines) for one in hosts.cuda[node])
        has_engine = any(one.node == node and one not in ranks for one in engines)
        return not hosts.num_cuda[node], max(0, num - num_free), not has_engine, node

    return min(range(len(hosts.names)), key=lacks)


def chunk_devices(config: RunConfig, placement: Placement) -> tuple[NodeDevice, ...]:
    """Return the devices whose memory holds the chunks that both sides open; none: chunks are files."""
    if placement.num_nodes > 1 and not placement.is_on_cuda:
        return ()
    opens_memory = config.rollout.facts.opens_chunks or config.weight_sync.facts.shares_device
    devices = tuple(dict.fromkeys(placement.ranks))
    # an engine sees only its own devices
    has_all = placement.mode == "colocated" and {*placement.engine_devices} <= {*devices}
    return devices if opens_memory and has_all else ()


def child_environ(
    devices: Sequence[str], cuda: Sequence[CudaDevice] | Mapping[int, CudaDevice]
) -> dict[str, str]:
    """Return the variables that show a child process only these devices (`cuda:1`, ...), in this order."""
    if not devices[0].startswith("cuda:"):
        return {}
    names = [cuda[int(device.removeprefix("cuda:"))].name for device in devices]
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": order}
