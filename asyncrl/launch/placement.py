"""Assign devices to ranks, engines and extra servers. Imports no torch.

Sides on the same CUDA devices time-share them, or work concurrently if placement.share
is a number. Each rank has its own CUDA device; no engine spans two nodes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.config.device_forms import ServerDevices, device_numbers
from asyncrl.config.engine_kinds import ENGINES
from asyncrl.config.offload_config import (
    POLICY_GRADIENTS,
    POLICY_WEIGHTS,
    REFERENCE_WEIGHTS,
)
from asyncrl.config.placement_config import (
    Devices,
    NodesConfig,
)
from asyncrl.config.transports import refuse_transport
from asyncrl.engines.kinds import Role
from asyncrl.launch.machine import Node

NO_DEVICE = "none"
"""Device of external engines, and of engines without a model."""
NO_SERVERS: Mapping[str, Role] = MappingProxyType({})


class NodeDevice(NamedTuple):
    node: int
    name: str

    @property
    def number(self) -> int:
        """Return the number of a CUDA device within its node."""
        return int(self.name.removeprefix("cuda:"))


Side = tuple[NodeDevice, ...]
CPU = NodeDevice(0, "cpu")


@dataclass(frozen=True, slots=True)
class Placement:
    nodes: tuple[Node, ...]
    """The controller's is first."""
    trainer: Side
    engines: tuple[Side, ...]
    is_colocated: bool
    """Both sides time-share the same devices."""
    extra: Mapping[str, NodeDevice] = field(default_factory=dict)
    """Devices of extra servers, by name."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    memory_fraction: float | None = None
    """Engines' fraction of shared devices; None: no limit."""
    resident: bool = False
    whole_because: str = "the run is not planned"
    """Why the trainer takes a batch whole (parts.py); '': in parts."""

    @property
    def in_parts(self) -> bool:
        return not self.whole_because

    @property
    def moves(self) -> bool:
        return self.is_colocated and not self.resident

    @property
    def is_on_cuda(self) -> bool:
        return self.trainer[0].name != "cpu"

    @property
    def engine_devices(self) -> Side:
        return tuple(dict.fromkeys(chain(*self.engines)))

    @property
    def num_nodes(self) -> int:
        used = [*self.trainer, *self.engine_devices, *self.weight_readers.values()]
        return len({0, *(device.node for device in used if device.name != NO_DEVICE)})

    @property
    def weight_readers(self) -> dict[str, NodeDevice]:
        """Return the devices of extra servers that get the trainer's weights."""
        servers = self.roles
        return {
            name: device
            for name, device in self.extra.items()
            if servers[name].serves_policy
        }

    def leaves(self, name: str) -> bool:
        """Return whether an extra server leaves its device in the trainer's time slice."""
        server = self.roles[name]
        is_shared = self.extra[name] in self.trainer
        loses_weights = (
            server.engine is not None and not ENGINES[server.engine].keeps_asleep
        )
        # The eval engine evaluates in the trainer's time slice, too, and its rewards would
        # wait for the engines' time slice, which never comes after the last step.
        is_asked = server.serves_evals and bool(self.weight_readers)
        can_leave = server.may_leave and not (loses_weights or is_asked)
        return self.moves and is_shared and can_leave

    def label(self, device: NodeDevice) -> str:
        is_plain = len(self.nodes) == 1 or device.name == NO_DEVICE
        return (
            device.name if is_plain else f"{self.nodes[device.node].name}/{device.name}"
        )

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Return the devices of ranks and engines; every CPU is `cpu`."""
        ranks = [self._name(device) for device in self.trainer]
        return ranks, [self._name(device) for device in chain(*self.engines)]

    def _name(self, device: NodeDevice) -> str:
        return device.name if device.name == "cpu" else self.label(device)

    def memory_fraction_of(self, engine: int) -> float | None:
        # Engines that share a device share its fraction too.
        num = sum(self.engines[engine][0] in devices for devices in self.engines)
        return None if self.memory_fraction is None else self.memory_fraction / num

    def parts(
        self, *, has_engines: bool, serves_only: bool = False
    ) -> dict[int, list[str]]:
        """Return the device of each process that the run starts, by node."""
        parts = defaultdict[int, list[str]](list, {0: []})
        used = [*chain(*self.engines)] if has_engines else []
        if not serves_only:
            extra = [
                device
                for name, device in self.extra.items()
                if not self.roles[name].url
            ]
            used += [*self.trainer, *extra]
        for node, name in used:
            parts[node].append(name)
        return parts


def place(
    config: RunConfig,
    nodes: Sequence[Node],
    extra_servers: Mapping[str, Role] = NO_SERVERS,
) -> Placement:
    """The controller's node is first. Extra servers choose in their order. Raises
    ConfigError.
    """
    trainer, rollout = _select_sides(config, nodes)
    share = config.placement.share
    fraction = share if isinstance(share, float) else None
    is_shared = not {*trainer}.isdisjoint(rollout) and trainer[0].name != "cpu"
    # With max_staleness=0 the trainer waits for the whole batch and the engines for its
    # weights: working at once would gain nothing.
    is_split = is_shared and fraction is not None and config.buffer.max_staleness > 0
    is_colocated = not is_split and (is_shared or config.placement.rollout == "trainer")
    served = _served_devices(extra_servers, nodes)
    _refuse_sides(config, trainer, rollout, served)
    _refuse_sharing(
        config, rollout[0].name, is_shared=is_shared, is_colocated=is_colocated
    )
    _refuse_counts(config, trainer, rollout)
    split = config.rollout.devices_per_engine
    # Round robin: with more engines than devices, each device gets the same number, or
    # one more.
    dealt = tuple(
        rollout[index % len(rollout)]
        for index in range(config.rollout.max_engines * split)
    )
    engines = tuple(
        dealt[start : start + split] for start in range(0, len(dealt), split)
    )
    if takes_no_device(config):
        engines = ((NodeDevice(0, NO_DEVICE),),) * config.rollout.max_engines
    placement = Placement(
        nodes=tuple(nodes),
        trainer=_spread(trainer, config.trainer.world_size),
        engines=engines,
        is_colocated=is_colocated,
        memory_fraction=fraction,
        resident=is_colocated and fraction is not None,
    )
    extra = dict[str, NodeDevice]()
    for name, server in extra_servers.items():
        device = _extra_device(server, placement, [*extra.values()])
        has_none = server.engine is not None and not ENGINES[server.engine].has_model
        if has_none or server.url:
            device = NodeDevice(0, NO_DEVICE)
        if device is not None:
            extra[name] = device
    placement = replace(placement, extra=extra, roles=extra_servers)
    _refuse_offload(config, moves=placement.moves)
    if engines:
        refuse_transport(
            config,
            *placement.names,
            is_colocated=is_colocated,
            num_nodes=placement.num_nodes,
        )
    return placement


def takes_no_device(config: RunConfig) -> bool:
    return (
        not config.rollout.facts.has_model or config.rollout.external_urls is not None
    )


def chunk_devices(config: RunConfig, placement: Placement) -> Side:
    """Return the devices of chunks opened by both sides; empty: chunks are files."""
    if placement.num_nodes > 1 and not placement.is_on_cuda:
        return ()
    sync = config.weight_sync
    # auto would be ipc
    asks_for_files = sync.transport == "shm" and placement.is_on_cuda
    opens_memory = sync.facts.shares_device or (
        config.rollout.facts.opens_chunks and not asks_for_files
    )
    devices = tuple(dict.fromkeys(placement.trainer))
    has_all = placement.is_colocated and {*placement.engine_devices} <= {*devices}
    return devices if opens_memory and has_all else ()


def cuda_devices(nodes: Sequence[Node]) -> list[Side]:
    return [
        tuple(
            NodeDevice(number, f"cuda:{index}")
            for index in range(len(node.machine.cuda))
        )
        for number, node in enumerate(nodes)
    ]


# ---- refusals


def _refuse_sides(
    config: RunConfig, trainer: Side, rollout: Side, served: set[NodeDevice]
) -> None:
    """`served`: devices that a setting gives to servers that may leave them."""
    shared = {
        device for device in trainer if device in rollout and device.name != "cpu"
    }
    engines = {*rollout}
    has_idle = not engines <= {*trainer} or not {*trainer} <= engines | served
    if shared and has_idle:
        raise ConfigError(
            f"{_written(config)} have some devices in common",
            rule="without engines or a server that leaves it, a device of the trainer would be idle in the "
            "engines' time slice",
            way_out="give both sides the same devices (placement.rollout=trainer), or none in common, or "
            "place a server that leaves its device on the trainer's other devices.",
        )
    engine = config.rollout
    kind = rollout[0].name.partition(":")[0]
    if engine.deterministic is True and (
        engine.external_urls is not None or kind != engine.facts.exact_on
    ):
        raise ConfigError(
            f"rollout.deterministic=true, and rollout.engine={engine.engine} on {kind} cannot promise it",
            rule=f"such an engine can on {engine.facts.exact_on}, if the run starts it",
            way_out="set rollout.deterministic=auto.",
        )


def _written(config: RunConfig) -> str:
    return f"placement.trainer={config.placement.trainer}, placement.rollout={config.placement.rollout}"


def _refuse_sharing(
    config: RunConfig, device: str, *, is_shared: bool, is_colocated: bool
) -> None:
    rollout = config.rollout
    share = config.placement.share
    if is_colocated and (config.buffer.max_staleness > 0 or rollout.is_scaled):
        raise ConfigError(
            f"{_written(config)} are the same devices, and "
            f"buffer.max_staleness={config.buffer.max_staleness}, rollout.num_engines={rollout.num_engines}",
            rule="time-sharing makes every batch on-policy, with a fixed number of engines",
            way_out=f"set buffer.max_staleness=0 and rollout.num_engines={rollout.max_engines}, or "
            "buffer.max_staleness=1 and placement.share=0.4 (CUDA only: both sides work at once), or give "
            "placement.rollout its own devices.",
        )
    if is_colocated and (
        rollout.external_urls or (device == "cpu" and not rollout.facts.sleeps_on_cpu)
    ):
        raise ConfigError(
            f"placement.rollout={config.placement.rollout}, and rollout.engine={rollout.engine} on the CPU, "
            "or not started by the run, cannot free its memory for the trainer's time slice",
            way_out="set placement.rollout=cpu, or rollout.engine=embedded.",
        )
    if isinstance(share, float) and (not is_shared or takes_no_device(config)):
        raise ConfigError(
            f"placement.share={share}, and trainer and engines share no CUDA device",
            way_out="set placement.share=auto.",
        )
    if isinstance(share, float) and (sized := rollout.memory_keys):
        raise ConfigError(
            f"placement.share={share}, and {sized[0]} sets the same",
            way_out=f"remove {sized[0]}.",
        )


def _refuse_offload(config: RunConfig, *, moves: bool) -> None:
    """Refuse rules of parts that nothing else time-shares with."""
    has_others = config.critic is not None or config.has_reference
    for one, rule in config.offload_rules.items():
        why = ""
        if rule != "auto" and one == REFERENCE_WEIGHTS and not config.has_reference:
            why = "the trainer holds no reference model"
        elif rule == "never" and one.part == "gradients":
            why = "a gradient is dropped before the engines take its device"
        elif rule == "never" and not moves:
            why = "no engines take its device"
        elif rule == "always" and one == POLICY_WEIGHTS and not (moves or has_others):
            why = "nothing else time-shares with the policy on its device"
        elif rule == "always" and one == POLICY_GRADIENTS and config.critic is None:
            why = "no other model works between a backward pass and its optimizer step"
        if why:
            raise ConfigError(
                f"{one.key}={rule}, and {why}",
                rule="a part leaves its device for the engines of the same device, or for another model of "
                "the trainer",
                way_out=f"set {one.key}=auto; trainer.offload.optimizer=always, "
                "trainer.gradient_checkpointing=true or a larger trainer.world_size save memory there.",
            )


def _refuse_counts(config: RunConfig, trainer: Side, rollout: Side) -> None:
    form = config.placement.trainer
    size = config.trainer.world_size
    num_devices = len(trainer)
    on_cpu = trainer[0].name == "cpu"
    if size % num_devices if on_cpu else size != num_devices:
        raise ConfigError(
            f"placement.trainer={form} is {num_devices} devices for trainer.world_size={size}",
            rule="each process has its own CUDA device; CPUs of several nodes have the same number each",
            way_out=f"set trainer.world_size={num_devices}, or change placement.trainer.",
        )
    num = config.rollout.max_engines
    split = config.rollout.devices_per_engine
    counts = Counter(device.node for device in rollout).values()
    has_rest = any(count % split for count in counts)
    if (has_rest or len(rollout) > num * split) and not takes_no_device(config):
        fitting = f"rollout.num_engines={len(rollout) // split}"
        if has_rest:
            fitting = f"rollout.{config.rollout.facts.split_key}={math.gcd(*counts)}"
        raise ConfigError(
            f"placement.rollout={config.placement.rollout} is {' + '.join(map(str, counts))} devices for "
            f"rollout.num_engines={num} with {split} each",
            rule="an engine has CUDA devices of one node or a CPU, and no device is idle",
            way_out=f"set {fitting}, or change placement.rollout.",
        )


# ---- selection


def _spread(devices: Side, size: int) -> Side:
    """Return a device for each rank: 4 ranks on the CPUs of 2 nodes get 0, 0, 1, 1, so
    that neighbors share a node.
    """
    return tuple(devices[index * len(devices) // size] for index in range(size))


def _select_sides(config: RunConfig, nodes: Sequence[Node]) -> tuple[Side, Side]:
    """The side with the more definite form chooses first."""
    written = config.placement
    split = config.rollout.devices_per_engine
    num_ranks = config.trainer.world_size
    num_parts = config.rollout.max_engines * split
    forms = {"trainer": written.trainer, "rollout": written.rollout}
    if forms["rollout"] == "auto" and takes_no_device(config):
        forms["rollout"] = "cpu"
    if not any(cuda_devices(nodes)):
        forms = {
            side: "cpu" if form == "auto" else form for side, form in forms.items()
        }
    # A side that names its devices leaves the others to the side that takes free ones.
    # `rollout: trainer` refers to the trainer's choice, so it is the most open form.
    if _openness(forms["trainer"]) <= _openness(forms["rollout"]):
        trainer = _select("trainer", forms["trainer"], nodes, (), num_ranks, 1)
        return trainer, _select(
            "rollout", forms["rollout"], nodes, trainer, num_parts, split
        )
    rollout = _select("rollout", forms["rollout"], nodes, (), num_parts, split)
    return _select("trainer", forms["trainer"], nodes, rollout, num_ranks, 1), rollout


def _openness(form: Devices) -> int:
    if isinstance(form, NodesConfig):
        return 1
    return {"auto": 2, "trainer": 3}.get(str(form), 0)


def _select(
    side: str,
    form: Devices,
    nodes: Sequence[Node],
    taken: Side,
    num: int,
    split: int,
) -> Side:
    """Return devices for `num` parts of processes with `split` parts each. `taken`: by
    the other side.
    """
    cuda = cuda_devices(nodes)
    match form:
        case "trainer":
            return taken
        case "cpu":
            return (CPU,)
        case "auto":
            # Nothing is free: both sides share the devices.
            return _free(cuda, taken, num, split) or taken
        case NodesConfig():
            return _of_nodes(side, form, nodes, taken)
        case "all" if any(cuda):
            return tuple(chain(*cuda))
    return _numbered(side, form, nodes)


def _free(cuda: Sequence[Side], taken: Side, num: int, split: int) -> Side:
    """Take whole processes per node, from the smallest sufficient node."""
    left = [[device for device in devices if device not in taken] for devices in cuda]
    whole = [devices[: len(devices) // split * split] for devices in left]
    # No node has enough for one process: _refuse_counts names the numbers.
    whole = whole if any(whole) else left
    # Nodes with enough devices first, the smallest of them before larger ones; then the
    # rest, largest first. Example for 4: nodes with 8, 4 and 2 free devices are taken
    # in the order 4, 8, 2.
    whole.sort(key=lambda devices: (len(devices) < num, abs(len(devices) - num)))
    found = [*chain(*whole)][:num]
    return tuple(sorted(found, key=lambda device: device.node))


def _of_nodes(side: str, form: NodesConfig, nodes: Sequence[Node], taken: Side) -> Side:
    """Take free devices of the nodes with the least to spare."""
    cuda = cuda_devices(nodes)
    on_cpu = form.gpus == 0 or (form.gpus == "auto" and not any(cuda))
    every = (
        [(NodeDevice(node, "cpu"),) for node in range(len(nodes))] if on_cpu else cuda
    )
    left = [
        [device for device in devices if on_cpu or device not in taken]
        for devices in every
    ]
    wanted = form.gpus if isinstance(form.gpus, int) and not on_cpu else None
    sizes = [max(1, wanted or len(devices)) for devices in every]
    fitting = [node for node, devices in enumerate(left) if len(devices) >= sizes[node]]
    used = {device.node for device in taken}
    # Nodes that the other side uses come last: each side has its own nodes if there are
    # enough.
    fitting.sort(key=lambda node: (node in used, len(left[node]) - sizes[node]))
    num = max(1, sum(map(bool, left))) if form.nodes == "all" else form.nodes
    if len(fitting) < num:
        each = ", ".join(
            f"{node.name} {len(devices)}"
            for node, devices in zip(nodes, left, strict=True)
        )
        raise ConfigError(
            f"placement.{side}={form}, and the devices that the other side leaves are: {each}",
            rule="CUDA devices need the NVIDIA driver and torch with CUDA",
            way_out=f"ask for less, set placement.{side}=auto, add nodes, or set placement.rollout=trainer.",
        )
    return tuple(
        device for node in sorted(fitting[:num]) for device in left[node][: sizes[node]]
    )


def _served_devices(
    servers: Mapping[str, Role], nodes: Sequence[Node]
) -> set[NodeDevice]:
    """Return the CUDA devices that settings give to servers that may leave them."""
    return {
        device
        for server in servers.values()
        if server.may_leave and server.device not in ("auto", "cpu")
        for device in _numbered(server.key, server.device, nodes)
    }


def _numbered(side: str, form: Devices | ServerDevices, nodes: Sequence[Node]) -> Side:
    numbers = device_numbers(form) or []
    num_cuda = len(nodes[0].machine.cuda)
    if not numbers or max(numbers) >= num_cuda:
        raise ConfigError(
            f"placement.{side}={form}, and {nodes[0].name} has {num_cuda} CUDA devices",
            rule="CUDA needs the NVIDIA driver and torch with CUDA; numbers count from 0 within "
            "CUDA_VISIBLE_DEVICES",
            way_out=f"name devices that exist, or set placement.{side}=auto, or cpu.",
        )
    return tuple(NodeDevice(0, f"cuda:{number}") for number in numbers)


def _extra_device(
    server: Role, placement: Placement, taken: Sequence[NodeDevice]
) -> NodeDevice | None:
    """Choose a device: of the trainer only a CPU, or for a server that may share it. A
    device is free if it is not `taken`.
    """
    form = server.device
    engines = [
        device for device in placement.engine_devices if device.name != NO_DEVICE
    ]
    cuda = [*chain(*cuda_devices(placement.nodes))]
    if form == "cpu" or (
        form == "auto" and (not cuda or any(one.name == "cpu" for one in engines))
    ):
        return CPU
    if form == "auto":
        used = (*placement.trainer, *engines, *taken)
        free = [device for device in cuda if device not in used]
        if server.is_optional and not free:
            return None
        device = [*free, *reversed(engines), CPU][0]
    else:
        (device,) = _numbered(server.key, form, placement.nodes)
    if device != CPU and device in placement.trainer and not server.may_leave:
        others = [f"set placement.{server.key}=cpu or another CUDA device"]
        others += [server.way_out] if server.way_out else []
        raise ConfigError(
            f"placement.{server.key}={form} is {placement.label(device)}, which the trainer uses",
            way_out=f"{', or '.join(others)}.",
        )
    return device
