"""Start, watch and end a child process and its process group."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from asyncrl.base.errors import ConfigError, RoomError
from asyncrl.base.message import SECRET_ENV, find_fatal
from asyncrl.launch import fork_server
from asyncrl.launch.nodes import LOOPBACK, Process

logger = logging.getLogger("asyncrl.launch.processes")

LOG_TAIL_LINES = 12
GROUP_TIMEOUT_S = 12.0
"""Longer than the guard of a vLLM server gives its group to end."""
STACKS = signal.SIGUSR1
KILL_TIMEOUT_S = 5.0
"""SIGKILL ends a process at once, unless the kernel holds it (a driver, a network file system)."""

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Makes torch use huge pages for large CPU tensors: allocation takes a third of the time, and weight
copies reach memory bandwidth.
"""


class ForeignProcess:
    """Stand-in for ChildProcess: a server that the run did not start. Only its heartbeat is observable."""

    pid: int | None = None
    returncode: int | None = None
    left = ""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url.rstrip("/")
        self.log_path = f"the log of {self.url}"

    def seen(self) -> str:
        return "no process of this run"

    async def start(self) -> None:
        """Do nothing: it is already running."""

    def renewed(self) -> ForeignProcess:
        return self

    async def wait(self) -> None:
        await asyncio.Event().wait()

    watch = wait

    def death(self) -> RoomError:
        return RoomError(self.name, f"the server at {self.url} ended")

    def log_tail(self) -> str:
        return f"    (in {self.log_path})"

    async def aclose(self) -> None:
        """Do nothing: the server keeps its present weights."""

    def kill_nowait(self) -> None:
        """Do nothing."""

    def dump_stacks_nowait(self) -> None:
        """Do nothing."""


@dataclass(eq=False, slots=True, repr=False)
class ChildProcess:
    """A server of the run in its own process.

    Life: created -> start() -> running -> ended, by aclose() or by itself (then watch() raises); renewed()
        makes its successor, which continues the log. Its standard input is a pipe that only we hold: the
        first line has the secrets, and if we die in any way, the child reads EOF and exits. It leads a
        process group that ends with it; members that clean up (the guard of a vLLM server) get
        GROUP_TIMEOUT_S.

    `secret` opens its own server; `secrets` are others by name. `python`: its Python (None: ours); another
    one finds our packages through PYTHONPATH in `env` (fit.import_folder). `host`: the address to listen on.
    """

    name: str
    module: str
    spec: str
    run_dir: Path
    secret: str
    port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None
    host: str = LOOPBACK
    url: str = field(default="", init=False)
    left: str = field(default="", init=False)
    """Survivors of aclose(), as text."""
    _process: asyncio.subprocess.Process | fork_server.ForkedProcess | None = field(default=None, init=False)
    _stdin: int | None = field(default=None, init=False)
    _log_start: int = field(default=0, init=False)

    @property
    def log_path(self) -> Path:
        return self.run_dir / "logs" / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    def seen(self) -> str:
        if self.pid is None:
            return "not started"
        try:
            return f"process {self.pid} is {psutil.Process(self.pid).status()}"
        except psutil.Error:
            return f"process {self.pid} ended with {self.returncode}"

    async def start(self) -> None:
        """Bind the socket and start the process, without waiting for readiness."""
        spec_path = self.run_dir / "specs" / f"{self.name}.json"
        for path in (spec_path, self.log_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        spec_path.write_text(self.spec, encoding="utf-8")
        with bind_socket(self.name, self.port, self.host) as listener, self.log_path.open("ab") as log:
            await self._start_on(listener, log.fileno(), spec_path)

    async def _start_on(self, listener: socket.socket, log: int, spec_path: Path) -> None:
        self._log_start = os.fstat(log).st_size
        env = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", **HUGE_PAGES, **self.env}
        arguments = ["--spec", str(spec_path), "--fd", str(listener.fileno())]
        stdin, self._stdin = os.pipe()
        try:
            files = [stdin, log, log, listener.fileno()]
            self._process = await start_process(
                self.module, arguments, files=files, env=env, python=self.python
            )
        finally:
            os.close(stdin)
        self.url = f"http://{self.host}:{listener.getsockname()[1]}"
        with contextlib.suppress(BrokenPipeError):  # it has already ended
            os.write(self._stdin, json.dumps({**self.secrets, SECRET_ENV: self.secret}).encode() + b"\n")

    def renewed(self) -> ChildProcess:
        return replace(self)

    async def wait(self) -> None:
        assert self._process is not None, "wait() comes after start()"
        await self._process.wait()

    async def watch(self) -> None:
        """Sleep until the process ends; then raise RoomError with the reason."""
        await self.wait()
        raise self.death()

    def death(self) -> RoomError:
        return death_of(self, f"process {self.pid}", read_log(self.log_path, self._log_start))

    def log_tail(self) -> str:
        return tail_of(read_log(self.log_path, self._log_start))

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """End the process and its group: SIGTERM, after `timeout_s` SIGKILL to it, then to the others;
        describe survivors in `left`. Idempotent.
        """
        process = self._process
        if process is not None:
            if process.returncode is None:
                _signal_group(process.pid, signal.SIGTERM)
                await self._ends_within(timeout_s)
            self.kill_nowait()
            members = await asyncio.to_thread(group_members, process.pid)
            await asyncio.to_thread(psutil.wait_procs, members, GROUP_TIMEOUT_S)
            _signal_group(process.pid, signal.SIGKILL)
            if not await self._ends_within(KILL_TIMEOUT_S):
                self.left = (
                    f"process {process.pid} of {self.name} is still there {KILL_TIMEOUT_S:g} s after SIGKILL"
                    ", in a driver or network file system: its devices and memory are taken meanwhile"
                )
                logger.warning("%s", self.left)
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    async def _ends_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait()
        return self.returncode is not None

    def kill_nowait(self) -> None:
        """Send SIGKILL without waiting; its group, frozen or not, sees the end."""
        if self._process is not None:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, signal.SIGKILL)
            _signal_group(self._process.pid, signal.SIGCONT)

    def dump_stacks_nowait(self) -> None:
        """Send SIGUSR1 if it has a handler."""
        if self._process is not None and self.returncode is None and catches(self._process.pid, STACKS):
            os.kill(self._process.pid, STACKS)


def death_of(process: Process, who: str, log: str) -> RoomError:
    """Return the reason of a process's end, from the last words in its log."""
    fatal = find_fatal(log)
    if fatal is not None:
        return RoomError(process.name, fatal.error, rule=fatal.rule, way_out=fatal.way_out)
    code = process.returncode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    how += " (often the kernel short of memory)" if code == -signal.SIGKILL else ""
    return RoomError(
        process.name,
        f"{who} {how}; the end of its log:\n{tail_of(log)}",
        way_out=f"read {process.log_path}, correct the cause, and start the run again.",
    )


def tail_of(log: str) -> str:
    lines = log.splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (empty)"


def read_log(path: Path, start: int) -> str:
    """Return the output of one process; predecessors may have written the start of the log."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def catches(pid: int, number: signal.Signals) -> bool:
    """Return True if the process handles the signal; a new process would die of it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def bind_socket(owner: str, port: int | None, host: str = LOOPBACK) -> socket.socket:
    """Return a listening socket at `port` or any free one. Raises ConfigError if the port is taken,
    OSError otherwise.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port or 0))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if port is None:
            raise
        raise ConfigError(
            f"port {port} for {owner} cannot be used: {error.strerror}",
            rule=f"each internal server needs a port of its own on {host}",
            way_out="end the program that holds it, or leave the port at none (any free one).",
        ) from error
    return listener


async def start_process(
    module: str,
    arguments: Sequence[str],
    *,
    files: Sequence[int],
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> asyncio.subprocess.Process | fork_server.ForkedProcess:
    """Run `python -m module` in its own session, forked from the fork server if possible.

    The first three `files` become its standard streams; it inherits the others. `env` is added to our
    environment.
    """
    environ = {**({} if python else fork_server.ONE_THREAD), **os.environ, **(env or {})}
    environ = {name: value for name, value in environ.items() if name not in fork_server.NEVER_INHERITED}
    server = fork_server.current
    if python is None and server is not None and server.has(module):
        forked = await server.fork(module, arguments, environ, files)
        if forked is not None:
            return forked
    return await asyncio.create_subprocess_exec(
        str(python or sys.executable),
        "-m",
        module,
        *arguments,
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        pass_fds=files[3:],
        env=environ,
        start_new_session=True,
    )


def group_members(leader: int) -> list[psutil.Process]:
    """Return running processes of the group, except its leader."""
    found = []
    for member in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_other = member.pid != leader and os.getpgid(member.pid) == leader
            if is_other and member.status() != psutil.STATUS_ZOMBIE:
                found.append(member)
    return found


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
