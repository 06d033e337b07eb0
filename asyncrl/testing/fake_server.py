"""Fake server processes, for the virtual clock: the real client code calls them in place of HTTP servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from pydantic import BaseModel

from asyncrl.errors import RoomError
from asyncrl.http import Answer, Caller, CallLost, CallRefused
from asyncrl.messages.base import ErrorBody
from asyncrl.waits import TimeLimit

Work = Callable[[], Awaitable[Any]]


class FakeServer(Caller):
    """A server that can die (its connections break, new ones too), freeze (it keeps connections and stops
    answering) and be started again, with its initial state.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, f"fake://{name}", "secret")
        self.is_frozen = False
        self.has_ended = asyncio.Event()
        """Of the process: each one has its own."""

    def die(self) -> None:
        self.has_ended.set()

    def freeze(self) -> None:
        self.is_frozen = True

    def restart(self) -> None:
        """Another process in its place."""
        self.die()
        self.has_ended, self.is_frozen = asyncio.Event(), False

    async def aclose(self) -> None:
        """Nothing is held."""

    def health(self) -> BaseModel:
        """What it answers to /health."""
        raise NotImplementedError

    async def _handle(self, path: str, body: Any) -> BaseModel:
        """What it answers to a POST."""
        raise NotImplementedError

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        async def health() -> BaseModel:
            return self.health()

        return await self._answer(path, health, answer, timeout_s)

    async def post(
        self, path: str, body: BaseModel | bytes | None, answer: type[Answer], *, timeout_s: float | None
    ) -> Answer:
        return await self._answer(path, partial(self._handle, path, body), answer, timeout_s)

    async def _answer(self, path: str, work: Work, answer: type[Answer], timeout_s: float | None) -> Answer:
        try:
            async with TimeLimit(timeout_s):
                result = await self.unless_dead(path, work)
        except TimeoutError:
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        return answer.model_validate(result.model_dump())

    async def unless_dead(self, path: str, work: Work) -> Any:
        """What `work` returns, or CallLost as soon as this process has ended."""
        process = self.has_ended
        ended = asyncio.ensure_future(process.wait())
        working = asyncio.ensure_future(self._thawed(work))
        try:
            await asyncio.wait({ended, working}, return_when=asyncio.FIRST_COMPLETED)
            if process.is_set():
                raise CallLost(self.name, path, "ServerDisconnectedError: it died")
            return working.result()
        finally:
            for task in (ended, working):
                task.cancel()
            await asyncio.gather(ended, working, return_exceptions=True)

    async def _thawed(self, work: Work) -> Any:
        if not self.is_frozen:
            result = await work()
            if not self.is_frozen:
                return result
        await asyncio.Event().wait()

    def refused(self, path: str, why: str, status: int = 409) -> CallRefused:
        return CallRefused(self.name, path, status, ErrorBody(error=why))


class FakeProcess:
    """A Restartable over a fake server; a new process answers `start_s` seconds after it was started.

    Knobs: `fails_to_start` (number of next processes that end instead of starting), `reap_s` (seconds from
        broken connections to the death that the kernel reports), `end_s` (seconds that a SIGKILL takes).
    """

    health: type[BaseModel]
    """What the server answers to /health."""
    fails_at_once = False

    def __init__(self, server: FakeServer, *, start_s: float = 5.0) -> None:
        self.server, self.start_s = server, start_s
        self.fails_to_start, self.reap_s, self.end_s = 0, 0.0, 0.0
        self.started_at: list[float] = []
        """When a process was started again."""
        self.num_cancelled = 0
        """Starts that were given up."""

    @property
    def name(self) -> str:
        return self.server.name

    async def watch(self) -> None:
        """Until it dies."""
        await self.server.has_ended.wait()
        await asyncio.sleep(self.reap_s)
        what = "process 17 was killed by SIGKILL; the end of its log:\n    last words"
        raise RoomError(self.name, what, way_out="read its log.")

    async def check_alive(self, timeout_s: float) -> None:
        """GET /health."""
        try:
            await self.server.get("/health", self.health, timeout_s=timeout_s)
        except CallLost as error:
            raise RoomError(self.name, f"process 17 does not answer: {error.why}") from error

    async def end(self) -> str:
        """SIGKILL."""
        if self.end_s:
            await asyncio.sleep(self.end_s)
        self.server.die()
        return ""

    async def come_up(self) -> None:
        """A new process, with the state of the start."""
        self.started_at.append(asyncio.get_running_loop().time())
        fails, self.fails_to_start = self.fails_to_start > 0, max(0, self.fails_to_start - 1)
        try:
            await asyncio.sleep(0.0 if fails and self.fails_at_once else self.start_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if fails:
            raise RoomError(self.name, "did not come up: no memory")
        self.server.restart()
