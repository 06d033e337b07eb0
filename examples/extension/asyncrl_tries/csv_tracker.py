"""The tracker `csv`."""

from __future__ import annotations

from asyncrl.observe.trackers import Metrics, TrackedRun, Tracker


class CsvTracker(Tracker):
    """Writes each step and its mean reward to RUN_DIR/rewards.csv."""

    def start(self, run: TrackedRun) -> None:
        self._file = (run.run_dir / "rewards.csv").open("a", encoding="utf-8")

    def step(self, step: int, metrics: Metrics) -> None:
        self._file.write(f"{step},{metrics['reward/mean']}\n")

    def close(self, state: str) -> None:
        self._file.close()
