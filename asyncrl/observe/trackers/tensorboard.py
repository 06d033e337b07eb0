"""TensorBoard's event files in RUN_DIR/tensorboard, written without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.observe.sample_text import sample_text
from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.tracker import TrackedRun

FOLDER = "tensorboard"
MAX_CHARS = 2000
"""Of each stretch of a sample."""


class TensorBoard:
    """Metrics as scalars over the step, evaluations over the policy_version, samples as text. Its file is
    made with the first of them.
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
        """Text, by their kind: of each of the first 100 steps, then of every tenth, from step 1,000 on of
        every hundredth, and so on. What a model wrote is indented: Markdown shows such lines as they are.
        """
        if step % 10 ** max(0, len(str(step)) - 2):
            return
        texts = dict[str, list[str]]()
        for sample in samples:
            lines = sample_text(sample, most=MAX_CHARS).split("\n")
            texts.setdefault(sample["kind"], []).append("".join(f"    {line}\n" for line in lines))
        for kind, found in texts.items():
            self._add_text(f"samples/{kind}", "\n---\n\n".join(found), step)

    def weights(self, version: int, digest: str) -> None:
        """Not shown."""

    def picture(self, name: str, path: Path) -> None:
        """An image."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        image = Summary.Image(encoded_image_string=path.read_bytes())
        self._add([Summary.Value(tag=name, image=image)], step=0)

    def close(self, state: str = "") -> None:
        """Flush; idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add_scalars(self, scalars: Mapping[str, float], step: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add([Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()], step)

    def _add_text(self, tag: str, markdown: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        text = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()], tensor_shape=shape)
        self._add([Summary.Value(tag=tag, metadata=plugin, tensor=text)], step)

    def _add(self, values: Sequence[Any], step: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            assert self._folder is not None, "it was started"
            self._writer = EventFileWriter(str(self._folder), flush_secs=5)
        self._writer.add_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=values)))
