"""Lines on standard error about work that takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_S = 5.0
EVERY_S = 30.0


@dataclass(slots=True)
class LongWork:
    """Work that may take long. Its owner sets `part`, the fraction that is done."""

    text: str
    part: float = 0.0

    def line(self, spent_s: float) -> str:
        """Describe the work after `spent_s`.

        >>> LongWork("reading rows").line(5)
        'reading rows ... 5 s'
        >>> LongWork("reading rows", part=0.2).line(35)
        'reading rows ... 35 s, about 140 s left'
        """
        line = f"{self.text} ... {spent_s:.0f} s"
        if self.part == 0:
            return line
        return f"{line}, about {spent_s / self.part - spent_s:.0f} s left"


@contextlib.contextmanager
def told_if_long(text: str) -> Iterator[LongWork]:
    """Print a line about the work in this block after FIRST_S seconds, and then every
    EVERY_S seconds. Short work prints nothing.
    """
    work = LongWork(text)
    has_ended = threading.Event()
    started_s = time.monotonic()

    def repeat() -> None:
        wait_s = FIRST_S
        while not has_ended.wait(wait_s):
            print(work.line(time.monotonic() - started_s), file=sys.stderr, flush=True)
            wait_s = EVERY_S

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield work
    finally:
        has_ended.set()
        thread.join()
