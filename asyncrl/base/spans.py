"""Timed activities of the run, reported to a listener (observe/timeline.py)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

SHORTEST_S = 0.0005


class TimedSpan(NamedTuple):
    """`lane`: actor; `kind`: activity (observe/timeline.py); times are time.monotonic; `number`: batch or
    policy_version, or -1.
    """

    lane: str
    kind: str
    start_s: float
    end_s: float
    number: int = -1
    text: str = ""


_listener: ContextVar[Callable[[TimedSpan], None] | None] = ContextVar("listener", default=None)


def listen_to_spans(listener: Callable[[TimedSpan], None]) -> None:
    """Report spans of this task and its later child tasks."""
    _listener.set(listener)


def note_span(lane: str, kind: str, start_s: float, end_s: float, number: int = -1, text: str = "") -> None:
    if (listener := _listener.get()) is not None:
        listener(TimedSpan(lane, kind, start_s, end_s, number, text))


@contextlib.contextmanager
def span(lane: str, kind: str, number: int = -1) -> Iterator[None]:
    started_s = time.monotonic()
    try:
        yield
    finally:
        if (ended_s := time.monotonic()) - started_s >= SHORTEST_S:
            note_span(lane, kind, started_s, ended_s, number)
