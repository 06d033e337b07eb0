"""Memory and cores of this process."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
_FILE_PAGES = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")
"""Page cache in memory.stat, which the kernel drops before killing."""


def available_memory() -> int:
    """Return available bytes, within the control groups' limit (v1 or v2)."""
    left = [psutil.virtual_memory().available]
    for folder in _groups("memory"):
        is_old = (folder / "memory.limit_in_bytes").exists()
        names = ("limit_in_bytes", "usage_in_bytes") if is_old else ("max", "current")
        limit, used = (_number(folder / f"memory.{name}") for name in names)
        if limit is not None and used is not None:
            left.append(max(limit - used + _file_bytes(folder / "memory.stat", is_old=is_old), 0))
    return min(left)


def num_cores() -> int:
    """Return usable cores: the affinity, or the control groups' quota, rounded up."""
    cores = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder in _groups("cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):  # neither max nor -1
            cores.append(math.ceil(int(quota) / int(period)))
    return max(min(cores), 1)


def _groups(controller: str) -> Iterator[Path]:
    for line in _text(MEMBERSHIP).splitlines():
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            root = CGROUPS if names == "" else CGROUPS / controller
            group = Path(path)
            yield from (root / one.relative_to("/") for one in (group, *group.parents))


def _file_bytes(stat: Path, *, is_old: bool) -> int:
    wanted = _FILE_PAGES[2:] if is_old else _FILE_PAGES[:2]
    rows = (line.split() for line in _text(stat).splitlines())
    return sum(int(row[1]) for row in rows if row[0] in wanted)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def hide_memory() -> None:
    """Hide environment and memory from other processes of this user, such as programs of a model. Linux
    only; undone by an exec.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
