"""What a tracker is told of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asyncrl.observe.samples import ShownRollout, ShownTokens


def _silent(text: str) -> None:
    """No one listens."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Names the run that a tracker shows. `config`: as config.yaml has it, in plain values; `run_id`: the
    same over restarts and resumes; `kept_id`: what start() returned when the run was shown last, '' if never.
    `warn`: tells the user something, from any thread.
    """

    run_dir: Path
    name: str
    run_id: str
    config: Mapping[str, Any]
    kept_id: str = ""
    warn: Callable[[str], None] = _silent


class Tracker(Protocol):
    """Shows a run as it goes. Life: start() -> step(), evaluation(), samples(), weights(), picture() in any
    order -> close(). All calls come from one thread and in the order in which things happened.

    A method that raises does not end the run: the tracker is left out from then on, with a warning. One of
    observe.trackers is made and called in a thread of its own (background.py): a call may take its time.
    """

    def start(self, run: TrackedRun) -> str | None:
        """The run begins, or goes on. Returns a name of where it is shown; as long as that stays the same
        over resumes, no step, evaluation or samples come a second time.
        """

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


SAMPLE_COLUMNS = (
    *("step", "kind", "group_id", "sample_index", "prompt", "completion"),
    *("reward", "staleness", "logprob_gap", "truncated", "interruptions", "error"),
)


def sample_rows(samples: Sequence[ShownRollout]) -> list[list[Any]]:
    """A row of SAMPLE_COLUMNS each, for the tables of trackers. `completion` has what was sampled alone; in
    place of what came between stands an empty line.
    """
    return [
        [
            *(sample["step"], sample["kind"], sample["group_id"], sample["sample_index"]),
            "\n".join(f"{said.get('role')}: {said.get('content')}" for said in sample["messages"]),
            "\n\n".join(part["text"] for part in _stretches(sample) if part["is_sampled"]),
            *(sample["reward"], sample["staleness"], sample["logprob_gap"]),
            *(sample["is_truncated"], sample["num_interruptions"], sample["error"]),
        ]
        for sample in samples
    ]


def _stretches(sample: ShownRollout) -> Iterator[ShownTokens]:
    for branch in sample["branches"]:
        yield from branch["stretches"]
