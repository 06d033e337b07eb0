"""Numbers of a whole run from its step metrics, and texts that console, status and summary share."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.observe.run_dir import read_metrics


class Steps:
    """The metrics of all steps of a run, by columns. A repeated step replaces itself and all later steps.
    `last`: the last line.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns: dict[str, array[float]] = {"step": array("d")}
        self.last: Mapping[str, Any] = {}
        for line in lines:
            self.add(line)

    def __len__(self) -> int:
        return len(self._columns["step"])

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one step."""
        while len(self) and self._columns["step"][-1] >= line["step"]:
            for column in self._columns.values():
                column.pop()
        num = len(self)
        self.last = line
        for name, value in line.items():
            self._columns.setdefault(name, array("d", [math.nan]) * num).append(value)
        for column in self._columns.values():
            if len(column) == num:
                column.append(math.nan)

    @property
    def names(self) -> list[str]:
        """Names of the metrics that any step has."""
        return [*self._columns]

    def column(self, name: str) -> array[float]:
        """Return one number per step, NaN if it is missing."""
        return self._columns.get(name, array("d", [math.nan]) * len(self))

    def values(self, name: str, part: slice = slice(None)) -> list[float]:
        """Return the values of the steps, or a part of them, that have the metric."""
        return [value for value in self.column(name)[part] if value == value]

    def total(self, name: str, part: slice = slice(None)) -> float:
        """Sum the steps that have the metric."""
        return float(sum(self.values(name, part)))

    def mean(self, name: str, part: slice = slice(None)) -> float | None:
        """Return the mean of the steps with the metric, None without any."""
        values = self.values(name, part)
        return fmean(values) if values else None

    def most(self, name: str) -> float | None:
        """Return the largest value, None without any."""
        return max(self.values(name), default=None)

    def rate(self, name: str) -> float | None:
        """Return the mean of a rate per second of training, weighted by time."""
        both = zip(self.column(name), self.column("perf/train_s"), strict=True)
        found = [(value * train_s, train_s) for value, train_s in both if value * train_s >= 0]
        whole_s = sum(train_s for _, train_s in found)
        return sum(value for value, _ in found) / whole_s if whole_s else None

    def newest(self, name: str) -> float:
        """Return the last value of a counter; 0 without any."""
        return ([0.0] + self.values(name))[-1]


def read_steps(run_dir: Path, problems: list[str]) -> Steps:
    """Read metrics.jsonl; `problems` grows."""
    return Steps(read_metrics(run_dir, problems))


def recent(num: int) -> slice:
    """Select the recent steps of `num`: the last tenth, 5 to 50 steps; below 10 steps the second half."""
    return slice(-max(1, min(50, num // 10), min(5, num // 2)), None)


def seconds_left(steps: Steps, num_steps: int) -> float | None:
    """Estimate the time until `num_steps`, at the pace of recent steps; None before the first step."""
    step_s = steps.mean("perf/step_s", slice(-20, None))
    return None if step_s is None else step_s * max(0, num_steps - int(steps.last["step"]))


SHARES = {
    "training": ("training", "green", "perf/train_s"),
    "generation": ("waiting for generation", "yellow", "perf/wait_generation_s"),
    "stragglers": ("waiting for stragglers", "red", "perf/wait_stragglers_s"),
    "publishing": ("waiting for publishing", "magenta", "perf/wait_publishing_s"),
    "turns": ("taking turns", "cyan", "perf/handover_s"),
    "other": ("other", "bright_black", ""),
}
"""Field of TimeShares -> its name, its color, and its metric."""


TRAIN_PARTS = {
    "forward": "perf/forward_s",
    "backward": "perf/backward_s",
    "optimizer": "perf/optimizer_s",
    "packing": "perf/pack_s",
    "passes without gradient": "perf/logprobs_s",
    "blocked by copies of the weights": "perf/blocked_s",
}
"""Names of the parts of perf/train_s."""


@dataclass(frozen=True, slots=True)
class TrainerNumbers:
    """Use of the trainer's device over all steps; None if unknown. `parts`: shares of perf/train_s by the
    names of TRAIN_PARTS. Memory: the peak of the device, and of all ranks on the host.
    """

    parts: Mapping[str, float]
    tokens_per_device_s: float | None
    mfu: float | None
    device_memory_bytes: float | None
    host_memory_bytes: float | None

    @classmethod
    def of(cls, steps: Steps) -> TrainerNumbers:
        """Compute from the metrics of the trainer."""
        train_s = steps.total("perf/train_s")
        parts = {words: steps.total(name) for words, name in TRAIN_PARTS.items() if steps.values(name)}
        return cls(
            parts={words: part_s / train_s for words, part_s in parts.items()} if train_s else {},
            tokens_per_device_s=steps.rate("perf/device_tokens_per_s"),
            mfu=steps.rate("perf/mfu"),
            device_memory_bytes=steps.most("perf/device_memory_bytes"),
            host_memory_bytes=steps.most("perf/host_memory_bytes"),
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield parts of training and use of the device, for a table."""
        if self.parts:
            parts = {**self.parts, "the rest": max(0.0, 1 - sum(self.parts.values()))}
            yield "training", ", ".join(f"{w} {share:.0%}" for w, share in parts.items() if share >= 0.005)
        if self.tokens_per_device_s is not None:
            mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
            device, host = self.device_memory_bytes, self.host_memory_bytes
            memory = f"; peak memory {device / 2**30:.1f} GiB on the device" if device else ""
            memory += (
                f"{', ' if device else '; peak memory '}{host / 2**30:.1f} GiB on the host" if host else ""
            )
            speed = f"{self.tokens_per_device_s:,.0f} tokens a second and device while training"
            yield "trainer", f"{speed}{mfu}{memory}"


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Shares of the wall time of the steps, 1 in total. `other`: without a metric; `turns`: handovers of
    shared devices.
    """

    training: float = 0.0
    generation: float = 0.0
    stragglers: float = 0.0
    publishing: float = 0.0
    other: float = 1.0
    turns: float = 0.0

    @property
    def waiting(self) -> float:
        """Sum of all waits."""
        return self.generation + self.stragglers + self.publishing

    @classmethod
    def of(cls, seconds_of: Callable[[str], float]) -> TimeShares:
        """Compute from the seconds of each metric. Parts that exceed the total (rounding) are scaled down."""
        parts = {name: seconds_of(metric) for name, (*_, metric) in SHARES.items() if metric}
        whole = max(seconds_of("perf/step_s"), sum(parts.values()))
        if whole <= 0:
            return cls()
        shares = {name: part / whole for name, part in parts.items()}
        return cls(**shares, other=max(0.0, 1 - sum(shares.values())))


def masked_tokens(steps: Steps) -> int:
    """Count sampled tokens without a loss weight."""
    both = zip(steps.column("tokens/sampled"), steps.column("tokens/trained"), strict=True)
    masked = (sampled - (0.0 if math.isnan(trained) else trained) for sampled, trained in both)
    return int(sum(num for num in masked if num > 0))


def thinned(values: Sequence[float], num: int) -> list[float]:
    """Reduce values to at most `num` means."""
    if len(values) <= num:
        return list(values)
    edges = [round(index * len(values) / num) for index in range(num + 1)]
    return [fmean(values[start:end]) for start, end in pairwise(edges)]


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], *, width: int = 32) -> str:
    """Draw values as at most `width` block characters."""
    means = thinned(values, width)
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in means)


def duration(seconds: float) -> str:
    """Format as 8.3 s, 4 min 05 s, 2 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def several(num: float, noun: str) -> str:
    """Format as `1 group`, `3 groups`."""
    return f"{num:.0f} {noun if num == 1 else f'{noun}s'}"


def grid(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Draw a row for each field."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for name, shown in rows:
        table.add_row(Text(name), shown)
    return table


def boxed(rows: Iterable[tuple[str, RenderableType]], title: str | Text) -> Panel:
    """Draw a grid in a frame."""
    return Panel(grid(rows), title=Text.assemble(title), title_align="left", border_style="blue")


def plain(value: Any) -> str:
    """Format a value of a summary for a table."""
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


def skipped_text(metrics: Mapping[str, float]) -> str:
    """Format as `1 update skipped in step 12: not finite`; '' without a skipped update."""
    num = metrics.get("trainer/skipped_steps", 0.0)
    return f"{several(num, 'update')} skipped in step {metrics['step']:.0f}: not finite" if num else ""


def by_evaluation(lines: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group lines of eval.jsonl by the name of their evaluation, '' for the only one."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(str(line.get("name", "")), []).append(line)
    return found


def evaluation_text(metrics: Mapping[str, Any]) -> str:
    """Format a line of eval.jsonl: `v40 reward 0.413 ± 0.031  12.3 tokens, 2.0% truncated  3.2 s`, then
    failures.
    """
    parts = [f"{metrics.get('name', '')} v{metrics['eval/version']:.0f}".lstrip()]
    if "eval/reward_mean" in metrics:
        error = f" ± {metrics['eval/standard_error']:.3f}" if "eval/standard_error" in metrics else ""
        parts[0] += f" reward {metrics['eval/reward_mean']:.3f}{error}"
        truncated = f"{metrics['eval/truncated_fraction']:.1%} truncated"
        parts.append(f"{metrics['eval/length_mean']:.1f} tokens, {truncated}")
    parts.append(f"{metrics['eval/seconds']:.1f} s")
    words = {
        "eval/failed": "samples failed",
        "eval/skipped": "skipped so far",
        "eval/abandoned": "abandoned so far",
        "eval/abandoned_calls": "reward calls abandoned so far",
    }
    parts += [f"{what}: {metrics[name]:.0f}" for name, what in words.items() if metrics.get(name)]
    return "  ".join(parts)
