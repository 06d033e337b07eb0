"""Refuses a config that needs more connections at once than this machine gives one process. Knows the limits; opens nothing."""

from __future__ import annotations

import resource
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError

OTHERS = 256
"""Descriptors that the controller has besides: files, logs, pipes, heartbeats, pushes."""
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def refuse_too_many_connections(config: RunConfig) -> None:
    """Raise ConfigError if descriptors (the hard limit: the run takes all of it) or source ports cannot be enough."""
    _refuse_descriptors(config)
    _refuse_ports(config)


def _refuse_descriptors(config: RunConfig) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rollouts, key = _rollouts(config)
    evaluating = 0 if config.eval is None else config.eval.slots
    gateway = config.gateway.max_connections if config.generator.is_harness else 0
    needed = rollouts + evaluating + gateway + OTHERS
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return
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


def _refuse_ports(config: RunConfig) -> None:
    ports, (rollouts, key) = num_ports(), _rollouts(config)
    targets = 1 if config.generator.is_harness else config.rollout.num_engines  # all workers call the one gateway
    if ports is None or rollouts <= ports * targets:
        return
    what = "the gateway" if config.generator.is_harness else "each engine"
    lower = _lower(config, ports * targets, key)
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
