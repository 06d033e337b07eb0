"""Reward against seconds of asyncrl and TRL on one card: same model, prompts, reward, batch and optimizer.

    python benchmarks/learning_curve.py --make-sums DIR/sums.jsonl      # needs reasoning-gym
    python benchmarks/learning_curve.py [sums words search] [--systems asyncrl trl trl-batching]
        [--model FOLDER] [--sums FILE] [--engine vllm] [--mode shared] [--limit-s 60] [--budget-s 200]
        [--tiny]

    sums      additions and subtractions of two numbers from reasoning-gym, 40,000 questions. Half have two
              digits and are hardly asked twice; half have one digit, of which there are 200.
    words     configs/smollm2.yaml: answers of one word
    search    examples/search/learn.yaml, only by asyncrl: TRL has no such agent

    asyncrl       `asyncrl run` on one device: colocated (max_staleness 0), or at once with `--mode shared`
                  (max_staleness 2)
    trl           GRPOTrainer with transformers' generate, settings at the head of end_to_end_trl.py
    trl-batching  the same with continuous batching, whose weights are bfloat16

Both sides train all weights, recompute no activations, and use AdamW with the config's settings. The clock
starts with the training loop, so compilation counts and imports do not. A run is ended after --limit-s of
training; what it has learned by then is kept, and so are the runs before one that fails. --tiny: a random
model and the quickstart's task, also on a CPU. Writes learning-TASK-CARD.json and .png into --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ASYNCRL, CONFIGS, HERE, RESULTS, SMOLLM2, child_environ, machine_line, read_steps
from end_to_end_runs import WINDOW, Curve, draw, read_curve, running_mean
from sums import write_sums

TRL = [sys.executable, str(HERE / "end_to_end_trl.py")]
SYSTEMS = {
    "asyncrl": "asyncrl",
    "trl": "TRL, generate",
    "trl-batching": "TRL, continuous batching",
}
NUM_SUMS = 40_000
GRACE_S = 20.0
"""Seconds to end after an interrupt."""
LOOK_S = 0.5
REPORT_S = 10.0
MIN_RUN_S = 30.0


@dataclass(frozen=True)
class Task:
    config: Path
    overrides: tuple[str, ...]
    systems: tuple[str, ...] = tuple(SYSTEMS)


def tasks(arguments: argparse.Namespace) -> dict[str, Task]:
    """Return the tasks by name, at the size of the device."""
    if arguments.tiny:
        tiny = ("trainer.num_groups=2", "rollout.slots=16", "eval=none")
        return {name: Task(CONFIGS / "quickstart.yaml", tiny) for name in ("sums", "words")}
    model = f"model.path={arguments.model}"
    batch = ("trainer.num_groups=64", "rollout.slots=512", "trainer.micro_batch_tokens=32768")
    sums = f"task={{files: ['{arguments.sums}'], reward: 'sums:last_number', reward_pool: inline}}"
    longer = ("rollout.max_prompt_tokens=96", "rollout.max_tokens=128")
    smollm2 = CONFIGS / "smollm2.yaml"
    search = HERE.parent / "examples" / "search" / "learn.yaml"
    return {
        "sums": Task(smollm2, (model, sums, *batch, *longer, "eval=none", "trainer.learning_rate=5e-5")),
        "words": Task(smollm2, (model, *batch, "eval=none")),
        "search": Task(search, (model, "rollout.slots=64", "trainer.num_groups=8"), ("asyncrl",)),
    }


def command(system: str, task: Task, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a run, without --run-dir."""
    is_cuda = torch.cuda.is_available()
    same = [
        str(task.config),
        *task.overrides,
        f"trainer.num_steps={arguments.steps}",
        "trainer.warmup_steps=0",
    ]
    if system == "asyncrl":
        return [*ASYNCRL, *same, "checkpoint.every=none", *one_device(arguments, is_cuda=is_cuda)]
    generation = "batching" if system == "trl-batching" else "generate"
    device = "cuda" if is_cuda else "cpu"
    micro_batch = "16" if arguments.tiny else "128"
    return [*TRL, *same, "--device", device, "--generation", generation, "--micro-batch", micro_batch]


def one_device(arguments: argparse.Namespace, *, is_cuda: bool) -> list[str]:
    """Return the settings that put trainer and engine on the only device."""
    place = "0" if is_cuda else "cpu"
    engine = f"rollout.engine={arguments.engine}"
    if arguments.mode == "shared" and is_cuda:
        return [
            engine,
            f"placement={{trainer: {place}, rollout: {place}, share: 0.35}}",
            "buffer.max_staleness=2",
        ]
    return [engine, f"placement={{trainer: {place}, rollout: trainer}}", "buffer.max_staleness=0"]


def measure(name: str, words: list[str], folder: Path, *, start_s: float, limit_s: float) -> Curve | None:
    """Execute a run and end it after `limit_s` of training. Return None, and print its output, if it made no
    step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / name
    started_s = time.time()
    log = folder / f"{name}.log"
    with log.open("w", encoding="utf-8") as output:
        job = subprocess.Popen(
            [*words, "--run-dir", str(run_dir)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environ(),
            start_new_session=True,
        )
        with ended(job):
            watch(name, job, run_dir, start_s=start_s, limit_s=limit_s)
            is_early = job.poll() not in (None, 0)
    if is_early or not steps_of(run_dir):
        print(f"{name} FAILED, exit code {job.poll()}: {log.read_text(encoding='utf-8')[-3000:]}", flush=True)
    return read_curve(run_dir, started_s) if steps_of(run_dir) else None


def watch(name: str, job: subprocess.Popen[bytes], run_dir: Path, *, start_s: float, limit_s: float) -> None:
    """Return when the run has ended or trained for `limit_s`, and print its progress."""
    last_s = time.monotonic() + start_s + limit_s
    reported_s = 0.0
    trained_s = 0.0
    while job.poll() is None and trained_s < limit_s and time.monotonic() < last_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(LOOK_S)
        steps = steps_of(run_dir)
        trained_s = steps[-1]["time_s"] if steps else 0.0
        if time.monotonic() > reported_s + REPORT_S:
            reported_s = time.monotonic()
            reward = f", reward {steps[-1]['reward/mean']:.3f}" if steps else ""
            print(f"{name}: {len(steps)} steps, {trained_s:.1f} s{reward}", flush=True)


@contextlib.contextmanager
def ended(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Interrupt the job on exit, and kill what remains of its processes."""
    try:
        yield
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return read_steps(run_dir) if (run_dir / "metrics.jsonl").exists() else []


def card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def write(name: str, task: Task, curves: dict[str, Curve], arguments: argparse.Namespace) -> None:
    """Write the task's curves as JSON and as a plot."""
    label = re.sub(r"[^a-z0-9]+", "-", card().lower()).strip("-")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"learning-{name}-{label}"
    kept = {
        "task": name,
        "machine": machine_line(),
        "commands": {system: " ".join(command(system, task, arguments)) for system in curves},
        "trains": "all weights, no activation recomputed",
        "curves": {system: vars(curve) for system, curve in curves.items()},
    }
    path.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    labels = {system: f"{SYSTEMS[system]}, {curve.step_s:.2f} s a step" for system, curve in curves.items()}
    runs = {system: [curve] for system, curve in curves.items()}
    draw(runs, labels, path.with_suffix(".png"), title=f"{card()}: SmolLM2-135M, {name}")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", default=["sums", "words"], help="sums, words, search")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="folder that examples/smollm2.py makes")
    parser.add_argument("--sums", type=Path, default=HERE.parent / "runs" / "sums.jsonl")
    parser.add_argument("--make-sums", type=Path, metavar="FILE", help="write the questions, and stop")
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument("--mode", choices=["colocated", "shared"], default="colocated")
    parser.add_argument("--steps", type=int, default=400, help="most optimizer steps of a run")
    parser.add_argument("--limit-s", type=float, default=60.0, help="most seconds of training of a run")
    parser.add_argument("--start-s", type=float, default=60.0, help="limit of imports, model and engine")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="start no run that would end later")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs" / "learning_curve")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    arguments.model = arguments.model.resolve()
    arguments.sums = arguments.sums.resolve()
    return arguments


def main() -> None:
    """Run each task by each system, and write what there is after each run."""
    arguments = parse(sys.argv[1:])
    if arguments.make_sums is not None:
        write_sums(arguments.make_sums, NUM_SUMS)
        return
    print(machine_line(), flush=True)
    until_s = time.monotonic() + arguments.budget_s
    folder = arguments.work / time.strftime("%Y%m%d-%H%M%S")
    for name in arguments.tasks:
        task = tasks(arguments)[name]
        curves = dict[str, Curve]()
        for system in arguments.systems:
            limit_s = min(arguments.limit_s, until_s - time.monotonic() - GRACE_S)
            if system not in task.systems or limit_s < min(MIN_RUN_S, arguments.limit_s):
                continue
            words = command(system, task, arguments)
            curve = measure(f"{name}-{system}", words, folder, start_s=arguments.start_s, limit_s=limit_s)
            if curve is not None:
                curves[system] = curve
                last = running_mean(curve.rewards, window=WINDOW)[-1]
                print(
                    f"{name}, {SYSTEMS[system]}: {len(curve.rewards)} steps in {curve.times_s[-1]:.1f} s, "
                    f"{curve.step_s:.2f} s a step, start {curve.start_up_s:.1f} s, reward "
                    f"{curve.rewards[0]:.3f} -> {last:.3f} (last {WINDOW}), "
                    f"{sum(curve.lengths) / len(curve.lengths):.0f} tokens",
                    flush=True,
                )
                write(name, task, curves, arguments)


if __name__ == "__main__":
    main()
