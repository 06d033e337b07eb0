"""Spans: what a part of the run did from when to when, told where it happens to whoever writes it down
(observe/timeline.py). Where nobody listens it costs a look-up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

SHORTEST_S = 0.0005
"""Seconds: a block that took less is no span."""


class TimedSpan(NamedTuple):
    """`lane`: who; `kind`: what, by the names of observe/page/lanes.py; times are of the event loop's clock
    (time.monotonic); `number`: the batch or policy_version that it is of, -1 for none.
    """

    lane: str
    kind: str
    start_s: float
    end_s: float
    number: int = -1
    text: str = ""


_listener: ContextVar[Callable[[TimedSpan], None] | None] = ContextVar("listener", default=None)


def listen_to_spans(listener: Callable[[TimedSpan], None]) -> None:
    """Tell it the spans of this task, and of all that it starts from here on."""
    _listener.set(listener)


def note_span(lane: str, kind: str, start_s: float, end_s: float, number: int = -1, text: str = "") -> None:
    """What has just ended."""
    if (listener := _listener.get()) is not None:
        listener(TimedSpan(lane, kind, start_s, end_s, number, text))


@contextlib.contextmanager
def span(lane: str, kind: str, number: int = -1) -> Iterator[None]:
    """A block that is a span, however it ends."""
    started_s = time.monotonic()
    try:
        yield
    finally:
        if (ended_s := time.monotonic()) - started_s >= SHORTEST_S:
            note_span(lane, kind, started_s, ended_s, number)
