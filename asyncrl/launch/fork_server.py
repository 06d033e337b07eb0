"""Fork server, with torch and transformers preloaded: a forked child saves about 4 CPU seconds.

Preloaded modules start no thread, open no device and run no torch operator. Secrets go through standard
input.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.base.errors import RoomError, without_train
from asyncrl.base.http import SECRET_ENV, WORKER_KEY_ENV
from asyncrl.base.waits import uncut

KEY_ENV = "ASYNCRL_VLLM_KEY"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Otherwise each hashing or copying thread starts a spinning OpenMP team."""
NEVER_INHERITED = (KEY_ENV, WORKER_KEY_ENV, SECRET_ENV, "RAY_AUTH_TOKEN")
"""Secrets: /proc shows environments."""
PRELOADED = (
    "asyncrl.trainer.random_init",
    "asyncrl.trainer.rank_process",
    "asyncrl_servers.embedded.__main__",
    "asyncrl_servers.simulated",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
TIMEOUT_S = 120.0
"""The first fork awaits imports."""
IMPORT_ENV = {
    **ONE_THREAD,
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, through scikit-learn
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # or is_available() opens the driver
}


class ForkedProcess:
    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._ended = asyncio.Event()
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
            self.returncode = forkserver.read_signed(self._status)
        except EOFError:  # only the fork server knows the exit code
            self.kill()
            self.returncode = -signal.SIGKILL
        os.close(self._status)
        self._ended.set()


class ForkServer:
    """Client. The server's death kills its children; the next fork restarts it."""

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        self.modules = frozenset(modules)
        self._server: Any = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(modules))
        self._ensure_running()

    @property
    def pid(self) -> int | None:
        return self._server._forkserver_pid  # type: ignore[no-any-return]

    def _ensure_running(self) -> None:
        before = dict(os.environ)
        os.environ.update(IMPORT_ENV | before)
        for name in NEVER_INHERITED:
            os.environ.pop(name, None)
        try:
            self._server.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def has(self, module: str) -> bool:
        return bool({module, f"{module}.__main__"} & self.modules)

    async def fork(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> ForkedProcess:
        """Run `module`.main() in a new process. Raises RoomError.

        The first three `files` become standard streams; the others keep their numbers.
        """

        async def start(is_last: bool = False) -> tuple[int, int]:
            self._ensure_running()
            try:
                return await asyncio.to_thread(self.start, module, arguments, env, files)
            except RoomError:  # the server died before it forked; nothing supervises a run's first processes
                if is_last:
                    raise
                return await start(is_last=True)

        started, cancelled = await uncut(start())
        process = ForkedProcess(*started)
        if cancelled is not None:
            process.kill()
            raise cancelled
        return process

    def start(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> tuple[int, int]:
        """Return (pid, exit code descriptor). Blocks. Raises RoomError."""
        status, data = self._server.connect_to_new_process(list(files))
        with os.fdopen(data, "wb") as pipe:
            pickle.dump({}, pipe)  # no preparation: do not import the user's script again
            pickle.dump(_Child(module, arguments, env, (0, 1, 2, *files[3:])), pipe)
        with contextlib.suppress(EOFError):
            if connection.wait([status], TIMEOUT_S):
                return forkserver.read_signed(status), status
        os.close(status)
        what = f"it died before it forked, or did not fork within {TIMEOUT_S:g} s"
        raise RoomError("fork server", what, way_out="run it again.")

    def close(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self._server._stop()


current: ForkServer | None = None
"""Set inside serving()."""


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Fork children within the block. Raises ConfigError without torch."""
    global current
    if find_spec("torch") is None:
        raise without_train("torch")
    current = ForkServer()
    try:
        yield
    finally:
        current.close()
        current = None


class _Child(NamedTuple):
    """Sent to the fork server, which calls `_bootstrap` in the new process."""

    module: str
    arguments: Sequence[str]
    env: Mapping[str, str]
    numbers: Sequence[int]

    def _bootstrap(self, parent_sentinel: int) -> int:
        for fd in (parent_sentinel, sys.stdin.fileno()):
            os.close(fd)
        process: Any = ForkServerProcess(target=self.run)
        return process._bootstrap(parent_sentinel)  # type: ignore[no-any-return]

    def run(self) -> None:
        os.setsid()
        gc.freeze()  # keep shared pages unwritten
        _take_files(self.numbers)
        os.environ.clear()
        os.environ.update(self.env)
        paths = self.env.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        sys.argv = [self.module, *self.arguments]
        set_title([sys.executable, "-m", *sys.argv])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # torch always starts at one seed
        main = importlib.import_module(self.module)
        if hasattr(main, "__path__"):
            main = importlib.import_module(f"{self.module}.__main__")
        main.main()


def _take_files(numbers: Sequence[int]) -> None:
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    for fd in (server._forkserver_alive_fd, tracker._fd, sys.stdin.fileno()):
        os.close(fd)
    tracker._fd = None
    files = server.get_inherited_fds()
    for fd, number in zip(files, numbers, strict=True):
        os.dup2(fd, number)
    for fd in set(files) - set(numbers):
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def set_title(command: Sequence[str]) -> None:
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start = int(stat[45])
    size = int(stat[46]) - start
    title = b"\0".join(map(os.fsencode, command))[: size - 1]
    ctypes.memmove(start, title.ljust(size, b"\0"), size)
