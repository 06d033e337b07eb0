"""Writes metrics.jsonl, eval.jsonl and status.json of a run, for trackers too. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.base.files import LOST, cut_at, lines_from_end
from asyncrl.observe.metrics import is_total
from asyncrl.observe.run_dir import (
    EVAL_FILE,
    LOST_KEY,
    METRICS_FILE,
    STATUS_FILE,
    append_lines,
    boot_id,
    parse,
)

if TYPE_CHECKING:
    from asyncrl.observe.trackers.background import Background

EVAL_PREFIX = "eval/"
NOT_FINITE = "not_finite"
"""Key with the names of metrics that were NaN or infinite."""


class Recorder:
    """Appends to the files of a run, from one thread; each line is one write.

    metrics.jsonl   one JSON object a step; NaN and infinity are omitted and named in `not_finite`
    eval.jsonl      one JSON object an evaluation
    status.json     the present state, replaced as a whole
    """

    def __init__(self, run_dir: str | Path, trackers: Background | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.trackers = trackers
        (self.run_dir / METRICS_FILE).touch()
        self._owner = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id()}

    def keep_steps(self, num_steps: int) -> Mapping[str, Any]:
        """Cut off the lines of steps after `num_steps`, which are trained again, and a torn end.

        Return the line of the last kept step, {} if there is none. If steps up to `num_steps` are missing,
        append: {"lost": [first, last], "why": ...}.
        """
        path = self.run_dir / METRICS_FILE
        end = path.stat().st_size
        newest, last = 0.0, dict[str, Any]()
        for start, text in lines_from_end(path):
            line = parse(text)
            of_step = _step_of(line)
            if newest == 0 and not 0 <= of_step <= num_steps:
                end = start
                continue
            newest = max(newest, of_step)
            if "step" in line:
                last = line
                break
        cut_at(path, end)
        if newest < num_steps:
            append_lines(path, [{LOST_KEY: [int(newest) + 1, num_steps], "why": LOST}])
        return last

    def record_step(self, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one optimizer step, `step` among them."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        left_out = [name for name in metrics if name not in finite]
        append_lines(self.run_dir / METRICS_FILE, [{**finite, NOT_FINITE: left_out} if left_out else finite])
        if self.trackers is not None:
            scalars = {
                n: float(v) for n, v in finite.items() if n != "step" and not n.startswith(EVAL_PREFIX)
            }
            self.trackers.tell("step", int(metrics["step"]), scalars)

    def record_evaluation(self, line: Mapping[str, Any]) -> None:
        """Append one evaluation, with `policy_version`, and `name` if there are several."""
        append_lines(self.run_dir / EVAL_FILE, [_finite(line)])
        if self.trackers is not None:
            self.trackers.tell("evaluation", line["policy_version"], evaluation_metrics(line))

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json: `status` with pid, host, boot_id of the kernel and the time `updated_s`.
        `status["state"]` is starting, running, done, failed or interrupted.
        """
        body = {**status, **self._owner, "updated_s": time.time()}
        path = self.run_dir / STATUS_FILE
        temporary = path.with_name(f".{STATUS_FILE}.new")
        temporary.write_text(json.dumps(_finite(body), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)


def _step_of(line: Any) -> float:
    """Return the step of a line, or the last of lost steps; -1 for another line."""
    try:
        return float(line[LOST_KEY][1] if LOST_KEY in line else line["step"])
    except (KeyError, TypeError, ValueError, IndexError):
        return -1.0


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluation_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation by their names in metrics.jsonl: eval/NAME/... if there are
    several; totals count all together.
    """
    found = {name: float(value) for name, value in line.items() if name.startswith(EVAL_PREFIX)}
    if not line.get("name"):
        return found
    own = f"{EVAL_PREFIX}{line['name']}/"
    return {n if is_total(n) else own + n.removeprefix(EVAL_PREFIX): value for n, value in found.items()}
