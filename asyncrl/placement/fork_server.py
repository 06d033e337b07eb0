"""The fork server of a run: imports torch, transformers and our servers once, and forks the children.

It starts before the controller has imported its own parts, so both import at the same time. It never opens a
device, starts no thread and runs no torch operator: a child that it forks is as good as one of `python -m`,
and costs some 4 CPU seconds less.

The controller sends a request over a socket pair: JSON, and the descriptors that the child gets (SCM_RIGHTS);
the child answers with its pid. The server forks twice, so that the child becomes the controller's own: a
subreaper adopts it, sees its exit status and ends it like any other. Secrets go through the child's standard
input, and neither the server nor a child has them in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import io
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.errors import without_train
from asyncrl.messages.base import SECRET_ENV, WORKER_KEY_ENV

logger = logging.getLogger("asyncrl.placement.fork_server")

KEY_ENV = "ASYNCRL_VLLM_KEY"
"""Environment variable with the key of vLLM servers that the run did not start."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Where the user's environment lacks it: threads that ask torch for no number of their own (those that hash
or copy weights beside a step) would each make a team as large as the machine, which spins while it waits.
"""
NEVER_INHERITED = (KEY_ENV, WORKER_KEY_ENV, SECRET_ENV, "RAY_AUTH_TOKEN")
"""Keys that the run itself may be given: an environment in /proc is open to every process of this user. No
child of ours speaks to Ray."""
PRELOADED = (
    "asyncrl.trainer.model.scratch",
    "asyncrl.trainer.rank_process",
    "asyncrl_servers.embedded.__main__",
    "asyncrl_servers.simulated",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
TIMEOUT_S = 120.0
"""Longest wait for a child: the imports come first, from a slow disk perhaps."""
MAX_REQUEST_BYTES = 2**20
"""More than a socket takes at once: an environment that is larger is refused there."""
_TITLE_ROOM = " " * 1000
"""An argument of the server that is as long as the command lines of its children may be."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class ForkedProcess:
    """A child that the fork server has forked, with what we use of asyncio.subprocess.Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """Sleep as long as it lives; its exit code, or the signal that ended it, negative."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, if it still lives."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


class ForkServer:
    """The controller's end. Life: started in its constructor, serves until close() or its own death.

    It dies with the controller, however that ends (PR_SET_PDEATHSIG).
    """

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        """If this process has imported all of `modules`, the server is forked from it: from its main thread,
        as in a notebook's there are others that may hold locks.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._turn = asyncio.Lock()
        self.is_alive = True
        self.modules = frozenset(modules)
        with theirs:
            is_main = threading.current_thread() is threading.main_thread()
            if not is_main or not all(name in sys.modules for name in modules):
                self.pid = _start_by_exec(theirs, modules)
            elif (pid := os.fork()) == 0:
                self._socket.close()
                _serve_or_exit(theirs, modules, os.getppid())
            else:
                self.pid = pid

    def has(self, module: str) -> bool:
        """Whether `python -m module` can be forked here."""
        return self.is_alive and bool({module, f"{module}.__main__"} & self.modules)

    async def fork(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> ForkedProcess | None:
        """A process that runs main() of `module`; None where this server is gone, and then for good.

        The first three of `files` become its standard streams; it has the others under their numbers here.
        """
        async with self._turn:
            try:
                with adopting():
                    self.send(module, arguments, env, files)
                    async with asyncio.timeout(TIMEOUT_S):
                        pid = await asyncio.get_running_loop().sock_recv(self._socket, 32)
                    return ForkedProcess(int(pid))
            except (ValueError, OSError) as error:
                told = "the fork server (process %s) is of no use any more, children start without it: %r"
                logger.warning(told, self.pid, error)
                self.close()
                return None
            except asyncio.CancelledError:  # the next answer would be that of this child
                self.close()
                raise

    def send(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> None:
        """Ask for a child, while adopting(). Its pid comes over the socket. Raises OSError."""
        request = {
            "module": module,
            "arguments": [*arguments],
            "env": dict(env),
            "numbers": [0, 1, 2, *files[3:]],
            "parent": os.getpid(),
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)

    def close(self) -> None:
        """End the server; its children live on. Idempotent."""
        if self.is_alive:
            self.is_alive = False
            self._socket.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def preloads(module: str) -> bool:
    """Whether a fork server of PRELOADED has what `python -m module` imports."""
    return not {module, f"{module}.__main__"}.isdisjoint(PRELOADED)


current: ForkServer | None = None
"""The one of this process, between the two ends of serving()."""


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Children of this process are forked in here, where they can be. Enter before any thread is started.
    Raises ConfigError where torch, which they need, is not installed.
    """
    global current
    if importlib.util.find_spec("torch") is None:
        raise without_train("torch")
    current = ForkServer()
    try:
        yield
    finally:
        current.close()
        current = None


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of each descendant whose own parent ends meanwhile."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start_by_exec(requests: socket.socket, modules: Sequence[str]) -> int:
    """`python -m` of this module, in an environment where loading a library starts no thread."""
    inherited = {name: value for name, value in os.environ.items() if name not in NEVER_INHERITED}
    inherited |= {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    inherited["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow, which scikit-learn imports
    inherited = ONE_THREAD | inherited
    command = [sys.executable, "-m", "asyncrl.placement.fork_server", str(os.getpid()), *modules, _TITLE_ROOM]
    actions = [(os.POSIX_SPAWN_DUP2, requests.fileno(), 3)]
    return os.posix_spawn(sys.executable, command, inherited, file_actions=actions)


# The server's own side, in its own process.


def _serve_or_exit(requests: socket.socket, modules: Sequence[str], parent: int) -> NoReturn:
    """Import `modules`, then fork a child for each request, until `parent` is gone."""
    try:
        _be_a_server(requests.fileno(), parent)
        gc.disable()  # imports leave next to nothing to collect, and looking takes a fifth of their time
        for name in modules:
            importlib.import_module(name)
        assert is_fork_safe(), "an import has started a thread or opened a device, which a fork would lose"
        gc.collect()
        gc.freeze()  # what the children share is not written to by their collectors
        gc.enable()
        while True:
            request, files, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 8)
            if not request:
                break
            if (middle := os.fork()) == 0:
                middle = os.getpid()
                if os.fork() == 0:
                    _run_child(middle, requests, json.loads(request), files)
                os._exit(0)
            os.waitpid(middle, 0)
            for fd in files:
                os.close(fd)
    finally:
        os._exit(1)


def _be_a_server(requests_fd: int, parent: int) -> None:
    """No terminal, no output, no descriptor but that of the requests, and no life without the parent."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    _set_title([sys.executable, "-m", "asyncrl.placement.fork_server"])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.closerange(3, requests_fd)
    os.closerange(requests_fd + 1, 1 << 16)
    # torch.cuda.is_available() must not open the driver, as imports may ask: no forked child could use it
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def is_fork_safe() -> bool:
    """Whether this process has one thread, and has not opened the CUDA driver."""
    opened = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            opened.add(str(link.readlink()))
    return "/dev/nvidia-uvm" not in opened and len(list(Path("/proc/self/task").iterdir())) == 1


def _run_child(middle: int, requests: socket.socket, request: dict[str, Any], files: list[int]) -> NoReturn:
    """Become what `python -m` would have started: session, streams, environment, arguments, randomness."""
    code = 1
    try:
        os.setsid()
        while os.getppid() == middle:
            time.sleep(0.0005)
        if os.getppid() != request["parent"]:
            os._exit(1)
        requests.send(str(os.getpid()).encode())
        requests.close()
        for fd, number in zip(files, request["numbers"], strict=True):
            os.dup2(fd, number)
        for fd in set(files) - set(request["numbers"]):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
        os.environ.clear()
        os.environ.update(request["env"])
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        module, sys.argv = request["module"], [request["module"], *request["arguments"]]
        _set_title([sys.executable, "-m", *sys.argv])
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        # random seeds itself after a fork; torch begins with the same seed in each process
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        (sys.modules.get(f"{module}.__main__") or sys.modules[module]).main()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _set_title(command: Sequence[str]) -> None:
    """What `ps` and /proc/PID/cmdline say of this process: written over the arguments it was started with."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(stat[45]), int(stat[46])
    title = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, len(title))


if __name__ == "__main__":
    _serve_or_exit(socket.socket(fileno=3), sys.argv[2:-1], int(sys.argv[1]))
