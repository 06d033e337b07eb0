"""Fake servers, their processes and a fake trainer worker, for the virtual clock: the
real client code calls them in place of HTTP servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel

from asyncrl.base.errors import ComponentError, ErrorBody, NodeLost
from asyncrl.base.http import Answer, Caller, CallLost, CallRefused
from asyncrl.launch.processes import Process
from asyncrl.launch.supervise import Server, health_over
from asyncrl.messages.trainer_api import (
    ExportResponse,
    TrainerHealth,
    TrainResponse,
    unpack_batch,
)

Work = Callable[[], Awaitable[Any]]


class FakeServer(Caller):
    """A server that can die (its connections break, new ones too), freeze (it keeps
    connections and stops answering) and be started again, with its initial state.
    `fails_at_once`: a start that fails takes no time.
    """

    fails_at_once = False

    def __init__(self, name: str) -> None:
        super().__init__(name, f"fake://{name}", "secret")
        self.is_frozen = False
        self.has_ended = asyncio.Event()
        """The process's own key."""

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
        """Return the answer to /health."""
        raise NotImplementedError

    async def _handle(self, path: str, body: Any) -> BaseModel | dict[str, Any]:
        """Return the answer to a POST."""
        raise NotImplementedError

    async def _health(self) -> BaseModel:
        return self.health()

    async def get(
        self, path: str, answer: type[Answer], *, timeout_s: float | None
    ) -> Answer:
        return await self._answer(path, self._health, answer, timeout_s)

    async def post(
        self,
        path: str,
        body: BaseModel | bytes | None,
        answer: type[Answer],
        *,
        timeout_s: float | None,
    ) -> Answer:
        return await self._answer(
            path, partial(self._handle, path, body), answer, timeout_s
        )

    async def _answer(
        self, path: str, work: Work, answer: type[Answer], timeout_s: float | None
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                result = await self.unless_dead(path, work)
        except TimeoutError:
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        return answer.model_validate(
            result if isinstance(result, dict) else result.model_dump()
        )

    async def unless_dead(self, path: str, work: Work) -> Any:
        """Return what `work` returns; raise CallLost as soon as this process has ended."""
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


class FakeChild(Process):
    """The process of a fake server. `reap_s`: seconds from broken connections to the
    reported death.
    """

    pid = 17
    reap_s = 0.0
    is_node_gone = False

    def __init__(self, server: FakeServer) -> None:
        super().__init__(server.name, "its log")
        self.server = server

    async def wait(self) -> None:
        await self.server.has_ended.wait()
        await asyncio.sleep(self.reap_s)

    def death(self) -> ComponentError:
        if self.is_node_gone:
            return NodeLost(
                self.name, "the node far (10.0.0.2) is gone: no answer for 15 s"
            )
        what = "process 17 was killed by SIGKILL; the end of its log:\n    last words"
        return ComponentError(self.name, what, way_out="read its log.")


class FakeProcess(Server):
    """A Server over a fake one; a new process answers `start_s` seconds after it was
    started.

    `fails_to_start`: number of next processes that end instead of starting.
    `child.is_node_gone`: its end, and the end of all that would start, is the loss of
    its node.
    """

    child: FakeChild

    def __init__(self, server: FakeServer, *, start_s: float = 5.0) -> None:
        caller: Any = server
        super().__init__(
            FakeChild(server),
            caller,
            health_over(caller, type(server.health())),
            start_s,
        )
        self.server = server
        self.fails_to_start = 0
        self.started_at: list[float] = []
        """When a process was started again."""

    async def end(self) -> None:
        """SIGKILL."""
        self.server.die()

    async def come_up(self) -> None:
        """A new process, with the state of the start."""
        self.started_at.append(asyncio.get_running_loop().time())
        if self.child.is_node_gone:
            raise self.child.death()
        fails, self.fails_to_start = (
            self.fails_to_start > 0,
            max(0, self.fails_to_start - 1),
        )
        await asyncio.sleep(
            0.0 if fails and self.server.fails_at_once else self.start_s
        )
        if fails:
            raise ComponentError(self.name, "did not start: no memory")
        self.server.restart()


class FakeTrainerServer(FakeServer):
    """Rank 0 of a trainer: one call at a time, and a step takes `train_s`.

    Its weights are the list `weights` of the batches' names. Saved states are kept in
    `states` by path, as a disk would. `dies_at` (a path): the process ends when that
    call comes; `dies_after`: when it is done, before the answer. `refuse` (a reason):
    the next call of a kind is refused, with `refuse_status`. A rank that a step waits
    for and that is dead makes the step hang.
    """

    fails_at_once = True

    def __init__(
        self,
        name: str = "trainer-0",
        *,
        train_s: float = 1.0,
        peers: Sequence[FakeTrainerServer] = (),
    ) -> None:
        super().__init__(name)
        self.train_s = train_s
        self.export_s = 0.5
        self.load_s = 2.0
        self.save_s = 0.5
        self.write_s = 3.0
        self.peers = peers
        self.dies_at = self.dies_after = ""
        self.refuse: dict[str, str] = {}
        self.refuse_status = 409
        self.weights: list[str] = []
        self.calls: list[str] = []
        self.states: dict[str, list[str]] = {}
        self._worker = asyncio.Lock()
        self._stepped = asyncio.Event()
        self._pending: tuple[str, list[str]] | None = None
        self._begun: tuple[int, str] | None = None

    @property
    def policy_version(self) -> int:
        """Steps that were taken."""
        return len(self.weights)

    def restart(self) -> None:
        super().restart()
        self._worker = asyncio.Lock()
        self._pending = None
        self._begun = None
        self.weights = []

    def health(self) -> TrainerHealth:
        return TrainerHealth(policy_version=self.policy_version, device="none")

    async def post(
        self,
        path: str,
        body: BaseModel | bytes | None,
        answer: type[Answer],
        *,
        timeout_s: float | None,
    ) -> Answer:
        self.calls.append(path)
        if path == self.dies_at:
            self.dies_at = ""
            self.die()
        return await super().post(path, body, answer, timeout_s=timeout_s)

    async def _handle(self, path: str, body: Any) -> BaseModel:
        if path == "/wait_save_state":
            pending, self._pending = self._pending, None
            await asyncio.sleep(self.write_s)
            self._refuse(path)
            if pending is not None:
                self.states[pending[0]] = pending[1]
            return self.health()
        if path == "/begin_export":
            # Like the rank: right after the step that makes the version.
            while self.policy_version <= body.above:
                self._stepped.clear()
                await self._stepped.wait()
        if path == "/train_next":
            header, _ = unpack_batch(body)
            while header.version > self.policy_version:
                self._stepped.clear()
                await self._stepped.wait()
        async with self._worker:
            result = await self._work(path, body)
            if self.is_frozen:
                await asyncio.Event().wait()
        if path == self.dies_after:
            self.dies_after = ""
            self.die()
        return result

    def _refuse(self, path: str) -> None:
        if reason := self.refuse.pop(path, ""):
            raise self.refused(path, reason, self.refuse_status)

    async def _work(self, path: str, body: Any) -> BaseModel:
        self._refuse(path)
        version = self.policy_version
        match path:
            case "/add_part":
                header, _ = unpack_batch(body)
                if header.version != version:
                    raise self.refused(
                        path, f"part of {header.version} at version {version}"
                    )
                await asyncio.sleep(self.train_s / 2)
                return self.health()
            case "/train" | "/train_next":
                header, _ = unpack_batch(body)
                if header.version != version:
                    raise self.refused(
                        path, f"batch {header.version} at version {version}"
                    )
                await asyncio.sleep(self.train_s)
                if any(
                    peer.has_ended.is_set() or peer.is_frozen for peer in self.peers
                ):
                    await asyncio.Event().wait()
                trained = (
                    f"{one.prompt_id}#{one.sample_index}" for one in header.trajectories
                )
                self.weights.append(",".join(trained))
                self._stepped.set()
                return TrainResponse(
                    policy_version=version + 1,
                    metrics={"policy/loss": float(version + 1)},
                )
            case "/begin_export":
                self._begun = version, "|".join(self.weights)
            case "/export":
                version, digest = self._begun or (version, "|".join(self.weights))
                self._begun = None
                await asyncio.sleep(self.export_s)
                return ExportResponse(
                    version=version,
                    path="fake",
                    digest=digest,
                    num_tensors=1,
                    num_bytes=1,
                )
            case "/load_state":
                await asyncio.sleep(self.load_s)
                self.weights = list(self.states[str(body.path)])
            case "/begin_save_state":
                self._pending = (str(body.path), list(self.weights))
            case _:
                assert path == "/save", path
                await asyncio.sleep(self.save_s)
        return self.health()
