"""Metrics of one batch, from the batch itself and nothing else: staleness is measured where it is consumed.
Knows no rooms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean, pstdev

import numpy as np

from asyncrl.messages.records import Batch, Rollout, Trajectory


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Rewards, ages and lengths of the rollouts of one batch, by metric name. A rollout is all its branches
    together.

    reward/mean, reward/std            over rollouts (population standard deviation)
    sample/staleness_mean and _max     policy versions between the batch and the oldest token with a loss
    weight of a
                                       rollout; rollouts without such a token are left out, and with none at
                                       all the keys are
    sample/length_mean                 sampled tokens of a rollout
    sample/truncated_fraction          rollouts with a completion that ran into rollout.max_tokens and ended
    its branch sample/masked_fraction             sampled tokens that get loss weight 0 because of their age
    sample/interrupted_fraction        rollouts that at least one weight swap interrupted
    sample/turns_mean                  turns of a rollout, where one has several: stretches of sampled tokens
    in its branches sample/branches_mean               branches of a rollout, where one has several
    tokens/sampled, tokens/trained     sampled tokens, and those of them with a loss weight
    task/NAME                          mean of Trajectory.metrics[NAME] over the rollouts that have it
    """
    rollouts: list[Rollout] = [
        tuple(branches)
        for group in batch.groups
        for _, branches in groupby(group.trajectories, lambda branch: branch.sample_index)
    ]
    rewards = [rollout[0].reward for rollout in rollouts]
    kept = [[_kept(branch, batch) for branch in rollout] for rollout in rollouts]
    oldest = [[version for _, version in branches if version is not None] for branches in kept]
    ages = [batch.version - min(versions) for versions in oldest if versions]
    num_sampled = sum(branch.num_sampled for rollout in rollouts for branch in rollout)
    num_trained = sum(num for branches in kept for num, _ in branches)
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "sample/length_mean": num_sampled / len(rollouts),
        "sample/truncated_fraction": fmean(
            any(branch.is_truncated for branch in rollout) for rollout in rollouts
        ),
        "sample/masked_fraction": 1 - num_trained / num_sampled if num_sampled else 0.0,
        "sample/interrupted_fraction": fmean(
            any(branch.num_interruptions for branch in rollout) for rollout in rollouts
        ),
        "tokens/sampled": num_sampled,
        "tokens/trained": num_trained,
    }
    if ages:
        metrics |= {"sample/staleness_mean": fmean(ages), "sample/staleness_max": max(ages)}
    counts = {
        "sample/turns_mean": [sum(_num_turns(branch) for branch in rollout) for rollout in rollouts],
        "sample/branches_mean": [len(rollout) for rollout in rollouts],
    }
    return (
        metrics
        | {name: fmean(numbers) for name, numbers in counts.items() if max(numbers) > 1}
        | _told(rollouts)
    )


def _told(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What generators and tasks say of their rollouts; it is the same at each branch."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout[0].metrics)
    return {
        f"task/{name}": fmean(rollout[0].metrics[name] for rollout in rollouts if name in rollout[0].metrics)
        for name in names
    }


def _num_turns(branch: Trajectory) -> int:
    """Stretches of sampled tokens: between two turns there is always something that nobody sampled."""
    return int(branch.loss_mask[0]) + int(np.count_nonzero(branch.loss_mask[1:] > branch.loss_mask[:-1]))


def _kept(trajectory: Trajectory, batch: Batch) -> tuple[int, int | None]:
    """(number of tokens with a loss weight, oldest version among them). A batch that masks nothing keeps its
    oldest token too.
    """
    num, versions = 0, []
    for span in trajectory.version_spans:
        num_in_loss = int(trajectory.loss_mask[span.start : span.end].sum())
        if num_in_loss and not (batch.mask_older and span.version < batch.min_version):
            num += num_in_loss
            versions.append(span.version)
    return num, min(versions, default=None)


# Totals that outlive the process that counts them: over an engine that is started again, and over a resume.
# Knows names and numbers.


class Totals:
    """Counters of the whole run by metric name.

    Life:       begins at 0, or where starts_from says, then add() is told what each source has counted since
    it began. Invariant:  a total never falls. A source that says less than before began anew: all that it
    says was counted since.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._seen: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        return f"<Totals {self._totals}>"

    def starts_from(self, totals: Mapping[str, float]) -> None:
        """What was counted before, by other processes; a total that is higher stays."""
        for name, value in totals.items():
            self._totals[name] = max(value, self._totals.get(name, value))

    def add(self, counted: Mapping[str, float | Mapping[str, float]]) -> dict[str, float]:
        """The totals of these names, now that their sources (one, or several by name) have counted so far."""
        for name, value in counted.items():
            for source, now in (value if isinstance(value, Mapping) else {"": value}).items():
                before = self._seen.get((name, source), 0)
                self._totals[name] = self._totals.get(name, 0) + (now - before if now >= before else now)
                self._seen[name, source] = now
        return {name: self._totals.get(name, 0) for name in counted}
