"""Runs of `asyncrl run`: shipped configs on one device, and one config with other
sections (part 5).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from asyncrl.config import RunConfig
from asyncrl.config.load import load_config
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.plan import make_plan, resolve_auto
from gpu.engines import log_of, vllm_args
from gpu.models import architecture, make_folder
from gpu.rows import Bench, NotRunError

REPO = Path(__file__).resolve().parents[2]
WINDOW = 10
"""Steps of a mean at each end of a run."""
GRACE_S = 30.0
"""Seconds to end after an interrupt."""
MIN_RUN_S = 40.0

Line = dict[str, Any]


def run_job(
    bench: Bench,
    config: Path,
    name: str,
    overrides: list[str],
    *,
    limit_s: float,
) -> list[Line]:
    """Return the lines of metrics.jsonl. A run is interrupted after `limit_s`.

    Raises RuntimeError if it fails, or has no step by then.
    """
    run_dir = bench.folder / name
    command = command_of(config, run_dir, *overrides)
    with (bench.folder / f"{name}.log").open("w+", encoding="utf-8") as log:
        job = subprocess.Popen(command, cwd=REPO, stdout=log, stderr=subprocess.STDOUT)
        try:
            code: int | None = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGINT)
            code = None
            try:
                job.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                job.kill()  # its steps are on the disk
                job.wait()
        log.seek(0)
        said = log.read()[-3000:]
    steps = steps_of(run_dir)
    if code or not steps:
        ended = (
            f"was interrupted after {limit_s:.0f} s"
            if code is None
            else f"ended with {code}"
        )
        engine_log = "\n".join(log_of(run_dir)[-20:])
        raise RuntimeError(
            f"{engine_log}\n{said}\nasyncrl run {name} {ended} with {len(steps)} steps"
        )
    return steps


def command_of(config: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Return the command of a run without trackers."""
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(config), *overrides]
    return [*command, "observe.trackers=[]", "--run-dir", str(run_dir)]


def steps_of(run_dir: Path) -> list[Line]:
    """Return the steps so far."""
    from common import read_steps

    return [line for line in read_steps(run_dir) if "reward/mean" in line]


def on_one_device(bench: Bench, engine: str = "embedded") -> list[str]:
    """Return the overrides of a colocated run."""
    # vLLM cannot free its memory on a CPU
    is_apart = engine == "vllm" and bench.device == "cpu"
    overrides = [
        f"placement={{trainer: {bench.place}, rollout: {'cpu' if is_apart else 'trainer'}}}",
        "buffer.max_staleness=0",
    ]
    # float32 is not packed on CUDA
    overrides += [] if bench.device == "cpu" else ["model.dtype=bfloat16"]
    if engine == "vllm":
        overrides += [
            "rollout.engine=vllm",
            f"rollout.vllm={json.dumps(vllm_args(bench))}",
        ]
    if bench.is_tiny:
        overrides += ["trainer.num_steps=2", "trainer.num_groups=2", "rollout.slots=16"]
    return overrides


def learns(bench: Bench, config: str, engine: str = "embedded") -> None:
    """Train a shipped config, colocated, and plot its reward."""
    overrides = on_one_device(bench, engine)
    limit_s = bench.left_s - GRACE_S - 20.0
    if limit_s < MIN_RUN_S:
        raise NotRunError(f"no time: {limit_s:.0f} s remain")
    path = REPO / "configs" / f"{config}.yaml"
    steps = run_job(bench, path, config, overrides, limit_s=limit_s)
    rewards = [line["reward/mean"] for line in steps]
    first = fmean(rewards[:WINDOW])
    last = fmean(rewards[-WINDOW:])
    is_better = bench.is_tiny or last > first
    bench.tell(
        "reward, first and last 10 steps", f"{first:.3f} {last:.3f}", ok=is_better
    )
    seconds = steps[-1]["time_s"]
    pace = f"{seconds / len(steps):.3f} s a step"
    bench.tell("steps, seconds", f"{len(steps)} {seconds:.1f}", against=pace)
    _tell_seconds(bench, steps)
    bench.tell(
        "logprob gap on fresh tokens, mean nats",
        f"{_median(steps, 'policy/logprob_gap_mean'):.2e}",
    )
    tell_memory(bench, load_config(path, overrides), steps)
    _plot(bench, steps, config)


def _tell_seconds(bench: Bench, steps: list[Line]) -> None:
    """Print the parts of a step, as the median and as the sum over all steps."""
    names = (
        "wait",
        "handover",
        "train",
        "pack",
        "forward",
        "backward",
        "optimizer",
        "blocked",
        "compile",
    )
    keys = [f"perf/{name}_s" for name in names if f"perf/{name}_s" in steps[-1]]
    for what, of_steps in (("median", median), ("sum", sum)):
        total, *parts = (
            of_steps(line.get(key) or 0.0 for line in steps)
            for key in ("perf/step_s", *keys)
        )
        against = ", ".join(
            f"{key[5:-2]} {part:.4g}" for key, part in zip(keys, parts, strict=True)
        )
        bench.tell(f"seconds of a step, {what}", f"{total:.4g}", against=against)


def tell_memory(bench: Bench, config: RunConfig, steps: list[Line]) -> None:
    """Print the trainer's peak memory and the planned one."""
    if bench.device == "cuda":
        settled, _ = resolve_auto(config, LocalLauncher().nodes)
        (trainer,) = (
            one
            for one in make_plan(settled, LocalLauncher().nodes).processes
            if one.name == "trainer-0"
        )
        peak = max(step["perf/device_memory_bytes"] for step in steps)
        bench.memory(trainer.memory.total, peak, is_limit=False)


def _median(steps: list[Line], name: str) -> float:
    return median(line[name] for line in steps if line.get(name) is not None)


def _plot(bench: Bench, steps: list[Line], config: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    axis = figure.subplots()
    axis.plot(
        [line["time_s"] for line in steps],
        [line["reward/mean"] for line in steps],
        linewidth=0.8,
    )
    title = f"{bench.label}: {config}, colocated"
    axis.set(xlabel="seconds of training", ylabel="reward of a batch", title=title)
    path = bench.out / f"{bench.label}-{config}.png"
    figure.savefig(path, dpi=100, bbox_inches="tight")
    bench.tell("reward against seconds", path.name)


# ---- several runs of one config, each with other sections

APART = {"trainer": 0, "rollout": 1}
COLOCATED = {"trainer": 0, "rollout": "trainer"}
BOTH_COLOCATED = {"trainer": [0, 1], "rollout": "trainer"}
NUM_STEPS = 8
ONE_DEVICE = {"max_tokens": 256, "group_size": 8, "slots": 64}
Sections = dict[str, dict[str, Any]]


def _apart(staleness: int, **sections: dict[str, Any]) -> Sections:
    return {"placement": APART, "buffer": {"max_staleness": staleness}, **sections}


def _colocated(placement: dict[str, Any], **sections: dict[str, Any]) -> Sections:
    return {"placement": placement, "buffer": {"max_staleness": 0}, **sections}


def _pushed(engine: str) -> dict[str, Sections]:
    return {
        name: _apart(2, rollout={"engine": engine}, weight_sync={"transport": name})
        for name in ("nccl", "shm")
    }


CASES: dict[str, dict[str, Sections]] = {
    "nccl": _pushed("vllm"),
    "nccl-embedded": _pushed("embedded"),
    "vllm-colocated": {
        "colocated": _colocated(
            COLOCATED,
            weight_sync={"transport": "ipc"},
            rollout=ONE_DEVICE | {"deterministic": False},
        )
    },
    "vllm-async": {
        "async, share 0.35": {
            "placement": {"trainer": 0, "rollout": 0, "share": 0.35},
            "buffer": {"max_staleness": 2},
            "rollout": ONE_DEVICE,
        }
    },
    "tensor-parallel": {
        "tensor_parallel=2": _colocated(
            BOTH_COLOCATED, trainer={"world_size": 2}, rollout={"tensor_parallel": 2}
        )
    },
    "batch-invariance": {
        f"deterministic=true, {slots} slots": _colocated(
            COLOCATED, rollout=ONE_DEVICE | {"deterministic": True, "slots": slots}
        )
        for slots in (64, 16)
    },
    "one-device": {
        name: {
            "placement": {"trainer": 0, "rollout": rollout, "share": share},
            "buffer": {"max_staleness": staleness},
            "rollout": ONE_DEVICE | {"engine": "embedded"},
        }
        for name, rollout, share, staleness in (
            ("async", 0, 0.35, 2),
            ("colocated, both resident", "trainer", "auto", 0),
            ("colocated, offloaded", "trainer", None, 0),
        )
    },
}
"""Config sections of the runs of each row, by name."""
ON_ONE_DEVICE = ("vllm-colocated", "vllm-async", "batch-invariance", "one-device")


def job_config(bench: Bench, model: Path | None, sections: Sections) -> dict[str, Any]:
    """Return a config on the letters task with these sections. `model`: None: the 1.5B
    shape. On a CPU, it takes the place of all devices.
    """
    shape = {
        name: value
        for name, value in architecture(bench, "1.5B").items()
        if name != "vocab_size"
    }
    scratch = {"scratch": {"characters": "abcdef0123456789 ", "architecture": shape}}
    base: Sections = {
        "model": {"dtype": "bfloat16", **({"path": str(model)} if model else scratch)},
        "task": {
            "python": "asyncrl.tasks.toy:Letters",
            "size": 1000,
            "reward_pool": "inline",
        },
        "rollout": {
            "engine": "vllm",
            "slots": 64,
            "max_prompt_tokens": 8,
            "max_tokens": 512,
        },
        "trainer": {"num_groups": 8, "num_steps": NUM_STEPS, "learning_rate": 1e-5},
        "checkpoint": {"every": None},
    }
    names = [*base, *(name for name in sections if name not in base)]
    config: dict[str, Any] = {
        "seed": 0,
        **{name: base.get(name, {}) | sections.get(name, {}) for name in names},
    }
    if config["rollout"]["engine"] == "vllm":
        config["rollout"]["vllm"] = vllm_args(bench)
    if bench.device == "cpu":  # where vLLM cannot be colocated
        config["placement"] = {"trainer": "cpu", "rollout": "cpu"}
        config["rollout"] |= {"max_tokens": 32, "group_size": 4, "slots": 16}
        config["trainer"] |= {"num_groups": 2, "num_steps": 3}
        config.pop("weight_sync", None)
    return config


def in_cases(bench: Bench, case: str) -> None:
    """Execute the runs of a case, and print their speeds."""
    import torch
    from common import has_vllm

    runs = CASES[case]
    engines = {
        sections.get("rollout", {}).get("engine", "vllm") for sections in runs.values()
    }
    lacking = [] if has_vllm() or "vllm" not in engines else ["vLLM"]
    num_devices = 1 if case in ON_ONE_DEVICE else 2
    is_here = torch.cuda.device_count() >= num_devices or (
        bench.device == "cpu" and num_devices == 1
    )
    lacking += [] if is_here else [f"{num_devices} CUDA devices"]
    if lacking:
        raise NotRunError(f"needs {' and '.join(lacking)}")
    model = make_folder(bench, "0.6B") if case in ON_ONE_DEVICE else None
    tokens = []
    for number, (name, sections) in enumerate(runs.items()):
        config = bench.folder / f"{case}-{number}.yaml"
        config.write_text(
            yaml.safe_dump(job_config(bench, model, sections)), encoding="utf-8"
        )
        # Later runs keep MIN_RUN_S each, and get what this one leaves. The first compiles.
        kept_s = (len(runs) - 1 - number) * MIN_RUN_S
        limit_s = max(MIN_RUN_S, bench.left_s - GRACE_S - kept_s)
        wanted = load_config(config).trainer.num_steps
        try:
            steps = run_job(bench, config, config.stem, [], limit_s=limit_s)
        except RuntimeError as error:  # the other runs are worth their time
            print(error)
            bench.tell(f"{name}: steps", "none", against=f"of {wanted}", ok=False)
            continue
        is_whole = len(steps) == wanted
        ok = None if case == "one-device" else is_whole
        bench.tell(f"{name}: steps", f"{len(steps)}", against=f"of {wanted}", ok=ok)
        tell_sharing(bench, name, bench.folder / config.stem)
        _tell_run(bench, name, steps[2:] or steps)
        tell_memory(bench, load_config(config), steps)
        tokens.append(_tokens(bench.folder / config.stem / "trained.jsonl"))
    if case == "batch-invariance":
        one, other = (sorted(found) for found in tokens)
        what = "tokens of the first batch, both runs"
        bench.tell(what, "the same" if one == other else "different", ok=one == other)


def tell_sharing(bench: Bench, name: str, run_dir: Path) -> None:
    """Print how both sides share the device."""
    log = (run_dir / "logs" / "controller.log").read_text(encoding="utf-8")
    for line in re.findall(r"placement\.share=.*", log):
        bench.tell(f"{name}: sharing", line)


def _tell_run(bench: Bench, name: str, steps: list[Line]) -> None:
    wanted = {
        "perf/tokens_per_s": "tokens/s",
        "perf/weight_sync_s": "push, in all, seconds",
        "perf/weight_sync_pause_s": "push, without a token, seconds",
        "perf/handover_s": "both handovers, seconds",
        "policy/logprob_gap_mean": "logprob gap, mean nats",
    }
    for key, words in wanted.items():
        if any(line.get(key) is not None for line in steps):
            bench.tell(f"{name}: {words}", f"{_median(steps, key):.4g}")


def _tokens(record: Path) -> list[str]:
    """Return the hashes of the first batch; later weights may differ by rounding."""
    first = json.loads(record.read_text(encoding="utf-8").splitlines()[0])
    return [one["tokens_sha"] for one in first["trajectories"]]
