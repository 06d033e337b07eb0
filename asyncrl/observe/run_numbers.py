"""Numbers of a whole run out of its step metrics, and the words that console, status and summary share."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from asyncrl.config import RunConfig

COLUMNS = (
    "step",
    "time_s",
    "reward/mean",
    "tokens/sampled",
    "tokens/trained",
    "perf/step_s",
    "perf/train_s",
    "perf/weight_sync_s",
    "perf/wait_generation_s",
    "perf/wait_stragglers_s",
    "perf/wait_publishing_s",
    "perf/handover_s",
    "sample/staleness_mean",
    "rollout/inflight",
    "rollout/dropped",
    "rollout/filtered",
    "rollout/filtered_tokens",
    "rollout/given_up",
    "trainer/skipped_steps",
)
"""Metrics that are asked of all steps."""


class Steps:
    """The metrics of all steps of a run, as far as they are asked of all: 8 bytes each a step. `last`: the
    last line whole. A line of a step that is there already, or of one before it, takes the place of all from
    there on.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = (), *, names: Sequence[str] = COLUMNS) -> None:
        self._names, self._rows = tuple(names), array("d")
        self._newest = -math.inf
        self.last: Mapping[str, Any] = {}
        for line in lines:
            self.add(line)

    def __len__(self) -> int:
        return len(self._rows) // len(self._names)

    def add(self, line: Mapping[str, Any]) -> None:
        """One more step."""
        get = line.get
        if (step := get("step")) is not None:
            if step <= self._newest:
                self._keep_below(step)
            self._newest = step
        self.last = line
        self._rows.extend([get(name, math.nan) for name in self._names])

    def column(self, name: str) -> array[float]:
        """One number a step, NaN where its line has none."""
        return self._rows[self._names.index(name) :: len(self._names)]

    def values(self, name: str) -> list[float]:
        """Of the steps that have the metric."""
        return [value for value in self.column(name) if value == value]

    def rows(self) -> Iterator[dict[str, float]]:
        """What the columns have of each step, one at a time."""
        width = len(self._names)
        for start in range(0, len(self._rows), width):
            row = zip(self._names, self._rows[start : start + width], strict=True)
            yield {name: value for name, value in row if value == value}

    def total(self, name: str) -> float:
        """Sum over the steps that have the metric."""
        return float(sum(self.values(name)))

    def mean(self, name: str, part: slice = slice(None)) -> float | None:
        """Mean over the steps, or a part of them, that have the metric; None if none has."""
        values = [value for value in self.column(name)[part] if value == value]
        return fmean(values) if values else None

    def counted(self, name: str, *, last: int | None = None) -> float:
        """What a counter of the whole run has counted over the steps, or over the `last` ones of them."""
        values = [0.0, *self.values(name)]
        num = len(values) - 1 if last is None else sum(value == value for value in self.column(name)[-last:])
        return float(values[-1] - values[len(values) - 1 - num])

    def _keep_below(self, step: float) -> None:
        stay = len(self)
        for before in reversed(self.column("step")):
            if before < step:
                break
            stay -= 1
        del self._rows[stay * len(self._names) :]


@dataclass(frozen=True, slots=True)
class OverdueNumbers:
    """What became of overdue groups, of the whole run; 0 where the choice of on_overdue has no such thing.

    wait: straggler_s, seconds the trainer waited for stragglers; num_straggler_waits, batches that had to;
    num_waited_groups, groups they waited for; waited_fraction, the part of all trained tokens that mask would
    have had to mask had it taken each batch at once, an estimate. mask: num_masked_groups, groups trained on
    with masked tokens; masked_fraction, of the sampled tokens. mask, drop: num_handed_back, groups
    regenerated as nothing of them was young enough. num_groups: trained on.
    """

    straggler_s: float = 0.0
    num_straggler_waits: int = 0
    num_waited_groups: int = 0
    waited_fraction: float = 0.0
    num_masked_groups: int = 0
    masked_fraction: float = 0.0
    num_handed_back: int = 0
    num_groups: int = 0


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Where the wall time of the steps went; each 0..1, they add up to 1. `other` is what no metric names,
    `turns` are handovers where trainer and engines share devices.
    """

    training: float
    generation: float
    stragglers: float
    publishing: float
    other: float
    turns: float = 0.0

    @property
    def waiting(self) -> float:
        """All waits together."""
        return self.generation + self.stragglers + self.publishing

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> TimeShares | None:
        """From summed metrics. Parts that exceed the whole (rounding) are scaled down; None of no time at
        all.
        """
        parts = {name: seconds.get(key, 0.0) for name, key in TIME_METRICS.items()}
        whole = max(seconds.get("perf/step_s", 0.0), sum(parts.values()))
        if whole <= 0:
            return None
        shares = {name: part / whole for name, part in parts.items()}
        return cls(**shares, other=max(0.0, 1 - sum(shares.values())))


TIME_METRICS = {
    "training": "perf/train_s",
    "generation": "perf/wait_generation_s",
    "stragglers": "perf/wait_stragglers_s",
    "publishing": "perf/wait_publishing_s",
    "turns": "perf/handover_s",
}


def time_shares(steps: Steps) -> TimeShares:
    """Of all steps together."""
    names = ("perf/step_s", *TIME_METRICS.values())
    return TimeShares.of({name: steps.total(name) for name in names}) or TimeShares(0.0, 0.0, 0.0, 0.0, 1.0)


def overdue_from_steps(steps: Steps, config: RunConfig) -> OverdueNumbers:
    """The overdue numbers as far as step metrics tell them."""
    sampled, trained = steps.total("tokens/sampled"), steps.total("tokens/trained")
    return OverdueNumbers(
        straggler_s=steps.total("perf/wait_stragglers_s"),
        num_straggler_waits=sum(seconds > 0 for seconds in steps.column("perf/wait_stragglers_s")),
        masked_fraction=1 - trained / sampled if sampled else 0.0,
        num_handed_back=int(steps.counted("rollout/dropped")),
        num_groups=len(steps) * config.trainer.num_groups,
    )


def masked_tokens(steps: Steps) -> int:
    """Sampled tokens that batches trained on without a loss weight."""
    both = zip(steps.column("tokens/sampled"), steps.column("tokens/trained"), strict=True)
    masked = (sampled - (0.0 if math.isnan(trained) else trained) for sampled, trained in both)
    return int(sum(max(0.0, num) for num in masked if num == num))


def thinned(values: Sequence[float], num: int) -> list[float]:
    """The values as at most `num` numbers, each the mean of its stretch."""
    if len(values) <= num:
        return list(values)
    edges = [round(index * len(values) / num) for index in range(num + 1)]
    return [fmean(values[start:end]) for start, end in pairwise(edges)]


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], *, width: int) -> str:
    """The values as at most `width` block characters, from their smallest to their largest."""
    means = thinned(values, width)
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in means)


def duration(seconds: float) -> str:
    """8.3 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def several(num: float, noun: str) -> str:
    """`1 group`, `3 groups`."""
    return f"{num:.0f} {noun if num == 1 else f'{noun}s'}"


def plain(value: Any) -> str:
    """A value of a summary in a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        between = "\n" if any(isinstance(item, (list, tuple, Mapping)) for item in value) else ", "
        return between.join(plain(item) for item in value) or "none"
    return str(value)


def skipped_text(metrics: Mapping[str, float]) -> str:
    """`step skipped: not finite (batch 11, counted from 0)`; '' where no optimizer step of the batch was.

    Beside `step 12/300` it says that both are the same: files and logs name the batch.
    """
    num = metrics.get("trainer/skipped_steps", 0.0)
    what = "step" if num == 1 else several(num, "step")
    return f"{what} skipped: not finite (batch {metrics['step']:.0f}, counted from 0)" if num else ""


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """One evaluation on a line: `v40 reward 0.413 ± 0.031  12.3 tokens, 2.0% truncated  3.2 s`; then what
    went wrong.
    """
    parts = [f"v{metrics['eval/version']:.0f}"]
    if "eval/reward_mean" in metrics:
        error = f" ± {metrics['eval/standard_error']:.3f}" if "eval/standard_error" in metrics else ""
        parts[0] += f" reward {metrics['eval/reward_mean']:.3f}{error}"
        parts.append(
            f"{metrics['eval/length_mean']:.1f} tokens, {metrics['eval/truncated_fraction']:.1%} truncated"
        )
    parts.append(f"{metrics['eval/seconds']:.1f} s")
    words = {
        "eval/failed": "samples failed",
        "eval/skipped": "skipped so far",
        "eval/abandoned": "abandoned so far",
        "eval/abandoned_calls": "reward calls abandoned so far",
    }
    parts += [f"{what}: {metrics[name]:.0f}" for name, what in words.items() if metrics.get(name)]
    return "  ".join(parts)
