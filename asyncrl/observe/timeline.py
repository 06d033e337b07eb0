"""timeline.jsonl: spans of all processes, for the page of a run and for Perfetto.

A line is a JSON array: [lane, kind, start, seconds, number, text]. `start` is in seconds since the epoch,
`number` the batch or policy_version, -1 for none. Lines of lane "" are "slots": their text is an object of
each engine's requests in flight, the mean over those seconds; and "thinned": what began earlier is not whole.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.base.spans import TimedSpan
from asyncrl.observe.run_dir import TIMELINE_FILE, append_lines, is_number, parse, read_values, tell

MAX_BYTES = 2 * 2**20
"""Limit of the file. A step takes some 300 to 600 bytes, a second of a slow step 50 and 20 an engine."""
SLOTS_PERIOD_S = 0.1
"""Least seconds between two lines of slots."""
LARGEST_STEP_S = 1.0
"""A clock of the day that is off by more was set, or the machine slept."""

logger = logging.getLogger("asyncrl.observe.timeline")
Row = tuple[str, str, float, float, int, Any]


class TimelineWriter:
    """Writes the time line of a run. Life: made -> open() when the run may write -> note(), slots() ->
    close(). Earlier notes are written by open().

    A file above MAX_BYTES is shortened by a quarter. A kill loses the notes since the last slots(). An
    OSError ends the time line with a warning in the log.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TIMELINE_FILE
        self._is_open = False
        self._is_refused = False
        self._rows: list[Row] = []
        self._offset_s = time.time() - time.monotonic()
        self._busy_s = dict[str, float]()
        self._busy_at_s = time.monotonic()

    def open(self) -> None:
        """Start to write; idempotent."""
        self._is_open = True
        self._write()

    def note(self, span: TimedSpan) -> None:
        """Add a span; slots() writes it."""
        seconds = round(span.end_s - span.start_s, 6)
        text = span.text.encode(errors="replace").decode()  # JSON has no lone surrogates
        self._add(span.lane, span.kind, span.start_s, seconds, span.number, text)

    def slots(self, busy_s: Mapping[str, float], now_s: float) -> None:
        """Add the mean requests of each engine. `busy_s`: seconds of all its requests so far."""
        if (seconds := now_s - self._busy_at_s) < SLOTS_PERIOD_S:
            return
        if self._busy_s:
            means = {
                name: round((busy_s[name] - before_s) / seconds, 2)
                for name, before_s in self._busy_s.items()
                if name in busy_s
            }
            self._add("", "slots", self._busy_at_s, round(seconds, 6), -1, means)
        self._busy_s = dict(busy_s)
        self._busy_at_s = now_s
        self._write()

    def close(self) -> None:
        """Write the remaining rows; idempotent."""
        self._write()
        self._is_open = False

    def _add(self, lane: str, kind: str, start_s: float, seconds: float, number: int, text: Any) -> None:
        if self._is_refused:
            return
        offset_s = time.time() - time.monotonic()
        if abs(offset_s - self._offset_s) > LARGEST_STEP_S:
            self._offset_s = offset_s
        self._rows.append((lane, kind, round(start_s + self._offset_s, 6), seconds, number, text))

    def _write(self) -> None:
        if not self._is_open or self._is_refused:
            return
        try:
            append_lines(self._path, self._rows)
            if self._path.stat().st_size > MAX_BYTES:
                _thin_file(self._path)
        except OSError as error:
            logger.warning("%s gets no more lines: %s", self._path, error)
            self._is_refused = True
        self._rows = []


def _thin_file(path: Path) -> None:
    """Keep the newer half of the bytes, and half of the older rows."""
    content = path.read_bytes()
    cut = content.index(b"\n", len(content) // 2) + 1
    old = _thinned([_as_row(row) for row in map(parse, content[:cut].splitlines()) if _is_row(row)])
    lines = "".join(json.dumps(row) + "\n" for row in old)
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_bytes(lines.encode() + content[cut:])
    unfinished.replace(path)


def _thinned(rows: list[Row]) -> list[Row]:
    """Keep the longer half of the spans and merge neighboring slots; a first row marks this."""
    spans, slots = [row for row in rows if row[0]], [row for row in rows if row[1] == "slots"]
    longest = sorted(spans, key=lambda row: -row[3])[: len(spans) // 2]
    kept = sorted([*longest, *merged_slots(slots, max(1, len(slots) // 2))], key=lambda row: row[2])
    return [("", "thinned", max((row[2] for row in rows), default=0.0), 0.0, -1, ""), *kept]


def merged_slots(rows: list[Row], num: int) -> list[Row]:
    """Merge rows of slots to at most `num`, each the mean of its time."""
    size = max(1, -(-len(rows) // num))
    return [_merged(rows[first : first + size]) for first in range(0, len(rows), size)]


def _merged(rows: list[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    seconds = sum(row[3] for row in rows)
    sums = dict[str, float]()
    for row in rows:
        for name, busy in row[5].items():
            sums[name] = sums.get(name, 0.0) + busy * row[3]
    means = {name: round(busy_s / seconds, 2) for name, busy_s in sums.items()} if seconds else rows[0][5]
    return "", "slots", rows[0][2], round(seconds, 6), -1, means


def read_timeline(path: Path, problems: list[str]) -> list[Row]:
    """Return all rows, in the order of their ends."""
    found = list[Row]()
    for row in read_values(path, problems, list):
        if _is_row(row):
            found.append(_as_row(row))
        else:
            tell(problems, f"a line of {path.name} is no span and is left out")
    return found


def _as_row(row: list[Any]) -> Row:
    return row[0], row[1], row[2], row[3], row[4], row[5]


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or [type(value) for value in (*row[:2], *row[4:5])] != [str, str, int]:
        return False
    if len(row) != 6 or not (is_number(row[2]) and is_number(row[3]) and row[3] >= 0):
        return False
    if row[1] == "slots" and not row[0]:
        return isinstance(row[5], dict) and all(map(is_number, row[5].values()))
    return type(row[5]) is str
