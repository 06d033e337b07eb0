"""Plan processes, devices, threads and memory of a run, without torch.

Bytes are estimates: parameters, optimizer with gradients, KV cache, one micro-batch,
and weight copies.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Literal

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import shared_memory_root
from asyncrl.base.progress import told_if_long
from asyncrl.config import RunConfig
from asyncrl.config.engine_kinds import ENGINES
from asyncrl.config.offload_config import POLICY_WEIGHTS, ModelPart, Rule
from asyncrl.config.transports import choose_transport
from asyncrl.engines.kinds import Role, engine_role, num_caches
from asyncrl.launch.machine import Node, find_python
from asyncrl.launch.memory import (
    Memory,
    critic_run,
    disk_sizes,
    engine_memory,
    graph_bytes,
    item_bytes,
    leaving_parts,
    loaded_bytes,
    rank_memory,
    saved_bytes,
)
from asyncrl.launch.model_sizes import ModelShape, model_shape
from asyncrl.launch.placement import (
    NO_DEVICE,
    NodeDevice,
    Placement,
    Side,
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


HostSide = Literal["host", "loading", "saving"]


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A process, or what a node holds besides. `side`: whose time slice it works in; loading
    ends before saving begins. slice: an extra server that leaves in the trainer's time slice.
    """

    name: str
    side: HostSide | Literal["controller", "trainer", "engine", "extra", "slice"]
    device: str
    threads: int
    memory: Memory = Memory()
    stays: int = 0
    """Bytes of a trainer that stay when the engines take its device, and of an engine
    that sleeps.
    """
    pushed: int = 0
    """Bytes of a trainer on its device while it sends its weights."""


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
        sizes = Counter[str]()
        stays = asleep = 0
        pushed = 0
        for one in self.processes:
            if one.device == device:
                sizes[one.side] += one.memory.total
                if one.side == "engine":
                    asleep += one.stays
                else:
                    stays += one.stays
                # During the push of a handover both sides have their weights on the
                # device, and what never leaves it.
                pushed += one.pushed
                if one.side == "engine":
                    pushed += one.memory.parameters + one.memory.copies
        # Loading ends before the first checkpoint is written, so a host holds the
        # larger of the two.
        sizes["host"] += max(sizes.pop("loading", 0), sizes.pop("saving", 0))
        if not self.placement.moves:
            return sizes.total()
        trainer = sizes.pop("trainer", 0) + asleep
        engines = sizes.pop("engine", 0) + sizes.pop("slice", 0) + stays
        return sizes.total() + max(trainer, engines, pushed)


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
    extra: Mapping[str, Role] | None = None,
) -> Plan:
    """Place the processes of a run, and count their memory. Raises ConfigError."""
    shape = model_shape(config.model)
    placement = place(config, nodes, extra)
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
    plans = [
        ProcessPlan(
            "controller", "controller", placement.label(NodeDevice(0, "cpu")), 1
        )
    ]

    def add(
        name: str,
        side: Literal["trainer", "engine", "extra", "slice"],
        devices: Side,
        memory: Memory,
        stays: int = 0,
    ) -> None:
        for part, device in enumerate(devices):
            own = f"{name}/{part}" if part else name
            threads = threads_on(config, placement, device.node)[side == "trainer"]
            plans.append(
                ProcessPlan(own, side, placement.label(device), threads, memory, stays)
            )

    sync = config.weight_sync.facts
    rules = config.offload_rules
    leaving = leaving_parts(config, moves=placement.moves)
    for rank, device in enumerate(placement.trainer):
        held = 0
        if rank == 0 and sync.holds_exports(is_colocated=placement.is_colocated):
            held = shape.num_parameters * item_bytes(config.model.dtype, device.name)
        parts = rank_memory(config, shape, device.name)
        memory = parts.peak(rules)
        stays = parts.total_of([one for one in rules if rules[one] == "never"])
        pushed = stays + parts.total_of(
            [one for one in rules if one.part == "weights" and rules[one] == "auto"]
        )
        if rules[POLICY_WEIGHTS] == "always":
            pushed += parts.total_of([POLICY_WEIGHTS])
        if config.trainer.offload.by_layer:
            memory = Memory(micro_batch=memory.micro_batch)
            pushed = 0
        memory = replace(memory, copies=memory.copies + held)
        add(f"trainer-{rank}", "trainer", (device,), memory)
        plans[-1] = replace(plans[-1], stays=stays + held, pushed=pushed + held)
        if size := parts.total_of(leaving):
            plans.append(_left_plan(f"trainer-{rank}", device, size, placement))
    engine = config.rollout.facts
    caches = num_caches(config, engine_role(config))
    for number, devices in enumerate(placement.engines):
        stages = not placement.is_colocated
        slots = caches * config.rollout.slots
        memory = engine_memory(config, shape, engine, slots, devices, stages=stages)
        graphs = graph_bytes(config, shape, devices[0].name)
        memory = replace(memory, micro_batch=memory.micro_batch + graphs)
        add(f"engine-{number}", "engine", devices, memory, graphs)
    for name, device in placement.extra.items():
        memory = _extra_memory(config, shape, placement.roles[name], device)
        add(name, placement.extra_side(name), (device,), memory)
    left = _left_servers(config, shape, placement)
    return (*plans, *left, *held_besides(config, shape, placement))


def _left_plan(
    name: str, device: NodeDevice, size: int, placement: Placement
) -> ProcessPlan:
    """Return the row of what leaves a device: a CPU's parts leave for a file."""
    host = placement.label(NodeDevice(device.node, "cpu"))
    where = DISK if device.name == "cpu" else host
    return ProcessPlan(f"{name}/host", "host", where, 0, Memory(copies=size))


def _left_servers(
    config: RunConfig, shape: ModelShape, placement: Placement
) -> Iterator[ProcessPlan]:
    for name, device in placement.extra.items():
        if placement.leaves(name):
            server = placement.roles[name]
            memory = _extra_memory(config, shape, server, device)
            yield _left_plan(name, device, memory.parameters, placement)


def _extra_memory(
    config: RunConfig, shape: ModelShape, server: Role, device: NodeDevice
) -> Memory:
    if server.url:
        return Memory()
    if server.model is not None:
        shape = model_shape(server.model.model)
    if server.engine is None:
        item = item_bytes(config.model.dtype, device.name)
        width = 4 * shape.hidden + 3 * shape.active
        return Memory(
            parameters=shape.num_parameters * item if server.model else 0,
            micro_batch=server.batch_tokens * width * item,
        )
    facts = ENGINES[server.engine]
    slots = server.slots * num_caches(config, server)
    memory = engine_memory(
        config, shape, facts, slots, (device,), stages=server.serves_policy
    )
    return replace(
        memory, kv=memory.kv * server.max_length // config.rollout.max_length
    )


def held_besides(
    config: RunConfig, shape: ModelShape, placement: Placement
) -> Iterator[ProcessPlan]:
    """Yield what hosts, /dev/shm and the run directory hold besides the processes' own
    rows.
    """
    first, *others = placement.trainer
    servers = [
        device
        for device in (*placement.engine_devices, *placement.extra.values())
        if device.name != NO_DEVICE
    ]
    item = item_bytes(config.model.dtype, first.name)
    whole = shape.num_parameters * item
    saved = saved_bytes(config, shape)
    held = Counter[tuple[int, HostSide]]({(0, "host"): OWN_BYTES})  # the controller's
    for device in (*placement.trainer, *servers):
        held[device.node, "host"] += OWN_BYTES
    # the copy of a checkpoint, which is written during training
    for rank in placement.trainer:
        held[rank.node, "saving"] += saved // config.trainer.world_size
    held[first.node, "saving"] += whole  # final/
    if others or first.name != "cpu":  # else the loaded model is the trained one
        # The critic is loaded once the policy is on its device.
        runs = [(config, shape), critic_run(config) or (config, shape)]
        held[first.node, "loading"] += max(
            loaded_bytes(*run, item_bytes=item) for run in runs
        )
    for server in servers:
        if server.name != "cpu" and config.rollout.engine == "embedded":
            held[server.node, "loading"] += whole
    facts = config.weight_sync.facts
    is_file = not facts.is_transfer | facts.is_file_shared | facts.sends_adapters
    if placement.engines and not placement.is_colocated and is_file:
        for node in range(len(placement.nodes)) if facts.is_fetched else [first.node]:
            held[node, "saving"] += EXPORT_FILES * whole
        yield ProcessPlan(
            "weights", "host", SHARED, 0, Memory(copies=EXPORT_FILES * whole)
        )
    for (node, side), size in held.items():
        host = placement.label(NodeDevice(node, "cpu"))
        named = "python" if side == "host" else side
        yield ProcessPlan(named, side, host, 0, Memory(copies=size))
    for name, size in disk_sizes(config, saved).items():
        yield ProcessPlan(name, "host", DISK, 0, Memory(copies=size))
    folders = 2 if config.model.scratch else 1
    yield ProcessPlan("weights", "host", DISK, 0, Memory(copies=folders * whole))


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
    extra: Mapping[str, Role] | None = None,
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
    extra: Mapping[str, Role] | None = None,
) -> tuple[Plan, tuple[str, ...]]:
    plan = make_plan(config, nodes, extra)
    share = config.placement.share
    messages = list[str]()
    if isinstance(share, float):
        messages.append(f"placement.share={share}: both sides stay")
    elif plan.placement.is_colocated:
        plan = _with_resident_sides(plan, config)
        plan = _beside_what_stays(plan, config)
        fraction = plan.placement.memory_fraction
        part = "" if fraction is None else f", engines with {fraction} of each device"
        stays = "both sides stay"
        if plan.placement.moves:
            stays = "each side moves out for the other"
        messages.append(f"placement.share={share or 'none'}: {stays}{part}")
    if not plan.placement.engines:
        return plan, tuple(messages)
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


def offload_text(
    plan: Plan,
    config: RunConfig,
    nodes: Sequence[Node],
    extra: Mapping[str, Role] | None = None,
) -> str:
    """Return a table of the parts that may leave a device of the trainer, their bytes,
    and what the device needs in all by each rule; "" if no rule is possible but auto.
    The parts are rank 0's, and the extra servers.
    """
    placement = plan.placement
    first = placement.trainer[0]
    device = placement.label(first)
    servers = dict(extra or {})
    rows = list[tuple[str, str, int, Callable[[Rule], Plan]]]()
    for one, size in rank_memory(config, plan.shape, first.name).parts.items():

        def with_part(rule: Rule, one: ModelPart = one) -> Plan:
            return plan_run(_with_rule(config, one, rule), nodes, extra)[0]

        rows.append((one.key, device, size, with_part))
    sizes = Counter[tuple[str, str]]()
    for name, server in servers.items():
        its_device = placement.extra.get(name)
        if server.offload is not None and its_device in placement.trainer:
            assert its_device is not None
            memory = _extra_memory(config, plan.shape, server, its_device)
            sizes[server.offload_key, placement.label(its_device)] += memory.total
    for (key, label), size in sizes.items():

        def with_servers(rule: Rule, key: str = key) -> Plan:
            changed = {
                name: replace(server, offload=rule)
                for name, server in servers.items()
                if server.offload_key == key
            }
            return plan_run(config, nodes, servers | changed)[0]

        rows.append((key, label, size, with_servers))
    rules: tuple[Rule, ...] = ("auto", "always", "never")
    lines = list[str]()
    for key, label, size, planned in rows:
        needed = dict[Rule, str]()
        for rule in rules:
            # A rule without a use here is refused.
            with contextlib.suppress(ConfigError):
                needed[rule] = size_text(planned(rule).needed_bytes(label))
        if len(needed) > 1:
            texts = [size_text(size), *(needed.get(rule, "-") for rule in rules)]
            title = key if label == device else f"{key} ({label})"
            lines.append(_offload_row(title, texts))
    if not lines or not plan.shape.num_parameters:
        return ""
    title = _offload_row(f"offload: {device} needs", ["size", *rules])
    return "\n".join([title, *lines])


def _offload_row(name: str, texts: Sequence[str]) -> str:
    return f"{name:<30} {''.join(f'{text:>12}' for text in texts)}"


def _with_rule(config: RunConfig, one: ModelPart, rule: Rule) -> RunConfig:
    section, _, name = one.key.split(".")
    trained = config.critic if section == "critic" else config.trainer
    assert trained is not None
    offload = trained.offload.model_copy(update={name: rule})
    changed = trained.model_copy(update={"offload": offload})
    return config.model_copy(update={section: changed})


def _with_resident_sides(plan: Plan, config: RunConfig) -> Plan:
    """Keep both colocated sides in memory if they fit; the engines get what the trainer
    leaves.
    """
    if (
        config.placement.share is None
        or config.rollout.memory_keys
        or not plan.shape.num_parameters
        or "always" in config.offload_rules.values()
        or any(one.offload == "always" for one in plan.placement.roles.values())
    ):
        return plan
    resident = replace(plan.placement, resident=True)
    processes = lay_out(config, plan.shape, resident)
    fraction = 1.0
    for device in map(resident.label, resident.trainer):
        free, total = plan.memory[device]
        sizes = {True: 0, False: 0}
        for one in processes:
            if one.device == device and one.threads and one.memory.total:
                sizes[one.side == "engine"] += one.memory.total + OWN_BYTES
        others = TRAINER_FACTOR * sizes[False]
        # They do not fit, or nobody knows: both sides move, which needs less memory.
        if free is None or total is None or others + ENGINE_FACTOR * sizes[True] > free:
            return plan
        # Engines get one fraction for all devices, so their fullest device decides. It
        # is a fraction of the total memory, as engines count it.
        if sizes[True]:
            fraction = min(fraction, (free - others) / total)
    if resident.is_on_cuda:
        resident = replace(resident, memory_fraction=round(fraction, 3))
    return replace(plan, placement=resident, processes=processes)


def _beside_what_stays(plan: Plan, config: RunConfig) -> Plan:
    """Leave the engines of moving sides what the trainer's parts with the rule "never"
    and extra servers leave of each CUDA device: vLLM takes a fraction of the whole one.
    """
    placement = plan.placement
    if not (placement.moves and placement.is_on_cuda) or config.rollout.memory_keys:
        return plan
    fraction = 1.0
    taken = Counter[str]()
    for one in plan.processes:
        if one.side == "trainer" and one.stays:
            taken[one.device] += int(TRAINER_FACTOR * one.stays) + OWN_BYTES
        elif one.side in ("extra", "slice"):
            taken[one.device] += int(ENGINE_FACTOR * one.memory.total) + OWN_BYTES
    for device in map(placement.label, placement.engine_devices):
        free, total = plan.memory.get(device, (None, None))
        if device in taken and free and total:
            fraction = min(fraction, max(0.0, free - taken[device]) / total)
    if fraction == 1.0:
        return plan
    placement = replace(placement, memory_fraction=max(0.001, round(fraction, 3)))
    return replace(plan, placement=placement)


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
            elif {one.side for one in held} <= {
                "controller",
                "host",
                "loading",
                "saving",
            }:
                way_out = FIT_HOST
            raise ConfigError(what, rule=RULE, way_out=way_out)
