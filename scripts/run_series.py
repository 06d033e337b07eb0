"""Makes many runs of asyncrl one after the other, for scripts that compare them. A run that is there and done
is not made again, one that was interrupted is.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import load_config


@dataclass(frozen=True)
class PlannedRun:
    """One run to be made."""

    variant: str
    config: Path
    seed: int
    overrides: tuple[str, ...]
    """Settings beside the config's and the seed."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.variant}-seed{self.seed}"

    @property
    def settings(self) -> list[str]:
        """All that the config does not say."""
        return [f"seed={self.seed}", *self.overrides, "observe.console=none", "observe.trackers=[]"]


def state_of(folder: Path) -> str:
    """done; failed, with steps that it got to; or unfinished: nothing there, interrupted, or never got to
    train.
    """
    summary, metrics = folder / "summary.json", folder / "metrics.jsonl"
    if not summary.exists() or not metrics.exists() or not metrics.stat().st_size:
        return "unfinished"
    state = str(json.loads(summary.read_text(encoding="utf-8"))["state"])
    return state if state in ("done", "failed") else "unfinished"


def read_steps(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, float]]:
    """Lines of a run's metrics, or of its evaluations."""
    return [json.loads(line) for line in (folder / file).read_text(encoding="utf-8").splitlines()]


def run_all(planned: Sequence[PlannedRun], root: Path) -> None:
    """Make what is missing, and say after each run when the last one will be done. Raises SystemExit if
    asyncrl cannot start, or if a run that is there is of another length, and after an interrupt.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _run_missing(planned, root)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on where it was") from None


def _run_missing(planned: Sequence[PlannedRun], root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    missing = [run for run in planned if state_of(root / run.name) == "unfinished"]
    for run in planned:
        if state_of(root / run.name) == "done":
            _check_length(root / run.name, load_config(run.config, run.settings).trainer.num_steps)
    say(f"{len(planned)} runs, {len(planned) - len(missing)} of them are there")
    began_s = time.monotonic()
    for number, run in enumerate(missing, start=1):
        started_s = time.monotonic()
        what = _make(run, root / run.name)
        now_s = time.monotonic()
        left_s = (now_s - began_s) / number * (len(missing) - number)
        ends = time.strftime("%H:%M", time.localtime(time.time() + left_s))
        say(
            f"[{number}/{len(missing)}] {run.name}: {what}, {now_s - started_s:.0f} s; all done at about "
            f"{ends}"
        )


def _check_length(folder: Path, num_steps: int) -> None:
    if (found := len(read_steps(folder))) != num_steps:
        raise SystemExit(
            f"{folder} has {found} steps, not {num_steps}.\n  Way out: another RUNS_DIR, or as many steps."
        )


def _make(run: PlannedRun, folder: Path) -> str:
    """What became of it."""
    if (folder / "config.yaml").exists():
        shutil.rmtree(folder)  # interrupted: a run is never continued
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(run.config), *run.settings]
    code, errors = call([*command, "--run-dir", str(folder)])
    state = state_of(folder)
    if state == "unfinished":
        raise SystemExit(f"{run.name} ended with {code}, before it trained:\n{errors}")
    if state == "failed":
        return f"failed: {errors}"
    rewards = [step["reward/mean"] for step in read_steps(folder)]
    last = rewards[-max(1, len(rewards) // 10) :]
    return f"done, reward {sum(last) / len(last):.3f}"


def call(command: list[str]) -> tuple[int, str]:
    """Exit code and standard error. An interrupt here ends the run with all that it started, which
    subprocess.run would not.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate()
    except KeyboardInterrupt:
        process.terminate()
        process.communicate()
        raise
    return process.returncode, errors.strip()


def say(text: str) -> None:
    """At once, even into a file."""
    print(text, flush=True)
