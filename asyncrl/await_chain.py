"""Where a coroutine stands, down to what it waits for. Knows Python's frames alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any


def await_chain(awaitable: Any) -> Iterator[FrameType]:
    """Frames from a coroutine down to what it waits for, outermost first."""
    while awaitable is not None:
        for frame_name, next_name in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
            if hasattr(awaitable, frame_name):
                frame = getattr(awaitable, frame_name)
                if frame is not None:
                    yield frame
                awaitable = getattr(awaitable, next_name)
                break
        else:
            return
