"""timeline.jsonl: spans of all processes, for the page and, as trace.json, for
Perfetto.

A line is a JSON array: [lane, kind, start, seconds, number, text]. `start` is in
seconds since the epoch; `number` is the batch or policy_version, or -1.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import FiniteFloat, NonNegativeFloat, TypeAdapter

from asyncrl.base.files import write_whole
from asyncrl.base.waits import TimedSpan
from asyncrl.journal.read import dated_events
from asyncrl.observe.run_dir import (
    TIMELINE_FILE,
    TRACE_FILE,
    append_bounded,
    read_bounded,
    read_journal,
)
from asyncrl.observe.run_numbers import several

MAX_BYTES = 2**20
"""A larger timeline.jsonl replaces timeline.1.jsonl."""
CODE_FILE = "code.json"
"""Written by tasks/sources.py: the code of each start, and `changed` files from `step`
on.
"""
MAX_ROWS = 10_000
"""Rows kept in memory before open(), or when the file cannot be written."""
KINDS = {
    "wait for generation": "the trainer waits for rollouts",
    "wait for rewards": "the trainer waits for rewards of groups that are sampled",
    "wait for teaching": "the trainer waits until another model has read groups that have rewards",
    "wait for stragglers": "the trainer waits for groups that would become too old",
    "wait for publishing": "the trainer waits until engines serve a newer version",
    "train": "forward, backward and optimizer step of a batch",
    "to trainer": "colocated: the devices go to the trainer",
    "to engines": "the new weights are copied; colocated: the devices go to the engines",
    "generate": "colocated: the engines' time slice, from their wake to their sleep",
    "score": "colocated: another server on these devices answers calls, from its first to its last one",
    "sleep": "colocated: it frees its memory for the trainer",
    "wake": "colocated: it takes its memory again",
    "pack": "the batch is packed into arrays",
    "journal": "the batch is committed to the journal",
    "copy": "a checkpoint copies the weights while the trainer waits",
    "record": "metrics of the step are written, after the step",
    "train again": "journaled batches are trained again after a resume",
    "save": "the final weights are written",
    "export": "the trainer exports new weights",
    "prepare": "engines load new weights while they generate",
    "chunks": "colocated: new weights go to the engines in chunks",
    "commit": "engines swap to the new weights",
    "pause": "an engine stops decoding to swap weights",
    "checkpoint": "a checkpoint is written",
    "evaluation": "a version is evaluated",
    "held for an evaluation": "new weights wait until an evaluation on the rollout engines ends",
    "start": "processes start and load the model",
    "down": "a process was lost and is being replaced",
}
_OF_VERSION = (
    "export",
    "prepare",
    "chunks",
    "commit",
    "pause",
    "checkpoint",
    "evaluation",
)
_ORDER = {
    "trainer": 0,
    "next batch": 0.5,
    "weight sync": 1,
    "handovers": 3,
    "checkpoints": 4,
    "evaluations": 5,
    "restarts": 6,
}
"""Lanes from the top; engines are 2."""

Mark = tuple[int, str]
"""Something that happened after so many steps."""

logger = logging.getLogger("asyncrl.observe.timeline")


class Row(NamedTuple):
    lane: str
    kind: str
    start_s: FiniteFloat
    seconds: NonNegativeFloat
    number: int
    text: str

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds

    @property
    def title(self) -> str:
        is_version = self.kind in _OF_VERSION or self.kind.startswith("held")
        number = f"version {self.number}" if is_version else f"step {self.number + 1}"
        return ": ".join(filter(None, (number if self.number >= 0 else "", self.text)))


_ROW = TypeAdapter(Row)


class TimelineWriter:
    """Writes the timeline. Rows are kept until open(). An OSError is logged and ends no
    run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TIMELINE_FILE
        self._is_open = False
        self._rows = deque[Row](maxlen=MAX_ROWS)
        # Spans have the monotonic clock, which starts again with the machine. The file
        # has the time of day, so that the lives of a resumed run follow each other.
        self._offset_s = time.time() - time.monotonic()

    def open(self) -> None:
        # A resumed run opens it once nothing can refuse the resume any more, since a
        # refused one changes no file.
        self._is_open = True
        self.flush()

    def note(self, span: TimedSpan) -> None:
        at_s = round(span.start_s + self._offset_s, 6)
        # JSON has no lone surrogates
        seconds = round(span.end_s - span.start_s, 6)
        self._rows.append(
            Row(
                span.lane,
                span.kind,
                at_s,
                seconds,
                span.number,
                span.text.encode(errors="replace").decode(),
            )
        )

    def flush(self) -> None:
        if not self._is_open:
            return
        try:
            append_bounded(self._path, self._rows, MAX_BYTES)
        except OSError as error:
            logger.warning("no more timeline: cannot write %s: %s", self._path, error)
            self._is_open = False
        self._rows.clear()


def read_timeline(run_dir: Path, problems: list[str]) -> list[Row]:
    """Return the rows of known kinds, in the order of their ends."""
    return [
        row
        for row in read_bounded(run_dir / TIMELINE_FILE, problems, _ROW)
        if row.kind in KINDS
    ]


def read_marks(run_dir: Path) -> list[Mark]:
    """Return resumes and lost processes of the journal, and changed sources, by step."""
    marks = _marks_of(read_journal(run_dir, [], dated_events) or [])
    # no such file, or a damaged one
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        for record in json.loads((run_dir / CODE_FILE).read_bytes()):
            if changed := record["changed"]:
                marks.append(
                    (record["step"] - 1, f"code changed: {', '.join(changed)}")
                )
    return sorted(marks)


def _marks_of(events: Iterable[tuple[int, str, dict[str, Any]]]) -> list[Mark]:
    marks: list[Mark] = []
    for num_taken, what, about in events:
        if what == "restored":
            # The batches since the checkpoint. They keep their numbers, so the curve
            # shows each step once.
            num_again = num_taken - about["version"]
            again = (
                f", {several(num_again, 'step')} trained again" if num_again > 0 else ""
            )
            # A trainer that was restarted within a run resumes nothing else.
            words = "trainer restored" if about.get("who") == "trainer" else "resumed"
            marks.append((max(num_taken, about["version"]), f"{words}{again}"))
        elif what.endswith(" lost"):
            why = str(about.get("why")).partition("; the end of its log")[0]
            marks.append((num_taken, f"{what}: {why}"))
    return marks


def _lanes_of(rows: Iterable[Row]) -> list[str]:
    """Sort lanes from the top; engine-2 before engine-10."""
    return sorted(
        {row.lane for row in rows},
        key=lambda lane: (_ORDER.get(lane, 2), len(lane), lane),
    )


def timeline_view(rows: Sequence[Row]) -> dict[str, object]:
    """Return `spans` as [lane, kind, start, end, text] for the page, with indices into
    `lanes` and `kinds`, and times in seconds since the first start.
    """
    start_s = min((row.start_s for row in rows), default=0.0)
    lanes = _lanes_of(rows)
    kinds = [*KINDS]
    spans = []
    for row in sorted(rows, key=lambda row: row.start_s):
        begin_s = round(row.start_s - start_s, 4)
        end_s = round(row.end_s - start_s, 4)
        spans.append(
            [lanes.index(row.lane), kinds.index(row.kind), begin_s, end_s, row.title]
        )
    meanings = [{"name": name, "meaning": meaning} for name, meaning in KINDS.items()]
    return {"lanes": lanes, "kinds": meanings, "spans": spans}


def write_trace(run_dir: Path) -> Path:
    """Write the timeline as trace.json, for Perfetto. Raises OSError."""
    trace = trace_of(read_timeline(run_dir, []))
    write_whole(run_dir / TRACE_FILE, json.dumps(trace, separators=(",", ":")))
    return run_dir / TRACE_FILE


def trace_of(rows: Sequence[Row]) -> dict[str, object]:
    """Return Chrome's Trace Event Format: a process per lane, whose async events may
    overlap.
    """
    lanes = _lanes_of(rows)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": lane}}
        for pid, lane in enumerate(lanes)
    ]
    for number, row in enumerate(rows):
        span = {
            "name": row.kind,
            "cat": row.lane,
            "id": number,
            "pid": lanes.index(row.lane),
            "tid": 0,
        }
        events.append(
            {
                **span,
                "ph": "b",
                "ts": round(1e6 * row.start_s),
                "args": {"text": row.title},
            }
        )
        events.append({**span, "ph": "e", "ts": round(1e6 * row.end_s)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
