"""Metrics of all steps as curves of some hundred points, read once and in little memory."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Mapping
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.observe.page.shape import Curve
from asyncrl.observe.recorder import METRICS_FILE, Position, is_number, metrics_of, tell
from asyncrl.observe.run_numbers import COLUMNS, Steps

MAX_BUCKETS = 1024
MAX_NAMES = 512
_CHUNK = 1024
_NAN = float("nan")
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class StepsFile:
    """metrics.jsonl as it grows: read() goes on where the last one ended, and begins anew where what it has
    read was cut off or replaced, as by a resume.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_FILE
        self._begin()

    def read(self, problems: list[str]) -> tuple[Steps, Curves]:
        """All steps so far, in both forms; `problems` grows."""
        if not self._at.is_in(self._path):
            self._begin()
        for line in metrics_of(self._path, self._problems, "step", at=self._at):
            self._curves.add(line, self._problems)
        problems += self._problems
        if self._path.is_file() and self._path.stat().st_size > self._at.num_bytes:
            tell(problems, f"{self._path.name} ends in half a line, which is left out")
        steps, curves = copy.deepcopy((self._steps, self._curves))  # of which more steps may come
        curves.close()
        return steps, curves

    def _begin(self) -> None:
        self._at, self._problems, self._steps = Position(), list[str](), Steps()
        self._curves = Curves(self._steps)


class Curves:
    """Life: add() in the order of the steps -> close() -> x() and curves(). A bucket has 2^n neighbouring
    steps; when there are MAX_BUCKETS, two become one. A line of a step that is there already takes the place
    of all from there on. `steps` gets the same lines, a thousand at a time.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._names: dict[str, None] = {"step": None, "time_s": None}
        self._get_all = itemgetter(*self._names)
        self._rows, self._size, self._newest = array("d"), 1, -math.inf
        self._done: Numbers = np.empty((4, 0, len(self._names)))
        """Of each bucket and metric: sum, number of values, least and largest."""

    def add(self, line: Mapping[str, Any], problems: list[str]) -> None:
        """The metrics of one more step."""
        while self._rows and self._rows[-len(self._names)] >= line["step"]:
            del self._rows[-len(self._names) :]
        if self._newest >= line["step"]:
            tell(problems, f"step {line['step']:.0f} is there again, far behind, and is left out")
            return
        self._steps.last = line
        row = self._row_of(line)  # it may put another array in the place of _rows
        self._rows.fromlist(row)
        if len(self._rows) >= max(_CHUNK, self._size) * len(self._names):
            self._newest = line["step"]
            self.close()
            while self._done.shape[1] >= MAX_BUCKETS:
                self._halve()

    def close(self) -> None:
        """No step comes any more."""
        rows, names = self._waiting(), list(self._names)
        known = [index for index, name in enumerate(COLUMNS) if name in self._names]
        columns = np.full((len(rows), len(COLUMNS)), _NAN)
        columns[:, known] = rows[:, [names.index(COLUMNS[index]) for index in known]]
        self._steps.add_rows(columns.tobytes())
        self._done = np.concatenate([self._done, self._buckets()], axis=1)
        self._rows = array("d")

    def x(self) -> tuple[list[float], list[float]]:
        """Steps and seconds of training of the buckets, their means."""
        sums, counts, *_ = self._done
        means = np.divide(sums, counts, out=np.full_like(sums, _NAN), where=counts > 0)
        steps = [round(value, 1) for value in means[:, 0].tolist()]
        times_s = np.maximum.accumulate(np.nan_to_num(means[:, 1]))
        return steps, [round(time_s, 3) for time_s in times_s.tolist()]

    def curves(self) -> dict[str, Curve]:
        """All metrics by name."""
        sums, counts, lows, highs = self._done
        means = np.divide(sums, counts, out=np.full_like(sums, _NAN), where=counts > 0)
        found = dict[str, Curve]()
        for index, name in enumerate(self._names):
            if name == "step" or not counts[:, index].any():
                continue
            found[name] = {"mean": _short(means[:, index])}
            if self._size > 1:
                found[name] |= {"low": _short(lows[:, index]), "high": _short(highs[:, index])}
        return found

    def _row_of(self, line: Mapping[str, Any]) -> list[float]:
        """Its values in the order of the names, NaN for one that it lacks."""
        try:
            row = self._get_all(line)  # in C: most lines have what the one before had
        except KeyError:
            row = ()
        if len(row) == len(line):
            return [*row]
        if not line.keys() <= self._names.keys():
            self._name(name for name, value in line.items() if is_number(value))
        return list(map(line.get, self._names, repeat(_NAN)))

    def _name(self, names: Any) -> None:
        """Make room for metrics that come for the first time."""
        before = len(self._names)
        self._names |= dict.fromkeys(list(names)[: MAX_NAMES - before])
        self._get_all = itemgetter(*self._names)
        if more := len(self._names) - before:
            rows = np.frombuffer(self._rows).reshape(-1, before)  # not yet with the new ones
            self._rows = array("d", np.pad(rows, ((0, 0), (0, more)), constant_values=_NAN).tobytes())
            room = np.zeros((4, self._done.shape[1], more))
            room[2:] = _NAN
            self._done = np.concatenate([self._done, room], axis=2)

    def _buckets(self) -> Numbers:
        """The rows that wait, the last bucket may be smaller."""
        rows = self._waiting()
        starts = np.arange(0, len(rows), self._size)
        if not len(rows):
            return np.empty((4, 0, len(self._names)))
        is_there = ~np.isnan(rows)
        return np.stack(
            [
                np.add.reduceat(np.where(is_there, rows, 0.0), starts),
                np.add.reduceat(is_there.astype(np.float64), starts),
                np.fmin.reduceat(rows, starts),
                np.fmax.reduceat(rows, starts),
            ]
        )

    def _halve(self) -> None:
        first, second = self._done[:, 0::2], self._done[:, 1::2]
        together = first[:2] + second[:2]
        lows, highs = np.fmin(first[2], second[2]), np.fmax(first[3], second[3])
        self._done, self._size = np.concatenate([together, [lows, highs]]), 2 * self._size

    def _waiting(self) -> Numbers:
        return np.frombuffer(self._rows).reshape(-1, len(self._names))


def _short(values: Numbers) -> list[float | None]:
    """With six digits, null for no value."""
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]
