"""Process, caller and health of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrl.base.errors import EngineError, RoomError
from asyncrl.base.http import Caller, CallLost, CallRefused
from asyncrl.launch.processes import Process
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.trainer_api import TrainerHealth
from asyncrl.messages.work import WorkerHealth

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
