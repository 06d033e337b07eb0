"""Metrics of all steps as curves of some hundred points, read once and in little memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncrl.observe.page.shape import Curve
from asyncrl.observe.recorder import is_number, tell

MAX_BUCKETS = 1024
MAX_NAMES = 512
_CHUNK = 1024
_NAN = float("nan")
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Curves:
    """Life: add() in the order of the steps -> x() and curves(). A bucket has 2^n neighbouring steps; when
    there are MAX_BUCKETS, two become one.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {"step": None, "time_s": None}
        self._rows, self._size, self._newest = array("d"), 1, -math.inf
        self._done: Numbers = np.empty((4, 0, len(self._names)))
        """Of each bucket and metric: sum, number of values, least and largest."""

    def add(self, line: Mapping[str, Any], problems: list[str]) -> None:
        """The metrics of one more step."""
        if line["step"] <= self._newest:
            tell(problems, f"step {line['step']:.0f} is there again, and is left out of the curves")
            return
        self._newest = line["step"]
        if not line.keys() <= self._names.keys():
            self._name(name for name, value in line.items() if is_number(value))
        get = line.get
        self._rows.extend([get(name, _NAN) for name in self._names])
        if len(self._rows) >= max(_CHUNK, self._size) * len(self._names):
            self._done = np.concatenate([self._done, self._buckets()], axis=1)
            self._rows = array("d")
            if self._done.shape[1] >= MAX_BUCKETS:
                self._halve()

    def x(self) -> tuple[list[float], list[float]]:
        """Steps and seconds of training of the buckets, their means."""
        sums, counts, *_ = whole = self._whole()
        means = np.divide(sums, counts, out=np.full_like(sums, _NAN), where=counts > 0)
        steps = [round(value, 1) for value in means[:, 0].tolist()]
        times_s = means[:, 1].tolist() if whole.shape[1] else []
        known = [0.0 if math.isnan(time_s) else round(time_s, 3) for time_s in times_s]
        return steps, list(np.maximum.accumulate(known).tolist()) if known else []

    def curves(self) -> dict[str, Curve]:
        """All metrics by name."""
        sums, counts, lows, highs = self._whole()
        means = np.divide(sums, counts, out=np.full_like(sums, _NAN), where=counts > 0)
        found = dict[str, Curve]()
        for index, name in enumerate(self._names):
            if name == "step" or not counts[:, index].any():
                continue
            found[name] = {"mean": _short(means[:, index])}
            if self._size > 1:
                found[name] |= {"low": _short(lows[:, index]), "high": _short(highs[:, index])}
        return found

    def _name(self, names: Any) -> None:
        """Make room for metrics that come for the first time."""
        before = len(self._names)
        self._names |= dict.fromkeys(list(names)[: MAX_NAMES - before])
        if more := len(self._names) - before:
            rows = np.frombuffer(self._rows).reshape(-1, before)
            self._rows = array("d", np.pad(rows, ((0, 0), (0, more)), constant_values=_NAN).tobytes())
            room = np.zeros((4, self._done.shape[1], more))
            room[2:] = _NAN
            self._done = np.concatenate([self._done, room], axis=2)

    def _buckets(self) -> Numbers:
        """The rows that wait, the last bucket may be smaller."""
        rows = np.frombuffer(self._rows).reshape(-1, len(self._names))
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

    def _whole(self) -> Numbers:
        return np.concatenate([self._done, self._buckets()], axis=1)


def _short(values: Numbers) -> list[float | None]:
    """With six digits, null for no value."""
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]
