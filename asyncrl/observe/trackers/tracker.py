"""Interface of a tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.observe.samples import ShownRollout


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Name a run for a tracker. `config`: plain values of config.yaml; `run_id`: stays over resumes;
    `kept_id`: result of the last start(), '' in a new run; `warn`: shows a warning, from any thread.
    """

    run_dir: Path
    name: str
    run_id: str
    config: Mapping[str, Any]
    kept_id: str = ""
    warn: Callable[[str], None] = print


class Tracker:
    """Base class of trackers; each method does nothing by default.

    Life: start() -> step(), evaluation(), samples(), weights() in any order -> close(). All calls
    come from one thread, in the order of events. A tracker that raises is turned off with a warning.
    """

    def start(self, run: TrackedRun) -> str | None:
        """Open the run. Return an id of the place; while it stays the same over resumes, no step,
        evaluation or samples repeat.
        """

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the finite metrics of a step, by their names in docs/metrics.md, without eval/*."""

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Show the eval/* metrics of one evaluation of policy `version`."""

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """Show the samples of a step."""

    def weights(self, version: int, digest: str) -> None:
        """Note that all engines serve policy `version`."""

    def close(self, state: str) -> None:
        """End the run: done, failed or interrupted."""


METHODS = ("start", "step", "evaluation", "samples", "weights", "close")
SAMPLE_COLUMNS = (
    *("step", "kind", "group_id", "sample_index", "prompt", "completion"),
    *("reward", "staleness", "logprob_gap", "truncated", "interruptions", "error"),
)


def sample_table(samples: Sequence[ShownRollout]) -> dict[str, list[Any]]:
    """Return `columns`, and in `data` a row for each sample; `completion` has the sampled text only."""
    rows = [
        [
            *(sample["step"], sample["kind"], sample["group_id"], sample["sample_index"]),
            "\n".join(f"{message.get('role')}: {message.get('content')}" for message in sample["messages"]),
            "\n\n".join(part["text"] for part in sample["parts"] if part["is_sampled"]),
            *(sample["reward"], sample["staleness"], sample["logprob_gap"]),
            *(sample["is_truncated"], sample["num_interruptions"], sample["error"]),
        ]
        for sample in samples
    ]
    return {"columns": [*SAMPLE_COLUMNS], "data": rows}
