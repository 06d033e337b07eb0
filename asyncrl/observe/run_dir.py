"""Files of a run directory: writer (Recorder), and readers that skip and report invalid lines. Imports no
torch.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from asyncrl.base.errors import ConfigError, JournalError
from asyncrl.base.files import LOST, cut_at, lines_from_end
from asyncrl.config import RunConfig, load_config
from asyncrl.journal.read import reading
from asyncrl.journal.schema import journal_path
from asyncrl.observe.metrics import is_total

if TYPE_CHECKING:
    from asyncrl.observe.trackers import Background

CONFIG_FILE = "config.yaml"
STATUS_FILE = "status.json"
SUMMARY_FILE = "summary.json"
METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
TRAINED_FILE = "trained.jsonl"
TIMELINE_FILE = "timeline.jsonl"
TRACE_FILE = "trace.json"
LOCK_FILE = "run.lock"
REPORT_FILE = "report.html"
LOST_KEY = "lost"
"""Key of a line without a step: [first, last] of missing steps, with `why`."""
NOT_FINITE = "not_finite"
"""Names of metrics that were NaN or infinite."""
EVAL_PREFIX = "eval/"
MAX_PROBLEMS = 100
QUIET_S = 30.0
"""A run whose status is older may be dead."""

T = TypeVar("T")
State = Literal["starting", "running", "done", "failed", "interrupted", "crashed", "unknown"]
OBJECT = TypeAdapter(dict[str, Any])
EVALUATION_KEYS = {"policy_version": int, "eval/version": int, "eval/seconds": float}
STATUS_KEYS = {"updated_s": NotRequired[FiniteFloat], "waits": NotRequired[dict[str, float] | None]}


def _open_form(name: str, keys: Mapping[str, Any]) -> TypeAdapter[dict[str, Any]]:
    """Check these keys, and allow others."""
    return TypeAdapter(with_config(ConfigDict(extra="allow"))(TypedDict(name, keys)))  # type: ignore[operator]


EVALUATION = _open_form("Evaluation", EVALUATION_KEYS)
STATUS = _open_form("Status", STATUS_KEYS)


def tell(problems: list[str], problem: str) -> None:
    """Add a problem, up to MAX_PROBLEMS."""
    if len(problems) < MAX_PROBLEMS:
        problems.append(problem)


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e300 < value < 1e300


def read_lines(
    path: Path, problems: list[str], form: TypeAdapter[T], *, from_end: bool = False
) -> Iterator[T]:
    """Yield JSON lines in the `form`; report others in `problems`. No file means no lines."""
    try:
        with path.open("rb") as file:
            for line in (line for _, line in lines_from_end(path)) if from_end else file:
                try:
                    yield form.validate_json(line)
                except ValidationError as error:
                    what = f"the line {line[:60]!r}: {error.errors(include_input=False)[0]['msg']}"
                    is_whole = line.endswith(b"\n")
                    tell(problems, f"{path.name}: skipped {what if is_whole else 'an incomplete last line'}")
    except FileNotFoundError:
        return
    except OSError as error:
        tell(problems, f"{path.name} cannot be read: {error.strerror}")


def read_journal(run_dir: Path, problems: list[str], read: Callable[[sqlite3.Connection], T]) -> T | None:
    """Return what `read` finds in a snapshot; None, and a problem, without a whole journal."""
    path = journal_path(run_dir)
    if not path.is_file():
        tell(problems, f"there is no {path.name}: groups, failures and restarts are unknown")
        return None
    try:
        with reading(path) as connection:
            return read(connection)
    except JournalError as error:
        tell(problems, str(error))
        return None


def read_object(
    path: Path, problems: list[str], form: TypeAdapter[dict[str, Any]] = OBJECT
) -> dict[str, Any]:
    """Return {} if the file is absent or invalid."""
    try:
        return form.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        tell(problems, f"{path.name} cannot be read: {error.strerror}")
    except ValidationError as error:
        tell(problems, f"{path.name} is invalid: {error.errors(include_input=False)[0]['msg']}")
    return {}


def read_metrics(run_dir: Path, problems: list[str], *, from_end: bool = False) -> Iterator[dict[str, Any]]:
    for line in read_lines(run_dir / METRICS_FILE, problems, OBJECT, from_end=from_end):
        if LOST_KEY in line:
            tell(problems, f"{METRICS_FILE}: steps {line[LOST_KEY]} are missing ({line.get('why')})")
        elif not is_number(line.get("step")):
            tell(problems, f"{METRICS_FILE}: skipped a line without a number step")
        else:
            yield {name: value for name, value in line.items() if is_number(value)}


def read_evaluations(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    return list(read_lines(run_dir / EVAL_FILE, problems, EVALUATION))


def read_config(folder: Path) -> RunConfig:
    """Raises ConfigError."""
    if not os.access(folder / CONFIG_FILE, os.R_OK):
        what = f"{folder} is not a run directory: its {CONFIG_FILE} is missing or unreadable"
        raise ConfigError(what, way_out="name the directory that `asyncrl run` printed.")
    return load_config(folder / CONFIG_FILE)


def read_status(folder: Path, problems: list[str]) -> dict[str, Any]:
    return read_object(folder / STATUS_FILE, problems, STATUS)


def age_of(status: Mapping[str, Any]) -> float:
    """Return the seconds since the run wrote its status."""
    return max(0.0, time.time() - float(status.get("updated_s", 0.0)))


def judge_state(status: Mapping[str, Any], folder: Path) -> tuple[State, str]:
    """Return state and explanation, from status.json and the lock.

    A run is `crashed` only if this machine can prove it.
    """
    reported = status.get("state")
    age_s = age_of(status)
    if reported in ("done", "failed", "interrupted"):
        return reported, str(status.get("why") or "")
    if reported not in ("starting", "running"):
        return "unknown", f"there is no readable {STATUS_FILE}"
    here = socket.gethostname()
    host = status.get("host", here)
    is_held = _is_held(folder / LOCK_FILE)
    seen = f"process {status.get('pid')} on host {host} last wrote {age_s:.0f} s ago"
    if is_held:
        return reported, seen
    if host == here and is_held is False:
        return "crashed", f"{seen} and is gone; see {folder / 'logs' / 'controller.log'}"
    state: State = "unknown" if age_s > QUIET_S else reported
    return state, f"{seen}; {here} cannot check it, so run `asyncrl status {folder}` on that host"


def _is_held(path: Path) -> bool | None:
    """Return whether a process holds the lock, on any machine over NFS; None if unknown."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


# ---- writing


def append_lines(path: Path, lines: Iterable[Any]) -> None:
    """End an incomplete line first. Raises OSError."""
    torn = path.exists() and next(lines_from_end(path), (0, b"\n"))[1][-1:] != b"\n"
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" if torn else "")
        for line in lines:
            file.write(json.dumps(line, default=methodcaller("item")) + "\n")


def append_bounded(path: Path, lines: Sequence[Any], max_bytes: int) -> None:
    """Append lines; a larger file then replaces older_of(path). Raises OSError."""
    if lines:
        append_lines(path, lines)
        if path.stat().st_size > max_bytes:
            path.replace(older_of(path))


def older_of(path: Path) -> Path:
    return path.with_suffix(f".1{path.suffix}")


def read_bounded(path: Path, problems: list[str], form: TypeAdapter[T]) -> Iterator[T]:
    for each in (older_of(path), path):
        yield from read_lines(each, problems, form)


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically, without a sync. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def cut_steps(path: Path, num_steps: int) -> tuple[float, dict[str, Any]]:
    """Remove a torn end and steps after `num_steps`. Return the last kept step, lost ones included, and
    its line ({}: none).
    """
    end = path.stat().st_size
    newest = 0.0
    last: dict[str, Any] = {}
    for start, text in lines_from_end(path):
        line, step = _parsed(text)
        if newest == 0 and not 0 <= step <= num_steps:
            end = start
            continue
        newest = max(newest, step)
        if "step" in line:
            last = line
            break
    cut_at(path, end)
    return newest, last


def _parsed(text: bytes) -> tuple[dict[str, Any], float]:
    """Return a line and its step, or the last lost step; -1 for another line."""
    try:
        line = OBJECT.validate_json(text)
        return line, float(line[LOST_KEY][1] if LOST_KEY in line else line["step"])
    except (KeyError, TypeError, ValueError, IndexError):
        return {}, -1.0


class Recorder:
    """Writes metrics.jsonl, eval.jsonl and status.json from one thread."""

    def __init__(self, run_dir: str | Path, trackers: Background | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.trackers = trackers
        (self.run_dir / METRICS_FILE).touch()
        self._owner = {"pid": os.getpid(), "host": socket.gethostname()}

    def keep_steps(self, num_steps: int) -> Mapping[str, Any]:
        """Return the last kept line. Missing steps are recorded as {"lost": [first, last], "why": ...}."""
        path = self.run_dir / METRICS_FILE
        newest, last = cut_steps(path, num_steps)
        if newest < num_steps:
            append_lines(path, [{LOST_KEY: [int(newest) + 1, num_steps], "why": LOST}])
        return last

    def record_step(self, metrics: Mapping[str, float]) -> None:
        """NaN and infinity are named in `not_finite` instead."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        left_out = [name for name in metrics if name not in finite]
        append_lines(self.run_dir / METRICS_FILE, [{**finite, NOT_FINITE: left_out} if left_out else finite])
        if self.trackers is not None:
            names = (name for name in finite if name != "step" and not name.startswith(EVAL_PREFIX))
            self.trackers.tell("step", int(metrics["step"]), {name: float(finite[name]) for name in names})

    def record_evaluation(self, line: Mapping[str, Any]) -> None:
        """Append one evaluation, with `policy_version`, and `name` if there are several."""
        append_lines(self.run_dir / EVAL_FILE, [_finite(line)])
        if self.trackers is not None:
            self.trackers.tell("evaluation", line["policy_version"], evaluation_metrics(line))

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json atomically, adding pid, host and `updated_s`."""
        body = {**status, **self._owner, "updated_s": time.time()}
        text = json.dumps(_finite(body), indent=2, allow_nan=False) + "\n"
        replace_text(self.run_dir / STATUS_FILE, text)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluation_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics by name: eval/NAME/... if there are several evaluations; totals count all of them."""
    found = {name: float(value) for name, value in line.items() if name.startswith(EVAL_PREFIX)}
    if not line.get("name"):
        return found
    own = f"{EVAL_PREFIX}{line['name']}/"
    return {n if is_total(n) else own + n.removeprefix(EVAL_PREFIX): value for n, value in found.items()}
