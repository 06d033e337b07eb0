"""The trainer's record of all batches, and a check of the staleness bound.

Step v + 1, as in metrics.jsonl, trained on the batch that turned policy_version v into v + 1.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from asyncrl.observe.run_dir import LOST_KEY, read_values, tell

SHOWN_STEPS = 1000
"""Newest steps that are listed one by one."""


class Entry(TypedDict):
    """A trajectory in a line of the record, as asyncrl.trainer.step_report writes it."""

    group_id: int
    prompt_id: str
    sample_index: int
    branch: int
    reward: float
    num_tokens: int
    num_loss_tokens: int
    tokens_sha: NotRequired[str]
    spans: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Line:
    """A step of the record."""

    version: int
    min_version: int
    trajectories: list[Entry]


_CHECK = TypeAdapter(Line)


class TrainedStep(NamedTuple):
    """Numbers of one step. `data`: hash of what must repeat when the step is trained again; `faults`: broken
    promises.
    """

    version: int
    num_trajectories: int
    num_loss_tokens: int
    ages: tuple[int, int, int]
    """Sum, number and largest of the ages of trajectories."""
    data: int
    faults: tuple[str, ...]


class TrainedRecord:
    """trained.jsonl, and whether it kept the bound. Life: read when made -> asked.

    After a restore the later line of a version counts; the earlier one is compared with it. Lines are not
    kept in memory. Lines of another form are skipped and reported in `problems`.
    """

    def __init__(self, path: Path, problems: list[str], max_staleness: int) -> None:
        self.path = path
        self.max_staleness = max_staleness
        self.restored: list[int] = []
        self._steps: list[TrainedStep] = []
        self._lost: list[tuple[range, str]] = []
        """Steps whose lines are lost, and why."""
        self._before: dict[int, int] = {}
        """Step -> hash of its data before the restore."""
        self._trained_in: dict[int, int] = {}
        """Group -> step."""
        self._replay_faults: list[str] = []
        for value in read_values(path, problems, dict):
            try:
                self._add(value)
            except (TypeError, ValueError, OverflowError) as error:
                why = error.errors()[0]["loc"] if isinstance(error, ValidationError) else error
                tell(problems, f"a line of {path.name} is no record of a step, skipped: {why}")

    def __len__(self) -> int:
        return len(self._steps)

    def _add(self, value: Mapping[str, Any]) -> None:
        """Add a line. Raises ValueError or TypeError for another form."""
        if "restored" in value:
            self._restore(int(value["restored"]))
            if LOST_KEY in value:
                first, last = value[LOST_KEY]
                self._lost.append((range(first, last + 1), str(value.get("why"))))
            return
        step = self._checked(_CHECK.validate_python(value))
        if self._before.get(step.version, step.data) != step.data:
            again = f"step {step.version + 1} was trained again on other data than before it was restored"
            self._replay_faults.append(again)
        self._steps.append(step)

    def violations(self) -> tuple[list[str], list[str]]:
        """Return the broken promises (too old, from the future, trained twice, wrong sums, missing steps),
        and the missing steps that the record explains.
        """
        broken, lost, expected = list[str](), list[str](), 0
        for step in self._steps:
            if step.version < expected:
                broken.append(f"step {step.version + 1} follows step {expected}")
            elif step.version > expected:
                is_one = step.version == expected + 1
                what = f"step {expected + 1} is" if is_one else f"steps {expected + 1}..{step.version} are"
                if all(map(self._why_lost, range(expected, step.version))):
                    lost.append(f"{what} missing in the record ({self._why_lost(expected)})")
                else:
                    broken.append(f"{what} missing in the record")
            broken += step.faults
            expected = step.version + 1
        return broken + self._replay_faults, lost

    def totals(self) -> dict[str, Any]:
        """Return numbers of all steps."""
        num_ages = sum(step.ages[1] for step in self._steps)
        return {
            "num_steps": len(self),
            "num_trajectories": sum(step.num_trajectories for step in self._steps),
            "num_loss_tokens": sum(step.num_loss_tokens for step in self._steps),
            "staleness_mean": sum(step.ages[0] for step in self._steps) / num_ages if num_ages else None,
            "staleness_max": max(step.ages[2] for step in self._steps) if num_ages else None,
        }

    @property
    def range_text(self) -> str:
        """Name the first and the last step."""
        if not self._steps:
            return "no steps"
        return f"steps {self._steps[0].version + 1} to {self._steps[-1].version + 1}"

    def lines(self, step: int | None = None, group: int | None = None) -> list[Line]:
        """Read the lines of a step or of a group's step again, or of the newest steps."""
        wanted = {one.version for one in self._steps}
        if step is not None:
            wanted &= {step - 1}
        if group is not None:
            wanted &= {self._trained_in.get(group, -1)}
        if step is None and group is None:
            wanted = {one.version for one in self._steps[-SHOWN_STEPS:]}
        found = dict[int, Line]()
        for value in read_values(self.path, [], dict):
            if value.get("version") in wanted:
                with contextlib.suppress(ValidationError):
                    found[value["version"]] = _CHECK.validate_python(value)
        return [found[version] for version in sorted(found)]

    def _why_lost(self, version: int) -> str:
        return next((why for versions, why in self._lost if version in versions), "")

    def _restore(self, version: int) -> None:
        self.restored.append(version)
        while self._steps and self._steps[-1].version >= version:
            dropped = self._steps.pop()
            self._before[dropped.version] = dropped.data
        self._trained_in = {group: step for group, step in self._trained_in.items() if step < version}

    def _checked(self, line: Line) -> TrainedStep:
        entries = line.trajectories
        faults = [*_faults(line, self.max_staleness)]
        for group in sorted({entry["group_id"] for entry in entries}):
            if (earlier := self._trained_in.setdefault(group, line.version)) != line.version:
                step = f"step {line.version + 1}, group {group}"
                faults.append(f"{step}: was trained on in step {earlier + 1} already")
        ages = [_age(line.version, entry) for entry in entries if entry["spans"]]
        data = [
            (
                entry["group_id"],
                entry["sample_index"],
                entry["branch"],
                entry["reward"],
                entry.get("tokens_sha"),
            )
            for entry in entries
        ]
        return TrainedStep(
            version=line.version,
            num_trajectories=len(entries),
            num_loss_tokens=sum(entry["num_loss_tokens"] for entry in entries),
            ages=(sum(ages), len(ages), max(ages, default=0)),
            data=hash(str(data)),
            faults=tuple(faults),
        )


def _faults(line: Line, max_staleness: int) -> Iterator[str]:
    """Describe the broken promises of a step."""
    names = set[str]()
    for entry in line.trajectories:
        name = f"step {line.version + 1}, group {entry['group_id']}, sample {entry['sample_index']}"
        name += f", branch {entry['branch']}" if entry["branch"] else ""
        for start, end, sampled in entry["spans"]:
            age = line.version - sampled
            what = f"{name}: tokens {start}..{end - 1} are of version {sampled}"
            if age > max_staleness:
                yield f"{what}, {age} behind; {max_staleness} are allowed"
            if age < 0:
                yield f"{what}, which did not exist yet"
        num = sum(end - start for start, end, _ in entry["spans"])
        if num != entry["num_loss_tokens"]:
            yield f"{name}: {entry['num_loss_tokens']} tokens in the loss, but spans of {num}"
        if name in names:
            yield f"{name}: was trained on in step {line.version + 1} already"
        names.add(name)


def _age(version: int, entry: Entry) -> int:
    """Return the versions between the batch and its oldest token in the loss."""
    return version - min(sampled for _, _, sampled in entry["spans"])


def batch_summary(line: Line) -> dict[str, Any]:
    """Return numbers of a step without its trajectories."""
    version, entries = line.version, line.trajectories
    ages = [_age(version, entry) for entry in entries if entry["spans"]]
    rewards = [entry["reward"] for entry in entries if entry["branch"] == 0]  # one a rollout
    tokens = Counter[int]()
    for entry in entries:
        for start, end, sampled in entry["spans"]:
            tokens[sampled] += end - start
    return {
        "step": version + 1,
        "version": version,
        "min_version": line.min_version,
        "group_ids": sorted({entry["group_id"] for entry in entries}),
        "num_trajectories": len(entries),
        "num_loss_tokens": sum(entry["num_loss_tokens"] for entry in entries),
        "reward_mean": fmean(rewards) if rewards else None,
        "staleness_mean": fmean(ages) if ages else None,
        "staleness_max": max(ages, default=None),
        "tokens_by_version": dict(sorted(tokens.items())),
    }


def trajectory_summaries(line: Line, group_id: int | None = None) -> list[dict[str, Any]]:
    """Return the trajectories of a step, or of one group, with their staleness."""
    return [
        {**entry, "staleness": _age(line.version, entry) if entry["spans"] else None}
        for entry in line.trajectories
        if group_id in (None, entry["group_id"])
    ]
