"""Draws reward against steps and against wall time, a line and a band a variant, from the metrics of finished
runs.

python scripts/learning_curves.py RUNS_DIR [--out docs/results]

RUNS_DIR holds one run directory a variant and seed, named VARIANT-seedN (max_staleness_4-seed0); known
variants come first, in the order of VARIANTS, any other after them. Writes learning_curves.png and
learning_curves.csv. Lines are means over the seeds of the running mean of reward/mean, bands reach from the
smallest to the largest seed. The end of a line is where the first of its seeds ends, so that no mean is one
over fewer seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncrl.observe.verdict import running_mean

FloatArray = npt.NDArray[np.float64]

VARIANTS = {
    "sync_reference": ("sync_reference (plain loop)", "#222222"),
    "max_staleness_0": ("max_staleness 0", "#d95f02"),
    "max_staleness_1": ("max_staleness 1", "#1b9e77"),
    "max_staleness_4": ("max_staleness 4", "#2166ac"),
}
_OTHER_COLOURS = ("#7570b3", "#e7298a", "#66a61e", "#a6761d")
_NAME = re.compile(r"(?P<variant>.+)-seed(?P<seed>\d+)")


@dataclass(frozen=True)
class Curve:
    """One run: step number, wall time and reward/mean of each step; float64, one entry a step."""

    steps: FloatArray
    times_s: FloatArray
    rewards: FloatArray


@dataclass(frozen=True)
class Band:
    """Seeds of one variant at common places of one axis: mean, smallest and largest; float64, one entry a
    place.
    """

    places: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray


def read_runs(root: Path) -> dict[str, dict[int, Curve]]:
    """Variant -> seed -> curve. Raises SystemExit with the way out if there is no run, or a run without
    steps.
    """
    found: dict[str, dict[int, Curve]] = {}
    for folder in sorted(root.glob("*-seed*")):
        match = _NAME.fullmatch(folder.name)
        if match and folder.is_dir():
            found.setdefault(match["variant"], {})[int(match["seed"])] = read_curve(folder / "metrics.jsonl")
    if not found:
        raise SystemExit(
            f"{root} holds no directory named VARIANT-seedN.\n  Way out: name run directories like "
            f"max_staleness_4-seed0."
        )
    order = [*VARIANTS, *sorted(found.keys() - VARIANTS.keys())]
    return {variant: found[variant] for variant in order if variant in found}


def read_curve(path: Path) -> Curve:
    """The curve in one metrics.jsonl; a half-written last line is left out."""
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            metrics = json.loads(line)
        except ValueError:
            if number == len(lines):
                continue
            raise SystemExit(f"{path} line {number} is no JSON: {line[:60]!r}") from None
        rows.append((metrics["step"], metrics["time_s"], metrics["reward/mean"]))
    if not rows:
        raise SystemExit(f"{path} holds no steps.\n  Way out: leave that run out, or run it again.")
    steps, times_s, rewards = np.array(rows, dtype=np.float64).T
    return Curve(steps, times_s, rewards)


def band_over_steps(curves: list[Curve], window: int) -> Band:
    """Mean and extent over seeds at each step that all of them have."""
    num = min(len(curve.steps) for curve in curves)
    rewards = np.array([running_mean(curve.rewards.tolist(), window=window)[:num] for curve in curves])
    return _band(curves[0].steps[:num], rewards)


def band_over_time(curves: list[Curve], window: int, num_points: int = 400) -> Band:
    """The same on a common grid of wall time, between two steps by straight lines."""
    places = np.linspace(
        max(curve.times_s[0] for curve in curves), min(curve.times_s[-1] for curve in curves), num_points
    )
    rewards = [
        np.interp(places, curve.times_s, running_mean(curve.rewards.tolist(), window=window))
        for curve in curves
    ]
    return _band(places, np.array(rewards))


def draw(runs: dict[str, dict[int, Curve]], path: Path, *, window: int) -> None:
    """One figure, two panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    others = iter(_OTHER_COLOURS * len(runs))
    for variant, by_seed in runs.items():
        label, colour = VARIANTS.get(variant) or (variant, next(others))
        curves = list(by_seed.values())
        # the plain loop is drawn dashed and on top: max_staleness 0 lies exactly under it
        style = (
            {"linestyle": (0, (4, 3)), "zorder": 5}
            if variant == "sync_reference"
            else {"linestyle": "-", "zorder": 3}
        )
        for panel, band in zip(
            panels, (band_over_steps(curves, window), band_over_time(curves, window)), strict=True
        ):
            panel.fill_between(band.places, band.low, band.high, color=colour, alpha=0.15, linewidth=0)
            panel.plot(
                band.places,
                band.mean,
                color=colour,
                linewidth=1.8,
                label=f"{label}, {len(curves)} seeds",
                **style,
            )
    for panel, label in zip(panels, ("optimizer step", "wall time in s"), strict=True):
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"reward/mean, mean of the last {window} steps")
    panels[0].legend(loc="lower right", frameon=False)
    figure.savefig(path)


def write_csv(runs: dict[str, dict[int, Curve]], path: Path) -> None:
    """One row a variant and step: rewards not smoothed, times the mean over seeds."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["variant", "num_seeds", "step", "time_s_mean", "reward_mean", "reward_min", "reward_max"]
        )
        for variant, by_seed in runs.items():
            curves = list(by_seed.values())
            band = band_over_steps(curves, window=1)
            times_s = np.mean([curve.times_s[: len(band.places)] for curve in curves], axis=0)
            for row in zip(band.places, times_s, band.mean, band.low, band.high, strict=True):
                step, *values = row
                writer.writerow([variant, len(curves), int(step), *(f"{value:.5g}" for value in values)])


def _band(places: FloatArray, rewards: FloatArray) -> Band:
    return Band(places, rewards.mean(axis=0), rewards.min(axis=0), rewards.max(axis=0))


def main(arguments: list[str] | None = None) -> int:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(
        description="Draw learning curves from run directories named VARIANT-seedN."
    )
    parser.add_argument("runs_dir", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "results"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=10,
        help="steps of the running mean in the picture (default 10; 1 = off)",
    )
    options = parser.parse_args(arguments)
    runs = read_runs(options.runs_dir)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(runs, options.out / "learning_curves.png", window=options.window)
    write_csv(runs, options.out / "learning_curves.csv")
    for variant, by_seed in runs.items():
        print(f"{variant}: seeds {', '.join(map(str, sorted(by_seed)))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
