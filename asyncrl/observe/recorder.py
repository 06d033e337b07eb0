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
from operator import methodcaller
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
        self.run_dir, self._has_tensorboard = Path(run_dir), tensorboard
        self._tensorboard: Any = None
        (self.run_dir / METRICS_FILE).touch()  # not opened yet: a resume that is refused changes nothing
        self._files: dict[str, Any] = {}
        self._owner = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id()}

    def keep_steps_below(self, step: int) -> Mapping[str, Any]:
        """Cut off the lines of steps from `step` on, which are about to be taken again, and what is no line
        of a step behind the others.

        Returns the line of the last step that stays, {} if there is none. If steps before `step` are missing,
        a line says which and why: {"lost": [first, last], "why": ...}.
        """
        self.close()
        path = self.run_dir / METRICS_FILE
        end, newest, last = path.stat().st_size, -1.0, dict[str, Any]()
        for start, text in lines_from_end(path):
            line, of_step = _line_of_step(text)
            if newest < 0 and (not line or of_step >= step):
                end = start
                continue
            newest = max(newest, of_step)
            if "step" in line:
                last = line
                break
        cut_at(path, end)
        if newest + 1 < step:
            self._append(METRICS_FILE, {LOST_KEY: [int(newest) + 1, step - 1], "why": LOST})
        return last

    def record_step(self, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one optimizer step; `step` must be among them."""
        assert "step" in metrics, f"metrics without 'step': {sorted(metrics)}"
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        left_out = [name for name in metrics if name not in finite]
        self._append(METRICS_FILE, {**finite, NOT_FINITE: left_out} if left_out else finite)
        scalars = {name: value for name, value in finite.items() if not name.startswith(EVAL_PREFIX)}
        self._add_scalars(scalars, metrics["step"])

    def record_evaluation(self, line: Mapping[str, Any]) -> None:
        """Append one evaluation; `policy_version` must be in it, and is the step of its eval/* scalars in
        TensorBoard.
        """
        self._append(EVAL_FILE, _finite(line))
        scalars = {name: value for name, value in line.items() if name.startswith(EVAL_PREFIX)}
        self._add_scalars(scalars, line["policy_version"])

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
        """Close the files; idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

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

    def _add_scalars(self, scalars: Mapping[str, float], step: float) -> None:
        """TensorBoard events, without torch."""
        if not self._has_tensorboard:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._tensorboard = self._tensorboard or EventFileWriter(
            str(self.run_dir / "tensorboard"), flush_secs=5
        )
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in scalars.items() if name != "step"
        ]
        self._tensorboard.add_event(
            Event(wall_time=time.time(), step=int(step), summary=Summary(value=values))
        )


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


PLOT_FILE = "reward.png"
MAX_POINTS = 2000
_RAW, _SMOOTH, _EVAL = "#9ecae1", "#08519c", "#d94801"


def write_reward_plot(
    run_dir: Path, steps: Steps, *, title: str, evaluations: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write RUN_DIR/reward.png over steps and over wall time: reward/mean, its running mean, and evaluations
    with their standard error, each where its version was published. Of very long runs a point is the mean of
    a stretch. At least one step must have a reward.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = (steps.column(name) for name in ("reward/mean", "step", "time_s"))
    shown = [row for row in zip(*columns, strict=True) if not math.isnan(row[0])]
    rewards, *axes = map(list, zip(*shown, strict=True))
    window = smoothing_window(len(rewards))
    smooth = thinned(running_mean(rewards, window=window), MAX_POINTS)
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    done = [line for line in evaluations if "eval/reward_mean" in line]
    means = [line["eval/reward_mean"] for line in done]
    errors = [line.get("eval/standard_error", 0.0) for line in done]
    published = (
        [line["policy_version"] for line in done],
        [line["time_s"] - line["eval/seconds"] for line in done],
    )
    labels = ("optimizer step", "wall time in s")
    for panel, label, places, across in zip(panels, labels, axes, published, strict=True):
        panel.plot(
            thinned(places, MAX_POINTS),
            thinned(rewards, MAX_POINTS),
            color=_RAW,
            linewidth=1,
            label="each step",
        )
        mean_label = f"mean of the last {window} steps"
        panel.plot(thinned(places, MAX_POINTS), smooth, color=_SMOOTH, linewidth=2, label=mean_label)
        if done:
            panel.errorbar(
                across, means, errors, fmt="o", markersize=4, capsize=2, color=_EVAL, label="eval/reward_mean"
            )
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward/mean")
    panels[0].legend(loc="lower right", frameon=False)
    figure.suptitle(title)
    figure.savefig(run_dir / PLOT_FILE)
    return run_dir / PLOT_FILE


def smoothing_window(num_steps: int) -> int:
    """Steps that the smoothed line averages: a twentieth of the run, 1 to 25."""
    return max(1, min(25, num_steps // 20))


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of the last `window` values at each place (of fewer at the start)."""
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]
