"""Refuses a plan that cannot fit, with the numbers and a setting that does: memory by device, then
descriptors and ports. Starts nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from asyncrl.config import LoraConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.placement.devices import place
from asyncrl.placement.plan import Phase, Plan, lay_out, size_text

OTHERS = 256
"""Descriptors that the controller has besides: files, logs, pipes, heartbeats, pushes."""
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def refuse_what_cannot_fit(plan: Plan, config: RunConfig) -> None:
    """Raise ConfigError if a device needs more memory in some phase than it has free, or the run more
    connections than it can have. A device whose free memory is not known is left to those that load there.
    """
    worst = _worst(plan)
    if worst is not None:
        lacking, device, phase = worst
        free, mode = plan.free_bytes[device] or 0, plan.placement.mode
        held = [(p.name, p.held_bytes(phase, mode)) for p in plan.processes if p.device == device]
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in held if size)
        raise ConfigError(
            f"{'the run' if mode == 'apart' else phase} needs {size_text(free + lacking)} of memory on "
            f"{device} ({parts}), and {size_text(free)} are free",
            rule="weights, gradients, optimizer state, activations and KV caches must fit, in each phase",
            way_out=_way_out(plan, config),
        )
    refuse_too_many_connections(config)


def _worst(plan: Plan) -> tuple[int, str, Phase] | None:
    """(bytes lacking, device, phase) where most is lacking; None if everything fits."""
    lacking = [
        (needed - free, device, phase)
        for device, free in plan.free_bytes.items()
        if free is not None
        for phase, needed in plan.peak_bytes(device).items()
        if needed > free
    ]
    return max(lacking, default=None)


def _way_out(plan: Plan, config: RunConfig) -> str:
    """The first setting that fits."""
    for words, changed in _smaller(config):
        try:
            placement = place(changed, plan.num_cuda)
        except ConfigError:
            continue
        processes = lay_out(changed, plan.shape, placement)
        if _worst(replace(plan, processes=processes, placement=placement)) is None:
            return f"{words} fits."
    return "take a smaller model, or a machine with more memory."


def _smaller(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Settings that need less memory, what costs least first; in words, and as the config would be."""
    slots, tokens = config.rollout.slots, config.trainer.micro_batch_tokens
    while (slots := slots // 2) > 0:
        yield f"rollout.slots={slots}", _changed(config, "rollout", slots=slots)
    checkpointing = _changed(config, "trainer", gradient_checkpointing=True)
    yield "trainer.gradient_checkpointing=true", checkpointing
    while (tokens := tokens // 2) >= config.rollout.max_prompt_tokens + config.rollout.max_tokens:
        yield f"trainer.micro_batch_tokens={tokens}", _changed(config, "trainer", micro_batch_tokens=tokens)
    in_turns = _changed(config, "placement", rollout="trainer")
    in_turns = _changed(in_turns, "buffer", max_staleness=0, look_ahead="auto")
    yield "placement.rollout=trainer with buffer.max_staleness=0", in_turns
    yield "trainer.lora={rank: 16}", _changed(config, "trainer", lora=LoraConfig(rank=16))


def _changed(config: RunConfig, section: str, **values: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def refuse_too_many_connections(config: RunConfig) -> None:
    """Raise ConfigError if descriptors (the hard limit: the run takes all of it) or source ports cannot be
    enough while each rollout makes one call.
    """
    is_agent, engines = config.generator.is_harness, config.rollout.num_engines
    crowd = config.gateway.max_connections if is_agent else 0
    evaluating = 0 if config.eval is None else config.eval.slots
    rollouts, key, each = config.rollout.slots * engines, "rollout.slots", engines
    if is_agent and config.generator.concurrency != "auto":
        rollouts, key, each = config.generator.concurrency, "generator.concurrency", 1
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = rollouts + evaluating + crowd + OTHERS
    if hard != resource.RLIM_INFINITY and needed > hard:
        left = max(1, (hard - needed + rollouts) // each)
        lower = f"{key}={left}"
        if crowd and hard - needed + crowd >= rollouts:
            lower = f"gateway.max_connections={hard - needed + crowd}"
        raise ConfigError(
            f"the run needs {needed} descriptors ({rollouts} for rollouts, {evaluating} for evaluations, "
            f"{crowd} for the gateway, {OTHERS} for everything else), and this process may have {hard}",
            rule="each connection is a descriptor; a run can take the hard limit of RLIMIT_NOFILE",
            way_out=f"raise the limit (LimitNOFILE of a service, ulimit nofile of docker), or write {lower}.",
        )
    if not PORT_RANGE.is_file():
        return
    first, last = map(int, PORT_RANGE.read_text(encoding="ascii").split())
    ports = last - first + 1
    others = evaluating if config.evaluates_agent else 0
    to_gateway = rollouts + others if is_agent else 0
    if max(to_gateway, -(-rollouts // engines)) > ports:
        most = (ports - others if is_agent else ports * engines) // each
        raise ConfigError(
            f"the run needs {to_gateway} connections to the gateway and {-(-rollouts // engines)} to each "
            f"engine, and this machine has {ports} ports for each of them",
            rule="connections to one address have a source port each, of net.ipv4.ip_local_port_range",
            way_out=f"widen it (sysctl -w net.ipv4.ip_local_port_range='1024 65535'), or write {key}={most}.",
        )
