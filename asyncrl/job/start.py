"""Start the servers of a run and query their health.

Waits: each process has supervision.start_timeout_s (vLLM: three times that) plus load_limit_s() of its model
    to answer; a process that dies first ends the start with its last log lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.base.errors import EngineError, RoomError
from asyncrl.base.http import Caller, CallLost, CallRefused
from asyncrl.config import SupervisionConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.job.supervision.restarts import Restarts
from asyncrl.launch.processes import Process
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.messages.work import WorkerHealth
from asyncrl.observe.watchdog import ChildState

Health: TypeAlias = TrainerHealth | EngineHealth | WorkerHealth
STATE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Server:
    """A child process and its HTTP caller.

    `answers`: type of /health. `health`: last answer. `engine`: an engine server's client, used for health.
    `ready`: extra readiness check of the engine kind. `start_s`: limit for the first answer.
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
        return self.child.name

    async def ask(self, timeout_s: float) -> Health:
        """Query /health. Raises CallLost, CallRefused or EngineError."""
        if self.engine is not None:
            return await self.engine.health(timeout_s=timeout_s)
        return await self.caller.get("/health", self.answers, timeout_s=timeout_s)

    async def check_alive(self, timeout_s: float) -> None:
        """Query /health. Raises RoomError without an answer within `timeout_s`."""
        try:
            self.health = await self.ask(timeout_s)
        except (CallLost, CallRefused, EngineError) as error:
            where = f"process {self.child.pid}" if self.child.pid else f"the server at {self.child.url}"
            what = f"{where} does not answer: {failure_text(error)}"
            rule = f"observe.heartbeat_s={timeout_s} is the limit"
            way_out = f"read {self.child.log_path}; raise observe.heartbeat_s if the machine is only slow."
            raise RoomError(self.name, what, rule=rule, way_out=way_out) from error

    async def state(self) -> ChildState:
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
        """Make the process log its stacks, unless SIGUSR1 would end it."""
        self.child.dump_stacks_nowait()

    async def watch(self) -> None:
        """Sleep until the process ends; then raise RoomError with the reason."""
        await self.child.watch()

    async def come_up(self) -> None:
        """Start the process and wait until it serves. Raises RoomError if it dies or takes too long,
        ConfigError if it can never serve.
        """
        await self.child.start()
        self.caller.url = self.child.url
        asking = asyncio.ensure_future(self.ask(self.start_s) if self.ready is None else self.ready())
        watching = asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() or asking.exception() is not None:
                # broken connection: the process is about to be reaped
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
        """Kill the process and close its connections; describe any survivor. A replacement can start
        afterwards.
        """
        self.child.kill_nowait()
        await self.aclose()
        left = self.child.left
        self.child, self.health = self.child.renewed(), None
        return left

    async def aclose(self) -> None:
        await self.caller.aclose()
        await self.child.aclose()


def failure_text(error: CallLost | CallRefused | RoomError) -> str:
    return error.fault if isinstance(error, RoomError) else str(error)


async def end_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def start_all(servers: Sequence[Server]) -> None:
    """Start all servers and wait until they answer. Raises the first RoomError at once: the ranks of a
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
    """Start all processes and wait until they answer. Raises the first RoomError.

    On shared devices the engines start first and sleep, then the trainer, which may have to catch up before
    their turn. So no device holds more than one side, and the engines' first turn begins with a push. Engines
    that stay in memory also start first, because vLLM measures free memory at its start.
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
    """Await `start`. If a signal kills a process, restart all after `before_start`, up to
    supervision.max_restarts times. Raises the RoomError of any other failure, which would repeat.
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
                server.engine.reset_nowait()
        await asyncio.sleep(config.backoff_s)
        await before_start()


async def first_death(servers: Sequence[Server], timeout_s: float) -> RoomError | None:
    """Return the first death, waiting up to `timeout_s`."""
    children = [server.child for server in servers if server.child.url]
    if waits := [asyncio.ensure_future(child.wait()) for child in children if child.returncode is None]:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await end_all(waits)
    return next((child.death() for child in children if child.returncode is not None), None)


async def end_server(server: Server, warn: Callable[[str], None]) -> None:
    """End a server, and warn of survivors: they hold memory, perhaps a GPU."""
    await server.aclose()
    if server.child.left:
        warn(server.child.left)
