"""The life of one command that starts processes (`asyncrl run`, `asyncrl serve`): its directory and log, its
signals, its tasks, and what is closed at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import shlex
import shutil
import signal
import stat
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config import RunConfig
from asyncrl.errors import AsyncrlError, CallbackError, ConfigError, RoomError, first_cause
from asyncrl.files import write_whole
from asyncrl.http import OUT_OF_FILES
from asyncrl.job.start import Server, first_death
from asyncrl.journal.read import reading
from asyncrl.observe.console import outliving
from asyncrl.placement.launchers import LocalLauncher
from asyncrl.placement.nodes import Launcher
from asyncrl.staging import clear_own_staging
from asyncrl.waits import uncut

if TYPE_CHECKING:
    from asyncrl.messages.records import GroupId, Prompt
    from asyncrl.rollouts.rollout import FailedRollout
    from asyncrl.rollouts.tokenizer import HFChatTokenizer

logger = logging.getLogger("asyncrl.job.life")

CLOSE_TIMEOUT_S = 15.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Signals for a run that works beside the main thread, which alone gets those of the process.

    Life: keeps what is sent until receive_by() names who gets it. Any thread may call send().
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may interrupt another one
        self._kept: list[int] = []
        self._receive: Callable[[int], None] | None = None

    def send(self, number: int) -> None:
        """Pass on a signal."""
        with self._lock:
            if self._receive is None:
                self._kept.append(number)
            else:
                self._receive(number)

    def receive_by(self, receive: Callable[[int], None] | None) -> None:
        """Pass on what was kept, and all that comes, to `receive` (None: keep it)."""
        with self._lock:
            self._receive = receive
            while self._kept and receive is not None:
                receive(self._kept.pop(0))


class Voice:
    """The messages of a command to its user. A console that is not read any more (`| head`, a closed
    terminal) is no error.
    """

    def say(self, text: str) -> None:
        """One line that stays, on the console and in the log."""
        logger.info("%s", text)
        self.say_secret(text)

    def say_secret(self, text: str) -> None:
        """The same with a key in it: it is printed, and in no file of ours."""
        outliving().write(f"{text}\n")

    def tell(self, text: str) -> None:
        """What is being done, or waited for, in words."""
        self.say(f"{text} ...")

    def warn(self, text: str) -> None:
        """A warning: something failed, and the command goes on."""
        logger.warning("%s", text)
        self.say_secret(f"WARNING: {text}")

    def published(self, version: int, digest: str) -> None:
        """Every engine serves new weights."""

    def rollout_failed(
        self, tokenizer: HFChatTokenizer, group_id: GroupId, prompt: Prompt, failed: FailedRollout
    ) -> None:
        """A rollout has failed for good."""

    def finish(self, state: str, why: str = "", *, can_go_on: bool = True) -> None:
        """How it ended: done, interrupted or failed. Without `can_go_on` the same command would fail
        again.
        """

    async def aclose(self) -> None:
        """After finish(): what is still told elsewhere has a limited time. A signal ends the wait."""


class Life(ABC):
    """Everything between the first process that a command starts and the last one ended. Owns the one
    TaskGroup.

    Life: run() calls live(), which starts what it needs, and closes it at the end in the opposite order.
    Waits: as long as live() does. A task that raises ends it, and so does a part that told on_broken.
    Invariant: when run() returns or raises, no process that was started is left. The first SIGINT or SIGTERM
        sets `stop` while `can_stop`, so that live() ends by itself, and cancels it else; the second one kills
        all processes and ends at once.
    """

    ending = "ending"
    """What the first signal does, in words."""
    main_task = "main"
    """The name of the task of run(), for stacks and waits."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        voice: Voice | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        # on other nodes processes have another working folder
        self.run_dir = run_dir if config.launcher == "local" else run_dir.absolute()
        self.config, self.voice = config, voice or Voice()
        self.launcher: Launcher = launcher or LocalLauncher()
        self.say, self.say_secret = self.voice.say, self.voice.say_secret
        self.tell, self.warn = self.voice.tell, self.voice.warn
        self.servers: Sequence[Server] = ()
        """The command needs all of these. If one has died, its death is reported, and not the call that
        failed because of it.
        """
        self.stack = AsyncExitStack()
        self.stop, self.can_stop = asyncio.Event(), False
        self.interrupts: Interrupts | None = None
        """Set by a caller that runs this beside the main thread, and whose process a signal must not end."""
        self._signal: int | None = None
        self._group: asyncio.TaskGroup | None = None
        self._tasks = weakref.WeakSet[asyncio.Task[None]]()  # the group holds those that run
        self._broken: Future[None] = Future()

    @abstractmethod
    async def live(self) -> int:
        """What the command does, in the TaskGroup; returns its exit code."""

    async def run(self) -> int:
        """The exit code: that of live(), or 128 + the signal that cut it. Raises the AsyncrlError that ended
        it.
        """
        main = asyncio.current_task()
        assert main is not None
        main.set_name(self.main_task)
        self._listen(main)
        try:
            return self._finish(await self._live())
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            main.uncancel()
            return self._finish(128 + self._signal)
        except BaseExceptionGroup as errors:
            raise self._fail(first_cause(errors)) from errors
        except Exception as error:  # the outermost frame: foreign exceptions become an error of ours
            raise self._fail(error) from error
        finally:
            self.can_stop = False  # a signal cuts this wait, and nothing else
            with contextlib.suppress(asyncio.CancelledError):
                await self.voice.aclose()
            self._stop_listening()

    def _listen(self, main: asyncio.Task[Any]) -> None:
        """Receive signals: of the process in the main thread, else those that `interrupts` passes on."""
        loop = asyncio.get_running_loop()
        if self.interrupts is not None:

            def receive(number: int) -> None:
                loop.call_soon_threadsafe(self._on_signal, number, main)

            self.interrupts.receive_by(receive)
        elif threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                loop.add_signal_handler(number, self._on_signal, number, main)

    def _stop_listening(self) -> None:
        if self.interrupts is not None:
            self.interrupts.receive_by(None)
        elif threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)

    def _finish(self, code: int) -> int:
        if code > 128:
            self.voice.finish("interrupted", f"interrupted by {signal.Signals(code - 128).name}")
        else:
            self.voice.finish("done")
        return code

    async def _live(self) -> int:
        async with self.stack:
            self.launcher.say = self.warn
            self.closes("launcher", self.launcher.aclose)
            try:
                async with asyncio.TaskGroup() as self._group:
                    code = await self.live()
                    self.end_tasks()
            except BaseExceptionGroup as errors:
                # A call that broke may mean that its process just died: the kernel has a moment to say so.
                timeout_s = 1.0 if isinstance(first_cause(errors), RoomError) else 0.0
                if (death := await first_death(self.servers, timeout_s)) is not None:
                    raise death from errors
                raise
        return code

    def spawn(self, coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task in the TaskGroup: if it raises, everything ends."""
        assert self._group is not None, "tasks are started while run() is under way"
        task = self._group.create_task(coro, name=name)
        self._tasks.add(task)
        return task

    def end_tasks(self, *, all_but: tuple[str, ...] = ()) -> None:
        """Cancel the tasks of the group, those aside whose names start with one of `all_but`."""
        for task in self._tasks:
            if not task.get_name().startswith(all_but):
                task.cancel()

    def closes(self, name: str, close: Callable[[], Awaitable[None]]) -> None:
        """Close it at the end, before what was named earlier."""
        self.stack.push_async_callback(close_within, CLOSE_TIMEOUT_S, name, close)

    def on_broken(self, error: RoomError) -> None:
        """Called by a part that answers clients (the gateway) when it is broken; wait_broken raises the
        error.
        """
        if not self._broken.done():
            self._broken.set_exception(error)

    async def wait_broken(self) -> None:
        """Wait for an error given to on_broken, and raise it."""
        await asyncio.wrap_future(self._broken)

    def _fail(self, error: BaseException) -> AsyncrlError:
        """The error to show."""
        if isinstance(error, OSError):
            error = refused_by_system(error, self.run_dir)
        elif not isinstance(error, AsyncrlError):
            log_path = self.run_dir / "logs" / "controller.log"
            what = f"internal error {type(error).__name__}: {error}"
            error = RoomError("controller", what, way_out=f"report it, with the traceback in {log_path}.")
        logger.error("ended by %s", error, exc_info=error)
        with contextlib.suppress(RoomError, CallbackError):  # the first error is the one to tell
            self.voice.finish("failed", str(error), can_go_on=not isinstance(error, ConfigError))
        return error

    def _on_signal(self, number: int, main: asyncio.Task[Any]) -> None:
        if self._signal is not None and self.interrupts is not None:
            main.cancel()
            return
        if self._signal is not None:
            for server in self.servers:  # any other ends with the pipe that we hold
                server.child.kill_nowait()
            clear_own_staging()
            os._exit(128 + number)
        self._signal = number
        self.tell(f"{self.ending} (once more to end at once)")
        if self.can_stop:
            self.stop.set()
        else:
            main.cancel()


async def close_within(timeout_s: float, name: str, close: Callable[[], Awaitable[None]]) -> None:
    """Close one thing, shielded from our own cancellation and bounded in time. Late or failed is logged,
    never raised.

    A cancellation that comes meanwhile (the first Ctrl-C, while a run that is done closes) passes once it is
    closed.
    """
    closing = asyncio.ensure_future(close())
    _, cancelled = await uncut(asyncio.wait({closing}, timeout=timeout_s))
    if not closing.done():
        closing.cancel()
        logger.warning("closing %s took longer than %s s and was given up", name, timeout_s)
    elif not closing.cancelled() and (error := closing.exception()) is not None:
        logger.warning("closing %s failed: %s", name, error)
    if cancelled is not None:
        raise cancelled


def new_run_dir(name: str) -> Path:
    """Where a run goes that is given no directory."""
    return Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def make_run_dir(folder: Path, mode: int) -> None:
    """Make the directory, or find it there, with these permissions. Raises ConfigError if it cannot be
    written.

    A directory with foreign files keeps its permissions: the caller refuses it next.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if (folder / "run.lock").exists() or not any(folder.iterdir()):
            has = stat.S_IMODE(folder.stat().st_mode)
            try:
                folder.chmod(has & ~0o777 | mode)
            except PermissionError:  # a mounted volume, say, is another user's
                stays = f"is another user's and stays at mode {has:04o}, for {mode:04o}"
                print(f"WARNING: {folder} {stays} (observe.readable_by).", file=sys.stderr)
        (folder / "logs").mkdir(exist_ok=True)
    except OSError as error:
        what = f"cannot write to {folder}: {error.strerror}"
        raise ConfigError(what, way_out="choose another --run-dir.") from error


@contextlib.contextmanager
def removed_if_refused(folder: Path) -> Iterator[None]:
    """Remove the directory again if the block makes it and raises ConfigError before a group is admitted."""
    is_new = not folder.exists()
    try:
        yield
    except ConfigError:
        if is_new and not has_begun(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def has_begun(run_dir: Path) -> bool:
    """Return True if a group was admitted or a checkpoint made. A start that failed before may be repeated
    with corrected settings.
    """
    if any((run_dir / "checkpoints").glob("step_*")):
        return True
    journal = run_dir / "journal.sqlite"
    if not journal.exists():
        return (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").stat().st_size > 0
    with reading(journal) as connection:
        return connection.execute("SELECT 1 FROM groups LIMIT 1").fetchone() is not None


def run_id(run_dir: Path) -> str:
    """The name of the run that lies in this directory, made with it; it stays when the directory is moved or
    copied.
    """
    path = run_dir / "run.id"
    if not path.exists():
        write_whole(path, secrets.token_hex(8) + "\n")
    return path.read_text(encoding="utf-8").strip()


def run_again(folder: Path, *more: str) -> str:
    """The command that goes on with the run in this directory."""
    return shlex.join(["asyncrl", "run", str(folder / "config.yaml"), "--run-dir", str(folder), *more])


COLLECT_AFTER = (1_000, 20_000, 10)
"""gc.set_threshold: new objects are looked at once, some thousand together; what is in flight after some 20
million more objects were made than freed.
"""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """A block in which Python's cycle collector leaves alone what is here already, and seldom looks at all
    the rest: that stops the event loop for a microsecond an object, and a rollout has some 50.

    Rollouts need no collector: what they leave behind has no cycles.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """What asyncrl logs inside goes to logs/controller.log in this directory, and nowhere else. All that the
    system allows may be opened: every request in flight is a connection, and the usual limit is 1024 files.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # children inherit it
    handler = logging.FileHandler(folder / "logs" / "controller.log", encoding="utf-8")
    # A log that cannot be written (a full disk) must not bury the error that is being told.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("asyncrl")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    try:
        yield
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk was told already
            handler.close()


def refused_by_system(error: OSError, run_dir: Path) -> RoomError:
    """Return the error to show for an OSError of the controller."""
    if error.errno in OUT_OF_FILES:
        way_out = (
            "raise the limit (ulimit -n) or lower rollout.slots and gateway.max_connections, then resume."
        )
        return RoomError("controller", f"out of file descriptors: {error}", way_out=way_out)
    what = f"cannot use the run directory {run_dir}: {error}"
    return RoomError("controller", what, way_out="free space on its disk, then start again.")
