"""Reward against seconds of asyncrl and TRL on one card: same model, prompts, reward,
batch and optimizer.

    python benchmarks/learning_curve.py CONFIG [key=value ...] [--systems asyncrl trl
        trl-batching] [--ours key=value ...] [--limit-s 60] [--start-s 60] [--budget-s
        200] [--out DIR]

    examples/arithmetic.yaml     pretrained, for a GPU
    configs/smollm2.yaml         pretrained, answers of one word
    examples/search/learn.yaml   only asyncrl: TRL has no such agent

    asyncrl       `asyncrl run` with the settings of --ours; without any, colocated on the only device
    trl           GRPOTrainer with transformers' generate, settings at the head of end_to_end_trl.py
    trl-batching  the same with continuous batching, whose weights are bfloat16 on CUDA

Both sides train all weights, recompute no activations, and use AdamW with the config's
settings, without warm-up. The clock starts with the training loop, so compilation
counts and imports do not. A run is ended after --limit-s of training; what it has
learned by then is kept, and so are the runs before one that fails. Writes
learning-CONFIG-CARD.json and .png into --out after each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import (
    ASYNCRL,
    HERE,
    RESULTS,
    card,
    child_environ,
    label_of,
    machine_line,
    plain_options,
    read_steps,
)
from end_to_end_runs import WINDOW, Curve, draw, read_curve, running_mean

SYSTEMS = {
    "asyncrl": "asyncrl",
    "trl": "TRL, generate",
    "trl-batching": "TRL, continuous batching",
}
SAME = ("eval=none", "trainer.warmup_steps=0")
GRACE_S = 20.0
"""Seconds to end after an interrupt."""
LOOK_S = 0.5
REPORT_S = 10.0


def command(system: str, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a run, without --run-dir."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    same = [arguments.config, *arguments.overrides, *SAME]
    if system == "asyncrl":
        place = "0" if device == "cuda" else "cpu"
        colocated = [
            f"placement={{trainer: {place}, rollout: trainer}}",
            "buffer.max_staleness=0",
        ]
        return [
            *ASYNCRL,
            *same,
            "checkpoint.every=none",
            *(arguments.ours or colocated),
        ]
    generation = "batching" if system == "trl-batching" else "generate"
    program = [sys.executable, str(HERE / "end_to_end_trl.py")]
    options = [
        "--device",
        device,
        "--generation",
        generation,
        "--micro-batch",
        str(arguments.micro_batch),
    ]
    return [*program, *same, *options]


def measure(
    name: str, words: list[str], folder: Path, *, start_s: float, limit_s: float
) -> Curve | None:
    """Execute a run and end it after `limit_s` of training. Return None if it made no
    step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / name
    log = folder / f"{name}.log"
    started_s = time.time()
    with log.open("w", encoding="utf-8") as output:
        job = subprocess.Popen(
            [*words, "--run-dir", str(run_dir)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environ(),
            start_new_session=True,
        )
        try:
            watch(name, job, run_dir, start_s=start_s, limit_s=limit_s)
            code = job.poll()
        finally:
            end(job)
    has_steps = bool(read_steps(run_dir))
    if code or not has_steps:
        print(
            f"{name} FAILED, exit code {code}: {log.read_text(encoding='utf-8')[-3000:]}",
            flush=True,
        )
    return read_curve(run_dir, started_s) if has_steps else None


def watch(
    name: str,
    job: subprocess.Popen[bytes],
    run_dir: Path,
    *,
    start_s: float,
    limit_s: float,
) -> None:
    """Return when the run has ended or trained for `limit_s`, and print its progress."""
    last_s = time.monotonic() + start_s + limit_s
    report_s = 0.0
    trained_s = 0.0
    while job.poll() is None and trained_s < limit_s and time.monotonic() < last_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(LOOK_S)
        steps = read_steps(run_dir)
        trained_s = steps[-1]["time_s"] if steps else 0.0
        if steps and time.monotonic() > report_s:
            report_s = time.monotonic() + REPORT_S
            print(
                f"{name}: step {len(steps)}, {trained_s:.1f} s, {steps[-1]['reward/mean']:.3f}",
                flush=True,
            )


def end(job: subprocess.Popen[bytes]) -> None:
    """Interrupt the job, and kill what remains of its processes."""
    if job.poll() is None:
        job.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def write(name: str, curves: dict[str, Curve], arguments: argparse.Namespace) -> None:
    """Write the curves as JSON and as a plot."""
    device = card() or "CPU"
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"learning-{name}-{label_of(device)}"
    kept = {
        "machine": machine_line(),
        "commands": {system: " ".join(command(system, arguments)) for system in curves},
        "curves": {system: vars(curve) for system, curve in curves.items()},
    }
    path.with_suffix(".json").write_text(
        json.dumps(kept, indent=1) + "\n", encoding="utf-8"
    )
    labels = {
        system: f"{SYSTEMS[system]}, {curve.step_s:.2f} s a step"
        for system, curve in curves.items()
    }
    runs = {system: [curve] for system, curve in curves.items()}
    draw(runs, labels, path.with_suffix(".png"), title=f"{device}: {name}")


def parse(words: list[str]) -> argparse.Namespace:
    parser = plain_options(__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="settings of both sides")
    parser.add_argument(
        "--ours", nargs="+", help="settings of asyncrl: engine, placement, staleness"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument(
        "--micro-batch", type=int, default=128, help="sequences in a pass of TRL"
    )
    parser.add_argument(
        "--limit-s", type=float, default=60.0, help="most seconds of training of a run"
    )
    parser.add_argument(
        "--start-s", type=float, default=60.0, help="limit of imports, model and engine"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=3600.0,
        help="start no run that would end later",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(words)


def main() -> None:
    """Run each system, and write what there is after each run."""
    arguments = parse(sys.argv[1:])
    print(machine_line(), flush=True)
    until_s = time.monotonic() + arguments.budget_s
    folder = HERE.parent / "runs" / "learning_curve" / time.strftime("%Y%m%d-%H%M%S")
    name = Path(arguments.config).stem
    curves = dict[str, Curve]()
    for system in arguments.systems:
        limit_s = min(arguments.limit_s, until_s - time.monotonic() - GRACE_S)
        if limit_s <= 0.0:
            break
        words = command(system, arguments)
        curve = measure(
            system, words, folder, start_s=arguments.start_s, limit_s=limit_s
        )
        if curve is not None:
            curves[system] = curve
            write(name, curves, arguments)
            last = running_mean(curve.rewards, window=WINDOW)[-1]
            print(
                f"{SYSTEMS[system]}: {len(curve.rewards)} steps in {curve.times_s[-1]:.1f} s, "
                f"{curve.step_s:.2f} s a step, reward {curve.rewards[0]:.3f} -> {last:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
