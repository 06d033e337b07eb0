"""A run directory as tables, for notebooks and scripts. Imports no torch and no pandas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.observe.run_dir import TRAINED_FILE, read_evaluations, read_metrics
from asyncrl.observe.samples import ShownRollout, read_samples
from asyncrl.observe.status import State, judge_state, read_config, read_status
from asyncrl.observe.trained import TrainedRecord, trajectory_summaries

Table = dict[str, list[Any]]
"""Columns by name, all of one length: `pandas.DataFrame(table)`. A number that a line lacks is NaN."""


class RunRecord:
    """Contents of a run directory, live or ended. Each table is read on first access and then kept; call
    read_run() again to see later data.

    `problems`: sentences about unreadable data.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.problems = run_dir, list[str]()
        self.config: RunConfig = read_config(run_dir)
        self._status = read_status(run_dir, self.problems)

    def __repr__(self) -> str:
        return f"<RunRecord {self.run_dir}, {self.state}, {len(self.steps.get('step', []))} steps>"

    @property
    def state(self) -> State:
        """starting, running, done, failed, interrupted, crashed or unknown."""
        return judge_state(self._status, self.run_dir)[0]

    @property
    def why(self) -> str:
        """The state in a sentence."""
        return judge_state(self._status, self.run_dir)[1]

    @cached_property
    def steps(self) -> Table:
        """The metrics of each step, by their names in docs/metrics.md."""
        return table_of(read_metrics(self.run_dir, self.problems))

    @cached_property
    def evaluations(self) -> Table:
        """Table with one row per evaluation: policy_version, time_s, eval/*."""
        return table_of(read_evaluations(self.run_dir, self.problems))

    @cached_property
    def samples(self) -> list[ShownRollout]:
        """Recorded rollouts, as text (samples.jsonl); `pandas.DataFrame(record.samples)`."""
        return read_samples(self.run_dir, self.problems)

    @cached_property
    def trained(self) -> Table:
        """Table with one row per trained trajectory, from the trainer's own record: step, group_id,
        prompt_id, sample_index, branch, reward, num_tokens, num_loss_tokens, tokens_sha, staleness (None
        without a token in the loss) and spans ([start, end, version] of the tokens in the loss).
        """
        bound = self.config.buffer.max_staleness
        record = TrainedRecord(self.run_dir / TRAINED_FILE, self.problems, bound)
        rows = (
            {"step": line.version + 1, **entry}
            for line in record.lines()
            for entry in trajectory_summaries(line)
        )
        return table_of(rows)

    @property
    def weights(self) -> Path | None:
        """The folder with the trained model, a Hugging Face one; None before the run is done."""
        folder = self.run_dir / "final"
        return folder if folder.is_dir() else None


def read_run(run_dir: str | Path) -> RunRecord:
    """The record of a run directory. Raises ConfigError if it is none, or if its config cannot be read."""
    return RunRecord(Path(run_dir))


def table_of(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Columns in the order in which they first appear."""
    table: Table = {}
    for number, row in enumerate(rows):
        for name, value in row.items():
            if name not in table:
                table[name] = [math.nan] * number
            table[name].append(value)
        for column in table.values():
            if len(column) == number:
                column.append(math.nan)
    return table
