"""Ends a command with all that it started.

The processes of a command are its process group, and every process with the command's mark in its
environment. Children inherit the mark, so a process with a session of its own (setsid, a daemon) is found
too. Two kinds are not found: a process that has its own session and was started without the mark (`setsid env
-i ...`), and one of another user.

Run as a program it waits until its worker has ended, in whatever way, and kills what is left of the worker's
commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

MARK_ENV = "ASYNCRL_COMMAND"
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_KILL_WAIT_S = 5.0
_KILL_ROUNDS = 20


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of what its commands leave behind, so that it can be reaped (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


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
            if os.getpgid(pid) == group or wanted in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


async def end_group(mark: str, group: int | None, *, grace_s: float) -> bool:
    """SIGTERM, and after `grace_s` SIGKILL, to all of them; returns once none lives, or false if some would
    not die.
    """
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                signalled: set[int] = set()
                while found := find_group(mark, group):
                    for pid in found:
                        if pid not in signalled or number == signal.SIGKILL:
                            _signal(pid, number)
                    signalled.update(found)
                    await _wait_one(found)
                return True
    return False


def kill_group_nowait(mark: str, group: int | None = None) -> None:
    """SIGKILL to all of them, those included that they start meanwhile; waits for none."""
    for _ in range(_KILL_ROUNDS):
        found = find_group(mark, group)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        if not found:
            return


def kill_when_gone(mark: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that, when this one is gone, kills all groups whose mark begins so and removes their
    folder. It lives as long as its standard input is open.
    """
    command = [sys.executable, "-I", str(Path(__file__)), mark, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def reap_orphans(but: set[int]) -> None:
    """Reap adopted processes that have ended; `but` are this process's own children, which asyncio reaps."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid not in but and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


async def _wait_one(pids: list[int]) -> None:
    """Sleep until one of these processes has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    watched: list[int] = []
    try:
        for pid in pids:
            watched.append(os.pidfd_open(pid))
            loop.add_reader(watched[-1], ended.set)
        await ended.wait()
    except OSError:  # one is gone already, or no file descriptor is left: the caller looks again
        await asyncio.sleep(0)
    finally:
        for fd in watched:
            loop.remove_reader(fd)
            os.close(fd)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    hide_memory()  # it has the worker's environment
    while os.read(0, 4096):
        pass
    kill_group_nowait(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
