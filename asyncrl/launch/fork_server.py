"""Fork server, with torch and transformers preloaded: a forked child saves about 4 CPU
seconds.

Preloaded modules start no thread, open no device and run no torch operator. Secrets go
through standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection, context, forkserver, resource_tracker
from pathlib import Path

from asyncrl.base.errors import not_installed
from asyncrl.base.extensions import rows
from asyncrl.base.http import SECRETS
from asyncrl.base.signals import (
    STOPS,
    blocked,
    exit_code_of,
    handled,
    heard_stops,
    is_in_main_thread,
)
from asyncrl.base.waits import shielded

PRELOADED = (
    "asyncrl.trainer.model.random_init",
    "asyncrl.trainer.ranks.rank_process",
    "asyncrl_servers.embedded.__main__",
)
TIMEOUT_S = 120.0
"""The first fork awaits imports."""
CANCELLED_S = 10.0
"""Limit for a start that is cancelled. A fork takes milliseconds; imports are given up."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Otherwise each hashing or copying thread starts a spinning OpenMP team."""
IMPORT_ENV = {
    **ONE_THREAD,
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, through scikit-learn
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # or is_available() opens the driver
}


def run(
    module: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
) -> None:
    """Run `python -m module arguments` in a fork.

    The first three `files` become standard streams; the others keep their numbers.
    """
    # Own session and process group, as with start_new_session: signals to the group end
    # this child's descendants, and Ctrl-C in the terminal reaches only the controller.
    os.setsid()
    gc.freeze()  # keep shared pages unwritten
    # The fork server ends when all copies of this pipe are closed, and so does
    # multiprocessing's resource tracker. A child that kept them would keep both running
    # after the controller's death.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.close(resource_tracker._resource_tracker._fd)  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    # Descriptors arrive with other numbers. The arguments, such as --fd 7, were written
    # with the parent's numbers, so each moves to the parent's number.
    numbers = (0, 1, 2, *files[3:])
    for fd, number in zip(forkserver.get_inherited_fds() or (), numbers, strict=True):
        os.dup2(fd, number)
        if fd not in numbers:
            os.close(fd)
    # Python reads PYTHONUNBUFFERED at its start, which was the fork server's start.
    # Lines must reach the log at once, also the last ones before a crash.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    # The fork server's environment is from its own start. A child gets the environment
    # of now.
    os.environ.clear()
    os.environ.update(env)
    # Python has read PYTHONPATH at the fork server's start only.
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [module, *arguments]
    set_title("\0".join([sys.executable, "-m", *sys.argv]))
    importlib.import_module("numpy").random.seed()  # torch always starts at one seed
    importlib.import_module(module).main()


def set_title(title: str) -> None:
    """Replace the command line, whose arguments end in null characters."""
    # arg_start and arg_end, fields 48 and 49 of proc(5). The split begins with field 3,
    # behind the name, which may contain spaces and brackets.
    start, end = map(
        int, Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[45:47]
    )
    ctypes.memmove(
        start,
        os.fsencode(title)[: end - start - 1].ljust(end - start, b"\0"),
        end - start,
    )


class ForkedProcess:
    returncode: int | None = None

    def __init__(self, pid: int, status: connection.Connection) -> None:
        self.pid = pid
        self._status = status
        self._ended = asyncio.Event()
        # The child belongs to the fork server: only its parent can wait for it. The
        # server writes the exit code into this pipe.
        asyncio.get_running_loop().add_reader(status, self._read_status)

    async def wait(self) -> None:
        await self._ended.wait()

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read_status(self) -> None:
        asyncio.get_running_loop().remove_reader(self._status)
        try:
            self.returncode = forkserver.read_signed(self._status.fileno())
        except EOFError:  # only the fork server knows the exit code
            # The server is dead, and with it the only reporter of exit codes: a child
            # that nobody can watch must not live on.
            self.kill()
            self.returncode = -signal.SIGKILL
        self._status.close()
        self._ended.set()


class ForkServer(forkserver.ForkServer):
    """Client. The server's death kills its children."""

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        super().__init__()
        added = [engine.preload for engine in rows("engines").values()]
        modules = [*modules, *filter(None, added)]
        self.modules = {name.removesuffix(".__main__"): name for name in modules}
        self.set_forkserver_preload(modules)
        environ = dict(os.environ)
        # Empty instead of removed: update() below cannot remove a name. /proc shows the
        # environment of an exec.
        hidden = dict.fromkeys(filter(SECRETS.fullmatch, environ), "")
        os.environ.update(IMPORT_ENV | environ | hidden)
        try:
            # Its children would die with it. They unblock the signals that they handle.
            for start in (resource_tracker.ensure_running, super().ensure_running):
                with blocked(STOPS):  # the first one unblocks SIGINT and SIGTERM
                    start()
        finally:
            os.environ.clear()
            os.environ.update(environ)

    def ensure_running(self) -> None:
        """Leave a dead server dead: without it, children start plainly."""

    async def fork(
        self, child: context.ForkServerProcess, files: list[int]
    ) -> ForkedProcess:
        """Have the server fork a child. Raises EOFError or OSError if it has died."""
        starting = asyncio.ensure_future(asyncio.to_thread(self.start, child, files))
        try:
            await asyncio.wait({starting})
        except asyncio.CancelledError:
            # A child may already be forked, whose pid only the answer contains. The
            # death of a hung server ends the wait for its answer.
            loop = asyncio.get_running_loop()
            killing = loop.call_later(CANCELLED_S, self._kill)
            await shielded(asyncio.wait({starting}))
            killing.cancel()
            if starting.exception() is None:
                ForkedProcess(*starting.result()).kill()
            raise
        return ForkedProcess(*starting.result())

    def start(
        self, child: context.ForkServerProcess, files: list[int]
    ) -> tuple[int, connection.Connection]:
        """Return the process id, and where its exit code arrives. Blocks. Raises
        EOFError or OSError.
        """
        context.set_spawning_popen(self)  # type: ignore[arg-type]  # which allows to pickle a process
        # {}: do not import the user's script again
        message = pickle.dumps({}) + pickle.dumps(child)
        context.set_spawning_popen(None)
        status_fd, data = self.connect_to_new_process(files)
        status = connection.Connection(status_fd, writable=False)
        with os.fdopen(data, "wb") as pipe:
            pipe.write(message)
        # A stopped or hung server: killed, the read below ends with EOFError, and the
        # child starts plainly.
        if not status.poll(TIMEOUT_S):
            self._kill()
        return forkserver.read_signed(status.fileno()), status

    def _kill(self) -> None:
        os.kill(self._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._kill()
        # _stop() waits for the server's end, which may be in an import: the SIGKILL
        # first.
        self._stop()  # type: ignore[attr-defined]


current: ForkServer | None = None
"""Set inside serving()."""


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Fork children within the block. Raises ConfigError without torch, SystemExit on
    an early signal.
    """
    global current
    if importlib.util.find_spec("torch") is None:
        raise not_installed("torch")
    numbers = set(heard_stops()) if is_in_main_thread() else set()
    # Python raises KeyboardInterrupt at SIGINT. A script continues after asyncrl.run, and
    # may have its own handlers.
    with handled(numbers - {signal.SIGINT}, _end):
        server = current = ForkServer()
        try:
            yield
        finally:
            server.close()
            current = None


def _end(number: int, _: object) -> None:
    """End a command that still imports: its fork server, which imports too, would
    outlive it.
    """
    raise SystemExit(exit_code_of(number))
