"""Groups made by hand for the buffer's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.buffer.buffer import Buffer
from asyncrl.config import BufferConfig
from asyncrl.errors import WouldWait
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Ticket, Trajectory, VersionSpan


def make_group(group_id: int, *rollouts: Sequence[int], rewards: Sequence[float] = ()) -> Group:
    """One trajectory for each sequence of versions: two prompt tokens, then one token sampled under each
    version. Rewards default to 0.
    """
    given = rewards or [0.0] * len(rollouts)
    trajectories = (
        _trajectory(i, versions, reward)
        for i, (versions, reward) in enumerate(zip(rollouts, given, strict=True))
    )
    return Group(GroupId(group_id), Prompt(f"p{group_id}", ()), tuple(trajectories))


def _trajectory(index: int, versions: Sequence[int], reward: float) -> Trajectory:
    spans = tuple(VersionSpan(2 + i, 3 + i, version) for i, version in enumerate(versions))
    mask = np.array([False, False] + [True] * len(versions))
    return Trajectory(
        index, np.zeros(len(mask), np.int32), mask, np.zeros(len(mask), np.float32), spans, reward
    )


def versions_of(group: Group) -> list[int]:
    """The version of every sampled token."""
    return [
        span.version
        for trajectory in group.trajectories
        for span in trajectory.version_spans
        for _ in range(span.start, span.end)
    ]


def oldest_trained_age(batch: Batch) -> int:
    """Age of the oldest token with a loss weight, from the recorded spans alone."""
    ages = [batch.version - version for group in batch.groups for version in versions_of(group)]
    return max(age for age in ages if not batch.mask_older or batch.version - age >= batch.min_version)


async def wait_admit(buffer: Buffer) -> Ticket:
    """Leave to start one group, as soon as there is any."""
    while True:
        try:
            return buffer.admit_nowait()
        except WouldWait:
            await buffer.wait_open()


class HandedBackLog(list[tuple[int, bool, str]]):
    """Callback for a buffer: keeps (group id, whether it was ready, reason)."""

    def __call__(self, group_id: GroupId, group: Group | None, reason: str) -> None:
        self.append((group_id, group is not None, reason))


def make_buffer(
    *,
    num_groups: int = 2,
    num_batches: int = 10,
    max_staleness: int = 1,
    look_ahead: int | str | None = None,
    on_overdue: str = "wait",
    filter_kind: str = "none",
    max_filtered_groups: int = 10**9,
    log: HandedBackLog | None = None,
) -> Buffer:
    """A buffer with look_ahead = max_staleness unless told otherwise."""
    config = BufferConfig.model_validate(
        {
            "max_staleness": max_staleness,
            "look_ahead": max_staleness if look_ahead is None else look_ahead,
            "on_overdue": on_overdue,
            "filter": filter_kind,
            "max_filtered_groups": max_filtered_groups,
        }
    )
    return Buffer(
        config,
        num_groups=num_groups,
        num_batches=num_batches,
        on_handed_back=HandedBackLog() if log is None else log,
    )
