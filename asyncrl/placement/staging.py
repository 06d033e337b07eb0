"""The run's folder in shared memory: named after its owner, so that a later run can clear what a killed one left."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path

import psutil

PREFIX = "asyncrl-"


def shared_memory_root() -> Path:
    """/dev/shm where there is one, else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def new_staging_dir() -> Path:
    """Path (not created: the trainer does) of a staging folder that carries our pid and start time in its name."""
    started = int(psutil.Process().create_time() * 1000)
    return shared_memory_root() / f"{PREFIX}{os.getpid()}-{started}-{uuid.uuid4().hex[:8]}"


def clear_stale_staging() -> list[Path]:
    """Remove the folders of runs whose controller is gone; returns them. Never touches a living run's."""
    removed = []
    for folder in shared_memory_root().glob(f"{PREFIX}*-*-*"):
        if folder.is_dir() and not _owner_lives(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def clear_own_staging() -> None:
    """Remove this process's own folders: for an end so abrupt that nothing else gets to it."""
    for folder in shared_memory_root().glob(f"{PREFIX}{os.getpid()}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _owner_lives(name: str) -> bool:
    try:
        pid, started = (int(part) for part in name.removeprefix(PREFIX).split("-")[:2])
    except ValueError:
        return True  # not one of ours: leave it alone
    try:
        return abs(int(psutil.Process(pid).create_time() * 1000) - started) < 1000
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
