"""A fake trainer worker and its processes, for the virtual clock: it stands at the far end of the calls,
under the real client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from asyncrl.errors import RoomError
from asyncrl.http import Answer, Caller, CallLost, CallRefused
from asyncrl.messages.base import ErrorBody
from asyncrl.messages.engine_calls import EngineHealth
from asyncrl.messages.trainer_calls import (
    ExportResponse,
    SaveRequest,
    StateRequest,
    TrainerHealth,
    TrainResponse,
    unpack_batch,
)
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.waits import TimeLimit

# The process of a fake server, for a supervisor on the virtual clock: it ends, hangs and comes up as it is
# told.


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

    Knobs:      `fails_to_start` (so many of the next processes end instead of coming up), `reap_s` (the
    kernel tells of a death
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
        raise RoomError(
            self.name,
            "process 17 was killed by SIGKILL; the end of its log:\n    last words",
            way_out="read its log.",
        )

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


class FakeTrainerServer(Caller):
    """Rank 0 of a trainer: one call at a time, and a step takes `train_s`. A death breaks its connections;
    frozen, it keeps them.

    Its weights are the list `weights` of what it was trained on: a name for each batch. Saved states are kept
    in `states` by path, as a disk would. `dies_at` (a path): the process ends when that call comes;
    `dies_after`: when it is done, before the answer. `refuse` (a reason): the next call of a kind is refused.
    A rank that a step waits for and that is dead makes the step hang.
    """

    def __init__(
        self, name: str = "trainer-0", *, train_s: float = 1.0, peers: Sequence[FakeTrainerServer] = ()
    ) -> None:
        super().__init__(name, f"fake://{name}", "secret")
        self.train_s, self.export_s, self.load_s, self.save_s, self.write_s = train_s, 0.5, 2.0, 0.5, 3.0
        self.peers = peers
        self.dies_at = self.dies_after = ""
        self.refuse: dict[str, str] = {}
        self.weights: list[str] = []
        self.calls: list[str] = []
        self.saved: dict[str, list[str]] = {}
        self.states: dict[str, list[str]] = {}
        self.is_frozen = False
        self.has_ended = asyncio.Event()
        """Of the process: each one has its own."""
        self._worker = asyncio.Lock()
        self._pending: tuple[str, list[str]] | None = None

    @property
    def policy_version(self) -> int:
        """Steps that were taken."""
        return len(self.weights)

    def die(self) -> None:
        """Break every connection, those to come too."""
        self.has_ended.set()

    def freeze(self) -> None:
        """Answer nothing any more, and keep every connection; die() ends that."""
        self.is_frozen = True

    def restart(self) -> None:
        """Another process in its place, with the weights of the start."""
        self.die()
        self.has_ended, self.is_frozen, self._worker, self._pending = (
            asyncio.Event(),
            False,
            asyncio.Lock(),
            None,
        )
        self.weights = []

    async def aclose(self) -> None:
        """Nothing is held."""

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        """GET /health, during a step too."""
        try:
            async with TimeLimit(timeout_s):
                await self._unless_dead(path, self._thaw())
        except TimeoutError:
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        health = TrainerHealth(
            policy_version=self.policy_version, device="none", is_busy=self._worker.locked()
        )
        return answer.model_validate(health.model_dump())

    async def post(
        self, path: str, body: BaseModel | bytes | None, answer: type[Answer], *, timeout_s: float | None
    ) -> Answer:
        """Any other call."""
        self.calls.append(path)
        if path == self.dies_at:
            self.dies_at = ""
            self.die()
        result = await self._unless_dead(path, self._answer(path, body))
        return answer.model_validate(result.model_dump())

    async def _unless_dead(self, path: str, work: Any) -> Any:
        """What `work` returns, or CallLost as soon as this process has ended."""
        ended = asyncio.ensure_future(self.has_ended.wait())
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait({ended, working}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise CallLost(self.name, path, "ServerDisconnectedError: it died")
            return working.result()
        finally:
            for task in (ended, working):
                task.cancel()
            await asyncio.gather(ended, working, return_exceptions=True)

    async def _thaw(self) -> None:
        if self.is_frozen:
            await asyncio.Event().wait()

    async def _answer(self, path: str, body: Any) -> BaseModel:
        await self._thaw()
        if path == "/wait_save_state":
            return await self._wait_save_state()
        async with self._worker:
            result = await self._work(path, body)
            await self._thaw()
        if path == self.dies_after:
            self.dies_after = ""
            self.die()
            await asyncio.Event().wait()
        return result

    async def _work(self, path: str, body: Any) -> BaseModel:
        if reason := self.refuse.pop(path, ""):
            raise CallRefused(self.name, path, 409, ErrorBody(error=reason))
        if path == "/train":
            header, _ = unpack_batch(body)
            if header.version != self.policy_version:
                raise CallRefused(
                    self.name,
                    path,
                    409,
                    ErrorBody(error=f"batch {header.version} at version {self.policy_version}"),
                )
            await asyncio.sleep(self.train_s)
            if any(peer.has_ended.is_set() or peer.is_frozen for peer in self.peers):
                await asyncio.Event().wait()
            self.weights.append(
                ",".join(
                    f"{trajectory.prompt_id}#{trajectory.sample_index}" for trajectory in header.trajectories
                )
            )
            return TrainResponse(
                policy_version=self.policy_version, metrics={"policy/loss": float(self.policy_version)}
            )
        if path == "/export":
            await asyncio.sleep(self.export_s)
            version = self.policy_version
            return ExportResponse(
                version=version, path="fake", digest="|".join(self.weights), num_tensors=1, num_bytes=1
            )
        if path == "/save":
            assert isinstance(body, SaveRequest)
            await asyncio.sleep(self.save_s)
            self.saved[body.path] = list(self.weights)
            return self._health()
        assert isinstance(body, StateRequest)
        if path == "/load_state":
            await asyncio.sleep(self.load_s)
            self.weights = list(self.states[body.path])
            return self._health()
        assert path == "/begin_save_state", path
        self._pending = (body.path, list(self.weights))
        return self._health()

    async def _wait_save_state(self) -> BaseModel:
        pending, self._pending = self._pending, None
        await asyncio.sleep(self.write_s)
        if reason := self.refuse.pop("/wait_save_state", ""):
            raise CallRefused(self.name, "/wait_save_state", 409, ErrorBody(error=reason))
        if pending is not None:
            self.states[pending[0]] = pending[1]
        return self._health()

    def _health(self) -> TrainerHealth:
        return TrainerHealth(policy_version=self.policy_version, device="none", is_busy=False)


class FakeTrainerProcess(FakeProcess[FakeTrainerServer]):
    """Of one rank."""

    health, num_cancelled = TrainerHealth, 0
    """num_cancelled: starts that were given up."""

    async def end(self) -> str:
        """SIGKILL."""
        self.server.die()
        return ""

    async def start_again(self) -> None:
        """A new process, with the weights of the start."""
        self.started_at.append(asyncio.get_running_loop().time())
        self.fail_if_told()
        try:
            await asyncio.sleep(self.start_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.server.restart()
