"""A user's trackers: a tracker that records its calls, and some that misbehave."""

from __future__ import annotations

import atexit
import json
import threading
from pathlib import Path
from typing import Any

from asyncrl.observe.trackers import TrackedRun, Tracker


class Noting(Tracker):
    """Writes one line a call."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def note(self, *call: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(call, default=str) + "\n")

    def start(self, run: TrackedRun) -> None:
        self.note("start", run.name)

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


class Raising(Noting):
    """Raises SystemExit at the second step."""

    def step(self, step: int, metrics: Any) -> None:
        if step == 1:
            raise SystemExit("no quota is left")
        super().step(step, metrics)


class Hanging(Noting):
    """Waits for a server that never answers, also at exit."""

    let_go = threading.Event()

    def step(self, step: int, metrics: Any) -> None:
        self.note("hangs")
        atexit.register(self.let_go.wait)
        self.let_go.wait()


def record_export(folder: Path, policy_version: int) -> None:
    """Keep the weights in the run directory; refuse version 2."""
    run_dir = folder.parents[2]
    (folder / "model.safetensors").rename(run_dir / f"seen_{policy_version}")
    if policy_version == 2:
        raise ValueError("no to 2")


def record_roles(folder: Path, policy_version: int) -> None:
    """Keep the weights of each role in the run directory."""
    for role in folder.iterdir():
        weights = role / "model.safetensors"
        weights.rename(folder.parents[2] / f"seen_{role.name}_{policy_version}")
