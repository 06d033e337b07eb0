"""A run of benchmarks/end_to_end.py: its command, its cache and its figures."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    HERE,
    RESULTS,
    child_environ,
    machine_line,
    plain_options,
    read_steps,
)

LEVELS = (0.5, 0.7, 0.8)
WINDOW = 10
"""Optimizer steps of the moving mean that has to reach a level; the first WINDOW - 1
steps reach none.
"""
FINAL_PART = 10
"""The final reward is the mean over the last tenth of the steps."""
TIMEOUT_S = 3600.0


def running_mean(values: list[float], *, window: int) -> list[float]:
    """Return the mean of the last `window` values (fewer at the start)."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [statistics.fmean(part) for part in parts]


@dataclass(frozen=True)
class Curve:
    """A finished run. Seconds and reward/mean, one a step; seconds count from the start
    of the loop, and start_up_s are those of the process before it.
    """

    start_up_s: float
    times_s: list[float]
    rewards: list[float]
    lengths: list[float]

    def reach_s(self, level: float) -> float:
        """Seconds until the moving mean first reaches the level; infinite if it never
        does.
        """
        means = running_mean(self.rewards, window=WINDOW)
        found = (
            self.times_s[step]
            for step in range(WINDOW - 1, len(means))
            if means[step] >= level
        )
        return next(found, math.inf)

    @property
    def final_reward(self) -> float:
        """Mean over the last tenth of the steps."""
        return statistics.fmean(
            self.rewards[-max(1, len(self.rewards) // FINAL_PART) :]
        )

    @property
    def steps_per_min(self) -> float:
        """All steps, the first one included, by the loop's seconds."""
        return 60.0 * len(self.times_s) / self.times_s[-1]

    @property
    def step_s(self) -> float:
        """Mean seconds a step, without the first one, which warms up."""
        return (self.times_s[-1] - self.times_s[0]) / max(1, len(self.times_s) - 1)


@dataclass(frozen=True)
class Measured:
    """A system at its best learning rate, one curve a seed."""

    rate: str
    curves: dict[int, Curve]

    def median(self, of: Callable[[Curve], float]) -> float:
        """Over the seeds."""
        return statistics.median(map(of, self.curves.values()))

    def reach_s(self, level: float, *, with_start: bool = False) -> float:
        """Median seconds until a level."""
        return self.median(
            lambda curve: curve.reach_s(level) + with_start * curve.start_up_s
        )

    @property
    def final_reward(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(curve.final_reward for curve in self.curves.values())


@dataclass(frozen=True)
class Work:
    """The folder that keeps NAME.json of every finished run."""

    folder: Path

    def measure(self, name: str, command: Sequence[str]) -> Curve:
        """Execute the command (it takes --run-dir), or return the kept result of the
        same command. Raises SystemExit if it fails.
        """
        kept = self.folder / f"{name}.json"
        if kept.exists():
            values = json.loads(kept.read_text(encoding="utf-8"))
            if values.pop("command") == [*command]:
                return Curve(**values)
        run_dir = self.folder / "running"
        shutil.rmtree(run_dir, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        started_s = time.time()
        with (self.folder / "running.log").open("w+", encoding="utf-8") as log:
            done = subprocess.run(
                [*command, "--run-dir", str(run_dir)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environ(),
                timeout=TIMEOUT_S,
                check=False,
            )
            log.seek(0)
            if done.returncode != 0:
                tail = log.read()[-3000:]
                raise SystemExit(
                    f"{name} ended with {done.returncode}: {' '.join(command)}\n{tail}"
                )
        curve = read_curve(run_dir, started_s)
        kept.write_text(
            json.dumps({"command": [*command]} | vars(curve)), encoding="utf-8"
        )
        seconds = curve.times_s[-1]
        print(
            f"{name}: {seconds:.1f} s, reward {curve.final_reward:.3f}",
            file=sys.stderr,
            flush=True,
        )
        return curve


def read_curve(run_dir: Path, started_s: float) -> Curve:
    """Return the curve of a run whose process started at `started_s`. metrics.jsonl was
    last written at the end of the last step, which dates the start of the loop.
    """
    steps = read_steps(run_dir)
    times_s = [float(step["time_s"]) for step in steps]
    return Curve(
        start_up_s=(run_dir / "metrics.jsonl").stat().st_mtime
        - started_s
        - times_s[-1],
        times_s=times_s,
        rewards=[float(step["reward/mean"]) for step in steps],
        lengths=[float(step["sample/length_mean"]) for step in steps],
    )


def best_rate(curves: dict[str, Curve]) -> str:
    return min(
        curves,
        key=lambda rate: (curves[rate].reach_s(LEVELS[-1]), -curves[rate].final_reward),
    )


# ---- the plot

COLOURS = {
    "asyncrl": "#2166ac",
    "trl": "#d95f02",
    "trl-batching": "#7570b3",
    "plain": "#222222",
    "on-policy": "#1b9e77",
    "final": "#2166ac",
    "model": "#d95f02",
    "supports": "#2166ac",
    "wrong": "#d95f02",
    "whole": "#1b9e77",
    "letters-gae": "#2166ac",
    "letters-grpo": "#92c5de",
    "reverse-gae": "#d95f02",
    "reverse-grpo": "#fdb863",
}
NUM_PLACES = 400
"""Points of the axis of seconds."""


def on_grid(curves: Sequence[Curve], axis: str, window: int) -> tuple[Any, Any]:
    """Return places (float64, one axis) and the seeds' smoothed rewards there, one row
    per seed. Places end where the shortest seed ends. `axis`: steps or seconds; rewards
    between steps are interpolated.
    """
    smooth = [running_mean(curve.rewards, window=window) for curve in curves]
    times = [
        curve.times_s if axis == "seconds" else [*range(1, len(curve.rewards) + 1)]
        for curve in curves
    ]
    first = max(each[0] for each in times)
    last = min(each[-1] for each in times)
    places = np.linspace(first, last, NUM_PLACES if axis == "seconds" else int(last))
    return places, np.array(
        [np.interp(places, *pair) for pair in zip(times, smooth, strict=True)]
    )


def draw(
    runs: Mapping[str, Sequence[Curve]],
    labels: Mapping[str, str],
    path: Path,
    *,
    title: str = "",
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), dpi=130, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for name, curves in runs.items():
        # The plain loop is dashed and on top: max_staleness 0 is exactly under it in
        # the first panel.
        style = (
            {"linestyle": (0, (4, 3)), "zorder": 5}
            if name == "plain"
            else {"zorder": 3}
        )
        for panel, axis in zip(panels, ("steps", "seconds"), strict=True):
            places, rewards = on_grid(curves, axis, WINDOW)
            ends = rewards.min(0), rewards.max(0)
            panel.fill_between(
                places, *ends, color=COLOURS[name], alpha=0.15, linewidth=0
            )
            panel.plot(
                places,
                rewards.mean(0),
                color=COLOURS[name],
                label=labels[name],
                **style,
            )
    for panel, label in zip(
        panels, ("optimizer step", "seconds, without start-up"), strict=True
    ):
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        for level in LEVELS:
            panel.axhline(level, color="#999999", linewidth=0.8, linestyle=":")
    panels[0].set_ylabel(f"reward/mean, mean of the last {WINDOW} steps")
    panels[0].legend(loc="lower right", frameon=False)
    figure.suptitle(title)
    figure.savefig(path)


def compare_sides(
    name: str,
    doc: str | None,
    sides: Mapping[str, str],
    run: Callable[[str, int, Path], Curve],
    columns: Mapping[str, tuple[str, Callable[[Curve], float]]],
) -> None:
    """Parse the options, run each side with each seed, print medians over the seeds,
    and keep the curves. `run`: takes side, seed and the folder of finished runs.
    `columns`: format and figure by heading.
    """
    parser = plain_options(doc)
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--work", type=Path, help="folder of finished runs")
    arguments = parser.parse_args()
    curves: dict[str, dict[int, Curve]] = {side: {} for side in sides}
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for seed in range(arguments.seeds):
            for side, found in curves.items():
                found[seed] = run(side, seed, work)
    measured = {side: Measured("", found) for side, found in curves.items()}
    print(machine_line())
    print(f"{'':<30}{'final':>7}{''.join(f'{heading:>16}' for heading in columns)}")
    for side, one in measured.items():
        cells = [f"{one.median(of):>16{form}}" for form, of in columns.values()]
        print(f"{sides[side]:<30}{one.final_reward:>7.3f}{''.join(cells)}")
    keep_curves(name, measured, sides)


def keep_curves(
    name: str, found: Mapping[str, Measured], labels: Mapping[str, str]
) -> None:
    """Write benchmarks/results/NAME.json and docs/results/NAME.png."""
    kept = {
        side: {seed: vars(curve) for seed, curve in measured.curves.items()}
        for side, measured in found.items()
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")
    runs = {side: [*measured.curves.values()] for side, measured in found.items()}
    num_seeds = max(map(len, runs.values()))
    picture = HERE.parent / "docs" / "results" / f"{name}.png"
    draw(runs, labels, picture, title=f"{num_seeds} seeds on a CPU")
