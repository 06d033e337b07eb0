"""Lifecycle of a command: run directory, log, signals, tasks and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import resource
import secrets
import shlex
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from asyncrl.base.errors import (
    AsyncrlError,
    CallbackError,
    ComponentError,
    ConfigError,
    first_cause,
)
from asyncrl.base.files import clear_own_staging, run_lock, write_whole
from asyncrl.base.host import leave_process
from asyncrl.base.progress import EVERY_S
from asyncrl.base.signals import exit_code_of, heard_stops, is_in_main_thread
from asyncrl.base.user_code import message_of, place_of
from asyncrl.base.waits import shielded
from asyncrl.config import RunConfig
from asyncrl.launch.processes import Launcher
from asyncrl.launch.supervise import Server, Supervision, first_death
from asyncrl.observe.console import RunLog
from asyncrl.observe.run_dir import ID_FILE, LOCK_FILE, LOG_FILE

T = TypeVar("T")
logger = logging.getLogger("asyncrl.job.lifecycle")

CLOSE_TIMEOUT_S = 15.0
FEW_FILES = 256
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of a write to an open file, which name no file."""
MAX_DEAF_S = 10.0
"""Kubernetes kills 30 s after SIGTERM; the loop's own work takes milliseconds."""
SAME_SIGNAL_S = 0.1
"""`timeout` and `uv run` may send a signal twice, and systemd SIGTERM and SIGHUP, within
milliseconds.
"""


class SentSignals:
    """Signals that another thread gets for a run, which may not have begun."""

    def __init__(self) -> None:
        self._numbers = deque[int]()
        self._wake: Callable[[], object] | None = None

    def send(self, number: int) -> None:
        # Before the test: follow() sets `_wake` before it takes the signals, so that
        # this one is heard in any case.
        self._numbers.append(number)
        # Read once: unfollow() may empty it at any time, in the thread of the run.
        wake = self._wake
        if wake is not None:
            # The loop may have closed since; then nothing runs.
            with contextlib.suppress(RuntimeError):
                wake()

    def follow(self, hear: Callable[[int], None]) -> None:
        """Call `hear` in this thread's loop for each signal, also for earlier ones."""

        def hear_all() -> None:
            while self._numbers:
                hear(self._numbers.popleft())

        loop = asyncio.get_running_loop()
        self._wake = functools.partial(loop.call_soon_threadsafe, hear_all)
        hear_all()

    def unfollow(self) -> None:
        self._wake = None


@dataclass(eq=False)
class Lifecycle:
    """Signals, tasks and shutdown of a command that starts processes. Owns the only
    TaskGroup.

    Life: run(live) awaits live(), which starts everything; shutdown is in reverse
        order.
    Waits: run() waits for live(). A task that raises, or on_broken, ends it.
    Invariant: no process remains after run(). The first signal of STOPS sets `stop`
        while `can_stop`, and otherwise cancels live(); the second kills all processes
        and exits. So does the first after MAX_DEAF_S, if user code blocks the event
        loop.

    `on_end` gets the state (done, interrupted or failed), the reason, and whether a
    rerun may succeed; `on_exit` is awaited last.
    """

    config: RunConfig
    run_dir: Path
    log: RunLog
    launcher: Launcher
    _: KW_ONLY
    on_end: Callable[[str, str, bool], None] = lambda *_: None
    on_exit: Callable[[], Awaitable[None]] | None = None
    servers: Sequence[Server] = ()
    """Their deaths replace the failed calls that they cause."""
    sent_signals: SentSignals = field(default_factory=SentSignals)

    def __post_init__(self) -> None:
        # other nodes have another working directory
        self.run_dir = self.run_dir.absolute()
        self.stack = AsyncExitStack()
        self.stop = asyncio.Event()
        self.can_stop = False
        self.signal: int | None = None
        self._first_s: float | None = None
        """When the first signal arrived in the main thread."""
        self._main: asyncio.Task[object] | None = None
        self._group: asyncio.TaskGroup | None = None
        # Weak: a run has a task per rollout, and only the unfinished ones, which the
        # group holds, can be cancelled.
        self._tasks = weakref.WeakSet[asyncio.Task[Any]]()
        # Of concurrent.futures, since an asyncio one needs the loop, which starts
        # later.
        self._broken: Future[None] = Future()

    async def run(self, live: Callable[[], Awaitable[int]]) -> int:
        """Return the exit code of live(), or a signal's. Raises the AsyncrlError that
        ended it.
        """
        self._main = asyncio.current_task()
        assert self._main is not None
        self._main.set_name("train loop")
        asyncio.get_running_loop().set_exception_handler(self._on_lost)
        self.sent_signals.follow(self.interrupt_nowait)
        earlier_handlers = self._listen()
        try:
            try:
                code = await self._live(live)
            except asyncio.CancelledError:
                if self.signal is None:
                    self.on_end("interrupted", "its task was cancelled", True)
                    raise
                # The request to cancel is served; on_exit must not run as a cancelled
                # task.
                self._main.uncancel()
                code = self.exit_code
            if code > 128:
                name = signal.Signals(self.signal or code - 128).name
                self.on_end("interrupted", f"interrupted by {name}", True)
            else:
                self.on_end("done", "", True)
            return code
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # outermost frame
            raise self._fail(error) from error
        finally:
            self.can_stop = False  # a signal now cuts only this wait
            if self.on_exit is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await self.on_exit()
            self.can_stop = True  # nothing is left to cut
            self.sent_signals.unfollow()
            # A script may continue after the run, and its next Ctrl-C is its own.
            for number, handler in earlier_handlers.items():
                asyncio.get_running_loop().remove_signal_handler(number)
                if handler is not None:  # else it is not Python's
                    signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else exit_code_of(self.signal)

    def _listen(self) -> dict[int, Any]:
        """Handle signals of the main thread; return the earlier handlers."""
        if not is_in_main_thread():
            return {}
        earlier: dict[int, Any] = {
            number: signal.getsignal(number) for number in heard_stops()
        }
        for number in earlier:
            asyncio.get_running_loop().add_signal_handler(
                number, self.interrupt_nowait, number
            )
            # The loop keeps hearing of signals. This handler also runs within user
            # code that blocks it.
            signal.signal(number, self._on_signal)
        return earlier

    async def _live(self, live: Callable[[], Awaitable[int]]) -> int:
        async with self.stack:
            self.closes("launcher", self.launcher.aclose)
            try:
                # Within the stack: all tasks have ended before the first component is
                # closed.
                async with asyncio.TaskGroup() as self._group:
                    self.spawn(self._wait_broken(), name="watch gateway")
                    self.spawn(self._repeat_stage(), name="watch stages")
                    code = await live()
                    # Guards run forever, and the group waits for all tasks.
                    self.cancel_tasks()
            except BaseExceptionGroup as errors:
                # a broken call may mean that its process just died: give the kernel
                # time to report it
                timeout_s = (
                    1.0 if isinstance(first_cause(errors), ComponentError) else 0.0
                )
                if (death := await first_death(self.servers, timeout_s)) is not None:
                    raise death from errors
                raise
        return code

    def supervision(
        self, on_event: Callable[[str, Mapping[str, object]], None]
    ) -> Supervision:
        """Return what supervisors share. `on_event` gets losses and restarts."""
        config = self.config
        heartbeat_s = config.observe.heartbeat_s
        return Supervision(config.supervision, heartbeat_s, self.log.warn, on_event)

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        assert self._group is not None, "tasks are started while run() is under way"
        task = self._group.create_task(coro, name=name)
        self._tasks.add(task)
        return task

    def cancel_tasks(self, *, all_but: tuple[str, ...] = ()) -> None:
        """Cancel tasks, except names with a prefix in `all_but`."""
        for task in self._tasks:
            if not task.get_name().startswith(all_but):
                task.cancel()

    def closes(self, name: str, close: Callable[[], Awaitable[None]]) -> None:
        """Register `close` for the end, before earlier ones."""
        self.stack.push_async_callback(close_within, CLOSE_TIMEOUT_S, name, close)

    def on_broken(self, error: ComponentError) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    async def _wait_broken(self) -> None:
        await asyncio.wrap_future(self._broken)

    async def _repeat_stage(self) -> None:
        """Say the stage of a start or an end again while it takes long."""
        while True:
            stage = self.log.current_activity
            await asyncio.sleep(EVERY_S)
            if stage and stage == self.log.current_activity and not self.can_stop:
                self.log.activity(stage)

    def _fail(self, raised: BaseException) -> AsyncrlError:
        error = raised
        if isinstance(error, BaseExceptionGroup):
            error = first_cause(error)
        # The user's disk or permissions. Any other OSError is a bug in asyncrl.
        if isinstance(error, OSError) and (
            error.filename or error.errno in DISK_ERRORS
        ):
            error = ComponentError(
                "controller",
                f"cannot use {error.filename or f'the run directory {self.run_dir}'}: {error.strerror}",
                way_out="restore it, its permissions or space on its disk, then start again.",
            )
        elif not isinstance(error, AsyncrlError):
            error = ComponentError(
                "controller",
                f"internal error {message_of(error)}",
                way_out=f"report it with the traceback in {self.run_dir / LOG_FILE}.",
            )
        # Not `error`, which may be new: only the raised error has a traceback.
        logger.error("ended by %s", error, exc_info=raised)
        with contextlib.suppress(OSError, CallbackError):
            self.on_end("failed", str(error), not isinstance(error, ConfigError))
        return error

    def _on_lost(self, loop: asyncio.AbstractEventLoop, lost: dict[str, Any]) -> None:
        """Name the first error that nothing awaits, usually of a task that an async
        reward started; the log has all.
        """
        error = lost.get("exception")
        logger.warning("%s", lost["message"], exc_info=error)
        what = lost["message"] if error is None else message_of(error)
        self.log.warn_once(
            "lost", f"an error in a task that nothing awaits: {what}; the log has more"
        )

    def interrupt_nowait(self, number: int) -> None:
        assert self._main is not None
        if self.signal is None:
            self.signal = number
            self.log.activity("stopping (press Ctrl-C again to end at once)")
            if self.can_stop:
                self.stop.set()
            else:
                self._main.cancel()
        # In the main thread, _on_signal decides about a second signal.
        elif not is_in_main_thread():
            self._main.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """End at once at the second signal, and watch whether the loop hears the first."""
        if self._first_s is None:
            watch = threading.Timer(
                MAX_DEAF_S, self._exit_if_deaf, (number, threading.get_ident())
            )
            watch.daemon = True
            watch.start()
            self._first_s = time.monotonic()
        elif time.monotonic() - self._first_s >= SAME_SIGNAL_S:
            self._exit(number)

    def _exit_if_deaf(self, number: int, main_thread: int) -> None:
        """End a run whose loop has not seen its first signal."""
        assert self._main is not None
        if self.signal is not None or self._main.done():
            return
        text = (
            f"ended by {signal.Signals(number).name} without a checkpoint: the run did not hear it for "
            f"{MAX_DEAF_S:g} s in\n{place_of(main_thread)}  It can be resumed."
        )
        # The blocked thread may hold a lock of the log.
        warning = threading.Thread(target=self.log.warn, args=(text,), daemon=True)
        warning.start()
        warning.join(timeout=1.0)
        self._exit(number)

    def _exit(self, number: int) -> None:
        for server in self.servers:  # other processes end with our pipe
            server.child.kill_nowait()
        # Exports in shared memory would outlive the process. Not sys.exit, because a
        # normal exit joins threads and so might wait for the code that blocks.
        clear_own_staging()
        leave_process(exit_code_of(number))


async def close_within(
    timeout_s: float, name: str, close: Callable[[], Awaitable[None]]
) -> None:
    """Close a resource within a time limit; log a failure. A cancellation passes on
    afterwards.
    """
    closing = asyncio.ensure_future(close())
    # A signal during the shutdown must not leave a half-closed resource, such as a
    # process, behind. The limit bounds the delay.
    _, cancelled = await shielded(asyncio.wait({closing}, timeout=timeout_s))
    if not closing.done():
        closing.cancel()
        logger.warning(
            "closing %s took longer than %s s and was given up", name, timeout_s
        )
    elif not closing.cancelled() and (error := closing.exception()) is not None:
        logger.warning("closing %s failed: %s", name, error, exc_info=error)
    if cancelled is not None:
        raise cancelled


def new_run_dir(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


@contextlib.contextmanager
def locked_run_dir(folder: Path, mode: int) -> Iterator[None]:
    """Make and lock the directory. Permissions of a non-empty directory are not
    changed.
    """
    try:
        # mkdir subtracts the umask from its mode, so chmod sets the final one. Until
        # then nobody else may read the directory.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            # a mounted volume of another user
            with contextlib.suppress(PermissionError):
                folder.chmod(mode)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}",
            way_out="choose another --run-dir.",
        ) from error
    with run_lock(folder / LOCK_FILE):
        yield


def run_id(run_dir: Path) -> str:
    """Return the run's id, created if missing; copies keep it."""
    path = run_dir / ID_FILE
    if not path.exists():
        write_whole(path, secrets.token_hex(8) + "\n")
    return path.read_text(encoding="utf-8").strip()


def run_again(folder: Path, *more: str, command: str = "run") -> str:
    config = str(folder / "config.yaml")
    return shlex.join(["asyncrl", command, config, "--run-dir", str(folder), *more])


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Run the cycle collector rarely: it blocks the event loop for a microsecond per
    object, and finished rollouts contain no cycles.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    # older objects: about every 20 million net allocations
    gc.set_threshold(1_000, 20_000, 10)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def num_rollouts(config: RunConfig, num_engines: int | None = None) -> int:
    """Return the concurrent rollouts (`num_engines` None: all engines)."""
    concurrency = config.generator.concurrency
    num = config.rollout.max_engines if num_engines is None else num_engines
    return config.rollout.num_slots * num if concurrency == "auto" else concurrency


def refuse_few_files(config: RunConfig) -> None:
    """Raise the limit of open files to its maximum. Raises ConfigError if the rollouts
    need more.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    num = num_rollouts(config)
    # An agent has its own connection to the endpoint.
    needed = FEW_FILES + num * (2 if config.harnesses else 1)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"this process may open {hard} files, and {num} concurrent rollouts need about {needed}",
            rule="every request in flight is a connection, and the hard limit of RLIMIT_NOFILE holds",
            way_out=f"raise it (ulimit -Hn {needed}), or lower rollout.slots or generator.concurrency.",
        )
