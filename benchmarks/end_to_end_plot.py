"""Draws and writes what benchmarks/end_to_end.py found: docs/results/end_to_end.{png,csv,md}."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from end_to_end_runs import HERE, LEVELS, WINDOW, Measured

sys.path.append(str(HERE.parent / "scripts"))

import learning_curves as house

COLOURS = {"asyncrl": "#2166ac", "trl": "#d95f02", "plain": "#222222", "on-policy": "#1b9e77"}


def write_results(found: Mapping[str, Measured], titles: Mapping[str, str], out: Path) -> None:
    """Picture, figures of every step, and the page around them."""
    runs = {
        name: {
            seed: house.Curve(
                np.arange(len(curve.times_s), dtype=np.float64),
                np.array(curve.times_s),
                np.array(curve.rewards),
            )
            for seed, curve in one.curves.items()
        }
        for name, one in found.items()
    }
    labels = {name: f"{titles[name]}, learning rate {one.rate}" for name, one in found.items()}
    draw(runs, labels, out / "end_to_end.png")
    house.write_csv(runs, out / "end_to_end.csv")
    (out / "end_to_end.md").write_text(page(found, titles), encoding="utf-8")


def draw(runs: dict[str, dict[int, house.Curve]], labels: Mapping[str, str], path: Path) -> None:
    """One figure, two panels: lines are means over the seeds, bands reach from the lowest to the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for name, by_seed in runs.items():
        curves = list(by_seed.values())
        bands = house.band_over_steps(curves, WINDOW), house.band_over_time(curves, WINDOW)
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
