"""What one sample of the advantage is: a rollout, or the part of it that earned a reward of its own. Knows no loss and no weights.

A rollout without credits is one unit, all its branches together. With credits each of its unit numbers is one, wherever the tokens
lie. Units are numbered in the order in which a batch first names them, so that in a batch of single-branch rollouts without
credits unit b is trajectory b.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from asyncrl.serving import Refused
from asyncrl.wire import BatchHeader, CreditHeader, TrajectoryHeader

BoolN = npt.NDArray[np.bool_]
IntN = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """`rewards` and `groups` (group_index) of the B units; `unit_N` int64 [N]: that of each token, -1 where no credit says one."""

    rewards: list[float]
    groups: list[int]
    unit_N: IntN

    def count(self, chosen: BoolN) -> IntN:
        """Chosen tokens of each unit, int64 [B]."""
        unit_M = self.unit_N[chosen]
        return np.bincount(unit_M[unit_M >= 0], minlength=len(self.rewards))

    def spread(self, value_B: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The value of its unit at every token, 0 where it has none. float32 [N]."""
        return np.where(self.unit_N >= 0, value_B[self.unit_N], np.float32(0.0))


def find_units(header: BatchHeader, num_tokens: int) -> Units:
    """Of a batch that check_units has found right."""
    rewards, groups, unit_N = list[float](), list[int](), np.full(num_tokens, -1, np.int64)
    numbers: dict[tuple[int, int, int | None], int] = {}
    for entry in header.trajectories:
        for credit in entry.credits or [CreditHeader(start=0, end=entry.end - entry.start, reward=entry.reward, unit=-1)]:
            key = (entry.group_index, entry.sample_index, credit.unit)
            if key not in numbers:
                numbers[key] = len(rewards)
                rewards.append(credit.reward)
                groups.append(entry.group_index)
            unit_N[entry.start + credit.start : entry.start + credit.end] = numbers[key]
    return Units(rewards, groups, unit_N)


def check_units(header: BatchHeader, loss_mask: BoolN) -> None:
    """Refuse (422) rollouts whose branches or credits do not add up to samples; trajectories lie where the header says."""
    for _, branches in groupby(header.trajectories, key=lambda entry: (entry.group_index, entry.sample_index)):
        _check_rollout(list(branches), loss_mask)


def _check_rollout(branches: list[TrajectoryHeader], loss_mask: BoolN) -> None:
    first = branches[0]
    if any(entry.reward != first.reward for entry in branches):
        rewards = [entry.reward for entry in branches]
        raise wrong_batch(f"the branches of {trajectory_name(first)} have rewards {rewards}", "a rollout has one reward")
    if any(bool(entry.credits) != bool(first.credits) for entry in branches):
        with_credits = [entry.branch for entry in branches if entry.credits]
        raise wrong_batch(
            f"of the {len(branches)} branches of {trajectory_name(first)} only {with_credits} have credits",
            "credits cover every loss token of a rollout, or there are none",
        )
    rewards_of: dict[int, float] = {}
    for entry in branches:
        if entry.credits:
            _check_coverage(entry, loss_mask[entry.start : entry.end])
        for credit in entry.credits:
            known = rewards_of.setdefault(credit.unit, credit.reward)
            if not np.isfinite(credit.reward) or known != credit.reward:
                raise wrong_batch(
                    f"unit {credit.unit} of {trajectory_name(first)} has reward {credit.reward}, the first that is told is {known}",
                    "a unit of a rollout has one reward, a finite one",
                )


def _check_coverage(entry: TrajectoryHeader, loss_mask: BoolN) -> None:
    """Every loss token once; what nobody sampled may lie in a credit too."""
    edges = np.zeros(len(loss_mask) + 1, np.int64)
    for credit in entry.credits:
        if not 0 <= credit.start < credit.end <= len(loss_mask) or credit.unit < 0:
            raise wrong_batch(
                f"{trajectory_name(entry)} has a credit for tokens [{credit.start}, {credit.end}) of {len(loss_mask)}, unit {credit.unit}",
                "a credit is for at least one token of its trajectory, its unit 0 or more",
            )
        edges[credit.start] += 1
        edges[credit.end] -= 1
    times = edges.cumsum()[:-1]
    wrong = np.flatnonzero(loss_mask & (times != 1))
    if len(wrong):
        raise wrong_batch(
            f"token {wrong[0]} of {trajectory_name(entry)} is in {times[wrong[0]]} credits ({len(wrong)} such)",
            "credits cover every loss token once",
        )


def trajectory_name(entry: TrajectoryHeader) -> str:
    """`g17/r3`, and its branch unless it is the first."""
    return f"g{entry.group_id}/r{entry.sample_index}" + (f"/b{entry.branch}" if entry.branch else "")


def wrong_batch(error: str, rule: str) -> Refused:
    """A batch whose parts do not fit together."""
    return Refused(422, error, rule=rule, way_out="the controller made a wrong batch: please report it with this message.")
