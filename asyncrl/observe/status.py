"""Read a run directory, live or ended, for `asyncrl status`, without any change to it. A run in state
"running" whose lock no process holds has crashed; only its own machine can see that.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.text import Text

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig, load_config
from asyncrl.observe.console import reward_text, shares_text, staleness_text, tasks_text
from asyncrl.observe.run_dir import (
    CONFIG_FILE,
    LOCK_FILE,
    STATUS_FILE,
    boot_id,
    is_number,
    read_evaluations,
    read_object,
)
from asyncrl.observe.run_numbers import (
    Steps,
    boxed,
    by_evaluation,
    duration,
    evaluation_text,
    plain,
    read_steps,
    seconds_left,
    sparkline,
    thinned,
)
from asyncrl.observe.verdict.verdict import Verdict, judge, time_panel, verdict_rows
from asyncrl.observe.watchdog import Wait

SHOWN_REWARDS = 1000
SHOWN_FLAGS = 2
"""Sentences about the run's health on the first screen."""
_QUIET_S = 30.0
_COLOURS = {"done": "green", "running": "blue", "starting": "blue", "interrupted": "yellow"}
_LEFT_OUT = ("state", "step", "num_steps", "pid", "host", "boot_id", "updated_s", "why")

State = Literal["starting", "running", "done", "failed", "interrupted", "crashed", "unknown"]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Contents of a run directory. `explanation`: the state in a sentence; `status`: status.json; `steps`:
    metrics.jsonl; `evaluations`: lines of eval.jsonl; `verdict`: None before the first step; `problems`:
    sentences about unreadable files.
    """

    run_dir: Path
    config: RunConfig
    state: State
    explanation: str
    status: Mapping[str, Any]
    steps: Steps
    evaluations: list[dict[str, Any]]
    verdict: Verdict | None
    problems: list[str]


def read_run(run_dir: str | Path) -> RunFiles:
    """Read a run directory without trained.jsonl. Raises ConfigError for another directory or an unreadable
    config.
    """
    folder, problems = Path(run_dir), list[str]()
    config, status = read_config(folder), read_status(folder, problems)
    steps, evaluations = read_steps(folder, problems), read_evaluations(folder, problems)
    verdict, state = judge(steps, config) if steps else None, judge_state(status, folder)
    return RunFiles(folder, config, *state, status, steps, evaluations, verdict, problems)


def read_config(folder: Path) -> RunConfig:
    """Read config.yaml of a run. Raises ConfigError for another directory or an unreadable config."""
    try:
        (folder / CONFIG_FILE).open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"{folder} is no run directory: its {CONFIG_FILE} cannot be read ({error.strerror})",
            way_out="give the directory that `asyncrl run` printed; by default runs/NAME-DATE-TIME.",
        ) from error
    return load_config(folder / CONFIG_FILE)


def read_status(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Read status.json; {} if it is absent or not readable."""
    value = read_object(folder / STATUS_FILE, problems)
    if not is_number(value.get("updated_s", 0.0)):
        problems.append(f"{STATUS_FILE} has no number updated_s")
        return {}
    return value


def judge_state(status: Mapping[str, Any], folder: Path) -> tuple[State, str]:
    """Return the state and a sentence about it, from status.json and the lock. `crashed` needs proof: on this
    machine, since its last start.
    """
    said = status.get("state")
    age_s = max(0.0, time.time() - float(status.get("updated_s", 0.0)))
    if said in ("done", "failed", "interrupted"):
        why = status.get("why")
        return said, f"{said} {duration(age_s)} ago" + (f": {why}" if why else "")
    if not status:
        return (
            "unknown",
            f"no {STATUS_FILE} can be read: whether the run was ever started is not known",
        )
    if said not in ("starting", "running"):
        return "unknown", f"{STATUS_FILE} says {said!r}, which is not a state of a run"
    here, is_held = socket.gethostname(), _is_held(folder / LOCK_FILE)
    host, is_quiet = status.get("host", here), age_s > _QUIET_S
    what = f"last sign of life {duration(age_s)} ago, process {status.get('pid')} on host {host}"
    if is_held:
        return said, what
    log = folder / "logs" / "controller.log"
    if host == here and (is_quiet or status.get("boot_id") == boot_id()) and is_held is False:
        return "crashed", f"{what}, which is gone: it was killed or crashed. Read {log}"
    state: State = "unknown" if is_quiet else said
    return state, f"{what}; whether it lives cannot be seen from {here}: run `asyncrl status {folder}` there"


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


def render_status(run_dir: str | Path, *, as_json: bool = False, is_verbose: bool = False) -> str:
    """Describe a run on one screen; `is_verbose`: with status.json and the shares of time. Raises
    ConfigError if `run_dir` is no run directory.
    """
    files = read_run(run_dir)
    if as_json:
        return json.dumps(status_summary(files), indent=2)
    return to_text(*_pages(files, is_verbose=is_verbose))


def status_summary(files: RunFiles) -> dict[str, Any]:
    """Return state, steps done, last metrics, verdict and status.json as plain values. `rewards`: of each
    step; of a very long run, means of several steps.
    """
    updated_s = files.status.get("updated_s")
    return {
        "run_dir": str(files.run_dir),
        "state": files.state,
        "explanation": files.explanation,
        "steps_done": len(files.steps),
        "num_steps": files.config.trainer.num_steps,
        "max_staleness": files.config.buffer.max_staleness,
        "seconds_since_update": None if updated_s is None else round(time.time() - float(updated_s), 1),
        "rewards": thinned(files.steps.values("reward/mean"), SHOWN_REWARDS),
        "last_metrics": dict(files.steps.last),
        "evaluations": files.evaluations,
        "status": dict(files.status),
        "verdict": files.verdict and asdict(files.verdict),
        "problems": files.problems,
    }


def to_text(*drawn: RenderableType) -> str:
    """Render for the width of the terminal; with colors on a terminal."""
    out = io.StringIO()
    width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns))
    Console(file=out, width=width, force_terminal=sys.stdout.isatty(), highlight=False).print(Group(*drawn))
    return out.getvalue().rstrip("\n")


def _pages(files: RunFiles, *, is_verbose: bool) -> Iterator[RenderableType]:
    """Show state and progress, then whether the run learns, its health and its speed."""
    steps, verdict, state = files.steps, files.verdict, (files.state, _COLOURS.get(files.state, "red"))
    rows: list[tuple[str, RenderableType]] = [
        ("state", Text.assemble(state, _after(files.state, files.explanation)))
    ]
    rows.append(("steps", _progress(files)))
    if files.state in ("starting", "running"):
        rows += _now(files.status)
    if verdict is not None:
        rows += [("reward", reward_text(steps))]
        rows += [("by task", of_tasks)] if (of_tasks := tasks_text(steps.last)) else []
        rows += verdict_rows(verdict if is_verbose else _in_short(verdict))
        rows.append(("time", shares_text(verdict.shares)))
        rows.append(("staleness", staleness_text(steps.last, files.config.buffer.max_staleness)))
    for lines in by_evaluation(files.evaluations).values():
        rewards = [line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line]
        rows.append(("eval", Text(f"{evaluation_text(lines[-1])}  {sparkline(rewards, width=16)}")))
    warnings = files.status.get("warnings")
    shown = warnings if isinstance(warnings, list) else []
    more = f" (and {len(shown) - 1} more, see --verbose)" if len(shown) > 1 else ""
    rows += [("warning", Text(f"{warning}{more}", style="yellow")) for warning in shown[:1]]
    rows += [("problem", Text(problem, style="red")) for problem in files.problems]
    yield boxed(rows, str(files.run_dir))
    if is_verbose:
        found = files.status.items()
        rest = [(n, Text(_said(n, value))) for n, value in found if n not in _LEFT_OUT and value is not None]
        yield from [boxed(rest, STATUS_FILE)] if rest else []
        yield from [] if verdict is None else [time_panel(verdict)]


def _now(status: Mapping[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    """Show the present activity, and the oldest wait if it is long."""
    if activity := status.get("activity"):
        yield "now", Text(str(activity))
    with contextlib.suppress(TypeError, ValueError):
        waits = [Wait(**entry) for entry in status.get("waits") or ()]
        oldest = max(waits, key=lambda wait: wait.seconds, default=None)
        if oldest is not None and oldest.seconds >= _QUIET_S:
            yield "waits", Text(str(oldest), style="yellow")


def _in_short(verdict: Verdict) -> Verdict:
    """Shorten the verdict: no details of the learning, only the most serious faults."""
    flags = verdict.health
    more = (f"And {len(flags) - SHOWN_FLAGS} more, see --verbose.",) if len(flags) > SHOWN_FLAGS else ()
    return replace(verdict, learning=(), health=flags[:SHOWN_FLAGS] + more)


def _after(state: str, explanation: str) -> str:
    """Cut the state off an explanation that begins with it."""
    return explanation.removeprefix(state) if explanation.startswith(state) else f": {explanation}"


def _progress(files: RunFiles) -> str:
    """Show steps, time, and the time left of a run in progress."""
    num, num_steps = len(files.steps), files.config.trainer.num_steps
    words = f"{num} of {num_steps}"
    if files.verdict is not None:
        words += f" in {duration(files.verdict.wall_s)}"
        words += f", {files.verdict.wall_s / num:.2f} s each"
    if files.state == "running" and (left_s := seconds_left(files.steps, num_steps)):
        words += f", {duration(left_s)} left"
    return words


def _said(name: str, value: Any) -> str:
    """Write waits as sentences and rollouts with their ages; other values plainly."""
    with contextlib.suppress(TypeError, ValueError):
        if name == "waits":
            return "\n".join(str(Wait(**entry)) for entry in value) or "none"
        if name == "oldest_rollouts":
            return "\n".join(f"{rollout}, {age_s:.1f} s" for rollout, age_s in value) or "none"
    return plain(value)
