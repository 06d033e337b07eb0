"""Reads a run directory, live or afterwards, and believes nothing in it. Knows the files; knows no rooms.

Files that grow with every step are read line by line: no more is held of a step than some numbers.

A half-written last line is a run in the middle of writing; any other bad line is a problem that is told. A
run that says "running" while nobody holds its lock has crashed, and is called so where that can be seen: on
its own machine.
"""

from __future__ import annotations

import fcntl
import json
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic_core import SchemaValidator, core_schema, from_json

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.observe.recorder import EVAL_FILE, LOST_KEY, METRICS_FILE, NOT_FINITE, STATUS_FILE, boot_id
from asyncrl.observe.run_numbers import COLUMNS, Steps

CONFIG_FILE = "config.yaml"
TRAINED_FILE = "trained.jsonl"
LOCK_FILE = "run.lock"

Parser = Callable[[bytes], Any]
State = Literal["starting", "running", "done", "failed", "interrupted", "crashed", "unknown"]

_QUIET_S = 30.0
_WORDS = (NOT_FINITE, "last_failure")
"""Values of a line that are no metrics."""
_FINITE = core_schema.float_schema(strict=True, allow_inf_nan=False)
_COLUMNS_OF = SchemaValidator(
    core_schema.typed_dict_schema(
        {name: core_schema.typed_dict_field(_FINITE, required=name == "step") for name in COLUMNS}
    )
)
"""Of a line of metrics.jsonl: the metrics that are asked of all steps. Refuses what is none."""
MAX_PROBLEMS = 100


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
    steps: Steps
    """What metrics.jsonl says of all steps."""
    problems: tuple[str, ...]
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Lines of eval.jsonl, as they are."""
    one_step: Mapping[str, Any] | None = None
    """The metrics of the step that was asked for."""


def read_run(run_dir: str | Path, *, step: int | None = None) -> RunFiles:
    """Read a run directory, with all metrics of `step`; trained.jsonl is read by those who need it
    (trained.py).

    Raises ConfigError if it is none, or if it or its config cannot be read.
    """
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
    steps, one_step = read_steps(folder, problems, step)
    return RunFiles(
        run_dir=folder,
        config=config,
        state=state,
        explanation=explanation,
        status=status,
        steps=steps,
        evaluations=tuple(read_evaluations(folder, problems)),
        problems=tuple(problems),
        one_step=one_step,
    )


def _why_no_run(folder: Path) -> str | None:
    try:
        if (folder / CONFIG_FILE).is_file():
            return None
        return (
            "is not there"
            if not folder.exists()
            else "is no directory"
            if not folder.is_dir()
            else f"holds no {CONFIG_FILE}"
        )
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


def read_steps(
    run_dir: Path, problems: list[str], step: int | None = None
) -> tuple[Steps, Mapping[str, Any] | None]:
    """What metrics.jsonl says of all steps, and all that it says of `step`. What cannot be believed is told
    in `problems`.
    """
    path, steps = run_dir / METRICS_FILE, Steps()
    newest = wanted = None
    for start, line in _metrics_of(path, problems, ("step",), quick=_COLUMNS_OF.validate_json):
        steps.add(line)
        newest = start
        if line["step"] == step:
            wanted = start
    if newest is not None:
        steps.last = _whole_line(path, newest)
    return steps, None if wanted is None else _whole_line(path, wanted)


def _whole_line(path: Path, start: int) -> dict[str, Any]:
    """All metrics of the line that begins there."""
    with path.open("rb") as file:
        file.seek(start)
        return {
            name: value
            for name, value in parse_line(file.readline()).items()
            if name == NOT_FINITE or _is_number(value)
        }


def lines_of(
    path: Path, problems: list[str], quick: Parser | None = None
) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """(where it begins, the object, whether `quick` took it) of each line of a file, one at a time.

    `quick` may raise ValueError of a good line: from_json, the default, is three times as fast as json, and
    stricter. What cannot be read at all is left out and told in `problems`.
    """
    start, take = 0, quick or _parse
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    value, is_quick = take(line), True
                except ValueError:
                    value, is_quick = parse_line(line), False
                if type(value) is dict:
                    yield start, value, is_quick
                elif not line.endswith(b"\n"):
                    num = len(line.decode("utf-8", "replace"))
                    tell(
                        problems,
                        f"{path.name} ends in half a line ({num} characters), which is left out: it was "
                        f"being written",
                    )
                else:
                    shown = line[:240].decode("utf-8", "replace").rstrip("\n")[:60]
                    tell(problems, f"{path.name} line {number} is no JSON object and is left out: {shown!r}")
                start += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        tell(problems, f"{path.name} cannot be read: {error.strerror}")


def _parse(line: bytes) -> Any:
    return from_json(
        line, cache_strings=False
    )  # to look each string up costs more than to make it: no line is kept


def parse_line(line: bytes) -> Any:
    """Its JSON value, None if it is none."""
    try:
        return json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def tell(problems: list[str], problem: str) -> None:
    """Add a problem, unless there are many already."""
    if len(problems) < MAX_PROBLEMS:
        problems.append(problem)
    elif len(problems) == MAX_PROBLEMS:
        problems.append("there are more problems, which are not listed")


def read_evaluations(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Lines of eval.jsonl that have what every evaluation has; what is no number in them is left out and told
    in `problems`.
    """
    lines = [
        line
        for _, line in _metrics_of(
            run_dir / EVAL_FILE, problems, ("policy_version", "eval/version", "eval/seconds")
        )
    ]
    whole = [
        line
        for line in lines
        if "eval/reward_mean" not in line or {"eval/length_mean", "eval/truncated_fraction"} <= line.keys()
    ]
    if len(whole) < len(lines):
        problems.append(f"{EVAL_FILE}: {len(lines) - len(whole)} evaluations without lengths are left out")
    return whole


def _metrics_of(
    path: Path, problems: list[str], needed: Sequence[str], quick: Parser | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines that have the `needed` numbers. Metrics that are none are left out, as whole lines are, and told
    in `problems`.

    `quick` takes lines alone of which nothing is to be told, with the numbers that are needed.
    """
    for number, (start, line, is_quick) in enumerate(lines_of(path, problems, quick), start=1):
        if is_quick and quick is not None:
            yield start, line
            continue
        if LOST_KEY in line:
            tell(problems, f"{missing_steps(line)} in {path.name} ({line.get('why')})")
            continue
        wrong = [name for name, value in line.items() if name not in _WORDS and not _is_number(value)]
        if missing := [name for name in needed if name in wrong or name not in line]:
            tell(
                problems, f"{path.name} object {number} is left out: {', '.join(missing)} is no number in it"
            )
            continue
        if wrong:
            tell(problems, f"{path.name} object {number}: {', '.join(wrong)} is no number and is left out")
        yield start, {name: value for name, value in line.items() if name not in wrong}


def missing_steps(line: Mapping[str, Any]) -> str:
    """Of a line that says which were lost, in words."""
    try:
        first, last = line[LOST_KEY]
        return steps_are_missing(int(first), int(last))
    except (TypeError, ValueError, OverflowError):
        return "steps are missing"


def steps_are_missing(first: int, last: int) -> str:
    """In words."""
    return f"step {first} is missing" if first == last else f"steps {first}..{last} are missing"


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def judge_state(status: Mapping[str, Any], folder: Path) -> tuple[State, str]:
    """What the run does, and a sentence about it, from status.json and from whether its lock is held."""
    if not status:
        return (
            "unknown",
            f"there is no readable {STATUS_FILE}; the run ended before it began, or another version wrote "
            f"it.",
        )
    said = status.get("state")
    age_s = max(0.0, time.time() - float(status.get("updated_s", 0.0)))
    if said in ("starting", "running"):
        return _judge_going(said, status, age_s, folder)
    if said in ("done", "failed", "interrupted"):
        reason = f": {status['why']}" if status.get("why") else "."
        return said, f"{said} {age_s:.0f} s ago{reason}"
    return "unknown", f"status.json says {said!r}, which is no state of a run."


def _judge_going(
    said: Literal["starting", "running"], status: Mapping[str, Any], age_s: float, folder: Path
) -> tuple[State, str]:
    """Crashed is only what can be seen from here to have ended: on this machine, since it was started."""
    here, is_held = socket.gethostname(), _is_held(folder / LOCK_FILE)
    host = status.get("host", here)
    process = f"process {status.get('pid')}" + ("" if host == here else f" on host {host}")
    if is_held:
        quiet = f", but it has written nothing for {age_s:.0f} s" if age_s > _QUIET_S else ""
        return said, f"{process} is {said}{quiet}."
    written = f"status.json, written {age_s:.0f} s ago, says {said}"
    if is_held is False and status.get("boot_id") == boot_id():
        return "crashed", (
            f"{written}, but {process} is gone: the run was killed or crashed. Read "
            f"{folder / 'logs' / 'controller.log'}."
        )
    if age_s <= _QUIET_S:
        return said, f"{written} by {process}. Whether that lives cannot be seen from {here}."
    if host == here:
        return (
            "crashed",
            f"{written} by {process}; {here} was started again since. Read "
            f"{folder / 'logs' / 'controller.log'}.",
        )
    return "unknown", (
        f"{written} by {process}, and nothing since. Whether that lives cannot be seen from {here}: ask "
        f"`asyncrl status {folder}` there."
    )


def _is_held(path: Path) -> bool | None:
    """Whether a process writes into the run directory; None if that cannot be seen. Over NFS other machines'
    locks are seen too.
    """
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
