"""Start the servers of a run as forks of one process that has imported torch and transformers.

The fork server is the standard library's. It imports while the controller imports its own modules, and each
forked child saves about 4 CPU seconds. The preloaded modules start no thread, open no device and run no torch
operator, so a child behaves like `python -m MODULE`. Secrets go through the child's standard input, not its
environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import io
import os
import pickle
import resource
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from asyncrl.base.errors import RoomError, without_train
from asyncrl.base.message import SECRET_ENV, WORKER_KEY_ENV
from asyncrl.base.waits import uncut

KEY_ENV = "ASYNCRL_VLLM_KEY"
"""Environment variable with the key of vLLM servers that the run did not start."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Default for children: otherwise each thread that hashes or copies weights starts an OpenMP team per core,
which spins while it waits.
"""
NEVER_INHERITED = (KEY_ENV, WORKER_KEY_ENV, SECRET_ENV, "RAY_AUTH_TOKEN")
"""Keys of the run. Every process of this user can read an environment in /proc."""
PRELOADED = (
    "asyncrl.trainer.model.random_init",
    "asyncrl.trainer.rank_process",
    "asyncrl_servers.embedded.__main__",
    "asyncrl_servers.simulated",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
WITHOUT_GC = "asyncrl.launch.without_gc"
"""Preloaded first: garbage collection takes a fifth of the import time."""
TIMEOUT_S = 120.0
"""Limit for a fork. The first one waits for the imports."""
IMPORT_ENV = {
    **ONE_THREAD,
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, imported by scikit-learn
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() must not open the driver
}
"""Keeps libraries from starting threads when they are imported."""


class ForkedProcess:
    """A forked child, with the part of asyncio.subprocess.Process that we use."""

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
        except EOFError:  # the fork server died, and only it can see this child's exit code
            self.kill()
            self.returncode = -signal.SIGKILL
        os.close(self._status)
        self._ended.set()


class ForkServer:
    """The controller's end of the fork server, which ends with the controller. If it dies, its children are
    killed, and the next fork starts another server.
    """

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        self.modules = frozenset(modules)
        self._server: Any = forkserver.ForkServer()
        self._server.set_forkserver_preload([WITHOUT_GC, *modules])
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
        """Return True if `python -m module` can be forked."""
        return bool({module, f"{module}.__main__"} & self.modules)

    async def fork(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> ForkedProcess:
        """Start main() of `module` in a new process. Raises RoomError after TIMEOUT_S.

        The first three of `files` become the child's standard streams; the others keep their numbers.
        """
        self._ensure_running()
        started, cancelled = await uncut(asyncio.to_thread(self.start, module, arguments, env, files))
        process = ForkedProcess(*started)
        if cancelled is not None:
            process.kill()
            raise cancelled
        return process

    def start(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> tuple[int, int]:
        """Start a child; return its pid and the descriptor that carries its exit code. Blocks."""
        child = Child(module, arguments, env, (0, 1, 2, *files[3:]))
        status, data = self._server.connect_to_new_process(list(files))
        with os.fdopen(data, "wb") as pipe:
            pickle.dump({}, pipe)  # no preparation: the user's own script is never imported again
            pickle.dump(child, pipe)
        if not select.select([status], [], [], TIMEOUT_S)[0]:
            os.close(status)
            raise RoomError("fork server", f"no child within {TIMEOUT_S:g} s", way_out="run it again.")
        return forkserver.read_signed(status), status

    def close(self) -> None:
        """End the server. Idempotent."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self._server._stop()


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


class Child(ForkServerProcess):
    """Runs main() of a module in a fork, as `python -m` would. The base class turns its end into an exit
    code.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], numbers: Sequence[int]
    ) -> None:
        """Initialize. `numbers`: descriptors of the inherited files in the child."""
        super().__init__()
        self._values = (module, arguments, env, numbers)

    def __reduce__(self) -> tuple[type[Child], tuple[object, ...]]:
        return Child, self._values

    def _bootstrap(self, parent_sentinel: int) -> int:
        for fd in (parent_sentinel, sys.stdin.fileno()):
            os.close(fd)
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc,no-any-return]

    def run(self) -> None:
        module, arguments, env, numbers = self._values
        os.setsid()
        gc.freeze()  # collections do not touch the memory that the children share
        gc.enable()
        _take_files(numbers)
        os.environ.clear()
        os.environ.update(env)
        paths = env.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        sys.argv = [module, *arguments]
        _set_title([sys.executable, "-m", *sys.argv])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # random reseeds itself; torch always starts at one seed
        main = importlib.import_module(module)
        if hasattr(main, "__path__"):
            main = importlib.import_module(f"{module}.__main__")
        main.main()


def _take_files(numbers: Sequence[int]) -> None:
    """Give the inherited files these numbers, and close all others."""
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def _set_title(command: Sequence[str]) -> None:
    """Write `command` over the arguments that this process was started with, for `ps`."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start = int(stat[45])
    size = int(stat[46]) - start
    title = b"\0".join(map(os.fsencode, command))[: size - 1]
    ctypes.memmove(start, title.ljust(size, b"\0"), size)
