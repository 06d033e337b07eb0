"""Memory, cores and log format of a process."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import psutil

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return available bytes, within the control groups' limit."""
    left = [psutil.virtual_memory().available]
    # A container's limit is in its control group; the other numbers are of the whole
    # machine.
    for group in _groups():
        limit, used = (_text(group / name) for name in ("memory.max", "memory.current"))
        if limit.isdigit() and used.isdigit():
            rows = dict(
                line.split() for line in _text(group / "memory.stat").splitlines()
            )
            # the kernel drops the page cache before it kills
            cache = sum(
                int(rows.get(name, 0)) for name in ("inactive_file", "active_file")
            )
            left.append(max(int(limit) - int(used) + cache, 0))
    return min(left)


def num_cores() -> int:
    """Return usable cores: the affinity, or the control groups' quota, rounded up."""
    cores = [
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    ]
    for group in _groups():
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit():  # not max
            cores.append(math.ceil(int(quota) / int(period)))
    return max(min(cores), 1)


def _groups() -> list[Path]:
    """Return this process's control groups (v2), innermost first."""
    paths = [
        line.removeprefix("0::/")
        for line in _text(MEMBERSHIP).splitlines()
        if line.startswith("0::/")
    ]
    return [
        folder
        for path in paths
        for folder in (CGROUPS / path, *(CGROUPS / path).parents)
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def hide_memory() -> None:
    """Hide environment and memory from other processes of this user, such as programs
    of a model. Linux only; undone by an exec.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


leave_process = os._exit
"""Ends this process also inside exit_raises."""


@contextmanager
def exit_raises() -> Iterator[None]:
    """Make os._exit raise SystemExit in this process. User code that calls it would end
    the run without a word, perhaps with the exit code of success.
    """
    before = os._exit
    process = os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() == process:
            raise SystemExit(f"os._exit({status}) was called")
        before(status)  # of a fork

    os._exit = leave
    try:
        yield
    finally:
        os._exit = before
