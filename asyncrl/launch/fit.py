"""Fit a config to its machines: settle each auto, refuse what cannot fit, find the Python of the engines.
Starts nothing.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import asyncrl
from asyncrl.base.errors import ConfigError, install_extra
from asyncrl.config import RolloutConfig, RunConfig
from asyncrl.config.weight_sync import choose_transport
from asyncrl.launch.choice import NO_DEVICE
from asyncrl.launch.devices import SIZES, place
from asyncrl.launch.machine import Machine
from asyncrl.launch.nodes import Node
from asyncrl.launch.plan import OWN_BYTES, Plan, lay_out, nodes_of, size_text

CHECKOUT = Path(asyncrl.__file__).resolve().parent.parent
ASK = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
ASK_TIMEOUT_S = 30.0
RULE = "`asyncrl check` prints the memory of each process"
WAY_OUT = (
    "lower trainer.micro_batch_tokens or rollout.slots, set trainer.gradient_checkpointing=true or "
    "trainer.lora={rank: 16}, change placement, or take a smaller model."
)
ROOM = 1.1
"""Factor on the plan before both sides stay in memory by `placement.share: auto`."""
TRAINER_ROOM = 1.25
"""Factor on the trainer's plan if engines with a paged KV cache take the rest of its device."""


def settle(
    config: RunConfig, where: Machine | Sequence[Node] | None = None, *, begun: str | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the config with values for `auto` of `model.dtype` and `weight_sync.transport` on a machine
    (None: this one) or nodes, and messages. Raises ConfigError for an impossible placement.

    `begun`: the dtype of a resumed run. Its transport may change: each that auto can be sends the same bits.
    """
    nodes = nodes_of(where)
    placement, messages = place(config, nodes), list[str]()
    if config.model.dtype == "auto":
        used = [*placement.ranks, *placement.engine_devices]
        is_fast = all(nodes[one.node].machine.has_bfloat16 for one in used if one.name == "cpu")
        dtype = begun if begun not in (None, "auto") else "bfloat16" if is_fast else "float32"
        config = _changed(config, "model", dtype=dtype)
        messages.append(f"model.dtype: auto is {dtype}")
    if config.weight_sync.transport == "auto":
        engines = [name for devices in placement.engines for name in devices]
        is_turns, num_nodes = placement.mode == "colocated", placement.num_nodes
        transport, why = choose_transport(
            config, placement.trainer, engines, is_turns=is_turns, num_nodes=num_nodes
        )
        config = _changed(config, "weight_sync", transport=transport)
        messages.append(f"weight_sync.transport: auto is {transport}: {why}")
    return config, tuple(messages)


def _changed(config: RunConfig, section: str, **values: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def settle_share(plan: Plan, config: RunConfig) -> tuple[Plan, str]:
    """Return a colocated plan in which both sides stay in memory if `placement.share: auto` finds that they
    fit, on CUDA with the engines' fraction; and a message ("" if both sides have their own devices).
    """
    placement, given = plan.placement, config.placement.share
    if placement.mode == "apart" or placement.stays:
        return plan, "" if placement.share is None else f"placement.share={placement.share}: both sides stay"
    staying = replace(placement, stays=True)
    found = replace(plan, placement=staying, processes=lay_out(config, plan.shape, staying))
    parts = _parts(found) if plan.shape.num_parameters else None
    is_sized = any(name.lstrip("-").replace("-", "_") in SIZES for name in config.rollout.vllm)
    if given is None or is_sized or parts is None or ROOM * sum(parts) > 1:
        return plan, f"placement.share={given or 'none'}: each side moves out for the other's turn"
    if placement.is_on_cuda:
        trainer, engines = parts
        half = (1 + engines - trainer) / 2
        share = max(half, 1 - TRAINER_ROOM * trainer) if config.rollout.facts.pages_kv else half
        found = replace(found, placement=replace(staying, share=round(share, 3)))
    fraction = f", engines with {found.placement.share} of each device" if placement.is_on_cuda else ""
    return found, f"placement.share=auto: both sides stay{fraction}"


def _parts(plan: Plan) -> tuple[float, float] | None:
    """Return the largest fractions of the trainer's devices that the engines' and all other memory needs.
    None: not known.
    """
    found = []
    for device in map(plan.placement.hosts.label, plan.placement.ranks):
        free, total = plan.memory[device]
        if free is None or total is None:
            return None
        here = [one for one in plan.processes if one.device == device and one.memory.total]
        engines = sum(one.memory.total + OWN_BYTES for one in here if one.side == "engine")
        others = sum(one.memory.total + OWN_BYTES for one in here if one.side != "engine")
        found.append(((total - free + others) / total, engines / total))
    return max(trainer for trainer, _ in found), max(engines for _, engines in found)


def refuse_what_cannot_fit(plan: Plan, config: RunConfig) -> None:
    """Raise ConfigError if a device has less free memory than the plan needs, a side does not fit its part of
    a shared device, or the engines' package is missing. Unknown memory refuses nothing.
    """
    rollout, placement, share = config.rollout, plan.placement, plan.placement.share
    starts_on = {*placement.engine_nodes} if rollout.urls is None else set[int]()
    starts_on |= {placement.beside_node} if placement.evaluation is not None else set()
    if rollout.facts.package and placement.nodes[0].machine.is_here and 0 in starts_on:
        find_python(rollout)
    for device, (free, _) in plan.memory.items():
        if free is not None and (needed := plan.needed_bytes(device)) > free:
            held = [one for one in plan.processes if one.device == device and one.memory.total]
            names = ", ".join(f"{one.name} {size_text(one.memory.total)}" for one in held)
            what = f"{device} needs {size_text(needed)} and has {size_text(free)} free"
            raise ConfigError(f"{what} ({names})", rule=RULE, way_out=WAY_OUT)
    parts = _parts(plan)
    if share is not None and parts is not None and not parts[1] <= share <= 1 - parts[0]:
        needs = f"engines need {parts[1]:.2f} of a device, and the trainer {parts[0]:.2f}"
        raise ConfigError(f"placement.share={share:g}: {needs}", rule=RULE, way_out=WAY_OUT)


def start_words(plan: Plan, config: RunConfig) -> list[str]:
    """Return what `auto` of rollout.deterministic is, as messages."""
    device = plan.placement.rollout[0]
    if config.rollout.deterministic != "auto" or device == NO_DEVICE:
        return []
    is_on = config.is_deterministic(device, has_experts=plan.shape.has_experts)
    return [f"rollout.deterministic: auto is {str(is_on).lower()}"]


def find_python(rollout: RolloutConfig) -> Path:
    """Return the Python that has the engine's package: rollout.vllm_python, else this one, else the Python of
    `make setup-vllm` in .venv-vllm or $VENV_VLLM. Raises ConfigError if all lack the package.
    """
    package = rollout.facts.package or ""
    given = getattr(rollout, f"{package}_python")
    named = Path(shutil.which(Path(given).expanduser()) or given)
    folder = Path(os.environ.get(f"VENV_{package.upper()}") or CHECKOUT / f".venv-{package}")
    pythons = [Path(sys.executable), folder / "bin" / "python"] if given == "auto" else [named]
    for python in pythons:
        if version_in(python.absolute(), package) is not None:
            return python.absolute()  # not resolved: a venv's python is a link
    raise ConfigError(
        f"rollout.{package}_python={given}: {' and '.join(map(str, pythons))} cannot import {package}",
        way_out=f"{install_extra(package)} (CUDA), or `make setup-{package}` (CPU); or name one.",
    )


def find_version(rollout: RolloutConfig) -> dict[str, str]:
    """Return the engine's package with its version in the engine's Python. Raises ConfigError."""
    package = rollout.facts.package or ""
    return {package: version_in(find_python(rollout), package) or ""}


@functools.cache
def version_in(python: Path, package: str) -> str | None:
    """Return the version of a package in a Python, without importing it; None: it lacks the package."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        asking = [str(python), "-c", ASK, package]
        done = subprocess.run(asking, env=environ, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
