"""Lines on standard error about work that takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

FIRST_S = 5.0
EVERY_S = 30.0


class LongWork:
    """Work that may take long. Its owner sets `part` to the fraction that is done."""

    def __init__(self, text: str) -> None:
        self.part = 0.0
        self._text = text
        self._started_s = time.monotonic()

    def line(self, now_s: float) -> str:
        """Describe the work so far.

        >>> work = LongWork("reading task.files")
        >>> work.line(work._started_s + 5)
        'reading task.files ... 5 s'
        >>> work.part = 0.2
        >>> work.line(work._started_s + 35)
        'reading task.files ... 35 s, 20% done, about 140 s left'
        """
        spent_s = now_s - self._started_s
        line = f"{self._text} ... {spent_s:.0f} s"
        if self.part > 0:
            left_s = spent_s / self.part - spent_s
            line += f", {self.part:.0%} done, about {left_s:.0f} s left"
        return line


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads, or it is closed
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def told_if_long(
    text: str, tell: Callable[[str], None] = _to_stderr
) -> Iterator[LongWork]:
    """Tell a line about the work in this block after FIRST_S seconds, and then every
    EVERY_S seconds. Short work tells nothing.
    """
    work = LongWork(text)
    has_ended = threading.Event()

    def repeat() -> None:
        wait_s = FIRST_S
        while not has_ended.wait(wait_s):
            tell(work.line(time.monotonic()))
            wait_s = EVERY_S

    thread = threading.Thread(target=repeat, name=text, daemon=True)
    thread.start()
    try:
        yield work
    finally:
        has_ended.set()
        thread.join()
