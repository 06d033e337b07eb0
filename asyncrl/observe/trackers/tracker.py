"""What a tracker is told of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asyncrl.observe.samples import ShownRollout


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Names the run that a tracker shows. `config`: as config.yaml has it, in plain values; `run_id`: the
    same over restarts and resumes; `goes_on_from`: the first step that is about to be reported, of a resumed
    run.
    """

    run_dir: Path
    name: str
    run_id: str
    config: Mapping[str, Any]
    goes_on_from: int = 0


class Tracker(Protocol):
    """Shows a run as it goes. Life: start() -> step(), evaluation(), samples(), weights(), picture() in any
    order -> close(). All calls come from one thread and in the order in which things happened.

    A method that raises does not end the run: the tracker is left out from then on, with a warning.
    """

    def start(self, run: TrackedRun) -> None:
        """The run begins, or goes on."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The finite metrics of a batch, by their names in docs/metrics.md; eval/* come by evaluation()."""

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """The eval/* of one evaluation of the weights of `version`."""

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """What was taken down of the rollouts of a batch."""

    def weights(self, version: int, digest: str) -> None:
        """Every engine serves the weights of `version`."""

    def picture(self, name: str, path: Path) -> None:
        """A PNG of the run: its reward plot."""

    def close(self, state: str) -> None:
        """The run has ended: done, failed or interrupted."""
