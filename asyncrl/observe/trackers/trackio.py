"""Trackio, by its own client (extra trackio): a database on this machine, or a Space of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.operation import TrackioArgs
from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.tracker import SAMPLE_COLUMNS, TrackedRun, sample_rows


class Trackio:
    """Metrics over the step, evaluations over the policy_version. A run is known by its name there, which
    ends in the run's id.
    """

    def __init__(self, args: TrackioArgs) -> None:
        self._args = args
        self._run: Any = None
        self._last_step = 0

    def start(self, run: TrackedRun) -> str:
        """Goes on in the run of that name."""
        import trackio

        project, space, config = self._args.project, self._args.space_id, dict(run.config)
        place, name = f"{space or ''}/{project}/", f"{run.name}-{run.run_id[:8]}"
        if run.kept_id.startswith(place):  # the run directory may have been moved since
            name = run.kept_id.removeprefix(place)
        self._run = trackio.init(project, name, space_id=space, config=config, resume="allow", embed=False)
        return place + name

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line."""
        self._last_step = step
        self._run.log(dict(metrics), step=step)

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """One line, over the version that was evaluated."""
        self._run.log(dict(metrics), step=version)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """A table a step."""
        from trackio import Table

        self._run.log({"samples": Table(columns=list(SAMPLE_COLUMNS), data=sample_rows(samples))}, step=step)

    def weights(self, version: int, digest: str) -> None:
        """Not shown."""

    def picture(self, name: str, path: Path) -> None:
        """An image at the last step."""
        from trackio import Image

        self._run.log({name: Image(str(path))}, step=self._last_step)

    def close(self, state: str) -> None:
        """Send the rest; blocks until it is sent."""
        self._run.finish()
