"""The plan as text: what `asyncrl check` prints. Knows a plan; computes nothing new."""

from __future__ import annotations

import sys

from asyncrl.config import RunConfig
from asyncrl.placement.memory import PHASES, ProcessPlan, peak_bytes, size_text
from asyncrl.placement.plan import Plan
from asyncrl.placement.ways import transport_text, verified_text

COLUMNS = ("weights", "copies", "gradients", "optimizer", "activations", "kv")


def plan_text(plan: Plan, config: RunConfig) -> str:
    """Processes with their bytes, mode and transport with the reason, and what each device needs of what it has free."""
    size = "not on disk yet" if plan.num_parameters is None else f"{plan.num_parameters:,} parameters"
    python = f" {'python':<6}" if plan.vllm_python is not None else ""
    header = f"{'process':<12}{python} {'device':<7} {'threads':>7} " + " ".join(f"{column:>11}" for column in COLUMNS) + "  what"
    rows = [_row(process, has_python=plan.vllm_python is not None) for process in plan.processes]
    lines = [f"model: {size}", "", header, *rows, ""]
    if plan.vllm_python is not None:
        lines.append(f"python: ours is {sys.executable}, vLLM's is {plan.vllm_python}")
    lines += [f"mode: {transport_text(config, plan.placement)}", f"each push: {verified_text(config)}", *_device_lines(plan)]
    if idle := [device for device in plan.free_bytes if device != "cpu" and device not in {p.device for p in plan.processes}]:
        lines.append(f"not used: {', '.join(idle)}")
    return "\n".join(lines)


def _row(process: ProcessPlan, *, has_python: bool) -> str:
    memory = process.memory
    sizes = ["?" if memory is None else size_text(size) if (size := getattr(memory, column)) else "-" for column in COLUMNS]
    is_process = process.side not in ("staging", "host") and process.threads
    python = f" {('vllm' if process.has_vllm_python else 'ours') if is_process else '-':<6}" if has_python else ""
    return (
        f"{process.name:<12}{python} {process.device:<7} {process.threads or '-':>7} "
        + " ".join(f"{size:>11}" for size in sizes)
        + f"  {process.note}"
    )


def _device_lines(plan: Plan) -> list[str]:
    if plan.shape is None:
        return [f"memory: cannot be added up before the model is there; {size_text(plan.free_bytes['cpu'])} free"]
    lines = []
    for device, free in plan.free_bytes.items():
        needs = peak_bytes(plan.processes, device, plan.placement.mode)
        peak = max(needs.values())
        if device != "cpu" and not peak:
            continue
        by_phase = ", ".join(f"{phase} {size_text(needs[phase])}" for phase in PHASES)
        in_turns = f", the most of {by_phase}" if len(set(needs.values())) > 1 else ""
        has = "free is not known (no nvidia-smi)" if free is None else f"{size_text(free)} free"
        vllm = ", a vLLM server 2.4 GiB" if plan.vllm_python is not None else ""
        beside = f", before the Python processes (about 0.5 GiB each{vllm})" if device == "cpu" else ""
        lines.append(f"memory of {device}: {size_text(peak)}{in_turns}; {has}{beside}")
    return lines
