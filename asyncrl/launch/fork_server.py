"""Start the servers of a run as forks of one process that has imported torch and transformers.

The fork server is the standard library's. It starts before the controller imports its own modules, so both
import at the same time, and a forked child saves about 4 CPU seconds. The preloaded modules start no thread,
open no device and run no torch operator, so a child equals a `python -m` process. Secrets go through the
child's standard input and stay out of both environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import io
import logging
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from asyncrl.base.errors import without_train
from asyncrl.base.message import SECRET_ENV, WORKER_KEY_ENV

logger = logging.getLogger("asyncrl.launch.fork_server")

KEY_ENV = "ASYNCRL_VLLM_KEY"
"""Environment variable with the key of vLLM servers that the run did not start."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Default for children. Without it each thread that hashes or copies weights would start an OpenMP team as
large as the machine, which spins while it waits.
"""
NEVER_INHERITED = (KEY_ENV, WORKER_KEY_ENV, SECRET_ENV, "RAY_AUTH_TOKEN")
"""Keys of the run itself. Every process of this user can read an environment in /proc."""
PRELOADED = (
    "asyncrl.trainer.model.random_init",
    "asyncrl.trainer.rank_process",
    "asyncrl_servers.embedded.__main__",
    "asyncrl_servers.simulated",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
WITHOUT_GC = "asyncrl.launch.without_gc"
"""Preloaded first: garbage collection would take a fifth of the time of the imports."""
TIMEOUT_S = 120.0
"""Longest wait for a child. The first one waits for the imports."""
IMPORT_ENV = {
    **ONE_THREAD,
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, imported by scikit-learn
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() must not open the driver
}
"""Variables that keep libraries from starting threads when they are imported."""


class ForkedProcess:
    """A forked child, with the part of asyncio.subprocess.Process that we use."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(status, self._read_status)

    async def wait(self) -> int:
        """Wait until it ends; return its exit code, or minus the signal that ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL if it still lives."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read_status(self) -> None:
        asyncio.get_running_loop().remove_reader(self._status)
        try:
            self.returncode = forkserver.read_signed(self._status)
        except EOFError:  # the fork server died, and nobody else can see how this child ends
            self.kill()
            self.returncode = -signal.SIGKILL
        os.close(self._status)
        self._ended.set()


class ForkServer:
    """The controller's end of the fork server. Life: started by the constructor, used until close() or its
    own death. It ends with the controller, and its children end with it.
    """

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        self.modules = frozenset(modules)
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([WITHOUT_GC, *modules])
        before = dict(os.environ)
        os.environ.update(IMPORT_ENV | before)
        for name in NEVER_INHERITED:
            os.environ.pop(name, None)
        try:
            self._server.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.pid: int = self._server._forkserver_pid  # type: ignore[attr-defined]
        self.is_alive = True

    def has(self, module: str) -> bool:
        """Return True if `python -m module` can be forked."""
        return self.is_alive and bool({module, f"{module}.__main__"} & self.modules)

    async def fork(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> ForkedProcess | None:
        """Start main() of `module` in a new process. Return None if the server is gone, then and ever after.

        The first three of `files` become the child's standard streams; it keeps the numbers of the others.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                pid, status = await asyncio.to_thread(self.start, module, arguments, env, files)
            return ForkedProcess(pid, status)
        except (OSError, EOFError) as error:
            text = "the fork server (process %s) is gone; children start without it from now on: %r"
            logger.warning(text, self.pid, error)
            self.close()
            return None
        except asyncio.CancelledError:  # the child must not outlive the request
            self.close()
            raise

    def start(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> tuple[int, int]:
        """Start a child; return its pid and the descriptor that carries its exit code. Raises OSError,
        EOFError.
        """
        if not self.is_alive or os.waitpid(self.pid, os.WNOHANG) != (0, 0):
            raise ProcessLookupError(f"process {self.pid} has ended")
        numbers = (0, 1, 2, *files[3:])
        child = Child(
            module, tuple(arguments), dict(env), numbers, resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        leads, its_end = os.pipe()
        with os.fdopen(leads, "rb") as leads_group:
            try:
                status, data = self._server.connect_to_new_process([its_end, *files])
            finally:
                os.close(its_end)
            with os.fdopen(data, "wb") as pipe:
                pid = forkserver.read_signed(status)
                pickle.dump({}, pipe)  # no preparation: the user's own script is never imported again
                pickle.dump(child, pipe)
            leads_group.read()  # else a signal to its group could come too early
        return pid, status

    def close(self) -> None:
        """End the server. Idempotent."""
        if self.is_alive:
            self.is_alive = False
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                self._server._stop()  # type: ignore[attr-defined]


def preloads(module: str) -> bool:
    """Return True if PRELOADED covers `python -m module`."""
    return not {module, f"{module}.__main__"}.isdisjoint(PRELOADED)


current: ForkServer | None = None
"""The fork server of this process, inside serving()."""


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Fork the children of this process while inside. Raises ConfigError if torch is not installed."""
    global current
    if importlib.util.find_spec("torch") is None:
        raise without_train("torch")
    current = ForkServer()
    try:
        yield
    finally:
        current.close()
        current = None


@dataclass(frozen=True)
class Child:
    """Main of a forked process, in place of a multiprocessing.Process."""

    module: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    numbers: tuple[int, ...]
    open_files: tuple[int, int]

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Become what `python -m` would have started: session, streams, environment, arguments."""
        code = 1
        try:
            self._take_over(parent_sentinel)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()  # random reseeds itself; torch always starts at one seed
            (sys.modules.get(f"{self.module}.__main__") or sys.modules[self.module]).main()
            code = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        with contextlib.suppress(OSError, ValueError):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        return code

    def _take_over(self, parent_sentinel: int) -> None:
        os.setsid()
        gc.freeze()  # collections do not touch the memory that the children share
        gc.enable()
        server: Any = forkserver._forkserver
        tracker: Any = resource_tracker._resource_tracker
        for fd in (parent_sentinel, server._forkserver_alive_fd, tracker._fd, sys.stdin.fileno()):
            os.close(fd)
        tracker._fd = None
        leads_group, *files = server.get_inherited_fds()
        os.close(leads_group)
        for fd, number in zip(files, self.numbers, strict=True):
            os.dup2(fd, number)
        for fd in set(files) - set(self.numbers):
            os.close(fd)
        sys.stdin = os.fdopen(0, closefd=False)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.open_files)
        os.environ.clear()
        os.environ.update(self.env)
        paths = self.env.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        sys.argv = [self.module, *self.arguments]
        _set_title([sys.executable, "-m", *sys.argv])
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)


def _set_title(command: Sequence[str]) -> None:
    """Write `command` over the arguments that this process was started with, for `ps`."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(stat[45]), int(stat[46])
    title = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, len(title))
