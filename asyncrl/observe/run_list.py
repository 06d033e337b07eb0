"""The runs in a folder: which one is the newest, and one row for each. Imports no torch."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

from rich.table import Table

from asyncrl.base.errors import ConfigError
from asyncrl.observe.run_dir import CONFIG_FILE, METRICS_FILE, STATUS_FILE, read_jsonl
from asyncrl.observe.run_numbers import duration
from asyncrl.observe.status import State, judge_state, read_status, to_text

RUNS = Path("runs")
"""Folder of runs that were given no directory."""
NUM_REWARDS = 10
"""Last steps whose mean reward is shown."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run. `reward`: mean of the last steps; `age_s`: seconds since the run last wrote."""

    run_dir: str
    state: State
    steps: int
    num_steps: int | None
    reward: float | None
    age_s: float


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories in `folder`, the newest first."""
    return sorted((path.parent for path in folder.glob(f"*/{CONFIG_FILE}")), key=_written_s, reverse=True)


def newest_run(folder: Path = RUNS) -> Path:
    """Return the run that wrote last. Raises ConfigError if there is none."""
    if not (runs := find_runs(folder)):
        raise ConfigError(
            f"no RUN_DIR is given, and {folder} has no run",
            way_out="name the directory of a run, or start a run: asyncrl init quickstart.",
        )
    return runs[0]


def render_runs(folder: Path, *, as_json: bool) -> str:
    """List the runs in `folder`, the newest first. Raises ConfigError if it is no folder."""
    if not folder.is_dir():
        what = f"there is no folder {folder}"
        raise ConfigError(
            what, way_out="name the folder of your runs, or start a run: asyncrl init quickstart."
        )
    rows = [_row(run_dir) for run_dir in find_runs(folder)]
    if as_json:
        return json.dumps([asdict(row) for row in rows], indent=2)
    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "steps", "reward", "last written"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("run", "state") else "right")
    for row in rows:
        of_all = "" if row.num_steps is None else f"/{row.num_steps}"
        reward = "-" if row.reward is None else f"{row.reward:.3f}"
        age = f"{row.age_s / 86400:.0f} days" if row.age_s > 2 * 86400 else duration(row.age_s)
        table.add_row(row.run_dir, row.state, f"{row.steps}{of_all}", reward, f"{age} ago")
    return to_text(table) if rows else f"no runs in {folder}"


def _written_s(run_dir: Path) -> float:
    """Return when the run last wrote its status, or its config before the first status."""
    for name in (STATUS_FILE, CONFIG_FILE):
        try:
            return (run_dir / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _row(run_dir: Path) -> RunRow:
    status = read_status(run_dir, [])
    state, _ = judge_state(status, run_dir)
    step, num_steps = status.get("step"), status.get("num_steps")
    lines = read_jsonl(run_dir / METRICS_FILE, [], "reward/mean", from_end=True)
    rewards = [line["reward/mean"] for line in islice(lines, NUM_REWARDS)]
    return RunRow(
        str(run_dir),
        state,
        step if isinstance(step, int) else 0,
        num_steps if isinstance(num_steps, int) else None,
        fmean(rewards) if rewards else None,
        max(0.0, time.time() - _written_s(run_dir)),
    )
