"""Find, end and reap the processes of a command.

They are its process group and every process with the command's mark in its environment. Children inherit the
mark, so processes with their own session (setsid, a daemon) are found. Two kinds are missed: a process with
its own session started without the mark (`setsid env -i ...`), and a process of another user. A sandbox
misses none: all its processes end with the first.
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
"""Delay between SIGTERM and SIGKILL; less than the worker's own limit."""
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
"""Shell script that waits for the end of its worker in any way. Then it kills every process with the text
$1 in its environment, including processes started during the kill, and removes the folder $2.
"""


def start_guard(token: str, folder: str) -> subprocess.Popen[bytes]:
    """Adopt orphans of commands from now on, and start a guard that kills them if this process is killed.
    The guard ends with the object.
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
    """Hide this process's environment, memory and files in /proc from other processes of this user: programs
    of a model run as the same user, and workers and controllers hold the worker key and the answers.

    An exec undoes it, so child processes are visible. Linux only; root can still read everything.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def find_group(mark: str, group: int | None = None) -> list[int]:
    """Return running processes of the group, or with a mark of this prefix; never this process."""
    wanted = b"\0" + f"{MARK_ENV}={mark}".encode()
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # gone, or another user's
            if pid == os.getpid() or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getpgid(pid) == group or wanted in b"\0" + _environment(pid):
                found.append(pid)
    return found


def _environment(pid: int) -> bytes:
    """Return the initial environment. During an exec both environment and arguments are briefly empty;
    without repeated reads, a process that keeps calling exec would be missed every twentieth time.
    """
    process, num_settled = Path(f"/proc/{pid}"), 0
    for _ in range(_EXEC_LOOKS):
        has_arguments = bool((process / "cmdline").read_bytes())
        if environment := (process / "environ").read_bytes():
            return environment
        (process / "exe").readlink()  # OSError for a kernel thread
        num_settled = num_settled + 1 if has_arguments else 0
        if num_settled == 3:  # repeat: an exec may begin between the two reads
            break
        time.sleep(_EXEC_LOOK_S)
    return b""


async def end_group(mark: str, group: int | None) -> list[int]:
    """Send SIGTERM, and after GRACE_S SIGKILL, to all processes; return the survivors."""
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
    """Send SIGKILL to all processes, including processes started during the kill, without waiting."""
    for _ in range(_KILL_ROUNDS):
        found = find_group(mark, group)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        if not found:
            return


def reap_orphans(but: set[int]) -> None:
    """Reap ended orphans; `but` are this process's own children, which asyncio reaps."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid not in but and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
