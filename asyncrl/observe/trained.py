"""The trainer's record of all batches, trained.jsonl, and a check of the staleness bound.

Step v + 1 turned policy_version v into v + 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from asyncrl.observe.run_dir import TRAINED_FILE, read_lines

SHOWN_STEPS = 1000
"""Newest steps that are listed one by one."""


class Entry(TypedDict):
    """A trajectory of a step, written by asyncrl.trainer.step_report."""

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
    version: int
    min_version: int
    trajectories: list[Entry]


@dataclass(frozen=True, slots=True)
class Restored:
    """The trainer was restored to version `restored`; `lost`: first and last missing version."""

    restored: int
    lost: tuple[int, int] | None = None
    why: str = ""


_FORM: TypeAdapter[Line | Restored] = TypeAdapter(Line | Restored)


class _Step(NamedTuple):
    """`data`: hash of what must repeat when the step is trained again; `faults`: broken promises."""

    version: int
    num_trajectories: int
    num_loss_tokens: int
    ages: tuple[int, int, int]
    """Sum, number and largest age of trajectories."""
    data: int
    faults: list[str]


class TrainedRecord:
    """trained.jsonl, and whether it kept the bound.

    After a restore the later line of a version counts.
    """

    def __init__(self, run_dir: Path, problems: list[str], max_staleness: int) -> None:
        self.path = run_dir / TRAINED_FILE
        self.max_staleness = max_staleness
        self.restored: list[int] = []
        self._steps: list[_Step] = []
        self._why_lost: dict[int, str] = {}
        """Version -> why its line is missing."""
        self._earlier: dict[int, int] = {}
        """Version -> hash before the restore."""
        self._trained_in: dict[int, int] = {}
        """Group -> version."""
        self._replay_faults: list[str] = []
        for line in read_lines(self.path, problems, _FORM):
            if isinstance(line, Restored):
                self._restore(line)
            else:
                self._add(line)

    def __len__(self) -> int:
        return len(self._steps)

    def _restore(self, line: Restored) -> None:
        self.restored.append(line.restored)
        while self._steps and self._steps[-1].version >= line.restored:
            dropped = self._steps.pop()
            self._earlier[dropped.version] = dropped.data
        self._trained_in = {group: step for group, step in self._trained_in.items() if step < line.restored}
        if line.lost is not None:
            first, last = line.lost
            self._why_lost |= dict.fromkeys(range(first, last + 1), line.why)

    def _add(self, line: Line) -> None:
        entries = line.trajectories
        faults = [*_faults(line, self.max_staleness)]
        for group in sorted({entry["group_id"] for entry in entries}):
            if (earlier := self._trained_in.setdefault(group, line.version)) != line.version:
                fault = f"step {line.version + 1}, group {group}: already trained on in step {earlier + 1}"
                faults.append(fault)
        names = ("group_id", "sample_index", "branch", "reward", "tokens_sha")
        data = hash(str([[entry.get(name) for name in names] for entry in entries]))
        if self._earlier.get(line.version, data) != data:
            fault = f"step {line.version + 1} was trained again on other data than before a restore"
            self._replay_faults.append(fault)
        ages = _ages(line)
        counted = (sum(ages), len(ages), max(ages, default=0))
        num_loss_tokens = sum(entry["num_loss_tokens"] for entry in entries)
        self._steps.append(_Step(line.version, len(entries), num_loss_tokens, counted, data, faults))

    def violations(self) -> tuple[list[str], list[str]]:
        """Return the broken promises (too old, from the future, trained twice, wrong sums, missing
        steps), and explained missing steps.
        """
        broken: list[str] = []
        lost: list[str] = []
        expected = 0
        for step in self._steps:
            if step.version < expected:
                broken.append(f"step {step.version + 1} follows step {expected}")
            elif step.version > expected:
                is_one = step.version == expected + 1
                what = f"step {expected + 1} is" if is_one else f"steps {expected + 1}..{step.version} are"
                if all(version in self._why_lost for version in range(expected, step.version)):
                    lost.append(f"{what} missing in the record ({self._why_lost[expected]})")
                else:
                    broken.append(f"{what} missing in the record")
            broken += step.faults
            expected = step.version + 1
        return broken + self._replay_faults, lost

    def totals(self) -> dict[str, Any]:
        num_ages = sum(step.ages[1] for step in self._steps)
        return {
            "num_steps": len(self),
            "num_trajectories": sum(step.num_trajectories for step in self._steps),
            "num_loss_tokens": sum(step.num_loss_tokens for step in self._steps),
            "staleness_mean": sum(step.ages[0] for step in self._steps) / num_ages if num_ages else None,
            "staleness_max": max(step.ages[2] for step in self._steps) if num_ages else None,
        }

    def lines(self, step: int | None = None, group: int | None = None) -> list[Line]:
        """Read the lines of a step, of a group's step, or of the newest steps."""
        wanted = {each.version for each in self._steps}
        if step is not None:
            wanted &= {step - 1}
        if group is not None:
            wanted &= {self._trained_in.get(group, -1)}
        if step is None and group is None:
            wanted = {each.version for each in self._steps[-SHOWN_STEPS:]}
        lines = (line for line in read_lines(self.path, [], _FORM) if isinstance(line, Line))
        found = {line.version: line for line in lines if line.version in wanted}
        return [found[version] for version in sorted(found)]


def _faults(line: Line, max_staleness: int) -> Iterator[str]:
    names: set[str] = set()
    for entry in line.trajectories:
        name = f"step {line.version + 1}, group {entry['group_id']}, sample {entry['sample_index']}"
        name += f", branch {entry['branch']}" if entry["branch"] else ""
        for start, end, sampled in entry["spans"]:
            age = line.version - sampled
            tokens = f"{name}: tokens {start}..{end - 1} are of version {sampled}"
            if age > max_staleness:
                yield f"{tokens}, {age} behind; {max_staleness} are allowed"
            if age < 0:
                yield f"{tokens}, which did not exist yet"
        num = sum(end - start for start, end, _ in entry["spans"])
        if num != entry["num_loss_tokens"]:
            yield f"{name}: {entry['num_loss_tokens']} tokens in the loss, but spans of {num}"
        if name in names:
            yield f"{name}: appears twice in step {line.version + 1}"
        names.add(name)


def _age(version: int, entry: Entry) -> int:
    """Return the age of the oldest token in the loss."""
    return version - min(sampled for _, _, sampled in entry["spans"])


def _ages(line: Line) -> list[int]:
    return [_age(line.version, entry) for entry in line.trajectories if entry["spans"]]


def batch_summary(line: Line) -> dict[str, Any]:
    entries = line.trajectories
    ages = _ages(line)
    rewards = [entry["reward"] for entry in entries if entry["branch"] == 0]
    tokens = Counter[int]()
    for entry in entries:
        for start, end, sampled in entry["spans"]:
            tokens[sampled] += end - start
    return {
        "step": line.version + 1,
        "version": line.version,
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
    return [
        {**entry, "staleness": _age(line.version, entry) if entry["spans"] else None}
        for entry in line.trajectories
        if group_id in (None, entry["group_id"])
    ]
