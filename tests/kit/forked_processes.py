"""Starts processes of a run for tests, as forks of a process that has imported all of
their modules. The fork server of such a run is a fork of the run.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import held_task

from asyncrl.base.http import SECRETS
from asyncrl.launch import fork_server
from asyncrl.launch.fork_server import PRELOADED, ForkServer, run, set_title

MODULES = (
    *PRELOADED,
    "asyncrl.cli",
    "asyncrl.job.loop",
    "asyncrl.job.resume",
    "asyncrl.job.serve",
    "asyncrl_servers.scoring.reward_model",
    __name__,
    "transformers.models.qwen3.modeling_qwen3",
)
_READ_WHEN_ASKED = {
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "ONEDNN_MAX_CPU_ISA",  # an engine in the test's process sets it; read at the first product
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it itself, when it is imported
    held_task.RUN_DIR,
}
"""Variables that no library reads when it is imported, or that all tests have at the
same value.
"""


def popen(
    command: list[str], env: Mapping[str, str], **options: Any
) -> subprocess.Popen[Any]:
    """subprocess.Popen of `python -m MODULE` in a new session; forked if MODULE is in
    MODULES.

    A fork has its libraries from a process that had the environment of the tests when
    they were collected: AssertionError for an `env` that differs from it, so that no
    run costs the imports without being seen to.
    """
    assert command[:2] == [sys.executable, "-m"], command
    can_fork = {command[2], f"{command[2]}.__main__"} & {*MODULES}
    differing = {
        name for name, _ in _read_early(env).items() ^ _read_early(_ENVIRONMENT).items()
    }
    assert not (can_fork and differing), (
        f"a fork cannot have its own {sorted(differing)}"
    )
    return (_Forked if can_fork else subprocess.Popen)(
        command, env=env, start_new_session=True, **options
    )


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name not in _READ_WHEN_ASKED and not SECRETS.fullmatch(name)
    }


class _Forked(subprocess.Popen[Any]):
    """A Popen whose process is forked, and whose end the fork server reports."""

    def _execute_child(self, args, *options) -> None:  # type: ignore[no-untyped-def]
        pass_fds, cwd, env, pipes = *options[3:6], options[9:15]
        module, *arguments = (
            args[2:] if cwd is None else [__name__, str(cwd), *args[2:]]
        )
        streams = [
            fd if fd >= 0 else number
            for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        files = [*streams, *pass_fds]
        target = warm_parent().modules[module]
        child = ForkServerProcess(target=run, args=(target, arguments, env, files))
        self.pid, self._status = warm_parent().start(child, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _internal_poll(self, *_, **__):  # type: ignore[no-untyped-def]
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._handle_exitstatus(self._try_wait(0)[1])
        return self.returncode

    def _try_wait(self, wait_flags):  # type: ignore[no-untyped-def]
        if wait_flags == os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        code = forkserver.read_signed(self._status.fileno())
        self._status.close()
        return self.pid, -code if code < 0 else code << 8


def main() -> None:
    """In a fork: main() of a module, in another folder."""
    folder, *sys.argv = sys.argv[1:]
    os.chdir(folder)
    sys.modules[sys.argv[0]].main()


@functools.cache
def warm_parent() -> ForkServer:
    """Return the process that all are forked from. It may also be fork_server.current."""
    fork_server.TIMEOUT_S = PATIENCE_S
    with patch.dict(os.environ, _ENVIRONMENT | {IS_PARENT: "1"}, clear=True):
        server = ForkServer(MODULES)
    atexit.register(server.close)
    return server


PATIENCE_S = 500.0
"""Seconds for the imports of that process on a busy machine."""
IS_PARENT = "ASYNCRL_TEST_IS_PARENT"
_spawn = util.spawnv_passfds


def _fork_or_spawn(path: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Fork the fork server of a run before the run has threads: it imports nothing
    again.
    """
    code = arguments[-1]
    is_early = threading.active_count() == 1 and asyncio._get_running_loop() is None
    if "forkserver import main" not in code or not is_early:
        return _spawn(path, arguments, passed)
    if pid := os.fork():
        return pid
    try:
        for fd in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {
            0,
            1,
            2,
            *passed,
        }:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(fd)
        set_title("\0".join(map(os.fsdecode, arguments)))
        exec(code, {})
    finally:
        os._exit(0)


if os.environ.pop(IS_PARENT, None):
    util.spawnv_passfds = _fork_or_spawn


_PATHS = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
_ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(_PATHS),
    "OMP_NUM_THREADS": "1",
}
