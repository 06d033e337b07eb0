"""Declare every metric once (metrics.csv), and measure batches. job/reporter.py
collects the gauges() of all parts, and trainer/loss/step_metrics.py measures optimizer
steps. docs/metrics.md is written from GAUGES.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from itertools import groupby
from statistics import fmean, pstdev
from typing import Literal, NamedTuple, cast

import numpy as np

from asyncrl.base.extensions import extensions
from asyncrl.config.eval_config import PARTS_OF_EVALS
from asyncrl.messages.records import (
    Batch,
    Group,
    Rollout,
    Trajectory,
    epoch_of,
    num_sampled,
)
from asyncrl.rollouts.evaluation import add_reported

GaugeKind = Literal["step", "now", "total", "eval"]
KINDS: Mapping[GaugeKind, str] = {
    "step": "Per batch and optimizer step",
    "now": "At the end of the step",
    "total": "Counted over the whole run, including restarts and resumes",
    "eval": "Per evaluation, in eval.jsonl and in the metrics of the next step",
}


class Gauge(NamedTuple):
    """A metric. `meaning`: a whole sentence, the caption of its chart."""

    kind: GaugeKind
    unit: str
    meaning: str


def _read_gauges() -> dict[str, Gauge]:
    found = dict[str, Gauge]()
    of_extensions = (extension.metrics for extension in extensions().values())
    for place in filter(None, ("asyncrl.observe:metrics.csv", *of_extensions)):
        package, _, file = place.partition(":")
        text = (resources.files(package) / file).read_text(encoding="utf-8")
        for name, kind, unit, meaning in csv.reader(text.splitlines()[1:]):
            found[name] = Gauge(cast("GaugeKind", kind), unit, meaning)
    return found


GAUGES: Mapping[str, Gauge] = _read_gauges()
"""Declarations in metrics.csv, in their order, then the ones of extensions."""


PROGRESS = frozenset(
    """
    buffer/admitted buffer/next_batch buffer/served checkpoint/failed checkpoint/made engine/down
    engine/restarts engine/tokens evaluation/ended gateway/calls harness/leases harness/workers
    policy_version publish/version reward/posted rollout/failed rollout/finished
    trainer/down trainer/restarts trainer/version handover/phases
    """.split()
)
"""Counters whose change shows progress, for the watchdog, in addition to counters of
servers with another role and of scorers that ask others.
"""


@lru_cache(maxsize=4096)
def gauge_of(name: str) -> Gauge | None:
    """Return a declaration; NAME/* covers all names below it.

    A third part names a task or an engine: reward/mean/sums. eval/NAME/... is of one
    evaluation.
    """
    first, *rest = name.split("/")
    if first == "eval" and len(rest) > 1 and rest[0] not in PARTS_OF_EVALS:
        rest = rest[1:]
    declared = "/".join([first, *rest[:1]])
    return (
        GAUGES.get(declared) or GAUGES.get(f"{declared}/*") or GAUGES.get(f"{first}/*")
    )


def is_total(name: str) -> bool:
    gauge = gauge_of(name)
    return gauge is not None and gauge.kind == "total"


class Totals:
    """Counters of the whole run, across processes.

    Invariant: a total never falls; a source that reports less was restarted.

    Example: a resumed run starts from 100.

        engine-0 reports 40     140
        engine-0 reports 45     145
        engine-0 reports 5      150: its process was restarted, and all 5 are new
    """

    def __init__(self) -> None:
        self._totals: defaultdict[str, float] = defaultdict(float)
        self.added: dict[str, float] = {}
        """What this process has counted. Another thread may copy it."""
        self._seen: dict[tuple[str, str], float] = {}

    def starts_from(self, totals: Mapping[str, float]) -> None:
        for name, value in totals.items():
            # Journal and metrics.jsonl both have totals, and either may be older. The
            # larger one misses less.
            self._totals[name] = max(value, self._totals.get(name, value))

    def add(
        self, counted: Mapping[str, float | Mapping[str, float]]
    ) -> dict[str, float]:
        """`counted`: counts so far, of one source or of several by name."""
        for name, value in counted.items():
            for source, now in (
                value if isinstance(value, Mapping) else {"": value}
            ).items():
                before = self._seen.get((name, source), 0)
                more = now - before if now >= before else now
                self._totals[name] += more
                self.added[name] = self.added.get(name, 0) + more
                self._seen[name, source] = now
        return {name: self._totals[name] for name in counted}


class SpecialTokens(NamedTuple):
    """`end_ids` end a turn; `stray_ids` have no place inside an answer."""

    end_ids: frozenset[int] = frozenset()
    stray_ids: frozenset[int] = frozenset()


def batch_metrics(batch: Batch, special: SpecialTokens) -> dict[str, float]:
    """Return rewards, ages, lengths and endings, with all branches. Without a token in
    the loss no staleness is reported.
    """
    groups = [rollouts_of(group) for group in batch.groups]
    rollouts = [rollout for group in groups for rollout in group]
    # A branch may be masked as a whole. Such a branch has no age.
    kept = [[_kept(branch, batch) for branch in rollout] for rollout in rollouts]
    oldest = [
        [version for _, version in branches if version is not None] for branches in kept
    ]
    # By the oldest token in the loss: that is what buffer.max_staleness bounds.
    ages = [batch.version - min(versions) for versions in oldest if versions]
    num_all = sum(map(num_sampled, rollouts))
    num_trained = sum(num for branches in kept for num, _ in branches)
    metrics = {
        # All branches of a rollout have its reward, so each rollout counts once.
        "reward/std": pstdev(rollout[0].reward for rollout in rollouts),
        "reward/equal_fraction": fmean(
            len({r[0].reward for r in group}) == 1 for group in groups
        ),
        "sample/special_fraction": fmean(
            _has_stray(rollout, special) for rollout in rollouts
        ),
        "sample/unfinished_fraction": fmean(
            _is_unfinished(rollout, special) for rollout in rollouts
        ),
        "sample/masked_fraction": 1 - num_trained / num_all if num_all else 0.0,
        "sample/interrupted_fraction": fmean(
            any(branch.num_interruptions for branch in r) for r in rollouts
        ),
        "sample/epoch": max(epoch_of(group.prompt.prompt_id) for group in batch.groups),
        "tokens/sampled": num_all,
        "tokens/trained": num_trained,
        **_means(rollouts, ""),
    }
    if ages:
        metrics |= {
            "sample/staleness_mean": fmean(ages),
            "sample/staleness_max": max(ages),
        }
    of_tasks = defaultdict[str, list[Rollout]](list)
    for group, found in zip(batch.groups, groups, strict=True):
        of_tasks[group.prompt.task] += found
    for task, found in of_tasks.items():
        if task:
            metrics |= _means(found, f"/{task}")
    reported = defaultdict[str, list[float]](list)
    for rollout in rollouts:
        add_reported(reported, rollout, "reward/part")
    metrics |= {name: fmean(values) for name, values in reported.items()}
    return metrics


def _means(rollouts: Sequence[Rollout], ending: str) -> dict[str, float]:
    return {
        f"reward/mean{ending}": fmean(rollout[0].reward for rollout in rollouts),
        f"sample/length_mean{ending}": fmean(map(num_sampled, rollouts)),
        f"sample/truncated_fraction{ending}": fmean(
            any(b.is_truncated for b in r) for r in rollouts
        ),
    }


def rollouts_of(group: Group) -> list[Rollout]:
    """Return the rollouts, each with all its branches."""
    by_index = groupby(group.trajectories, lambda branch: branch.sample_index)
    return [tuple(branches) for _, branches in by_index]


def _has_stray(rollout: Rollout, special: SpecialTokens) -> bool:
    # By spans: a mask of each branch took half the time of all metrics.
    sampled = (
        branch.token_ids[span.start : span.end]
        for branch in rollout
        for span in branch.tokens.spans
    )
    return any(not special.stray_ids.isdisjoint(ids.tolist()) for ids in sampled)


def _is_unfinished(rollout: Rollout, special: SpecialTokens) -> bool:
    """An answer that ended before its agent met a limit is not truncated."""
    last = rollout[-1]
    return last.is_truncated and int(last.token_ids[-1]) not in special.end_ids


def num_turns(rollout: Rollout) -> int:
    """Count stretches of sampled tokens; turns are always separated."""
    masks = [branch.loss_mask for branch in rollout]
    return sum(
        int(mask[0]) + int(np.count_nonzero(mask[1:] > mask[:-1])) for mask in masks
    )


def _kept(trajectory: Trajectory, batch: Batch) -> tuple[int, int | None]:
    """Return the number of tokens with a loss weight, and their oldest version."""
    num = 0
    versions = []
    for span in trajectory.tokens.spans:
        if not (batch.mask_older and span.version < batch.min_version):
            num += span.end - span.start
            versions.append(span.version)
    return num, min(versions, default=None)
