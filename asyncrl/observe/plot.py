"""Draws the reward of one run against steps and against wall time. Knows metrics; imports matplotlib when it
draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observe.run_numbers import Steps, thinned

PLOT_FILE = "reward.png"
MAX_POINTS = 2000

_RAW, _SMOOTH, _EVAL = "#9ecae1", "#08519c", "#d94801"


def write_reward_plot(
    run_dir: Path, steps: Steps, *, title: str, evaluations: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write RUN_DIR/reward.png: reward/mean of each step, its running mean, and evaluations as points with
    their standard error.

    An evaluation stands where its version was published. Of very long runs each point is the mean of a
    stretch. Returns the path.

    Raises ValueError if no step has a reward.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = (steps.column(name) for name in ("reward/mean", "step", "time_s"))
    shown = [row for row in zip(*columns, strict=True) if not math.isnan(row[0])]
    if not shown:
        raise ValueError(f"no step with reward/mean among {len(steps)} steps")
    rewards, *axes = map(list, zip(*shown, strict=True))
    window = smoothing_window(len(rewards))
    smooth = thinned(running_mean(rewards, window=window), MAX_POINTS)
    rewards = thinned(rewards, MAX_POINTS)
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    labels = ("optimizer step", "wall time in s")
    for panel, axis, label, places in zip(panels, ("step", "time_s"), labels, axes, strict=True):
        across = thinned(places, MAX_POINTS)
        panel.plot(across, rewards, color=_RAW, linewidth=1, label="each step")
        panel.plot(across, smooth, color=_SMOOTH, linewidth=2, label=f"mean of the last {window} steps")
        _draw_evaluations(panel, axis, evaluations)
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward/mean")
    panels[0].legend(loc="lower right", frameon=False)
    figure.suptitle(title)
    path = run_dir / PLOT_FILE
    figure.savefig(path)
    return path


def _draw_evaluations(panel: Any, axis: str, evaluations: Sequence[Mapping[str, Any]]) -> None:
    shown = [line for line in evaluations if "eval/reward_mean" in line]
    if not shown:
        return
    across = [
        line["policy_version"] if axis == "step" else line["time_s"] - line["eval/seconds"] for line in shown
    ]
    means = [line["eval/reward_mean"] for line in shown]
    errors = [line.get("eval/standard_error", 0.0) for line in shown]
    panel.errorbar(
        across, means, yerr=errors, fmt="o", markersize=4, capsize=2, color=_EVAL, label="eval/reward_mean"
    )


def smoothing_window(num_steps: int) -> int:
    """Steps that the smoothed line averages: a twentieth of the run, 1 to 25."""
    return max(1, min(25, num_steps // 20))


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of the last `window` values at each place (of fewer at the start)."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means
