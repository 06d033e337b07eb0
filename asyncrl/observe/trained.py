"""What was trained on, from the trainer's own record, and whether it kept the bound. Trusts no counter of any
other room.

Step v is the one whose batch turned policy_version v into v + 1: the same number as `step` in metrics.jsonl.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.observe.recorder import LOST_KEY
from asyncrl.observe.run_files import lines_of, parse_line, steps_are_missing, tell


def _name_of(group_id: int, sample_index: int, branch: int) -> str:
    return f"group {group_id}, sample {sample_index}" + (f", branch {branch}" if branch else "")


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
        return _name_of(self.group_id, self.sample_index, self.branch)


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
        ages, rewards = (
            self.staleness,
            [t.reward for t in self.trajectories if t.branch == 0],
        )  # that of the rollout
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
        "staleness": batch.version - min(version for *_, version in trajectory.spans)
        if trajectory.spans
        else None,
        "spans": [list(span) for span in trajectory.spans],
    }


class TrainedRecord:
    """trained.jsonl as it counts, and whether it kept the bound. Life: made empty -> add() line by line ->
    asked.

    A later line of a version that was restored counts, and what was done there before is only compared with
    it. No line is kept: some numbers of each step, where its line begins, and where each group was trained
    on. What is shown is read again.
    """

    def __init__(self, path: Path, max_staleness: int) -> None:
        self.path, self.max_staleness = path, max_staleness
        self.restored: list[int] = []
        self.replay_faults: list[str] = []
        """Batches that were not the same the second time."""
        self._rows = array("q")
        """_ROW after _ROW."""
        self._lost: list[tuple[int, int, str]] = []
        self._faults: list[tuple[int, str]] = []
        self._before: dict[int, int] = {}
        self._places = _Places()

    def __repr__(self) -> str:
        return f"<TrainedRecord of {len(self)} steps, restored {len(self.restored)} times>"

    def __len__(self) -> int:
        return len(self._rows) // len(_ROW)

    def add(self, start: int, line: Mapping[str, Any]) -> None:
        """One line of the file, which begins at `start`. Raises KeyError, TypeError, ValueError and the like
        if it is of no step.
        """
        if "restored" in line:
            self._restore(int(line["restored"]))
            if LOST_KEY in line:
                first, last = line[LOST_KEY]
                self._lost.append((int(first), int(last), str(line.get("why"))))
            return
        version, entries = int(line["version"]), line["trajectories"]
        int(line["min_version"])
        faults: Sequence[str] = ()
        try:
            row, groups = _count(version, entries, version - self.max_staleness)
        except (_Suspect, KeyError, TypeError, ValueError, AttributeError):
            batch = _parse(line)
            row, groups = _row_of(batch), {trajectory.group_id for trajectory in batch.trajectories}
            faults = _faults_of_batch(batch, self.max_staleness)
        numbers = array("q", (start, version, *row))  # OverflowError before anything is changed
        if faults:
            self._faults += [(start, fault) for fault in faults[: max(0, _MAX_FAULTS - len(self._faults))]]
        for group in groups:
            earlier = self._places.put(group, start)
            if earlier is not None and (at := self._index(earlier)) is not None:
                self._places.put(group, earlier)
                self._find_twice(start, line, earlier, self._rows[at * len(_ROW) + 1], group)
        dropped = self._before.get(version)
        if (
            dropped is not None
            and len(self.replay_faults) < _MAX_FAULTS
            and _data(self._read(dropped)) != _data(_parse(line))
        ):
            self.replay_faults.append(
                f"step {version} was trained again on other data than before it was restored"
            )
        self._rows.extend(numbers)

    def violations(self) -> list[str]:
        """Every way in which the record breaks a promise: too old, from the future, trained twice, does not
        add up, a step is missing.
        """
        found, expected = list(self._faults), 0
        for start, version in zip(self._column("start"), self._column("version"), strict=True):
            if version < expected:
                found.append((start, f"step {version} follows step {expected - 1}"))
            elif version > expected and self._why_lost(expected, version - 1) is None:
                found.append((start, f"{steps_are_missing(expected, version - 1)} in the record"))
            expected = version + 1
        return [text for _, text in sorted(found, key=lambda fault: fault[0])] + self.replay_faults

    def lost_steps(self) -> list[str]:
        """Steps that are missing for a reason that the record gives, in words."""
        found, expected = [], 0
        for version in self._column("version"):
            if version > expected and (why := self._why_lost(expected, version - 1)) is not None:
                found.append(f"{steps_are_missing(expected, version - 1)} in the record ({why})")
            expected = version + 1
        return found

    def totals(self) -> dict[str, Any]:
        """Plain values of all steps."""
        ages, has_ages = self._column("sum_of_ages"), self._column("num_ages")
        return {
            "num_steps": len(self),
            "num_trajectories": sum(self._column("num_trajectories")),
            "num_loss_tokens": sum(self._column("num_loss_tokens")),
            "staleness_mean": sum(ages) / sum(has_ages) if sum(has_ages) else None,
            "staleness_max": max(self._column("largest_age")) if sum(has_ages) else None,
        }

    @property
    def range_text(self) -> str:
        """The steps that it has, in words."""
        versions = self._column("version")
        return f"steps {versions[0]} to {versions[-1]}" if versions else "no steps"

    def newest(self, num: int) -> list[TrainedBatch]:
        """The last steps, read again."""
        return [self._read(start) for start in self._column("start")[max(0, len(self) - num) :]]

    def of_step(self, step: int) -> list[TrainedBatch]:
        """All of that number: one, or none, if the record is as it should be."""
        both = zip(self._column("start"), self._column("version"), strict=True)
        return [self._read(start) for start, version in both if version == step]

    def of_group(self, group_id: int) -> TrainedBatch | None:
        """The first step that a group was trained on."""
        start = self._places.get(group_id)
        return self._read(start) if start is not None and self._index(start) is not None else None

    def _read(self, start: int) -> TrainedBatch:
        with self.path.open("rb") as file:
            file.seek(start)
            return _parse(parse_line(file.readline()))

    def _column(self, name: str) -> array[int]:
        return self._rows[_ROW.index(name) :: len(_ROW)]

    def _index(self, start: int) -> int | None:
        """Of the step whose line begins there, if it counts still."""
        at = bisect_left(range(len(self)), start, key=lambda at: self._rows[at * len(_ROW)])
        return at if at < len(self) and self._rows[at * len(_ROW)] == start else None

    def _restore(self, version: int) -> None:
        self.restored.append(version)
        gone = set()
        while self._rows and self._rows[1 - len(_ROW)] >= version:
            start, dropped = self._rows[-len(_ROW) : 2 - len(_ROW)]
            gone.add(start)
            self._before[dropped] = start
            del self._rows[-len(_ROW) :]
        self._faults = [(start, fault) for start, fault in self._faults if start not in gone]

    def _find_twice(
        self, start: int, line: Mapping[str, Any], earlier: int, before: int, group_id: int
    ) -> None:
        """A group is trained on in one step; which of its trajectories were there before is read again."""
        if len(self._faults) < _MAX_FAULTS:
            batches = (_parse(line), self._read(earlier))
            both = set.intersection(
                *({t.name for t in batch.trajectories if t.group_id == group_id} for batch in batches)
            )
            self._faults += [
                (start, f"step {batches[0].step}, {name}: was trained on in step {before} already")
                for name in sorted(both)
            ]

    def _why_lost(self, first: int, last: int) -> str | None:
        """The reason that the record gives for all of these; of several marks that meet, that of the
        first.
        """
        found = None
        for begin, end, why in sorted(self._lost):
            if begin <= first <= end:
                found, first = found or why, end + 1
            if first > last:
                return found
        return None


def read_record(path: Path, problems: list[str], max_staleness: int) -> TrainedRecord:
    """Lines without the fields that they need are left out and told in `problems`."""
    record = TrainedRecord(path, max_staleness)
    for number, (start, line, _) in enumerate(lines_of(path, problems), start=1):
        try:
            record.add(start, line)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            tell(
                problems,
                f"{path.name} object {number} is no record of a step and is left out: {type(error).__name__} "
                f"{error}",
            )
    return record


_ROW = ("start", "version", "num_trajectories", "num_loss_tokens", "sum_of_ages", "num_ages", "largest_age")
_MAX_FAULTS = 1000
_FIELDS = itemgetter(
    "group_id", "sample_index", "branch", "num_tokens", "num_loss_tokens", "reward", "prompt_id", "spans"
)


class _Suspect(Exception):  # noqa: N818  it never leaves this file
    """A line that is not as it should be, or not of the types that are written."""


def _count(version: int, entries: Sequence[Any], oldest_allowed: int) -> tuple[tuple[int, ...], set[int]]:
    """The row of a batch and its groups, in one pass over its plain values. Raises _Suspect if anything is to
    be said of it.
    """
    num_tokens = sum_of_ages = num_ages = largest_age = checked = 0
    names, groups = set(), set()
    for entry in entries:
        group, index, branch, num_all, num_loss, reward, _, spans = _FIELDS(entry)
        names.add((group, index, branch))
        groups.add(group)
        checked += num_all + group + index
        reward + 0.0
        num, oldest = 0, version
        for start, end, sampled in spans:
            num += end - start
            if sampled < oldest:
                oldest = sampled
            elif sampled > version:
                raise _Suspect
        if num != num_loss or oldest < oldest_allowed:
            raise _Suspect
        num_tokens += num
        if spans:
            age = version - oldest
            sum_of_ages += age
            num_ages += 1
            if age > largest_age:
                largest_age = age
    if len(names) != len(entries) or not type(checked) is type(num_tokens) is type(sum_of_ages) is int:
        raise _Suspect
    return (len(entries), num_tokens, sum_of_ages, num_ages, largest_age), groups


def _row_of(batch: TrainedBatch) -> tuple[int, ...]:
    """The same of one that was parsed."""
    ages = batch.staleness
    num_tokens = sum(trajectory.num_loss_tokens for trajectory in batch.trajectories)
    return len(batch.trajectories), num_tokens, sum(ages), len(ages), max(ages, default=0)


class _Places:
    """Where each group was trained on: 8 bytes for each id of the dense ones, which are those that a run
    gives.
    """

    def __init__(self) -> None:
        self._dense = array("q")
        self._others: dict[int, int] = {}

    def get(self, group_id: int) -> int | None:
        """None if it was not."""
        if 0 <= group_id < len(self._dense) and self._dense[group_id] >= 0:
            return self._dense[group_id]
        return self._others.get(group_id)

    def put(self, group_id: int, start: int) -> int | None:
        """It is trained on in the line that begins there; returns the line that said so before."""
        dense = self._dense
        if group_id == len(dense) and not self._others:  # nearly always
            dense.append(start)
            return None
        before = self.get(group_id)
        if not 0 <= group_id < len(dense) + _DENSE:
            self._others[group_id] = start
            return before
        if group_id >= len(dense):
            dense.extend([-1] * (group_id + 1 - len(dense)))
        dense[group_id] = start
        return before


_DENSE = 100_000


def _data(batch: TrainedBatch) -> list[tuple[int, int, int, float, str]]:
    return [(t.group_id, t.sample_index, t.branch, t.reward, t.tokens_sha) for t in batch.trajectories]


def _faults_of_batch(batch: TrainedBatch, max_staleness: int) -> list[str]:
    found = []
    seen: set[str] = set()
    for trajectory in batch.trajectories:
        name = f"step {batch.step}, {trajectory.name}"
        found += [f"{name}: {fault}" for fault in _faults(batch, trajectory, max_staleness)]
        if name in seen:
            found.append(f"{name}: was trained on in step {batch.step} already")
        seen.add(name)
    return found


def _faults(batch: TrainedBatch, trajectory: TrainedTrajectory, max_staleness: int) -> list[str]:
    found = []
    for start, end, version in trajectory.spans:
        if version < batch.version - max_staleness:
            found.append(
                f"tokens {start}..{end - 1} are of version {version}, {batch.version - version} behind; "
                f"{max_staleness} are allowed"
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
