"""All processes of one vLLM server end together, whichever of them ends first. Knows processes; knows no
vLLM.

vLLM's engine and workers are children of the API server that outlive it if it is killed. So the server leads
a process group, and a small process of that group, forked before anything is loaded, waits for the end of the
leader and ends what is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

GRACE_S = 5.0


def lead_group() -> None:
    """Make this process the leader of its group, if it is not."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def start_warden(scratch: Path) -> None:
    """Fork the process that ends the group and removes `scratch` once the caller is gone. Call it before any
    thread is started.
    """
    leader = os.getpid()
    if os.fork():
        return
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        pidfd = os.pidfd_open(leader)
        os.closerange(3, pidfd)
        os.closerange(pidfd + 1, 4096)
        if os.getppid() == leader:
            select.select([pidfd], [], [])
        end_group(leader)
        shutil.rmtree(scratch, ignore_errors=True)
    finally:
        os._exit(0)


def end_group(leader: int, grace_s: float = GRACE_S) -> None:
    """End all other processes of the group: SIGTERM, and SIGKILL to what is left after `grace_s`.

    Except multiprocessing's resource tracker: it ends by itself once nobody is left, and removes their shared
    memory then.
    """
    _signal(leader, signal.SIGTERM)
    if not _wait_until(lambda: not _members(leader), grace_s):
        _signal(leader, signal.SIGKILL)
        _wait_until(lambda: not _members(leader), grace_s)
    if not _wait_until(lambda: not _members(leader, with_tracker=True), grace_s):
        _signal(leader, signal.SIGKILL, with_tracker=True)


def _signal(leader: int, number: signal.Signals, *, with_tracker: bool = False) -> None:
    for pid in _members(leader, with_tracker=with_tracker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _members(leader: int, *, with_tracker: bool = False) -> list[int]:
    """Living processes of the group, without the leader, the caller and (unless asked) the resource
    tracker.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in (leader, os.getpid()):
            continue
        with contextlib.suppress(OSError, IndexError):  # gone meanwhile
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if (
                int(group) == leader
                and state != "Z"
                and (with_tracker or b"resource_tracker" not in (folder / "cmdline").read_bytes())
            ):
                found.append(int(folder.name))
    return found
