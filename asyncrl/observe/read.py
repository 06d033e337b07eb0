"""What `asyncrl status` says of a run directory, and `asyncrl inspect` of the trainer's record in it. Starts and changes nothing."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from asyncrl.errors import ConfigError
from asyncrl.observe.read_tables import status_table
from asyncrl.observe.run_files import RunFiles, read_run
from asyncrl.observe.trained import TrainedBatch, find_violations, parse_record, trajectory_dict
from asyncrl.observe.verdict import judge


def render_status(run_dir: str | Path, *, as_json: bool = False) -> str:
    """How a run stands, live or afterwards. Raises ConfigError if `run_dir` is no run directory."""
    summary = status_summary(read_run(run_dir))
    return to_json(summary) if as_json else to_text(status_table(summary))


def status_summary(files: RunFiles) -> dict[str, Any]:
    """Plain values: state, steps done, the last metrics, verdict so far, and status.json as the run wrote it."""
    last = dict(files.steps[-1]) if files.steps else {}
    updated_s = files.status.get("updated_s")
    return {
        "run_dir": str(files.run_dir),
        "state": files.state,
        "explanation": files.explanation,
        "steps_done": len(files.steps),
        "num_steps": files.config.trainer.num_steps,
        "max_staleness": files.config.buffer.max_staleness,
        "seconds_since_update": None if updated_s is None else round(time.time() - float(updated_s), 1),
        "rewards": [line["reward/mean"] for line in files.steps if "reward/mean" in line],
        "last_metrics": last,
        "evaluations": [dict(line) for line in files.evaluations],
        "status": dict(files.status),
        "verdict": judge(files.steps, files.config).as_dict() if files.steps else None,
        "problems": list(files.problems),
    }


def inspect_summary(files: RunFiles, *, step: int | None = None, group: int | None = None) -> dict[str, Any]:
    """Plain values: each batch with staleness recomputed from the spans, whether the bound was kept, and the verdict."""
    problems = list(files.problems)
    record = parse_record(files.trained, problems)
    batches = record.batches
    max_staleness = files.config.buffer.max_staleness
    violations = [*find_violations(batches, max_staleness), *record.replay_faults]
    ages = [age for batch in batches for age in batch.staleness]
    shown = _chosen(files, batches, step, group)
    return {
        "run_dir": str(files.run_dir),
        "state": files.state,
        "max_staleness": max_staleness,
        "on_overdue": files.config.buffer.on_overdue,
        "num_steps": len(batches),
        "num_trajectories": sum(len(batch.trajectories) for batch in batches),
        "num_loss_tokens": sum(t.num_loss_tokens for batch in batches for t in batch.trajectories),
        "staleness_mean": sum(ages) / len(ages) if ages else None,
        "staleness_max": max(ages, default=None),
        "bound_kept": not violations if batches else None,
        "violations": violations,
        "restored_from": list(record.restored),
        "steps": [_batch_dict(batch, files.steps, group, with_trajectories=step is not None) for batch in shown],
        "verdict": judge(files.steps, files.config).as_dict() if files.steps else None,
        "problems": problems,
    }


def _batch_dict(
    batch: TrainedBatch, steps: tuple[Mapping[str, float], ...], group: int | None, *, with_trajectories: bool
) -> dict[str, Any]:
    plain = batch.as_dict(with_trajectories=with_trajectories)
    if group is not None:
        plain["trajectories"] = [trajectory_dict(batch, t) for t in batch.trajectories if t.group_id == group]
    metrics = next((line for line in steps if line["step"] == batch.step), None)
    if with_trajectories and metrics is not None:
        plain["metrics"] = dict(metrics)
    return plain


def _chosen(files: RunFiles, batches: Sequence[TrainedBatch], step: int | None, group: int | None) -> list[TrainedBatch]:
    shown = [batch for batch in batches if step is None or batch.step == step]
    if not shown and step is not None:
        known = f"steps {batches[0].step} to {batches[-1].step}" if batches else "no steps"
        raise ConfigError(
            f"{files.run_dir} has no record of step {step}", rule=f"it has {known}", way_out="give one of those, or leave --step out."
        )
    if group is not None:
        shown = [batch for batch in shown if any(t.group_id == group for t in batch.trajectories)]
        if not shown:
            where = "" if step is None else f" in step {step}"
            raise ConfigError(
                f"group {group} was not trained on{where} in {files.run_dir}",
                rule="only groups that a batch took are in the record",
                way_out="take an id from `asyncrl inspect RUN_DIR --json`, key group_ids.",
            )
    return shown


def to_json(summary: Mapping[str, Any]) -> str:
    """For machines."""
    return json.dumps(summary, indent=2)


def to_text(renderable: RenderableType) -> str:
    """As a terminal of this width would show it; with colours if standard output is one."""
    out = io.StringIO()
    width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns))
    Console(file=out, width=width, force_terminal=sys.stdout.isatty(), highlight=False).print(renderable)
    return out.getvalue().rstrip("\n")
