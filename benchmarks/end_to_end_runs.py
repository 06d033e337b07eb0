"""One run of benchmarks/end_to_end.py: its command, its cache, and what is read out of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from asyncrl.observe.verdict import running_mean

HERE = Path(__file__).parent
LEVELS = (0.5, 0.7, 0.8)
WINDOW = 10
"""Optimizer steps of the moving mean that has to reach a level; the first WINDOW - 1 steps reach none."""
FINAL_PART = 10
"""The final reward is the mean over the last tenth of the steps."""
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Curve:
    """A finished run. Seconds and reward/mean, one a step; seconds count from the start of the loop, and
    start_up_s are those of the process before it.
    """

    start_up_s: float
    times_s: list[float]
    rewards: list[float]
    lengths: list[float]

    def reach_s(self, level: float) -> float:
        """Seconds until the moving mean first reaches the level; infinite if it never does."""
        means = running_mean(self.rewards, window=WINDOW)
        found = (self.times_s[step] for step in range(WINDOW - 1, len(means)) if means[step] >= level)
        return next(found, math.inf)

    @property
    def final_reward(self) -> float:
        """Mean over the last tenth of the steps."""
        return statistics.fmean(self.rewards[-max(1, len(self.rewards) // FINAL_PART) :])

    @property
    def steps_per_min(self) -> float:
        """All steps, the first one included, by the loop's seconds."""
        return 60.0 * len(self.times_s) / self.times_s[-1]

    @property
    def step_s(self) -> float:
        """Mean seconds a step, without the first one, which warms up."""
        return (self.times_s[-1] - self.times_s[0]) / max(1, len(self.times_s) - 1)


@dataclass(frozen=True)
class Measured:
    """A system at its best learning rate, one curve a seed."""

    rate: str
    curves: dict[int, Curve]

    def median(self, of: Callable[[Curve], float]) -> float:
        """Over the seeds."""
        return statistics.median(map(of, self.curves.values()))

    def reach_s(self, level: float, *, with_start: bool = False) -> float:
        """Median seconds until a level."""
        return self.median(lambda curve: curve.reach_s(level) + with_start * curve.start_up_s)

    @property
    def final_reward(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(curve.final_reward for curve in self.curves.values())


@dataclass(frozen=True)
class Work:
    """The folder where runs are made and what they gave is kept: NAME.json a run, written when it ends."""

    folder: Path

    def measure(self, name: str, command: Sequence[str]) -> Curve:
        """Run the command (it takes --run-dir), or take what an earlier start of this benchmark kept of the
        same one, by the same code. Ends the benchmark if the command fails.
        """
        kept, made_by = self.folder / f"{name}.json", {"command": [*command], "code": code_digest()}
        if kept.exists():
            values = json.loads(kept.read_text(encoding="utf-8"))
            if {key: values.pop(key) for key in made_by} == made_by:
                _say(f"{name}: kept from before")
                return Curve(**values)
        curve = self._run(name, command)
        text = json.dumps(made_by | vars(curve))
        kept.with_suffix(".part").write_text(text, encoding="utf-8")
        kept.with_suffix(".part").rename(kept)
        _say(
            f"{name}: {len(curve.times_s)} steps in {curve.times_s[-1]:.1f} s after {curve.start_up_s:.1f} s,"
            f" reward {curve.final_reward:.3f}"
        )
        return curve

    def _run(self, name: str, command: Sequence[str]) -> Curve:
        run_dir, log = self.folder / "running", self.folder / "running.log"
        shutil.rmtree(run_dir, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        started_s = time.time()
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                [*command, "--run-dir", str(run_dir)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": str(HERE)},
                timeout=TIMEOUT_S,
                check=False,
            )
        if done.returncode != 0:
            words = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SystemExit(f"{name} ended with {done.returncode}: {' '.join(command)}\n{words}")
        curve = read_curve(run_dir / "metrics.jsonl", started_s)
        shutil.rmtree(run_dir)
        return curve


@cache
def code_digest() -> str:
    """Of the code that runs: of asyncrl, its servers and the benchmarks."""
    digest = hashlib.sha256()
    for folder in ("asyncrl", "servers", "benchmarks"):
        for path in sorted((HERE.parent / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def read_curve(path: Path, started_s: float) -> Curve:
    """The curve in a metrics.jsonl. `started_s` is the time at which its process was started; the file was
    last written when its last step ended, which says when the loop began.
    """
    steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    times_s = [float(step["time_s"]) for step in steps]
    return Curve(
        start_up_s=path.stat().st_mtime - started_s - times_s[-1],
        times_s=times_s,
        rewards=[float(step["reward/mean"]) for step in steps],
        lengths=[float(step["sample/length_mean"]) for step in steps],
    )


def best_rate(curves: dict[str, Curve]) -> str:
    """The learning rate whose run reaches the highest level soonest; where none does, whose final reward is
    highest.
    """
    return min(curves, key=lambda rate: (curves[rate].reach_s(LEVELS[-1]), -curves[rate].final_reward))


def python(script: str) -> list[str]:
    """The command of a script beside this one."""
    return [sys.executable, str(HERE / script)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
