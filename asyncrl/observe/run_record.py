"""A run directory as Python values. Imports no torch and no pandas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.observe.run_dir import (
    judge_state,
    read_config,
    read_evaluations,
    read_metrics,
    read_status,
)
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.samples import ShownRollout, read_samples
from asyncrl.observe.trained import TrainedRecord, trajectory_summaries
from asyncrl.observe.verdict import Verdict, judge

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
        return f"<RunRecord {self.run_dir}, {self.state}, {len(self.steps.get('step', []))} steps>"

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
        return table_of(read_metrics(self.run_dir, self.problems))

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


def table_of(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return columns in order of appearance."""
    table: Table = {}
    for number, row in enumerate(rows):
        for name, value in row.items():
            table.setdefault(name, [math.nan] * number).append(value)
        for column in table.values():
            if len(column) == number:
                column.append(math.nan)
    return table
