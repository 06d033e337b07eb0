"""Standard output that nobody reads any more (a closed pipe or terminal, a full disk) ends nothing. Knows no words, no rooms."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any, TextIO, cast

logger = logging.getLogger(__name__)


def outliving(file: TextIO | None = None) -> TextIO:
    """`file` (default: standard output), to write to as long as that works; from then on what is written goes nowhere, and raises nothing.

    The file itself leads nowhere then, so that a flush at the end of the process cannot fail either. In the log that is told once.
    """
    return cast("TextIO", _Outliving(file or sys.stdout))


class _Outliving:
    """Looks like the file that it writes to. Life: writes there until an OSError -> drops what it is given."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file  # None: the process was started without a standard output
        self._is_lost = file is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)  # encoding, isatty: what it is decides how it is written to

    def isatty(self) -> bool:
        return self._file is not None and not self._is_lost and self._file.isatty()

    def write(self, text: str) -> int:
        if self._file is not None and not self._is_lost:
            try:
                return self._file.write(text)
            except OSError as error:
                self._lose(self._file, error)
        return len(text)

    def flush(self) -> None:
        if self._file is not None and not self._is_lost:
            try:
                self._file.flush()
            except OSError as error:
                self._lose(self._file, error)

    def _lose(self, file: TextIO, error: OSError) -> None:
        self._is_lost = True
        logger.warning("nothing is shown from here on, standard output cannot be written: %s", error)
        with contextlib.suppress(OSError):  # a file without a descriptor has nothing that could fail later
            descriptor = file.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)  # what the file still holds goes there, too
            os.close(nowhere)
