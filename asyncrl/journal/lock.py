"""One run, one writer: a lock that the kernel takes away from a process that dies. Knows no SQLite."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from asyncrl.errors import JournalError

TRIES, PAUSE_S = 3, 0.02
"""`asyncrl status` has the lock for an instant when it looks whether a run lives."""
_held: set[Path] = set()
"""Files locked by this process. Over NFS the lock is the process's: it would be given a second one here, and lose it with either."""


class RunLock:
    """The right to write into a run directory, held by one process at a time.

    Life:  made -> acquire() -> release(), or the end of the process by whatever means. Children do not inherit it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def __repr__(self) -> str:
        return f"<RunLock {self.path} {'held' if self.is_held else 'free'}>"

    @property
    def is_held(self) -> bool:
        """Whether it was acquired through this object."""
        return self._file is not None

    def acquire(self) -> RunLock:
        """Take it and write the pid into the file. Raises JournalError that names the holder, without waiting."""
        key = self.path.resolve()
        if key in _held:
            raise self._refused(os.getpid())
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._cannot(error) from error
        try:
            self._take(file)
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            holder = os.pread(file, 32, 0).decode(errors="replace").strip()
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):  # which of the two says "held" depends on the system
                raise self._refused(holder or "unknown") from None
            raise self._cannot(error) from error
        self._file = file
        _held.add(key)
        return self

    def _take(self, file: int) -> None:
        for tries_left in reversed(range(TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not tries_left:
                    raise
                time.sleep(PAUSE_S)

    def release(self) -> None:
        """Give it back; idempotent. The file stays: removing it could take it from under a waiting run."""
        if self._file is not None:
            _held.discard(self.path.resolve())
            os.close(self._file)
            self._file = None

    def _cannot(self, error: OSError) -> JournalError:
        return JournalError(
            f"{self.path} cannot be locked: {error.strerror}",
            rule="one process at a time writes into a run directory",
            way_out="see that the run directory exists, can be written, and lies on a file system with room and with locks.",
        )

    def _refused(self, holder: object) -> JournalError:
        return JournalError(
            f"process {holder} writes into {self.path.parent}",
            rule="one process at a time writes into a run directory",
            way_out=f"wait until process {holder} has ended, or end it (kill {holder}), or give this run another directory.",
        )
