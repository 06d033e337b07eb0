"""Staging: the folders in which weights lie on their way, in shared memory or on a disk. Each is held by a
lock of its owner, so that a later process can clear what a killed one left.

The kernel releases the lock when its owner ends. The lock is seen from every container, where a pid means
nothing. A folder without a lock file is left alone. A new folder that is removed before it is locked is
made again. On a disk the name begins with the host's, because machines may not see each other's locks.
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

from asyncrl.errors import ConfigError, RoomError

LOCK = "lock"
_GONE = ".gone"
"""End of the name of one that is being removed: the pattern of the names finds it still."""
_held: dict[Path, int] = {}
"""The folders of this process, and the descriptors that hold them."""


def shared_memory_root() -> Path:
    """/dev/shm where there is one, else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def disk_root(disk_dir: str | None) -> Path | None:
    """The folder that weight_sync.disk_dir names, made if it is not there; None for shared memory. Raises
    ConfigError. Blocks.
    """
    if disk_dir is None:
        return None
    folder = Path(disk_dir).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        what = f"weight_sync.disk_dir={disk_dir} cannot be made or written to: {error}"
        way_out = "name a folder that trainer and engines share, and that this user may write to."
        raise ConfigError(what, way_out=way_out) from error
    return folder


def new_staging_dir(disk_dir: Path | None = None) -> Path:
    """Make a staging folder, which is ours until remove_staging_dir or the end of this process. Raises
    RoomError. Blocks.
    """
    while True:
        name = _pattern(disk_dir).replace("*", f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
        folder = (disk_dir or shared_memory_root()) / name
        try:
            folder.mkdir(mode=0o700)
            (folder / LOCK).touch(mode=0o600)
            lock = _lock(folder / LOCK)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            what = f"cannot make the folder {folder} for weights, and lock it: {error.strerror}"
            way_out = "free space there, check its rights, or name another weight_sync.disk_dir."
            raise RoomError("placement", what, way_out=way_out) from error
        if lock is not None:
            _held[folder] = lock
            return folder
        shutil.rmtree(folder, ignore_errors=True)  # it was taken for an old one before it was locked


def remove_staging_dir(folder: Path) -> None:
    """Remove a folder of ours. Blocks."""
    if (lock := _held.pop(folder, None)) is not None:
        _remove(folder, lock)


def clear_stale_staging(disk_dir: Path | None = None) -> list[Path]:
    """Remove the folders that no process holds any more; returns them. Blocks."""
    removed = []
    for path in (disk_dir or shared_memory_root()).glob(f"{_pattern(disk_dir)}/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or it is being removed
            if path.parent not in _held and (lock := _lock(path)) is not None:
                _remove(path.parent, lock)
                removed.append(path.parent)
    return removed


def clear_own_staging() -> None:
    """Remove this process's own folders; for an end so abrupt that no other cleanup runs."""
    for folder in list(_held):
        remove_staging_dir(folder)


def _pattern(disk_dir: Path | None) -> str:
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    return "asyncrl-*" if disk_dir is None else f"asyncrl-{host}-*"


def _lock(path: Path) -> int | None:
    """The descriptor that holds the file until it is closed, which no child inherits; None if another process
    has it or removed it. Raises OSError, above all where the file system knows no locks.
    """
    descriptor, is_ours = os.open(path, os.O_RDWR | os.O_CLOEXEC), False
    try:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(descriptor), path.stat())
    finally:
        if not is_ours:
            os.close(descriptor)
    return descriptor if is_ours else None


def _remove(folder: Path, lock: int) -> None:
    """The lock goes last: a process that is killed in the middle leaves a folder that the next one removes.

    It is renamed first: a process that ends late finds it no more, and writes nothing into it meanwhile.
    """
    try:
        with contextlib.suppress(OSError):  # it is gone already, or what is left is for the next one
            if not folder.name.endswith(_GONE):
                folder = folder.rename(folder.with_name(folder.name + _GONE))
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != LOCK:
                    path.unlink(missing_ok=True)
            shutil.rmtree(folder)
    finally:
        os.close(lock)
