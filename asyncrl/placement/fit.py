"""Refuses a plan that cannot fit, with the numbers and the nearest setting that does. Tries settings on paper; starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.config import LoraConfig, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.placement.connections import refuse_too_many_connections
from asyncrl.placement.devices import Mode, place
from asyncrl.placement.memory import Phase, ProcessPlan, peak_bytes, size_text
from asyncrl.placement.plan import Plan, lay_out

LORA = LoraConfig(rank=16)


def refuse_what_cannot_fit(plan: Plan, config: RunConfig) -> None:
    """Raise ConfigError if a device needs more memory in some phase than it has free, or the run more connections than it can have.

    What is not known is not refused: a CUDA device whose free memory nobody tells is checked by trainer and engines at their start.
    """
    _refuse_memory(plan, config)
    refuse_too_many_connections(config)


def _refuse_memory(plan: Plan, config: RunConfig) -> None:
    excess = _worst(plan.processes, plan.free_bytes, plan.placement.mode)
    if plan.shape is None or excess is None:
        return
    device, phase, needed, free = excess
    mode = plan.placement.mode
    held = [(process.name, process.held_bytes(phase, mode)) for process in plan.processes if process.device == device]
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in held if size)
    where = "" if device == "cpu" else f" on {device}"
    raise ConfigError(
        f"{'the run' if mode == 'apart' else phase} needs {size_text(needed)} of memory{where} ({parts}), and {size_text(free)} are free",
        rule="weights, gradients, optimizer state, activations and KV caches are added up before anything starts"
        + ("" if mode == "apart" else ", in turns for each phase by itself"),
        way_out=_way_out(plan, config),
    )


Excess = tuple[str, Phase, int, int]
"""Device, phase, bytes needed, bytes free."""


def _worst(processes: tuple[ProcessPlan, ...], free_bytes: Mapping[str, int | None], mode: Mode) -> Excess | None:
    """Where most is lacking, None if everything fits."""
    lacking: list[Excess] = []
    for device, free in free_bytes.items():
        if free is not None:
            lacking += [(device, phase, need, free) for phase, need in peak_bytes(processes, device, mode).items() if need > free]
    return max(lacking, key=lambda excess: excess[2] - excess[3], default=None)


def _way_out(plan: Plan, config: RunConfig) -> str:
    """The first of these that fits: fewer slots, what makes the activations smaller, turns on one device, adapters."""

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
        config.trainer.micro_batch_tokens, longest, lambda number: fits(_with_trainer(config, micro_batch_tokens=number))
    )  # fmt: skip
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
        update={"placement": placement, "buffer": config.buffer.model_copy(update={"max_staleness": 0, "look_ahead": "auto"})}
    )
