"""A run directory as Python values, and a check of the staleness bound from trained.jsonl.

Imports no torch and no pandas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from asyncrl.config import RunConfig
from asyncrl.observe.run_dir import (
    TRAINED_FILE,
    judge_state,
    read_config,
    read_evaluations,
    read_lines,
    read_metrics,
    read_status,
)
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.samples import ShownRollout, read_samples
from asyncrl.observe.verdict import Verdict, judge

SHOWN_STEPS = 1000
"""Newest steps of the trainer's record that are listed one by one."""
Table = dict[str, list[Any]]
"""Columns of equal length: `pandas.DataFrame(table)`. Missing numbers are NaN."""


class RunRecord:
    """Contents of a run directory, live or ended.

    Each part is read once; call read_run() again for later data. `state`: starting, running, done,
    failed, interrupted, crashed or unknown; `why`: its explanation; `problems`: sentences about
    unreadable data.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.problems: list[str] = []
        self.config: RunConfig = read_config(run_dir)
        self.status = read_status(run_dir, self.problems)
        self.state, self.why = judge_state(self.status, run_dir)

    def __repr__(self) -> str:
        return f"<RunRecord {self.run_dir}, {self.state}, {len(self.columns)} steps>"

    @cached_property
    def columns(self) -> Steps:
        """The metrics of each step; a step that was trained again counts once."""
        return Steps(read_metrics(self.run_dir, self.problems))

    @cached_property
    def verdict(self) -> Verdict | None:
        """None before the first step."""
        return judge(self.columns, self.config) if self.columns else None

    @cached_property
    def evaluation_lines(self) -> list[dict[str, Any]]:
        return read_evaluations(self.run_dir, self.problems)

    @cached_property
    def steps(self) -> Table:
        return {name: self.columns.column(name).tolist() for name in self.columns.names}

    @cached_property
    def evaluations(self) -> Table:
        """One row per evaluation: policy_version, time_s, eval/*."""
        return table_of(self.evaluation_lines)

    @cached_property
    def samples(self) -> list[ShownRollout]:
        """Recorded rollouts as text (samples.jsonl); `pandas.DataFrame(record.samples)`."""
        return read_samples(self.run_dir, self.problems)

    @cached_property
    def trained(self) -> Table:
        """One row per trained trajectory: step, group_id, prompt_id, sample_index, branch, reward,
        num_tokens, num_loss_tokens, tokens_sha, staleness (None without a token in the loss) and spans
        ([start, end, version] of the tokens in the loss).
        """
        record = TrainedRecord(self.run_dir, self.problems, self.config.buffer.max_staleness)
        return table_of(
            {"step": line.version + 1, **entry}
            for line in record.lines()
            for entry in trajectory_summaries(line)
        )

    @property
    def weights(self) -> Path | None:
        """The trained model in Hugging Face format; None before the run is done."""
        folder = self.run_dir / "final"
        return folder if folder.is_dir() else None


def read_run(run_dir: str | Path) -> RunRecord:
    """Raises ConfigError for an invalid run directory."""
    return RunRecord(Path(run_dir))


def table_of(lines: Iterable[Mapping[str, Any]]) -> Table:
    """Return columns in order of appearance."""
    rows = [*lines]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


# ---- the trainer's record of all batches: step v + 1 turned policy_version v into v + 1


class Entry(TypedDict):
    """A trajectory of a step, written by asyncrl.trainer.step_metrics."""

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


@dataclass(slots=True)
class _Step:
    """`data`: hash of what must repeat when the step is trained again; `faults`: broken promises."""

    groups: set[int]
    num_trajectories: int
    num_loss_tokens: int
    ages: Counter[int]
    data: int
    faults: list[str]


class TrainedRecord:
    """trained.jsonl, and whether it kept the bound.

    After a restore the later line of a version counts.
    """

    def __init__(self, run_dir: Path, problems: list[str], max_staleness: int) -> None:
        self.path = run_dir / TRAINED_FILE
        self.restored: list[int] = []
        self._steps: dict[int, _Step] = {}
        """By version, in order."""
        self._why_lost: dict[int, str] = {}
        """Version -> why its line is missing."""
        self._faults: list[str] = []
        voided = dict[int, int]()
        for line in read_lines(self.path, problems, _FORM):
            if isinstance(line, Line):
                step = _step_of(line, max_staleness)
                if (newest := next(reversed(self._steps), -1)) >= line.version:
                    self._faults.append(f"step {line.version + 1} follows step {newest + 1}")
                if voided.get(line.version, step.data) != step.data:
                    what = f"step {line.version + 1} was trained again on other data than before a restore"
                    self._faults.append(what)
                self._steps[line.version] = step
                continue
            self.restored.append(line.restored)
            for version in [version for version in self._steps if version >= line.restored]:
                voided[version] = self._steps.pop(version).data
            if line.lost is not None:
                first, last = line.lost
                self._why_lost |= dict.fromkeys(range(first, last + 1), line.why)

    def __len__(self) -> int:
        return len(self._steps)

    def violations(self) -> tuple[list[str], list[str]]:
        """Return the broken promises (too old, from the future, trained twice, wrong sums, missing
        steps), and explained missing steps.
        """
        broken: list[str] = []
        lost: list[str] = []
        trained_in = dict[int, int]()
        expected = 0
        for version, step in self._steps.items():
            if version > expected:
                missing = f"the record lacks steps {expected + 1}..{version}"
                if self._why_lost.keys() >= {*range(expected, version)}:
                    lost.append(f"{missing} ({self._why_lost[expected]})")
                else:
                    broken.append(missing)
            broken += step.faults
            for group in sorted(step.groups):
                if (earlier := trained_in.setdefault(group, version)) != version:
                    what = f"step {version + 1}, group {group}: already trained on in step {earlier + 1}"
                    broken.append(what)
            expected = version + 1
        return broken + self._faults, lost

    def totals(self) -> dict[str, Any]:
        steps = self._steps.values()
        ages = sum((step.ages for step in steps), Counter[int]())
        return {
            "num_steps": len(self),
            "num_trajectories": sum(step.num_trajectories for step in steps),
            "num_loss_tokens": sum(step.num_loss_tokens for step in steps),
            "staleness_mean": fmean(ages, ages.values()) if ages else None,
            "staleness_max": max(ages, default=None),
        }

    def lines(self, step: int | None = None, group: int | None = None) -> list[Line]:
        """Read the lines of a step, of a group's step, or of the newest steps."""
        versions = [*self._steps] if step is not None else [*self._steps][-SHOWN_STEPS:]
        if group is not None:
            versions = [version for version, each in self._steps.items() if group in each.groups]
        wanted = {version for version in versions if step in (None, version + 1)}
        lines = (line for line in read_lines(self.path, [], _FORM) if isinstance(line, Line))
        found = {line.version: line for line in lines if line.version in wanted}
        return [found[version] for version in sorted(found)]


def _step_of(line: Line, max_staleness: int) -> _Step:
    entries = line.trajectories
    ages = (_age(line.version, entry) for entry in entries)
    names = ("group_id", "sample_index", "branch", "reward", "tokens_sha")
    return _Step(
        groups={entry["group_id"] for entry in entries},
        num_trajectories=len(entries),
        num_loss_tokens=sum(entry["num_loss_tokens"] for entry in entries),
        ages=Counter(age for age in ages if age is not None),
        data=hash(str([[entry.get(name) for name in names] for entry in entries])),
        faults=[*_faults(line, max_staleness)],
    )


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


def _age(version: int, entry: Entry) -> int | None:
    """Return the age of the oldest token in the loss."""
    return version - min(sampled for *_, sampled in entry["spans"]) if entry["spans"] else None


def batch_summary(line: Line) -> dict[str, Any]:
    entries = line.trajectories
    ages = [age for entry in entries if (age := _age(line.version, entry)) is not None]
    rewards = [entry["reward"] for entry in entries if entry["branch"] == 0]
    tokens = Counter[int]()
    for start, end, sampled in (span for entry in entries for span in entry["spans"]):
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
        {**entry, "staleness": _age(line.version, entry)}
        for entry in line.trajectories
        if group_id in (None, entry["group_id"])
    ]
