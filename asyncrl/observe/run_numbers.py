"""Numbers of a whole run out of its step metrics: where the time went, what was overdue. Knows metrics; knows no rooms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from asyncrl.config import RunConfig

Steps = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class OverdueNumbers:
    """What became of overdue groups, as plain numbers of the whole run; 0 where the choice of on_overdue has no such thing.

    straggler_s: seconds the trainer waited for stragglers (wait). num_straggler_waits: batches that had to wait for one (wait).
    num_waited_groups: groups that batches waited for; waited_fraction: the tokens of theirs, of all trained on, that mask would have had to
    mask had it taken each batch at once, 0..1: an estimate (wait).
    num_masked_groups: groups trained on with masked tokens (mask). masked_fraction: sampled tokens masked, 0..1 (mask).
    num_handed_back: groups regenerated because nothing of them was young enough (mask, drop).
    num_groups: groups trained on.
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
    """Shares of the summed perf/step_s. Parts that overlap or exceed the whole (rounding) are scaled down to it."""
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
        num_straggler_waits=sum(step.get("perf/wait_stragglers_s", 0.0) > 0 for step in steps),
        masked_fraction=1 - trained / sampled if sampled else 0.0,
        num_handed_back=int(counted(steps, "rollout/dropped")),
        num_groups=len(steps) * config.trainer.num_groups,
    )


def total(steps: Steps, name: str) -> float:
    """Sum over the steps that have the metric."""
    return float(sum(step.get(name, 0.0) for step in steps))


def counted(steps: Steps, name: str, *, last: int | None = None) -> float:
    """What a counter has counted over the steps, or over the `last` ones of them.

    The counters of a run that was resumed begin at 0 again: where one falls, all that it says was counted since.
    """
    values = [0.0, *(step[name] for step in steps if name in step)]
    grown = [now - before if now >= before else max(0.0, now) for before, now in pairwise(values)]
    if last is not None:
        grown = grown[len(grown) - sum(name in step for step in steps[-last:]) :]
    return float(sum(grown))


def mean(steps: Steps, name: str) -> float | None:
    """Mean over the steps that have the metric; None if none has."""
    values = [step[name] for step in steps if name in step]
    return fmean(values) if values else None
