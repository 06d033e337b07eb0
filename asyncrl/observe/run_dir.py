"""The files of a run directory and their tolerant readers: a torn or foreign line is skipped and reported."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from asyncrl.base.files import lines_from_end

CONFIG_FILE = "config.yaml"
STATUS_FILE = "status.json"
SUMMARY_FILE = "summary.json"
METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
SAMPLES_FILE = "samples.jsonl"
TRAINED_FILE = "trained.jsonl"
TIMELINE_FILE = "timeline.jsonl"
TRACE_FILE = "trace.json"
JOURNAL_FILE = "journal.sqlite"
LOCK_FILE = "run.lock"
REPORT_FILE = "report.html"
T = TypeVar("T")
LOST_KEY = "lost"
"""Key of a line without a step: [first, last] of steps whose lines are missing, with `why`."""
MAX_PROBLEMS = 100


def read_values(path: Path, problems: list[str], kind: type[T], *, from_end: bool = False) -> Iterator[T]:
    """Yield the JSON values of one `kind` of a file, one a line, the last first `from_end`; an absent file is
    empty. Other lines go to `problems`.
    """
    try:
        for line in _lines(path, from_end=from_end):
            value = parse(line)
            if isinstance(value, kind):
                yield value
            elif line.endswith(b"\n"):
                tell(problems, f"a line of {path.name} is no JSON {kind.__name__}, skipped: {line[:60]!r}")
            else:
                tell(problems, f"{path.name} ends in half a line, which is skipped")
    except FileNotFoundError:
        return
    except OSError as error:
        tell(problems, f"{path.name} cannot be read: {error.strerror}")


def read_jsonl(
    path: Path, problems: list[str], *numbers: str, from_end: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file that have the `numbers`, as read_values() does."""
    for value in read_values(path, problems, dict, from_end=from_end):
        if LOST_KEY in value:
            tell(problems, f"steps {value[LOST_KEY]} are missing in {path.name} ({value.get('why')})")
        elif missing := [name for name in numbers if not is_number(value.get(name))]:
            tell(problems, f"a line of {path.name} without a number {missing[0]} is skipped")
        else:
            yield value


def _lines(path: Path, *, from_end: bool) -> Iterator[bytes]:
    if from_end:
        yield from (line for _, line in lines_from_end(path))
    else:
        with path.open("rb") as file:
            yield from file


def parse(line: bytes) -> Any:
    """Parse JSON; return None if it is invalid."""
    try:
        return from_json(line, allow_inf_nan=False, cache_strings="keys")  # three times as fast as json
    except ValueError:
        return None


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a file with one JSON object; {} if it is absent or not readable."""
    try:
        value = parse(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        tell(problems, f"{path.name} cannot be read: {error.strerror}")
        return {}
    if not isinstance(value, dict):
        tell(problems, f"{path.name} is no JSON object")
        return {}
    return value


def read_metrics(run_dir: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each step in metrics.jsonl."""
    for line in read_jsonl(run_dir / METRICS_FILE, problems, "step"):
        yield {name: value for name, value in line.items() if is_number(value)}


def read_evaluations(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the complete lines of eval.jsonl."""
    path = run_dir / EVAL_FILE
    lines = read_jsonl(path, problems, "policy_version", "eval/version", "eval/seconds")
    of_samples = {"eval/length_mean", "eval/truncated_fraction"}
    return [line for line in lines if "eval/reward_mean" not in line or of_samples <= line.keys()]


def append_lines(path: Path, lines: Iterable[Any]) -> None:
    """Append JSON values; half a line of a killed process gets its line end first. Raises OSError."""
    torn = path.exists() and next(lines_from_end(path), (0, b"\n"))[1][-1:] != b"\n"
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" if torn else "")
        for line in lines:
            file.write(json.dumps(line, default=methodcaller("item")) + "\n")  # numpy's numbers


def tell(problems: list[str], problem: str) -> None:
    """Add a problem, unless there are many already."""
    if len(problems) < MAX_PROBLEMS:
        problems.append(problem)
    elif len(problems) == MAX_PROBLEMS:
        problems.append("there are more problems, which are not listed")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and no bool."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def boot_id() -> str:
    """Return the id of the running kernel; all containers of a machine share it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else ""
