"""Which device of which node each trainer rank and each engine gets, whether the two sides take turns, and
where chunks of weights lie. Imports no torch. How `placement` is read stands in choice.py.

Turns need buffer.max_staleness=0; above it both sides use the same devices at once where placement.share is a
number. A rank has a CUDA device of its own; engines are dealt over theirs in turn, so two may share one, and
none is split over two nodes. Both sides on cpu run side by side, unless rollout is `trainer`.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncrl.config import RunConfig
from asyncrl.config.operation import Devices
from asyncrl.config.weight_sync import refuse_transport
from asyncrl.errors import ConfigError
from asyncrl.placement.choice import Hosts, NodeDevice, Side, choose, named, takes_no_device
from asyncrl.placement.machine import CudaDevice
from asyncrl.placement.nodes import Node

Mode = Literal["apart", "colocated"]
SIZES = ("gpu_memory_utilization", "num_gpu_blocks_override")
"""Arguments of vLLM that say how much of a device it takes, whatever the plan counts."""
NO_DEVICE = "none"
"""Where a simulated engine runs, and one that the run did not start."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices by name (cpu, cuda:0, ...): of each trainer rank, all of each engine, and those of the eval
    engine and the teacher (None: there is none). Without an eval engine the rollout engines evaluate.
    """

    trainer: tuple[str, ...]
    engines: tuple[tuple[str, ...], ...]
    evaluation: str | None
    mode: Mode
    teacher: str | None = None
    share: float | None = None
    """Fraction of each device that both sides use for the engines there; None: nothing limits them."""
    stays: bool = False
    """In turns: both sides stay in memory, and only whose turn it is changes."""
    nodes: tuple[Node, ...] = ()
    """The controller's own machine first; none: it is the only one."""
    rank_nodes: tuple[int, ...] = ()
    """Number of the node of each rank; none: all are on the first."""
    engine_nodes: tuple[int, ...] = ()
    beside_node: int = 0
    """Of the eval engine and the teacher."""

    @property
    def moves(self) -> bool:
        """Whether each side gives its memory away for the other's turn."""
        return self.mode == "colocated" and not self.stays

    def rank_node(self, rank: int) -> int:
        """Number of the node of this rank."""
        return self.rank_nodes[rank] if self.rank_nodes else 0

    def engine_node(self, engine: int) -> int:
        """Number of the node of this engine."""
        return self.engine_nodes[engine] if self.engine_nodes else 0

    @property
    def ranks(self) -> Side:
        """The device of each rank."""
        return tuple(NodeDevice(self.rank_node(rank), name) for rank, name in enumerate(self.trainer))

    @property
    def engine_devices(self) -> Side:
        """Devices of all engines, each once."""
        each = [(self.engine_node(index), names) for index, names in enumerate(self.engines)]
        return tuple(dict.fromkeys(NodeDevice(node, name) for node, names in each for name in names))

    @property
    def hosts(self) -> Hosts:
        """Names of the nodes."""
        return Hosts.of(self.nodes or 0)

    @property
    def num_nodes(self) -> int:
        """How many nodes weights go to, with the controller's own."""
        engines = (device for device in self.engine_devices if device.name != NO_DEVICE)
        beside = {self.beside_node} if self.evaluation not in (None, NO_DEVICE) else set[int]()
        return len({0, *beside, *(device.node for device in (*self.ranks, *engines))})

    @property
    def trainer_labels(self) -> list[str]:
        """Devices of the trainer for people, each once."""
        return self.hosts.labels(self.ranks)

    @property
    def engine_labels(self) -> list[str]:
        """Devices of the engines for people, each once."""
        return self.hosts.labels(self.engine_devices)

    def share_of(self, engine: int) -> float | None:
        """The part of `share` of this engine, of which other engines may use the first device too."""
        first, node = self.engines[engine][0], self.engine_node(engine)
        each = enumerate(self.engines)
        num = sum(self.engine_node(other) == node and first in devices for other, devices in each)
        return None if self.share is None else self.share / num

    def parts(self, *, has_engines: bool, serves_only: bool = False) -> dict[int, list[str]]:
        """What is on each node, the first one always: a device for each process, of an engine all of its own.
        `has_engines`: the run starts them; `serves_only`: and nothing else.
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
        """Whether the trainer is on CUDA devices; when colocated, the engines too."""
        return self.trainer[0] != "cpu"


def place(config: RunConfig, nodes: int | Sequence[Node]) -> Placement:
    """The placement on these nodes, the controller's own first; a number: on this machine alone, with so many
    CUDA devices. Raises ConfigError.
    """
    hosts = Hosts.of(nodes)
    if len(hosts.names) > 1 and config.launcher == "local":
        what = f"launcher=local starts processes on this machine, and there are {len(hosts.names)} nodes"
        raise ConfigError(what, way_out="set launcher=ray, or describe one machine.")
    trainer, rollout = choose(config, hosts)
    shared = [device for device in trainer if device in rollout and device.name != "cpu"]
    is_turns, share = _check_shared(config, hosts, trainer, rollout, shared)
    if share is not None:
        _check_share(config, shared)
    _check_numbers(config, hosts, trainer, rollout)
    num, split = config.rollout.max_engines, config.rollout.tensor_parallel
    ranks = _deal_ranks(trainer, config.trainer.world_size)
    dealt = tuple(rollout[index % len(rollout)] for index in range(num * split))
    names = tuple(device.name if device.name == "cpu" else hosts.label(device) for device in (*ranks, *dealt))
    used = () if takes_no_device(config) else dealt
    evaluation, teacher, beside_node = _beside(config, hosts, ranks, used)
    beside = {beside_node} if evaluation not in (None, NO_DEVICE) else set[int]()
    on = {0, *beside, *(device.node for device in (*ranks, *used))}
    refuse_transport(config, names[: len(ranks)], names[len(ranks) :], is_turns=is_turns, num_nodes=len(on))
    _check_engines(config, names[len(ranks) :], is_turns=is_turns)
    if takes_no_device(config):
        dealt, split = (NodeDevice(0, NO_DEVICE),) * num, 1
    engines = [dealt[start : start + split] for start in range(0, len(dealt), split)]
    return Placement(
        tuple(device.name for device in ranks),
        tuple(tuple(device.name for device in engine) for engine in engines),
        evaluation,
        "colocated" if is_turns else "apart",
        teacher,
        share,
        is_turns and share is not None,
        () if isinstance(nodes, int) else tuple(nodes),
        tuple(device.node for device in ranks),
        tuple(engine[0].node for engine in engines),
        beside_node,
    )


def _check_shared(
    config: RunConfig, hosts: Hosts, trainer: Side, rollout: Side, shared: Sequence[NodeDevice]
) -> tuple[bool, float | None]:
    """Whether both sides take turns, and what part of a device is the engines'."""
    is_same = bool(shared) or config.placement.rollout == "trainer"
    share = config.placement.share if isinstance(config.placement.share, float) else None
    is_turns = is_same and not (shared and share is not None and config.buffer.max_staleness > 0)
    written = f"placement.trainer={config.placement.trainer}, placement.rollout={config.placement.rollout}"
    if shared and {*trainer} != {*rollout}:
        is_one = len(hosts.names) == 1
        both = sorted(
            int(device.name.removeprefix("cuda:")) if is_one else hosts.label(device) for device in shared
        )
        raise ConfigError(
            f"{written} share {both} and not the others, which would wait with them in turns",
            way_out="give both the same (placement.rollout=trainer, buffer.max_staleness=0), or other ones.",
        )
    if is_turns and config.buffer.max_staleness > 0:
        raise ConfigError(
            f"{written} are the same devices ({sum(hosts.num_cuda)} CUDA devices here), in turns: every "
            f"batch is on-policy, and buffer.max_staleness={config.buffer.max_staleness} could never be used",
            way_out="set buffer.max_staleness=0, or give placement.rollout devices of its own: cpu, or CUDA "
            "devices that a smaller trainer.world_size leaves"
            + ("; placement.share=0.4 has both work there at once." if shared else "."),
        )
    if is_turns and config.rollout.is_scaled:
        raise ConfigError(
            f"rollout.num_engines is a range, and {written} take turns",
            rule="a handover moves the same engines each time, and one that does not work would free nothing",
            way_out=f"set rollout.num_engines={config.rollout.max_engines}, or give each side devices of its "
            "own.",
        )
    return is_turns, share


def chunk_devices(config: RunConfig, placement: Placement) -> tuple[NodeDevice, ...]:
    """The devices whose memory holds the chunks that trainer and engines both open, all of them on each;
    none: chunks are files. Of CPUs of several nodes there is none that each engine could open.
    """
    if placement.num_nodes > 1 and not placement.is_on_cuda:
        return ()
    opens_memory = config.rollout.facts.opens_chunks or config.weight_sync.facts.shares_device
    devices = tuple(dict.fromkeys(placement.ranks))
    # an engine sees its own devices alone
    has_all = placement.mode == "colocated" and {*placement.engine_devices} <= {*devices}
    return devices if opens_memory and has_all else ()


def _deal_ranks(places: Side, num: int) -> Side:
    """A device for each of `num` ranks, those of a node one after the other."""
    return tuple(places[index * len(places) // num] for index in range(num))


def _check_numbers(config: RunConfig, hosts: Hosts, trainer: Side, rollout: Side) -> None:
    """Each rank has a device of its own, or as many share each CPU; each engine has as many as it is split
    over, of one node; and none named is idle.
    """
    size, num, split = config.trainer.world_size, config.rollout.max_engines, config.rollout.tensor_parallel
    written, is_on_cpu = config.placement, trainer[0].name == "cpu"
    if is_on_cpu and size % len(trainer):
        raise ConfigError(
            f"placement.trainer={written.trainer} is the CPUs of {len(trainer)} nodes for "
            f"trainer.world_size={size} processes, as many on each",
            way_out=f"set trainer.world_size={-(-size // len(trainer)) * len(trainer)}, or fewer nodes.",
        )
    if not is_on_cpu and len(trainer) != size:
        raise ConfigError(
            f"placement.trainer={written.trainer} is {len(trainer)} CUDA devices for "
            f"trainer.world_size={size} processes with one each",
            way_out=f"set trainer.world_size={len(trainer)}, or name {size} devices in placement.trainer.",
        )
    if takes_no_device(config):
        return
    if rollout[0].name == "cpu":
        if num < len(rollout):
            raise ConfigError(
                f"placement.rollout={written.rollout} is the CPUs of {len(rollout)} nodes for "
                f"rollout.num_engines={num}, and the others would be idle",
                way_out=f"set rollout.num_engines={len(rollout)}, or fewer nodes.",
            )
        return
    if len(rollout) % split or len(rollout) > num * split:
        is_whole = len(rollout) % split == 0
        fitting = f"num_engines={len(rollout) // split}" if is_whole else "tensor_parallel=1"
        raise ConfigError(
            f"placement.rollout={written.rollout} is {len(rollout)} CUDA devices for "
            f"rollout.num_engines={num} with rollout.tensor_parallel={split} each",
            way_out=f"set rollout.{fitting}, or name {num * split} devices in placement.rollout.",
        )
    nodes = [device.node for device in rollout]
    if uneven := [node for node in dict.fromkeys(nodes) if nodes.count(node) % split]:
        has = nodes.count(uneven[0])
        raise ConfigError(
            f"placement.rollout={written.rollout} is {has} CUDA devices of {hosts.names[uneven[0]]} for "
            f"engines with rollout.tensor_parallel={split} each",
            rule="an engine is split over devices of one node, never over two nodes",
            way_out=f"set rollout.tensor_parallel={math.gcd(has, split)}, or a multiple of {split} as gpus.",
        )


def _check_share(config: RunConfig, shared: Sequence[NodeDevice]) -> None:
    """placement.share divides a CUDA device, and nothing else says what engines take there."""
    share, written = f"placement.share={config.placement.share}", config.placement
    if not shared or takes_no_device(config):
        raise ConfigError(
            f"{share}, and placement.trainer={written.trainer}, placement.rollout={written.rollout} share no "
            "CUDA device",
            rule="it is a fraction of a CUDA device that trainer and engines use; a CPU is not divided",
            way_out="set placement.share=auto.",
        )
    if again := [name for name in config.rollout.vllm if name.lstrip("-").replace("-", "_") in SIZES]:
        what = f"{share}, and rollout.vllm has {again[0]}, which says the same"
        raise ConfigError(what, way_out=f"remove rollout.vllm.{again[0]}.")


def _check_engines(config: RunConfig, devices: Sequence[str], *, is_turns: bool) -> None:
    """What engines cannot do that are not ours, or on the CPU."""
    rollout = config.rollout
    if rollout.urls is not None and config.placement.rollout == "trainer":
        what = "placement.rollout=trainer lets engines sleep in turns, which those of rollout.urls cannot"
        raise ConfigError(what, way_out="remove rollout.urls, or set placement.rollout=auto.")
    if is_turns and "cpu" in devices and not rollout.facts.sleeps_on_cpu:
        what = f"in turns an engine frees its memory, which rollout.engine={rollout.engine} on the CPU cannot"
        raise ConfigError(
            what, way_out="set placement.rollout=cpu (side by side), or rollout.engine=embedded."
        )
    kind = "cpu" if "cpu" in devices else "cuda"
    if rollout.deterministic is True and (rollout.urls is not None or kind != rollout.facts.exact_on):
        where = "of rollout.urls" if rollout.urls is not None else f"on {', '.join(dict.fromkeys(devices))}"
        raise ConfigError(
            f"rollout.deterministic=true, and rollout.engine={rollout.engine} {where} cannot be asked for it",
            rule="the embedded engine keeps it on a CPU, a vLLM that the run starts has it on CUDA",
            way_out="set rollout.deterministic=auto.",
        )
    if rollout.tensor_parallel > 1 and "cpu" in devices and rollout.urls is None:
        what = (
            f"rollout.tensor_parallel={rollout.tensor_parallel} splits engines over CUDA devices, not the CPU"
        )
        raise ConfigError(
            what, way_out="set rollout.tensor_parallel=1, or name devices in placement.rollout."
        )


def _beside(
    config: RunConfig, hosts: Hosts, ranks: Side, engines: Side
) -> tuple[str | None, str | None, int]:
    """Devices of the eval engine and the teacher, and the node of both: the controller's own where it has
    what they need.
    """
    written, node = config.placement, _beside_node(config, hosts, ranks, engines)
    evaluation = teacher = None
    if config.eval_engine != "rollout" and not config.rollout.facts.has_model:
        evaluation = NO_DEVICE
    elif config.eval_engine != "rollout":
        evaluation = _eval_device(config, ranks, engines, hosts, node)
    if config.teacher is not None:
        used = engines if evaluation is None else (*engines, NodeDevice(node, evaluation))
        teacher = _beside_device(("placement.teacher", written.teacher), ranks, used, hosts, node)
    return evaluation, teacher, node


def _beside_node(config: RunConfig, hosts: Hosts, ranks: Side, engines: Side) -> int:
    """The first node with a CUDA device for each that may choose: free ones first, else those of engines."""
    has_eval = config.eval_engine != "rollout" and config.rollout.facts.has_model
    written = [config.placement.eval] * has_eval + [config.placement.teacher] * (config.teacher is not None)
    num, is_on_cpu = written.count("auto"), any(device.name == "cpu" for device in engines)
    if not num or is_on_cpu or any(type(one) is int for one in written):
        return 0

    def lacks(node: int) -> tuple[bool, int, bool, int]:
        free = [one for one in hosts.cuda[node] if one not in (*ranks, *engines)]
        beside = any(one.node == node and one not in ranks for one in engines)
        return not hosts.num_cuda[node], max(0, num - len(free)), not beside, node

    return min(range(len(hosts.names)), key=lacks)


def _eval_device(
    config: RunConfig, ranks: Side, engines: Sequence[NodeDevice], hosts: Hosts, node: int
) -> str | None:
    """Device of the eval engine; None if eval.engine=auto leaves evaluations to the rollout engines, because
    no CUDA device is free.
    """
    written = config.placement.eval
    is_left = config.eval_engine == "auto" and written == "auto" and hosts.num_cuda[node]
    is_on_cuda = not any(device.name == "cpu" for device in engines)
    if is_left and is_on_cuda and {*hosts.cuda[node]} <= {*ranks, *engines}:
        return None
    return _beside_device(("placement.eval", written), ranks, engines, hosts, node)


def _beside_device(
    setting: tuple[str, Devices], ranks: Side, engines: Sequence[NodeDevice], hosts: Hosts, node: int
) -> str:
    """Where the eval engine or the teacher goes on this node (`setting`: the key and what it says): it works
    beside training at any time, so never with the trainer on CUDA.
    """
    key, written = setting
    whose, section = ("the eval engine", "eval") if key == "placement.eval" else ("the teacher", "teacher")
    is_on_cpu = any(device.name == "cpu" for device in engines)
    if written == "cpu" or (written == "auto" and (not hosts.num_cuda[node] or is_on_cpu)):
        return "cpu"
    if written == "auto":
        free = [device for device in hosts.cuda[node] if device not in (*ranks, *engines)]
        here = [device for device in engines if device.node == node]
        used = sorted(here, key=lambda device: (here.count(device), -here.index(device)))
        device = [*free, *used, NodeDevice(node, "cpu")][0]
    else:
        device = named(key, written, hosts)[0]
    if device in ranks and device.name != "cpu":
        raise ConfigError(
            f"{key}={written} puts {whose} on {hosts.label(device)}, where the trainer works",
            rule="it works beside training, with weights and KV cache of its own",
            way_out=f"set {key}=cpu or the number of another CUDA device, or set {section}=none."
            if section == "teacher"
            else "set eval.engine=rollout, or placement.eval=cpu or the number of another CUDA device.",
        )
    return device.name


def child_environ(
    devices: Sequence[str], cuda: Sequence[CudaDevice] | Mapping[int, CudaDevice]
) -> dict[str, str]:
    """Variables that show a child process these devices (`cuda:1`, ...) and no others, in this order."""
    if not devices[0].startswith("cuda:"):
        return {}
    names = [cuda[int(device.removeprefix("cuda:"))].name for device in devices]
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": order}
