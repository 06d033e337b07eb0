"""Numbers of a whole run out of its step metrics: where the time went, what was overdue. Knows metrics; knows
no rooms.
"""

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
    *(
        "step",
        "time_s",
        "reward/mean",
        "tokens/sampled",
        "tokens/trained",
        "perf/step_s",
        "perf/train_s",
        "perf/publish_s",
    ),
    *(
        "perf/wait_generation_s",
        "perf/wait_stragglers_s",
        "perf/wait_publishing_s",
        "perf/handover_s",
        "sample/staleness_mean",
    ),
    *(
        "rollout/inflight",
        "rollout/dropped",
        "rollout/filtered",
        "rollout/filtered_tokens",
        "rollout/given_up",
    ),
    "trainer/skipped_steps",
)
"""Metrics that are asked of all steps."""


class Steps:
    """The metrics of all steps of a run, as far as they are asked of all: 8 bytes each a step. `last`: the
    last line whole.

    A line of a step that is there already, or of one before it, takes the place of all from there on.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = (), *, names: Sequence[str] = COLUMNS) -> None:
        self._names, self._rows = tuple(names), array("d")
        self._newest = -math.inf
        self.last: Mapping[str, Any] = {}
        for line in lines:
            self.add(line)

    def __len__(self) -> int:
        return len(self._rows) // len(self._names)

    def __repr__(self) -> str:
        return f"<Steps {len(self)}, the last is {self.last.get('step')}>"

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

    def _keep_below(self, step: float) -> None:
        stay = len(self)
        for before in reversed(self.column("step")):
            if before < step:
                break
            stay -= 1
        del self._rows[stay * len(self._names) :]


@dataclass(frozen=True, slots=True)
class OverdueNumbers:
    """What became of overdue groups, as plain numbers of the whole run; 0 where the choice of on_overdue has
    no such thing.

    straggler_s: seconds the trainer waited for stragglers (wait). num_straggler_waits: batches that had to
    wait for one (wait). num_waited_groups: groups that batches waited for; waited_fraction: the tokens of
    theirs, of all trained on, that mask would have had to mask had it taken each batch at once, 0..1: an
    estimate (wait). num_masked_groups: groups trained on with masked tokens (mask). masked_fraction: sampled
    tokens masked, 0..1 (mask). num_handed_back: groups regenerated because nothing of them was young enough
    (mask, drop). num_groups: groups trained on.
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
    """Where the wall time of the steps went; each 0..1, they add up to 1. `other` is what no metric names."""

    training: float
    generation: float
    stragglers: float
    publishing: float
    other: float
    turns: float = 0.0
    """Of handovers, where trainer and engines take turns."""

    @property
    def waiting(self) -> float:
        """All waits together."""
        return self.generation + self.stragglers + self.publishing


def time_shares(steps: Steps) -> TimeShares:
    """Shares of the summed perf/step_s. Parts that overlap or exceed the whole (rounding) are scaled down to
    it.
    """
    parts = {
        "training": total(steps, "perf/train_s"),
        "generation": total(steps, "perf/wait_generation_s"),
        "stragglers": total(steps, "perf/wait_stragglers_s"),
        "publishing": total(steps, "perf/wait_publishing_s"),
        "turns": total(steps, "perf/handover_s"),
    }
    whole = max(total(steps, "perf/step_s"), sum(parts.values()))
    if whole <= 0:
        return TimeShares(0.0, 0.0, 0.0, 0.0, 1.0)
    shares = {name: seconds / whole for name, seconds in parts.items()}
    return TimeShares(**shares, other=max(0.0, 1 - sum(shares.values())))


def overdue_from_steps(steps: Steps, config: RunConfig) -> OverdueNumbers:
    """The overdue numbers as far as step metrics tell them."""
    sampled, trained = total(steps, "tokens/sampled"), total(steps, "tokens/trained")
    return OverdueNumbers(
        straggler_s=total(steps, "perf/wait_stragglers_s"),
        num_straggler_waits=sum(seconds > 0 for seconds in steps.column("perf/wait_stragglers_s")),
        masked_fraction=1 - trained / sampled if sampled else 0.0,
        num_handed_back=int(counted(steps, "rollout/dropped")),
        num_groups=len(steps) * config.trainer.num_groups,
    )


def masked_tokens(steps: Steps) -> int:
    """Sampled tokens that batches trained on without a loss weight."""
    both = zip(steps.column("tokens/sampled"), steps.column("tokens/trained"), strict=True)
    return int(
        sum(
            max(0.0, sampled - (0.0 if math.isnan(trained) else trained))
            for sampled, trained in both
            if sampled == sampled
        )
    )


def total(steps: Steps, name: str) -> float:
    """Sum over the steps that have the metric."""
    return float(sum(steps.values(name)))


def counted(steps: Steps, name: str, *, last: int | None = None) -> float:
    """What a counter of the whole run has counted over the steps, or over the `last` ones of them."""
    values = [0.0, *steps.values(name)]
    num = len(values) - 1 if last is None else sum(value == value for value in steps.column(name)[-last:])
    return float(values[-1] - values[len(values) - 1 - num])


def mean(steps: Steps, name: str, part: slice = slice(None)) -> float | None:
    """Mean over the steps, or a part of them, that have the metric; None if none has."""
    values = [value for value in steps.column(name)[part] if value == value]
    return fmean(values) if values else None


def thinned(values: Sequence[float], num: int) -> list[float]:
    """The values as at most `num` numbers, each the mean of its stretch."""
    if len(values) <= num:
        return list(values)
    edges = [round(index * len(values) / num) for index in range(num + 1)]
    return [fmean(values[start:end]) for start, end in pairwise(edges)]
