"""Ends a command with all that it started. Knows processes and /proc; knows no harness, no task, no lease.

A family is the process group of the command, and every process with its mark in the environment, which
children inherit: so one that took a session of its own (setsid, a daemon) is found too. What is not: a
process that did both, take a session of its own and start without the mark (`setsid env -i ...`); one of
another user; and, outside Linux, any that left the group.

Run as a program it is the keeper of a worker: it waits until the worker is gone, however it went, and kills
what is left of its commands.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK_ENV = "ASYNCRL_COMMAND"
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_KILL_WAIT_S = 5.0
_KILL_ROUNDS = 20
_HAS_PROC = Path("/proc/self/stat").exists()


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    state: str
    parent: int
    group: int


def adopt_orphans() -> None:
    """Make this process the parent of what its commands leave behind, so that it can be reaped. Linux alone;
    nothing elsewhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide_memory() -> None:
    """Nobody else of this user reads this process's environment, memory and files in /proc: what a model runs
    is of the same user.

    A worker and a run's controller have the worker key, and the answers and keys of their rollouts. It lasts
    until an exec, so that children are as readable as ever. Linux alone; root reads them all the same.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def find_family(mark: str, group: int | None = None) -> list[int]:
    """Processes that live and are of the group, or have a mark that begins so; never this process itself."""
    wanted = f"{MARK_ENV}={mark}".encode()
    return [
        process.pid
        for process in _processes()
        if process.state not in "ZX"
        and process.pid != os.getpid()
        and (process.group == group or _has(process.pid, wanted))
    ]


async def end_family(mark: str, group: int | None, *, grace_s: float) -> bool:
    """SIGTERM, and after `grace_s` SIGKILL, to the whole family; returns once none lives, or false if some
    would not die.
    """
    if not _HAS_PROC:  # no way to see who lives: no time for manners
        kill_family_nowait(mark, group)
        return True
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await _end(mark, group, number)
                return True
    return False


def kill_family_nowait(mark: str, group: int | None = None) -> None:
    """SIGKILL to the whole family, those included that it starts meanwhile; waits for nobody."""
    if group is not None:
        _signal_group(group, signal.SIGKILL)
    for _ in range(_KILL_ROUNDS):
        found = find_family(mark, group)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        if not found:
            return


def start_keeper(mark: str, folder: Path) -> subprocess.Popen[bytes]:
    """A process that outlives this one by a moment: it kills all families whose mark begins so, and removes
    their folder.

    It lives as long as its standard input is open.
    """
    command = [sys.executable, "-I", str(Path(__file__)), mark, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def reap_orphans(but: set[int]) -> None:
    """Take leave of the dead that this process has adopted; `but` are its own children, of which asyncio
    takes leave itself.
    """
    for process in list(_processes()):
        if process.state == "Z" and process.parent == os.getpid() and process.pid not in but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


async def _end(mark: str, group: int | None, number: signal.Signals) -> None:
    """Signal the family, each process once, and sleep until none lives."""
    if group is not None:
        _signal_group(group, number)
    told: set[int] = set()
    while found := find_family(mark, group):
        for pid in found:
            if pid not in told or number == signal.SIGKILL:
                _signal(pid, number)
        told.update(found)
        await _wait_one(found)


async def _wait_one(pids: list[int]) -> None:
    """Sleep until one of these processes has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    watched: list[int] = []
    try:
        for pid in pids:
            try:
                watched.append(os.pidfd_open(pid))
            except OSError:  # gone already, or no file descriptor is left: the caller looks again
                await asyncio.sleep(0)
                return
        for fd in watched:
            loop.add_reader(fd, ended.set)
        await ended.wait()
    finally:
        for fd in watched:
            loop.remove_reader(fd)
            os.close(fd)


def _processes() -> Iterator[_Process]:
    """All processes of this machine; none where there is no /proc."""
    with contextlib.suppress(FileNotFoundError), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry.name}/stat", "rb") as file:  # noqa: PTH123
                    state, parent, group = file.read().rpartition(b") ")[2].split(maxsplit=3)[:3]
                    yield _Process(int(entry.name), state.decode(), int(parent), int(group))


def _has(pid: int, variable: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            environment = b"\0" + file.read()
    except OSError:  # another user's, or gone
        return False
    return b"\0" + variable in environment


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    hide_memory()  # it has the worker's environment
    while os.read(0, 4096):
        pass
    kill_family_nowait(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
