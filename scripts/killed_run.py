"""Compare a run killed three times with a run never killed, in docs/results/killed_run.{png,md}.

python scripts/killed_run.py [RUNS_DIR] [--num-steps 160] [--max-staleness 4] [--out docs/results]

SIGKILL ends the whole process tree; the same command resumes it. The cost of a resume comes from the run's
files: seconds from the command to the first new step, and its parts for start-up and repeated training.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGKILL
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = """\
# A run killed three times, and a run never killed

`python scripts/killed_run.py`: the quickstart, {num_steps} steps, max_staleness {max_staleness}, \
checkpoint.every 25; SIGKILL to the whole process tree, then the same command again.

![reward](killed_run.png)

| run | steps | largest staleness | reward/mean of the last 16 steps |
| --- | --- | --- | --- |
{runs}

Cost of each resume, in seconds from the command to the first new step:

| killed at step | to the first new step | start-up of the processes | repeated training | repeated batches |
| --- | --- | --- | --- | --- |
{costs}
"""


def main() -> None:
    """Run both, and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs_dir", nargs="?", type=Path, default=ROOT / "runs" / "killed")
    parser.add_argument("--num-steps", type=int, default=160)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    shutil.rmtree(options.runs_dir, ignore_errors=True)
    options.runs_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(ROOT / "configs" / "quickstart.yaml")]
    command += [f"trainer.num_steps={options.num_steps}", f"buffer.max_staleness={options.max_staleness}"]
    command += ["checkpoint.every=25", "observe.console=plain", "observe.trackers=[]"]
    whole = options.runs_dir / "whole"
    killed = options.runs_dir / "killed"
    start(command, whole).wait()
    kills = [options.num_steps * part // 4 + 7 for part in (1, 2, 3)]
    costs = []
    for step in [*kills, options.num_steps]:
        before = len(read_lines(killed))
        process = start(command, killed)
        if before:
            costs.append(resume_cost(killed, before, process))
        if step in kills:
            kill_at(step, killed, process)
        process.wait()
    runs = {"never killed": read_lines(whole), "killed three times": read_lines(killed)}
    write(options, runs, kills, costs)


def start(command: list[str], run_dir: Path) -> subprocess.Popen[bytes]:
    """Start or resume the run, with its output in RUN_DIR.log."""
    with run_dir.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--run-dir", str(run_dir)], stdout=log, stderr=log, start_new_session=True
        )


def kill_at(step: int, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill the process tree after `step`."""
    while len(read_lines(run_dir)) < step and process.poll() is None:
        time.sleep(0.05)
    children = [int(pid) for pid in os.popen(f"pgrep -P {process.pid}").read().split()]
    for pid in [process.pid, *children]:
        os.kill(pid, SIGKILL)
    print(f"killed at step {len(read_lines(run_dir))}", flush=True)


def resume_cost(run_dir: Path, before: int, process: subprocess.Popen[bytes]) -> str:
    """Return a table row: seconds to the first step beyond `before`, and their parts."""
    began = ready = time.monotonic()
    checkpoints = (run_dir / "checkpoints").glob("step_*")
    restored = max((int(path.name.removeprefix("step_")) for path in checkpoints), default=0)
    while len(read_lines(run_dir)) <= before and process.poll() is None:
        if ready == began and len(read_lines(run_dir)) < before:  # the processes are up: steps repeat
            ready = time.monotonic()
        time.sleep(0.02)
    total_s = time.monotonic() - began
    repeated = [line["perf/train_s"] for line in read_lines(run_dir) if restored < line["step"] <= before]
    return f"| {before} | {total_s:.1f} | {ready - began:.1f} | {sum(repeated):.1f} | {len(repeated)} |"


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    texts = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(text) for text in texts if text.endswith("\n")]


def write(
    options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], kills: list[int], costs: list[str]
) -> None:
    """Write plot and table."""
    from matplotlib.figure import Figure

    options.out.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 4), layout="tight")
    axes = figure.subplots()
    lines = []
    for (name, rows), color in zip(runs.items(), ("#0072B2", "#D55E00"), strict=True):
        rewards = [row["reward/mean"] for row in rows]
        means = [fmean(rewards[max(0, index - 4) : index + 5]) for index in range(len(rewards))]
        axes.plot([row["step"] for row in rows], means, color=color, label=name)
        oldest = max(row["sample/staleness_max"] for row in rows)
        lines.append(f"| {name} | {len(rows)} | {oldest:.0f} | {fmean(rewards[-16:]):.3f} |")
    for kill in kills:
        axes.axvline(kill, color="#D55E00", linestyle=":", linewidth=1)
    title = f"kill -9 at the dotted lines, max_staleness {options.max_staleness}"
    axes.set(xlabel="step", ylabel="reward/mean (9 steps)", title=title)
    axes.legend(loc="lower right")
    figure.savefig(options.out / "killed_run.png", dpi=110, metadata={"Software": None})
    text = REPORT.format(**vars(options), runs="\n".join(lines), costs="\n".join(costs))
    (options.out / "killed_run.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
