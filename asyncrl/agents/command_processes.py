"""The processes of a command: how they are found, ended and reaped.

They are its process group, and every process with the command's mark in its environment. Children inherit
the mark, so a process with a session of its own (setsid, a daemon) is found too. Two kinds are not found: a
process that has its own session and was started without the mark (`setsid env -i ...`), and one of another
user. In a sandbox none is left: its processes end with its first.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARK_ENV = "ASYNCRL_COMMAND"
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL; less than the worker itself is given."""
_POLL_S, _KILL_WAIT_S = 0.02, 5.0
_KILL_ROUNDS = 20
_EXEC_LOOKS, _EXEC_LOOK_S = 200, 0.0005
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36

_GUARD = """
read _
for round in 1 2 3 4 5 6 7 8; do
    for file in $(grep -ls "$1" /proc/[0-9]*/environ); do
        pid=${file#/proc/}
        kill -9 "${pid%/environ}"
    done
done
rm -rf "$2"
"""
"""Started by a worker, it waits until that has ended, in whatever way; then it kills all that has the text $1
in its environment, those included that they start meanwhile, and removes the folder $2.
"""


def start_guard(token: str, folder: str) -> subprocess.Popen[bytes]:
    """Adopt from now on what commands leave behind, and have a guard kill it if this process itself is
    killed. The guard ends with the object.
    """
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", f"{MARK_ENV}={token}", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
    )
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return guard


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def hide_memory() -> None:
    """Hide this process's environment, memory and files in /proc from others of this user: what a model runs
    is of the same user, and a worker and a run's controller have the worker key, and the answers of their
    rollouts.

    An exec ends it, so child processes are not hidden. Linux only; root can still read everything.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def find_group(mark: str, group: int | None = None) -> list[int]:
    """Live processes of the group, or with a mark that has this prefix; never this process itself."""
    wanted = b"\0" + f"{MARK_ENV}={mark}".encode()
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # it is gone, or another user's
            if pid == os.getpid() or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getpgid(pid) == group or wanted in b"\0" + _environment(pid):
                found.append(pid)
    return found


def _environment(pid: int) -> bytes:
    """What it was started with. In the middle of an exec it has none for a moment, and no arguments either:
    one that execs again and again would be missed every twentieth time.
    """
    process, num_settled = Path(f"/proc/{pid}"), 0
    for _ in range(_EXEC_LOOKS):
        has_arguments = bool((process / "cmdline").read_bytes())
        if environment := (process / "environ").read_bytes():
            return environment
        (process / "exe").readlink()  # a thread of the kernel has none: OSError
        num_settled = num_settled + 1 if has_arguments else 0
        if num_settled == 3:  # more than once: an exec may have begun between the two readings
            break
        time.sleep(_EXEC_LOOK_S)
    return b""


async def end_group(mark: str, group: int | None) -> list[int]:
    """SIGTERM, and after GRACE_S SIGKILL, to all of them; returns once none lives, or those that would not
    die.
    """
    now_s, found = asyncio.get_running_loop().time, list[int]()
    for number, limit_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, _KILL_WAIT_S)):
        until_s, pause_s, signalled = now_s() + limit_s, _POLL_S, set[int]()
        while found := find_group(mark, group):
            for pid in found:
                if pid not in signalled:
                    _signal(pid, number)
            signalled.update(found)
            if now_s() >= until_s:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, until_s - now_s())
        else:
            return []
    return found


def kill_group_nowait(mark: str, group: int | None = None) -> None:
    """SIGKILL to all of them, those included that they start meanwhile; waits for none."""
    for _ in range(_KILL_ROUNDS):
        found = find_group(mark, group)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        if not found:
            return


def reap_orphans(but: set[int]) -> None:
    """Reap adopted processes that have ended; `but` are this process's own children, which asyncio reaps."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid not in but and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
