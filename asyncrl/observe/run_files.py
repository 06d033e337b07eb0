"""Reads a run directory, live or afterwards, and believes nothing in it.

Files that grow with every step are read line by line: no more is held of a step than some numbers. A half-
written last line is a run in the middle of writing; any other bad line is a problem that is told. A run that
says "running" while no process holds its lock has crashed, and is called so where that can be seen: on its
own machine.
"""

from __future__ import annotations

import fcntl
import json
import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.observe.recorder import EVAL_FILE, LOST_KEY, METRICS_FILE, NOT_FINITE, STATUS_FILE, boot_id
from asyncrl.observe.run_numbers import Steps

CONFIG_FILE = "config.yaml"
LOCK_FILE = "run.lock"

State = Literal["starting", "running", "done", "failed", "interrupted", "crashed", "unknown"]

_QUIET_S = 30.0
_WORDS = (NOT_FINITE, "last_failure")
"""Values of a line that are no metrics."""
MAX_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run directory holds. `explanation`: the state in a sentence; `status`: status.json as it is;
    `steps`: what metrics.jsonl says of all steps, `one_step` of the one that was asked for; `evaluations`:
    lines of eval.jsonl; `problems`: sentences about what cannot be believed.
    """

    run_dir: Path
    config: RunConfig
    state: State
    explanation: str
    status: Mapping[str, Any]
    steps: Steps
    evaluations: tuple[Mapping[str, Any], ...]
    one_step: Mapping[str, Any] | None
    problems: tuple[str, ...]


def read_run(run_dir: str | Path, *, step: int | None = None) -> RunFiles:
    """Read a run directory, with all metrics of `step`; not trained.jsonl, which only inspect needs
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
    evaluations = tuple(read_evaluations(folder, problems))
    return RunFiles(folder, config, state, explanation, status, steps, evaluations, one_step, tuple(problems))


def _why_no_run(folder: Path) -> str | None:
    try:
        if (folder / CONFIG_FILE).is_file():
            return None
        if not folder.exists():
            return "is not there"
        return f"holds no {CONFIG_FILE}" if folder.is_dir() else "is no directory"
    except OSError as error:  # rights, above all
        return f"cannot be read ({error.strerror})"


def _read_status(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return {}
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


def read_steps(
    run_dir: Path, problems: list[str], step: int | None = None
) -> tuple[Steps, Mapping[str, Any] | None]:
    """What metrics.jsonl says of all steps, and all that it says of `step`; `problems` grows."""
    steps, wanted = Steps(), None
    for line in _metrics_of(run_dir / METRICS_FILE, problems, ("step",)):
        steps.add(line)
        if line["step"] == step:
            wanted = line
    return steps, wanted


def read_evaluations(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Lines of eval.jsonl that have what every evaluation has; `problems` grows."""
    lines = [*_metrics_of(run_dir / EVAL_FILE, problems, ("policy_version", "eval/version", "eval/seconds"))]
    lengths = {"eval/length_mean", "eval/truncated_fraction"}
    whole = [line for line in lines if "eval/reward_mean" not in line or lengths <= line.keys()]
    if len(whole) < len(lines):
        problems.append(f"{EVAL_FILE}: {len(lines) - len(whole)} evaluations without lengths are left out")
    return whole


def _metrics_of(path: Path, problems: list[str], needed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Lines that have the `needed` numbers. Metrics that are no numbers are left out, which is told."""
    needed_names = set(needed)
    for number, (_, line) in enumerate(lines_of(path, problems), start=1):
        try:
            if math.isfinite(sum(line.values())) and needed_names <= line.keys():  # nearly always
                yield line
                continue
        except (TypeError, OverflowError):
            pass
        if LOST_KEY in line:
            tell(problems, f"{_missing_steps(line)} in {path.name} ({line.get('why')})")
            continue
        wrong = [name for name, value in line.items() if name not in _WORDS and not _is_number(value)]
        if missing := [name for name in needed if name in wrong or name not in line]:
            names = ", ".join(missing)
            tell(problems, f"{path.name} object {number} is left out: {names} is no number in it")
            continue
        if wrong:
            tell(problems, f"{path.name} object {number}: {', '.join(wrong)} is no number and is left out")
        yield {name: value for name, value in line.items() if name not in wrong}


def lines_of(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where it begins, the object) of each line of a file, one at a time. What cannot be read at all is left
    out and told in `problems`.
    """
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                value = parse_line(line)
                if type(value) is dict:
                    yield start, value
                elif not line.endswith(b"\n"):
                    num = len(line.decode("utf-8", "replace"))
                    what = f"half a line ({num} characters), which is left out: it was being written"
                    tell(problems, f"{path.name} ends in {what}")
                else:
                    shown = line[:240].decode("utf-8", "replace").rstrip("\n")[:60]
                    tell(problems, f"{path.name} line {number} is no JSON object and is left out: {shown!r}")
                start += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        tell(problems, f"{path.name} cannot be read: {error.strerror}")


def parse_line(line: bytes) -> Any:
    """Its JSON value, None if it is none."""
    try:
        return from_json(line, cache_strings="keys")  # three times as fast as json, and stricter
    except ValueError:
        pass
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


def steps_are_missing(first: int, last: int) -> str:
    """In words."""
    return f"step {first} is missing" if first == last else f"steps {first}..{last} are missing"


def _missing_steps(line: Mapping[str, Any]) -> str:
    try:
        first, last = line[LOST_KEY]
        return steps_are_missing(int(first), int(last))
    except (TypeError, ValueError, OverflowError):
        return "steps are missing"


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
        why = (
            f"there is no readable {STATUS_FILE}; the run ended before it began, or another version wrote it."
        )
        return "unknown", why
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
    log, unseen = folder / "logs" / "controller.log", f"Whether that lives cannot be seen from {here}"
    if is_held is False and status.get("boot_id") == boot_id():
        return "crashed", f"{written}, but {process} is gone: the run was killed or crashed. Read {log}."
    if age_s <= _QUIET_S:
        return said, f"{written} by {process}. {unseen}."
    if host == here:
        return "crashed", f"{written} by {process}; {here} was started again since. Read {log}."
    return (
        "unknown",
        f"{written} by {process}, and nothing since. {unseen}: ask `asyncrl status {folder}` there.",
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
