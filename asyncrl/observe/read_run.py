"""A run directory as Python values, and a check of the staleness bound from
trained.jsonl.

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
    read_evaluations,
    read_lines,
    read_metrics,
    read_settings,
    read_status,
    tell_unknown_kind,
)
from asyncrl.observe.run_numbers import Steps, duration, seconds_left
from asyncrl.observe.samples import ShownRollout, read_samples
from asyncrl.observe.verdict import Verdict, judge

Table = dict[str, list[Any]]
"""Columns of equal length: `pandas.DataFrame(table)`. Missing numbers are NaN."""


class RunRecord:
    """Contents of a run directory, live or ended.

    Each part is read once; call read_run() again for later data. `state`: starting,
    running, done, failed, interrupted, crashed or unknown; `why`: its explanation;
    `problems`: sentences about unreadable data.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.problems: list[str] = []
        settings = read_settings(run_dir)
        tell_unknown_kind(run_dir, settings, self.problems.append)
        self.config: RunConfig = settings.as_run()
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
        if not self.columns:
            return None
        has_failed = self.state in ("failed", "crashed")
        return judge(self.columns, self.config, self.run_dir, has_failed=has_failed)

    @property
    def progress(self) -> str:
        """Format as `3 of 9 in 3.0 s, 1.00 s each, 6.0 s left`."""
        steps = self.columns
        # If the data give the number, only the status has it.
        num_steps = self.status.get("num_steps") or self.config.trainer.num_steps
        text = f"{len(steps)} of {num_steps}"
        if self.verdict is not None:
            text += f" {self.verdict.pace}"
        if self.state == "running" and (left_s := seconds_left(steps, num_steps)):
            text += f", {duration(left_s)} left"
        return text

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
        """Recorded rollouts as text (samples.jsonl);
        `pandas.DataFrame(record.samples)`.
        """
        return read_samples(self.run_dir, self.problems)

    @cached_property
    def trained(self) -> Table:
        """One row per trained trajectory: step, group_id, prompt_id, sample_index,
        branch, reward, num_tokens, num_sampled, num_loss_tokens, tokens_sha, staleness
        (None without a token in the loss) and spans ([start, end, version] of the
        tokens in the loss).
        """
        record = TrainedRecord(self.run_dir, self.problems)
        return table_of(record.trajectories())

    @property
    def weights(self) -> Path | None:
        """The trained model in Hugging Face format, or with trainer.roles a folder with one
        for each role; None before the run is done.
        """
        folder = self.run_dir / "final"
        return folder if folder.is_dir() else None


def read_run(run_dir: str | Path) -> RunRecord:
    """Read a run directory, also of a live run. Raises ConfigError if it is invalid."""
    return RunRecord(Path(run_dir))


def table_of(lines: Iterable[Mapping[str, object]]) -> Table:
    """Return columns in order of appearance."""
    rows = [*lines]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


# ---- the trainer's record of all batches: step v + 1 turned policy_version v into v + 1


class Entry(TypedDict):
    """A trajectory of a step, written by asyncrl.trainer.loss.step_metrics."""

    group_id: int
    prompt_id: str
    sample_index: int
    branch: int
    reward: float
    num_tokens: int
    num_sampled: NotRequired[int]
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
    """The trainer was restored to version `restored`."""

    restored: int


_FORM: TypeAdapter[Line | Restored] = TypeAdapter(Line | Restored)


class TrainedRecord:
    """trained.jsonl, and whether each batch kept its own bound; a resume may change it.
    After a restore the later line of a version counts.
    """

    def __init__(self, run_dir: Path, problems: list[str]) -> None:
        self.path = run_dir / TRAINED_FILE
        self.restored: list[int] = []
        self.batches: dict[int, dict[str, Any]] = {}
        """A summary of each batch by version, in order."""
        self._faults: dict[int, list[str]] = {}
        for line in read_lines(self.path, problems, _FORM):
            if isinstance(line, Line):
                self.batches[line.version] = _summary(line)
                self._faults[line.version] = [*_faults(line)]
                continue
            self.restored.append(line.restored)
            # The weights of these steps are gone. Their batches are trained again, in
            # later lines.
            self.batches = {
                version: batch
                for version, batch in self.batches.items()
                if version < line.restored
            }

    def violations(self) -> list[str]:
        """Return the broken promises: too old, from the future, trained twice, missing
        steps.
        """
        broken: list[str] = []
        trained_in = dict[int, int]()
        expected = 0
        for version, batch in self.batches.items():
            if version > expected:
                broken.append(f"the record lacks steps {expected + 1}..{version}")
            broken += self._faults[version]
            for group in batch["group_ids"]:
                # Each group is trained once. Lines before a restore are gone here, so a
                # batch that was trained again is not a repetition.
                if (earlier := trained_in.setdefault(group, version)) != version:
                    broken.append(
                        f"step {version + 1}, group {group}: already trained on in step {earlier + 1}"
                    )
            expected = version + 1
        return broken

    def totals(self) -> dict[str, object]:
        batches = self.batches.values()
        ages = [batch["staleness_max"] for batch in batches]
        return {
            "num_steps": len(batches),
            "num_trajectories": sum(batch["num_trajectories"] for batch in batches),
            "num_loss_tokens": sum(batch["num_loss_tokens"] for batch in batches),
            "staleness_max": max(
                (age for age in ages if age is not None), default=None
            ),
        }

    def trajectories(
        self, step: int | None = None, group: int | None = None
    ) -> list[dict[str, object]]:
        """Read the trajectories of all steps, of one step, or of one group."""
        lines = {
            line.version: line
            # The file is read again: only summaries are kept, since the spans of a long
            # run need much memory. Later lines of a version replace earlier ones.
            for line in read_lines(self.path, [], _FORM)
            if isinstance(line, Line)
            and line.version in self.batches
            and step in (None, line.version + 1)
        }
        return [
            {"step": version + 1, **entry, "staleness": _age(version, entry)}
            for version, line in sorted(lines.items())
            for entry in line.trajectories
            if group in (None, entry["group_id"])
        ]


def _faults(line: Line) -> Iterator[str]:
    for entry in line.trajectories:
        name = f"step {line.version + 1}, group {entry['group_id']}, sample {entry['sample_index']}"
        for start, end, sampled in entry["spans"]:
            tokens = f"{name}: tokens {start}..{end - 1} are of version {sampled}"
            if sampled < line.min_version:
                yield f"{tokens}; the bound of this batch was version {line.min_version}"
            if sampled > line.version:
                yield f"{tokens}, which did not exist yet"


def _age(version: int, entry: Entry) -> int | None:
    """Return the age of the oldest token in the loss."""
    return (
        version - min(sampled for *_, sampled in entry["spans"])
        if entry["spans"]
        else None
    )


def _summary(line: Line) -> dict[str, Any]:
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
