"""Refuses a config that needs more connections at once than this machine gives one process, and notes what may. Opens nothing."""

from __future__ import annotations

import resource
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError

OTHERS = 256
"""Descriptors that the controller has besides: files, logs, pipes, heartbeats, pushes."""
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def refuse_too_many_connections(config: RunConfig) -> None:
    """Raise ConfigError if descriptors (the hard limit: the run takes all of it) or source ports cannot be enough.

    For rollouts that ask one thing at a time, as nearly all do: scarce_connections tells what the others may lack.
    """
    _refuse_descriptors(config)
    _refuse_ports(config)


def scarce_connections(config: RunConfig) -> list[str]:
    """In words, what is not enough for agents that all make gateway.max_concurrent_calls calls at once, though it is for one call each."""
    return [*_scarce_descriptors(config), *_scarce_ports(config)] if config.generator.is_harness else []


def _scarce_descriptors(config: RunConfig) -> list[str]:
    hard, once, agents = _hard_limit(), _descriptors(config), _agents(config)
    needed = once + agents * (config.gateway.max_concurrent_calls - 1)  # to engines; those to the gateway are counted whole in any case
    if hard is None or not once <= hard < needed:
        return []
    calls = 1 + (hard - once) // agents
    return [_note(config, agents, f"{needed} descriptors open", f"process may have {hard}", f"raise the limit to {needed} or more", calls)]


def _scarce_ports(config: RunConfig) -> list[str]:
    ports, calls, crowd = num_ports(), config.gateway.max_concurrent_calls, config.gateway.max_connections
    if ports is None:
        return []
    notes = []
    agents, (rollouts, _), engines = _agents(config), _rollouts(config), config.rollout.num_engines
    callers = [("the gateway", agents, 1, crowd), ("each engine", rollouts, engines, None), ("engine-eval", agents - rollouts, 1, None)]
    for what, number, targets, most in callers:
        needed, least = -(-number * calls // targets), ports * targets // max(number, 1)
        if most is not None:
            needed = min(needed, most)
        if needed > ports and least:  # without one call each it is refused
            have = f"machine has {ports} ports for them"
            notes.append(_note(config, number, f"{needed} connections to {what}", have, "widen net.ipv4.ip_local_port_range", least))
    return notes


def _note(config: RunConfig, number: int, needs: str, have: str, way_out: str, calls: int) -> str:
    most = config.gateway.max_concurrent_calls
    return (
        f"the run has {needs} if each of its {number} rollouts makes gateway.max_concurrent_calls={most} calls at once, and this {have}: "
        f"calls wait for one another then, and fail if that takes too long; {way_out}, or write gateway.max_concurrent_calls={calls}."
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
    lower = f"gateway.max_connections={with_less}" if with_less >= rollouts and gateway else _lower(config, hard - (needed - rollouts), key)
    raise ConfigError(
        f"the run may have {needed} descriptors open ({', '.join(parts)}), and this process may have {hard}",
        rule="each request and each connection is a descriptor; the hard limit of RLIMIT_NOFILE is the most that a run can take",
        way_out=f"raise the limit to {needed} or more (LimitNOFILE of a service, ulimit nofile={needed} of docker, "
        f"/etc/security/limits.conf){lower and f', or write {lower}'}.",
    )


def _hard_limit() -> int | None:
    """Of descriptors; None if there is none."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def _descriptors(config: RunConfig) -> int:
    """Most that the controller, the process with the most of them, has open while each rollout asks one thing at a time."""
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
        f"{rollouts} rollouts in flight need {-(-rollouts // targets)} connections to {what}, and this machine has {ports} ports for them",
        rule="connections to one address have a source port each, of net.ipv4.ip_local_port_range",
        way_out=f"widen it (sysctl -w net.ipv4.ip_local_port_range='1024 65535' gives 64512){lower and f', or write {lower}'}.",
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
