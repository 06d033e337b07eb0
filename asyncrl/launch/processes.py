"""Child processes and their process groups."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files as files_of
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from asyncrl.base.errors import ComponentError, find_fatal
from asyncrl.base.files import keep_private
from asyncrl.base.http import SECRET_ENV, SECRETS
from asyncrl.base.signals import END, STACKS, how_ended
from asyncrl.base.waits import at_most, shielded
from asyncrl.launch import fork_server
from asyncrl.launch.machine import LOOPBACK, Node
from asyncrl.messages.engine_api import FileRequest

logger = logging.getLogger("asyncrl.launch.processes")

LOG_TAIL_LINES = 12
LOG_END_BYTES = 2**18
"""The end of a log that is read, in the event loop; a log may have gigabytes."""
GROUP_TIMEOUT_S = 12.0
"""Longer than an engine server's guard takes to end its group."""
TERM_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 5.0
"""SIGKILL limit, for processes held by a driver or network file system."""
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Huge pages cut the allocation time of large CPU tensors to a third."""
PACKAGES = ("asyncrl", "asyncrl_servers")


@dataclass(frozen=True)
class ProcessSpec:
    """`python -m module` with `spec` (JSON file) and a listening socket, on any node.

    It sees only `devices` (cpu, cuda:1, ...). `secret` opens its server. `python`
    returns its Python (None: ours) or raises ConfigError.
    """

    name: str
    module: str
    spec: str
    run_dir: Path
    secret: str
    devices: Sequence[str] = ("cpu",)
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    python: Callable[[], Path] | None = None

    @property
    def log_path(self) -> Path:
        return self.run_dir / "logs" / f"{self.name}.log"


class Process:
    """A server process on any node, or a server not started by the run.

    Life: start() -> running -> ended, by aclose() or by itself. renewed() makes its
        successor, with the same log.
    """

    pid: int | None = None
    """On this machine."""
    returncode: int | None = None
    place = ""
    """Process and node; empty before the start."""
    # A restarted process appends to the same log. An error of its predecessor is not
    # its own.
    _log_start = 0

    def __init__(self, name: str, log_path: Path | str, url: str = "") -> None:
        self.name = name
        self.log_path = log_path
        self.url = url
        """Empty before the start."""

    def seen(self) -> str:
        if not self.place:
            return "not started by the run"
        return f"{self.place} {'runs' if self.returncode is None else f'ended with {self.returncode}'}"

    async def start(self) -> None:
        """Start without awaiting readiness."""

    def renewed(self) -> Process:
        return self

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def is_refused(self) -> bool:
        """Return whether its log gives the reason of its end: another start would end
        alike.
        """
        return find_fatal(self._log()) is not None

    def death(self) -> ComponentError:
        """Return the reason of its end, from its log."""
        fatal = find_fatal(self._log())
        if fatal is not None:
            return ComponentError(
                self.name, fatal.error, rule=fatal.rule, way_out=fatal.way_out
            )
        code = self.returncode or 0
        how = how_ended(code)
        how += " (often the kernel short of memory)" if code == -signal.SIGKILL else ""
        return ComponentError(
            self.name,
            f"{self.place} {how}; the end of its log:\n{self.log_tail()}",
            way_out=f"read {self.log_path}, correct the cause, and start the run again.",
        )

    def log_tail(self) -> str:
        lines = self._log().splitlines()[-LOG_TAIL_LINES:]
        return (
            "\n".join(f"    {line}" for line in lines)
            or f"    (empty: {self.log_path})"
        )

    def _log(self) -> str:
        """Return the last LOG_END_BYTES of this process's log."""
        with contextlib.suppress(OSError), Path(self.log_path).open("rb") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, num_bytes - LOG_END_BYTES))
            return file.read().decode("utf-8", errors="replace")
        return ""

    async def aclose(self) -> None:
        """End the process. A server that the run has not started keeps running.
        Idempotent.
        """

    def kill_nowait(self) -> None:
        """Send SIGKILL without waiting."""

    def dump_stacks_nowait(self) -> None:
        """Make it log its stacks."""


class ChildProcess(Process):
    """A child of this process. Its standard input carries secrets; EOF, at our death,
    ends its group, after GROUP_TIMEOUT_S for cleanup. `host`: address to listen on.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        environ: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
    ) -> None:
        super().__init__(spec.name, spec.log_path)
        self.spec = spec
        self._environ = environ or {}
        self._host = host
        self._process: asyncio.subprocess.Process | fork_server.ForkedProcess | None = (
            None
        )
        self._stdin: int | None = None

    @property
    def returncode(self) -> int | None:  # type: ignore[override]
        return self._process.returncode if self._process else None

    def seen(self) -> str:
        with contextlib.suppress(psutil.Error):
            if self.pid is not None and self.returncode is None:
                return f"{self.place} is {psutil.Process(self.pid).status()}"
        return super().seen()

    async def start(self) -> None:
        """Start the process with its log, its socket and a pipe for its secrets. Raises
        ConfigError if its Python is missing.
        """
        spec = self.spec
        specs = spec.run_dir / "specs"
        env = {
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **HUGE_PAGES,
            **self._environ,
        }
        python = await asyncio.to_thread(spec.python) if spec.python else None
        if python is not None:
            own = spec.module.partition(".")[0]
            folder = import_folder(specs / f"imports-{self._host}", own)
            env["PYTHONPATH"] = str(folder)
        for folder in (specs, spec.log_path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        spec_path = specs / f"{spec.name}.json"
        spec_path.write_text(spec.spec, encoding="utf-8")
        # The parent binds and listens, then passes the socket. There is no race for a
        # free port, and calls wait in the backlog while the child loads its model
        # (docs/decisions/0003).
        with bind_socket(self._host) as listener, spec.log_path.open("ab") as log:
            # Opened for appending: the position is the log's size.
            self._log_start = log.tell()
            arguments = ["--spec", str(spec_path), "--fd", str(listener.fileno())]
            # We keep the writing end open and never close it before aclose(). If we
            # die, even by SIGKILL, the kernel closes it, the child reads end-of-file
            # and exits.
            stdin, self._stdin = os.pipe()
            # A forked copy of this end in a reward's child would keep our children
            # running after our death.
            keep_private(self._stdin)
            files = [stdin, log.fileno(), log.fileno(), listener.fileno()]
            env |= spec.env
            try:
                process = await start_process(
                    spec.module, arguments, files=files, env=env, python=python
                )
            finally:
                os.close(stdin)
            self._process = process
            self.pid = process.pid
            self.place = f"process {process.pid}"
            self.url = f"http://{self._host}:{listener.getsockname()[1]}"
        with contextlib.suppress(BrokenPipeError):  # it has already ended
            os.write(
                self._stdin,
                # One line, smaller than the pipe's buffer: the write does not block
                # although the child reads later.
                json.dumps({**spec.secrets, SECRET_ENV: spec.secret}).encode() + b"\n",
            )

    def renewed(self) -> ChildProcess:
        return ChildProcess(self.spec, self._environ, self._host)

    async def wait(self) -> None:
        assert self._process is not None, "wait() comes after start()"
        await self._process.wait()

    async def aclose(self) -> None:
        """Send END and SIGTERM, then SIGKILL after TERM_TIMEOUT_S; wait for the group; log a
        survivor. Idempotent.
        """
        process = self._process
        if process is not None:
            if process.returncode is None:
                # Signal the whole group: vLLM's workers are in it.
                _signal_group(process.pid, signal.SIGTERM)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, END)
                await self._ends_within(TERM_TIMEOUT_S)
            self.kill_nowait()
            # Members clean up after their leader: vLLM's reaper removes scratch files
            # and shared memory. They are killed only after GROUP_TIMEOUT_S. In a
            # thread, because psutil reads all of /proc.
            members = await asyncio.to_thread(group_members, process.pid)
            await asyncio.to_thread(psutil.wait_procs, members, GROUP_TIMEOUT_S)
            _signal_group(process.pid, signal.SIGKILL)
            if not await self._ends_within(KILL_TIMEOUT_S):
                logger.warning(
                    "%s of %s survives SIGKILL, and holds its devices",
                    self.place,
                    self.name,
                )
        if self._stdin is not None:
            # Last: end-of-file would start the child's own cleanup during ours.
            os.close(self._stdin)
            self._stdin = None

    async def _ends_within(self, timeout_s: float) -> bool:
        async with at_most(timeout_s):
            await self.wait()
        return self.returncode is not None

    def kill_nowait(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            # A stopped member cannot react to its leader's death, nor clean up.
            _signal_group(self._process.pid, signal.SIGCONT)

    def dump_stacks_nowait(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, STACKS)


class Launcher:
    """Starts the processes of a run.

    Life: created -> hold() reserves devices -> process(), repeatedly -> aclose()
        releases them -> close(). Creation and close() run outside the event loop.
    """

    nodes: tuple[Node, ...] = ()
    """The controller's is first."""

    async def hold(
        self, parts: Mapping[int, Sequence[str]], files: Mapping[str, str]
    ) -> None:
        """Reserve devices by node; all nodes see `files`. Raises ConfigError or
        ComponentError.
        """

    def process(self, node: int, spec: ProcessSpec) -> Process:
        raise NotImplementedError

    async def free_port(self, node: int) -> int:
        raise NotImplementedError

    async def fetch(self, node: int, request: FileRequest, timeout_s: float) -> str:
        """Return the local path of downloaded weights. Raises WeightsLost if the
        trainer's node does not send them, NodeLost, or another ComponentError of the
        node.
        """
        raise NotImplementedError

    async def aclose(self) -> None: ...

    def close(self) -> None: ...


def import_folder(folder: Path, package: str) -> Path:
    """Link our packages, and the server's, for a Python that must not see our
    site-packages.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*PACKAGES, package}:
        link = folder / name
        target = Path(str(files_of(name))).resolve()
        # Links to single packages: with our whole site-packages on its PYTHONPATH, vLLM's
        # Python would import our torch.
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)  # of a moved installation
            link.symlink_to(target)
    return folder


def bind_socket(host: str = LOOPBACK) -> socket.socket:
    return socket.create_server((host, 0), backlog=2048)


def free_port_at(host: str) -> int:
    with bind_socket(host) as listener:
        port: int = listener.getsockname()[1]
        return port


async def start_process(
    module: str,
    arguments: Sequence[str],
    *,
    files: Sequence[int],
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> asyncio.subprocess.Process | fork_server.ForkedProcess:
    """Run `python -m module` in its own session, forked if possible.

    The first three `files` become standard streams; `env` is added to ours.
    """
    # Our own environment wins over ONE_THREAD: a user may set OMP_NUM_THREADS.
    environ = {
        **({} if python else fork_server.ONE_THREAD),
        **os.environ,
        **(env or {}),
    }
    # Every process of this user can read /proc/PID/environ. Secrets go through standard
    # input.
    environ = {
        name: value for name, value in environ.items() if not SECRETS.fullmatch(name)
    }
    server = fork_server.current
    if python is None and server is not None and module in server.modules:
        child = ForkServerProcess(
            target=fork_server.run,
            args=(server.modules[module], arguments, environ, files),
        )
        # A plain start takes longer but works as well. Children that the dead server
        # forked are lost, and their supervisors restart them this way.
        with contextlib.suppress(EOFError, OSError):  # the server has died
            return await server.fork(child, [*files])
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


async def run_module(
    module: str, arguments: Sequence[str], timeout_s: float
) -> tuple[int | None, str]:
    """Return (exit code, output); code None: too slow."""
    with tempfile.TemporaryFile() as output:
        process = await start_process(module, arguments, files=[output.fileno()] * 3)
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            return None, ""
        finally:
            if process.returncode is None:
                process.kill()
                await shielded(process.wait())
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


def group_members(leader: int) -> list[psutil.Process]:
    found = []
    for member in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            # A group's id is its leader's pid, and stays valid after the leader's end
            # while a member exists.
            is_other = member.pid != leader and os.getpgid(member.pid) == leader
            if is_other and member.status() != psutil.STATUS_ZOMBIE:
                found.append(member)
    return found


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
