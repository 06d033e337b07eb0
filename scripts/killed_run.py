"""Runs the quickstart once undisturbed and once killed with SIGKILL three times; writes
docs/results/killed_run.{csv,png,md}.

python scripts/killed_run.py [RUNS_DIR] [--num-steps 160] [--max-staleness 4] [--out docs/results]

The whole process tree is killed, as a machine would go down; the same command starts it again. What a resume
costs is taken from the run's own files: seconds from the start of the command to the first new step, and what
of them is start-up and training again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"


def main() -> None:
    """Run both, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs_dir", nargs="?", type=Path, default=ROOT / "runs" / "killed")
    parser.add_argument("--num-steps", type=int, default=160)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    shutil.rmtree(options.runs_dir, ignore_errors=True)
    options.runs_dir.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "run",
        str(CONFIG),
        f"trainer.num_steps={options.num_steps}",
        f"buffer.max_staleness={options.max_staleness}",
        "checkpoint.every=25",
        "observe.console=plain",
        "observe.trackers=[]",
    ]
    whole, killed = options.runs_dir / "whole", options.runs_dir / "killed"
    start(command, whole).wait()
    kills = [options.num_steps * part // 4 + 7 for part in (1, 2, 3)]
    costs = [kill_and_measure(command, killed, step) for step in kills]
    final = start(command, killed)
    costs.append(resume_cost(killed, kills[-1], final))
    final.wait()
    write(options.out, whole, killed, kills, [cost for cost in costs if cost is not None], options)


def start(command: list[str], run_dir: Path) -> subprocess.Popen[bytes]:
    """Start or go on, output into a log beside the directory."""
    with run_dir.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--run-dir", str(run_dir)], stdout=log, stderr=log, start_new_session=True
        )


def kill_and_measure(command: list[str], run_dir: Path, step: int) -> dict[str, float] | None:
    """Go on until `step` is taken, then kill everything; what the resume at its start has cost, None for the
    first start.
    """
    before = len(lines(run_dir))
    process = start(command, run_dir)
    cost = resume_cost(run_dir, before, process) if before else None
    while len(lines(run_dir)) < step and process.poll() is None:
        time.sleep(0.05)
    children = [int(pid) for pid in os.popen(f"pgrep -P {process.pid}").read().split()]
    for pid in [process.pid, *children]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    print(f"killed at step {len(lines(run_dir))}", flush=True)
    return cost


def resume_cost(run_dir: Path, before: int, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Seconds from the command to the first step beyond `before`, and what of them is start-up, replay, the
    rest.
    """
    began = time.monotonic()
    restored = max(
        (int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*")), default=0
    )
    ready = None
    while len(lines(run_dir)) <= before and process.poll() is None:
        if (
            ready is None and len(lines(run_dir)) < before
        ):  # metrics.jsonl was cut back: the processes answer, the replay begins
            ready = time.monotonic()
        time.sleep(0.02)
    total = time.monotonic() - began
    replayed = [line for line in lines(run_dir) if restored < line["step"] <= before]
    replay_s = sum(line["perf/train_s"] for line in replayed)
    startup_s = (ready or began) - began
    return {
        "total_s": total,
        "startup_s": startup_s,
        "replay_s": replay_s,
        "batches": float(len(replayed)),
        "at": float(before),
    }


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines(keepends=True) if text.endswith("\n")]


def oldest(rows: list[dict[str, Any]]) -> int:
    """Largest staleness of any batch."""
    return int(max(row["sample/staleness_max"] for row in rows))


def write(
    out: Path,
    whole: Path,
    killed: Path,
    kills: list[int],
    costs: list[dict[str, float]],
    options: argparse.Namespace,
) -> None:
    """The three files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {"never killed": lines(whole), "killed three times": lines(killed)}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "killed_run.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["run", "step", "reward_mean", "staleness_max"])
        for name, rows in runs.items():
            table.writerows(
                [name, row["step"], f"{row['reward/mean']:.4f}", int(row["sample/staleness_max"])]
                for row in rows
            )
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for (name, rows), colour in zip(runs.items(), ("#0072B2", "#D55E00"), strict=True):
        means = [
            sum(r["reward/mean"] for r in rows[max(0, i - 4) : i + 5]) / len(rows[max(0, i - 4) : i + 5])
            for i in range(len(rows))
        ]
        axes.plot([row["step"] for row in rows], means, color=colour, label=name)
    for kill in kills:
        axes.axvline(kill, color="#D55E00", linestyle=":", linewidth=1)
    axes.set(
        xlabel="step",
        ylabel="reward/mean (9 steps)",
        title=f"kill -9 at the dotted lines, max_staleness {options.max_staleness}",
    )
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out / "killed_run.png", dpi=110, metadata={"Software": None})
    tail = {name: sum(r["reward/mean"] for r in rows[-16:]) / len(rows[-16:]) for name, rows in runs.items()}
    text = [
        "# A run killed three times beside one never killed",
        "",
        f"`python scripts/killed_run.py`: the quickstart, {options.num_steps} steps, max_staleness "
        f"{options.max_staleness}, "
        "checkpoint.every 25; SIGKILL to the whole process tree, the same command again.",
        "",
        "![reward](killed_run.png)",
        "",
        "| run | steps | largest staleness | reward/mean of the last 16 steps |",
        "| --- | --- | --- | --- |",
        *(f"| {name} | {len(rows)} | {oldest(rows)} | {tail[name]:.3f} |" for name, rows in runs.items()),
        "",
        "What each resume cost, in seconds from the command to the first step that had not been taken "
        "before:",
        "",
        "| killed at step | to the first new step | start-up of the processes | training again | batches "
        "trained again |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {c['at']:.0f} | {c['total_s']:.1f} | {c['startup_s']:.1f} | {c['replay_s']:.1f} | "
            f"{c['batches']:.0f} |"
            for c in costs
        ),
        "",
    ]
    (out / "killed_run.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
