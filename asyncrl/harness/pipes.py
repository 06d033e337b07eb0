"""What a command reads and writes, without waiting for its end: whoever else holds a pipe cannot hold us. Knows no process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from types import TracebackType

_CHUNK_BYTES = 2**16


class InputPipe:
    """A pipe whose writing end is ours, and what is to be read from it: once, and by one reader, for a pipe keeps nothing.

    Life:       with block entered: both ends open -> given to a process, close_reading_end() -> feed() writes as it is read, and closes
                -> block left: closed, whatever was not read.
    """

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.reading_end = self._writing_end = -1
        self._is_fed = False

    def __enter__(self) -> InputPipe:
        self.reading_end, self._writing_end = os.pipe()
        os.set_blocking(self._writing_end, False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close_reading_end()
        self._close()

    def close_reading_end(self) -> None:
        """Ours; the process has its own. Idempotent."""
        if self.reading_end >= 0:
            os.close(self.reading_end)
            self.reading_end = -1

    def feed(self) -> None:
        """Write what there is room for, now and whenever there is more; that nobody reads it is no error."""
        try:
            self._data = self._data[os.write(self._writing_end, self._data) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._data = self._data[:0]
        if not self._data:
            self._close()
        elif not self._is_fed:
            asyncio.get_running_loop().add_writer(self._writing_end, self.feed)
            self._is_fed = True

    def _close(self) -> None:
        if self._is_fed:
            asyncio.get_running_loop().remove_writer(self._writing_end)
            self._is_fed = False
        if self._writing_end >= 0:
            os.close(self._writing_end)
            self._writing_end = -1


class OutputPipe:
    """A pipe whose reading end is ours.

    Life:       with block entered: both ends open -> given to a process, close_writing_end() -> read() -> drain() once the process has
                exited: the rest of what it wrote -> block left: closed, and whoever still writes gets SIGPIPE.
    Invariant:  holds max_bytes and one chunk at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._data = bytearray()
        self._reading_end = self.writing_end = -1
        self._is_read = False

    def __enter__(self) -> OutputPipe:
        self._reading_end, self.writing_end = os.pipe()
        os.set_blocking(self._reading_end, False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close_writing_end()
        self._stop()
        os.close(self._reading_end)

    @property
    def is_over(self) -> bool:
        """More than max_bytes came."""
        return len(self._data) > self.max_bytes

    def text(self) -> str:
        """What came, as UTF-8; what is none is replaced."""
        return self._data.decode("utf-8", errors="replace")

    def close_writing_end(self) -> None:
        """Ours; the process has its own. Idempotent."""
        if self.writing_end >= 0:
            os.close(self.writing_end)
            self.writing_end = -1

    def read(self, on_overflow: Callable[[], None]) -> None:
        """Read as it comes; `on_overflow` is called once there is too much, and no more is read."""

        def readable() -> None:
            if not self._read_once() or self.is_over:
                self._stop()
            if self.is_over:
                on_overflow()

        asyncio.get_running_loop().add_reader(self._reading_end, readable)
        self._is_read = True

    def drain(self) -> None:
        """Take what has been written by now."""
        self._stop()
        with contextlib.suppress(BlockingIOError):
            while not self.is_over and self._read_once():
                pass

    def _read_once(self) -> bool:
        """False at the end of all writers."""
        chunk = os.read(self._reading_end, _CHUNK_BYTES)
        self._data += chunk
        return bool(chunk)

    def _stop(self) -> None:
        if self._is_read:
            asyncio.get_running_loop().remove_reader(self._reading_end)
            self._is_read = False
