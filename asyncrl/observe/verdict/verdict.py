"""Judge a run from its step metrics: whether it learned, whether it is healthy, and how fast it was; and plot
its reward. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.config import RunConfig
from asyncrl.observe.run_numbers import (
    SHARES,
    Steps,
    TimeShares,
    TrainerNumbers,
    boxed,
    by_evaluation,
    duration,
    thinned,
)
from asyncrl.observe.verdict.verdict_learning import Trend, findings, headline_of, learning_of, reward_of
from asyncrl.observe.verdict.verdict_speed import bottleneck_of, is_short, speed_of

_BAR = 30


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgment of a run, most important first. Each text is whole sentences.

    `headline`: did it learn? If not, with the likeliest reasons. `learning`: further sentences on that.
    `health`: a sentence for each problem, empty for a healthy run. `speed`: the bottleneck, the setting that
    would change it, and any losses; for a short run only that it is too short.

    `reward_first`: mean of the first 5 steps (below 10 steps: of the first half); `reward_last`: mean of the
    recent steps, run_numbers.recent; `reward_noise`: its standard error; `trend`: of the reward at the end.
    `bottleneck`: training, generation, stragglers, publishing, turns, other, balanced, or unknown in a run
    too short to judge. `num_skipped_steps`: optimizer steps whose loss or gradient was not finite.
    """

    num_steps: int
    wall_s: float
    headline: str
    learning: tuple[str, ...]
    health: tuple[str, ...]
    speed: tuple[str, ...]
    reward_first: float | None
    reward_last: float | None
    reward_noise: float | None
    trend: Trend
    shares: TimeShares
    bottleneck: str
    num_skipped_steps: int = 0
    trainer: TrainerNumbers | None = None

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return all texts in order."""
        return (self.headline, *self.learning, *self.health, *self.speed)


def judge(steps: Steps, config: RunConfig) -> Verdict:
    """Judge a run with at least one step."""
    shares, reward, found = TimeShares.of(steps.total), reward_of(steps), findings(steps, config)
    bottleneck = bottleneck_of(shares)
    return Verdict(
        num_steps=len(steps),
        wall_s=float(steps.last.get("time_s", steps.total("perf/step_s"))),
        headline=headline_of(reward, steps, config, found),
        learning=tuple(learning_of(reward, steps)),
        health=tuple(map(str, found)),
        speed=tuple(speed_of(steps, config, shares, bottleneck)),
        reward_first=None if reward is None else reward.first,
        reward_last=None if reward is None else reward.last,
        reward_noise=None if reward is None else reward.noise,
        trend="unknown" if reward is None else reward.trend,
        shares=shares,
        bottleneck="unknown" if is_short(steps) else bottleneck,
        num_skipped_steps=int(steps.total("trainer/skipped_steps")),
        trainer=TrainerNumbers.of(steps),
    )


def summary_panel(verdict: Verdict, *, title: str) -> RenderableType:
    """Did it learn, is it healthy, how fast was it; then where the time went. Fits 80 columns."""
    steps = f"{verdict.num_steps} in {duration(verdict.wall_s)}, "
    steps += f"{verdict.wall_s / verdict.num_steps:.2f} s each"
    return boxed([*verdict_rows(verdict), ("steps", steps), *_time_rows(verdict)], title)


def time_panel(verdict: Verdict) -> RenderableType:
    """Show where the time of all steps went."""
    return boxed(_time_rows(verdict), "time")


def verdict_rows(verdict: Verdict) -> list[tuple[str, RenderableType]]:
    """Return the sentences of a verdict as rows of a table."""
    learned = Text("\n").join([Text(verdict.headline, "bold"), *map(Text, verdict.learning)])
    health = Text("\n".join(verdict.health) or "nothing unusual", "red" if verdict.health else "green")
    return [("learning", learned), ("health", health), ("speed", Text("\n".join(verdict.speed)))]


def _time_rows(verdict: Verdict) -> Iterator[tuple[str, RenderableType]]:
    bars = Table.grid(padding=(0, 1))
    for name, (words, colour, _) in SHARES.items():
        if (share := getattr(verdict.shares, name)) >= 0.005:
            bars.add_row(words, Text(f"{share:4.0%}"), Text("█" * round(share * _BAR), colour))
    yield "time", bars
    yield from () if verdict.trainer is None else verdict.trainer.rows()


PLOT_FILE = "reward.png"
MAX_POINTS = 2000
_RAW, _SMOOTH, _EVAL = "#9ecae1", "#08519c", ("#d94801", "#238b45", "#6a51a3", "#ae017e")


def write_reward_plot(
    run_dir: Path, steps: Steps, *, title: str, evaluations: Sequence[dict[str, Any]] = ()
) -> Path:
    """Write RUN_DIR/reward.png over steps and over wall time: reward/mean, its running mean, and evaluations
    with their standard error, each where its version was published. Of very long runs a point is the mean of
    a stretch. At least one step must have a reward.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = (steps.column(name) for name in ("reward/mean", "step", "time_s"))
    shown = [row for row in zip(*columns, strict=True) if not math.isnan(row[0])]
    rewards, *axes = map(list, zip(*shown, strict=True))
    window = max(1, min(25, len(rewards) // 20))
    lines = (
        (rewards, _RAW, "each step"),
        (running_mean(rewards, window=window), _SMOOTH, f"mean of the last {window} steps"),
    )
    done = by_evaluation([line for line in evaluations if "eval/reward_mean" in line])
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels, names = figure.subplots(1, 2, sharey=True), ("optimizer step", "wall time in s")
    for panel, name, places, is_version in zip(panels, names, axes, (True, False), strict=True):
        for values, color, label in lines:
            panel.plot(thinned(places, MAX_POINTS), thinned(values, MAX_POINTS), color=color, label=label)
        for (eval_name, found), color in zip(done.items(), itertools.cycle(_EVAL), strict=False):
            panel.errorbar(
                [
                    one["policy_version"] if is_version else one["time_s"] - one["eval/seconds"]
                    for one in found
                ],
                [one["eval/reward_mean"] for one in found],
                [one.get("eval/standard_error", 0.0) for one in found],
                fmt="o",
                capsize=2,
                color=color,
                label=f"eval/{eval_name and f'{eval_name}/'}reward_mean",
            )
        panel.set_xlabel(name)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward/mean")
    panels[0].legend(loc="lower right", frameon=False)
    figure.suptitle(title)
    figure.savefig(run_dir / PLOT_FILE)
    return run_dir / PLOT_FILE


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of the last `window` values at each place (of fewer at the start)."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]
