"""RUN_DIR/trace.json: the time line in the Trace Event Format of Chrome, for https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.base.files import write_whole
from asyncrl.observe.page.lanes import lane_names, span_text, spans_of
from asyncrl.observe.run_dir import TIMELINE_FILE, TRACE_FILE
from asyncrl.observe.timeline import Row, read_timeline

Event = dict[str, Any]


def write_trace(run_dir: Path) -> Path:
    """Write trace.json. Raises OSError."""
    trace = trace_of(read_timeline(run_dir / TIMELINE_FILE, []), run_dir.name)
    write_whole(run_dir / TRACE_FILE, json.dumps(trace, separators=(",", ":")))
    return run_dir / TRACE_FILE


def trace_of(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """Return a track for each lane (overlapping spans get extra tracks) and counters of the requests
    of each engine. Times are in microseconds since the first span.
    """
    spans, slots = spans_of(rows, []), [row for row in rows if row[1] == "slots"]
    start_s = min((row[2] for row in (*spans, *slots)), default=0.0)
    events = [_event("M", "process_name", 0, args={"name": f"asyncrl {name}"})]
    tracks = 0
    for lane in lane_names({row[0] for row in spans}):
        ends_us = list[int]()
        for row in sorted((row for row in spans if row[0] == lane), key=lambda row: (row[2], -row[3])):
            begin_us, end_us = (round(1e6 * (at_s - start_s)) for at_s in (row[2], row[2] + row[3]))
            track = next((index for index, end in enumerate(ends_us) if end <= begin_us), len(ends_us))
            ends_us[track : track + 1] = [end_us]
            args = {"text": span_text(row), "number": row[4]}
            times = {"ts": begin_us, "dur": max(0, end_us - begin_us)}
            events.append(_event("X", row[1], tracks + track + 1, cat=lane, **times, args=args))
        for index in range(len(ends_us)):
            tracks += 1
            own = lane if index == 0 else f"{lane} ({index + 1})"
            events.append(_event("M", "thread_name", tracks, args={"name": own}))
            events.append(_event("M", "thread_sort_index", tracks, args={"sort_index": tracks}))
    for row in slots:
        at_us = round(1e6 * (row[2] - start_s))
        for engine, busy in row[5].items():
            events.append(_event("C", f"requests of {engine}", 0, ts=at_us, args={"busy": busy}))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_s": start_s}}


def _event(phase: str, name: str, track: int, **rest: Any) -> Event:
    return {"ph": phase, "name": name, "pid": 1, "tid": track, **rest}
