"""Starts the servers of a run, and asks how they are.

Waits: each process is given supervision.start_timeout_s (vLLM: three times as long) to answer, and
    load_limit_s() of the model that it loads; one that dies first ends the start with its own last words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.config import SupervisionConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.errors import EngineError, RoomError
from asyncrl.http import Caller, CallLost, CallRefused
from asyncrl.job.supervision.restarts import Restarts
from asyncrl.messages.calls import EngineHealth, TrainerHealth
from asyncrl.messages.work import WorkerHealth
from asyncrl.observe.watchdog import ChildState
from asyncrl.placement.nodes import Process

Health: TypeAlias = TrainerHealth | EngineHealth | WorkerHealth
STATE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Server:
    """A child process and the caller that speaks to it.

    `answers`: what /health says. `health`: its last answer. `engine`: the client of an engine server, through
    which it is asked. `ready`: what the kind of engine waits for where a first answer is not enough.
    `start_s`: how long it may take to give the first one.
    """

    child: Process
    caller: Caller
    answers: type[TrainerHealth] | type[EngineHealth] | type[WorkerHealth]
    start_s: float
    health: Health | None = None
    engine: EngineClient | None = None
    ready: Callable[[], Awaitable[Health]] | None = None

    @property
    def name(self) -> str:
        """Of the process, and of those that take its place."""
        return self.child.name

    async def ask(self, timeout_s: float) -> Health:
        """Its answer to /health. Raises CallLost, CallRefused or EngineError."""
        if self.engine is not None:
            return await self.engine.health(timeout_s=timeout_s)
        return await self.caller.get("/health", self.answers, timeout_s=timeout_s)

    async def check_alive(self, timeout_s: float) -> None:
        """Ask /health. Raises RoomError if the process does not answer within `timeout_s`."""
        try:
            self.health = await self.ask(timeout_s)
        except (CallLost, CallRefused, EngineError) as error:
            where = f"process {self.child.pid}" if self.child.pid else f"the server at {self.child.url}"
            what = f"{where} does not answer: {failure_text(error)}"
            rule = f"observe.heartbeat_s={timeout_s} is the limit"
            way_out = f"read {self.child.log_path}; raise observe.heartbeat_s if the machine is only slow."
            raise RoomError(self.name, what, rule=rule, way_out=way_out) from error

    async def state(self) -> ChildState:
        """What is seen of the process, and what its server says."""
        process = self.child.seen()
        if self.child.returncode is not None:
            return ChildState(self.name, process, "asked nothing", is_well=False)
        try:
            health = await self.ask(STATE_TIMEOUT_S)
        except (CallLost, CallRefused, EngineError) as error:
            return ChildState(self.name, process, failure_text(error), is_well=False)
        numbers = ", ".join(f"{key} {value}" for key, value in health.model_dump().items())
        return ChildState(self.name, process, f"answers: {numbers}", is_well=True)

    def dump_stacks_nowait(self) -> None:
        """Have the process write its stacks into its log, unless SIGUSR1 would end it."""
        self.child.dump_stacks_nowait()

    async def watch(self) -> None:
        """Sleep as long as the process lives; raises RoomError, with why it ended, when it does."""
        await self.child.watch()

    async def come_up(self) -> None:
        """Start the process; returns when it can serve. Raises RoomError if it dies first or takes longer
        than it may, ConfigError if it never can.
        """
        await self.child.start()
        self.caller.url = self.child.url
        asking = asyncio.ensure_future(self.ask(self.start_s) if self.ready is None else self.ready())
        watching = asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() or asking.exception() is not None:
                # A broken connection: the process is about to be reaped.
                await asyncio.wait({watching}, timeout=2.0)
                if watching.done():
                    raise self.child.death()
            self.health = await asking
        except (CallLost, CallRefused, EngineError) as error:
            what = f"did not come up: {failure_text(error)}; the end of its log:\n{self.child.log_tail()}"
            way_out = error.way_out if isinstance(error, EngineError) else ""
            log = f"{self.child.log_path}; raise supervision.start_timeout_s if it needs more time."
            raise RoomError(self.name, what, way_out=way_out or f"read {log}") from error
        finally:
            await end_all([asking, watching])

    async def end(self) -> str:
        """Kill the process, frozen or not, and close the connections; another one can be started in its
        place. Returns what is left of it, in words, if it does not die.
        """
        self.child.kill_nowait()
        await self.aclose()
        left = self.child.left
        self.child, self.health = self.child.renewed(), None
        return left

    async def aclose(self) -> None:
        """Close the connections, then end the process."""
        await self.caller.aclose()
        await self.child.aclose()


def failure_text(error: CallLost | CallRefused | RoomError) -> str:
    """What failed, without the name of the server."""
    return error.fault if isinstance(error, RoomError) else str(error)


async def end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel them, and return when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def start_all(servers: Sequence[Server]) -> None:
    """Start them, and sleep until all answer. Raises the RoomError of the first that cannot: the ranks of a
    trainer wait for each other.
    """
    starts = [asyncio.ensure_future(server.come_up()) for server in servers]
    try:
        await asyncio.gather(*starts)
    finally:
        await end_all(starts)


async def bring_up(
    trainers: Sequence[Server],
    engines: Sequence[Server],
    beside: Sequence[Server],
    *,
    is_shared: bool,
    stays: bool = False,
) -> None:
    """Start all processes; returns when they answer. Raises the RoomError of the first that cannot.

    On shared devices engines come first and go to sleep, then the trainer: it may have to catch up before
    their turn. So no device holds more than one side, at the price of loading one after the other; what the
    engines loaded is gone, and their first turn begins with a push. If the engines stay where they are, they
    do not sleep; they come first all the same, because vLLM measures what is free while it starts.
    """
    if not is_shared:
        await start_all([*trainers, *engines, *beside])
        return
    await start_all([*engines, *beside])
    if stays:
        await start_all(trainers)
        return
    limit_s = max(server.start_s for server in engines)
    try:
        async with asyncio.timeout(limit_s):
            clients = [server.engine for server in engines if server.engine is not None]
            await asyncio.gather(*(client.sleep(["kv", "weights"]) for client in clients))
    except TimeoutError as error:
        what = f"an engine does not free the trainer's device within {limit_s:g} s"
        raise RoomError("placement", what, way_out="read the logs of the engines.") from error
    await start_all(trainers)


async def start_again(
    start: Callable[[], Awaitable[None]],
    servers: Sequence[Server],
    config: SupervisionConfig,
    *,
    warn: Callable[[str], None],
    before_start: Callable[[], Awaitable[None]],
) -> None:
    """Await `start`. If a signal kills a process on the way, start all of them again after `before_start`, up
    to supervision.max_restarts times. Raises the RoomError of any other failure: it would repeat.
    """
    restarts = Restarts(config)
    while True:
        try:
            return await start()
        except RoomError as error:
            if not any((server.child.returncode or 0) < 0 for server in servers):
                raise
            words = restarts.again_nowait(error)
            warn(f"{error.room}: {error.fault.splitlines()[0]} while the run starts; starting again, {words}")
        for server in servers:
            if left := await server.end():
                warn(left)
            if server.engine is not None:
                server.engine.renew_nowait()
        await asyncio.sleep(config.backoff_s)
        await before_start()


async def first_death(servers: Sequence[Server], timeout_s: float) -> RoomError | None:
    """Why one of their processes has died, if one has; waits up to `timeout_s` for the first death."""
    children = [server.child for server in servers if server.child.url]
    if waits := [asyncio.ensure_future(child.wait()) for child in children if child.returncode is None]:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await end_all(waits)
    return next((child.death() for child in children if child.returncode is not None), None)


async def end_server(server: Server, warn: Callable[[str], None]) -> None:
    """Report, at the run's end, processes that did not die: they hold memory, and perhaps a GPU."""
    await server.aclose()
    if server.child.left:
        warn(server.child.left)
