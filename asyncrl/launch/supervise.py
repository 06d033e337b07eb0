"""Servers: process, caller, health, supervision and restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from asyncrl.base import errors
from asyncrl.base.errors import ComponentError, NodeLost
from asyncrl.base.http import Caller, CallLost, CallRefused
from asyncrl.base.waits import clock, note_span, waiting
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.launch.processes import Process
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.messages.worker_api import WorkerHealth

logger = logging.getLogger("asyncrl.launch.supervise")

HEARTBEAT_PERIOD_S = 1.0
GRACE_S = 1.0
"""Seconds for the kernel to report a death after a broken call."""
MAX_BACKOFF_S = 30.0
NODE_PERIOD_S = 5.0
NODE_WAIT_S = 600.0
"""Seconds to wait for an indispensable lost node."""
RESTART_WINDOW_S = 3600.0
"""Seconds of work after which a restart no longer counts."""
START_TRIES = 3
"""Starts in a row that may fail; else a process that always dies while loading would be
started for hours.
"""
STATE_TIMEOUT_S = 5.0
NO_LOSS = (errors.PublishError, errors.JournalError, errors.TrainerError)
"""Errors that a new process would not fix; TrainerLost is excepted."""
UNANSWERED = (CallLost, CallRefused, errors.EngineError)
Health: TypeAlias = TrainerHealth | EngineHealth | WorkerHealth
Room: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
T = TypeVar("T")


class AskHealth(Protocol):
    def __call__(self, *, timeout_s: float) -> Awaitable[Health]: ...


async def ask_children(servers: Sequence[Server]) -> dict[str, bool]:
    """Let each process dump its stacks; return a sentence about each, and whether it is
    well.
    """
    # A signal, not a request: a process that hangs answers no request.
    for server in servers:
        server.child.dump_stacks_nowait()
    states = await asyncio.gather(*(server.state() for server in servers))
    return {
        f"{server.name}: {server.child.seen()}; {text}": is_well
        for server, (text, is_well) in zip(servers, states, strict=True)
    }


def health_over(caller: Caller, answer: type[Health]) -> AskHealth:
    """Return a call of GET /health, which all servers of a run answer."""
    return partial(caller.get, "/health", answer)


@dataclass(frozen=True, slots=True)
class Supervision:
    config: SupervisionConfig
    heartbeat_s: float
    warn: Callable[[str], None]
    on_event: Callable[[str, Mapping[str, object]], None]
    restarts_s: defaultdict[str, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By name: seconds of work before each counting restart."""


def _final(lost: ComponentError, rule: str) -> ComponentError:
    way_out = lost.way_out or f"read the log of {lost.component}, then resume the run."
    return ComponentError(
        lost.component,
        lost.fault,
        rule=f"{lost.rule}; {rule}".lstrip("; "),
        way_out=way_out,
    )


class Supervisor:
    """Watches processes that live and die together; if one is lost, all restart.

    Life: up -> lost (died, silent for heartbeat_s, or broke a call) -> down -> backoff
        -> start and restore state -> up. A loss on the way counts too.
    Waits: for a loss, then backoff_s (doubled up to 30 s), free devices, the start, and
        bring_back.
    Invariant: a refused restart ends the run.
    """

    def __init__(
        self,
        processes: Sequence[Server],
        supervision: Supervision,
        *,
        kind: str = "process",
        on_down: Callable[[ComponentError], None] = lambda _: None,
        on_start: Callable[[], None] = lambda: None,
        on_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`kind` names the processes in events. `on_down` gets each loss, perhaps
        twice; `on_start` is called before new processes start, and `on_up` once they
        serve.
        """
        self.kind = kind
        self._on_down = on_down
        self._on_start = on_start
        self._on_up = on_up
        self._room: Room = contextlib.nullcontext
        self._processes = tuple(processes)
        self.config = supervision.config
        self.heartbeat_s = supervision.heartbeat_s
        self._warn = supervision.warn
        self._on_event = supervision.on_event
        self._worked_s = 0.0
        # Shared by name: restarts while the run starts (FirstStart) and later ones
        # count together.
        self._restarts_s = supervision.restarts_s[processes[0].name]
        self._num_failed_starts = 0
        """In a row."""
        self._waits_since_s: float | None = None
        self.num_restarts = 0
        self.is_up = True
        self.is_starting = False
        """Processes end or start, within start limits."""
        self._report = asyncio.Future[ComponentError]()

    @property
    def name(self) -> str:
        return self._processes[0].name

    def start_within(self, room: Room) -> None:
        """Let new processes start within `room`, such as a time slice of their device."""
        self._room = room

    def lost_nowait(self, error: ComponentError) -> None:
        """Report a broken call; the component is down on return."""
        is_told = isinstance(error, errors.EngineLost) and error.is_told
        if not is_told:
            self._lost_by(error)

    async def run(self) -> None:
        """Watch until cancelled. Raises the ComponentError that ends the run.

        Example: the node of a dispensable engine is lost and returns 12 s later. Each
        line is one pass of the loop; `is_told` suppresses repeated warnings.

        lost           is_told   _replace
        NodeLost       False     warns, waits 5 s, start fails with NodeLost
        NodeLost       True      waits 5 s, start fails with NodeLost
        NodeLost       True      waits 5 s, start succeeds: lost = None
        None                     watches the new process
        """
        lost = None
        if not self.is_up:
            # An engine that was parked starts with a clean record.
            self._restarts_s.clear()
            self._num_failed_starts = 0
            lost = await self._start()
        is_told = False
        while True:
            if lost is None:
                since_s = clock()
                # An event that nobody sets: only a loss ends this wait.
                lost = await self._until_lost(asyncio.Event().wait())
                self._worked_s += clock() - since_s
                self._waits_since_s = None
                is_told = False
            if lost is not None:
                is_node_gone = isinstance(lost, NodeLost)
                lost = await self._replace(lost, is_told=is_told)
                is_told = is_node_gone

    def _allow(self, lost: ComponentError) -> tuple[str, float]:
        """Return the allowance as text, and seconds to wait. Raises the final
        ComponentError.

        At most max_restarts are within RESTART_WINDOW_S of work. A lost node counts as
        none: it is waited for NODE_WAIT_S, or as long as it is dispensable.

        Example: max_restarts=3, backoff_s=1. Losses after 10, 20 and 30 s of work wait
        1, 2 and 4 s. A fourth after 40 s ends the run. After 3,615 s it is allowed and
        waits 4 s, because the first loss is more than an hour of work ago.
        """
        # With max_restarts=0 the first loss ends the run, under its own name.
        limit = self.config.max_restarts
        if not limit:
            raise lost
        if isinstance(lost, NodeLost):
            now_s = clock()
            is_dispensable = self._is_dispensable()
            # While other engines serve, the clock starts again at each try, so that the
            # wait has no limit. It runs from the first try once the run needs the node.
            if is_dispensable or self._waits_since_s is None:
                self._waits_since_s = now_s
            if now_s - self._waits_since_s < NODE_WAIT_S:
                how = (
                    "continues without it"
                    if is_dispensable
                    else f"waits {NODE_WAIT_S:g} s at most"
                )
                return f"once its node is back; the run {how}", NODE_PERIOD_S
            raise _final(
                lost, f"a run waits {NODE_WAIT_S:g} s for a node that it needs"
            )
        if self._num_failed_starts >= START_TRIES:
            raise _final(lost, f"{START_TRIES} starts in a row have failed")
        # Seconds of work, not of the clock: a process that dies after each long load
        # would otherwise get its restarts back while it loads.
        num = sum(self._worked_s - at_s < RESTART_WINDOW_S for at_s in self._restarts_s)
        if num >= limit:
            rule = f"supervision.max_restarts={limit} is used up within {RESTART_WINDOW_S:g} s of work"
            raise _final(lost, rule)
        self._restarts_s.append(self._worked_s)
        return f"{num + 1} of {limit}", min(
            self.config.backoff_s * 2.0**num, MAX_BACKOFF_S
        )

    async def _replace(
        self, lost: ComponentError, *, is_told: bool
    ) -> ComponentError | None:
        """Return the reason of another loss, if any. `is_told`: its node was missing
        before.
        """
        is_node_gone = isinstance(lost, NodeLost)
        try:
            allowance, wait_s = self._allow(lost)
        except ComponentError:
            if self.config.max_restarts:  # report this error instead of the death
                await self._end()
            raise
        self.num_restarts += 1
        self._down(lost)
        # The watchdog is quiet during a start, which has its own limits. A wait for a
        # node may take minutes, and is reported.
        self.is_starting = not is_node_gone
        about = {"name": self.name, "restart": self.num_restarts}
        try:
            await self._end()
            if not (is_node_gone and is_told):  # once, not at each retry
                logger.warning("%s is lost: %s", self.name, lost)
                self._warn(f"{summary_of(lost)}; restarting {self.name}, {allowance}")
                self._on_event(f"{self.kind} lost", {**about, "why": str(lost)})
            since_s = clock()
            await asyncio.sleep(wait_s)
        finally:
            self.is_starting = False
        again = await self._start()
        if again is None:
            note_span(
                "restarts",
                "down",
                since_s,
                clock(),
                text=f"{self.name}: {summary_of(lost)}",
            )
            self._on_event(f"{self.kind} up", {**about, "down_s": clock() - since_s})
        return again

    async def _end(self) -> None:
        for process in self._processes:
            await process.end()

    async def _start(self) -> ComponentError | None:
        """Return the reason of another loss, if any."""
        # A report from here on counts against the new processes. Callers drop late
        # errors of the old ones (EngineLost.is_told, num_restarts in
        # SupervisedTrainer).
        self._report = asyncio.Future()
        # Colocated, an engine may start only in the engines' time slice. The block ends that
        # time slice no earlier than the engine serves.
        async with self._room():
            # Forget the state of the old processes.
            self._on_start()
            self.is_starting = True
            try:
                with waiting("its new process", on=self._processes[0].name):
                    await start_all(self._processes)
            except ComponentError as error:
                # A missing node has its own limit, NODE_WAIT_S.
                if not isinstance(error, NodeLost):
                    self._num_failed_starts += 1
                return error
            finally:
                self.is_starting = False
            self._num_failed_starts = 0
            # The new processes can die while their state is restored: that is a loss
            # like any other.
            again = await self._until_lost(self._bring_back())
            # A report of the loop's current iteration has not reached _raise_report()
            # yet. Without this test lost processes would be declared up for a moment.
            if again is not None or self._report.done():
                return again or self._report.result()
        self.is_up = True
        self._on_up()
        return None

    async def _until_lost(
        self, work: Coroutine[Any, Any, object]
    ) -> ComponentError | None:
        """Return the loss, or None when `work` ends. Raises other errors of `work`."""
        watching = [
            asyncio.ensure_future(one.watch(self.heartbeat_s))
            for one in self._processes
        ]
        working = [
            asyncio.ensure_future(self._raise_report()),
            asyncio.ensure_future(work),
        ]
        error = (await _race(watching, working)).exception()
        # A refused batch or a failing journal would fail with a new process too: such
        # an error of _bring_back() ends the run.
        ends_run = isinstance(error, NO_LOSS) and not isinstance(
            error, errors.TrainerLost
        )
        if error is None or (isinstance(error, ComponentError) and not ends_run):
            return error
        raise error

    async def _raise_report(self) -> None:
        # The report outlives this watch: its cancellation at the end of _until_lost
        # must not cancel it.
        raise await asyncio.shield(self._report)

    def _lost_by(self, error: ComponentError) -> None:
        # Several calls break when a process dies. The first report counts.
        if not self._report.done():
            self._report.set_result(error)
            self._down(error)

    # hooks

    def _is_dispensable(self) -> bool:
        return False

    def _down(self, lost: ComponentError) -> None:
        """Stop sending calls to the processes. Idempotent."""
        self.is_up = False
        self._on_down(lost)

    async def _bring_back(self) -> None:
        """Restore the old processes' state."""


class FirstStart(Supervisor):
    """Starts processes of a new run. A process that dies before it serves is started
    again, as a later process is.

    A process that is late, or logs the reason of its end, would fail again: it ends the
    run at once.
    """

    async def run(self) -> None:
        """Return when all serve. Raises the ComponentError that ends the run."""
        lost = await self._start()
        while lost is not None:
            lost = await self._replace(lost, is_told=False)

    def _allow(self, lost: ComponentError) -> tuple[str, float]:
        children = [process.child for process in self._processes]
        # All still run: the limit start_s has passed. And a cause that the log names
        # would end the next start too.
        if any(child.is_refused() for child in children) or all(
            child.returncode is None for child in children
        ):
            raise lost
        return super()._allow(lost)


def summary_of(lost: errors.AsyncrlError) -> str:
    """Return the error's first line: without the end of a log that death() appends, or
    with the way out of an error that the process has declared.
    """
    first, _, log = lost.what.splitlines()[0].partition("; the end of ")
    return (
        first if log or not lost.way_out else f"{first} (way out: {lost.way_out[:-1]})"
    )


@dataclass(slots=True)
class Server:
    """A child process and its HTTP caller.

    `ask` returns its health, and raises CallLost, CallRefused or EngineError.
    `start_s`: limit for the first answer. `ready` waits until a new process serves;
    None: until `ask` is answered.
    """

    child: Process
    caller: Caller
    ask: AskHealth
    start_s: float
    ready: Callable[[], Awaitable[Health]] | None = None
    health: Health | None = None

    @property
    def name(self) -> str:
        return self.child.name

    async def state(self) -> tuple[str, bool]:
        """Return (health as text, was it answered)."""
        if self.child.returncode is not None:
            return "not queried", False
        try:
            health = await self.ask(timeout_s=STATE_TIMEOUT_S)
        except UNANSWERED as error:
            return _reason(error), False
        return "answers: " + ", ".join(
            f"{key} {value}" for key, value in health.model_dump().items()
        ), True

    async def watch(self, heartbeat_s: float) -> None:
        """Raise ComponentError when the process ends, or does not answer within
        `heartbeat_s`.
        """
        try:
            await self._while_alive(self._beat(heartbeat_s))
        except UNANSWERED as error:
            where = (
                f"process {self.child.pid}"
                if self.child.pid
                else f"the server at {self.child.url}"
            )
            raise ComponentError(
                self.name,
                f"{where} does not answer: {_reason(error)}",
                rule=f"the limit is observe.heartbeat_s={heartbeat_s}",
                way_out=f"read {self.child.log_path}; raise observe.heartbeat_s if the machine is only slow.",
            ) from error

    async def _beat(self, limit_s: float) -> None:
        while True:
            self.health = await self.ask(timeout_s=limit_s)
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def come_up(self) -> None:
        """Start the process and wait until it serves.

        Raises ComponentError if it dies or is late, ConfigError if it can never serve.
        """
        await self.child.start()
        # Each start binds another port.
        self.caller.url = self.child.url
        try:
            first = (
                self.ask(timeout_s=self.start_s) if self.ready is None else self.ready()
            )
            self.health = await self._while_alive(first)
        except UNANSWERED as error:
            way_out = f"read {self.child.log_path}; raise supervision.start_timeout_s if it needs more time."
            raise ComponentError(
                self.name,
                f"did not start: {_reason(error)}; the end of its log:\n{self.child.log_tail()}",
                way_out=(error.way_out if isinstance(error, errors.EngineError) else "")
                or way_out,
            ) from error

    async def _while_alive(self, call: Awaitable[T]) -> T:
        """Return the call's result. Raises its error, or the process's death."""
        # A call to a process that loads waits in the backlog of its socket, perhaps for
        # minutes. If it dies, the exit code says more than the broken connection.
        dying = asyncio.ensure_future(self.child.wait())
        calling = asyncio.ensure_future(call)
        if await _race([dying], [calling]) is dying:
            raise self.child.death()
        return calling.result()

    async def end(self) -> None:
        # A lost process may hang and ignore SIGTERM. aclose() would wait TERM_TIMEOUT_S
        # for it.
        self.child.kill_nowait()
        await self.aclose()
        self.child = self.child.renewed()
        self.health = None

    async def aclose(self) -> None:
        await self.caller.aclose()
        await self.child.aclose()


def _reason(error: CallLost | CallRefused | errors.EngineError) -> str:
    return error.fault if isinstance(error, ComponentError) else str(error)


async def _race(
    deaths: Sequence[asyncio.Future[Any]], others: Sequence[asyncio.Future[Any]]
) -> asyncio.Future[Any]:
    """Return the task that ends first, and cancel the rest. A death within GRACE_S
    precedes other errors.
    """
    try:
        done, _ = await asyncio.wait(
            [*deaths, *others], return_when=asyncio.FIRST_COMPLETED
        )
        # A dying process closes its connections before the kernel reports its exit. The
        # exit code and the end of the log say more than a broken connection.
        if done.isdisjoint(deaths) and any(task.exception() for task in done):
            await asyncio.wait(
                deaths, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED
            )
        # Deaths first: of several ended tasks they are the best reason.
        return next(task for task in (*deaths, *others) if task.done())
    finally:
        await cancel_all([*deaths, *others])


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        # Cancel all before any is awaited: a slow one must not delay the others.
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def start_all(servers: Sequence[Server]) -> None:
    """Start all servers and wait until they serve. Raises the first ComponentError
    immediately: trainer ranks wait for each other, so the rest would hang until their
    limit if a rank has died.
    """
    await all_or_none([server.come_up() for server in servers])


async def all_or_none(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all works at once; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        # gather leaves the other works running after an error, hence the finally.
        await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def first_death(
    servers: Sequence[Server], timeout_s: float
) -> ComponentError | None:
    """Return the reason if a process has ended, or ends within `timeout_s`. An error
    that ends the run is often the consequence of such a death.
    """
    # Without a URL it was never started.
    children = [server.child for server in servers if server.child.url]
    if waits := [
        asyncio.ensure_future(child.wait())
        for child in children
        if child.returncode is None
    ]:
        await asyncio.wait(
            waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        await cancel_all(waits)
    return next(
        (child.death() for child in children if child.returncode is not None), None
    )
