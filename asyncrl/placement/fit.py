"""Refuses a plan that cannot fit, with the numbers and the nearest setting that does: memory by device, then
descriptors and ports. Tries settings on paper; starts nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import LoraConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.placement.devices import Mode, place
from asyncrl.placement.memory_plan import Phase, ProcessPlan, peak_bytes, size_text
from asyncrl.placement.plan import Plan, lay_out

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
        return (
            "placement.rollout=trainer with buffer.max_staleness=0 fits: trainer and engines take turns "
            "(docs/colocation.md)."
        )
    if config.trainer.lora is None:
        if fits(_with_trainer(config, lora=LORA)):
            return (
                "trainer.lora={rank: 16} fits: it needs no gradients and optimizer state of the model's "
                "own weights."
            )
        return (
            "even trainer.lora={rank: 16}, which trains adapters alone, does not fit: take a smaller "
            "model, or more memory."
        )
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


@dataclass(frozen=True, slots=True)
class Need:
    """Descriptors or connections that the run has at once, and the most that it can have.

    `once`: while each rollout asks one thing at a time, as nearly all do; `at_worst`: while each makes
    gateway.max_concurrent_calls calls at once. `lower`: the setting that needs no more than `limit` once, ''
    if there is none; `calls`: the gateway.max_concurrent_calls that does at worst.
    """

    what: str
    have: str
    limit: int
    once: int
    at_worst: int
    rule: str
    raise_it: str
    lower: str
    calls: int


def refuse_too_many_connections(config: RunConfig) -> None:
    """Raise ConfigError if descriptors (the hard limit: the run takes all of it) or source ports cannot be
    enough.
    """
    for need in _needs(config):
        if need.once > need.limit:
            lower = f", or write {need.lower}" if need.lower else ""
            raise ConfigError(
                f"the run needs {need.once} {need.what}, and {need.have}",
                rule=need.rule,
                way_out=f"{need.raise_it}{lower}.",
            )


def scarce_connections(config: RunConfig) -> list[str]:
    """In words, what is not enough for agents that all make gateway.max_concurrent_calls calls at once,
    though it is for one call each.
    """
    calls = config.gateway.max_concurrent_calls
    return [
        f"the run needs {need.at_worst} {need.what} if each rollout makes "
        f"gateway.max_concurrent_calls={calls} "
        f"calls at once, and {need.have}: calls then wait for one another, and fail if that takes too long; "
        f"{need.raise_it}, or write gateway.max_concurrent_calls={need.calls}."
        for need in _needs(config)
        if need.once <= need.limit < need.at_worst
    ]


def _needs(config: RunConfig) -> list[Need]:
    is_agent, engines = config.generator.is_harness, config.rollout.num_engines
    calls = config.gateway.max_concurrent_calls if is_agent else 1
    crowd = config.gateway.max_connections if is_agent else 0
    evaluating = 0 if config.eval is None else config.eval.slots
    rollouts, key = config.rollout.slots * engines, "rollout.slots"
    if is_agent and config.generator.concurrency != "auto":
        rollouts, key = config.generator.concurrency, "generator.concurrency"
    agents = rollouts + (evaluating if config.evaluates_agent else 0)

    def lower(most: int) -> str:
        value = most // engines if key == "rollout.slots" else most
        return f"{key}={value}" if value > 0 else ""

    needs = []
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        once = rollouts + evaluating + crowd + OTHERS
        left = hard - (once - crowd)
        parts = f"{rollouts} for rollouts in flight, {evaluating} for evaluations, {crowd} for the gateway"
        needs.append(
            Need(
                what=f"descriptors ({parts}, {OTHERS} for everything else)",
                have=f"this process may have {hard}",
                limit=hard,
                once=once,
                at_worst=once + agents * (calls - 1),
                rule="each connection is a descriptor; a run can take the hard limit of RLIMIT_NOFILE",
                raise_it="raise the limit (LimitNOFILE of a service, ulimit nofile of docker, "
                "/etc/security/limits.conf)",
                lower=f"gateway.max_connections={left}"
                if crowd and left >= rollouts
                else lower(hard - (once - rollouts)),
                calls=1 + max(0, hard - once) // agents,
            )
        )
    ports = num_ports()
    to_gateway = [("the gateway", agents, 1)] if is_agent else []
    for where, number, targets in [*to_gateway, ("each engine", rollouts, engines)] if ports else []:
        at_worst = -(-number * calls // targets)
        needs.append(
            Need(
                what=f"connections to {where}",
                have=f"this machine has {ports} ports for them",
                limit=ports or 0,
                once=-(-number // targets),
                at_worst=min(at_worst, crowd) if where == "the gateway" else at_worst,
                rule="connections to one address have a source port each, of net.ipv4.ip_local_port_range",
                raise_it="widen it (sysctl -w net.ipv4.ip_local_port_range='1024 65535')",
                lower=lower((ports or 0) * targets - (number - rollouts)),
                calls=max(1, (ports or 0) * targets // number),
            )
        )
    return needs


def num_ports() -> int | None:
    """Connections that this machine can have to one address and port; None where nothing tells."""
    try:
        first, last = PORT_RANGE.read_text(encoding="ascii").split()
        return int(last) - int(first) + 1
    except (OSError, ValueError):
        return None
