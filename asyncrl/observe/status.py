"""Tables of `asyncrl status` and `asyncrl inspect`, drawn from their plain summaries. Knows no files, no
rooms.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.errors import ConfigError
from asyncrl.observe.known_waits import Wait
from asyncrl.observe.run_files import TRAINED_FILE, RunFiles, read_run
from asyncrl.observe.run_numbers import thinned
from asyncrl.observe.text import evaluation_text, sparkline
from asyncrl.observe.trained import TrainedBatch, TrainedRecord, read_record, trajectory_dict
from asyncrl.observe.verdict import Verdict, judge, summary_panel

# What `asyncrl status` says of a run directory, and `asyncrl inspect` of the trainer's record in it. Starts
# and changes nothing.


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


def inspect_summary(
    files: RunFiles, *, step: int | None = None, group: int | None = None, is_required: bool = True
) -> dict[str, Any]:
    """Plain values: staleness recomputed from the spans, whether the bound was kept, the verdict, and each of
    the newest batches.

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
        "steps": [
            _batch_dict(batch, files.one_step, group, with_trajectories=step is not None) for batch in shown
        ],
        "verdict": judge(files.steps, files.config).as_dict() if files.steps else None,
        "problems": [*problems, *lost],
    }


def _batch_dict(
    batch: TrainedBatch, metrics: Mapping[str, Any] | None, group: int | None, *, with_trajectories: bool
) -> dict[str, Any]:
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


_STATE_COLOURS = {
    "done": "green",
    "running": "blue",
    "starting": "blue",
    "interrupted": "yellow",
    "failed": "red",
    "crashed": "red",
}
_MAX_ROWS = 100
_LEFT_OUT = ("state", "step", "num_steps", "pid", "host", "boot_id", "updated_s", "why")


def status_table(summary: Mapping[str, Any]) -> RenderableType:
    """State, progress, staleness, what the rooms said last, verdict so far."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    state = summary["state"]
    rows.add_row("state", Text.assemble((state, _STATE_COLOURS.get(state, "")), "  ", summary["explanation"]))
    rows.add_row("steps", f"{summary['steps_done']} of {summary['num_steps']}")
    last = summary["last_metrics"]
    if summary["rewards"]:
        line = sparkline(summary["rewards"], width=32)
        rows.add_row(
            "reward", Text(f"{summary['rewards'][-1]:.3f}  {line}  from {summary['rewards'][0]:.3f}")
        )
    if "sample/staleness_max" in last and "sample/staleness_mean" in last:
        mean, largest = last["sample/staleness_mean"], last["sample/staleness_max"]
        rows.add_row(
            "staleness",
            f"{mean:.1f} on average, {largest:.0f} at most of {summary['max_staleness']} allowed (last step)",
        )
    for words in _evaluations(summary["evaluations"]):
        rows.add_row("eval", Text(words))
    for name, value in summary["status"].items():
        if name not in _LEFT_OUT and value is not None:
            rows.add_row(Text(name), Text(_waits(value) if name == "waits" else _plain(value)))
    for problem in summary["problems"]:
        rows.add_row("problem", Text(problem, style="red"))
    panel = Panel(rows, title=Text(summary["run_dir"]), title_align="left", border_style="blue")
    verdict = Verdict.from_dict(summary["verdict"]) if summary["verdict"] else None
    return Group(panel, summary_panel(verdict, title="so far")) if verdict else panel


def _waits(value: Any) -> str:
    """A sentence each; whatever is no list of waits, as it is."""
    try:
        return "\n".join(str(Wait(**entry)) for entry in value) or "none"
    except (TypeError, ValueError):
        return _plain(value)


def _evaluations(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One row: the last evaluation, and the rewards of all."""
    if lines:
        rewards = [line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line]
        yield f"{evaluation_text(lines[-1])}\n{sparkline(rewards, width=32)}"


def inspect_tables(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The bound, the batches, their trajectories where asked for, what broke a promise, the verdict."""
    yield _bound(summary)
    if summary["steps"]:
        shown = summary["steps"][-_MAX_ROWS:]
        if "trajectories" not in shown[0] and len(shown) < summary["num_steps"]:
            yield Text(f"the last {len(shown)} of {summary['num_steps']} steps; --step N shows any of them:")
        yield _batches(shown)
    for batch in summary["steps"]:
        if "trajectories" in batch:
            yield _trajectories(batch)
    for violation in summary["violations"][:20]:
        yield Text(f"broken: {violation}", style="red")
    for problem in summary["problems"]:
        yield Text(f"problem: {problem}", style="red")
    if summary["verdict"]:
        yield summary_panel(Verdict.from_dict(summary["verdict"]), title=summary["run_dir"])


def _bound(summary: Mapping[str, Any]) -> Text:
    allowed = f"max_staleness {summary['max_staleness']}, on_overdue {summary['on_overdue']}"
    if summary["bound_kept"] is None:
        return Text(f"nothing was trained yet ({allowed}).")
    counted = f"{summary['num_loss_tokens']} tokens of {summary['num_trajectories']} trajectories in {summary['num_steps']} steps"
    if summary["bound_kept"] and summary["lost"]:
        missing = "; ".join(summary["lost"])
        return Text(f"bound kept in all that is recorded: {counted} ({allowed}); {missing}.", style="yellow")
    if summary["bound_kept"]:
        oldest = summary["staleness_max"]
        return Text(
            f"bound kept: {counted}, the oldest {oldest} versions behind its batch ({allowed}).",
            style="green",
        )
    return Text(
        f"BOUND OR RECORD BROKEN in {len(summary['violations'])} places: {counted} ({allowed}).",
        style="bold red",
    )


def _batches(steps: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for name in ("step", "groups", "tokens", "reward", "staleness", "max"):
        table.add_column(name, justify="right")
    table.add_column("loss tokens by version", overflow="fold")
    for batch in steps:
        versions = " ".join(f"v{version}:{num}" for version, num in batch["tokens_by_version"].items())
        cells = (
            len(batch["group_ids"]),
            batch["num_loss_tokens"],
            batch["reward_mean"],
            batch["staleness_mean"],
            batch["staleness_max"],
        )
        table.add_row(str(batch["step"]), *(_plain(cell) for cell in cells), versions)
    return table


def _trajectories(batch: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1), title=f"step {batch['step']}", title_justify="left")
    has_branches = any(entry["branch"] for entry in batch["trajectories"])
    for name in (
        "group",
        "sample",
        *(("branch",) if has_branches else ()),
        "reward",
        "tokens",
        "in loss",
        "staleness",
    ):
        table.add_column(name, justify="right")
    table.add_column("prompt", overflow="fold")
    table.add_column("spans of loss tokens", overflow="fold")
    for entry in batch["trajectories"]:
        spans = " ".join(f"{start}..{end - 1}@v{version}" for start, end, version in entry["spans"])
        cells = (
            entry["group_id"],
            entry["sample_index"],
            *((entry["branch"],) if has_branches else ()),
            entry["reward"],
            entry["num_tokens"],
            entry["num_loss_tokens"],
            entry["staleness"],
        )
        table.add_row(*(_plain(cell) for cell in cells), Text(entry["prompt_id"]), spans)
    return table


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        between = "\n" if any(isinstance(item, (list, tuple, Mapping)) for item in value) else ", "
        return between.join(_plain(item) for item in value) or "none"
    return str(value)
