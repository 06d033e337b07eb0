"""Groups made by hand for the buffer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from token_cases import trajectory_of

from asyncrl.buffer.buffer import Buffer
from asyncrl.config import BufferConfig
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, VersionSpan


def make_group(
    group_id: int, *rollouts: Sequence[int], rewards: Sequence[float] = ()
) -> Group:
    """Return a trajectory for each sequence of versions: two prompt tokens, then one
    token sampled under each version. Rewards default to 0.
    """
    given = rewards or [0.0] * len(rollouts)
    trajectories = []
    for index, (versions, reward) in enumerate(zip(rollouts, given, strict=True)):
        spans = tuple(
            VersionSpan(2 + i, 3 + i, version) for i, version in enumerate(versions)
        )
        mask = np.array([False, False] + [True] * len(versions))
        zeros = np.zeros(len(mask))
        trajectories.append(trajectory_of(index, zeros, mask, zeros, spans, reward))
    return Group(GroupId(group_id), Prompt(f"p{group_id}", ()), tuple(trajectories))


def versions_of(group: Group) -> list[int]:
    """The version of every sampled token."""
    return [
        span.version
        for trajectory in group.trajectories
        for span in trajectory.tokens.spans
        for _ in range(span.start, span.end)
    ]


def oldest_trained_age(batch: Batch) -> int:
    """Age of the oldest token with a loss weight, from the recorded spans only."""
    ages = [
        batch.version - version
        for group in batch.groups
        for version in versions_of(group)
    ]
    return max(
        age
        for age in ages
        if not batch.mask_older or batch.version - age >= batch.min_version
    )


class HandedBackLog(list[tuple[int, bool, str]]):
    """Callback for a buffer: keeps (group id, whether it was ready, reason)."""

    def __call__(self, group_id: GroupId, group: Group | None, reason: str) -> None:
        self.append((group_id, group is not None, reason))


def make_buffer(
    num_groups: int = 2,
    num_batches: int = 10,
    log: HandedBackLog | None = None,
    part_tokens: int = 0,
    compares_parts: bool = False,
    **config: Any,
) -> Buffer:
    """A buffer with look_ahead = max_staleness by default."""
    values = {"max_staleness": 1, "on_overdue": "wait", **config}
    buffer = Buffer(
        BufferConfig.model_validate({"look_ahead": values["max_staleness"], **values}),
        num_groups=num_groups,
        num_batches=num_batches,
        part_tokens=part_tokens,
        compares_parts=compares_parts,
    )
    buffer.requeue_to(HandedBackLog() if log is None else log)
    return buffer
