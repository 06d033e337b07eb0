"""What buffer.on_overdue should be by default: wait, mask and drop by the reward they reach in the same time.

    python benchmarks/on_overdue.py [--seeds 3] [--seconds 1100] [--tasks quickstart agent tools]

Tasks: configs/quickstart.yaml; configs/agent.yaml, an agent with a tool; and `tools`, rollouts whose tools
are sleeps with a long tail (lognormal, median 0.6 s, sigma 1). Every run is a real `asyncrl run` at
max_staleness 4 with a constant learning rate, stopped after the same time; the three choices take turns.
`reward`: mean of the last fifth of that time. `to level`: seconds until the mean of five steps reaches the
level, half way from the first steps of a task to its best reward; a run that never does counts with its whole
time (>). Medians over seeds.

Last line: `ratio: X` = seconds to the level on `tools` by wait / by mask.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from async_vs_sync import CONFIG
from report import options, reported

HERE = Path(__file__).parent
ROOT = HERE.parent
CHOICES = ("wait", "mask", "drop")
CHOSEN = "mask"
START_S = 12.0
"""About so long a run takes to start and to end."""
SETTINGS = ["buffer.max_staleness=4", "trainer.schedule=constant", "trainer.num_steps=100000"]
TASKS = {
    "quickstart": (ROOT / "configs" / "quickstart.yaml", []),
    "agent": (ROOT / "configs" / "agent.yaml", []),
    "tools": (Path("tools.yaml"), ["trainer.learning_rate=5.0e-4", "task.args={median_s: 0.6}"]),
}
Steps = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One run: its steps within the time that all runs of it had."""

    task: str
    on_overdue: str
    seed: int
    steps: Steps
    seconds: float

    def mean(self, key: str) -> float:
        """Over all steps."""
        return fmean(step.get(key, 0.0) for step in self.steps)

    @property
    def first(self) -> float:
        """Reward before anything is learned."""
        return fmean(step["reward/mean"] for step in self.steps[:5])

    @property
    def reward(self) -> float:
        """Of the last fifth of the time."""
        last = [step["reward/mean"] for step in self.steps if step["time_s"] >= 0.8 * self.seconds]
        return fmean(last or [self.steps[-1]["reward/mean"]])

    @property
    def idle(self) -> float:
        """Share of the time in which the trainer waited."""
        return sum(step["perf/wait_s"] for step in self.steps) / self.steps[-1]["time_s"]

    def to_level_s(self, level: float) -> float | None:
        """Seconds until the mean of five steps reaches it."""
        rewards = [step["reward/mean"] for step in self.steps]
        for end in range(5, len(rewards) + 1):
            if fmean(rewards[end - 5 : end]) >= level:
                return float(self.steps[end - 1]["time_s"])
        return None


def play(task: str, on_overdue: str, seed: int, seconds: float, folder: Path) -> Run:
    """One run of `seconds` from its first step on."""
    config, settings = TASKS[task]
    run_dir = folder / f"{task}-{on_overdue}-{seed}"
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(folder / config), *SETTINGS, *settings]
    command += [f"buffer.on_overdue={on_overdue}", f"seed={seed}", "observe.console=none"]
    command += ["observe.trackers=[]", "--run-dir", str(run_dir)]
    env = os.environ | {"PYTHONPATH": f"{HERE}:{ROOT}"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + seconds + 120
    while process.poll() is None and time.monotonic() < until_s:
        if (steps := steps_of(run_dir)) and steps[-1]["time_s"] >= seconds:
            break
        time.sleep(0.5)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)  # the step in hand ends
    if process.wait(timeout=120) not in (0, 128 + signal.SIGINT):
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    kept = [step for step in steps_of(run_dir) if step["time_s"] <= seconds]
    return Run(task, on_overdue, seed, kept, seconds)


def steps_of(run_dir: Path) -> Steps:
    """What metrics.jsonl has, without a line that is being written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def show(task: str, runs: list[Run]) -> dict[str, float]:
    """Print the rows of one task. Returns the median seconds to its level, by choice."""
    start, best = fmean(run.first for run in runs), max(run.reward for run in runs)
    level = (start + best) / 2
    print(f"\n{task}: level {level:.3f}, half way from {start:.3f} to {best:.3f}")
    names = ("on_overdue", "steps/min", "reward", "to level s", "age", "idle", "masked", "dropped")
    print(f"{names[0]:<10}", *(f"{name:>10}" for name in names[1:]))
    reached = {}
    for choice in CHOICES:
        of_choice = [run for run in runs if run.on_overdue == choice]
        times = [run.to_level_s(level) for run in of_choice]
        reached[choice] = median(
            run.seconds if at_s is None else at_s for run, at_s in zip(of_choice, times, strict=True)
        )
        mark = ">" if None in times else ""
        middle = lambda value, of=of_choice: median(value(run) for run in of)  # noqa: E731
        print(
            f"{choice:<10} {middle(lambda run: 60 * len(run.steps) / run.steps[-1]['time_s']):>10.0f} "
            f"{middle(lambda run: run.reward):>10.3f} {mark + format(reached[choice], '.1f'):>10} "
            f"{middle(lambda run: run.mean('sample/staleness_mean')):>10.2f} "
            f"{middle(lambda run: run.idle):>10.0%} "
            f"{middle(lambda run: run.mean('sample/masked_fraction')):>10.1%} "
            f"{middle(lambda run: run.steps[-1]['rollout/dropped']):>10.0f}"
        )
    return reached


def main() -> None:
    """Run all, choice after choice, and print a table a task."""
    parser = options(__doc__, seconds=1100.0)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each choice (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    arguments = parser.parse_args()
    each_s = arguments.seconds / (arguments.seeds * len(arguments.tasks) * len(CHOICES)) - START_S
    if each_s < 5:
        least = (START_S + 5) * arguments.seeds * len(arguments.tasks) * len(CHOICES)
        parser.error(
            f"--seconds {arguments.seconds:g} leave {each_s:.0f} s a run: give {least:.0f}, or fewer tasks"
        )
    runs: list[Run] = []
    with reported("on_overdue", is_kept=arguments.write), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tools.yaml").write_text(CONFIG)
        print(f"{arguments.seeds} seeds, {each_s:.0f} s a run; a step has 64 rollouts in 8 groups")
        for seed in range(arguments.seeds):
            for task in arguments.tasks:
                for choice in CHOICES:
                    runs.append(play(task, choice, seed, each_s, Path(folder)))
                    done = f"{task} seed {seed} {choice}: {len(runs[-1].steps)} steps"
                    print(f"{done}, reward {runs[-1].reward:.3f}", file=sys.stderr, flush=True)
        reached = {task: show(task, [run for run in runs if run.task == task]) for task in arguments.tasks}
        of_task = reached.get("tools", next(iter(reached.values())))
        print(f"ratio: {of_task['wait'] / of_task[CHOSEN]:.2f}")


if __name__ == "__main__":
    main()
