"""Reads a run directory, live or afterwards, and believes nothing in it. Knows the files; knows no rooms.

A half-written last line is a run in the middle of writing; any other bad line is a problem that is told. A run that says
"running" while its process is gone has crashed, and is called so.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.observe.recorder import EVAL_FILE, METRICS_FILE, NOT_FINITE, STATUS_FILE

CONFIG_FILE = "config.yaml"
TRAINED_FILE = "trained.jsonl"

State = Literal["starting", "running", "done", "failed", "interrupted", "crashed", "unknown"]

_QUIET_S = 30.0
_WORDS = (NOT_FINITE, "last_failure")
"""Values of a line that are no metrics."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run directory holds. `problems` are sentences about what in it cannot be believed."""

    run_dir: Path
    config: RunConfig
    state: State
    explanation: str
    """The state in a sentence, with the way out where there is something to do."""
    status: Mapping[str, Any]
    """status.json as it is; empty if there is none."""
    steps: tuple[Mapping[str, float], ...]
    """Lines of metrics.jsonl, one a step, in order of steps."""
    trained: tuple[Mapping[str, Any], ...]
    """Lines of trained.jsonl, as they are."""
    problems: tuple[str, ...]
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Lines of eval.jsonl, as they are."""


def read_run(run_dir: str | Path) -> RunFiles:
    """Read a run directory. Raises ConfigError if it is none, or if it or its config cannot be read."""
    folder = Path(run_dir)
    if (what := _why_no_run(folder)) is not None:
        raise ConfigError(
            f"{folder} is no run directory: it {what}",
            rule=f"a run directory holds {CONFIG_FILE}, {STATUS_FILE} and {METRICS_FILE}",
            way_out="give the directory that `asyncrl run` printed; by default runs/NAME-DATE-TIME.",
        )
    config = load_config(folder / CONFIG_FILE)
    problems: list[str] = []
    status = _read_status(folder / STATUS_FILE, problems)
    state, explanation = judge_state(status, folder)
    steps = {line["step"]: line for line in _read_metrics(folder / METRICS_FILE, problems, ("step",))}
    return RunFiles(
        run_dir=folder,
        config=config,
        state=state,
        explanation=explanation,
        status=status,
        steps=tuple(steps[step] for step in sorted(steps)),
        trained=tuple(read_lines(folder / TRAINED_FILE, problems)),
        evaluations=tuple(read_evaluations(folder, problems)),
        problems=tuple(problems),
    )


def _why_no_run(folder: Path) -> str | None:
    try:
        if (folder / CONFIG_FILE).is_file():
            return None
        return "is not there" if not folder.exists() else "is no directory" if not folder.is_dir() else f"holds no {CONFIG_FILE}"
    except OSError as error:  # rights, above all
        return f"cannot be read ({error.strerror})"


def _read_text(path: Path, problems: list[str]) -> str | None:
    """None if there is no such file, or if it cannot be read: that is told in `problems`."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return None


def read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """JSON objects of a file, one a line. What cannot be read is left out and told in `problems`."""
    text = _read_text(path, problems) or ""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif number == len(lines) and not text.endswith("\n"):
            problems.append(f"{path.name} ends in half a line ({len(line)} characters), which is left out: it was being written")
        else:
            problems.append(f"{path.name} line {number} is no JSON object and is left out: {line[:60]!r}")
    return found


def read_evaluations(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Lines of eval.jsonl that have what every evaluation has; what is no number in them is left out and told in `problems`."""
    lines = _read_metrics(run_dir / EVAL_FILE, problems, ("policy_version", "eval/version", "eval/seconds"))
    whole = [line for line in lines if "eval/reward_mean" not in line or {"eval/length_mean", "eval/truncated_fraction"} <= line.keys()]
    if len(whole) < len(lines):
        problems.append(f"{EVAL_FILE}: {len(lines) - len(whole)} evaluations without lengths are left out")
    return whole


def _read_metrics(path: Path, problems: list[str], needed: Sequence[str]) -> list[dict[str, Any]]:
    """Lines that have the `needed` numbers. Metrics that are none are left out, as whole lines are, and told in `problems`."""
    found = []
    for number, line in enumerate(read_lines(path, problems), start=1):
        wrong = [name for name, value in line.items() if name not in _WORDS and not _is_number(value)]
        if missing := [name for name in needed if name in wrong or name not in line]:
            problems.append(f"{path.name} object {number} is left out: {', '.join(missing)} is no number in it")
            continue
        if wrong:
            problems.append(f"{path.name} object {number}: {', '.join(wrong)} is no number and is left out")
        found.append({name: value for name, value in line.items() if name not in wrong})
    return found


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def judge_state(status: Mapping[str, Any], folder: Path) -> tuple[State, str]:
    """What the run does, and a sentence about it, from status.json and from whether its process lives."""
    if not status:
        return "unknown", f"there is no readable {STATUS_FILE}; the run ended before it began, or another version wrote it."
    said = status.get("state")
    age_s = max(0.0, time.time() - float(status.get("updated_s", 0.0)))
    alive = is_alive(status.get("pid"), status.get("pid_started_s"))
    if said in ("starting", "running"):
        if not alive:
            return "crashed", (
                f"status.json says {said}, but its process {status.get('pid')} is gone (last written {age_s:.0f} s ago): "
                f"the run was killed or crashed. Read {folder / 'logs' / 'controller.log'}."
            )
        quiet = f", but it has written nothing for {age_s:.0f} s" if age_s > _QUIET_S else ""
        return said, f"process {status.get('pid')} is {said}{quiet}."
    if said in ("done", "failed", "interrupted"):
        reason = f": {status['why']}" if status.get("why") else "."
        return said, f"{said} {age_s:.0f} s ago{reason}"
    return "unknown", f"status.json says {said!r}, which is no state of a run."


def is_alive(pid: object, started_s: object) -> bool:
    """Whether that very process lives: a pid alone may be somebody else's by now, so its start time must agree."""
    if not isinstance(pid, int) or not isinstance(started_s, (int, float)):
        return False
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError, OverflowError):  # the latter: no pid can be that number
        return False


def _read_status(path: Path, problems: list[str]) -> Mapping[str, Any]:
    text = _read_text(path, problems)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is no JSON: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is no JSON object")
        return {}
    if "updated_s" in value and not _is_number(value["updated_s"]):
        problems.append(f"{path.name}: updated_s is no number and is left out")
        del value["updated_s"]
    return value
