"""Servers of OpenEnv environments that a worker starts: `python -m
asyncrl.agents.openenv_server FD MODULE:APP` serves an app on an inherited socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec

from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.base.http import die_with_parent
from asyncrl.base.user_code import find_here, load_object, message_of

APP = re.compile(r"([A-Za-z_][\w.]*)(?::([A-Za-z_]\w*))?")
OF_PACKAGE = "server.app"
"""Module of the app in an OpenEnv package (its openenv.yaml), where it is `app`."""
BACKLOG = 1024
READY = b"ready\n"
HEALTH_S = 5.0
"""Time in which a server that missed a limit must answer GET /health."""


class EnvironmentServer:
    """An OpenEnv app in a child process.

    Life: made -> ready() starts it -> it ends -> ready() starts it again. It ends with
        this process.
    Waits: ready() waits until the app listens.
    Invariant: the address stays the same, because this process holds the socket.
    """

    def __init__(self, name: str) -> None:
        """`name`: a package, or MODULE:APP. Raises ConfigError."""
        self._said = f"generator.openenv={name}"
        parts = APP.fullmatch(name)
        if parts is None:
            raise ConfigError(
                f"{self._said} is not an address, package or MODULE:APP",
                way_out="write http://HOST:PORT of a server, or what each worker starts.",
            )
        module, app = parts.groups()
        if app is None:
            module, app = f"{module}.{OF_PACKAGE}", "app"
        self._app = f"{module}:{app}"
        find_here()
        try:
            is_found = find_spec(module) is not None
        except ModuleNotFoundError:  # of a parent
            is_found = False
        if not is_found:
            raise ConfigError(
                f"{self._said}: there is no module {module}",
                rule="each worker imports it, from its folder or an installed package",
                way_out="install the environment's package, or correct the name.",
            )
        self.num_open = 0
        """Episodes."""
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = asyncio.Lock()

    async def ready(self, limit_s: float) -> str:
        """Return the address of the server, started if it does not run. Raises
        RolloutFailure.
        """
        async with self._lock:
            if self._socket is None:
                self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            if self._process is None or self._process.poll() is not None:
                await self._start(self._socket.fileno(), limit_s)
            return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        self.kill()  # closes the pipes of a server that has ended
        # Its output goes to the worker's log. Ctrl-C ends a run after its step, and
        # must not reach it.
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(fd), self._app],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            start_new_session=True,
        )

    async def _start(self, fd: int, limit_s: float) -> None:
        self._process = process = self._spawn(fd)
        assert process.stdin is not None
        assert process.stdout is not None
        line = None
        try:
            # die_with_parent() reads a line of secrets; there are none.
            process.stdin.write(b"{}\n")
            process.stdin.flush()
            async with asyncio.timeout(limit_s):
                line = await asyncio.to_thread(process.stdout.readline)
        except TimeoutError:
            pass
        except BrokenPipeError:
            line = b""
        finally:
            # Also if the rollout that starts it is cancelled.
            if line != READY:
                self.kill()
        if line is None:
            raise RolloutFailure(
                f"{self._said}: its server did not start within connect_s={limit_s:g} s",
                way_out="raise generator.args.connect_s: its imports, or this machine, are slow.",
                kind=FailureKind.ENVIRONMENT,
            )
        if line != READY:
            raise RolloutFailure(
                f"{self._said}: its server ended as it started",
                way_out="read its output: on the terminal of `asyncrl check`, or in the worker's log.",
                kind=FailureKind.ENVIRONMENT,
            )

    def kill(self) -> None:
        """End the server. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def close(self) -> None:
        """End the server for good. Idempotent."""
        self.kill()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def kill_if_hung(self) -> None:
        """End a server that does not answer; the next episode starts it again."""
        # Not while it starts: it cannot answer yet.
        async with self._lock:
            if self._socket is None or self._process is None:
                return
            url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/health"
            try:
                await asyncio.to_thread(read_local, url, HEALTH_S)
            except OSError:
                self.kill()


def read_local(url: str, timeout_s: float) -> bytes:
    """Return the answer of an environment's server, past any proxy. Raises OSError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=timeout_s) as answer:
        content: bytes = answer.read()
    return content


def main() -> None:
    die_with_parent()
    fd, app = sys.argv[1:]
    # The app may print. Its output must not fill the pipe, which only says READY.
    ready = os.dup(1)
    os.dup2(2, 1)
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn's handlers end the server by signals that die_with_parent() ignores.
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            os.write(ready, READY)

    try:
        target = load_object(app, "generator.openenv")
    except ConfigError as error:
        sys.exit(message_of(error))
    config = uvicorn.Config(target, log_level="warning", access_log=False)

    def is_news(record: logging.LogRecord) -> bool:
        # openenv-core 0.3 closes connections that their clients have closed: a traceback
        # of 90 lines at the end of each episode.
        error = record.exc_info and record.exc_info[1]
        return type(error).__name__ != "WebSocketDisconnect"

    logging.getLogger("uvicorn.error").addFilter(is_news)
    Server(config).run([socket.socket(fileno=int(fd))])


if __name__ == "__main__":
    main()
