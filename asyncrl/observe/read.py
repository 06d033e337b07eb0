"""What `asyncrl status` says of a run directory, and `asyncrl inspect` of the trainer's record in it. Starts and changes nothing."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from asyncrl.errors import ConfigError
from asyncrl.observe.read_tables import status_table
from asyncrl.observe.run_files import TRAINED_FILE, RunFiles, read_run
from asyncrl.observe.run_numbers import thinned
from asyncrl.observe.trained import TrainedBatch, TrainedRecord, read_record, trajectory_dict
from asyncrl.observe.verdict import judge

SHOWN_STEPS = 1000
"""So many steps, the newest, are listed one by one; a terminal gets the last hundred of them."""
SHOWN_REWARDS = 1000


def render_status(run_dir: str | Path, *, as_json: bool = False) -> str:
    """How a run stands, live or afterwards. Raises ConfigError if `run_dir` is no run directory."""
    summary = status_summary(read_run(run_dir))
    return to_json(summary) if as_json else to_text(status_table(summary))


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


def inspect_summary(files: RunFiles, *, step: int | None = None, group: int | None = None, is_required: bool = True) -> dict[str, Any]:
    """Plain values: staleness recomputed from the spans, whether the bound was kept, the verdict, and each of the newest batches.

    `step` or `group`: that one instead. Raises ConfigError if the record has none and `is_required`.
    """
    problems = list(files.problems)
    record = read_record(files.run_dir / TRAINED_FILE, problems, files.config.buffer.max_staleness)
    violations, lost = record.violations(), record.lost_steps()
    shown = _chosen(record, step, group)
    if not shown and is_required and (step is not None or group is not None):
        raise _unknown(files.run_dir, record, step, group)
    return {
        "run_dir": str(files.run_dir),
        "state": files.state,
        "max_staleness": files.config.buffer.max_staleness,
        "on_overdue": files.config.buffer.on_overdue,
        **record.totals(),
        "bound_kept": not violations if len(record) else None,
        "violations": violations,
        "lost": lost,
        "restored_from": list(record.restored),
        "steps": [_batch_dict(batch, files.one_step, group, with_trajectories=step is not None) for batch in shown],
        "verdict": judge(files.steps, files.config).as_dict() if files.steps else None,
        "problems": [*problems, *lost],
    }


def _batch_dict(batch: TrainedBatch, metrics: Mapping[str, Any] | None, group: int | None, *, with_trajectories: bool) -> dict[str, Any]:
    plain = batch.as_dict(with_trajectories=with_trajectories)
    if group is not None:
        plain["trajectories"] = [trajectory_dict(batch, t) for t in batch.trajectories if t.group_id == group]
    if with_trajectories and metrics is not None:
        plain["metrics"] = dict(metrics)
    return plain


def _chosen(record: TrainedRecord, step: int | None, group: int | None) -> list[TrainedBatch]:
    if group is not None:
        batch = record.of_group(group)
        return [batch] if batch is not None and step in (None, batch.step) else []
    return record.newest(SHOWN_STEPS) if step is None else record.of_step(step)


def _unknown(run_dir: Path, record: TrainedRecord, step: int | None, group: int | None) -> ConfigError:
    if step is not None and (group is None or not record.of_step(step)):
        return ConfigError(
            f"{run_dir} has no record of step {step}",
            rule=f"it has {record.range_text}",
            way_out="give one of those, or leave --step out.",
        )
    where = "" if step is None else f" in step {step}"
    return ConfigError(
        f"group {group} was not trained on{where} in {run_dir}",
        rule="only groups that a batch took are in the record",
        way_out="take an id from `asyncrl inspect RUN_DIR --json`, key group_ids.",
    )


def to_json(summary: Mapping[str, Any]) -> str:
    """For machines."""
    return json.dumps(summary, indent=2)


def to_text(renderable: RenderableType) -> str:
    """As a terminal of this width would show it; with colours if standard output is one."""
    out = io.StringIO()
    width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns))
    Console(file=out, width=width, force_terminal=sys.stdout.isatty(), highlight=False).print(renderable)
    return out.getvalue().rstrip("\n")
