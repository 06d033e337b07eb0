"""One run: wires the rooms, owns the one asyncio.TaskGroup, and ends everything that it started.

Who consumes what, who waits for whom, who unblocks whom:

    who waits                in                                  for                                   woken by
    -----------------------  ----------------------------------  ------------------------------------  ------------------------------
    producers                Producers.run (capacity)            free sequences in the engines         a rollout that ends
    producers                Buffer.wait_admit                   leave under the staleness rule        a version served, a group failed
    a rollout                EnginePool.generate                 its completion, timeout_s at most     its engine server
    a rollout                Scorer.score                        its reward, reward_timeout_s at most  the reward function
    train loop               Buffer.wait_batch                   num_groups ready groups               a group finished, failed, dropped
    train loop               TrainerClient.train, save           the optimizer step, the saved weights  the trainer worker
    train loop               Publisher.wait_exported_or_busy     the copy of the new weights           the publisher
    publisher                TrainerClient.wait_version_above    a new policy_version                  the train loop
    publisher                prepare and commit                  every engine, timeout_s at most       the engine servers
    watch NAME               ChildProcess.watch                  a child process to end                the kernel
    heartbeat NAME           GET /health                         an answer, heartbeat_s at most        the server

A room that breaks raises RoomError: the TaskGroup falls, everything is closed, and `run_job` raises that error.
A child process that died is named before the call that broke because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.errors import AsyncrlError, ConfigError, RoomError
from asyncrl.placement.staging import clear_own_staging
from asyncrl.reporting import Reporter
from asyncrl.startup import Server
from asyncrl.wiring import CLOSE_TIMEOUT_S, Rooms, close_within, open_rooms

logger = logging.getLogger("asyncrl.job")

STATUS_PERIOD_S = 1.0
HEARTBEAT_PERIOD_S = 1.0
SAVE_TIMEOUT_S = 120.0
GUARDS = ("watch ", "heartbeat ", "status")
"""Tasks that stay until the weights are saved, by the start of their names."""


def run_job(config: RunConfig, run_dir: Path | None, *, name: str) -> int:
    """Train as `config` says, from start to end, and return the exit code.

    0 done; 130 or 143 interrupted by SIGINT or SIGTERM. Raises AsyncrlError when a part of the run failed; by then
    everything is closed: no child process and no shared memory is left.
    """
    folder = make_run_dir(run_dir, name)
    (folder / "config.yaml").write_text(run_config_yaml(config), encoding="utf-8")
    handler = _LogFile(folder / "logs" / "controller.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("asyncrl")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    _allow_many_connections()
    try:
        return asyncio.run(Job(config, folder, name).run())
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk was told already, or its lines are lost and nothing else
            handler.close()


class _LogFile(logging.FileHandler):
    """A log that cannot be written (a full disk) must not bury the error that is being told."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's own name
        """Drop the line."""


def _allow_many_connections() -> None:
    """Every request in flight is a connection, and the usual limit is 1024 open files: take all that the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # children inherit it


def make_run_dir(run_dir: Path | None, name: str) -> Path:
    """The directory of a new run. Raises ConfigError if a run lies there already, or it cannot be written."""
    folder = run_dir or Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} holds a run already", rule="a run never writes over another one",
            way_out="choose another --run-dir, or leave it out for a new one under runs/.",
        )  # fmt: skip
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", way_out="choose another --run-dir.") from error
    return folder


class Job:
    """The life of one run: open the rooms -> train loop -> save -> close. Owns the TaskGroup and the signals."""

    def __init__(self, config: RunConfig, run_dir: Path, name: str) -> None:
        self.config, self.run_dir = config, run_dir
        self.reporter = Reporter(config, run_dir, name)
        self._signal: int | None = None
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: tuple[Server, ...] = ()

    async def run(self) -> int:
        """The exit code. Raises the AsyncrlError that ended the run."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number, main)
        try:
            await self._live()
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            main.uncancel()
            self._finish("interrupted", f"interrupted by {signal.Signals(self._signal).name}")
            return 128 + self._signal
        except BaseExceptionGroup as errors:
            raise self._fail(_first_cause(errors)) from errors
        except Exception as error:  # the outermost border: what is foreign is named here too, and never swallowed
            raise self._fail(error) from error
        else:
            self._finish("done")
            return 0
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _live(self) -> None:
        """Everything between the first process and the last one ended."""
        async with AsyncExitStack() as stack:
            self.reporter.start()
            stack.callback(self.reporter.close_console)
            rooms = await open_rooms(self.config, self.run_dir, stack, spawn=self._spawn, tell=self.reporter.tell)
            self._servers = rooms.servers
            self.reporter.training_starts()
            try:
                async with asyncio.TaskGroup() as self._group:
                    self._start_services(rooms)
                    await self._train_loop(rooms)
                    self._end_tasks(all_but=GUARDS)
                    await self._save(rooms)  # guarded: a trainer that dies or freezes here ends the run, as at any other time
                    self._end_tasks()
            except asyncio.CancelledError:
                if self._signal is not None and rooms.trainer.policy_version > 0:
                    await close_within(SAVE_TIMEOUT_S, "the weights", lambda: self._save(rooms))
                raise
            except BaseExceptionGroup as errors:
                await self._reap(rooms, errors)
                raise
            finally:
                await close_within(CLOSE_TIMEOUT_S, "producers", rooms.producers.aclose)

    def _start_services(self, rooms: Rooms) -> None:
        self._spawn(rooms.producers.run(), name="producers")
        self._spawn(rooms.publisher.run(), name="publisher")
        self._spawn(self._report_status(rooms), name="status")
        for server in rooms.servers:
            self._spawn(server.child.watch(), name=f"watch {server.child.name}")
            self._spawn(self._heartbeat(server), name=f"heartbeat {server.child.name}")

    async def _train_loop(self, rooms: Rooms) -> None:
        """The loop: a batch that keeps the bound, one optimizer step, the export of its weights; the push goes on by itself."""
        clock = asyncio.get_running_loop().time
        while rooms.trainer.policy_version < self.config.trainer.num_steps:
            started_s = clock()
            batch = await rooms.buffer.wait_batch()
            report = await rooms.trainer.train(batch)
            if report.policy_version < self.config.trainer.num_steps:
                await rooms.publisher.wait_exported_or_busy(report.policy_version)
            self.reporter.step(rooms, batch, report, step_s=clock() - started_s)

    async def _save(self, rooms: Rooms) -> None:
        self.reporter.tell("saving the weights")
        await rooms.trainer.save(self.run_dir / "final")

    def _spawn(self, coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task in the run's TaskGroup: if it raises, the run ends."""
        assert self._group is not None, "rooms start tasks only while the TaskGroup is open"
        task = self._group.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end_tasks(self, *, all_but: tuple[str, ...] = ()) -> None:
        """Cancel the tasks of the group, those aside whose names start with one of `all_but`."""
        for task in self._tasks:
            if not task.get_name().startswith(all_but):
                task.cancel()

    async def _report_status(self, rooms: Rooms) -> None:
        while True:
            self.reporter.status(rooms)
            await asyncio.sleep(STATUS_PERIOD_S)

    async def _heartbeat(self, server: Server) -> None:
        """Ask one server for its health now and then; a process that does not answer in heartbeat_s ends the run."""
        while True:
            await server.check_alive(self.config.observe.heartbeat_s)
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def _reap(self, rooms: Rooms, errors: BaseExceptionGroup[BaseException]) -> None:
        """A call that broke may mean that its process just died: give the kernel a moment to say so."""
        cause = _first_cause(errors)
        if isinstance(cause, RoomError):
            running = [server.child for server in rooms.servers if server.child.returncode is None]
            waits = [asyncio.ensure_future(child.wait()) for child in running]
            if waits:
                await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        for server in rooms.servers:
            server.child.note_death()

    def _fail(self, error: BaseException) -> AsyncrlError:
        """The error to show: a process that died comes before the call that broke because of it."""
        if isinstance(error, OSError):
            error = self._cannot_write(error)
        elif not isinstance(error, AsyncrlError):
            logger.error("internal error", exc_info=error)
            error = RoomError(
                "controller", f"internal error {type(error).__name__}: {error}",
                way_out=f"the traceback is in {self.run_dir / 'logs' / 'controller.log'}; please report it.",
            )  # fmt: skip
        for server in self._servers:
            if server.child.died is not None:
                error = server.child.died
                break
        logger.error("the run failed: %s", error, exc_info=error)
        with contextlib.suppress(RoomError):  # the first error is the one to tell
            self._finish("failed", str(error))
        return error

    def _finish(self, state: str, why: str = "") -> None:
        """Write how the run ended. Raises RoomError if that cannot be written."""
        try:
            self.reporter.finish(state, why)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> RoomError:
        return RoomError(
            "controller", f"cannot use the run directory {self.run_dir}: {error}",
            way_out="free space on its disk, or choose another --run-dir, and start the run again.",
        )  # fmt: skip

    def _on_signal(self, number: int, main: asyncio.Task[Any]) -> None:
        if self._signal is not None:  # the second one: end at once
            for server in self._servers:
                server.child.kill_nowait()
            clear_own_staging()
            os._exit(128 + number)
        self._signal = number
        self.reporter.tell("stopping (once more to end at once)")
        main.cancel()


def _first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is not itself a group; a RoomError before any other."""
    leaves: list[BaseException] = []

    def collect(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                collect(inner)
        else:
            leaves.append(error)

    collect(errors)
    return next((leaf for leaf in leaves if isinstance(leaf, AsyncrlError)), leaves[0])
