"""Resolve each `auto` and plan the memory of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.config.weight_sync import choose_transport
from asyncrl.launch.device_selection import NO_DEVICE
from asyncrl.launch.devices import place, vllm_sizes
from asyncrl.launch.engine_python import find_python
from asyncrl.launch.nodes import Node
from asyncrl.launch.plan import OWN_BYTES, Plan, lay_out, make_plan, size_text

RULE = "`asyncrl check` prints the memory of each process"
WAY_OUT = (
    "lower trainer.micro_batch_tokens or rollout.slots, set trainer.gradient_checkpointing=true or "
    "trainer.lora={rank: 16}, change placement, or take a smaller model."
)
RESIDENT_FACTOR = 1.1
"""Safety factor for resident sides of `placement.share: auto`."""
TRAINER_FACTOR = 1.25
"""Safety factor alongside a paged KV cache."""


def resolve_auto(
    config: RunConfig, nodes: Sequence[Node], *, begun: str | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the config without `auto` in model.dtype and weight_sync.transport, and messages. Raises
    ConfigError.
    """
    placement = place(config, nodes)
    messages = list[str]()
    if config.model.dtype == "auto":
        used = [*placement.trainer, *placement.engine_devices]
        is_fast = all(nodes[one.node].machine.has_bfloat16 for one in used if one.name == "cpu")
        dtype = begun if begun not in (None, "auto") else "bfloat16" if is_fast else "float32"
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        messages.append(f"model.dtype: auto is {dtype}")
    if config.weight_sync.transport == "auto":
        transport, why = choose_transport(
            config,
            *placement.names,
            is_turns=placement.mode == "colocated",
            num_nodes=placement.num_nodes,
        )
        sync = config.weight_sync.model_copy(update={"transport": transport})
        config = config.model_copy(update={"weight_sync": sync})
        messages.append(f"weight_sync.transport: auto is {transport}: {why}")
    return config, tuple(messages)


def plan_run(config: RunConfig, nodes: Sequence[Node]) -> tuple[Plan, tuple[str, ...]]:
    plan, share = _with_resident_sides(make_plan(config, nodes), config)
    messages = [share] if share else []
    device = plan.placement.engines[0][0].name
    if config.rollout.deterministic == "auto" and device != NO_DEVICE:
        is_on = config.is_deterministic(device, has_experts=plan.shape.has_experts)
        messages.append(f"rollout.deterministic: auto is {str(is_on).lower()}")
    return plan, tuple(messages)


def _with_resident_sides(plan: Plan, config: RunConfig) -> tuple[Plan, str]:
    """Keep both colocated sides in memory if `placement.share: auto` finds space."""
    placement = plan.placement
    share = config.placement.share
    if placement.mode == "apart" or placement.resident:
        return plan, f"placement.share={share}: both sides stay" if placement.memory_fraction else ""
    resident = replace(placement, resident=True)
    found = replace(plan, placement=resident, processes=lay_out(config, plan.shape, resident))
    needs = _fractions(found) if plan.shape.num_parameters else None
    if share is None or vllm_sizes(config) or needs is None or RESIDENT_FACTOR * sum(needs) > 1:
        return plan, f"placement.share={share or 'none'}: each side moves out for the other's turn"
    if not placement.is_on_cuda:
        return found, "placement.share=auto: both sides stay"
    trainer, engines = needs
    half = (1 + engines - trainer) / 2
    fraction = round(max(half, 1 - TRAINER_FACTOR * trainer) if config.rollout.facts.pages_kv else half, 3)
    found = replace(found, placement=replace(resident, memory_fraction=fraction))
    return found, f"placement.share=auto: both sides stay, engines with {fraction} of each device"


def _fractions(plan: Plan) -> tuple[float, float] | None:
    """Return the largest device fractions of (other memory, engines); None: unknown."""
    trainer_part = engine_part = 0.0
    for device in map(plan.placement.label, plan.placement.trainer):
        free, total = plan.memory[device]
        if free is None or total is None:
            return None
        here = [one for one in plan.processes if one.device == device and one.memory.total]
        engines = sum(one.memory.total + OWN_BYTES for one in here if one.side == "engine")
        others = sum(one.memory.total + OWN_BYTES for one in here if one.side != "engine")
        trainer_part = max(trainer_part, (total - free + others) / total)
        engine_part = max(engine_part, engines / total)
    return trainer_part, engine_part


def refuse_over_capacity(plan: Plan, config: RunConfig) -> None:
    """Raises ConfigError."""
    placement = plan.placement
    started = [*(placement.engine_devices if config.rollout.urls is None else ()), placement.evaluation]
    starts_here = any(device is not None and device.node == 0 for device in started)
    if config.rollout.facts.package and placement.nodes[0].machine.is_here and starts_here:
        find_python(config.rollout)
    for device, (free, _) in plan.memory.items():
        if free is not None and (needed := plan.needed_bytes(device)) > free:
            held = [one for one in plan.processes if one.device == device and one.memory.total]
            names = ", ".join(f"{one.name} {size_text(one.memory.total)}" for one in held)
            what = f"{device} needs {size_text(needed)} and has {size_text(free)} free ({names})"
            raise ConfigError(what, rule=RULE, way_out=WAY_OUT)
    fraction = placement.memory_fraction
    needs = _fractions(plan)
    if fraction is not None and needs is not None and not needs[1] <= fraction <= 1 - needs[0]:
        what = f"engines need {needs[1]:.2f} of a device, and the trainer {needs[0]:.2f}"
        raise ConfigError(f"placement.share={fraction:g}: {what}", rule=RULE, way_out=WAY_OUT)
