"""timeline.jsonl: what ran when, for the page of a run and for Perfetto. Written while the run goes.

A line is a JSON array: [lane, kind, start, seconds, number, text]. `start` is in seconds since the epoch,
`number` the batch or policy_version, -1 for none. Lines of lane "" are "slots": their text is an object of
each engine's requests in flight, the mean over those seconds; and "thinned": what began earlier is not whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.files import lines_from_end
from asyncrl.observe.run_dir import TIMELINE_FILE, is_number, parse, read_values, tell
from asyncrl.spans import TimedSpan

MAX_BYTES = 2 * 2**20
"""Of the file. A step takes some 300 to 600 bytes, a second of a slow step 50 and 20 an engine."""
SLOTS_PERIOD_S = 0.1
"""Least seconds between two lines of slots."""
LARGEST_STEP_S = 1.0
"""A clock of the day that is off by more was set, or the machine slept."""

logger = logging.getLogger("asyncrl.observe.timeline")
Row = tuple[str, str, float, float, int, Any]


class TimelineWriter:
    """The file of one run. Life: made -> open() once the run may write -> note(), slots() -> close(). What is
    noted before open() is written then.

    Bound: a file of MAX_BYTES is written anew, a quarter shorter. Kill: what was written up to the
    last slots() is there; the next life writes on.
    A disk that refuses ends the time line, with a warning in the log, and not the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TIMELINE_FILE
        self._file: Any = None
        self._lines, self._num_bytes = list[str](), 0
        self._offset_s = time.time() - time.monotonic()
        self._busy_s, self._busy_at_s = dict[str, float](), time.monotonic()

    def open(self) -> None:
        """Begin to write; idempotent."""
        with self._no_more_if_refused():
            if self._file is None:
                _, last = next(lines_from_end(self._path), (0, b"")) if self._path.exists() else (0, b"")
                self._file = self._path.open("a", encoding="utf-8")
                if last and not last.endswith(b"\n"):  # of a process that was killed
                    self._file.write("\n")
                self._num_bytes = self._path.stat().st_size
            self._write()

    def note(self, span: TimedSpan) -> None:
        """One more span; written with the next slots()."""
        seconds = round(span.end_s - span.start_s, 6)
        text = span.text.encode(errors="replace").decode()  # no lone surrogates, which JSON has no place for
        self._add(span.lane, span.kind, span.start_s, seconds, span.number, text)

    def slots(self, busy_s: Mapping[str, float], now_s: float) -> None:
        """`busy_s`: seconds so far that each engine had requests, summed over them."""
        if (seconds := now_s - self._busy_at_s) < SLOTS_PERIOD_S:
            return
        if self._busy_s:
            means = {
                name: round((busy_s[name] - before_s) / seconds, 2)
                for name, before_s in self._busy_s.items()
                if name in busy_s
            }
            self._add("", "slots", self._busy_at_s, round(seconds, 6), -1, means)
        self._busy_s, self._busy_at_s = dict(busy_s), now_s
        if self._file is not None:
            with self._no_more_if_refused():
                self._write()

    def close(self) -> None:
        """Write what is left; idempotent."""
        if self._file is not None:
            with self._no_more_if_refused():
                self._write()
                self._file.close()
            self._file = None

    def _add(self, lane: str, kind: str, start_s: float, seconds: float, number: int, text: Any) -> None:
        offset_s = time.time() - time.monotonic()
        if abs(offset_s - self._offset_s) > LARGEST_STEP_S:
            self._offset_s = offset_s
        row = (lane, kind, round(start_s + self._offset_s, 6), seconds, number, text)
        self._lines.append(json.dumps(row, separators=(",", ":")) + "\n")

    def _write(self) -> None:
        lines = "".join(self._lines)
        self._lines.clear()
        self._file.write(lines)
        self._file.flush()
        self._num_bytes += len(lines)  # json.dumps writes ASCII
        if self._num_bytes > MAX_BYTES:
            self._file.close()
            _thin_file(self._path)
            self._file = self._path.open("a", encoding="utf-8")
            self._num_bytes = self._path.stat().st_size

    @contextlib.contextmanager
    def _no_more_if_refused(self) -> Any:
        try:
            yield
        except OSError as error:
            logger.warning("%s gets no more lines: %s", self._path, error)
            self._lines.clear()
            self._num_bytes = -(10**15)
            self._file = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


def _thin_file(path: Path) -> None:
    """The newer half of its bytes stays as it is, of the older one half."""
    content = path.read_bytes()
    cut = content.index(b"\n", len(content) // 2) + 1
    old = _thinned([_as_row(row) for row in map(parse, content[:cut].splitlines()) if _is_row(row)])
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in old)
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_bytes(lines.encode() + content[cut:])
    unfinished.replace(path)


def _thinned(rows: list[Row]) -> list[Row]:
    """Half of them: two neighbours of slots as one, and the longer spans; behind a row that says so."""
    spans, slots = [row for row in rows if row[0]], [row for row in rows if row[1] == "slots"]
    longest = sorted(spans, key=lambda row: -row[3])[: len(spans) // 2]
    kept = sorted([*longest, *merged_slots(slots, max(1, len(slots) // 2))], key=lambda row: row[2])
    return [("", "thinned", max((row[2] for row in rows), default=0.0), 0.0, -1, ""), *kept]


def merged_slots(rows: list[Row], num: int) -> list[Row]:
    """At most `num` rows of slots, each the mean over the time of neighbours."""
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
