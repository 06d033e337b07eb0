"""One child process: started on a socket that is already bound, watched, and ended with everything it
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from asyncrl.errors import ConfigError, RoomError
from asyncrl.http import OURS, out_of
from asyncrl.messages.base import SECRET_ENV, find_fatal
from asyncrl.placement import fork_server
from asyncrl.waits import TimeLimit

# A server that somebody else started: stands where a ChildProcess would, and has no process to start, watch
# or end.


class ForeignProcess:
    """Nothing but an address. Whether anybody answers there is for its heartbeat to say; an end of it cannot
    be seen.
    """

    pid: int | None = None
    returncode: int | None = None
    died: RoomError | None = None
    left = ""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url.rstrip("/")

    def __repr__(self) -> str:
        return f"<ForeignProcess {self.name} {self.url}>"

    @property
    def log_path(self) -> str:
        """Where to read why it does not answer, in words."""
        return f"the log of {self.url}"

    async def start(self) -> None:
        """It is somebody else's to start."""

    def renewed(self) -> ForeignProcess:
        """Whatever answers at the same address later."""
        return self

    async def watch(self) -> None:
        """Sleep for ever."""
        await self.wait()

    async def wait(self) -> None:
        """Sleep for ever."""
        await asyncio.Event().wait()

    def note_death(self) -> None:
        """It has none that we could know of."""

    def death(self) -> RoomError:
        """Never asked for, because wait() does not return."""
        return RoomError(self.name, f"the server at {self.url} ended", way_out=f"read {self.log_path}.")

    def log_tail(self) -> str:
        """Its log is not ours to read."""
        return f"    (in {self.log_path})"

    async def aclose(self) -> None:
        """It goes on, with the weights that it has."""

    def kill_nowait(self) -> None:
        """It is somebody else's to end."""


logger = logging.getLogger("asyncrl.placement.processes")

LOG_TAIL_LINES = 12
KILL_TIMEOUT_S = 5.0
"""SIGKILL ends a process at once, unless the kernel holds it (a driver, a network file system)."""
WARDEN_TIMEOUT_S = 12.0
"""Longer than a warden gives the rest of its group to end."""


def bind_socket(owner: str, port: int | None) -> socket.socket:
    """A listening socket on 127.0.0.1, at `port` or any free one. Raises ConfigError if the port is taken,
    else OSError.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port or 0))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if port is None and error.errno == errno.EADDRINUSE:  # none of them is free
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)) from error
        if port is None or error.errno in OURS:
            raise
        raise ConfigError(
            f"port {port} for {owner} cannot be used: {error.strerror}",
            rule="each internal server needs a port of its own on 127.0.0.1",
            way_out="end the program that holds it, choose another port, or leave the port at none (any free "
            "one).",
        ) from error
    return listener


class ChildProcess:
    """A server of the run in a process of its own. Knows how to start, watch and end it; knows no message of
    it.

    Life:   created -> start() -> running -> ended, by aclose() or of itself (then watch() raises); renewed()
    makes its successor. Its standard input is a pipe that only we hold: its first line has the secrets, which
    nobody can read there later; if we die, however, the child reads its end and exits.
    """

    def __init__(
        self,
        name: str,
        module: str,
        spec: str,
        *,
        run_dir: Path,
        secret: str,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        python: Path | None = None,
        has_warden: bool = False,
    ) -> None:
        """`secret` opens the child's own server. `secrets`: others that it is told, by name
        (serving.secret_of). `python`: the one that it runs under (None: ours); another one finds our packages
        through PYTHONPATH in `env` (interpreters.import_folder). `has_warden`: a process of its group sees it
        end, ends the others and removes what they shared, and is given time for it.
        """
        self.name, self.module, self._spec = name, module, spec
        self._python, self._has_warden = python, has_warden
        self._run_dir = run_dir
        self._spec_path = run_dir / "specs" / f"{name}.json"
        self.log_path = run_dir / "logs" / f"{name}.log"
        self._port, self._env = port, dict(env or {})
        self._secrets = {**(secrets or {}), SECRET_ENV: secret}
        self._process: asyncio.subprocess.Process | fork_server.ForkedProcess | None = None
        self._stdin: int | None = None
        self._log_start = 0
        self.url = ""
        self.died: RoomError | None = None
        """Why it ended before we ended it, once note_death() was called."""
        self.left = ""
        """That aclose() could not end it, in words."""

    def __repr__(self) -> str:
        return f"<ChildProcess {self.name} {self.url or 'not started'} exit={self.returncode}>"

    @property
    def pid(self) -> int | None:
        """Process id, None before start()."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Bind the socket and start the process; returns at once (ask its /health to know when it is ready).

        Raises ConnectionShortage where this machine has no descriptor, port or memory left for that.
        """
        try:
            await self._start()
        except OSError as error:
            if error.errno not in OURS:
                raise
            raise out_of(f"cannot start {self.name}", error.errno, self.name) from error

    async def _start(self) -> None:
        self._spec_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._spec_path.write_text(self._spec, encoding="utf-8")
        with bind_socket(self.name, self._port) as listener, self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            stdin, self._stdin = os.pipe()
            try:
                self._process = await start_process(
                    self.module,
                    ["--spec", str(self._spec_path), "--fd", str(listener.fileno())],
                    env={"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"} | self._env,
                    files=[stdin, log.fileno(), log.fileno(), listener.fileno()],
                    python=self._python,
                )
            finally:
                os.close(stdin)
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            os.write(self._stdin, json.dumps(self._secrets).encode() + b"\n")

    def renewed(self) -> ChildProcess:
        """The same server, not started yet: it writes on in the same log, and takes the same port if that was
        given.
        """
        return ChildProcess(
            self.name,
            self.module,
            self._spec,
            run_dir=self._run_dir,
            secret=self._secrets[SECRET_ENV],
            port=self._port,
            env=self._env,
            secrets=self._secrets,
            python=self._python,
            has_warden=self._has_warden,
        )

    async def watch(self) -> None:
        """Sleep as long as the process lives; raises RoomError, with why it ended, when it does."""
        await self.wait()
        raise self.death()

    async def wait(self) -> None:
        """Sleep as long as the process lives."""
        assert self._process is not None, "wait() comes after start()"
        await self._process.wait()

    def note_death(self) -> None:
        """Keep in `died` why the process ended, if it has ended by now; call it before aclose()."""
        if self.returncode is not None and self.died is None:
            self.died = self.death()

    def death(self) -> RoomError:
        """Why the process ended, from its own last words or its log."""
        code = self.returncode
        fatal = find_fatal(self._log())
        if fatal is not None:
            return RoomError(self.name, fatal.error, rule=fatal.rule, way_out=fatal.way_out)
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exited with code {code}"
        )
        advice = (
            " (SIGKILL from outside is often the kernel short of memory.)" if code == -signal.SIGKILL else ""
        )
        return RoomError(
            self.name,
            f"process {self.pid} {how} in the middle of the run{advice}; the end of "
            f"{self.log_path}:\n{self.log_tail()}",
            way_out=f"read {self.log_path}, mend the cause, and start the run again.",
        )

    def log_tail(self) -> str:
        """The last lines of its log, indented."""
        lines = self._log().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (empty)"

    def _log(self) -> str:
        """What this process has written: the log of those before it, of the same name, is theirs."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(self._log_start)
                return file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """End the process and all that it started: SIGTERM, and after `timeout_s` SIGKILL. Idempotent.

        One that does not die of that is left, and named in `left`.
        """
        process = self._process
        if process is None:
            self._close_stdin()
            return
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            await self._ends_within(timeout_s)
        if self._has_warden:
            self.kill_nowait()
            await asyncio.to_thread(psutil.wait_procs, group_members(process.pid), timeout=WARDEN_TIMEOUT_S)
        _signal_group(process.pid, signal.SIGKILL)
        if not await self._ends_within(KILL_TIMEOUT_S):
            self.left = (
                f"process {process.pid} of {self.name} is still there {KILL_TIMEOUT_S:g} s after SIGKILL "
                f"(state: {_state(process.pid)}) "
                "and is left: the kernel ends it when what it waits for (a driver, a network file system) "
                "lets go; until then its "
                "devices and memory are taken"
            )
            logger.warning("%s", self.left)
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    async def _ends_within(self, timeout_s: float) -> bool:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(timeout_s):
                await self._process.wait()
        return self._process.returncode is not None

    def kill_nowait(self) -> None:
        """SIGKILL to the process and all that it started, without waiting. Where there is a warden, the
        others are left to it.
        """
        if self._process is None:
            return
        if not self._has_warden:
            _signal_group(self._process.pid, signal.SIGKILL)
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        _signal_group(self._process.pid, signal.SIGCONT)  # a frozen warden wakes


async def start_process(
    module: str,
    arguments: Sequence[str],
    *,
    files: Sequence[int],
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> asyncio.subprocess.Process | fork_server.ForkedProcess:
    """`python -m module`, in a session of its own: forked where the fork server can, else started anew.

    The first three of `files` become its standard streams; it inherits the others. `env`: variables that it
    has beside ours.
    """
    environ = {
        name: value
        for name, value in (os.environ | (env or {})).items()
        if name not in fork_server.NEVER_INHERITED
    }
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
    """Living processes of the group that this process leads, or led; itself left out."""
    found = []
    for member in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (
                member.pid != leader
                and os.getpgid(member.pid) == leader
                and member.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(member)
    return found


def _state(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).status())
    return "unknown"


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
