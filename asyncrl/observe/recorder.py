"""The files in which a run reports: metrics.jsonl, eval.jsonl and status.json are written, and lines are read
again; trackers are told the same. Imports no torch.

Files that grow with every step are read line by line: no more is held of a step than some numbers. What
cannot be read is left out and reported.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import from_json

from asyncrl.files import LOST, cut_at, lines_from_end
from asyncrl.observe.metrics import is_total
from asyncrl.observe.run_numbers import Steps

if TYPE_CHECKING:
    from asyncrl.observe.trackers.background import Background

T = TypeVar("T")
METRICS_FILE = "metrics.jsonl"
STATUS_FILE = "status.json"
EVAL_FILE = "eval.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVAL_PREFIX = "eval/"
LOST_KEY = "lost"
"""Key of a metrics line that is of no step: [first, last] of steps whose lines are missing, with `why`."""
NOT_FINITE = "not_finite"
"""Key of a metrics line that lists the metrics left out of it because they were NaN or infinite."""
_WORDS = (NOT_FINITE, "last_failure", "name")
"""Values of a line that are no metrics."""
MAX_PROBLEMS = 100


class Recorder:
    """The files of one run that grow with it. Life: open from the first call until close(); used from one
    thread.

    metrics.jsonl   one JSON object a step, flushed; NaN and infinity are left out, named under `not_finite`
    eval.jsonl      one JSON object an evaluation; made with the first one
    status.json     what the run does at this moment, replaced as a whole: a reader never sees half of it
    """

    def __init__(self, run_dir: str | Path, trackers: Background | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.trackers = trackers
        (self.run_dir / METRICS_FILE).touch()  # not opened yet: a resume that is refused changes nothing
        self._files: dict[str, Any] = {}
        self._owner = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id()}

    def keep_steps(self, num_steps: int) -> Mapping[str, Any]:
        """Cut off the lines of steps after `num_steps`, which are about to be taken again, and text after the
        last line of a step.

        Returns the line of the last step that stays, {} if there is none. If a step up to `num_steps` is
        missing at the end, a line says which and why: {"lost": [first, last], "why": ...}.
        """
        self.close()
        path = self.run_dir / METRICS_FILE
        end, newest, last = path.stat().st_size, 0.0, dict[str, Any]()
        for start, text in lines_from_end(path):
            line, of_step = _line_of_step(text)
            if newest == 0 and (not line or of_step > num_steps):
                end = start
                continue
            newest = max(newest, of_step)
            if "step" in line:
                last = line
                break
        cut_at(path, end)
        if newest < num_steps:
            self._append(METRICS_FILE, {LOST_KEY: [int(newest) + 1, num_steps], "why": LOST})
        return last

    def record_step(self, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one optimizer step; `step` must be among them."""
        assert "step" in metrics, f"metrics without 'step': {sorted(metrics)}"
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        left_out = [name for name in metrics if name not in finite]
        self._append(METRICS_FILE, {**finite, NOT_FINITE: left_out} if left_out else finite)
        scalars = {n: float(v) for n, v in finite.items() if n != "step" and not n.startswith(EVAL_PREFIX)}
        if self.trackers is not None:
            self.trackers.tell("step", int(metrics["step"]), scalars)

    def record_evaluation(self, line: Mapping[str, Any]) -> None:
        """Append one evaluation; `policy_version` must be in it, and `name` where there are several."""
        self._append(EVAL_FILE, _finite(line))
        if self.trackers is not None:
            self.trackers.tell("evaluation", line["policy_version"], evaluation_metrics(line))

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json. `status["state"]` is starting, running, done, failed or interrupted, and `why`
        says why; the rest is free.

        Adds the process (pid, host, and boot_id of its kernel, which all containers of a machine share) and
        `updated_s` (seconds since the epoch).
        """
        body = {**status, **self._owner, "updated_s": time.time()}
        path = self.run_dir / STATUS_FILE
        temporary = path.with_name(f".{STATUS_FILE}.new")
        temporary.write_text(json.dumps(_finite(body), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)

    def close(self) -> None:
        """Close the files; idempotent. An error here repeats the error of the write before."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        """A half line of a process that was killed gets its line end first."""
        path = self.run_dir / name
        if name not in self._files:
            _, last = next(lines_from_end(path), (0, b"")) if path.exists() else (0, b"")
            self._files[name] = path.open("a", encoding="utf-8")
            if last and not last.endswith(b"\n"):
                self._files[name].write("\n")
        self._files[name].write(json.dumps(line, default=methodcaller("item")) + "\n")  # numpy's numbers
        self._files[name].flush()


def boot_id() -> str:
    """Names the kernel that runs, from one start of the machine to the next; empty where it has no name."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def _line_of_step(text: bytes) -> tuple[dict[str, Any], float]:
    """A line of a step, or of steps that were lost, and the newest of them; ({}, -1) for what is neither."""
    try:
        line = json.loads(text)
        return line, float(line[LOST_KEY][1] if LOST_KEY in line else line["step"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}, -1.0


def _finite(value: Any) -> Any:
    """The same status with null where JSON has no number for it."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_steps(run_dir: Path, problems: list[str]) -> Steps:
    """What metrics.jsonl says of all steps; `problems` grows."""
    return Steps(metrics_of(run_dir / METRICS_FILE, problems, "step"))


def read_evaluations(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Lines of eval.jsonl that have what every evaluation has; `problems` grows."""
    of_samples = {"eval/length_mean", "eval/truncated_fraction"}
    lines = metrics_of(run_dir / EVAL_FILE, problems, "policy_version", "eval/version", "eval/seconds")
    return [line for line in lines if "eval/reward_mean" not in line or of_samples <= line.keys()]


@dataclass(slots=True)
class Position:
    """How far a file that grows has been read: bytes and lines, and the last bytes before it."""

    num_bytes: int = 0
    num_lines: int = 0
    before: bytes = b""

    def is_in(self, path: Path) -> bool:
        """Whether what was read is still there: the file was not cut off, or replaced."""
        try:
            with path.open("rb") as file:
                file.seek(self.num_bytes - len(self.before))
                return file.read(len(self.before)) == self.before
        except OSError:
            return False


def evaluation_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation, by their names in metrics.jsonl: eval/NAME/... where there are several;
    totals are of all together.
    """
    found = {name: float(value) for name, value in line.items() if name.startswith(EVAL_PREFIX)}
    if not line.get("name"):
        return found
    own = f"{EVAL_PREFIX}{line['name']}/"
    return {n if is_total(n) else own + n.removeprefix(EVAL_PREFIX): value for n, value in found.items()}


def metrics_of(
    path: Path, problems: list[str], *needed: str, at: Position | None = None
) -> Iterator[dict[str, Any]]:
    """Lines that have the `needed` numbers; with `at` those after it. Metrics that are not numbers are left
    out and reported.
    """
    first = 1 + (at.num_lines if at else 0)
    for number, (_, line) in enumerate(lines_of(path, problems, parse_line, at), start=first):
        if LOST_KEY in line:
            tell(problems, f"steps {line[LOST_KEY]} are missing in {path.name} ({line.get('why')})")
            continue
        kept = line if _are_numbers(line.values()) else _numbers_of(line)
        if missing := [name for name in needed if name not in kept]:
            tell(problems, f"{path.name} object {number} is left out: {missing[0]} is no number in it")
            continue
        if kept is not line and (wrong := [name for name in line if name not in kept]):
            tell(problems, f"{path.name} object {number}: {', '.join(wrong)} is no number and is left out")
        yield kept


def _are_numbers(values: Collection[Any]) -> bool:
    """In C, for a file of a million lines."""
    try:
        return set(map(type, values)) <= {int, float} and math.isfinite(sum(values))
    except (ValueError, OverflowError):  # an integer of hundreds of digits
        return False


def _numbers_of(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name in _WORDS or is_number(value)}


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object that it is, None if it is none."""
    try:
        value = from_json(line, cache_strings="keys")  # three times as fast as json
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def lines_of(
    path: Path, problems: list[str], parse: Callable[[bytes], T | None], at: Position | None = None
) -> Iterator[tuple[int, T]]:
    """(where it begins, the object) of each line of a file, one at a time. What cannot be read at all is left
    out and told in `problems`. With `at`: of the lines after it, but for half a line, which is still being
    written; `at` goes on with them.
    """
    grows, at = at is not None, at or Position()
    with reading(path, problems), path.open("rb") as file:
        file.seek(at.num_bytes)
        for line in file:
            if not line.endswith(b"\n") and grows:
                return
            start = at.num_bytes
            at.num_bytes, at.num_lines, at.before = start + len(line), at.num_lines + 1, line[-64:]
            if (value := parse(line)) is not None:
                yield start, value
            elif line.endswith(b"\n"):
                what = f"line {at.num_lines} is no JSON object and is left out: {line[:60]!r}"
                tell(problems, f"{path.name} {what}")
            else:
                tell(problems, f"{path.name} ends in half a line, which is left out")


@contextlib.contextmanager
def reading(path: Path, problems: list[str]) -> Iterator[None]:
    """Read the file in here: one that is not there has nothing, and one that cannot be read is told."""
    try:
        yield
    except FileNotFoundError:
        return
    except OSError as error:
        tell(problems, f"{path.name} cannot be read: {error.strerror}")


def tell(problems: list[str], problem: str) -> None:
    """Add a problem, unless there are many already."""
    if len(problems) < MAX_PROBLEMS:
        problems.append(problem)
    elif len(problems) == MAX_PROBLEMS:
        problems.append("there are more problems, which are not listed")


def is_number(value: Any) -> bool:
    """No bool, NaN or infinity, and no integer of hundreds of digits."""
    return type(value) in (int, float) and -1e300 < value < 1e300
