"""Files of a run directory: writer (Recorder), and readers that skip and report invalid
lines. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

from pydantic import TypeAdapter, ValidationError

from asyncrl.base.errors import ConfigError, JournalError
from asyncrl.base.extensions import missing_extensions
from asyncrl.base.files import cut_at, lines_from_end
from asyncrl.config import JobConfig, RunConfig
from asyncrl.config.engineless_config import EnginelessConfig
from asyncrl.config.load import extensions_of, load_written
from asyncrl.journal.read import Snapshot, reading
from asyncrl.journal.schema import FILE_NAME as JOURNAL_FILE
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
ID_FILE = "run.id"
LOG_FILE = "logs/controller.log"
REPORT_FILE = "report.html"
EVAL_PREFIX = "eval/"
MAX_PROBLEMS = 100
QUIET_S = 30.0
"""A run whose status is older may be dead."""

T = TypeVar("T")
State = Literal[
    "starting", "running", "done", "failed", "interrupted", "crashed", "unknown"
]
OBJECT = TypeAdapter(dict[str, Any])


def journal_path(run_dir: Path) -> Path:
    return run_dir / JOURNAL_FILE


def tell(problems: list[str], problem: str) -> None:
    """Add a problem, up to MAX_PROBLEMS."""
    if len(problems) < MAX_PROBLEMS:
        problems.append(problem)


def is_number(value: Any) -> TypeGuard[float]:
    # type(): isinstance counts True as a number. The comparison also refuses NaN.
    return type(value) in (int, float) and -1e300 < value < 1e300


def read_lines(
    path: Path, problems: list[str], form: TypeAdapter[T], *, from_end: bool = False
) -> Iterator[T]:
    """Yield JSON lines in the `form`; report others in `problems`. No file means no
    lines.
    """
    with _noting(path, problems), path.open("rb") as file:
        for line in (line for _, line in lines_from_end(path)) if from_end else file:
            try:
                yield form.validate_json(line)
            except ValidationError as error:
                what = "an incomplete last line"
                # The run may be writing the last line now, so a torn one is expected.
                if line.endswith(b"\n"):
                    what = f"the line {line[:60]!r}: {_reason(error)}"
                tell(problems, f"{path.name}: skipped {what}")


@contextlib.contextmanager
def _noting(path: Path, problems: list[str]) -> Iterator[None]:
    """Report an unreadable file in `problems`; an absent one is empty."""
    try:
        yield
    except FileNotFoundError:
        return
    except OSError as error:
        tell(problems, f"{path.name} cannot be read: {error.strerror}")


def _reason(error: ValidationError) -> str:
    return error.errors(include_input=False)[0]["msg"]


def read_journal(
    run_dir: Path, problems: list[str], read: Callable[[Snapshot], T]
) -> T | None:
    """Return what `read` finds in a snapshot; None, and a problem, without a whole
    journal.
    """
    path = journal_path(run_dir)
    if not path.is_file():
        tell(
            problems,
            f"there is no {path.name}: groups, failures and restarts are unknown",
        )
        return None
    try:
        with reading(path) as connection:
            return read(connection)
    except JournalError as error:
        tell(problems, str(error))
        return None


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return {} if the file is absent or invalid."""
    with _noting(path, problems):
        try:
            return OBJECT.validate_json(path.read_bytes())
        except ValidationError as error:
            tell(problems, f"{path.name} is invalid: {_reason(error)}")
    return {}


def read_metrics(
    run_dir: Path, problems: list[str], *, from_end: bool = False
) -> Iterator[dict[str, float]]:
    for line in read_lines(run_dir / METRICS_FILE, problems, OBJECT, from_end=from_end):
        if is_number(line.get("step")):
            yield {name: value for name, value in line.items() if is_number(value)}
        else:
            tell(problems, f"{METRICS_FILE}: skipped a line without a number step")


def read_evaluations(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    return list(read_lines(run_dir / EVAL_FILE, problems, OBJECT))


def read_config(folder: Path) -> RunConfig:
    """Return read_settings() as a run, also of other jobs."""
    return read_settings(folder).as_run()


def read_settings(folder: Path) -> JobConfig:
    """Return the config that a run has started with, or was last resumed with. Raises
    ConfigError.
    """
    if not os.access(folder / CONFIG_FILE, os.R_OK):
        raise ConfigError(
            f"{folder} is not a run directory: its {CONFIG_FILE} is missing or unreadable",
            way_out="name the directory that `asyncrl run` printed.",
        )
    return load_written(folder / CONFIG_FILE)


def tell_unknown_kind(
    folder: Path, settings: JobConfig, report: Callable[[str], object]
) -> None:
    """Report a job whose kind no installed extension has."""
    if isinstance(settings, EnginelessConfig):
        missing = " and ".join(missing_extensions(extensions_of(folder / CONFIG_FILE)))
        report(
            f"{CONFIG_FILE} has no section of a known kind of job; to read all of it, install {missing}",
        )


def read_status(folder: Path, problems: list[str]) -> dict[str, Any]:
    return read_object(folder / STATUS_FILE, problems)


def size_of(folder: Path) -> int:
    """Return the bytes on disk of the files in a folder, each file once."""
    sizes = dict[tuple[int, int], int]()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a live run removes files
            info = path.lstat()
            sizes[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(sizes.values())


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
    # The kernel frees the lock with its process, so a held lock proves that the run
    # lives, however old its status is. A free lock proves the opposite only on the
    # run's own host: elsewhere the file system may not share locks.
    is_held = is_locked(folder / LOCK_FILE)
    seen = f"process {status.get('pid')} on host {host} last wrote {age_s:.0f} s ago"
    if is_held:
        return reported, seen
    if host == here and is_held is False:
        return "crashed", f"{seen} and is gone; see {folder / LOG_FILE}"
    state: State = "unknown" if age_s > QUIET_S else reported
    return (
        state,
        f"{seen}; {here} cannot check it, so run `asyncrl status {folder}` on that host",
    )


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock, on any machine over NFS; None if
    unknown.
    """
    try:
        with path.open("rb") as file:
            # Shared, so that several readers do not see each other as the run. Closing
            # the file frees it; a run that starts in this instant tries again
            # (base/files.py).
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


# ---- writing


def append_lines(path: Path, lines: Iterable[object]) -> None:
    """End an incomplete line first; write NaN and infinity as null. Raises OSError."""
    # A killed run may have left half a line. The next line would continue it, and both
    # would be lost.
    texts = [_json_text(line) for line in lines]
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        # in one piece, at the end of the file
        file.write("".join(f"{text}\n" for text in texts).encode())


def _json_text(value: object, indent: int | None = None) -> str:
    """Return JSON, with null for NaN and infinity: JSON has neither."""
    write = partial(json.dumps, default=methodcaller("item"), indent=indent)
    try:
        return write(value, allow_nan=False)
    except ValueError:
        return write(_finite(value))


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_bounded(path: Path, lines: Sequence[object], max_bytes: int) -> None:
    """Append lines; a larger file then replaces older_of(path). Raises OSError."""
    if lines:
        append_lines(path, lines)
        if path.stat().st_size > max_bytes:
            # A rename costs the same for any size. At most twice max_bytes are on the
            # disk, and at least the newest max_bytes stay.
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


def cut_steps(path: Path, num_steps: int) -> dict[str, Any]:
    """Remove a torn end and steps after `num_steps`. Return the last kept line ({}:
    none).

    Example: a checkpoint of step 2 is resumed, and the file has the steps 1, 2, 3 and
    half of 4. The lines are read from the end, 3 and the half of 4 are cut off, and
    step 3 is written again after it is trained again.
    """
    end = path.stat().st_size
    line: dict[str, Any] = {}
    for start, text in lines_from_end(path):
        # an invalid line is removed
        with contextlib.suppress(KeyError, TypeError, ValueError):
            line = json.loads(text)
            if line["step"] <= num_steps:
                break
        end = start
    else:
        line = {}
    cut_at(path, end)
    return line


class Recorder:
    """Writes metrics.jsonl, eval.jsonl and status.json from one thread."""

    def __init__(self, run_dir: str | Path, trackers: Background | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.trackers = trackers
        (self.run_dir / METRICS_FILE).touch()
        # judge_state compares the host with its own, and people need the process's
        # number.
        self._owner = {"pid": os.getpid(), "host": socket.gethostname()}

    def record_step(self, metrics: Mapping[str, float]) -> None:
        append_lines(self.run_dir / METRICS_FILE, [metrics])
        if self.trackers is not None:
            # Trackers get evaluations in separate calls, by policy_version and not by
            # step.
            shown = {
                name: float(value)
                for name, value in metrics.items()
                if name != "step"
                and not name.startswith(EVAL_PREFIX)
                and math.isfinite(value)
            }
            self.trackers.tell("step", int(metrics["step"]), shown)

    def record_evaluation(self, line: Mapping[str, Any]) -> None:
        """Append one evaluation, with `policy_version`, and `name` if there are
        several.
        """
        append_lines(self.run_dir / EVAL_FILE, [line])
        if self.trackers is not None:
            self.trackers.tell(
                "evaluation", line["policy_version"], evaluation_metrics(line)
            )

    def write_status(self, status: Mapping[str, object]) -> None:
        """Replace status.json atomically, adding pid, host and `updated_s`."""
        body = {**status, **self._owner, "updated_s": time.time()}
        replace_text(self.run_dir / STATUS_FILE, _json_text(body, indent=2) + "\n")


def evaluation_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics by name: eval/NAME/... if there are several evaluations; totals
    count all of them.
    """
    found = {
        name: float(value)
        for name, value in line.items()
        if name.startswith(EVAL_PREFIX) and value is not None  # null: not finite
    }
    if not line.get("name"):
        return found
    own = f"{EVAL_PREFIX}{line['name']}/"
    return {
        n if is_total(n) else own + n.removeprefix(EVAL_PREFIX): value
        for n, value in found.items()
    }
