"""Keep engine servers, trainer ranks, workers and the teacher running.

A process that dies or does not answer is restarted and restored (weights for an engine; state and batches for
the trainer). Too many restarts end the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.base.errors import (
    AsyncrlError,
    EngineLost,
    JournalError,
    NodeLost,
    PublishError,
    RoomError,
    TrainerError,
    TrainerLost,
)
from asyncrl.base.spans import note_span
from asyncrl.base.waits import waiting
from asyncrl.config import SupervisionConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.job.colocate import Turns
from asyncrl.job.start import Server, end_all, start_all
from asyncrl.job.supervision.restarts import Restarts
from asyncrl.messages.work import WorkerHealth

if TYPE_CHECKING:  # which import FastAPI
    from asyncrl.agents.endpoint.work_routes import RolloutQueue

Tell = Callable[[str, Mapping[str, Any]], None]
logger = logging.getLogger("asyncrl.job.supervision.supervise")

HEARTBEAT_PERIOD_S = 1.0
GRACE_S = 1.0
"""Wait after a broken call for the kernel to report the process's death, the better error."""
MAX_BACKOFF_S = 30.0
NODE_PERIOD_S = 5.0
"""Interval of searches for a missing node."""
NO_LOSS = (PublishError, JournalError, TrainerError)
"""Errors that a new process would not fix. TrainerLost, a subclass of TrainerError, is excepted."""


@dataclass(frozen=True, slots=True)
class Supervision:
    config: SupervisionConfig
    heartbeat_s: float
    warn: Callable[[str], None]
    on_event: Tell


class Supervisor:
    """Watches processes that live and die together; if one is lost, all restart.

    Life: up -> lost: a process died, gave no answer for heartbeat_s, or broke a call (reported) -> down: all
        are killed -> backoff -> free memory on shared devices -> new ones answer -> they get the old ones'
        state -> up. A loss on the way counts like the first.
    Waits: run sleeps until a process is lost; then in backoff_s (doubled each time, 30 s at most), for free
        devices, for the start, and for bring_back, during which it still watches.
    Invariant: more than max_restarts (see Restarts) end the run with the reason of the last loss; with 0 the
        first loss does. If the run can do without a missing node, it retries every NODE_PERIOD_S.
    """

    kind = ""
    whom = "it"

    def __init__(self, processes: Sequence[Server], supervision: Supervision) -> None:
        self._processes, self.config = tuple(processes), supervision.config
        self.heartbeat_s, self._warn = supervision.heartbeat_s, supervision.warn
        self._on_event, self._restarts = supervision.on_event, Restarts(supervision.config)
        self.is_up = True
        self.is_starting = False
        """Old processes end or new ones start, within their own limits. False while they wait for devices
        or weights, or train again: that progress is visible.
        """
        self._report: RoomError | None = None
        self._reported = asyncio.Event()

    @property
    def name(self) -> str:
        return self._processes[0].name

    @property
    def num_restarts(self) -> int:
        return self._restarts.num

    async def run(self) -> None:
        """Watch and restart until cancelled. Raises the RoomError that ends the run."""
        lost = None if self.is_up else await self._start()
        while True:
            if lost is None:
                self._restarts.works_nowait()
                lost = await self._until_lost(self._wait_unfit())
            else:
                lost = await self._replace(lost)

    async def _replace(self, lost: RoomError) -> RoomError | None:
        """Restart once; return the reason of another loss, if any."""
        was_gone = self._restarts.is_node_gone
        try:
            words = self._restarts.again_nowait(lost, goes_on=self._goes_on())
        except RoomError:
            if self.config.max_restarts:  # report this error instead of the plain death of the process
                for process in self._processes:
                    await process.end()
            raise
        is_gone = isinstance(lost, NodeLost)
        self._down(lost)
        self.is_starting = not is_gone
        try:
            await self._end()
            about = {"name": self.name, "restart": self.num_restarts}
            if not (is_gone and was_gone):  # once, and not every few seconds
                logger.warning("%s is lost: %s", self.name, lost)
                self._warn(f"{in_short(lost)}; starting {self.whom} again, {words}")
                self._on_event(f"{self.kind} lost", {**about, "why": str(lost)})
            since_s = asyncio.get_running_loop().time()
            backoff_s = self.config.backoff_s * 2.0 ** (self._restarts.num_counting - 1)
            await asyncio.sleep(NODE_PERIOD_S if is_gone else min(backoff_s, MAX_BACKOFF_S))
        finally:
            self.is_starting = False
        again = await self._start()
        if again is None:
            now_s = asyncio.get_running_loop().time()
            down_s = now_s - since_s
            note_span("restarts", "down", since_s, now_s, text=f"{self.name}: {in_short(lost)}")
            self._on_event(f"{self.kind} up", {**about, "down_s": down_s, **self._told_up()})
        return again

    async def _end(self) -> None:
        for process in self._processes:
            if left := await process.end():
                self._warn(left)

    async def _start(self) -> RoomError | None:
        """Start new processes; return the reason of another loss, if any."""
        self._report, self._reported = None, asyncio.Event()
        async with self._room():
            await self._before_start()
            self.is_starting = True
            try:
                with waiting("its new process", on=self._processes[0].name):
                    await start_all(self._processes)
            except RoomError as error:
                return error
            finally:
                self.is_starting = False
            again = await self._until_lost(self._bring_back()) or self._report
            if again is not None:
                return again
        self.is_up = True
        await self._works_again()
        return None

    async def _until_lost(self, work: Coroutine[Any, Any, None]) -> RoomError | None:
        return await until_lost(self._processes, self.heartbeat_s, self._raise_report(), work)

    async def _raise_report(self) -> None:
        await self._reported.wait()
        assert self._report is not None
        raise self._report

    def _lost_by(self, error: RoomError) -> None:
        if self._report is None:
            self._report = error
            self._down(error)
            self._reported.set()

    # hooks of engines, trainer and workers

    def _goes_on(self) -> bool:
        """Return True if the run can do without the part for now."""
        return False

    def _down(self, lost: RoomError) -> None:
        """Stop sending requests. Idempotent."""
        self.is_up = False

    def _room(self) -> AbstractAsyncContextManager[None]:
        """Wait for free devices and hold them."""
        return contextlib.nullcontext()

    async def _before_start(self) -> None:
        """Forget the old processes' state."""

    async def _bring_back(self) -> None:
        """Restore the old processes' state."""

    async def _works_again(self) -> None:
        """Resume normal use."""

    def _told_up(self) -> Mapping[str, Any]:
        return {}

    async def _wait_unfit(self) -> None:
        """Raise RoomError if processes answer but are unusable."""
        await asyncio.Event().wait()


class EngineSupervisor(Supervisor):
    """Keeps one engine server running: while it is down, its calls are cut, and neither pool nor pushes wait
    for it.

    Invariant: the pool sends it work only while it serves the announced version, or a newer one.
    """

    kind = "engine"

    def __init__(
        self, process: Server, client: EngineClient, pool: EnginePool, turns: Turns, supervision: Supervision
    ) -> None:
        super().__init__([process], supervision)
        self._client, self._pool, self._turns = client, pool, turns

    def lost_nowait(self, error: EngineLost) -> None:
        """Report a call without an answer. The server is down on return; run restarts it."""
        if not error.is_told:
            self._lost_by(error)

    def _goes_on(self) -> bool:
        return {*self._pool.load} - {*self._pool.down, self.name} != set()

    def _down(self, lost: RoomError) -> None:
        self._leave_nowait()

    def _leave_nowait(self) -> None:
        self.is_up = False
        self._client.disconnect_nowait()
        self._pool.down_nowait(self.name)
        self._turns.publisher.down_nowait(self.name)

    def _room(self) -> AbstractAsyncContextManager[None]:
        return self._turns.room_for_engine(self.name)

    async def _before_start(self) -> None:
        self._client.reset_nowait()

    async def _bring_back(self) -> None:
        await self._turns.bring_up(self.name)

    async def _works_again(self) -> None:
        self._pool.up_nowait(self.name)
        await self._pool.balance()


class WorkerSupervisor(Supervisor):
    """Keeps one worker running. The rollouts of a lost worker fail as data and are retried; its replacement
    leases by itself.

    A worker whose event loop blocks for lease_timeout_s is also lost: its rollouts have already failed.
    """

    kind = "worker"

    def __init__(self, process: Server, supervision: Supervision, queue: RolloutQueue) -> None:
        super().__init__([process], supervision)
        self._queue = queue

    def _down(self, lost: RoomError) -> None:
        self.is_up = False
        self._queue.worker_gone_nowait(self.name, in_short(lost))  # its rollouts fail now

    async def _wait_unfit(self) -> None:
        """Wait for two answers with a blocked loop: /health comes from another thread, and after a pause
        of the whole machine the first answer may precede the loop's recovery.
        """
        health, was_stuck = None, False
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            before, health = health, self._processes[0].health
            lag_s = health.loop_lag_s if isinstance(health, WorkerHealth) else 0.0
            is_stuck = lag_s > self._queue.lease_timeout_s
            if is_stuck and was_stuck and health is not before:
                raise RoomError(
                    self.name,
                    f"a harness has blocked its event loop for {lag_s:.0f} s",
                    rule=f"gateway.lease_timeout_s={self._queue.lease_timeout_s} is the limit",
                    way_out="use `await asyncio.to_thread(...)` for what blocks, or a plain `def`.",
                )
            was_stuck = is_stuck


async def until_lost(
    processes: Sequence[Server], heartbeat_s: float, *work: Coroutine[Any, Any, None]
) -> RoomError | None:
    """Watch processes until `work` ends (None) or a process is lost (the reason). A death takes precedence
    over a broken call, and that over a missed heartbeat. Raises other errors of `work`.
    """
    watching = [asyncio.ensure_future(process.watch()) for process in processes]
    working = [asyncio.ensure_future(coro) for coro in work]
    beating = [asyncio.ensure_future(heartbeat(process, heartbeat_s)) for process in processes]
    tasks = [*watching, *working, *beating]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if any(task.exception() for task in done) and not any(task.done() for task in watching):
            await asyncio.wait(watching, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            error = task.exception() if task in done or (task in watching and task.done()) else None
            ends_run = isinstance(error, NO_LOSS) and not isinstance(error, TrainerLost)
            if isinstance(error, RoomError) and not ends_run:
                return error
            if error is not None:
                raise error
        return None
    finally:
        await end_all(tasks)


async def heartbeat(process: Server, limit_s: float) -> None:
    """Poll a process's health forever. Raises RoomError without an answer within `limit_s`."""
    while True:
        await process.check_alive(limit_s)
        await asyncio.sleep(HEARTBEAT_PERIOD_S)


def in_short(lost: AsyncrlError) -> str:
    return lost.what.splitlines()[0].split("; the end of ")[0]
