"""Numbers of a whole run, as console, status and summary show them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


class Steps:
    """Metrics of all steps by column. A repeated step replaces itself and all later
    steps.

    Example: the lines 1, 2, 3, 2 give the steps 1 and 2. The run was resumed from step
    1, so the first line 3 is of weights that are gone.
    """

    def __init__(self, lines: Iterable[Mapping[str, float]] = ()) -> None:
        self._columns: dict[str, array[float]] = {"step": array("d")}
        self.last: Mapping[str, float] = {}
        for line in lines:
            self.add(line)

    def __len__(self) -> int:
        return len(self._columns["step"])

    def add(self, line: Mapping[str, float]) -> None:
        while len(self) and self._columns["step"][-1] >= line["step"]:
            for column in self._columns.values():
                column.pop()
        # A new column begins with NaN for the steps before, and a column that this line
        # lacks gets NaN: all columns have one length.
        num = len(self)
        self.last = line
        for name, value in line.items():
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * num
            self._columns[name].append(value)
        for column in self._columns.values():
            if len(column) == num:
                column.append(math.nan)

    @property
    def names(self) -> list[str]:
        return [*self._columns]

    def column(self, name: str) -> array[float]:
        """NaN: missing."""
        return self._columns.get(name, array("d", [math.nan]) * len(self))

    def by_step(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) of all steps."""
        return [*zip(self.column("step"), self.column(name), strict=True)]

    def values(self, name: str, part: slice = slice(None)) -> list[float]:
        return [value for value in self.column(name)[part] if value == value]

    def total(self, name: str, part: slice = slice(None)) -> float:
        return float(sum(self.values(name, part)))

    def mean(self, name: str, part: slice = slice(None)) -> float | None:
        values = self.values(name, part)
        return fmean(values) if values else None

    def newest(self, name: str) -> float:
        return ([0.0] + self.values(name))[-1]


def recent(num: int) -> slice:
    """Select the last tenth, 5 to 50 steps; below 10 steps the second half."""
    return slice(-max(1, min(50, num // 10), min(5, num // 2)), None)


def seconds_left(steps: Steps, num_steps: int) -> float | None:
    """Estimate from the pace of the last 20 steps; None before the first step."""
    step_s = steps.mean("perf/step_s", slice(-20, None))
    return (
        None if step_s is None else step_s * max(0, num_steps - int(steps.last["step"]))
    )


SHARES = {
    "training": ("training", "green", "perf/train_s"),
    "generation": ("waiting for generation", "yellow", "perf/wait_generation_s"),
    "rewards": ("waiting for rewards", "blue", "perf/wait_rewards_s"),
    "teaching": ("waiting for teaching", "bright_blue", "perf/wait_teaching_s"),
    "stragglers": ("waiting for stragglers", "red", "perf/wait_stragglers_s"),
    "publishing": ("waiting for publishing", "magenta", "perf/wait_publishing_s"),
    "handovers": ("handovers", "cyan", "perf/handover_s"),
    "other": ("other", "bright_black", ""),
}


def time_shares(seconds_of: Callable[[str], float]) -> dict[str, float]:
    """Return shares of the wall time, 1 in total."""
    parts = {
        name: seconds_of(metric) for name, (*_, metric) in SHARES.items() if metric
    }
    # The trainer measures some parts and the controller the step, so the parts may add
    # up to more.
    total_s = max(seconds_of("perf/step_s"), sum(parts.values())) or 1.0
    shares = {name: part_s / total_s for name, part_s in parts.items()}
    return shares | {"other": max(0.0, 1 - sum(shares.values()))}


def shares_text(shares: Mapping[str, float]) -> Text:
    """Format as `training 71%, waiting for generation 17%`."""
    shown = [
        (*SHARES[name][:2], share) for name, share in shares.items() if share >= 0.005
    ]
    return Text(", ").join(
        Text(f"{words} {share:.0%}", color) for words, color, share in shown
    )


MAX_CORRELATION = 0.95


def standard_error(values: Sequence[float], num: int) -> float:
    """Return the standard error of a mean of `num` consecutive steps; for 1 the noise
    of a step.

    Neighbors are correlated, as in AR(1) with deviation s and correlation r: the
    variance of a difference is 2 s^2 (1 - r) at distance 1 and 2 s^2 (1 - r^2) at
    distance 2, and a slow trend hardly changes either. Mean absolute differences
    estimate it without weight on single jumps.

    Example: s = 0.03 and 40 steps give 0.005 for r = 0, and 0.014 for r = 0.8, because
    40 such steps say as much as 4.4 independent steps.
    """
    near, far = (
        fmean(
            [
                abs(later - value)
                for value, later in zip(values, values[lag:], strict=False)
            ]
            or [0.0]
        )
        ** 2
        for lag in (1, 2)
    )
    correlation = min(MAX_CORRELATION, max(0.0, far / near - 1)) if near else 0.0
    num_independent = max(1.0, num * (1 - correlation) / (1 + correlation))
    # normal: mean absolute d = sqrt(2 / pi) deviation of d
    variance = near * math.pi / 4 / (1 - correlation)
    return math.sqrt(variance / num_independent)


def waiting_share(shares: Mapping[str, float]) -> float:
    causes = ("generation", "rewards", "teaching", "stragglers", "publishing")
    return sum(shares[cause] for cause in causes)


# ---- as text


def sparkline(values: Sequence[float], *, width: int = 32) -> str:
    """Draw at most `width` block characters, of the means of neighboring values."""
    blocks = "▁▂▃▄▅▆▇█"
    num = min(width, len(values))
    edges = (
        [round(index * len(values) / num) for index in range(num + 1)] if num else []
    )
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in means)


def duration(seconds: float) -> str:
    """Format as 8.3 s, 4 min 05 s, 2 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 60:
        return f"{seconds:.1f} s"
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def several(num: float, noun: str) -> str:
    """Format as `1 group`, `3 groups`."""
    return f"{num:.0f} {noun if num == 1 else f'{noun}s'}"


Rows = Iterable[tuple[str, RenderableType]]
EvalLine = TypeVar("EvalLine", bound=Mapping[str, object])


def grid(rows: Rows) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for name, shown in rows:
        table.add_row(Text(name), shown)
    return table


def boxed(rows: Rows, title: str) -> Panel:
    return Panel(grid(rows), title=Text(title), title_align="left", border_style="blue")


def plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        is_nested = any(isinstance(item, (list, tuple, Mapping)) for item in value)
        return ("\n" if is_nested else ", ").join(map(plain, value)) or "none"
    return str(value)


def by_evaluation(lines: Iterable[EvalLine]) -> dict[str, list[EvalLine]]:
    """Group lines by evaluation, '' for the only one."""
    found: dict[str, list[EvalLine]] = {}
    for line in lines:
        found.setdefault(str(line.get("name", "")), []).append(line)
    return found


def evaluation_text(metrics: Mapping[str, Any]) -> str:
    """Format as `v40 reward 0.413 ± 0.031 12.3 tokens, 2.0% truncated 3.2 s`, then
    failures; of demonstrations as `v40 loss 1.234 on 5,678 tokens`.
    """
    parts = [f"{metrics.get('name', '')} v{metrics['eval/version']:.0f}".lstrip()]
    if "eval/tokens" in metrics:
        loss = metrics.get("eval/loss")
        shown = "not finite" if loss is None else f"{loss:.4f}"
        return f"{parts[0]} loss {shown} on {metrics['eval/tokens']:,.0f} tokens"
    if "eval/reward_mean" in metrics:
        error = (
            f" ± {metrics['eval/standard_error']:.3f}"
            if "eval/standard_error" in metrics
            else ""
        )
        parts[0] += f" reward {metrics['eval/reward_mean']:.3f}{error}"
        truncated = f"{metrics.get('eval/truncated_fraction', 0.0):.1%} truncated"
        parts.append(f"{metrics.get('eval/length_mean', 0.0):.1f} tokens, {truncated}")
    parts.append(f"{metrics['eval/seconds']:.1f} s")
    for what in ("failed", "retried", "skipped", "abandoned"):
        if num := metrics.get(f"eval/{what}"):
            parts.append(f"{what}: {num:.0f}")
    kinds = [
        f"{name.removeprefix('eval/failure/')} {num:.0f}"
        for name, num in metrics.items()
        if name.startswith("eval/failure/")
    ]
    if kinds:
        parts.append(", ".join(kinds))
    return "  ".join(parts)
