"""Starts processes of a run for tests, as forks of one that has imported all of them."""

from __future__ import annotations

import atexit
import functools
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from asyncrl.messages.base import SECRET_ENV
from asyncrl.placement.fork_server import PRELOADED, ForkServer, adopting

MODULES = (
    *PRELOADED,
    "asyncrl.cli",
    "asyncrl.run.loop",
    "asyncrl.run.resume",
    "asyncrl.run.serve",
    "transformers.models.qwen3.modeling_qwen3",
)
_READ_WHEN_ASKED = {
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it itself, when it is imported
    SECRET_ENV,
}
"""Variables that no library reads when it is imported, or that all tests have at the same value."""


def popen(command: list[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """subprocess.Popen in a new session; forked, if it is `python -m MODULE` and `env` is as usual."""
    can_fork = command[:2] == [sys.executable, "-m"] and {command[2], f"{command[2]}.__main__"} & {*MODULES}
    kind = _Forked if can_fork and _read_early(env) == _read_early(_ENVIRONMENT) else subprocess.Popen
    return kind(command, env=env, start_new_session=True, **options)


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _READ_WHEN_ASKED}


class _Forked(subprocess.Popen[Any]):
    """Forked where Popen would start: all else is Popen's."""

    def _execute_child(self, args, *options) -> None:  # type: ignore[no-untyped-def]
        pass_fds, env, pipes = options[3], options[5], options[9:15]
        stdin, stdout, stderr = pipes[0], pipes[3], pipes[5]
        with adopting():
            server = _warm_parent()
            server.send(args[2], args[3:], env, [max(stdin, 0), stdout, stderr, *pass_fds])
            select.select([server._socket], [], [])
            self.pid = int(server._socket.recv(32))
        self._child_created = True
        self._close_pipe_fds(*pipes)


@functools.cache
def _warm_parent() -> ForkServer:
    with patch.dict(os.environ, _ENVIRONMENT, clear=True):
        server = ForkServer(MODULES)
    atexit.register(server.close)
    return server


_ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
