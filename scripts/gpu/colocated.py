"""Parts 1 and 4: the cost of trainer and embedded engine colocated on one device."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch

from asyncrl.config.load import load_config
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.placement import chunk_devices, place
from gpu.jobs import run_job, tell_memory
from gpu.models import make_folder
from gpu.rows import Bench

COPY_BYTES = 2**29
CONFIG = """
model: {{path: {model}, dtype: {dtype}}}
task: {{python: "asyncrl.tasks.toy:Letters", reward_pool: inline}}
rollout: {{group_size: 8, slots: 16, max_tokens: 64, max_prompt_tokens: 32}}
buffer: {{max_staleness: 0}}
trainer: {{num_groups: 4, num_steps: {num_steps}, learning_rate: 1.0e-5}}
weight_sync: {{transport: {transport}}}
placement: {{trainer: {place}, rollout: trainer, share: null}}
checkpoint: {{every: null}}
"""


def config_text(bench: Bench, model: Path, way: str) -> str:
    is_cuda = bench.device == "cuda"
    return CONFIG.format(
        model=model,
        dtype="bfloat16" if is_cuda else "float32",
        num_steps=3 if bench.is_tiny else 20,
        transport=way if is_cuda else "shm",
        place=bench.place,
    )


def handover(bench: Bench, way: str) -> None:
    """Execute a colocated run of the 0.6B shape. ipc: chunks in shared device memory;
    shm: in files.
    """
    from common import copy_costs

    is_cuda = bench.device == "cuda"
    model = make_folder(bench, "0.6B")
    config = bench.folder / "handovers.yaml"
    config.write_text(config_text(bench, model, way))
    loaded = load_config(config)
    if is_cuda:
        shared = chunk_devices(loaded, place(loaded, LocalLauncher().nodes))
        assert (way == "shm") == (not shared), (
            f"with transport={way}, chunks are shared on {shared or 'none'}"
        )
    steps = run_job(bench, config, "handovers", [], limit_s=bench.limit_s - 20.0)
    # the first step warms up; after the last one the engine gets nothing
    counted = steps[1:-1]
    seconds = {
        name: median(step[f"perf/{name}_s"] for step in counted)
        for name in ("to_trainer", "to_engines", "handover")
    }
    size = 2**24 if bench.is_tiny else COPY_BYTES
    (copy_s, _), _ = copy_costs(size, torch.device(bench.device))
    num_parameters = (
        sum(file.stat().st_size for file in model.glob("*.safetensors")) // 2
    )
    # float32 weights and AdamW's two moments in both directions, and the push
    num_bytes = num_parameters * (2 * 12 + (2 if is_cuda else 4))
    copies_s = copy_s * num_bytes / size
    bench.tell(
        "to the trainer, seconds",
        f"{seconds['to_trainer']:.3f}",
        against=f"{len(counted)} handovers",
    )
    bench.tell(
        "to the engine, seconds",
        f"{seconds['to_engines']:.3f}",
        against="with the push",
    )
    against = f"{seconds['handover'] / copies_s:.2f} of it in both handovers, {seconds['handover']:.3f} s"
    bench.tell("bytes copied in both handovers, GB", f"{num_bytes / 1e9:.3g}")
    bench.tell(
        "memory copy of that size, pinned, seconds", f"{copies_s:.3f}", against=against
    )
    bench.tell("first handovers, seconds", f"{steps[0]['perf/handover_s']:.3f}")
    tell_memory(bench, loaded, steps)
