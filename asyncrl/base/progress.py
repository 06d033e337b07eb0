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
    """Work that may take long. Its owner counts `num_done`, of `total` if it is known."""

    text: str
    total: int = 0
    num_done: int = 0

    def count(self) -> None:
        self.num_done += 1

    def line(self, spent_s: float) -> str:
        """Describe the work after `spent_s`.

        >>> LongWork("reading rows").line(5)
        'reading rows ... 5 s'
        >>> LongWork("reading rows", total=100, num_done=20).line(35)
        'reading rows: 20 of 100 ... 35 s, about 140 s left'
        """
        share = f": {self.num_done} of {self.total}" if self.total else ""
        line = f"{self.text}{share} ... {spent_s:.0f} s"
        if self.num_done == 0:
            return line
        left_s = spent_s * (self.total - self.num_done) / self.num_done
        return f"{line}, about {left_s:.0f} s left"


@contextlib.contextmanager
def told_if_long(text: str, total: int = 0) -> Iterator[LongWork]:
    """Print a line about the work in this block after FIRST_S seconds, and then every
    EVERY_S seconds. Short work prints nothing.
    """
    work = LongWork(text, total)
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
