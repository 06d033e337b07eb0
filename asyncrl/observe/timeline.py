"""timeline.jsonl: spans of all processes, for the page and, as trace.json, for Perfetto.

A line is a JSON array: [lane, kind, start, seconds, number, text]. `start` is in seconds since the epoch;
`number` is the batch or policy_version, or -1. Lane "" has rows of kind "slots": each engine's mean
requests in flight.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import FiniteFloat, NonNegativeFloat, TypeAdapter

from asyncrl.base.files import write_whole
from asyncrl.base.waits import TimedSpan
from asyncrl.observe.run_dir import TIMELINE_FILE, TRACE_FILE, append_bounded, read_bounded

MAX_BYTES = 2**20
"""A larger timeline.jsonl replaces timeline.1.jsonl."""
MAX_ROWS = 10_000
"""Rows kept in memory before open(), or when the file cannot be written."""
SLOTS_PERIOD_S = 0.1
KINDS = {
    "wait for generation": "the trainer waits for rollouts",
    "wait for stragglers": "the trainer waits for groups that would become too old",
    "wait for publishing": "the trainer waits until engines serve a newer version",
    "train": "forward, backward and optimizer step of a batch",
    "to trainer": "colocated: the devices go to the trainer",
    "to engines": "the new weights are copied; colocated: the devices go to the engines",
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
    "gone": "the run was killed or interrupted",
    "event": "an event of the journal",
}
_FIRST = ("trainer", "weight sync")
_LAST = ("handovers", "checkpoints", "evaluations", "start", "restarts")
_OF_VERSION = ("export", "prepare", "chunks", "commit", "pause", "checkpoint", "evaluation")

logger = logging.getLogger("asyncrl.observe.timeline")


class Row(NamedTuple):
    lane: str
    kind: str
    start_s: FiniteFloat
    seconds: NonNegativeFloat
    number: int
    text: str | dict[str, FiniteFloat]

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds

    @property
    def busy(self) -> dict[str, float]:
        """Mean requests in flight by engine, of a row of slots."""
        return self.text if isinstance(self.text, dict) else {}

    @property
    def title(self) -> str:
        is_version = self.kind in _OF_VERSION or self.kind.startswith("held")
        number = f"version {self.number}" if is_version else f"step {self.number + 1}"
        return ": ".join(filter(None, (number if self.number >= 0 else "", str(self.text))))


_ROW = TypeAdapter(Row)


class TimelineWriter:
    """Writes the timeline. Rows are kept until open(). An OSError is logged and ends no run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TIMELINE_FILE
        self._is_open = False
        self._rows = deque[Row](maxlen=MAX_ROWS)
        self._offset_s = time.time() - time.monotonic()
        self._busy_s: Mapping[str, float] = {}
        self._busy_at_s = time.monotonic()

    def open(self) -> None:
        self._is_open = True
        self._write()

    def note(self, span: TimedSpan) -> None:
        text = span.text.encode(errors="replace").decode()  # JSON has no lone surrogates
        self._add(span.lane, span.kind, span.start_s, span.end_s, span.number, text)

    def slots(self, busy_s: Mapping[str, float], now_s: float) -> None:
        """`busy_s`: each engine's request-seconds so far."""
        if (seconds := now_s - self._busy_at_s) < SLOTS_PERIOD_S:
            return
        if known := self._busy_s.keys() & busy_s.keys():
            means = {name: round((busy_s[name] - self._busy_s[name]) / seconds, 2) for name in sorted(known)}
            self._add("", "slots", self._busy_at_s, now_s, -1, means)
        self._busy_s = dict(busy_s)
        self._busy_at_s = now_s
        self._write()

    def close(self) -> None:
        """Write the remaining rows. Idempotent."""
        self._write()
        self._is_open = False

    def _add(self, lane: str, kind: str, start_s: float, end_s: float, number: int, text: Any) -> None:
        at_s = round(start_s + self._offset_s, 6)
        self._rows.append(Row(lane, kind, at_s, round(end_s - start_s, 6), number, text))

    def _write(self) -> None:
        if not self._is_open:
            return
        try:
            append_bounded(self._path, self._rows, MAX_BYTES)
        except OSError as error:
            logger.warning("no more timeline: cannot write %s: %s", self._path, error)
            self._is_open = False
        self._rows.clear()


def read_timeline(run_dir: Path, problems: list[str]) -> list[Row]:
    """Return all rows, in the order of their ends."""
    return [*read_bounded(run_dir / TIMELINE_FILE, problems, _ROW)]


def spans_of(rows: Iterable[Row]) -> list[Row]:
    """Return spans of known kinds. The first start gets its own lane; the time before a later start
    becomes a span.
    """
    spans: list[Row] = []
    has_started = False
    for row in rows:
        if not row.lane or row.kind not in KINDS:
            continue
        if row.kind == "start" and not has_started:
            has_started = True
            row = row._replace(lane="start", number=-1)
        elif row.kind == "start":
            end_s = max((span.end_s for span in spans if span.start_s < row.start_s), default=row.start_s)
            if end_s < row.start_s:
                spans.append(Row("restarts", "gone", end_s, row.start_s - end_s, -1, ""))
        spans.append(row)
    return spans


def _lane_names(names: Set[str]) -> list[str]:
    """Sort lanes from the top; engine-2 before engine-10."""
    engines = sorted(names - {*_FIRST, *_LAST}, key=lambda name: (len(name), name))
    return [name for name in (*_FIRST, *engines, *_LAST) if name in names]


# ---- the page


def timeline_view(rows: Sequence[Row], events: Iterable[tuple[float, str]], num_slots: int) -> dict[str, Any]:
    """Return times in seconds since `start_s`; `spans` as [lane, kind, start, end, text] with indices
    into `lanes` and `kinds`; `slots` as [time, busy requests] of each engine.

    `events`: (seconds since the epoch, text); `num_slots`: of an engine.
    """
    spans = spans_of(rows)
    spans += [Row("restarts", "event", at_s, 0.0, -1, text) for at_s, text in events]
    spans.sort(key=lambda row: row.start_s)
    slots = [row for row in rows if row.busy]
    start_s = min((row.start_s for row in (*spans, *slots)), default=0.0)
    busy = _busy_by_engine(slots, start_s)
    lanes = _lane_names({row.lane for row in spans} | busy.keys())
    kinds = [*KINDS]
    return {
        "start_s": start_s,
        "lanes": lanes,
        "kinds": [{"name": name, "meaning": meaning} for name, meaning in KINDS.items()],
        "spans": [
            [lanes.index(row.lane), kinds.index(row.kind), *_since(start_s, row), row.title] for row in spans
        ],
        "slots": busy,
        "num_slots": num_slots,
    }


def _since(start_s: float, row: Row) -> tuple[float, float]:
    return round(row.start_s - start_s, 4), round(row.end_s - start_s, 4)


def _busy_by_engine(slots: Iterable[Row], start_s: float) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    ends_s: dict[str, float] = {}
    for row in slots:
        for name, busy in row.busy.items():
            points = found.setdefault(name, [])
            if name in ends_s and row.start_s - ends_s[name] > max(2.0, row.seconds):
                points.append((round(ends_s[name] - start_s, 3), 0.0))
            points.append((round(row.start_s - start_s, 3), float(busy)))
            ends_s[name] = row.end_s
    for name, end_s in ends_s.items():
        found[name].append((round(end_s - start_s, 3), 0.0))
    return found


# ---- Perfetto


def write_trace(run_dir: Path) -> Path:
    """Raises OSError."""
    trace = trace_of(read_timeline(run_dir, []), run_dir.name)
    write_whole(run_dir / TRACE_FILE, json.dumps(trace, separators=(",", ":")))
    return run_dir / TRACE_FILE


def trace_of(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """Return Chrome's Trace Event Format, in microseconds since the first row: a track for each lane,
    more for overlapping spans, and a counter per engine.
    """
    spans = sorted(spans_of(rows), key=lambda row: (row.start_s, -row.seconds))
    slots = [row for row in rows if row.busy]
    start_s = min((row.start_s for row in (*spans, *slots)), default=0.0)
    events = [_event("M", "process_name", 0, args={"name": f"asyncrl {name}"})]
    tracks = 0
    for lane in _lane_names({row.lane for row in spans}):
        ends_us: list[int] = []
        for row in spans:
            if row.lane != lane:
                continue
            begin_us = round(1e6 * (row.start_s - start_s))
            end_us = max(begin_us, round(1e6 * (row.end_s - start_s)))
            track = next((index for index, end in enumerate(ends_us) if end <= begin_us), len(ends_us))
            ends_us[track : track + 1] = [end_us]
            args = {"text": row.title, "number": row.number}
            event = _event("X", row.kind, tracks + track + 1, cat=lane, ts=begin_us, args=args)
            events.append(event | {"dur": end_us - begin_us})
        for index in range(len(ends_us)):
            tracks += 1
            title = lane if index == 0 else f"{lane} ({index + 1})"
            events.append(_event("M", "thread_name", tracks, args={"name": title}))
            events.append(_event("M", "thread_sort_index", tracks, args={"sort_index": tracks}))
    for row in slots:
        at_us = round(1e6 * (row.start_s - start_s))
        for engine, busy in row.busy.items():
            events.append(_event("C", f"requests of {engine}", 0, ts=at_us, args={"busy": busy}))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_s": start_s}}


def _event(phase: str, name: str, track: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": 1, "tid": track, **fields}
