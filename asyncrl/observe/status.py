"""What `asyncrl status` says of a run directory. Starts and changes nothing."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.observe.console import reward_text, staleness_text
from asyncrl.observe.run_files import RunFiles, read_run
from asyncrl.observe.run_numbers import boxed, evaluation_text, plain, sparkline, thinned
from asyncrl.observe.verdict import judge, summary_panel
from asyncrl.observe.watchdog import Wait

SHOWN_REWARDS = 1000
_COLOURS = {"done": "green", "running": "blue", "starting": "blue", "interrupted": "yellow"}
_LEFT_OUT = ("state", "step", "num_steps", "pid", "host", "boot_id", "updated_s", "why")


def render_status(run_dir: str | Path, *, as_json: bool = False) -> str:
    """How a run stands, live or afterwards. Raises ConfigError if `run_dir` is no run directory."""
    files = read_run(run_dir)
    return json.dumps(status_summary(files), indent=2) if as_json else to_text(_table(files))


def status_summary(files: RunFiles) -> dict[str, Any]:
    """Plain values: state, steps done, the last metrics, verdict so far, and status.json as the run wrote it.

    `rewards`: of each step; of a very long run, means of stretches.
    """
    updated_s = files.status.get("updated_s")
    return {
        "run_dir": str(files.run_dir),
        "state": files.state,
        "explanation": files.explanation,
        "steps_done": len(files.steps),
        "num_steps": files.config.trainer.num_steps,
        "max_staleness": files.config.buffer.max_staleness,
        "seconds_since_update": None if updated_s is None else round(time.time() - float(updated_s), 1),
        "rewards": thinned(files.steps.values("reward/mean"), SHOWN_REWARDS),
        "last_metrics": dict(files.steps.last),
        "evaluations": [dict(line) for line in files.evaluations],
        "status": dict(files.status),
        "verdict": judge(files.steps, files.config).as_dict() if files.steps else None,
        "problems": list(files.problems),
    }


def to_text(*drawn: RenderableType) -> str:
    """As a terminal of this width would show it; with colours if standard output is one."""
    out = io.StringIO()
    width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns))
    Console(file=out, width=width, force_terminal=sys.stdout.isatty(), highlight=False).print(Group(*drawn))
    return out.getvalue().rstrip("\n")


def _table(files: RunFiles) -> RenderableType:
    """State, progress, staleness, what status.json says, verdict so far."""
    config, steps = files.config, files.steps
    state = (files.state, _COLOURS.get(files.state, "red"))
    rows: list[tuple[str, RenderableType]] = [
        ("state", Text.assemble(state, "  ", files.explanation)),
        ("steps", f"{len(steps)} of {config.trainer.num_steps}"),
    ]
    if steps:
        ages = f"{staleness_text(steps.last, config.buffer.max_staleness)} (last step)"
        rows += [("reward", reward_text(steps)), ("staleness", ages)]
    if files.evaluations:
        rewards = [line["eval/reward_mean"] for line in files.evaluations if "eval/reward_mean" in line]
        rows.append(("eval", Text(f"{evaluation_text(files.evaluations[-1])}\n{sparkline(rewards)}")))
    for name, value in files.status.items():
        if name not in _LEFT_OUT and value is not None:
            rows.append((name, Text(_waits(value) if name == "waits" else plain(value))))
    rows += [("problem", Text(problem, style="red")) for problem in files.problems]
    panel = boxed(rows, str(files.run_dir))
    return Group(panel, summary_panel(judge(steps, config), title="so far")) if steps else panel


def _waits(value: Any) -> str:
    """A sentence each; what is no list of waits is shown as it is."""
    try:
        return "\n".join(str(Wait(**entry)) for entry in value) or "none"
    except (TypeError, ValueError):
        return plain(value)


def field_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of `rows`: title -> the name of its field. Text stands left, numbers right."""
    table = Table(box=None, padding=(0, 1))
    for title, name in columns.items():
        is_text = any(isinstance(row[name], str) for row in rows)
        table.add_column(title, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(row[name])) for name in columns.values()))
    return table
