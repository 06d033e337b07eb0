"""Reads a run directory, of a live or an ended run, and checks everything in it.

Files that grow with every step are read line by line: no more is held of a step than some numbers. What
cannot be read is left out and reported. A run that says "running" while no process holds its lock has
crashed, and is called so where that can be seen: on its own machine.
"""

from __future__ import annotations

import fcntl
import json
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
    (trained.py). Raises ConfigError if it is none, or if it or its config cannot be read.
    """
    folder = Path(run_dir)
    try:
        (folder / CONFIG_FILE).open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"{folder} is no run directory: its {CONFIG_FILE} cannot be read ({error.strerror})",
            way_out="give the directory that `asyncrl run` printed; by default runs/NAME-DATE-TIME.",
        ) from error
    config = load_config(folder / CONFIG_FILE)
    problems: list[str] = []
    status = _read_status(folder / STATUS_FILE, problems)
    state, explanation = judge_state(status, folder)
    steps, one_step = read_steps(folder, problems, step)
    evaluations = tuple(read_evaluations(folder, problems))
    return RunFiles(folder, config, state, explanation, status, steps, evaluations, one_step, tuple(problems))


def _read_status(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}")
        return {}
    if not isinstance(value, dict) or not _is_number(value.get("updated_s", 0.0)):
        problems.append(f"{path.name} is no JSON object with a number updated_s")
        return {}
    return value


def read_steps(
    run_dir: Path, problems: list[str], step: int | None = None
) -> tuple[Steps, Mapping[str, Any] | None]:
    """What metrics.jsonl says of all steps, and all that it says of `step`; `problems` grows."""
    steps, wanted = Steps(), None
    for line in _metrics_of(run_dir / METRICS_FILE, problems, ("step",)):
        steps.add(line)
        wanted = line if line["step"] == step else wanted
    return steps, wanted


def read_evaluations(run_dir: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Lines of eval.jsonl that have what every evaluation has; `problems` grows."""
    needed = ("policy_version", "eval/version", "eval/seconds")
    lengths = {"eval/length_mean", "eval/truncated_fraction"}
    lines = _metrics_of(run_dir / EVAL_FILE, problems, needed)
    return [line for line in lines if "eval/reward_mean" not in line or lengths <= line.keys()]


def _metrics_of(path: Path, problems: list[str], needed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Lines that have the `needed` numbers. Metrics that are not numbers are left out and reported."""
    for number, (_, line) in enumerate(lines_of(path, problems), start=1):
        if LOST_KEY in line:
            tell(problems, f"steps {line[LOST_KEY]} are missing in {path.name} ({line.get('why')})")
            continue
        kept = {name: value for name, value in line.items() if name in _WORDS or _is_number(value)}
        if missing := [name for name in needed if name not in kept]:
            tell(problems, f"{path.name} object {number} is left out: {missing[0]} is no number in it")
            continue
        if wrong := [name for name in line if name not in kept]:
            tell(problems, f"{path.name} object {number}: {', '.join(wrong)} is no number and is left out")
        yield kept


def lines_of(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where it begins, the object) of each line of a file, one at a time. What cannot be read at all is left
    out and told in `problems`.
    """
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                value = parse_line(line)
                if isinstance(value, dict):
                    yield start, value
                elif not line.endswith(b"\n"):
                    tell(
                        problems, f"{path.name} ends in half a line, which is left out: it was being written"
                    )
                else:
                    tell(
                        problems,
                        f"{path.name} line {number} is no JSON object and is left out: {line[:60]!r}",
                    )
                start += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        tell(problems, f"{path.name} cannot be read: {error.strerror}")


def parse_line(line: bytes) -> Any:
    """Its JSON value, None if it is none."""
    try:
        return from_json(line, cache_strings="keys")  # three times as fast as json
    except ValueError:
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


def _is_number(value: Any) -> bool:
    """No bool, NaN or infinity, and no integer of hundreds of digits."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def judge_state(status: Mapping[str, Any], folder: Path) -> tuple[State, str]:
    """What the run does, and a sentence about it, from status.json and from whether its lock is held.

    Crashed is only what can be seen from here to have ended: on this machine, since it was started.
    """
    said = status.get("state")
    age_s = max(0.0, time.time() - float(status.get("updated_s", 0.0)))
    if said in ("done", "failed", "interrupted"):
        return said, f"{said} {age_s:.0f} s ago: {status.get('why') or 'no reason is given'}"
    if said not in ("starting", "running"):
        return "unknown", f"{STATUS_FILE} says {said!r}, which is no state of a run."
    here, is_held = socket.gethostname(), _is_held(folder / LOCK_FILE)
    host, is_quiet = status.get("host", here), age_s > _QUIET_S
    what = f"{said}, as process {status.get('pid')} on host {host} wrote {age_s:.0f} s ago"
    if is_held:
        return said, f"{what}{'; it has written nothing since' if is_quiet else ''}."
    log = folder / "logs" / "controller.log"
    if host == here and (is_quiet or status.get("boot_id") == boot_id()) and is_held is False:
        return "crashed", f"{what}, but it is gone: the run was killed or crashed. Read {log}."
    state: State = "unknown" if is_quiet else said
    return state, f"{what}; whether it lives cannot be seen from {here}: ask `asyncrl status {folder}` there."


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
