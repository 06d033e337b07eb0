"""Servers: process, caller, health, supervision and restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.base.errors import (
    AsyncrlError,
    EngineError,
    EngineLost,
    JournalError,
    NodeLost,
    PublishError,
    RoomError,
    TrainerError,
    TrainerLost,
)
from asyncrl.base.http import Caller, CallLost, CallRefused
from asyncrl.base.waits import note_span, waiting
from asyncrl.config import SupervisionConfig
from asyncrl.launch.processes import Process
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.messages.work import WorkerHealth

logger = logging.getLogger("asyncrl.launch.supervise")

HEARTBEAT_PERIOD_S = 1.0
GRACE_S = 1.0
"""Seconds for the kernel to report a death."""
MAX_BACKOFF_S = 30.0
NODE_PERIOD_S = 5.0
NO_LOSS = (PublishError, JournalError, TrainerError)
"""Errors that a new process would not fix; TrainerLost is excepted."""


@dataclass(frozen=True, slots=True)
class Supervision:
    config: SupervisionConfig
    heartbeat_s: float
    warn: Callable[[str], None]
    on_event: Callable[[str, Mapping[str, Any]], None]


class Supervisor:
    """Watches processes that live and die together; if one is lost, all restart.

    Life: up -> lost (died, silent for heartbeat_s, or broke a call) -> down -> backoff -> start and
        restore state -> up. A loss on the way counts too.
    Waits: for a loss, then backoff_s (doubled up to 30 s), free devices, the start, and bring_back.
    Invariant: more than max_restarts (see Restarts) end the run; a missing dispensable node is retried
        every NODE_PERIOD_S.
    """

    kind = ""

    def __init__(self, processes: Sequence[Server], supervision: Supervision) -> None:
        self._processes = tuple(processes)
        self.config = supervision.config
        self.heartbeat_s = supervision.heartbeat_s
        self._warn = supervision.warn
        self._on_event = supervision.on_event
        self._restarts = Restarts(supervision.config)
        self.is_up = True
        self.is_starting = False
        """Processes end or start, within start limits."""
        self._report: RoomError | None = None
        self._reported = asyncio.Event()

    @property
    def name(self) -> str:
        return self._processes[0].name

    @property
    def num_restarts(self) -> int:
        return self._restarts.num

    def lost_nowait(self, error: EngineLost) -> None:
        """Report a broken call; the component is down on return."""
        if not error.is_told:
            self._lost_by(error)

    async def run(self) -> None:
        """Watch until cancelled. Raises the RoomError that ends the run."""
        lost = None if self.is_up else await self._start()
        while True:
            if lost is None:
                self._restarts.works_nowait()
                lost = await self._until_lost(self._wait_unfit())
            else:
                lost = await self._replace(lost)

    async def _replace(self, lost: RoomError) -> RoomError | None:
        """Return the reason of another loss, if any."""
        was_node_gone = self._restarts.is_node_gone
        try:
            allowance = self._restarts.again_nowait(lost, is_dispensable=self._is_dispensable())
        except RoomError:
            if self.config.max_restarts:  # report this error instead of the death
                for process in self._processes:
                    await process.end()
            raise
        is_node_gone = isinstance(lost, NodeLost)
        self._down(lost)
        self.is_starting = not is_node_gone
        about = {"name": self.name, "restart": self.num_restarts}
        try:
            await self._end()
            if not (is_node_gone and was_node_gone):  # once, not at each retry
                logger.warning("%s is lost: %s", self.name, lost)
                self._warn(f"{summary_of(lost)}; restarting {self.name}, {allowance}")
                self._on_event(f"{self.kind} lost", {**about, "why": str(lost)})
            since_s = asyncio.get_running_loop().time()
            backoff_s = self.config.backoff_s * 2.0 ** (self._restarts.num_counting - 1)
            await asyncio.sleep(NODE_PERIOD_S if is_node_gone else min(backoff_s, MAX_BACKOFF_S))
        finally:
            self.is_starting = False
        again = await self._start()
        if again is None:
            now_s = asyncio.get_running_loop().time()
            note_span("restarts", "down", since_s, now_s, text=f"{self.name}: {summary_of(lost)}")
            self._on_event(f"{self.kind} up", {**about, "down_s": now_s - since_s})
        return again

    async def _end(self) -> None:
        for process in self._processes:
            if left := await process.end():
                self._warn(left)

    async def _start(self) -> RoomError | None:
        """Return the reason of another loss, if any."""
        self._report = None
        self._reported = asyncio.Event()
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

    # hooks

    def _is_dispensable(self) -> bool:
        return False

    def _down(self, lost: RoomError) -> None:
        """Idempotent."""
        self.is_up = False

    def _room(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def _before_start(self) -> None:
        """Forget the old processes' state."""

    async def _bring_back(self) -> None:
        """Restore the old processes' state."""

    async def _works_again(self) -> None:
        pass

    async def _wait_unfit(self) -> None:
        """Raise RoomError if processes answer but are unusable."""
        await asyncio.Event().wait()


async def until_lost(
    processes: Sequence[Server], heartbeat_s: float, *work: Coroutine[Any, Any, None]
) -> RoomError | None:
    """Return the loss, or None when `work` ends. A death takes precedence over a broken call, then a
    missed heartbeat. Raises other errors of `work`.
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
        await cancel_all(tasks)


async def heartbeat(process: Server, limit_s: float) -> None:
    """Raises RoomError after `limit_s`."""
    while True:
        await process.check_alive(limit_s)
        await asyncio.sleep(HEARTBEAT_PERIOD_S)


def summary_of(lost: AsyncrlError) -> str:
    return lost.what.splitlines()[0].split("; the end of ")[0]


NODE_WAIT_S = 600.0
"""Seconds to wait for an indispensable lost node."""
RESTART_WINDOW_S = 3600.0
"""Seconds of work after which a restart no longer counts."""


class Restarts:
    """Restart counter of one component.

    Invariant: a restart counts until RESTART_WINDOW_S of later work. A missing node does not count while
        dispensable, nor within NODE_WAIT_S, nor does the restart that discovers it.
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self.num = 0
        self._worked_s = 0.0
        self._works_since_s: float | None = None
        self._gone_since_s: float | None = None
        self._counting: deque[float] = deque()
        """`_worked_s` at each counting restart."""

    @property
    def num_counting(self) -> int:
        return len(self._counting)

    @property
    def is_node_gone(self) -> bool:
        """Return true if its node is missing, with no work since."""
        return self._gone_since_s is not None

    def works_nowait(self) -> None:
        self._works_since_s = asyncio.get_running_loop().time()
        self._gone_since_s = None

    def rests_nowait(self) -> None:
        self._works_since_s = None
        self._gone_since_s = None
        self._counting.clear()

    def again_nowait(self, lost: RoomError, *, is_dispensable: bool = False) -> str:
        """Count a restart; return the remaining allowance as text. Raises the final RoomError."""
        now_s = asyncio.get_running_loop().time()
        if self._works_since_s is not None:
            self._worked_s += now_s - self._works_since_s
            self._works_since_s = None
        elif isinstance(lost, NodeLost) and not self.is_node_gone and self._counting:
            self._counting.pop()
        limit = self._config.max_restarts
        while self._counting and self._worked_s - self._counting[0] >= RESTART_WINDOW_S:
            self._counting.popleft()
        if not limit:
            raise lost
        if isinstance(lost, NodeLost):
            if self._gone_since_s is None:
                self._gone_since_s = now_s
            if is_dispensable or now_s - self._gone_since_s < NODE_WAIT_S:
                self.num += 1
                limit_text = "continues without it" if is_dispensable else f"waits {NODE_WAIT_S:g} s at most"
                return f"once its node is back; the run {limit_text}"
        if len(self._counting) >= limit:
            rule = f"supervision.max_restarts={limit} is used up within {RESTART_WINDOW_S:g} s of work"
            rule = f"{lost.rule}; {rule}".lstrip("; ")
            way_out = lost.way_out or f"read the log of {lost.room}, then resume the run."
            raise RoomError(lost.room, lost.fault, rule=rule, way_out=way_out)
        self.num += 1
        self._counting.append(self._worked_s)
        return f"{self.num_counting} of {limit}"


Health: TypeAlias = TrainerHealth | EngineHealth | WorkerHealth
STATE_TIMEOUT_S = 5.0
REAP_S = 2.0
"""Seconds for the kernel to report a death after a broken connection."""
UNANSWERED = (CallLost, CallRefused, EngineError)


@dataclass(slots=True)
class Server:
    """A child process and its HTTP caller.

    `answers`: type of /health. `start_s`: limit for the first answer. `client_health` replaces /health.
    """

    child: Process
    caller: Caller
    answers: type[TrainerHealth] | type[EngineHealth] | type[WorkerHealth]
    start_s: float
    health: Health | None = None
    client_health: Callable[[float], Awaitable[Health]] | None = None
    ready: Callable[[], Awaitable[Health]] | None = None

    @property
    def name(self) -> str:
        return self.child.name

    async def ask(self, timeout_s: float) -> Health:
        """Raises CallLost, CallRefused or EngineError."""
        if self.client_health is not None:
            return await self.client_health(timeout_s)
        return await self.caller.get("/health", self.answers, timeout_s=timeout_s)

    async def check_alive(self, timeout_s: float) -> None:
        """Raises RoomError after `timeout_s`."""
        try:
            self.health = await self.ask(timeout_s)
        except UNANSWERED as error:
            where = f"process {self.child.pid}" if self.child.pid else f"the server at {self.child.url}"
            raise RoomError(
                self.name,
                f"{where} does not answer: {_reason(error)}",
                rule=f"the limit is observe.heartbeat_s={timeout_s}",
                way_out=f"read {self.child.log_path}; raise observe.heartbeat_s if the machine is only slow.",
            ) from error

    async def state(self) -> tuple[str, bool]:
        """Return (health as text, was it answered)."""
        if self.child.returncode is not None:
            return "not queried", False
        try:
            health = await self.ask(STATE_TIMEOUT_S)
        except UNANSWERED as error:
            return _reason(error), False
        return "answers: " + ", ".join(f"{key} {value}" for key, value in health.model_dump().items()), True

    async def watch(self) -> None:
        """Raises RoomError when the process ends."""
        await self.child.watch()

    async def come_up(self) -> None:
        """Wait until it serves. Raises RoomError if it dies or is late, ConfigError if it can never serve."""
        await self.child.start()
        self.caller.url = self.child.url
        asking = asyncio.ensure_future(self.ask(self.start_s) if self.ready is None else self.ready())
        watching = asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() or asking.exception() is not None:
                await asyncio.wait({watching}, timeout=REAP_S)
                if watching.done():
                    raise self.child.death()
            self.health = await asking
        except UNANSWERED as error:
            way_out = f"read {self.child.log_path}; raise supervision.start_timeout_s if it needs more time."
            raise RoomError(
                self.name,
                f"did not start: {_reason(error)}; the end of its log:\n{self.child.log_tail()}",
                way_out=(error.way_out if isinstance(error, EngineError) else "") or way_out,
            ) from error
        finally:
            await cancel_all([asking, watching])

    async def end(self) -> str:
        """Return a description of any survivor."""
        self.child.kill_nowait()
        await self.aclose()
        left = self.child.left
        self.child = self.child.renewed()
        self.health = None
        return left

    async def aclose(self) -> None:
        await self.caller.aclose()
        await self.child.aclose()


def _reason(error: CallLost | CallRefused | EngineError) -> str:
    return error.fault if isinstance(error, RoomError) else str(error)


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def start_all(servers: Sequence[Server]) -> None:
    """Raises the first RoomError immediately: trainer ranks wait for each other."""
    starts = [asyncio.ensure_future(server.come_up()) for server in servers]
    try:
        await asyncio.gather(*starts)
    finally:
        await cancel_all(starts)


async def first_death(servers: Sequence[Server], timeout_s: float) -> RoomError | None:
    children = [server.child for server in servers if server.child.url]
    if waits := [asyncio.ensure_future(child.wait()) for child in children if child.returncode is None]:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all(waits)
    return next((child.death() for child in children if child.returncode is not None), None)
