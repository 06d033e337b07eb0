"""Metrics of all steps as curves of at most MAX_BUCKETS points."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.observe.page.shape import Curve
from asyncrl.observe.run_numbers import Steps

MAX_BUCKETS = 1024
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def curves_of(steps: Steps) -> dict[str, Curve]:
    """Return all metrics by name; `step` and `time_s` are the x values."""
    size = 1 + (len(steps) - 1) // MAX_BUCKETS
    return {name: _curve(np.array(steps.column(name)), size) for name in steps.names} if len(steps) else {}


def _curve(values: Numbers, size: int) -> Curve:
    """Take means of `size` neighboring steps; the last bucket may be smaller."""
    if size == 1:
        return {"mean": _short(values)}
    starts = np.arange(0, len(values), size)
    sums = np.add.reduceat(np.nan_to_num(values), starts)
    counts = np.add.reduceat((~np.isnan(values)).astype(np.float64), starts)
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    lows = np.fmin.reduceat(values, starts)
    return {"mean": _short(means), "low": _short(lows), "high": _short(np.fmax.reduceat(values, starts))}


def _short(values: Numbers) -> list[float | None]:
    """Round to six digits; return None without a value."""
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]
