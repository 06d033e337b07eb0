"""The plan as text: what `asyncrl check` prints."""

from __future__ import annotations

import itertools
import sys
from dataclasses import astuple, fields

from asyncrl.config import RunConfig
from asyncrl.config.weight_sync import transport_words
from asyncrl.placement.choice import NodeDevice
from asyncrl.placement.devices import Placement, chunk_devices
from asyncrl.placement.fit import needed_python, start_words, starts_here
from asyncrl.placement.plan import EVAL_ENGINE, Plan
from asyncrl.placement.process_memory import Memory, size_text

NOT_HERE = (
    "not checked, as the machine is not here: its limit of descriptors, rollout.vllm_python, its driver, and "
    "what else uses its memory"
)


def plan_text(plan: Plan, config: RunConfig) -> str:
    """Processes with their bytes, node by node, how weights travel, and what each device needs of what it has
    free.
    """
    num = plan.shape.num_parameters
    model, revision = config.model.path, config.model.revision
    fetch = f"hf download {model} config.json{f' --revision {revision}' if revision else ''}"
    unknown = f"not on disk yet, so its memory is not known; `{fetch}` is enough for that"
    size = f"{num:,} parameters" if num else unknown
    if plan.shape.is_from_table:  # which leaves norms out
        about = f"about {num / 1e9:.2g} billion parameters"
        size = f"{about} (from the table of known models; config.json is not on disk)"
    lines = [f"model: {size}", ""]
    lines += _table(plan)
    lines += ["", f"mode: {transport_text(config, plan.placement)}"]
    if config.eval is not None:
        lines.append(f"evaluation: {evaluation_text(config, plan.placement)}")
    if starts_here(plan) and (python := needed_python(plan.placement, config)) is not None:
        lines.append(f"python: ours is {sys.executable}, {config.rollout.facts.package}'s is {python}")
    lines += _memory(plan)
    if not plan.is_here:
        lines.append(NOT_HERE)
    return "\n".join([*lines, *start_words(plan, config)])


def evaluation_text(config: RunConfig, placement: Placement) -> str:
    """Which engines sample evaluations, and why."""
    written = f"eval.engine={config.eval_engine}"
    if placement.evaluation is not None:
        return f"{EVAL_ENGINE} samples ({written})"
    why = ": no CUDA device is free" if config.eval_engine == "auto" else ""
    return f"the rollout engines sample, and get no new weights until it ends ({written}{why})"


def _memory(plan: Plan) -> list[str]:
    """What each device needs and has; of several nodes, one line for devices of a node that are alike."""
    num, is_one, hosts = plan.shape.num_parameters, len(plan.nodes) == 1, plan.placement.hosts
    used = {process.device for process in plan.processes}
    places = [one for node, all_cuda in enumerate(hosts.cuda) for one in (NodeDevice(node, "cpu"), *all_cuda)]
    told = list[tuple[NodeDevice, str]]()
    for place in places:
        label = hosts.label(place)
        needs, free = plan.peak_bytes(label), plan.free_bytes[label]
        by_phase = ", ".join(f"{phase} {size_text(need)}" for phase, need in needs.items())
        in_turns = f", the most of {by_phase}" if plan.placement.moves else ""
        has = "free is not known (no nvidia-smi)" if free is None else f"{size_text(free)} free"
        is_cpu = place.name == "cpu"
        own = "the Python processes (about 0.5 GiB each)" if is_cpu else "CUDA's own of each process"
        needed = f"{size_text(max(needs.values()))}{in_turns}" if num else "what is needed is not known"
        text = f"{needed}; {has}{f', before {own}' if num else ''}"
        is_idle = label not in used and not (is_cpu and is_one)
        told.append((place, "" if is_idle else text))
    lines = list[str]()
    for (_, text), group in itertools.groupby(told, lambda one: (one[0] if is_one else one[0].node, one[1])):
        devices = [place for place, _ in group]
        labels = ", ".join(hosts.labels(devices))
        each = ", each" if len(devices) > 1 else ""
        lines.append(f"memory of {labels}{each}: {text}" if text else f"not used: {labels}")
    return lines


def _table(plan: Plan) -> list[str]:
    """A line for each process, under a line for its node where there are several."""
    rows = [(-1, "process", "device", "threads", [field.name for field in fields(Memory)], "what")]
    for one in plan.processes:
        sizes = [size_text(size) if size else "-" for size in astuple(one.memory)]
        rows.append((one.node, one.name, one.device_name, str(one.threads or "-"), sizes, one.note))
    lines, is_one = list[str](), len(plan.nodes) == 1
    for number in range(-1, len(plan.nodes)):
        found = [row for row in rows if row[0] == number]
        if found and number >= 0 and not is_one:
            node = plan.nodes[number]
            num, cores = len(node.machine.cuda), node.machine.cores
            cuda = f"{num or 'no'} CUDA device{'s' if num > 1 else ''}"
            lines += ["", f"{node.name} at {node.address}: {cores} cores, {cuda}"]
        for _, name, device, threads, sizes, what in found:
            columns = "".join(f"{size:>12}" for size in sizes)
            lines.append(f"{name:<12} {device:<7} {threads:>7} {columns}  {what}")
    return lines


def transport_text(config: RunConfig, placement: Placement) -> str:
    """Mode and transport in one line."""
    trainer = ", ".join(placement.trainer_labels)
    if placement.mode == "colocated":
        devices, size = chunk_devices(config, placement), size_text(config.weight_sync.chunk_bytes)
        on_cpu = "through shared memory" if devices else "as files in shared memory"
        is_on_cpu = all(device.name == "cpu" for device in devices)
        how = on_cpu if is_on_cpu else f"by CUDA IPC on {trainer}"
        return f"colocated on {trainer}, in turns: weights go {how} in chunks of {size}"
    engines = "elsewhere" if config.rollout.urls else f"on {', '.join(placement.engine_labels)}"
    words = transport_words(config, is_on_cuda=placement.is_on_cuda)
    return f"apart (trainer on {trainer}, engines {engines}): {words}"
