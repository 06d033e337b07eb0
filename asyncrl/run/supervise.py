"""Starts an engine server again that died or does not answer. Knows the process, the pool and the publisher;
knows no request.

Stands between wiring, which makes one supervisor for each engine server, and the rooms, which it tells who is
up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from asyncrl.config import SupervisionConfig
from asyncrl.errors import ConnectionShortage, EngineLost, PublishError, RoomError
from asyncrl.messages.work import WorkerHealth
from asyncrl.waits import waiting

logger = logging.getLogger("asyncrl.run.supervise")

HEARTBEAT_PERIOD_S = 1.0
GRACE_S = 1.0
"""A call that broke may mean that the process just died: so long the kernel has to say so, because that is
the cause to name.
"""
MAX_BACKOFF_S = 30.0


class Restartable(Protocol):
    """The process of one engine server; startup.Server is it."""

    @property
    def name(self) -> str:
        """The same for each process that takes its place."""
        ...

    async def watch(self) -> None:
        """Sleep as long as the process lives; raises RoomError when it ends."""
        ...

    async def check_alive(self, timeout_s: float) -> None:
        """Raises RoomError if it does not answer in time."""
        ...

    async def end(self) -> str:
        """Kill it, frozen or not. Returns what is left of it, in words, if it does not die."""
        ...

    async def start_again(self) -> None:
        """Start a new one; returns when it answers. Raises RoomError if it does not come up."""
        ...


class Line(Protocol):
    """The calls to that server; EngineServer is it."""

    def cut_nowait(self) -> None:
        """All calls that wait raise EngineLost, and so do those to come."""
        ...

    def renew_nowait(self) -> None:
        """Calls go to the new process, which has the weights of the start."""
        ...


class Pool(Protocol):
    """Who gives it requests; EnginePool is it."""

    def down_nowait(self, name: str) -> None:
        """No requests for this server."""
        ...

    def up_nowait(self, name: str) -> None:
        """Requests for this server."""
        ...

    async def balance(self) -> None:
        """And those that queue elsewhere."""
        ...


class Publishes(Protocol):
    """Who gives it weights, and room for its process; turns.Turns is it."""

    def down_nowait(self, name: str) -> None:
        """No pushes to this server."""
        ...

    def room_for_engine(self, name: str) -> AbstractAsyncContextManager[None]:
        """While it starts and is brought up, its device is not the trainer's."""
        ...

    async def bring_up(self, name: str) -> None:
        """Give it the announced weights, and each version from here on."""
        ...


@dataclass(frozen=True, slots=True)
class SupervisorStats:
    """`restarts` so far, those that failed included."""

    name: str
    state: Literal["up", "down"]
    restarts: int


class EngineSupervisor:
    """Keeps one engine server going.

    Life:       up -> lost: it died, gave no answer for heartbeat_s, or broke a call (lost_nowait) -> down:
    its calls are cut,
                pool and publisher leave it out, what is left of it is killed -> backoff -> a new process
                answers -> the publisher brings it up to the announced weights -> up. A loss on the way counts
                like the first one.
    Waits:      run sleeps until the server is lost; then in backoff_s (doubled each time, 30 s at most), for
    room on a device that is
                shared, the start, and bring_up, in which it still watches. Requests and pushes do not wait
                for it.
    Invariant:  the pool has work for it only while its process serves the announced version, or a newer one.
    More than
                max_restarts (see Restarts) end the run with the reason of the last loss; 0 is: the first loss
                does.
    """

    def __init__(
        self,
        process: Restartable,
        line: Line,
        pool: Pool,
        publisher: Publishes,
        config: SupervisionConfig,
        *,
        heartbeat_s: float,
        warn: Callable[[str], None],
        on_event: Callable[[str, Mapping[str, Any]], None] = lambda _what, _detail: None,
    ) -> None:
        self._process, self._line, self._pool, self._publisher = process, line, pool, publisher
        self.config, self.heartbeat_s = config, heartbeat_s
        self._warn, self._on_event = warn, on_event
        self._state: Literal["up", "down"] = "up"
        self._restarts = Restarts(config)
        self.is_starting = False
        """The old process is ended, or a new one on its way, which has limits of its own. Not while it waits
        for room or for weights.
        """
        self._report: EngineLost | None = None
        self._reported = asyncio.Event()

    def __repr__(self) -> str:
        return f"<EngineSupervisor {self.name} {self._state}, {self._restarts.num}/{self.config.max_restarts} restarts>"

    @property
    def name(self) -> str:
        """The server's."""
        return self._process.name

    def stats(self) -> SupervisorStats:
        """How it is, and how often it was started again."""
        return SupervisorStats(self.name, self._state, self._restarts.num)

    def lost_nowait(self, error: EngineLost) -> None:
        """Pool or publisher got no answer. The server is down when this returns; run starts it again."""
        if error.is_told or self._report is not None:
            return
        self._report = error
        self._give_up()
        self._reported.set()

    async def run(self) -> None:
        """Watch, and start again, until cancelled. Raises the RoomError that ends the run."""
        while True:
            self._restarts.works_nowait()
            lost = await self._until_lost(asyncio.Event().wait())
            while lost is not None:
                try:
                    lost = await self._replace(lost)
                finally:
                    self.is_starting = False

    async def _replace(self, lost: RoomError) -> RoomError | None:
        """One restart: why the new process was lost too, or None once it has work."""
        if not self.config.max_restarts:
            raise used_up(self.config, lost)
        self._give_up()
        logger.warning("%s is lost: %s", self.name, lost)
        self.is_starting = True
        if left := await self._process.end():
            self._warn(left)
        number = self._restarts.again_nowait(lost)
        self._warn(f"{in_short(lost)}; starting it again, {number} of {self.config.max_restarts}")
        self._on_event("engine lost", {"name": self.name, "why": str(lost), "restart": self._restarts.num})
        since_s = asyncio.get_running_loop().time()
        await asyncio.sleep(backoff_s(self.config, number))
        self._report, self._reported = None, asyncio.Event()
        self.is_starting = False
        async with self._publisher.room_for_engine(self.name):
            self.is_starting = True
            self._line.renew_nowait()
            try:
                with waiting("its new process", on=self.name):
                    await self._process.start_again()
            except ConnectionShortage:
                raise
            except RoomError as error:
                return error
            self.is_starting = False
            again = await self._until_lost(self._publisher.bring_up(self.name)) or self._report
            if again is not None:
                return again
        self._state = "up"
        self._pool.up_nowait(self.name)
        down_s = asyncio.get_running_loop().time() - since_s
        logger.info("%s is up again after %.1f s", self.name, down_s)
        self._on_event("engine up", {"name": self.name, "restart": self._restarts.num, "down_s": down_s})
        await self._pool.balance()
        return None

    async def _until_lost(self, work: Coroutine[Any, Any, Any]) -> RoomError | None:
        return await until_lost(self._process, self.heartbeat_s, self._raise_report(), work)

    async def _raise_report(self) -> None:
        await self._reported.wait()
        assert self._report is not None
        raise self._report

    def _give_up(self) -> None:
        self._state = "down"
        self._line.cut_nowait()
        self._pool.down_nowait(self.name)
        self._publisher.down_nowait(self.name)


async def until_lost(
    process: Restartable, heartbeat_s: float, *work: Coroutine[Any, Any, Any]
) -> RoomError | None:
    """Watch over a process until one of `work` is done (None), or the process is lost (why). Raises what else
    `work` raises.
    """
    watching = asyncio.ensure_future(process.watch())
    # What broke a call comes before the heartbeat, which is cut because of it and knows no more than that.
    tasks = [
        watching,
        *map(asyncio.ensure_future, work),
        asyncio.ensure_future(heartbeat(process, heartbeat_s)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        losses = [loss for task in tasks if task in done and (loss := _loss(task)) is not None]
        if losses and watching not in done:
            await asyncio.wait({watching}, timeout=GRACE_S)
        if watching.done():
            return _loss(watching)
        return losses[0] if losses else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def heartbeat(process: Restartable, limit_s: float) -> None:
    """Ask a process for its health now and then, for ever. Raises RoomError once it does not answer within
    `limit_s`.

    Where it cannot be asked, nothing is known; calls that cannot be made end the run by themselves.
    """
    while True:
        with contextlib.suppress(ConnectionShortage):
            await process.check_alive(limit_s)
        await asyncio.sleep(HEARTBEAT_PERIOD_S)


class Restarts:
    """How often a process was started again, and whether it may be once more.

    Life:       works_nowait() whenever it works -> again_nowait() when it is lost, and for each start that
    fails -> works_nowait() ... Invariant:  a restart counts until the process has worked for restart_window_s
    after it: one that dies once a day never uses up
                max_restarts, one that does not come up, or dies of the same thing after each long recovery,
                always does.
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self.num = 0
        """In all."""
        self._worked_s = 0.0
        self._works_since_s: float | None = None
        self._counting: deque[float] = deque()
        """What `_worked_s` was at those that count."""

    def works_nowait(self) -> None:
        """It is up, and does its work."""
        self._works_since_s = asyncio.get_running_loop().time()

    def again_nowait(self, lost: RoomError) -> int:
        """Count one more restart; returns how many count. Raises the RoomError that ends the run if that is
        one too many.
        """
        if self._works_since_s is not None:
            self._worked_s += asyncio.get_running_loop().time() - self._works_since_s
            self._works_since_s = None
        window_s = self._config.restart_window_s
        while self._counting and window_s is not None and self._worked_s - self._counting[0] >= window_s:
            self._counting.popleft()
        if len(self._counting) >= self._config.max_restarts:
            raise used_up(self._config, lost)
        self.num += 1
        self._counting.append(self._worked_s)
        return len(self._counting)


def backoff_s(config: SupervisionConfig, restart: int) -> float:
    """Seconds before restart number `restart` of those that count, from 1."""
    return min(config.backoff_s * 2.0 ** (restart - 1), MAX_BACKOFF_S)


def in_short(lost: RoomError) -> str:
    """What happened, without the log."""
    return lost.what.splitlines()[0].split("; the end of ")[0]


def used_up(config: SupervisionConfig, lost: RoomError) -> RoomError:
    """The error that ends the run: the loss, and that it was one too many."""
    if not config.max_restarts:
        return lost
    within = (
        ""
        if config.restart_window_s is None
        else f" within supervision.restart_window_s={config.restart_window_s:g}"
    )
    limit = f"supervision.max_restarts={config.max_restarts} is used up{within}"
    return RoomError(
        lost.room,
        lost.what.removeprefix(f"{lost.room}: "),
        rule=f"{lost.rule}; {limit}" if lost.rule else limit,
        way_out=lost.way_out
        or f"read the log of {lost.room}; the run goes on when it is started again with its --run-dir.",
    )


def _loss(task: asyncio.Future[Any]) -> RoomError | None:
    """The RoomError that a task ended with. What is no loss of the server (wrong weights, an internal error)
    is raised.
    """
    try:
        task.result()
    except (PublishError, ConnectionShortage):
        raise
    except RoomError as error:
        return error
    return None


# Starts a harness worker again that died, or whose event loop its harness blocks. Knows the process; knows no
# rollout.


class WorkerSupervisor:
    """Keeps one worker of a run going; what it ran fails as data, and is tried again.

    Life:       up -> lost: it died, gave no answer for heartbeat_s, or its event loop stood still for
    lease_timeout_s, when its
                rollouts have failed already -> `gone` is told, so that its rollouts fail now -> backoff
                -> a new process, which leases by itself -> up.
    Waits:      run sleeps until the worker is lost, then in backoff_s and in the start of the new one.
    Invariant:  more than max_restarts (see Restarts) end the run with the reason of the last loss; 0 is: the
    first loss does.
    """

    def __init__(
        self,
        process: Restartable,
        config: SupervisionConfig,
        *,
        heartbeat_s: float,
        lease_timeout_s: float,
        gone: Callable[[str, str], None],
        warn: Callable[[str], None],
        on_event: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """`gone`: told (name, why)."""
        self._process, self.config, self.heartbeat_s = process, config, heartbeat_s
        self._gone, self._warn, self._on_event = gone, warn, on_event
        self._lease_timeout_s = lease_timeout_s
        self._restarts = Restarts(config)

    def __repr__(self) -> str:
        return (
            f"<WorkerSupervisor {self._process.name} {self.num_restarts}/{self.config.max_restarts} restarts>"
        )

    @property
    def num_restarts(self) -> int:
        """So far, those that failed included."""
        return self._restarts.num

    @property
    def name(self) -> str:
        """The worker's."""
        return self._process.name

    async def run(self) -> None:
        """Watch, and start again, until cancelled. Raises the RoomError that ends the run."""
        while True:
            self._restarts.works_nowait()
            lost = await until_lost(self._process, self.heartbeat_s, self._until_blocked())
            while lost is not None:
                lost = await self._replace(lost)

    async def _until_blocked(self) -> None:
        """Raise RoomError once its event loop stands still for too long. Its /health is answered from another
        thread.

        Two answers must say so: when the machine stood still, the first one may come before the worker's loop
        has gone on.
        """
        before: WorkerHealth | None = None
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            health = getattr(self._process, "health", None)
            if not isinstance(health, WorkerHealth) or health.loop_lag_s <= self._lease_timeout_s:
                before = None
            elif before is None or health is before:
                before = health
            else:
                raise RoomError(
                    self._process.name,
                    f"a harness has blocked its event loop for {health.loop_lag_s:.0f} s",
                    rule=f"gateway.lease_timeout_s={self._lease_timeout_s} is the limit",
                    way_out="`await asyncio.to_thread(...)` for what blocks, or a plain `def`, which runs in "
                    "a thread of its own.",
                )

    async def _replace(self, lost: RoomError) -> RoomError | None:
        """One restart: why the new process was lost too, or None."""
        name = self.name
        logger.warning("%s is lost: %s", name, lost)
        self._gone(name, in_short(lost))
        number = self._restarts.again_nowait(lost)
        if left := await self._process.end():
            self._warn(left)
        self._warn(f"{in_short(lost)}; starting it again, {number} of {self.config.max_restarts}")
        self._on_event("worker lost", {"name": name, "why": str(lost), "restart": self.num_restarts})
        await asyncio.sleep(backoff_s(self.config, number))
        try:
            await self._process.start_again()
        except ConnectionShortage:
            raise
        except RoomError as error:
            return error
        self._on_event("worker up", {"name": name, "restart": self.num_restarts})
        return None
