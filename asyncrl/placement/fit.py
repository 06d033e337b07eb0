"""Refuses a config that needs more connections at once than this machine gives one process, and notes what
may. Opens nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.config import LoraConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.placement.devices import Mode, place
from asyncrl.placement.memory_plan import Phase, ProcessPlan, peak_bytes, size_text
from asyncrl.placement.plan import Plan, lay_out

# Refuses a plan that cannot fit, with the numbers and the nearest setting that does. Tries settings on paper;
# starts nothing.


LORA = LoraConfig(rank=16)


def refuse_what_cannot_fit(plan: Plan, config: RunConfig) -> None:
    """Raise ConfigError if a device needs more memory in some phase than it has free, or the run more
    connections than it can have.

    What is not known is not refused: a CUDA device whose free memory nobody tells is checked by trainer and
    engines at their start.
    """
    _refuse_memory(plan, config)
    refuse_too_many_connections(config)


def _refuse_memory(plan: Plan, config: RunConfig) -> None:
    excess = _worst(plan.processes, plan.free_bytes, plan.placement.mode)
    if plan.shape is None or excess is None:
        return
    device, phase, needed, free = excess
    mode = plan.placement.mode
    held = [
        (process.name, process.held_bytes(phase, mode))
        for process in plan.processes
        if process.device == device
    ]
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in held if size)
    where = "" if device == "cpu" else f" on {device}"
    raise ConfigError(
        f"{'the run' if mode == 'apart' else phase} needs {size_text(needed)} of memory{where} ({parts}), "
        f"and {size_text(free)} are free",
        rule="weights, gradients, optimizer state, activations and KV caches are added up before anything "
        "starts" + ("" if mode == "apart" else ", in turns for each phase by itself"),
        way_out=_way_out(plan, config),
    )


Excess = tuple[str, Phase, int, int]
"""Device, phase, bytes needed, bytes free."""


def _worst(
    processes: tuple[ProcessPlan, ...], free_bytes: Mapping[str, int | None], mode: Mode
) -> Excess | None:
    """Where most is lacking, None if everything fits."""
    lacking: list[Excess] = []
    for device, free in free_bytes.items():
        if free is not None:
            lacking += [
                (device, phase, need, free)
                for phase, need in peak_bytes(processes, device, mode).items()
                if need > free
            ]
    return max(lacking, key=lambda excess: excess[2] - excess[3], default=None)


def _way_out(plan: Plan, config: RunConfig) -> str:
    """The first of these that fits: fewer slots, what makes the activations smaller, turns on one device,
    adapters.
    """

    def fits(changed: RunConfig) -> bool:
        try:
            placement = place(changed, plan.num_cuda)
        except ConfigError:
            return False
        return _worst(lay_out(changed, plan.shape, placement), plan.free_bytes, placement.mode) is None

    slots = _largest(config.rollout.slots, 1, lambda number: fits(_with_slots(config, number)))
    if slots is not None:
        return f"rollout.slots={slots} fits; a smaller rollout.max_tokens or fewer engines save memory too."
    if fits(_with_trainer(config, gradient_checkpointing=True)):
        return "trainer.gradient_checkpointing=true fits, for about a third more time."
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    tokens = _largest(
        config.trainer.micro_batch_tokens,
        longest,
        lambda number: fits(_with_trainer(config, micro_batch_tokens=number)),
    )
    if tokens is not None:
        return f"trainer.micro_batch_tokens={tokens} fits, and changes no result."
    if plan.placement.mode == "apart" and fits(_in_turns(config)):
        return "placement.rollout=trainer with buffer.max_staleness=0 fits: trainer and engines take turns (docs/colocation.md)."
    if config.trainer.lora is None:
        if fits(_with_trainer(config, lora=LORA)):
            return "trainer.lora={rank: 16} fits: it needs no gradients and optimizer state of the model's own weights."
        return "even trainer.lora={rank: 16}, which trains adapters alone, does not fit: take a smaller model, or more memory."
    return "take a smaller model, or a machine with more memory."


def _largest(above: int, least: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in [least, above) that fits, None if not even the least does."""
    if least >= above or not fits(least):
        return None
    low, high = least, above
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with_slots(config: RunConfig, slots: int) -> RunConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"slots": slots})})


def _with_trainer(config: RunConfig, **values: object) -> RunConfig:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=values)})


def _in_turns(config: RunConfig) -> RunConfig:
    placement = config.placement.model_copy(update={"rollout": "trainer"})
    return config.model_copy(
        update={
            "placement": placement,
            "buffer": config.buffer.model_copy(update={"max_staleness": 0, "look_ahead": "auto"}),
        }
    )


OTHERS = 256
"""Descriptors that the controller has besides: files, logs, pipes, heartbeats, pushes."""
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def refuse_too_many_connections(config: RunConfig) -> None:
    """Raise ConfigError if descriptors (the hard limit: the run takes all of it) or source ports cannot be
    enough.

    For rollouts that ask one thing at a time, as nearly all do: scarce_connections tells what the others may
    lack.
    """
    _refuse_descriptors(config)
    _refuse_ports(config)


def scarce_connections(config: RunConfig) -> list[str]:
    """In words, what is not enough for agents that all make gateway.max_concurrent_calls calls at once,
    though it is for one call each.
    """
    return [*_scarce_descriptors(config), *_scarce_ports(config)] if config.generator.is_harness else []


def _scarce_descriptors(config: RunConfig) -> list[str]:
    hard, once, agents = _hard_limit(), _descriptors(config), _agents(config)
    needed = once + agents * (
        config.gateway.max_concurrent_calls - 1
    )  # to engines; those to the gateway are counted whole in any case
    if hard is None or not once <= hard < needed:
        return []
    calls = 1 + (hard - once) // agents
    return [
        _note(
            config,
            agents,
            f"{needed} descriptors open",
            f"process may have {hard}",
            f"raise the limit to {needed} or more",
            calls,
        )
    ]


def _scarce_ports(config: RunConfig) -> list[str]:
    ports, calls, crowd = num_ports(), config.gateway.max_concurrent_calls, config.gateway.max_connections
    if ports is None:
        return []
    notes = []
    agents, (rollouts, _), engines = _agents(config), _rollouts(config), config.rollout.num_engines
    callers = [
        ("the gateway", agents, 1, crowd),
        ("each engine", rollouts, engines, None),
        ("engine-eval", agents - rollouts, 1, None),
    ]
    for what, number, targets, most in callers:
        needed, least = -(-number * calls // targets), ports * targets // max(number, 1)
        if most is not None:
            needed = min(needed, most)
        if needed > ports and least:  # without one call each it is refused
            have = f"machine has {ports} ports for them"
            notes.append(
                _note(
                    config,
                    number,
                    f"{needed} connections to {what}",
                    have,
                    "widen net.ipv4.ip_local_port_range",
                    least,
                )
            )
    return notes


def _note(config: RunConfig, number: int, needs: str, have: str, way_out: str, calls: int) -> str:
    most = config.gateway.max_concurrent_calls
    return (
        f"the run has {needs} if each of its {number} rollouts makes gateway.max_concurrent_calls={most} "
        f"calls at once, and this {have}: "
        f"calls wait for one another then, and fail if that takes too long; {way_out}, or write "
        f"gateway.max_concurrent_calls={calls}."
    )


def _refuse_descriptors(config: RunConfig) -> None:
    hard, needed, (rollouts, key) = _hard_limit(), _descriptors(config), _rollouts(config)
    if hard is None or needed <= hard:
        return
    evaluating, gateway = _evaluating(config), _gateway(config)
    parts = [f"{rollouts} for rollouts in flight", f"{OTHERS} for everything else"]
    parts += [f"eval.slots={evaluating}"] if evaluating else []
    parts += [f"gateway.max_connections={gateway}"] if gateway else []
    with_less = hard - (needed - gateway)
    lower = (
        f"gateway.max_connections={with_less}"
        if with_less >= rollouts and gateway
        else _lower(config, hard - (needed - rollouts), key)
    )
    raise ConfigError(
        f"the run may have {needed} descriptors open ({', '.join(parts)}), and this process may have {hard}",
        rule="each request and each connection is a descriptor; the hard limit of RLIMIT_NOFILE is the most "
        "that a run can take",
        way_out=f"raise the limit to {needed} or more (LimitNOFILE of a service, ulimit nofile={needed} of "
        f"docker, "
        f"/etc/security/limits.conf){lower and f', or write {lower}'}.",
    )


def _hard_limit() -> int | None:
    """Of descriptors; None if there is none."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def _descriptors(config: RunConfig) -> int:
    """Most that the controller, the process with the most of them, has open while each rollout asks one thing
    at a time.
    """
    return _rollouts(config)[0] + _evaluating(config) + _gateway(config) + OTHERS


def _evaluating(config: RunConfig) -> int:
    """Rollouts of an evaluation at once."""
    return 0 if config.eval is None else config.eval.slots


def _gateway(config: RunConfig) -> int:
    """Connections that are open to it at once, whatever agents do."""
    return config.gateway.max_connections if config.generator.is_harness else 0


def _agents(config: RunConfig) -> int:
    """Rollouts at once that call the gateway, those of evaluations too."""
    return _rollouts(config)[0] + (_evaluating(config) if config.evaluates_agent else 0)


def _refuse_ports(config: RunConfig) -> None:
    ports, (rollouts, key), evaluating = num_ports(), _rollouts(config), 0
    targets = config.rollout.num_engines
    if config.generator.is_harness:  # all workers call the one gateway
        targets, evaluating = 1, _agents(config) - rollouts
    if ports is None or rollouts + evaluating <= ports * targets:
        return
    what = "the gateway" if config.generator.is_harness else "each engine"
    lower = _lower(config, ports * targets - evaluating, key)
    rollouts += evaluating
    raise ConfigError(
        f"{rollouts} rollouts in flight need {-(-rollouts // targets)} connections to {what}, and this "
        f"machine has {ports} ports for them",
        rule="connections to one address have a source port each, of net.ipv4.ip_local_port_range",
        way_out=f"widen it (sysctl -w net.ipv4.ip_local_port_range='1024 65535' gives "
        f"64512){lower and f', or write {lower}'}.",
    )


def num_ports() -> int | None:
    """Connections that this machine can have to one address and port; None where nothing tells."""
    try:
        first, last = PORT_RANGE.read_text(encoding="ascii").split()
        return int(last) - int(first) + 1
    except (OSError, ValueError):
        return None


def _rollouts(config: RunConfig) -> tuple[int, str]:
    """Most in flight at once, and the key that says so."""
    if config.generator.is_harness and config.generator.concurrency != "auto":
        return config.generator.concurrency, "generator.concurrency"
    return config.rollout.slots * config.rollout.num_engines, "rollout.slots"


def _lower(config: RunConfig, most: int, key: str) -> str:
    """The setting that needs no more than `most`; '' if there is none."""
    value = most // config.rollout.num_engines if key == "rollout.slots" else most
    return f"{key}={value}" if value > 0 else ""
