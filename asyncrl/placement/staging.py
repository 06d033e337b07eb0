"""The run's folder in shared memory, or on a disk: held by a lock of its owner, so that a later run can clear
what a killed one left.

The kernel gives the lock back when its owner ends, and knows it from any container: a pid means nothing in
another one, and a start time nothing once the clock was set. A folder without a lock is left alone, so it is
never too early to look: what is made gets its folder first, then the file, then the lock, and whoever made it
looks whether it is still there. A disk may be that of several machines, whose locks need not know of each
other: there the name begins with the host's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import uuid
from pathlib import Path

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import ConfigError, RoomError

PREFIX = "asyncrl-"
LOCK = "lock"
_GONE = ".gone"
"""End of the name of one that is being removed: the pattern of the names finds it still."""
_held: dict[Path, int] = {}
"""The folders of this process, and the descriptors that hold them."""


def shared_memory_root() -> Path:
    """/dev/shm where there is one, else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def disk_root(weight_sync: WeightSyncConfig) -> Path | None:
    """The folder that weight_sync.disk_dir names, made if it is not there; None for shared memory. Raises
    ConfigError. Blocks.
    """
    if weight_sync.disk_dir is None:
        return None
    folder = Path(weight_sync.disk_dir).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"weight_sync.disk_dir={weight_sync.disk_dir} cannot be made: {error}",
            rule="the trainer writes each version there",
            way_out="name a folder on a file system that trainer and engines share, and that this user may "
            "write to.",
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"weight_sync.disk_dir={weight_sync.disk_dir} cannot be written to",
            rule="the trainer writes each version there",
            way_out="name a folder that this user may write to.",
        )
    return folder


def new_staging_dir(disk_dir: Path | None = None) -> Path:
    """Make a staging folder, which is ours until remove_staging_dir or the end of this process. Raises
    RoomError. Blocks.
    """
    root = _root(disk_dir)
    while True:
        folder = root / f"{_prefix(disk_dir)}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir(mode=0o700)
            lock = _lock(folder / LOCK, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise RoomError(
                "placement",
                f"cannot make a folder for weights in {root}: {error.strerror}",
                rule="a run makes one there, and locks it",
                way_out="free space there, or check its rights."
                if disk_dir is None
                else "name another weight_sync.disk_dir.",
            ) from error
        if lock is not None:
            _held[folder] = lock
            return folder
        shutil.rmtree(
            folder, ignore_errors=True
        )  # taken for an old one before it was locked, and removed or about to be


def remove_staging_dir(folder: Path) -> None:
    """Remove a folder of ours. Blocks."""
    if (lock := _held.pop(folder, None)) is not None:
        _remove(folder, lock)


def clear_stale_staging(disk_dir: Path | None = None) -> list[Path]:
    """Remove the folders that no process holds any more; returns them. Blocks."""
    removed = []
    for path in _root(disk_dir).glob(f"{_prefix(disk_dir)}*/{LOCK}"):
        if path.parent in _held:
            continue
        with contextlib.suppress(OSError):  # another user's, or it is being removed
            if (lock := _lock(path)) is not None:
                _remove(path.parent, lock)
                removed.append(path.parent)
    return removed


def clear_own_staging() -> None:
    """Remove this process's own folders: for an end so abrupt that nothing else gets to it."""
    for folder in list(_held):
        remove_staging_dir(folder)


def _root(disk_dir: Path | None) -> Path:
    return shared_memory_root() if disk_dir is None else disk_dir


def _prefix(disk_dir: Path | None) -> str:
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    return PREFIX if disk_dir is None else f"{PREFIX}{host}-"


def _lock(path: Path, flags: int = 0) -> int | None:
    """The descriptor that holds the file until it is closed, which no child inherits; None if somebody else
    has it or removed it.

    Raises OSError, above all where the file system knows no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _remove(folder: Path, lock: int) -> None:
    """The lock goes last: who is killed in the middle leaves a folder that the next one removes.

    It is renamed first: a process that ends late finds it no more, and writes nothing into it while it is
    removed.
    """
    try:
        with contextlib.suppress(OSError):  # it is gone already, or what is left is for the next one
            if not folder.name.endswith(_GONE):
                folder = folder.rename(folder.with_name(folder.name + _GONE))
            for path in [path for path in folder.iterdir() if path.name != LOCK]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
                    missing_ok=True
                )
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
    finally:
        os.close(lock)
