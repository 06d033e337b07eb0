"""The run's folder in shared memory, or on a disk: named after its owner, so that a later run can clear what a killed one left.

A disk may be that of several machines, each of which knows of its own processes alone: there the owner's name begins with its host's.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import uuid
from pathlib import Path

import psutil

from asyncrl.config import PublisherConfig
from asyncrl.errors import ConfigError

PREFIX = "asyncrl-"


def shared_memory_root() -> Path:
    """/dev/shm where there is one, else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def disk_root(publisher: PublisherConfig) -> Path | None:
    """The folder that publisher.disk_dir names, made if it is not there; None for shared memory. Raises ConfigError. Blocks."""
    if publisher.disk_dir is None:
        return None
    folder = Path(publisher.disk_dir).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"publisher.disk_dir={publisher.disk_dir} cannot be made: {error}", rule="the trainer writes each version there",
            way_out="name a folder on a file system that trainer and engines share, and that this user may write to.",
        ) from error  # fmt: skip
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"publisher.disk_dir={publisher.disk_dir} cannot be written to", rule="the trainer writes each version there",
            way_out="name a folder that this user may write to.",
        )  # fmt: skip
    return folder


def new_staging_dir(disk_dir: Path | None = None) -> Path:
    """Path (not created: the trainer does) of a staging folder that carries our pid and start time in its name."""
    started = int(psutil.Process().create_time() * 1000)
    return _root(disk_dir) / f"{_prefix(disk_dir)}{os.getpid()}-{started}-{uuid.uuid4().hex[:8]}"


def clear_stale_staging(disk_dir: Path | None = None) -> list[Path]:
    """Remove the folders of runs whose controller is gone; returns them. Never touches a living run's."""
    removed, prefix = [], _prefix(disk_dir)
    for folder in _root(disk_dir).glob(f"{prefix}*-*-*"):
        if folder.is_dir() and not _owner_lives(folder.name.removeprefix(prefix)):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def clear_own_staging(disk_dir: Path | None = None) -> None:
    """Remove this process's own folders: for an end so abrupt that nothing else gets to it."""
    for folder in _root(disk_dir).glob(f"{_prefix(disk_dir)}{os.getpid()}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _root(disk_dir: Path | None) -> Path:
    return shared_memory_root() if disk_dir is None else disk_dir


def _prefix(disk_dir: Path | None) -> str:
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    return PREFIX if disk_dir is None else f"{PREFIX}{host}-"


def _owner_lives(owner: str) -> bool:
    try:
        pid, started = (int(part) for part in owner.split("-")[:2])
    except ValueError:
        return True  # not one of ours: leave it alone
    try:
        return abs(int(psutil.Process(pid).create_time() * 1000) - started) < 1000
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
