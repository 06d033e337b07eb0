"""Staging folders of weights, locked by their owner so that later processes can remove stale ones.

Unlike a pid, the lock works across containers. On disk the name begins with the host's.
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

from asyncrl.base.errors import ConfigError, RoomError

LOCK = "lock"
_GONE = ".gone"
"""Suffix during removal; the name pattern still matches."""
_held: dict[Path, int] = {}
"""This process's folders with their lock descriptors."""


def shared_memory_root() -> Path:
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def disk_root(disk_dir: str | None) -> Path | None:
    """Create and return weight_sync.disk_dir, or None. Raises ConfigError. Blocks."""
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
    """Make a staging folder, owned until the end of this process. Raises RoomError. Blocks."""
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
        shutil.rmtree(folder, ignore_errors=True)  # another process removed it before it was locked


def remove_staging_dir(folder: Path) -> None:
    if (lock := _held.pop(folder, None)) is not None:
        _remove(folder, lock)


def clear_stale_staging(disk_dir: Path | None = None) -> list[Path]:
    """Remove and return unlocked folders. Blocks."""
    removed = []
    for path in (disk_dir or shared_memory_root()).glob(f"{_pattern(disk_dir)}/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or being removed
            if path.parent not in _held and (lock := _lock(path)) is not None:
                _remove(path.parent, lock)
                removed.append(path.parent)
    return removed


def clear_own_staging() -> None:
    for folder in list(_held):
        remove_staging_dir(folder)


def _pattern(disk_dir: Path | None) -> str:
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    return "asyncrl-*" if disk_dir is None else f"asyncrl-{host}-*"


def _lock(path: Path) -> int | None:
    """Lock the file; None if another process holds or removed it. Raises OSError."""
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
    try:
        with contextlib.suppress(OSError):
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
