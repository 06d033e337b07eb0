"""Writes what a run reports into its directory: metrics.jsonl, eval.jsonl, status.json, TensorBoard,
reward.png. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.files import LOST, cut_at, lines_from_end
from asyncrl.observe.run_numbers import Steps, thinned

METRICS_FILE = "metrics.jsonl"
STATUS_FILE = "status.json"
EVAL_FILE = "eval.jsonl"
EVAL_PREFIX = "eval/"
LOST_KEY = "lost"
"""Key of a metrics line that is of no step: [first, last] of steps whose lines are missing, with `why`."""
NOT_FINITE = "not_finite"
"""Key of a metrics line that lists the metrics left out of it because they were NaN or infinite."""


class Recorder:
    """The files of one run that grow with it. Life: open from the first call until close(); used from one
    thread.

    metrics.jsonl   one JSON object a step, flushed; NaN and infinity are left out, named under `not_finite`
    eval.jsonl      one JSON object an evaluation; made with the first one
    status.json     what the run does at this moment, replaced as a whole: a reader never sees half of it
    tensorboard/    the same metrics as scalars over the step
    """

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True) -> None:
        self.run_dir = Path(run_dir)
        self._tensorboard = TensorBoardWriter(self.run_dir / "tensorboard") if tensorboard else None
        (self.run_dir / METRICS_FILE).touch()  # not opened yet: a resume that is refused changes nothing
        self._file: Any = None
        self._eval_file: Any = None
        self._owner = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id()}

    def keep_steps_below(self, step: int) -> Mapping[str, Any]:
        """Cut off the lines of steps from `step` on, which are about to be taken again, and what is no line
        of a step behind the others.

        Returns the line of the last step that stays, {} if there is none. If steps before `step` are missing,
        a line says which and why: {"lost": [first, last], "why": ...}.
        """
        path = self.run_dir / METRICS_FILE
        if self._file is not None:
            self._file.close()
        end, newest, last = path.stat().st_size, None, dict[str, Any]()
        for start, text in lines_from_end(path):
            line = _line_of_step(text)
            if newest is None:
                if not line or _newest_step(line) >= step:
                    end = start
                    continue
                newest = _newest_step(line)
            if "step" in line:
                last = line
                break
        cut_at(path, end)
        self._file = _open_for_lines(path)
        if (first := 0 if newest is None else int(newest) + 1) < step:
            self._file.write(json.dumps({LOST_KEY: [first, step - 1], "why": LOST}) + "\n")
            self._file.flush()
        return last

    def record_step(self, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one optimizer step; `step` must be among them. Raises ValueError if it is
        not.
        """
        if "step" not in metrics:
            raise ValueError(f"metrics without 'step': {sorted(metrics)}")
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        line: dict[str, Any] = dict(finite)
        if left_out := [name for name in metrics if name not in finite]:
            line[NOT_FINITE] = left_out
        if self._file is None:
            self._file = _open_for_lines(self.run_dir / METRICS_FILE)
        self._file.write(json.dumps(line, default=lambda number: number.item()) + "\n")  # numpy's
        self._file.flush()
        if self._tensorboard is not None:
            scalars = {name: value for name, value in finite.items() if not name.startswith(EVAL_PREFIX)}
            self._tensorboard.add(scalars)

    def record_evaluation(self, line: Mapping[str, Any]) -> None:
        """Append one evaluation; `policy_version` must be in it, and is the step of its eval/* scalars in
        TensorBoard.
        """
        if self._eval_file is None:
            self._eval_file = _open_for_lines(self.run_dir / EVAL_FILE)
        self._eval_file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        self._eval_file.flush()
        if self._tensorboard is not None:
            scalars = {name: value for name, value in line.items() if name.startswith(EVAL_PREFIX)}
            self._tensorboard.add(scalars | {"step": line["policy_version"]})

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
        os.replace(temporary, path)  # noqa: PTH105  the atomic one, by its known name

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in (self._file, self._eval_file):
            if file is not None:
                file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None


class TensorBoardWriter:
    """Scalars as TensorBoard events, without torch. Opens nothing before the first step."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._writer: Any = None

    def add(self, metrics: Mapping[str, float]) -> None:
        """Write the scalars of one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._log_dir), flush_secs=5)
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if name != "step"
        ]
        self._writer.add_event(
            Event(wall_time=time.time(), step=int(metrics["step"]), summary=Summary(value=values))
        )

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def boot_id() -> str:
    """Names the kernel that runs, from one start of the machine to the next; empty where it has no name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _open_for_lines(path: Path) -> Any:
    """Open for appending. A half line of a process that was killed gets its line end first."""
    _, last = next(lines_from_end(path), (0, b"")) if path.exists() else (0, b"")
    file = path.open("a", encoding="utf-8")
    if last and not last.endswith(b"\n"):
        file.write("\n")
    return file


def _line_of_step(text: bytes) -> dict[str, Any]:
    """{} for what is no line of a step, nor of steps that were lost."""
    try:
        line = json.loads(text)
        _newest_step(line)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}
    return dict(line)


def _newest_step(line: Mapping[str, Any]) -> float:
    return float(line[LOST_KEY][1] if LOST_KEY in line else line["step"])


def _finite(value: Any) -> Any:
    """The same status with null where JSON has no number for it."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


PLOT_FILE = "reward.png"
MAX_POINTS = 2000

_RAW, _SMOOTH, _EVAL = "#9ecae1", "#08519c", "#d94801"


def write_reward_plot(
    run_dir: Path, steps: Steps, *, title: str, evaluations: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write RUN_DIR/reward.png over steps and over wall time: reward/mean, its running mean, and evaluations
    with their standard error, each where its version was published. Of very long runs a point is the mean of
    a stretch.

    Returns the path. Raises ValueError if no step has a reward.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = (steps.column(name) for name in ("reward/mean", "step", "time_s"))
    shown = [row for row in zip(*columns, strict=True) if not math.isnan(row[0])]
    if not shown:
        raise ValueError(f"no step with reward/mean among {len(steps)} steps")
    rewards, *axes = map(list, zip(*shown, strict=True))
    window = smoothing_window(len(rewards))
    smooth = thinned(running_mean(rewards, window=window), MAX_POINTS)
    rewards = thinned(rewards, MAX_POINTS)
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    labels = ("optimizer step", "wall time in s")
    for panel, axis, label, places in zip(panels, ("step", "time_s"), labels, axes, strict=True):
        across = thinned(places, MAX_POINTS)
        panel.plot(across, rewards, color=_RAW, linewidth=1, label="each step")
        panel.plot(across, smooth, color=_SMOOTH, linewidth=2, label=f"mean of the last {window} steps")
        _draw_evaluations(panel, axis, evaluations)
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward/mean")
    panels[0].legend(loc="lower right", frameon=False)
    figure.suptitle(title)
    path = run_dir / PLOT_FILE
    figure.savefig(path)
    return path


def _draw_evaluations(panel: Any, axis: str, evaluations: Sequence[Mapping[str, Any]]) -> None:
    shown = [line for line in evaluations if "eval/reward_mean" in line]
    if not shown:
        return
    across = [
        line["policy_version"] if axis == "step" else line["time_s"] - line["eval/seconds"] for line in shown
    ]
    means = [line["eval/reward_mean"] for line in shown]
    errors = [line.get("eval/standard_error", 0.0) for line in shown]
    panel.errorbar(
        across, means, yerr=errors, fmt="o", markersize=4, capsize=2, color=_EVAL, label="eval/reward_mean"
    )


def smoothing_window(num_steps: int) -> int:
    """Steps that the smoothed line averages: a twentieth of the run, 1 to 25."""
    return max(1, min(25, num_steps // 20))


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of the last `window` values at each place (of fewer at the start)."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means
