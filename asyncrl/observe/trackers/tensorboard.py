"""TensorBoard's event files in RUN_DIR/tensorboard, written without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.tracker import TrackedRun

FOLDER = "tensorboard"


class TensorBoard:
    """Metrics as scalars over the step, evaluations over the policy_version. Its file is made with the first
    of them.
    """

    def __init__(self) -> None:
        self._writer: Any = None
        self._folder: Path | None = None

    def start(self, run: TrackedRun) -> None:
        """Where the events go."""
        self._folder = run.run_dir / FOLDER

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event of all scalars."""
        self._add_scalars(metrics, step)

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Over the version that was evaluated."""
        self._add_scalars(metrics, version)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """Not shown."""

    def weights(self, version: int, digest: str) -> None:
        """Not shown."""

    def picture(self, name: str, path: Path) -> None:
        """An image."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(
            Summary.Value(tag=name, image=Summary.Image(encoded_image_string=path.read_bytes())), step=0
        )

    def close(self, state: str = "") -> None:
        """Flush; idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add_scalars(self, scalars: Mapping[str, float], step: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(
            *(Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()), step=step
        )

    def _add(self, *values: Any, step: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder), flush_secs=5)
        self._writer.add_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=values)))
