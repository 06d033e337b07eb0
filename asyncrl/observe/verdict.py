"""What held a run back, in words and numbers, from its step metrics. Knows metrics and settings; knows no rooms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.observe.run_numbers import OverdueNumbers, Steps, TimeShares, mean, overdue_from_steps, time_shares, total
from asyncrl.observe.verdict_words import (
    Bottleneck,
    filtered_groups,
    given_up_prompts,
    knob,
    other_choices,
    skipped_steps,
    what_held_it_back,
)

__all__ = ["OverdueNumbers", "TimeShares", "Verdict", "judge"]

BUSY_WAIT_SHARE = 0.10
"""Below this share of waiting the trainer was busy: training itself set the pace."""
BALANCED_WAIT_SHARE = 0.25
"""Below this share of waiting neither side waited much for the other."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end-of-run summary. `bottleneck` in one word, `sentences` for people: what held the run back, which knob to turn."""

    num_steps: int
    wall_s: float
    reward_first: float | None
    """Mean of the first 5 steps (of a run below 10 steps: its first half)."""
    reward_last: float | None
    """Mean of the last tenth of the steps."""
    shares: TimeShares
    bottleneck: Bottleneck
    sentences: tuple[str, ...]
    num_skipped_steps: int = 0
    """Optimizer steps that were not taken, because loss or gradient was not finite."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Verdict:
        """The inverse of as_dict."""
        return cls(**{**plain, "shares": TimeShares(**plain["shares"]), "sentences": tuple(plain["sentences"])})


def judge(steps: Steps, config: RunConfig, overdue: OverdueNumbers | None = None) -> Verdict:
    """The verdict of a run with at least one step; `overdue` defaults to what the step metrics alone say.

    Raises ValueError without any step.
    """
    if not steps:
        raise ValueError("no steps, no verdict")
    shares = time_shares(steps)
    bottleneck = _bottleneck(shares)
    overdue = overdue or overdue_from_steps(steps, config)
    num_first = max(1, min(5, len(steps) // 2))
    num_last = max(1, len(steps) // 10)
    return Verdict(
        num_steps=len(steps),
        wall_s=float(steps.last.get("time_s", total(steps, "perf/step_s"))),
        reward_first=mean(steps, "reward/mean", slice(num_first)),
        reward_last=mean(steps, "reward/mean", slice(-num_last, None)),
        shares=shares,
        bottleneck=bottleneck,
        num_skipped_steps=int(total(steps, "trainer/skipped_steps")),
        sentences=(
            what_held_it_back(bottleneck, shares),
            knob(bottleneck, steps, config),
            *other_choices(overdue, steps, config),
            *filtered_groups(steps, config),
            *given_up_prompts(steps, config),
            *skipped_steps(steps),
        ),
    )


def _bottleneck(shares: TimeShares) -> Bottleneck:
    if shares.other > max(0.25, shares.training, shares.waiting):
        return "other"
    if shares.turns > max(0.25, shares.training, shares.waiting):
        return "turns"
    if shares.waiting < BUSY_WAIT_SHARE:
        return "training"
    if shares.waiting < BALANCED_WAIT_SHARE:
        return "balanced"
    waits: dict[Bottleneck, float] = {
        "generation": shares.generation,
        "stragglers": shares.stragglers,
        "publishing": shares.publishing,
    }
    return max(waits, key=lambda name: waits[name])
