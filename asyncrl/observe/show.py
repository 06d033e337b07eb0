"""`asyncrl runs`, `status` and `inspect`. All only read, and import no torch."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.base.errors import ConfigError
from asyncrl.journal.read import (
    Snapshot,
    batch_story,
    failures_of,
    group_story,
    partials_of,
    rollouts_of,
    run_story,
)
from asyncrl.messages.records import Prompt
from asyncrl.observe import run_numbers as numbers
from asyncrl.observe.console import metric_rows
from asyncrl.observe.read_run import RunRecord, TrainedRecord, read_run
from asyncrl.observe.run_dir import (
    CONFIG_FILE,
    QUIET_S,
    STATUS_FILE,
    age_of,
    judge_state,
    read_config,
    read_evaluations,
    read_journal,
    read_metrics,
    read_status,
    size_of,
)
from asyncrl.observe.samples import (
    NEWEST,
    Decode,
    harmless,
    sample_text,
    samples_text,
    shown,
)
from asyncrl.observe.verdict import summary_panel, verdict_rows
from asyncrl.rollouts.tokenizer import HFChatTokenizer

RUNS = Path("runs")
NUM_REWARDS = 10
SHOWN_ROWS = 30
"""Last rows of `inspect` tables."""
_COLORS = {
    "done": "green",
    "running": "blue",
    "starting": "blue",
    "interrupted": "yellow",
}
_ENDED = ("done", "failed", "interrupted")
_NOT_DRAWN = ("version", "min_version", "group_ids", "tokens_sha")


def to_text(*drawn: RenderableType) -> str:
    """Render for the width of the terminal; with colors on a terminal."""
    out = io.StringIO()
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    Console(
        file=out, width=width, force_terminal=sys.stdout.isatty(), highlight=False
    ).print(Group(*drawn))
    return out.getvalue().rstrip("\n")


# ---- runs


def find_runs(folder: Path) -> list[Path]:
    """Newest first. Raises ConfigError if there is no such folder."""
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}",
            way_out="name the folder of your runs; `asyncrl init quickstart` writes a first config.",
        )
    return sorted(
        (path.parent for path in folder.glob(f"*/{CONFIG_FILE}")),
        key=_written_s,
        reverse=True,
    )


def newest_run() -> Path:
    """Return the run that was written last. Raises ConfigError if there is none."""
    if not (runs := find_runs(RUNS)):
        raise ConfigError(f"{RUNS} has no run", way_out="name the directory of a run.")
    return runs[0]


def render_runs(folder: Path, *, as_json: bool) -> str:
    """Newest first. Raises ConfigError."""
    rows = [_run_row(run_dir) for run_dir in find_runs(folder)]
    if as_json:
        return json.dumps(rows, indent=2)
    for row in rows:
        row["steps"] = f"{row['steps']}/{row.pop('num_steps') or '?'}"
        row["size"] = f"{row.pop('size_bytes') / 1e6:,.1f} MB"
        row["written"] = f"{numbers.duration(row.pop('age_s'))} ago"
    return (
        to_text(table(rows))
        if rows
        else f"no runs in {folder}; `asyncrl status {folder}` describes a run"
    )


def _written_s(run_dir: Path) -> float:
    files = (run_dir / name for name in (STATUS_FILE, CONFIG_FILE))
    return next((path.stat().st_mtime for path in files if path.exists()), 0.0)


def _run_row(run_dir: Path) -> dict[str, Any]:
    status = read_status(run_dir, [])
    # From the end, and lazily: `asyncrl runs` reads only the last lines of each run.
    lines = (
        line
        for line in read_metrics(run_dir, [], from_end=True)
        if "reward/mean" in line
    )
    rewards = [line["reward/mean"] for line in islice(lines, NUM_REWARDS)]
    state, _ = judge_state(status, run_dir)
    return {
        "run_dir": str(run_dir),
        "state": state,
        "steps": status.get("step") or 0,
        "num_steps": status.get("num_steps"),
        "reward": fmean(rewards) if rewards else None,
        "best_eval": _best_evaluation(run_dir),
        "model": _model_of(run_dir),
        "size_bytes": size_of(run_dir),
        "pid": None if state in _ENDED else status.get("pid"),
        "age_s": max(0.0, time.time() - _written_s(run_dir)),
    }


def _model_of(run_dir: Path) -> str | None:
    with contextlib.suppress(ConfigError):  # a config of another version
        return read_config(run_dir).model.path
    return None


def _best_evaluation(run_dir: Path) -> float | None:
    """Return the best reward of the first evaluation, or the lowest held-out loss."""
    by_name = numbers.by_evaluation(read_evaluations(run_dir, []))
    first = next(iter(by_name.values()), [])
    rewards, losses = (
        [line[name] for line in first if line.get(name) is not None]
        for name in ("eval/reward_mean", "eval/loss")
    )
    return max(rewards, default=min(losses, default=None))


# ---- status


def render_status(
    run_dir: str | Path, *, is_verbose: bool = False, as_json: bool = False
) -> str:
    """Describe a run on one screen. Raises ConfigError."""
    files = read_run(run_dir)
    if as_json:
        judged = {
            "run_dir": str(files.run_dir),
            "state": files.state,
            "why": files.why,
            "verdict": files.verdict and asdict(files.verdict),
            "evaluations": files.evaluation_lines,
            "problems": files.problems,
        }
        return json.dumps(files.status | judged, indent=2)
    drawn = [
        numbers.boxed(
            [row for row in _status_rows(files) if row[1]], str(files.run_dir)
        )
    ]
    if is_verbose and files.status:
        details = {**files.status, "waits": "\n".join(_waits(files.status))}
        texts = (
            (name, Text(harmless(numbers.plain(value))))
            for name, value in details.items()
        )
        drawn.append(numbers.boxed(texts, STATUS_FILE))
    return to_text(*drawn)


def _status_rows(files: RunRecord) -> Iterator[tuple[str, RenderableType]]:
    steps = files.columns
    ago = (
        f" {numbers.duration(age_of(files.status))} ago"
        if files.state in _ENDED
        else ""
    )
    why = f": {files.why}" if files.why else ""
    yield (
        "state",
        Text.assemble((files.state, _COLORS.get(files.state, "red")), ago, why),
    )
    yield "steps", files.progress
    if files.state in ("starting", "running"):
        yield "now", Text(str(files.status.get("activity") or ""))
        yield "waits", Text("".join(_waits(files.status, QUIET_S)[:1]), style="yellow")
    if files.verdict is not None:
        yield from verdict_rows(files.verdict)
        yield from metric_rows(
            steps, numbers.recent(len(steps)), files.config.buffer.max_staleness
        )
    for lines in numbers.by_evaluation(files.evaluation_lines).values():
        rewards = [
            line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line
        ]
        yield (
            "eval",
            Text(
                f"{numbers.evaluation_text(lines[-1])}  {numbers.sparkline(rewards, width=16)}"
            ),
        )
    yield (
        "warnings",
        Text(numbers.plain(files.status.get("warnings") or ""), style="yellow"),
    )
    yield "problems", Text("\n".join(files.problems), style="red")


def _waits(status: Mapping[str, Any], min_s: float = 0.0) -> list[str]:
    waits = (status.get("waits") or {}).items()
    return [
        f"{wait}, since {seconds:.0f} s" for wait, seconds in waits if seconds >= min_s
    ]


# ---- inspect


def render_inspect(
    run_dir: str | Path,
    *,
    as_json: bool = False,
    step: int | None = None,
    group: int | None = None,
    samples: bool = False,
    kinds: Sequence[str] = (),
) -> str:
    """Describe a run's batches, waste, restarts and resumes, or its `samples`; `step`
    selects one batch, `group` one group. Raises ConfigError.
    """
    files = read_run(run_dir)
    if samples or kinds:
        found = [
            sample
            for sample in files.samples
            if step in (None, sample["step"])
            and group in (None, sample["group_id"])
            and (not kinds or sample["kind"] in kinds)
        ]
        if as_json:
            return json.dumps(
                {"run_dir": str(run_dir), "samples": found, "problems": files.problems}
            )
        is_newest = step is None and group is None
        return samples_text(
            found[-NEWEST:] if is_newest else found, files.run_dir, files.problems
        )
    summary = summarize(files, step, group)
    if as_json:
        return json.dumps(summary, indent=2)
    summary.pop("verdict")
    drawn = [*_tables(summary)]
    if summary["bound_kept"] is False:
        drawn.append(Text("BOUND OR RECORD BROKEN: see violations", "bold red"))
    if files.verdict:
        drawn.append(summary_panel(files.verdict, title="verdict"))
    return to_text(*drawn)


def summarize(
    files: RunRecord, step: int | None, group: int | None
) -> dict[str, object]:
    """Return staleness from the trainer's record, the verdict, and batches; `journal`,
    `batch` and `story` from the journal. Raises ConfigError for an unknown step or
    group.
    """
    record = TrainedRecord(files.run_dir, files.problems)
    batches = [
        batch
        for batch in record.batches.values()
        if step in (None, batch["step"])
        and (group is None or group in batch["group_ids"])
    ]
    stories = (
        read_journal(
            files.run_dir, files.problems, partial(_stories, files, step, group)
        )
        or {}
    )
    is_whole = step is None and group is None
    if not batches and not stories and not is_whole:
        what = f"step {step}" if group is None else f"group {group}"
        raise ConfigError(
            f"{files.run_dir} has no record of {what}; it has {numbers.several(len(record.batches), 'step')}",
            rule="only groups that a batch took are in the record",
            way_out="take a step or a group id from `asyncrl inspect RUN_DIR --json`.",
        )
    violations = record.violations()
    summary = {
        "run_dir": str(files.run_dir),
        "state": files.state,
        "max_staleness": files.config.buffer.max_staleness,
        **record.totals(),
        "bound_kept": not violations if record.batches else None,
        "violations": violations,
        "restored_from": record.restored,
        **stories,
        "steps": batches,
        "verdict": files.verdict and asdict(files.verdict),
        "problems": files.problems,
    }
    if not is_whole:
        summary["trajectories"] = record.trajectories(step, group)
    if step is not None:
        metrics = (
            line for line in read_metrics(files.run_dir, []) if line["step"] == step
        )
        summary["metrics"] = next(metrics, None)
    return summary


def _stories(
    files: RunRecord,
    step: int | None,
    group: int | None,
    connection: Snapshot,
) -> dict[str, Any]:
    stories: dict[str, Any] = {}
    if group is not None:
        stories["story"] = _group_story(connection, group, files)
    if step is not None:
        stories["batch"] = batch_story(connection, step - 1)
    if not stories:
        stories["journal"] = run_story(connection)
        masked = files.columns.total("tokens/sampled") - files.columns.total(
            "tokens/trained"
        )
        stories["journal"]["wasted_tokens"]["masked"] = int(masked)
    return {name: story for name, story in stories.items() if story is not None}


def _group_story(
    connection: Snapshot, group_id: int, files: RunRecord
) -> dict[str, Any] | None:
    """Return a group with its rollouts in the form of samples."""
    if (story := group_story(connection, group_id)) is None:
        return None
    prompt = Prompt(story["prompt_id"], tuple(story["messages"]))
    decode = _decoder(files)
    step = (story["start_version"] if story["batch"] is None else story["batch"]) + 1
    story["running"] = [
        {
            "sample_index": index,
            "attempt": attempt,
            "num_sampled": begun.tokens.num_sampled,
        }
        for index, (attempt, begun) in partials_of(connection, group_id).items()
    ]
    story["failures"] = [
        {"sample_index": index, "attempts": attempts, "why": why}
        for index, (attempts, why) in failures_of(connection, group_id).items()
    ]
    story["rollouts"] = [
        {
            **shown(prompt, rollout, decode, step=step, min_version=0),
            "kind": "finished",
            "group_id": group_id,
            "sample_index": index,
            "staleness": None,
        }
        for index, rollout in rollouts_of(connection, group_id).items()
    ]
    return story


def _decoder(files: RunRecord) -> Decode:
    """Without a tokenizer.json, text is the token ids. Other formats would import
    torch.
    """
    model = files.config.model
    final = files.run_dir / "final"
    folders = [files.run_dir / "model", final, *final.glob("*")]  # one for each role
    folders += [Path(model.path).expanduser()] if model.path else []
    for folder in folders:
        with contextlib.suppress(ConfigError):
            if (folder / "tokenizer.json").is_file():
                return HFChatTokenizer(folder, chat_template=model.chat_template).decode
    return lambda token_ids, **_: " ".join(map(str, token_ids))


def _tables(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Draw values and mappings as grids, and each list as a table of its last rows."""
    simple = [
        (_title(name), value) for name, value in summary.items() if not _is_table(value)
    ]
    yield numbers.grid(
        (name, Text(harmless(numbers.plain(value)))) for name, value in simple
    )
    for name, value in summary.items():
        if not _is_table(value):
            continue
        yield Text(f"\n{_title(name)}", style="bold cyan")
        if isinstance(value, Mapping):
            yield from _tables(value)
        elif name == "rollouts":
            yield from (Text(sample_text(sample)) for sample in value)
        else:
            yield table(value[-SHOWN_ROWS:])
            if len(value) > SHOWN_ROWS:
                yield Text(f"the last {SHOWN_ROWS} of {len(value)}")


def _title(name: object) -> str:
    return str(name).removeprefix("num_").replace("_", " ")


def _is_table(value: object) -> bool:
    return bool(value) and (
        isinstance(value, Mapping)
        or (isinstance(value, list) and isinstance(value[0], Mapping))
    )


def table(rows: Sequence[Mapping[str, object]]) -> Table:
    """Draw rows with the columns that any of them has."""
    names = dict.fromkeys(
        name for row in rows for name in row if name not in _NOT_DRAWN
    )
    drawn = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in names:
        is_text = any(
            not isinstance(row.get(name, 0), int | float | None) for row in rows
        )
        drawn.add_column(
            _title(name), justify="left" if is_text else "right", overflow="fold"
        )
    for row in rows:
        drawn.add_row(*(Text(harmless(numbers.plain(row.get(name)))) for name in names))
    return drawn
