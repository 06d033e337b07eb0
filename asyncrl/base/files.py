"""Durable, atomic file operations. Everything here blocks and raises OSError."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from asyncrl.base.errors import ComponentError, JournalError

_BLOCK = 2**16


def sync(path: Path) -> None:
    # fsync works on any descriptor of the file, and a directory can only be opened for
    # reading.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    paths = list(folder.rglob("*"))
    for path in [*filter(Path.is_file, paths), *filter(Path.is_dir, paths), folder]:
        sync(path)


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, whole line), last line first, reading only as far as needed."""
    with path.open("rb") as file:
        begin, held = file.seek(0, os.SEEK_END), b""
        while begin:
            # Blocks grow with the unfinished line: with a fixed size, one line of n
            # bytes would be copied n / _BLOCK times.
            size = min(begin, max(_BLOCK, len(held)))
            begin -= size
            file.seek(begin)
            held = file.read(size) + held
            end = len(held)
            while end and (before := held.rfind(b"\n", 0, end - 1)) >= 0:
                yield begin + before + 1, held[before + 1 : end]
                end = before + 1
            held = held[:end]
        if held:
            yield 0, held


def cut_at(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)
    sync(path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_as(folder: Path, like: Path) -> None:
    """Give a folder's files the mode of `like`: safetensors uses 0600."""
    mode = stat.S_IMODE(like.stat().st_mode)
    for path in folder.iterdir():
        path.chmod(mode)


def write_whole(path: Path, text: str, *, is_private: bool = False) -> None:
    """Write a file atomically. `is_private`: only its owner can ever read it."""
    unfinished = path.with_name(f".{path.name}.new")
    try:
        if is_private:
            unfinished.unlink(missing_ok=True)
            # Created with its final mode: a chmod after the write would leave a moment
            # in which others can read it. A leftover keeps its old mode, so it is
            # removed first.
            unfinished.touch(mode=0o600)
        unfinished.write_text(text, encoding="utf-8")
        sync(unfinished)
        # After the sync: otherwise a power cut can leave the new name with an empty
        # file.
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    # The new name is durable only with its directory.
    sync(path.parent)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a path for a new folder, which gets its final name at the end, or is
    removed on an error.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
        sync_tree(unfinished)
        replace_folder(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def replace_folder(new: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        # A folder cannot be replaced in one step, since rename needs an empty target.
        # If the process dies between the two renames, settle_folder() can take the old
        # one back.
        folder.rename(old)
    new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def settle_folder(folder: Path) -> None:
    """Restore a folder that a killed process was replacing; remove unfinished ones."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


TRIES, PAUSE_S = 3, 0.02
"""Retries, since `asyncrl status` takes the lock for an instant."""


@contextlib.contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Hold the exclusive right to write into a run directory. Raises JournalError that
    names the holder.

    The file stays: a waiting run may have it open.
    """
    try:
        # flock, not a pid in the file: a pid means nothing in another container, or
        # after a restart. The kernel releases the lock when the process dies.
        file = keep_private(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        if not _take(file):
            holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise JournalError(
                f"process {holder} writes into {path.parent}",
                way_out=f"wait until it ends, or end it (kill {holder}), or give this run another directory.",
            )
        os.ftruncate(file, 0)
        # Only for the message above. The lock decides.
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise JournalError(
            f"{path} cannot be locked: {error.strerror}",
            way_out="make the run directory writable; its file system needs space and locks.",
        ) from error
    try:
        yield
    finally:
        os.close(file)


def _take(file: int) -> bool:
    for _ in range(TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # both mean "held", by system
            time.sleep(PAUSE_S)
    return False


_private = dict[int, os.stat_result]()
"""Descriptors that forked children close, with their files."""


def keep_private(descriptor: int) -> int:
    """Close a descriptor in children that a reward or agent forks; return it.

    Such a child may outlive the run, and would hold its lock, or the pipe whose end
    reports our death.
    """
    _private[descriptor] = os.fstat(descriptor)
    return descriptor


def _close_private() -> None:
    for descriptor, file in _private.items():
        # it was closed before, and may be another file now
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), file):
                os.close(descriptor)


os.register_at_fork(after_in_child=_close_private)

LOCK = "lock"
_owned: dict[Path, int] = {}
"""This process's folders with their lock descriptors."""


def shared_memory_root() -> Path:
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def new_staging_dir(disk_dir: Path | None = None) -> Path:
    """Make a staging folder, owned until the end of this process. Raises
    ComponentError. Blocks.
    """
    name = _pattern(disk_dir).replace("*", f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
    folder = (disk_dir or shared_memory_root()) / name
    unlocked = folder.with_name(f".{name}")  # clear_stale_staging does not see it
    try:
        unlocked.parent.mkdir(parents=True, exist_ok=True)
        unlocked.mkdir(mode=0o700)
        lock = keep_private(
            os.open(unlocked / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        )
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(folder)
    except OSError as error:
        shutil.rmtree(unlocked, ignore_errors=True)
        raise ComponentError(
            "placement",
            f"cannot make the folder {folder} for weights, and lock it: {error.strerror}",
            way_out="free space there, check its rights, or name another weight_sync.disk_dir.",
        ) from error
    _owned[folder] = lock
    return folder


def remove_staging_dir(folder: Path) -> None:
    if (lock := _owned.pop(folder, None)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def clear_stale_staging(disk_dir: Path | None = None) -> list[Path]:
    """Remove and return unlocked folders. Blocks."""
    removed = []
    for path in (disk_dir or shared_memory_root()).glob(f"{_pattern(disk_dir)}/{LOCK}"):
        if path.parent in _owned:
            continue
        with contextlib.suppress(OSError):  # another user's, or being removed
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if _take(lock):
                # We hold the lock while we remove, so that two starting runs do not
                # remove at once.
                shutil.rmtree(path.parent, ignore_errors=True)
                removed.append(path.parent)
            os.close(lock)
    return removed


def clear_own_staging() -> None:
    for folder in list(_owned):
        remove_staging_dir(folder)


def _pattern(disk_dir: Path | None) -> str:
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    # A disk folder may be shared by hosts, and a lock of another host may be invisible
    # here: only our own host's folders are cleared.
    return "asyncrl-*" if disk_dir is None else f"asyncrl-{host}-*"
