"""Functions of the program that has started a run, as a tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import CallbackError
from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.tracker import TrackedRun

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Calls what is given of them. What one raises comes out as CallbackError: the program is not to go on as
    if it had been told.
    """

    on_step: Callable[[int, Metrics], None] | None = None
    on_evaluation: Callable[[int, Metrics], None] | None = None
    on_sample: Callable[[ShownRollout], None] | None = None
    on_weights: Callable[[int, str], None] | None = None

    def start(self, run: TrackedRun) -> None:
        """Nothing is called."""

    def step(self, step: int, metrics: Metrics) -> None:
        """on_step."""
        self._call("on_step", step, dict(metrics))

    def evaluation(self, version: int, metrics: Metrics) -> None:
        """on_evaluation."""
        self._call("on_evaluation", version, dict(metrics))

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """on_sample, for each."""
        for sample in samples:
            self._call("on_sample", sample)

    def weights(self, version: int, digest: str) -> None:
        """on_weights."""
        self._call("on_weights", version, digest)

    def picture(self, name: str, path: Path) -> None:
        """Nothing is called."""

    def close(self, state: str) -> None:
        """Nothing is called."""

    def _call(self, name: str, *arguments: Any) -> None:
        if (function := getattr(self, name)) is None:
            return
        try:
            function(*arguments)
        except Exception as error:
            what = f"{name} of asyncrl.run raised {type(error).__name__}: {error}"
            failure = CallbackError(what, way_out="mend it; with the same run_dir the run goes on.")
            failure.error = error
            raise failure from error
