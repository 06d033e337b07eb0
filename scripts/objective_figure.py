"""Draws reward and effective sample size of objectives, a column a question. Knows finished runs; starts
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from objective_report import Run, Runs, Setting

from asyncrl.observe.verdict.verdict import running_mean

# Okabe and Ito's colours, told apart by colour-blind eyes too, and another dash each for print
STYLES: Sequence[tuple[str, Any]] = (("#0072B2", "-"), ("#D55E00", (0, (5, 2))), ("#000000", (0, (1, 1.5))))


def draw(
    runs: Runs,
    path: Path,
    *,
    columns: Mapping[str, Sequence[str]],
    labels: Mapping[str, str],
    bounds: Sequence[int],
) -> None:
    """`columns`: title -> at most three variants. A row of rewards for each bound, and one of ess for the
    largest.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    window = max(1, min(len(run.rewards) for by_seed in runs.values() for run in by_seed.values()) // 16)
    rows = [*((bound, "reward") for bound in bounds), (max(bounds), "ess")]
    figure = Figure(figsize=(3.6 * len(columns), 2.7 * len(rows)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), len(columns), sharex=True, sharey="row", squeeze=False)
    for across, (title, variants) in enumerate(columns.items()):
        for down, (bound, what) in enumerate(rows):
            panel = panels[down][across]
            for variant, (colour, dash) in zip(variants, STYLES, strict=False):
                by_seed = runs.get(Setting(variant, bound))
                if by_seed:
                    _draw_line(
                        panel,
                        list(by_seed.values()),
                        what,
                        window,
                        label=labels[variant],
                        colour=colour,
                        dash=dash,
                    )
            _dress(panel, has_legend=down == 0)
        panels[0][across].set_title(title, fontsize=10, loc="left", fontweight="bold")
        panels[-1][across].set_xlabel("batch")
    for down, (bound, what) in enumerate(rows):
        smoothed = f", mean of {window}" if window > 1 else ""
        name = f"reward{smoothed}" if what == "reward" else f"effective sample size{smoothed}"
        panels[down][0].set_ylabel(f"max_staleness {bound}\n{name}", fontsize=9)
    limits = [panels[down][0].get_ylim() for down in range(len(bounds))]
    for down in range(len(bounds)):  # rewards at all bounds on one scale
        panels[down][0].set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    figure.savefig(path)


def _draw_line(
    panel: Any, every: list[Run], what: str, window: int, *, label: str, colour: str, dash: Any
) -> None:
    """Mean over seeds of the running mean, and a band from the lowest to the highest seed."""
    series = [run.rewards if what == "reward" else run.ess for run in every]
    length = min(len(values) for values in series)
    if not length:
        return
    smooth = np.array([running_mean(list(values), window=window)[:length] for values in series])
    steps = np.arange(length)
    panel.fill_between(steps, smooth.min(axis=0), smooth.max(axis=0), color=colour, alpha=0.13, linewidth=0)
    panel.plot(steps, smooth.mean(axis=0), color=colour, linestyle=dash, linewidth=1.7, label=label)


def _dress(panel: Any, *, has_legend: bool) -> None:
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    if has_legend and panel.lines:
        panel.legend(loc="best", frameon=False, fontsize=8, handlelength=3)
