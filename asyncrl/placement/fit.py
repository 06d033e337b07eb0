"""Whether a run fits its machines: the type of its weights and their way, the Python of vLLM's servers, and
its plan, as text. It is refused where memory of a device or descriptors cannot be enough, with a setting that
does. Starts nothing.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import asyncrl
from asyncrl.config import LoraConfig, RolloutConfig, RunConfig
from asyncrl.config.weight_sync import choose_transport
from asyncrl.errors import ConfigError, install_extra
from asyncrl.placement.devices import NO_DEVICE, SIZES, Placement, place
from asyncrl.placement.machine import Machine
from asyncrl.placement.nodes import Node
from asyncrl.placement.plan import OWN_BYTES, Plan, lay_out, nodes_of, vllm_part
from asyncrl.placement.process_memory import Phase, ProcessPlan, size_text

MOVING = "each side moves out for the other's turn"
OTHERS = 256
"""Descriptors that the controller has besides: files, logs, pipes, heartbeats, pushes."""


def settle(
    config: RunConfig, where: Machine | Sequence[Node] | None = None, *, begun: str | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with what a machine (None: this one), or several nodes, have in place of the autos of
    `model.dtype` and `weight_sync.transport`, and lines for people. Raises ConfigError for a placement that
    cannot be.

    `begun`: the type of the resumed run, which auto then stands for. The transport is chosen anew: engines
    get the same bits by each that auto can be.
    """
    nodes = nodes_of(where)
    placement = place(config, nodes)
    config, dtype_words = _settle_dtype(config, placement, nodes, begun)
    words = ""
    if config.weight_sync.transport == "auto":
        engines = [name for devices in placement.engines for name in devices]
        how: Any = {"is_turns": placement.mode == "colocated", "num_nodes": placement.num_nodes}
        transport, why = choose_transport(config, placement.trainer, engines, **how)
        config = _changed(config, "weight_sync", transport=transport)
        words = f"weight_sync.transport: auto is {transport}: {why}"
    return config, tuple(filter(None, (dtype_words, words)))


def _settle_dtype(
    config: RunConfig, placement: Placement, nodes: Sequence[Node], begun: str | None
) -> tuple[RunConfig, str]:
    used = [*placement.ranks, *placement.engine_devices]
    cpus = [nodes[device.node].machine for device in used if device.name == "cpu"]
    is_on_cpu, is_here = bool(cpus), nodes[0].machine.is_here
    is_slow = not all(machine.has_bfloat16 for machine in cpus)
    if config.model.dtype != "auto":
        slow = (
            "model.dtype=bfloat16, and this CPU has no instructions for it: its steps take 8.6 times as long "
            "as in float32, measured; model.dtype=float32 (or auto) is faster here"
        )
        return config, slow if is_slow and is_here and config.model.dtype == "bfloat16" else ""
    if begun not in (None, "auto"):
        dtype, why = begun, "as the run began"
    elif is_slow:
        dtype, why = "float32", "this CPU has no bfloat16 instructions (avx512_bf16, amx_bf16)"
        why = why if is_here else "whether that CPU has bfloat16 instructions is not known"
    else:
        dtype = "bfloat16"
        why = "this CPU has instructions for it" if is_on_cpu else "trainer and engines are on CUDA"
    return _changed(config, "model", dtype=dtype), f"model.dtype: auto is {dtype}: {why}"


ROOM = 1.1
"""By how much more than planned there must be room for, where no one asked for both sides to stay."""


def settle_share(plan: Plan, config: RunConfig) -> tuple[Plan, str]:
    """In turns, the plan with both sides where they stay for `placement.share: auto` if they fit beside each
    other, with a fraction for the engines on CUDA; and what that is and why, in words ("" = nothing).
    """
    placement, share = plan.placement, config.placement.share
    if placement.share is not None:
        when = "in turns" if placement.mode == "colocated" else "and work at once"
        where = ", ".join(placement.engine_labels)
        return plan, f"placement.share={share}: both sides stay on {where}, {when}"
    if placement.mode == "apart":
        return plan, ""
    if share is None:
        return plan, f"placement.share=none: {MOVING}"
    stays = replace(placement, stays=True)
    found = replace(plan, processes=lay_out(config, plan.shape, stays, plan.nodes), placement=stays)
    bounds = found.share_bounds(ROOM)
    given = [name for name in config.rollout.vllm if name.lstrip("-").replace("-", "_") in SIZES]
    if not plan.shape.num_parameters:
        why = "the size of the model is not known before it is on disk"
    elif given:
        why = f"rollout.vllm.{given[0]} says what the engines take while the trainer has none"
    elif bounds is None:
        why = f"what {placement.trainer_labels[0]} has is not known (no nvidia-smi)"
    elif bounds[0] > bounds[1]:
        why = f"beside each other they do not fit {', '.join(placement.trainer_labels)}"
    else:
        fraction = found.auto_share(*bounds) if placement.is_on_cuda else None
        part = "" if fraction is None else f", the engines with {fraction} of it"
        where = ", ".join(placement.trainer_labels)
        found = replace(found, placement=replace(stays, share=fraction))
        return found, f"placement.share: auto: both sides stay on {where}{part}: they fit"
    return plan, f"placement.share: auto: {MOVING}: {why}"


def start_words(plan: Plan, config: RunConfig) -> list[str]:
    """What a run promises of its tokens, and how many sequences have room at once, as lines for people."""
    facts, asked, placement = config.rollout.facts, config.rollout.deterministic, plan.placement
    if not facts.has_model:
        return []
    device = placement.rollout[0]
    has_experts = plan.shape.routed > 0
    is_on = device != NO_DEVICE and config.is_deterministic(device, has_experts=has_experts)
    words = f"rollout.deterministic: {'auto is ' if asked == 'auto' else ''}{str(is_on).lower()}: "
    if device == NO_DEVICE:
        words += "how rollout.urls were started says what a request's tokens depend on"
    elif is_on:
        words += "a request's tokens depend on its prompt, seed and weights alone, "
        checked = "as the engine checks at its start"
        words += (
            checked if facts.exact_on == "cpu" else "by vLLM's batch-invariant kernels, which may be slower"
        )
    else:
        words += "a request's tokens may change with what runs beside it"
    return [words, *filter(None, (paged_words(plan, process, config) for process in plan.processes))]


def paged_words(plan: Plan, process: ProcessPlan, config: RunConfig) -> str:
    """How much of its slots a paged KV cache has room for, in what the plan leaves of the device; "" where
    that is all of them, or the cache is not paged.
    """
    free, one_kv = plan.free_bytes.get(process.device), process.memory.kv
    if not process.all_kv or not one_kv or free is None:
        return ""
    num_paged = sum(1 for other in plan.processes if other.device == process.device and other.all_kv)
    left, total = free - plan.peak_bytes(process.device)["generation"], plan.total_bytes(process.device)
    part = vllm_part(config, process)
    if plan.placement.share is None and total is not None and part is not None:
        left = min(left, num_paged * (int(part * total) - process.memory.total - OWN_BYTES))
    elif plan.placement.share is not None and total is not None:
        engines = (one for one in plan.processes if one.side == "engine" and one.device == process.device)
        held = sum(engine.memory.total + OWN_BYTES for engine in engines)
        left = min(left, int(plan.placement.share * total) - held)
    fitting, slots = 1 + max(0, left) // (one_kv * num_paged), process.all_kv // one_kv
    if fitting >= slots:
        return ""
    return (
        f"{process.name}: about {fitting} of {slots} sequences of {config.rollout.max_length} tokens have "
        f"room at once in what is left of {process.device} (all of them: {size_text(process.all_kv)}); more "
        "are shorter or wait, which costs throughput and is no error"
    )


def refuse_what_cannot_fit(plan: Plan, config: RunConfig) -> None:
    """Raise ConfigError if a device needs more memory in some phase than it has free, the run more
    descriptors than it can have, or a vLLM that is not there. A device whose free memory is not known is left
    to those that load there.
    """
    if starts_here(plan):
        needed_python(plan.placement, config)
    worst = _worst(plan)
    if worst is not None:
        lacking, device, phase = worst
        free, mode = plan.free_bytes[device] or 0, plan.holding
        held = [(p.name, p.held_bytes(phase, mode)) for p in plan.processes if p.device == device]
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in held if size)
        what = "the run" if mode == "apart" and phase != "start" else phase
        raise ConfigError(
            f"{what} needs {size_text(free + lacking)} of memory on {device} ({parts}), and "
            f"{size_text(free)} are free",
            way_out=_way_out(plan, config),
        )
    if plan.placement.share is None:
        _refuse_vllm_parts(plan, config)
    elif (bounds := plan.share_bounds()) is not None:
        _refuse_share(plan, config, *bounds)
    if plan.is_here:
        refuse_too_many_connections(config)


def _refuse_vllm_parts(plan: Plan, config: RunConfig) -> None:
    """Raise ConfigError if a vLLM does not find the part of a device that it asks for at its start, or needs
    more than that.
    """
    for device, free in plan.free_bytes.items():
        here = [process for process in plan.processes if process.device == device]
        parts = {one: part for one in here if (part := vllm_part(config, one)) is not None}
        total = plan.total_bytes(device)
        if not parts or free is None or total is None:
            continue
        # In turns the trainer comes when they sleep.
        stays = plan.holding == "apart"
        others = [one for one in here if one not in parts and (stays or one.side == "eval")]
        left = free - sum(one.held_bytes("generation", plan.holding) + OWN_BYTES for one in others)
        most = math.floor(100 * max(left, 0) / total / len(parts)) / 100
        names, part = " and ".join(one.name for one in parts), max(parts.values())
        rule = "a vLLM takes rollout.vllm.gpu-memory-utilization of its device at its start, for all it needs"
        if sum(parts.values()) * total > left:
            free_words = f"{max(left, 0) / total:.2f} of it is free"
            what = f"{names} would take {sum(parts.values()):g} of {device}, and {free_words}"
            way_out = f"write rollout.vllm={{gpu-memory-utilization: {most:g}}}, or give each its own device."
            raise ConfigError(what, rule=rule, way_out=way_out)
        needed = max(one.memory.total for one in parts) + OWN_BYTES
        if needed > part * total:
            has = f"{size_text(int(part * total))} of {device}, {part:g} of it"
            what = f"{names} would have {has}, and {size_text(needed)} are needed"
            way_out = f"write up to {most:g} of it, or give it more devices (rollout.tensor_parallel)."
            raise ConfigError(what, rule=rule, way_out=way_out)


def _refuse_share(plan: Plan, config: RunConfig, least: float, most: float) -> None:
    """Raise ConfigError if engines or trainer do not fit their part of a device."""
    share, where = plan.placement.share or 0.0, ", ".join(plan.placement.engine_labels)
    if least <= share <= most:
        return
    least, most = math.ceil(least * 100) / 100, math.floor(most * 100) / 100
    raise ConfigError(
        f"placement.share={share} of {where}: the engines need {least:g}, and the trainer leaves {most:g}",
        rule=f"both count with {size_text(OWN_BYTES)} of CUDA's own for each process",
        way_out=f"set placement.share={(least + most) / 2:.2f}." if least <= most else _way_out(plan, config),
    )


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
            placement = place(changed, plan.nodes)
        except ConfigError:
            continue
        processes = lay_out(changed, plan.shape, placement, plan.nodes)
        tried = replace(plan, processes=processes, placement=placement)
        least, most = tried.share_bounds() or (0.0, 1.0)
        if _worst(tried) is None and (placement.share is None or least <= placement.share <= most):
            return f"{words} fits."
    return "take a smaller model, or a machine with more memory."


def _smaller(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Settings that need less memory, what costs least first; in words, and as the config would be."""
    slots, tokens, lora = config.rollout.slots, config.trainer.micro_batch_tokens, config.trainer.lora
    if lora is not None and config.trainer.keeps_merged:
        lora = lora.model_copy(update={"merge": "pass"})
        yield "trainer.lora.merge=pass", _changed(config, "trainer", lora=lora)
    while (slots := slots // 2) > 0:
        yield f"rollout.slots={slots}", _changed(config, "rollout", slots=slots)
    if config.weight_sync.facts.is_one_kept:
        yield "weight_sync.transport=shm", _changed(config, "weight_sync", transport="shm")
    yield "trainer.gradient_checkpointing=true", _changed(config, "trainer", gradient_checkpointing=True)
    while (tokens := tokens // 2) >= config.rollout.max_length:
        yield f"trainer.micro_batch_tokens={tokens}", _changed(config, "trainer", micro_batch_tokens=tokens)
    in_turns = _changed(config, "placement", rollout="trainer", share="auto")
    in_turns = _changed(in_turns, "buffer", max_staleness=0, look_ahead="auto")
    words = "placement.rollout=trainer with buffer.max_staleness=0"
    words += " with placement.share=auto" if isinstance(config.placement.share, float) else ""
    if config.weight_sync.facts.is_one_kept:
        in_turns = _changed(in_turns, "weight_sync", transport="shm")
        words += " and weight_sync.transport=shm"
    yield words, in_turns
    if config.checkpoint.keep_every is None and not config.checkpoint.keep_best:
        yield "checkpoint.every=none", _changed(config, "checkpoint", every=None)
    for words, adapters in (("", LoraConfig(rank=16)), (", merge: pass", LoraConfig(rank=16, merge="pass"))):
        yield f"trainer.lora={{rank: 16{words}}}", _changed(config, "trainer", lora=adapters)


def _changed(config: RunConfig, section: str, **values: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def refuse_too_many_connections(config: RunConfig) -> None:
    """Raise ConfigError if descriptors (the hard limit: the run takes all of it) cannot be enough while each
    rollout makes one call.
    """
    is_agent = config.generator.is_harness
    crowd = config.gateway.max_connections if is_agent else 0
    evaluating = config.eval_slots
    key, each, rollouts = "rollout.slots", config.rollout.max_engines, config.rollout.slots
    if is_agent and config.generator.concurrency != "auto":
        key, each, rollouts = "generator.concurrency", 1, config.generator.concurrency
    rollouts *= each
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lacking = rollouts + evaluating + crowd + OTHERS - hard
    if hard == resource.RLIM_INFINITY or lacking <= 0:
        return
    lower = f"{key}={max(1, (rollouts - lacking) // each)}"
    if crowd - lacking >= rollouts:
        lower = f"gateway.max_connections={crowd - lacking}"
    raise ConfigError(
        f"the run needs {hard + lacking} descriptors ({rollouts} for rollouts, {evaluating} for evaluations, "
        f"{crowd} for the gateway, {OTHERS} for all else), and RLIMIT_NOFILE is {hard} at most",
        way_out=f"raise the limit (LimitNOFILE of a service, ulimit nofile of docker), or write {lower}.",
    )


# The Python of servers that have their own.

CHECKOUT = Path(asyncrl.__file__).resolve().parent.parent
ASK = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec(sys.argv[1]) is None:
    sys.exit(1)
try:
    print(importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    pass
"""
ASK_TIMEOUT_S = 30.0
PACKAGES = ("asyncrl", "asyncrl_servers")


def starts_here(plan: Plan) -> bool:
    """Whether an engine is to start on this machine."""
    return plan.is_here and any(one.node == 0 for one in plan.processes if one.side in ("engine", "eval"))


def needed_python(placement: Placement, config: RunConfig) -> Path | None:
    """Of the servers that the run starts, if they have their own. Raises ConfigError as find_python does."""
    starts_any = config.rollout.urls is None or placement.evaluation is not None
    return find_python(config.rollout) if config.rollout.facts.package and starts_any else None


def find_python(rollout: RolloutConfig) -> Path:
    """With the engine's package: rollout.vllm_python, say, else this Python, else the one of `make
    setup-vllm`, in .venv-vllm or $VENV_VLLM. Raises ConfigError if it has no such package.
    """
    package = rollout.facts.package or ""
    given = getattr(rollout, f"{package}_python")
    named = Path(shutil.which(Path(given).expanduser()) or given)
    folder = os.environ.get(f"VENV_{package.upper()}") or CHECKOUT / f".venv-{package}"
    own = Path(folder) / "bin" / "python"
    # not resolved: a venv's python is a link to one that does not have its packages
    pythons = [python.absolute() for python in ([Path(sys.executable), own] if given == "auto" else [named])]
    found = next((python for python in pythons if version_in(python, package) is not None), None)
    if found is None:
        raise ConfigError(
            f"rollout.{package}_python={given}: {' and '.join(map(str, pythons))} cannot import {package}",
            way_out=f"{install_extra(package)} (CUDA), or `make setup-{package}` (CPU); or name one.",
        )
    return found


def find_version(rollout: RolloutConfig) -> dict[str, str]:
    """The engine's package, and its version in the Python that has it. Raises ConfigError as find_python."""
    package = rollout.facts.package or ""
    return {package: version_in(find_python(rollout), package) or ""}


@functools.cache
def version_in(python: Path, package: str) -> str | None:
    """The version of a package in that Python, "" if it tells none; None: it lacks the package. Looks where
    it is, without importing it, which would take seconds.
    """
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        asking = [str(python), "-c", ASK, package]
        done = subprocess.run(asking, env=environ, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()


def import_folder(folder: Path) -> Path:
    """`folder` with links to our two packages and nothing else, for PYTHONPATH: another Python must not see
    our site-packages.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        link, target = folder / name, Path(str(files(name))).resolve()
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)  # of an installation that has moved since
            link.symlink_to(target)
    return folder
