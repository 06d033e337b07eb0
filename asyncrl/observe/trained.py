"""What was trained on, from the trainer's own record, and whether it kept the bound. Trusts no counter of any other room.

Step v is the one whose batch turned policy_version v into v + 1: the same number as `step` in metrics.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainedTrajectory:
    """One trajectory of a batch, a branch of its rollout.

    `spans` are (start, end, version) of its tokens with a loss weight; `tokens_sha` is of all its tokens.
    """

    group_id: int
    prompt_id: str
    sample_index: int
    reward: float
    num_tokens: int
    num_loss_tokens: int
    spans: tuple[tuple[int, int, int], ...]
    tokens_sha: str = ""
    branch: int = 0

    @property
    def name(self) -> str:
        """`group 3, sample 1`, and the branch if it is not the first."""
        return f"group {self.group_id}, sample {self.sample_index}" + (f", branch {self.branch}" if self.branch else "")


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """One optimizer step: its batch turned policy_version `version` into version + 1."""

    version: int
    min_version: int
    trajectories: tuple[TrainedTrajectory, ...]

    @property
    def step(self) -> int:
        """Number of the step, from 0: the version that its batch was trained on."""
        return self.version

    @property
    def tokens_by_version(self) -> dict[int, int]:
        """policy_version -> number of loss tokens sampled under it."""
        counts: Counter[int] = Counter()
        for trajectory in self.trajectories:
            for start, end, version in trajectory.spans:
                counts[version] += end - start
        return dict(sorted(counts.items()))

    @property
    def staleness(self) -> list[int]:
        """Of each trajectory with a loss token, versions between the batch and the oldest such token."""
        return [self.version - min(version for *_, version in t.spans) for t in self.trajectories if t.spans]

    def as_dict(self, *, with_trajectories: bool) -> dict[str, Any]:
        """Plain values for JSON."""
        ages, rewards = self.staleness, [t.reward for t in self.trajectories if t.branch == 0]  # that of the rollout
        plain: dict[str, Any] = {
            "step": self.step,
            "version": self.version,
            "min_version": self.min_version,
            "group_ids": sorted({trajectory.group_id for trajectory in self.trajectories}),
            "num_trajectories": len(self.trajectories),
            "num_loss_tokens": sum(trajectory.num_loss_tokens for trajectory in self.trajectories),
            "reward_mean": fmean(rewards) if rewards else None,
            "staleness_mean": fmean(ages) if ages else None,
            "staleness_max": max(ages, default=None),
            "tokens_by_version": {str(version): num for version, num in self.tokens_by_version.items()},
        }
        if with_trajectories:
            plain["trajectories"] = [trajectory_dict(self, trajectory) for trajectory in self.trajectories]
        return plain


def trajectory_dict(batch: TrainedBatch, trajectory: TrainedTrajectory) -> dict[str, Any]:
    """Plain values of one trajectory for JSON."""
    return {
        "group_id": trajectory.group_id,
        "prompt_id": trajectory.prompt_id,
        "sample_index": trajectory.sample_index,
        "branch": trajectory.branch,
        "reward": trajectory.reward,
        "num_tokens": trajectory.num_tokens,
        "num_loss_tokens": trajectory.num_loss_tokens,
        "staleness": batch.version - min(version for *_, version in trajectory.spans) if trajectory.spans else None,
        "spans": [list(span) for span in trajectory.spans],
    }


@dataclass(frozen=True, slots=True)
class TrainedRecord:
    """trained.jsonl as it counts. `restored`: versions from which the trainer went on; what it had done after them was done again.

    `replay_faults`: batches that were not the same the second time.
    """

    batches: tuple[TrainedBatch, ...]
    restored: tuple[int, ...] = ()
    replay_faults: tuple[str, ...] = ()


def parse_record(lines: Sequence[Mapping[str, Any]], problems: list[str]) -> TrainedRecord:
    """Lines without the fields that they need are left out and told in `problems`. A later line of a version that was restored counts."""
    batches: list[TrainedBatch] = []
    before: dict[int, TrainedBatch] = {}
    restored, faults = [], []
    for number, line in enumerate(lines, start=1):
        try:
            if "restored" in line:
                restored.append(int(line["restored"]))
                before |= {batch.version: batch for batch in batches if batch.version >= restored[-1]}
                batches = [batch for batch in batches if batch.version < restored[-1]]
                continue
            batch = _parse(line)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            problems.append(f"trained.jsonl object {number} is no record of a step and is left out: {type(error).__name__} {error}")
            continue
        if (earlier := before.get(batch.version)) is not None and _data(earlier) != _data(batch):
            faults.append(f"step {batch.step} was trained again on other data than before it was restored")
        batches.append(batch)
    return TrainedRecord(tuple(batches), tuple(restored), tuple(faults))


def _data(batch: TrainedBatch) -> list[tuple[int, int, int, float, str]]:
    return [(t.group_id, t.sample_index, t.branch, t.reward, t.tokens_sha) for t in batch.trajectories]


def find_violations(batches: Sequence[TrainedBatch], max_staleness: int) -> list[str]:
    """Every way in which the record breaks a promise: too old, from the future, trained twice, does not add up, a step is missing."""
    found = []
    seen: dict[tuple[int, int, int], int] = {}
    for index, batch in enumerate(batches):
        if index and batch.version != batches[index - 1].version + 1:
            found.append(f"step {batch.step} follows step {batches[index - 1].step}")
        for trajectory in batch.trajectories:
            name = f"step {batch.step}, {trajectory.name}"
            found += [f"{name}: {fault}" for fault in _faults(batch, trajectory, max_staleness)]
            key = (trajectory.group_id, trajectory.sample_index, trajectory.branch)
            if key in seen:
                found.append(f"{name}: was trained on in step {seen[key]} already")
            seen[key] = batch.step
    return found


def _faults(batch: TrainedBatch, trajectory: TrainedTrajectory, max_staleness: int) -> list[str]:
    found = []
    for start, end, version in trajectory.spans:
        if version < batch.version - max_staleness:
            found.append(
                f"tokens {start}..{end - 1} are of version {version}, {batch.version - version} behind; {max_staleness} are allowed"
            )
        if version > batch.version:
            found.append(f"tokens {start}..{end - 1} are of version {version}, which did not exist yet")
    num_in_spans = sum(end - start for start, end, _ in trajectory.spans)
    if num_in_spans != trajectory.num_loss_tokens:
        found.append(f"{trajectory.num_loss_tokens} tokens in the loss, but spans of {num_in_spans}")
    return found


def _parse(line: Mapping[str, Any]) -> TrainedBatch:
    trajectories = tuple(
        TrainedTrajectory(
            group_id=int(entry["group_id"]),
            prompt_id=str(entry["prompt_id"]),
            sample_index=int(entry["sample_index"]),
            reward=float(entry["reward"]),
            num_tokens=int(entry["num_tokens"]),
            num_loss_tokens=int(entry["num_loss_tokens"]),
            spans=tuple((int(start), int(end), int(version)) for start, end, version in entry["spans"]),
            tokens_sha=str(entry.get("tokens_sha", "")),
            branch=int(entry.get("branch", 0)),
        )
        for entry in line["trajectories"]
    )
    return TrainedBatch(int(line["version"]), int(line["min_version"]), trajectories)
