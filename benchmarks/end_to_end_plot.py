"""Draws and writes what benchmarks/end_to_end.py found: docs/results/end_to_end.{png,csv,md}."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from end_to_end_runs import LEVELS, WINDOW, Curve, Measured

from asyncrl.observe.verdict import running_mean

FloatArray = npt.NDArray[np.float64]
COLOURS = {"asyncrl": "#2166ac", "trl": "#d95f02", "plain": "#222222", "on-policy": "#1b9e77"}
NUM_PLACES = 400
"""Points of the axis of seconds."""


@dataclass(frozen=True)
class Band:
    """Seeds of one system at common places of one axis: mean, smallest and largest; float64, one entry a
    place.
    """

    places: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray

    @classmethod
    def of(cls, places: FloatArray, rewards: Sequence[FloatArray]) -> Band:
        """One array of rewards a seed."""
        stacked = np.array(rewards)
        return cls(places, stacked.mean(axis=0), stacked.min(axis=0), stacked.max(axis=0))


def band_over_steps(curves: Sequence[Curve], window: int) -> Band:
    """Mean and extent over seeds at each step that all of them have."""
    num = min(len(curve.rewards) for curve in curves)
    rewards = [np.array(running_mean(curve.rewards, window=window)[:num]) for curve in curves]
    return Band.of(np.arange(num, dtype=np.float64), rewards)


def band_over_time(curves: Sequence[Curve], window: int) -> Band:
    """The same on a common grid of seconds, between two steps by straight lines. It ends where the first of
    the seeds does, so that no mean is one over fewer seeds.
    """
    first = max(curve.times_s[0] for curve in curves)
    places = np.linspace(first, min(curve.times_s[-1] for curve in curves), NUM_PLACES)
    rewards = [
        np.interp(places, curve.times_s, running_mean(curve.rewards, window=window)) for curve in curves
    ]
    return Band.of(places, rewards)


def write_results(found: Mapping[str, Measured], titles: Mapping[str, str], out: Path) -> None:
    """Picture, figures of every step, and the page around them."""
    labels = {name: f"{titles[name]}, learning rate {one.rate}" for name, one in found.items()}
    runs = {name: [*one.curves.values()] for name, one in found.items()}
    draw(runs, labels, out / "end_to_end.png")
    write_csv(runs, out / "end_to_end.csv")
    (out / "end_to_end.md").write_text(page(found, titles), encoding="utf-8")


def write_csv(runs: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """One row a system and step: rewards not smoothed, seconds the mean over seeds."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["system", "num_seeds", "step", "time_s_mean", "reward_mean", "reward_min", "reward_max"]
        )
        for name, curves in runs.items():
            band = band_over_steps(curves, window=1)
            times_s = np.mean([curve.times_s[: len(band.places)] for curve in curves], axis=0)
            for step, *values in zip(band.places, times_s, band.mean, band.low, band.high, strict=True):
                writer.writerow([name, len(curves), int(step), *(f"{value:.5g}" for value in values)])


def draw(runs: Mapping[str, Sequence[Curve]], labels: Mapping[str, str], path: Path) -> None:
    """One figure, two panels: lines are means over the seeds, bands reach from the lowest to the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for name, curves in runs.items():
        bands = band_over_steps(curves, WINDOW), band_over_time(curves, WINDOW)
        # the plain loop is dashed and on top: max_staleness 0 lies exactly under it in the first panel
        style = {"linestyle": (0, (4, 3)), "zorder": 5} if name == "plain" else {"zorder": 3}
        for panel, band in zip(panels, bands, strict=True):
            panel.fill_between(band.places, band.low, band.high, color=COLOURS[name], alpha=0.15, linewidth=0)
            panel.plot(band.places, band.mean, color=COLOURS[name], label=labels[name], **style)
    for panel, label in zip(panels, ("optimizer step", "seconds, without start-up"), strict=True):
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        for level in LEVELS:
            panel.axhline(level, color="#999999", linewidth=0.8, linestyle=":")
    panels[0].set_ylabel(f"reward/mean, mean of the last {WINDOW} steps")
    panels[0].legend(loc="lower right", frameon=False)
    figure.savefig(path)


def page(found: Mapping[str, Measured], titles: Mapping[str, str]) -> str:
    """end_to_end.md."""
    seeds = sorted({seed for one in found.values() for seed in one.curves})
    rows = "\n".join(
        f"| {titles[name]} | {one.rate} | {seed} | {curve.steps_per_min:.0f} | "
        f"{' | '.join(_seconds(curve.reach_s(level)) for level in LEVELS)} | {curve.start_up_s:.1f} | "
        f"{curve.final_reward:.3f} |"
        for name, one in found.items()
        for seed, curve in one.curves.items()
    )
    return f"""# A whole run against TRL and against a plain loop

    python benchmarks/end_to_end.py --plot --write

![reward against steps and seconds](end_to_end.png)

The quickstart (`configs/quickstart.yaml`): the same model, prompts, reward, batch and steps under each system, a process of its
own, one at a time; seeds {", ".join(map(str, seeds))}. Each runs at its own best learning rate, found on seed {seeds[0]}: the one of those tried
that reaches 0.8 soonest. `max_staleness` 0 takes that of the plain loop, whose numbers it gives. Lines are means over the seeds, bands
reach from the lowest to the highest.

| system | learning rate | seed | steps/min | {" | ".join(f"s to {level}" for level in LEVELS)} | start-up, s | final reward |
| --- | --- | --- | --- | {"--- | " * len(LEVELS)}--- | --- |
{rows}

A level is reached when the mean of the last {WINDOW} steps is; a dash: never. Seconds count from the start of the loop; start-up (imports,
model, engines) comes before it. Final reward: mean of the last tenth of the steps. Steps differ in the length of what the
model writes, so steps a minute are no measure of tokens. What each rate gave, the ratios, and SmolLM2-135M's shape:
[benchmarks/results/end_to_end.txt](../../benchmarks/results/end_to_end.txt). Figures of every step: [end_to_end.csv](end_to_end.csv).
"""  # noqa: E501


def _seconds(value: float) -> str:
    return "-" if math.isinf(value) else f"{value:.1f}"
