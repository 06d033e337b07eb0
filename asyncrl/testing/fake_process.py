"""The process of a fake server, for a supervisor on the virtual clock: it ends, hangs and comes up as it is told."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel

from asyncrl.calling import Answer, CallLost
from asyncrl.errors import RoomError
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.wire import EngineHealth


class Mortal(Protocol):
    """What a process needs of its server."""

    name: str
    has_ended: asyncio.Event

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """A call."""
        ...


ServerT = TypeVar("ServerT", bound=Mortal)


class FakeProcess(Generic[ServerT]):
    """A Restartable over a fake server; a new process answers `start_s` seconds after it was started.

    Knobs:      `fails_to_start` (so many of the next processes end instead of coming up), `reap_s` (the kernel tells of a death
                so long after the connections broke).
    """

    health: type[BaseModel]
    """What the server answers to /health."""

    def __init__(self, server: ServerT, *, start_s: float = 5.0) -> None:
        self.server, self.start_s = server, start_s
        self.fails_to_start, self.reap_s = 0, 0.0
        self.started_at: list[float] = []
        """When a process was started again."""

    @property
    def name(self) -> str:
        """The server's."""
        return self.server.name

    async def watch(self) -> None:
        """Until it dies."""
        await self.server.has_ended.wait()
        await asyncio.sleep(self.reap_s)
        raise RoomError(self.name, "process 17 was killed by SIGKILL; the end of its log:\n    last words", way_out="read its log.")

    async def check_alive(self, timeout_s: float) -> None:
        """GET /health."""
        try:
            await self.server.get("/health", self.health, timeout_s=timeout_s)
        except CallLost as error:
            raise RoomError(self.name, f"process 17 does not answer: {error.why}") from error

    def fail_if_told(self) -> None:
        """Raise RoomError if this process is one that does not come up."""
        if self.fails_to_start:
            self.fails_to_start -= 1
            raise RoomError(self.name, "did not come up: no memory")


class FakeEngineProcess(FakeProcess[FakeEngineServer]):
    """Of an engine. One more knob: `end_s` (a SIGKILL takes so long)."""

    health, end_s = EngineHealth, 0.0

    async def end(self) -> str:
        """SIGKILL."""
        await asyncio.sleep(self.end_s)
        self.server.die()
        return ""

    async def start_again(self) -> None:
        """A new process, with the weights of the start."""
        self.started_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.start_s)
        self.fail_if_told()
        self.server.restart()
