"""RUN_DIR/trace.json: the time line for https://ui.perfetto.dev, in the Trace Event Format of Chrome
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.files import write_whole
from asyncrl.observe.page.lanes import lane_names, span_text, spans_of
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.timeline import TIMELINE_FILE, Row, read_timeline

TRACE_FILE = "trace.json"
_PID = 1
_PUSH = ("export", "chunks")
"""Kinds with which a weight sync begins."""
Event = dict[str, Any]


def write_trace(run_dir: Path, steps: Steps) -> Path:
    """Write it, whole or not at all. Raises OSError."""
    rows = read_timeline(run_dir / TIMELINE_FILE, [])
    write_whole(run_dir / TRACE_FILE, json.dumps(trace_of(rows, steps, run_dir.name), separators=(",", ":")))
    return run_dir / TRACE_FILE


def trace_of(rows: Sequence[Row], steps: Steps, name: str) -> dict[str, Any]:
    """A track a lane (spans that overlap get tracks of their own), counters of the requests of each engine
    and of staleness, and an arrow from each step to the sync of the weights that it made. Times are in
    microseconds since the first span.
    """
    spans, slots = spans_of(rows, []), [row for row in rows if row[1] == "slots"]
    start_s = min((row[2] for row in (*spans, *slots)), default=0.0)
    events = [_meta("process_name", 0, name=f"asyncrl {name}")]
    made, pushed = dict[int, Event](), dict[int, Event]()
    tracks = 0
    for lane in lane_names({row[0] for row in spans}):
        free_us = list[int]()
        for row in sorted((row for row in spans if row[0] == lane), key=lambda row: (row[2], -row[3])):
            event = _complete(row, start_s)
            track = next((index for index, end in enumerate(free_us) if end <= event["ts"]), len(free_us))
            free_us[track : track + 1] = [event["ts"] + event["dur"]]
            event["tid"] = tracks + track + 1
            events.append(event)
            if row[1] == "train":
                made[row[4] + 1] = event
            elif row[1] in _PUSH:
                pushed[row[4]] = event
        for index in range(len(free_us)):
            tracks += 1
            events.append(_meta("thread_name", tracks, name=lane if index == 0 else f"{lane} ({index + 1})"))
            events.append(_meta("thread_sort_index", tracks, sort_index=tracks))
    events += _arrows(made, pushed)
    events += _counters(slots, steps, made, start_s)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_s": start_s}}


def _meta(what: str, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": _PID, "tid": tid, "args": args}


def _complete(row: Row, start_s: float) -> Event:
    lane, kind, at_s, seconds, number, _ = row
    begin_us = round(1e6 * (at_s - start_s))
    event = {"ph": "X", "name": kind, "cat": lane, "pid": _PID, "ts": begin_us}
    event["dur"] = max(0, round(1e6 * (at_s + seconds - start_s)) - begin_us)
    return event | {"args": {"text": span_text(row), "number": number}}


def _arrows(made: dict[int, Event], pushed: dict[int, Event]) -> Iterator[Event]:
    for version in made.keys() & pushed.keys():
        step, push = made[version], pushed[version]
        ends = {"name": "weights", "cat": "weights", "id": version, "pid": _PID}
        yield {**ends, "ph": "s", "tid": step["tid"], "ts": max(step["ts"], step["ts"] + step["dur"] - 1)}
        yield {**ends, "ph": "f", "bp": "e", "tid": push["tid"], "ts": push["ts"]}


def _counters(slots: list[Row], steps: Steps, made: dict[int, Event], start_s: float) -> Iterator[Event]:
    for _, _, at_s, _, _, means in slots:
        for engine, busy in means.items():
            yield _count(f"requests of {engine}", round(1e6 * (at_s - start_s)), busy=busy)
    ages = zip(*map(steps.column, ("step", "sample/staleness_mean", "sample/staleness_max")), strict=True)
    for step, mean, largest in ages:
        if (train := made.get(int(step))) is not None and mean == mean and largest == largest:
            yield _count("staleness", train["ts"] + train["dur"], mean=mean, max=largest)


def _count(name: str, ts: int, **values: float) -> Event:
    return {"ph": "C", "name": name, "pid": _PID, "tid": 0, "ts": ts, "args": values}
