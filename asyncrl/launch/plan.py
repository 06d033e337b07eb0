"""Plan processes, devices, threads and memory of a run, without torch.

Bytes are estimates: parameters, optimizer with gradients, KV cache, one micro-batch,
and weight copies.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from typing import Literal

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import shared_memory_root
from asyncrl.base.progress import told_if_long
from asyncrl.config import RunConfig
from asyncrl.config.engine_kinds import ENGINES
from asyncrl.config.offload_config import POLICY_WEIGHTS
from asyncrl.config.transports import choose_transport
from asyncrl.engines.kinds import Role, engine_role
from asyncrl.launch.machine import Node, find_python
from asyncrl.launch.memory import (
    Memory,
    batch_bytes,
    disk_sizes,
    graph_bytes,
    item_bytes,
    leaving_parts,
    loaded_bytes,
    pushed_bytes,
    rank_memory,
    saved_bytes,
    server_memory,
)
from asyncrl.launch.model_sizes import ModelShape, model_shape
from asyncrl.launch.parts import MOVES, NO_ROOM, why_whole
from asyncrl.launch.placement import (
    NO_DEVICE,
    NO_SERVERS,
    NodeDevice,
    Placement,
    cuda_devices,
    place,
)

OWN_BYTES = 2**29
"""Uncounted: CUDA's on a device, Python's on the host."""
SHARED, DISK = "/dev/shm", "run directory"
EXPORT_FILES = 3
"""Versions of the weights in /dev/shm: two are kept, and a third is written before the
oldest is removed.
"""
TRAINER_FACTOR, ENGINE_FACTOR = 1.25, 1.1
"""Safety factors for resident sides of `placement.share: auto`."""
RULE = "`asyncrl check` prints the memory of each process"
FIT_DEVICE = (
    "lower trainer.micro_batch_tokens or rollout.slots, set trainer.gradient_checkpointing=true, "
    "trainer.offload.optimizer=always or trainer.lora={rank: 16}, change placement, or take a smaller model."
)
FIT_HOST = (
    "set trainer.lora={rank: 16}, give placement.trainer devices of more nodes, take a smaller model, "
    "or a machine with more memory."
)
FIT_SHARED = (
    "enlarge /dev/shm with docker run --shm-size, or set weight_sync.transport=disk."
)


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A process, or what a node holds besides. `side`: whose time slice it works in; a
    leaving server leaves in the trainer's.
    """

    name: str
    side: Literal["host", "trainer", "engine", "server", "leaving server"]
    device: str
    threads: int
    memory: Memory = Memory()
    stays: int = 0
    """Bytes of a trainer that stay when the engines take its device, and of an engine
    that sleeps.
    """
    pushed: int = 0
    """Bytes on the device while a trainer sends its weights in a handover."""


@dataclass(frozen=True, slots=True)
class Plan:
    placement: Placement
    processes: tuple[ProcessPlan, ...]
    shape: ModelShape
    memory: Mapping[str, tuple[int | None, int | None]]
    """(free, total) bytes by device; None: unknown."""

    def needed_bytes(self, device: str) -> int:
        """Return a device's peak: all, or with moving sides the larger side or both
        sides' weights.

        Example, in GiB: a trainer with 12 for weights, 36 for the optimizer and 10 for
        a micro-batch, and an engine with 6 for weights and 50 for its KV cache. If the
        sides move, the device needs max(58, 56, 12 + 6) = 58; if both stay, 114.
        """
        awake = Counter[str]()
        asleep = Counter[str]()
        pushed = 0
        for one in self.processes:
            if one.device == device:
                awake[one.side] += one.memory.total
                asleep[one.side] += one.stays
                pushed += one.pushed
        if not self.placement.moves:
            return awake.total()
        trainer = awake.pop("trainer", 0) + asleep["engine"]
        engines = awake.pop("engine", 0) + awake.pop("leaving server", 0)
        engines += asleep["trainer"]
        return awake.total() + max(trainer, engines, pushed)

    def taken_bytes(self, device: str) -> int:
        """Return what engines must leave of a device in their time slice, with a margin for
        errors of the plan.
        """
        taken = 0.0
        for one in self.processes:
            if one.device != device or one.side in ("host", "engine"):
                continue
            is_away = one.side == "trainer" and self.placement.moves
            size = one.stays if is_away else one.memory.total
            if size:
                taken += TRAINER_FACTOR * size + OWN_BYTES
        return int(taken)


def engine_threads(config: RunConfig, cores: int) -> int:
    """Independent of the number of engines: results depend on threads bit for bit."""
    given = config.rollout.threads
    return given if given != "auto" else max(1, cores // 4)


def threads_on(config: RunConfig, placement: Placement, node: int) -> tuple[int, int]:
    """Return the threads of an engine, and of a rank: its share of the cores beyond the
    most engines.
    """
    cores = placement.nodes[node].machine.cores
    of_engine = engine_threads(config, cores)
    if config.trainer.threads != "auto":
        return of_engine, config.trainer.threads
    num_engines = sum(devices[0].node == node for devices in placement.engines)
    num_ranks = sum(device.node == node for device in placement.trainer)
    return of_engine, max(1, (cores - num_engines * of_engine) // max(1, num_ranks))


def make_plan(
    config: RunConfig,
    nodes: Sequence[Node],
    extra: Mapping[str, Role] = NO_SERVERS,
) -> Plan:
    """Place the processes of a run, and count their memory. Raises ConfigError."""
    shape = model_shape(config.model)
    placement = place(config, nodes, extra)
    placement = replace(placement, whole_because=why_whole(config, placement))
    memory = dict[str, tuple[int | None, int | None]]()
    for number, (node, devices) in enumerate(
        zip(nodes, cuda_devices(nodes), strict=True)
    ):
        memory[placement.label(NodeDevice(number, "cpu"))] = (
            node.machine.memory,
            node.machine.memory,
        )
        for device, has in zip(devices, node.machine.cuda, strict=True):
            memory[placement.label(device)] = has.free_bytes, has.total_bytes
    is_here = nodes[0].machine.is_here
    memory[SHARED] = (
        shutil.disk_usage(shared_memory_root()).free if is_here else None,
        None,
    )
    memory[DISK] = (None, None)
    return Plan(placement, lay_out(config, shape, placement), shape, memory)


def lay_out(
    config: RunConfig, shape: ModelShape, placement: Placement
) -> tuple[ProcessPlan, ...]:
    controller = placement.label(NodeDevice(0, "cpu"))
    return (
        ProcessPlan("controller", "host", controller, 1),
        *_ranks(config, shape, placement),
        *_servers(config, shape, placement),
        *_held_besides(config, shape, placement),
    )


def _ranks(
    config: RunConfig, shape: ModelShape, placement: Placement
) -> Iterator[ProcessPlan]:
    sync = config.weight_sync.facts
    rules = config.offload_rules
    for rank, device in enumerate(placement.trainer):
        name = f"trainer-{rank}"
        held = 0
        if rank == 0 and sync.holds_exports(is_colocated=placement.is_colocated):
            item = item_bytes(config.model.dtype, device.name)
            held = pushed_bytes(config, shape, item)
        parts = rank_memory(config, shape, device.name, in_parts=placement.in_parts)
        memory = parts.peak(rules)
        stays = parts.total_of([one for one in rules if rules[one] == "never"])
        # The policy's weights return to be sent; others may have stayed for the step.
        sent = [
            one
            for one in rules
            if one == POLICY_WEIGHTS
            or rules[one] == "never"
            or (rules[one] == "auto" and one.part == "weights")
        ]
        pushed = parts.total_of(sent)
        if config.trainer.offload.by_layer:
            memory = Memory(micro_batch=memory.micro_batch)
            pushed = 0
        yield ProcessPlan(
            name,
            "trainer",
            placement.label(device),
            threads_on(config, placement, device.node)[1],
            replace(memory, copies=memory.copies + held),
            stays=stays + held,
            pushed=pushed + held,
        )
        left = parts.total_of(leaving_parts(config, moves=placement.moves))
        yield from _left_plan(name, device, left, placement)


def _servers(
    config: RunConfig, shape: ModelShape, placement: Placement
) -> Iterator[ProcessPlan]:
    for number, devices in enumerate(placement.engines):
        role = engine_role(config)
        memory = server_memory(
            config, shape, role, devices, stages=not placement.is_colocated
        )
        graphs = graph_bytes(config, shape, devices[0].name)
        memory = replace(memory, micro_batch=memory.micro_batch + graphs)
        for part, device in enumerate(devices):
            yield ProcessPlan(
                f"engine-{number}/{part}" if part else f"engine-{number}",
                "engine",
                placement.label(device),
                threads_on(config, placement, device.node)[0],
                memory,
                stays=graphs,
                pushed=memory.parameters + memory.copies,
            )
        # A sleep keeps the weights under adapters.
        keeps = placement.moves and bool(config.trainer.adapters)
        left = memory.parameters * len(devices) if keeps else 0
        yield from _left_plan(f"engine-{number}", devices[0], left, placement)
    for name, device in placement.extra.items():
        role = placement.roles[name]
        leaves = placement.leaves(name)
        memory = server_memory(
            config, shape, role, (device,), stages=role.serves_policy
        )
        yield ProcessPlan(
            name,
            "leaving server" if leaves else "server",
            placement.label(device),
            threads_on(config, placement, device.node)[0],
            memory,
        )
        left = memory.parameters if leaves else 0
        yield from _left_plan(name, device, left, placement)


def _left_plan(
    name: str, device: NodeDevice, size: int, placement: Placement
) -> Iterator[ProcessPlan]:
    """Yield the row of what leaves a device: a CPU's parts leave for a file."""
    host = placement.label(NodeDevice(device.node, "cpu"))
    where = DISK if device.name == "cpu" else host
    if size:
        yield ProcessPlan(f"{name}/host", "host", where, 0, Memory(copies=size))


def _held_besides(
    config: RunConfig, shape: ModelShape, placement: Placement
) -> Iterator[ProcessPlan]:
    """Yield what hosts, /dev/shm and the run directory hold besides the processes' own
    rows. Loading ends before the first checkpoint is written, so a host holds the larger
    of the two.
    """
    first, *others = placement.trainer
    servers = [
        device
        for device in (*placement.engine_devices, *placement.extra.values())
        if device.name != NO_DEVICE
    ]
    item = item_bytes(config.model.dtype, first.name)
    whole = shape.num_parameters * item
    pushed = pushed_bytes(config, shape, item)
    saved = saved_bytes(config, shape)
    pythons = Counter([0])  # the controller's
    pythons.update(device.node for device in (*placement.trainer, *servers))
    loading = Counter[int]()
    # the copy of a checkpoint, which is written during training
    saving = Counter[int]()
    for rank in placement.trainer:
        saving[rank.node] += saved // config.trainer.world_size
    saving[first.node] += whole  # final/
    if others or first.name != "cpu":  # else the loaded model is the trained one
        loading[first.node] += loaded_bytes(config, shape, item_bytes=item)
    for server in servers:
        if server.name != "cpu" and config.rollout.engine == "embedded":
            loading[server.node] += whole
    # Batches, as tokens and as a request. While a step runs, the next batch is with the
    # controller and rank 0, which sends it to the other ranks only then.
    is_ahead = placement.engines and config.buffer.max_staleness > 0
    num_batches = 2 if is_ahead else 1
    batches = Counter(device.node for device in others)
    batches.update({0: num_batches})
    batches.update({first.node: num_batches})
    facts = config.weight_sync.facts
    is_file = not facts.is_transfer | facts.is_file_shared
    held = [(DISK, "weights", (2 if config.model.scratch else 1) * whole)]
    held += [
        (DISK, name, size) for name, size in disk_sizes(config, shape, saved).items()
    ]
    if placement.engines and not placement.is_colocated and is_file:
        for node in range(len(placement.nodes)) if facts.is_fetched else [first.node]:
            saving[node] += EXPORT_FILES * pushed
        held.append((SHARED, "weights", EXPORT_FILES * pushed))
    for node, num in pythons.items():
        host = placement.label(NodeDevice(node, "cpu"))
        held.append((host, "python", num * OWN_BYTES))
        held.append((host, "load or save", max(loading[node], saving[node])))
        held.append((host, "batches", 2 * batches[node] * batch_bytes(config, shape)))
    for where, name, size in held:
        yield ProcessPlan(name, "host", where, 0, Memory(copies=size))


def size_text(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def plan_text(plan: Plan, config: RunConfig, disk_bytes: int | None = None) -> str:
    """`disk_bytes`: free on the disk of the run directory, if it is known."""
    num = plan.shape.num_parameters
    size = f"{num:,} parameters" if num else "size unknown without config.json"
    columns = [*(field.name.replace("_", " ") for field in fields(Memory)), "total"]
    lines = [f"model: {size}", "", _row("process", "device", "threads", columns)]
    for one in plan.processes:
        sizes = [
            size_text(part) if part else "-"
            for part in (*astuple(one.memory), one.memory.total)
        ]
        lines.append(_row(one.name, one.device, str(one.threads or "-"), sizes))
    mode = f"apart: weights by {config.weight_sync.transport}"
    if not plan.placement.engines:
        mode = "no engines"
    elif plan.placement.is_colocated:
        mode = "colocated: time-sharing"
    lines += ["", f"mode: {mode}"]
    used = {one.device for one in plan.processes}
    for device, (free, _) in plan.memory.items():
        needed = size_text(plan.needed_bytes(device)) if num else "unknown"
        free = disk_bytes if device == DISK else free
        has = "unknown" if free is None else size_text(free)
        lines.append(
            f"{device}: "
            + (f"needs {needed}, free {has}" if device in used else "not used")
        )
    return "\n".join(lines)


def _row(name: str, device: str, threads: str, sizes: Sequence[str]) -> str:
    return f"{name:<14} {device:<14} {threads:>7} {''.join(f'{size:>12}' for size in sizes)}"


def resolve_auto(
    config: RunConfig,
    nodes: Sequence[Node],
    extra: Mapping[str, Role] = NO_SERVERS,
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the config without `auto` in model.dtype and weight_sync.transport, and
    messages. Raises ConfigError.
    """
    placement = place(config, nodes, extra)
    messages = list[str]()
    used = [*placement.trainer, *placement.engine_devices]
    slow = [
        placement.label(one)
        for one in used
        if not nodes[one.node].machine.has_fast_bfloat16(one.name)
    ]
    if config.model.dtype == "bfloat16" and slow:
        messages.append(
            f"warning: {slow[0]} computes bfloat16 in software, which is slow: set model.dtype=float32"
        )
    if config.model.dtype == "auto":
        dtype = "float32" if slow else "bfloat16"
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"dtype": dtype})}
        )
        messages.append(f"model.dtype: auto is {dtype}")
    if config.weight_sync.transport == "auto":
        chosen = choose_transport(
            config,
            *placement.names,
            is_colocated=placement.is_colocated,
            num_nodes=placement.num_nodes,
        )
        sync = config.weight_sync.model_copy(update={"transport": chosen[0]})
        config = config.model_copy(update={"weight_sync": sync})
        messages.append(f"weight_sync.transport: auto is {chosen[0]}: {chosen[1]}")
    return config, tuple(messages)


@told_if_long("planning processes and memory")
def plan_run(
    config: RunConfig,
    nodes: Sequence[Node],
    extra: Mapping[str, Role] = NO_SERVERS,
) -> tuple[Plan, tuple[str, ...]]:
    plan = make_plan(config, nodes, extra)
    share = config.placement.share
    messages = list[str]()
    if isinstance(share, float):
        messages.append(f"placement.share={share}: both sides stay")
    elif plan.placement.is_colocated:
        plan = _share_memory(plan, config)
        fraction = plan.placement.memory_fraction
        part = "" if fraction is None else f", engines with {fraction} of each device"
        stays = "both sides stay"
        if plan.placement.moves:
            stays = "each side moves out for the other"
        messages.append(f"placement.share={share or 'none'}: {stays}{part}")
    plan = _fit_parts(plan, config)
    if not plan.placement.engines:
        return plan, tuple(messages)
    if config.buffer.max_staleness == 0 and config.trainer.stream == "auto":
        why = plan.placement.whole_because or (MOVES if plan.placement.moves else "")
        what = f"off: {why}" if why else "on: groups are trained as they end"
        messages.append("trainer.stream: auto is " + what)
    device = plan.placement.engines[0][0].name
    inexact = plan.shape.inexact
    is_embedded = config.rollout.engine == "embedded"
    if config.rollout.deterministic is True and is_embedded and inexact:
        raise ConfigError(
            "rollout.deterministic=true, and rollout.engine=embedded cannot promise it for this model",
            rule=inexact,
            way_out="set rollout.deterministic=auto.",
        )
    if config.rollout.deterministic == "auto" and device != NO_DEVICE:
        is_on = config.is_deterministic(device, is_exact=not inexact)
        text = f"rollout.deterministic: auto is {str(is_on).lower()}"
        if is_on and is_embedded and config.model.dtype == "bfloat16":
            text += (
                ", so engines use no AMX kernels, whose rounding depends on the batch"
            )
        messages.append(text)
    return plan, tuple(messages)


def _fit_parts(plan: Plan, config: RunConfig) -> Plan:
    """Return the plan, with whole batches if the sums of parts have no room."""
    placement = plan.placement
    for device in map(placement.label, placement.trainer if placement.in_parts else ()):
        free, _ = plan.memory[device]
        if free is not None and plan.needed_bytes(device) > free:
            whole = replace(placement, whole_because=NO_ROOM)
            return _placed(plan, config, whole)
    return plan


def _placed(plan: Plan, config: RunConfig, placement: Placement) -> Plan:
    """Return the plan with another placement."""
    processes = lay_out(config, plan.shape, placement)
    return replace(plan, placement=placement, processes=processes)


def _share_memory(plan: Plan, config: RunConfig) -> Plan:
    """Keep both colocated sides in memory if they fit; the engines get what the others
    leave of each CUDA device.
    """
    placement = plan.placement
    may_stay = (
        config.placement.share is not None
        and not config.rollout.memory_keys
        and plan.shape.num_parameters > 0
        and "always" not in config.offload_rules.values()
    )
    if may_stay:
        why = why_whole(config, replace(placement, resident=True))
        # In this order: if parts have no room, whole batches may have it.
        for whole in (why or NO_ROOM, why):
            resident = replace(placement, resident=True, whole_because=whole)
            both = _placed(plan, config, resident)
            devices = map(resident.label, resident.trainer)
            if all(map(partial(_has_room, both), devices)):
                plan = both
    if not placement.is_on_cuda or config.rollout.memory_keys:
        return plan
    fractions = [1.0]
    for device in map(placement.label, placement.engine_devices):
        free, total = plan.memory.get(device, (None, None))
        taken = plan.taken_bytes(device)
        # Engines get one fraction for all devices, so their fullest device decides. It
        # is a fraction of the total memory, as engines count it.
        if taken and free and total:
            fractions.append(max(0.001, round((free - taken) / total, 3)))
    if len(fractions) == 1:
        return plan
    placement = replace(plan.placement, memory_fraction=min(fractions))
    return replace(plan, placement=placement)


def _has_room(plan: Plan, device: str) -> bool:
    """Return whether both sides fit on a device; False if nobody knows: sides that move
    need less memory.
    """
    free, total = plan.memory[device]
    engines = sum(
        one.memory.total + OWN_BYTES
        for one in plan.processes
        if one.device == device and one.side == "engine" and one.memory.total
    )
    if free is None or total is None:
        return False
    return plan.taken_bytes(device) + ENGINE_FACTOR * engines <= free


def refuse_over_capacity(plan: Plan, config: RunConfig) -> None:
    """Compare the plan with the free memory of each device. Raises ConfigError, also for
    an engine whose package is not installed.
    """
    placement = plan.placement
    is_local = len(placement.nodes) == 1 and placement.nodes[0].machine.is_here
    kinds = [server.engine for server in placement.roles.values()]
    if placement.engines and config.rollout.external_urls is None:
        kinds.append(config.rollout.engine)
    for kind in kinds if is_local else ():
        if kind is not None and ENGINES[kind].package is not None:
            find_python(config.rollout, kind)
    for device, (free, _) in plan.memory.items():
        if free is not None and (needed := plan.needed_bytes(device)) > free:
            held = [
                one
                for one in plan.processes
                if one.device == device and one.memory.total
            ]
            names = ", ".join(
                f"{one.name} {size_text(one.memory.total)}" for one in held
            )
            what = f"{device} needs {size_text(needed)} and has {size_text(free)} free ({names})"
            way_out = FIT_DEVICE
            if device == SHARED:
                way_out = FIT_SHARED
            # An offload would only make a host's shortage worse.
            elif {one.side for one in held} == {"host"}:
                way_out = FIT_HOST
            raise ConfigError(what, rule=RULE, way_out=way_out)
