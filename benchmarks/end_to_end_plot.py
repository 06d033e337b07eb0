"""Draws and writes the curves of benchmarks/end_to_end.py: docs/results/end_to_end.{png,csv}."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from end_to_end_runs import LEVELS, WINDOW, Curve

from asyncrl.observe.verdict import running_mean

FloatArray = npt.NDArray[np.float64]
COLOURS = {"asyncrl": "#2166ac", "trl": "#d95f02", "plain": "#222222", "on-policy": "#1b9e77"}
NUM_PLACES = 400
"""Points of the axis of seconds."""


def on_grid(curves: Sequence[Curve], axis: str, window: int) -> tuple[FloatArray, FloatArray]:
    """Return places (float64, one axis) and the seeds' smoothed rewards there, one row per seed. Places end
    where the shortest seed ends. `axis`: steps or seconds; rewards between steps are interpolated.
    """
    smooth = [running_mean(curve.rewards, window=window) for curve in curves]
    times = [curve.times_s if axis == "seconds" else [*range(1, len(curve.rewards) + 1)] for curve in curves]
    first = max(each[0] for each in times)
    last = min(each[-1] for each in times)
    num = NUM_PLACES if axis == "seconds" else int(last)
    places = np.linspace(first, last, num)
    return places, np.array([np.interp(places, *pair) for pair in zip(times, smooth, strict=True)])


def write_csv(runs: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Write one row per system and step: rewards not smoothed, seconds the mean over seeds."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["system", "num_seeds", "step", "time_s_mean", "reward_mean", "reward_min", "reward_max"]
        )
        for name, curves in runs.items():
            places, rewards = on_grid(curves, "steps", window=1)
            times_s = np.mean([curve.times_s[: len(places)] for curve in curves], axis=0)
            columns = (places, times_s, rewards.mean(0), rewards.min(0), rewards.max(0))
            for step, *values in zip(*columns, strict=True):
                writer.writerow([name, len(curves), int(step), *(f"{value:.5g}" for value in values)])


def draw(runs: Mapping[str, Sequence[Curve]], labels: Mapping[str, str], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for name, curves in runs.items():
        # The plain loop is dashed and on top: max_staleness 0 is exactly under it in the first panel.
        style = {"linestyle": (0, (4, 3)), "zorder": 5} if name == "plain" else {"zorder": 3}
        for panel, axis in zip(panels, ("steps", "seconds"), strict=True):
            places, rewards = on_grid(curves, axis, WINDOW)
            low = rewards.min(0)
            panel.fill_between(places, low, rewards.max(0), color=COLOURS[name], alpha=0.15, linewidth=0)
            panel.plot(places, rewards.mean(0), color=COLOURS[name], label=labels[name], **style)
    for panel, label in zip(panels, ("optimizer step", "seconds, without start-up"), strict=True):
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        for level in LEVELS:
            panel.axhline(level, color="#999999", linewidth=0.8, linestyle=":")
    panels[0].set_ylabel(f"reward/mean, mean of the last {WINDOW} steps")
    panels[0].legend(loc="lower right", frameon=False)
    figure.savefig(path)
