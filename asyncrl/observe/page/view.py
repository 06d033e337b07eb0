"""Reads a run directory for the page, as JSON values. Text of models, tasks and users is never HTML."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.base.errors import JournalError
from asyncrl.config.load import sections
from asyncrl.journal.read import reading
from asyncrl.journal.schema import FILE_NAME
from asyncrl.observe.metrics import gauge_of
from asyncrl.observe.run_dir import SUMMARY_FILE, TIMELINE_FILE, read_object
from asyncrl.observe.run_numbers import Steps, duration, recent, seconds_left
from asyncrl.observe.run_record import RunRecord, read_run
from asyncrl.observe.samples import ShownRollout, read_samples
from asyncrl.observe.timeline import read_timeline, timeline_view

MAX_BUCKETS = 1024
MAX_EVALUATIONS = 1000
MAX_EVENTS = 1000
MAX_CAUSES = 50
NUM_SAMPLES = 60
"""Newest samples on the page, and older samples spread over the run."""
HIDDEN = "(hidden)"
MIN_SECRET_CHARS = 8
"""Shorter secrets are hidden only in their own setting."""
_SECRET_NAME = re.compile(
    r"(^|[_-])(api[_-]?key|key|token|secret|password|passwd|credentials?|auth|authorization)$", re.IGNORECASE
)
_SECRET_TEXT = re.compile(
    r"\b(?:sk|hf|gh[opsu]|glpat|xox[abp])[-_][\w-]{16,}"
    r"|(?<=Bearer )[\w.~+/-]{16,}"
    r"|(?i:(?<=api_key=)|(?<=apikey=)|(?<=token=)|(?<=password=)|(?<=secret=))[\w.~+/-]{8,}"
)
"""Keys of well-known services, and values after a secret's name."""
Curve = dict[str, list[float | None]]
"""`mean`, `low` and `high` per bucket of steps; only `mean` for single steps."""


def view_run(run_dir: str | Path) -> dict[str, Any]:
    """`problems` lists unreadable data. Raises ConfigError."""
    files = read_run(run_dir)
    folder = files.run_dir
    config = files.config
    steps = files.columns
    problems = files.problems
    events, failures = _from_journal(folder, problems)
    rows = read_timeline(folder, problems)
    if steps and not rows:
        problems.append(f"there is no {TIMELINE_FILE}: the timeline is empty")
    shown_events = [(s, _event_text(what, detail)) for s, what, detail in events if _is_shown(what)]
    timeline = timeline_view(rows, shown_events, problems, config.rollout.slots)
    curves = curves_of(steps)
    x = {name: [at or 0.0 for at in curve["mean"]] for name, curve in curves.items()}
    num_points = len(x.get("step", ()))
    rewards = steps.values("reward/mean")
    num_recent = len(rewards[recent(len(rewards))])
    is_bad_end = files.state in ("failed", "crashed", "interrupted")
    secrets: list[str] = []
    values = _masked(config.model_dump(mode="json"), "", secrets)
    long_secrets = sorted((secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS), key=len)
    view: dict[str, Any] = {
        "name": folder.resolve().name,
        "run_dir": str(folder),
        "state": files.state,
        "why": files.why or f"{len(steps)} of {config.trainer.num_steps} steps done",
        "ended": f"The run has state {files.state}: {files.why}" if is_bad_end else "",
        "max_staleness": config.buffer.max_staleness,
        "verdict": files.verdict and asdict(files.verdict),
        "num_recent": num_recent,
        "window": max(1, round(num_recent * num_points / max(1, len(steps)))),
        "tiles": [{"label": label, "value": value, "note": note} for label, value, note in _tiles(files)],
        "step": x.get("step", []),
        "time_s": x.get("time_s", [0.0] * num_points),
        "curves": {name: curve for name, curve in curves.items() if name != "step"},
        "evaluations": files.evaluation_lines[:: 1 + len(files.evaluation_lines) // MAX_EVALUATIONS],
        "gauges": {name: asdict(gauge) for name in curves if (gauge := gauge_of(name))},
        "timeline": timeline,
        "samples": _some_samples(folder, problems),
        "failures": failures,
        "warnings": _warnings(files.status, read_object(folder / SUMMARY_FILE, []), events),
        "settings": _settings(values),
        "problems": problems,
    }
    return {key: without_secrets(value, long_secrets) for key, value in view.items()}


def without_secrets(value: Any, secrets: list[str]) -> Any:
    """Hide the secrets (shortest first), and keys of well-known services."""
    if isinstance(value, str):
        for secret in reversed(secrets):
            value = value.replace(secret, HIDDEN)
        return _SECRET_TEXT.sub(HIDDEN, value)
    if isinstance(value, Mapping):
        return {key: without_secrets(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        is_numbers = not value or isinstance(value[-1], float)
        return value if is_numbers else [without_secrets(item, secrets) for item in value]
    return value


def _masked(value: Any, name: str, secrets: list[str]) -> Any:
    """Hide generator.env and values with a name such as api_key; add them to `secrets`."""
    if isinstance(value, Mapping):
        return {key: _masked(item, f"{name}.{key}", secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, name, secrets) for item in value]
    is_secret = name.startswith(".generator.env.") or _SECRET_NAME.search(name.rpartition(".")[2])
    if not is_secret or not isinstance(value, str) or not value:
        return value
    secrets.append(value)
    return HIDDEN


def _settings(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    keys = [key for _, _, of_section in sections() for key in of_section]
    names = {key.name.rpartition(".")[0] for key in keys}
    settings = []
    for key in keys:
        value: Any = values
        for name in key.name.split("."):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        if value is ... or (isinstance(value, dict) and key.name in names):
            continue
        default = None if key.default == "must be given" else key.default
        text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
        settings.append({"key": key.name, "value": text, "default": default, "differs": text != default})
    return settings


def curves_of(steps: Steps) -> dict[str, Curve]:
    size = 1 + (len(steps) - 1) // MAX_BUCKETS
    return {name: _curve(np.array(steps.column(name)), size) for name in steps.names} if len(steps) else {}


def _curve(values: Any, size: int) -> Curve:
    if size == 1:
        return {"mean": _rounded(values)}
    starts = np.arange(0, len(values), size)
    sums = np.add.reduceat(np.nan_to_num(values), starts)
    counts = np.add.reduceat((~np.isnan(values)).astype(np.float64), starts)
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    lows = np.fmin.reduceat(values, starts)
    highs = np.fmax.reduceat(values, starts)
    return {"mean": _rounded(means), "low": _rounded(lows), "high": _rounded(highs)}


def _rounded(values: Any) -> list[float | None]:
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]


def _tiles(files: RunRecord) -> Iterator[tuple[str, str, str]]:
    steps = files.columns
    config = files.config
    num_steps = config.trainer.num_steps
    step_s = steps.mean("perf/step_s")
    pace = "" if step_s is None else f", {step_s:.3g} s each"
    yield "steps", f"{len(steps):,}", f"of {num_steps:,}{pace}"
    if files.state == "running" and (left_s := seconds_left(steps, num_steps)) is not None:
        yield "time left", duration(left_s), "at the pace of the last 20 steps"
    wall_s = float(steps.last.get("time_s", 0.0))
    if steps:
        yield "time", duration(wall_s), f"{duration(steps.total('perf/step_s'))} of it in steps"
    name = config.best_eval or ""
    lines = [line for line in files.evaluation_lines if line.get("name", "") == name]
    if means := [line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line]:
        best = f"best of {len(means)}: {max(means):.3f}"
        yield f"last evaluation {name}".strip(), f"{means[-1]:.3f}", best
    if (age := steps.mean("sample/staleness_mean")) is not None:
        largest = f"largest {steps.largest('sample/staleness_max') or 0:.0f}"
        yield "staleness", f"{age:.2f} versions", f"{largest}, bound {config.buffer.max_staleness}"
    if (failed := steps.last.get("rollout/failed")) is not None:
        yield "failed rollouts", f"{failed:.0f}", f"{steps.last.get('rollout/retried', 0):.0f} retries"


def _some_samples(folder: Path, problems: list[str]) -> list[ShownRollout]:
    samples = read_samples(folder, problems)
    older = samples[:-NUM_SAMPLES]
    return older[:: 1 + len(older) // NUM_SAMPLES] + samples[-NUM_SAMPLES:]


# ---- the journal

Events = list[tuple[float, str, dict[str, Any]]]


def _from_journal(folder: Path, problems: list[str]) -> tuple[Events, list[dict[str, Any]]]:
    """Newest events, oldest first, and failed rollouts by cause."""
    if not (folder / FILE_NAME).is_file():
        problems.append(f"there is no {FILE_NAME}: failures and restarts are unknown")
        return [], []
    try:
        with reading(folder / FILE_NAME) as connection:
            query = "SELECT s, what, detail FROM events ORDER BY id DESC LIMIT ?"
            rows = connection.execute(query, (MAX_EVENTS,)).fetchall()
            events = [(float(at_s), str(what), json.loads(detail)) for at_s, what, detail in reversed(rows)]
            return events, _failures(connection)
    except JournalError as error:
        problems.append(str(error))
        return [], []


def _failures(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Count failures by cause, each with an example."""
    counts = Counter[str]()
    examples: dict[str, str] = {}
    query = (
        "SELECT '', why, count(*) FROM failures GROUP BY why"
        " UNION ALL SELECT 'group ' || state || ': ', reason, count(*) FROM groups"
        " WHERE reason <> '' GROUP BY state, reason"
    )
    for prefix, why, num in connection.execute(query):
        cause = prefix + cause_of(str(why))
        counts[cause] += num
        examples.setdefault(cause, str(why)[:2000])
    return [
        {"cause": cause, "count": num, "example": examples[cause]}
        for cause, num in counts.most_common(MAX_CAUSES)
    ]


def cause_of(why: str) -> str:
    """Return a message's first line without quoted names and numbers."""
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", (why.strip().splitlines() or ["no reason recorded"])[0][:600])
    return re.sub(r"\b(?:g\d+(?:/r\d+)?|r\d+|0x[0-9a-f]+|[0-9a-f]{12,}|\d[\d.,]*)", "N", line)[:160]


def _is_shown(what: str) -> bool:
    return not (what.startswith("hand") or what.endswith(" up"))


def _event_text(what: str, detail: Mapping[str, Any]) -> str:
    seconds = detail.get("down_s", detail.get("seconds"))
    text = f"{what}: {detail['name']}" if detail.get("name") else what
    text += f" {detail['version']}" if "version" in detail else ""
    text += f", after {seconds:.1f} s" if isinstance(seconds, int | float) else ""
    return f"{text}: {detail['why']}".splitlines()[0][:400] if detail.get("why") else text


def _warnings(status: Mapping[str, Any], summary: Mapping[str, Any], events: Events) -> list[str]:
    warnings = summary.get("warnings") or status.get("warnings") or []
    texts = [str(text) for text in warnings] if isinstance(warnings, list) else []
    losses = ("lost", "stuck", "restored", "broken", "failed")
    return texts + [_event_text(what, detail) for _, what, detail in events if what.split()[-1] in losses]
