"""Trackers of a user's own: one that writes down what it is told, and some that behave badly."""

from __future__ import annotations

import atexit
import json
import threading
from pathlib import Path
from typing import Any

from asyncrl.observe.trackers import TrackedRun


class Noting:
    """Writes one line a call."""

    shown_at = "there"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def note(self, *call: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(call, default=str) + "\n")

    def start(self, run: TrackedRun) -> str | None:
        self.note("start", run.name)
        return self.shown_at

    def step(self, step: int, metrics: Any) -> None:
        self.note("step", step, "reward/mean" in metrics)

    def evaluation(self, version: int, metrics: Any) -> None:
        self.note("evaluation", version)

    def samples(self, step: int, samples: Any) -> None:
        self.note("samples", step)

    def weights(self, version: int, digest: str) -> None:
        self.note("weights", version)

    def close(self, state: str) -> None:
        self.note("close", state)


class Elsewhere(Noting):
    """It is shown where it was not before."""

    shown_at = "elsewhere"


class Raising(Noting):
    """Raises at the second step, what no one would catch."""

    def step(self, step: int, metrics: Any) -> None:
        if step == 1:
            raise SystemExit("no quota is left")
        super().step(step, metrics)


class Hanging(Noting):
    """A server that never answers, and a client that waits for it at Python's end, too."""

    let_go = threading.Event()

    def step(self, step: int, metrics: Any) -> None:
        self.note("hangs")
        atexit.register(self.let_go.wait)
        self.let_go.wait()


class Lacking:
    """Knows of steps alone."""

    def step(self, step: int, metrics: Any) -> None: ...
