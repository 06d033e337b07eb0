"""The life of one `asyncrl serve`: its directory, its signals, its processes. Knows no call and no
rollout.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.errors import AsyncrlError, ConfigError, RoomError, first_cause
from asyncrl.files import RunLock, write_whole
from asyncrl.observe.console import outliving
from asyncrl.run import start as startup
from asyncrl.run.build import CLOSE_TIMEOUT_S, close_within
from asyncrl.run.run_folder import allow_many_connections, logging_to, make_run_dir
from asyncrl.run.supervise import heartbeat

log = logging.getLogger(__name__)


@contextmanager
def open_folder(run_dir: Path | None, name: str, config: RunConfig) -> Iterator[Path]:
    """The directory for logs and a model from scratch, held by this process alone. Raises ConfigError if it
    is somebody else's.
    """
    folder = run_dir or Path("runs") / f"serve-{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    own = folder / "serve.yaml"
    if folder.is_dir() and not own.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} holds what no `asyncrl serve` has written",
            rule="a model and logs are written there",
            way_out="choose another --run-dir, or leave it out.",
        )
    make_run_dir(folder, config.observe.dir_mode)
    lock = RunLock(folder / "run.lock").acquire()
    try:
        shutil.rmtree(folder / "model", ignore_errors=True)  # of the last time, and of another config perhaps
        write_whole(own, run_config_yaml(config))
        allow_many_connections()
        with logging_to(folder):
            yield folder
    finally:
        lock.release()


def say(text: str) -> None:
    """A line for people, at once. That nobody reads any more (`| head`, a closed terminal) ends nothing."""
    log.info("%s", text)
    say_secret(text)


def say_secret(text: str) -> None:
    """A line with a key in it: printed, and in no file of ours."""
    outliving().write(f"{text}\n")


class Door:
    """Everything between the first process and the last one ended; what is told on the way goes to the
    console.

    Life:       run(live): live starts what it needs, watched by this; ready, it may wait_told_to_end() ->
    closed in opposite order. Waits:      as long as `live` does. A task that raises ends it, and so does a
    room that told on_broken. Invariant:  when run returns or raises, no process that was started is left; a
    second signal kills them and ends at once.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self._stack = AsyncExitStack()
        self._servers: list[startup.Server] = []
        self._signal: int | None = None
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[RoomError] | None = None
        self._told, self._is_serving = asyncio.Event(), False

    async def run(self, live: Callable[[], Awaitable[int]]) -> int:
        """The exit code. Raises the AsyncrlError that ended it."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number, main)
        self._broken = loop.create_future()
        try:
            async with self._stack, asyncio.TaskGroup() as self._group:
                self.spawn(self._raise_broken(), name="watch gateway")
                code = await live()
                for task in self._tasks:
                    task.cancel()
            return code
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            main.uncancel()
            return 128 + self._signal
        except BaseExceptionGroup as errors:
            raise self._as_ours(first_cause(errors)) from errors
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def wait_told_to_end(self) -> None:
        """Sleep until Ctrl-C, which is no interruption from here on."""
        self._is_serving = True
        await self._told.wait()

    def closes(self, name: str, close: Callable[[], Awaitable[None]]) -> None:
        """Close it at the end, before what was named earlier."""
        self._stack.push_async_callback(close_within, CLOSE_TIMEOUT_S, name, close)

    def spawn(self, coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task beside; what it raises ends everything."""
        assert self._group is not None, "run() is under way"
        task = self._group.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def start(self, servers: list[startup.Server]) -> None:
        """Start processes; returns when they answer, and are watched from then on."""
        for server in servers:
            self._servers.append(server)
            self.closes(server.name, server.aclose)
            await startup.start(server)
        await startup.wait_all_ready(servers)
        for server in servers:
            self.spawn(server.watch(), name=f"watch {server.name}")
            self.spawn(heartbeat(server, self.config.observe.heartbeat_s), name=f"heartbeat {server.name}")

    def on_broken(self, error: RoomError) -> None:
        """A room that no task waits for is broken."""
        assert self._broken is not None, "run() is under way"
        if not self._broken.done():
            self._broken.set_result(error)

    def say(self, text: str) -> None:
        """A line for people."""
        say(text)

    def tell(self, text: str) -> None:
        """What is being done."""
        say(f"{text} ...")

    def warn(self, text: str) -> None:
        """What went wrong and ends nothing."""
        say(f"WARNING: {text}")

    async def _raise_broken(self) -> None:
        assert self._broken is not None
        error = await self._broken
        waits = [asyncio.ensure_future(server.child.wait()) for server in self._servers]
        await asyncio.wait(
            waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED
        )  # a process that died is the cause to name
        for wait in waits:
            wait.cancel()
        raise next(
            (server.child.death() for server in self._servers if server.child.returncode is not None), error
        )

    def _as_ours(self, error: BaseException) -> AsyncrlError:
        log.error("ended by %s", error, exc_info=error)
        if isinstance(error, AsyncrlError):
            return error
        return RoomError(
            "controller",
            f"internal error {type(error).__name__}: {error}",
            way_out=f"the traceback is in {self.folder / 'logs' / 'controller.log'}; please report it.",
        )

    def _on_signal(self, number: int, main: asyncio.Task[Any]) -> None:
        if self._signal is not None:
            for server in self._servers:
                server.child.kill_nowait()
            os._exit(128 + number)
        self._signal = number
        self.tell("ending (once more to end at once)")
        if self._is_serving:
            self._told.set()
        else:
            main.cancel()
