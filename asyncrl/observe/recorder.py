"""Writes what a run reports into its directory: metrics.jsonl, status.json, TensorBoard. Knows no rooms; imports no torch."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

METRICS_FILE = "metrics.jsonl"
STATUS_FILE = "status.json"
EVAL_FILE = "eval.jsonl"
EVAL_PREFIX = "eval/"
NOT_FINITE = "not_finite"
"""Key of a metrics line that lists the metrics left out of it because they were NaN or infinite."""


class Recorder:
    """The files of one run that grow with it. Life: open from the first call until close(); used from one thread.

    metrics.jsonl   one JSON object a step, flushed; NaN and infinity are left out and named under `not_finite`
    eval.jsonl      one JSON object an evaluation; made with the first one
    status.json     what the run does at this moment, replaced as a whole, so that a reader never sees half of it
    tensorboard/    the same metrics as scalars over the step
    """

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True) -> None:
        self.run_dir = Path(run_dir)
        self._tensorboard = TensorBoardWriter(self.run_dir / "tensorboard") if tensorboard else None
        self._file = _open_for_lines(self.run_dir / METRICS_FILE)
        self._eval_file: Any = None
        process = psutil.Process()
        self._owner = {"pid": process.pid, "pid_started_s": process.create_time()}

    def __repr__(self) -> str:
        return f"<Recorder {self.run_dir}>"

    def keep_steps_below(self, step: int) -> list[Mapping[str, float]]:
        """Remove the lines of steps from `step` on, which are about to be taken again, and torn ones; returns the rest."""
        path = self.run_dir / METRICS_FILE
        self._file.close()
        kept = []
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int | float) and line["step"] < step:
                kept.append((text, line))
        unfinished = path.with_name(f".{METRICS_FILE}.new")
        unfinished.write_text("".join(text for text, _ in kept), encoding="utf-8")
        os.replace(unfinished, path)  # noqa: PTH105  the atomic one, by its known name
        self._file = _open_for_lines(path)
        return [line for _, line in kept]

    def record_step(self, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one optimizer step; `step` must be among them. Raises ValueError if it is not."""
        if "step" not in metrics:
            raise ValueError(f"metrics without 'step': {sorted(metrics)}")
        finite = {name: _plain(value) for name, value in metrics.items() if math.isfinite(value)}
        line: dict[str, Any] = dict(finite)
        if left_out := [name for name in metrics if name not in finite]:
            line[NOT_FINITE] = left_out
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            self._tensorboard.add({name: value for name, value in finite.items() if not name.startswith(EVAL_PREFIX)})

    def record_evaluation(self, line: Mapping[str, Any]) -> None:
        """Append one evaluation; `policy_version` must be in it, and is the step of its eval/* scalars in TensorBoard."""
        if self._eval_file is None:
            self._eval_file = _open_for_lines(self.run_dir / EVAL_FILE)
        self._eval_file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        self._eval_file.flush()
        if self._tensorboard is not None:
            scalars = {name: value for name, value in line.items() if name.startswith(EVAL_PREFIX)}
            self._tensorboard.add(scalars | {"step": line["policy_version"]})

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json. `status["state"]` is starting, running, done, failed or interrupted, and `why` says why; the rest is free.

        Adds the process (pid and its start time, for a pid is used again) and `updated_s` (seconds since the epoch).
        """
        body = {**status, **self._owner, "updated_s": time.time()}
        path = self.run_dir / STATUS_FILE
        temporary = path.with_name(f".{STATUS_FILE}.new")
        temporary.write_text(json.dumps(_finite(body), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)  # noqa: PTH105  the atomic one, by its known name

    def close(self) -> None:
        """Close the files; idempotent."""
        self._file.close()
        if self._eval_file is not None:
            self._eval_file.close()
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
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if name != "step"]
        self._writer.add_event(Event(wall_time=time.time(), step=int(metrics["step"]), summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _open_for_lines(path: Path) -> Any:
    """Open for appending. A half line of a process that was killed gets its line end first, so that it spoils no other."""
    text = path.read_bytes() if path.exists() else b""
    file = path.open("a", encoding="utf-8")
    if text and not text.endswith(b"\n"):
        file.write("\n")
    return file


def _plain(value: float) -> float:
    """A Python int or float for the numpy ones as well, so that JSON can have it."""
    return int(value) if float(value).is_integer() and not isinstance(value, float) else float(value)


def _finite(value: Any) -> Any:
    """The same status with null where JSON has no number for it."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
