"""A fake trainer worker, and the processes of fake servers, for the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from asyncrl.http import Answer
from asyncrl.messages.calls import (
    EngineHealth,
    ExportResponse,
    TrainerHealth,
    TrainResponse,
    unpack_batch,
)
from asyncrl.testing.fake_server import FakeProcess, FakeServer


class FakeTrainerServer(FakeServer):
    """Rank 0 of a trainer: one call at a time, and a step takes `train_s`.

    Its weights are the list `weights` of what it was trained on: a name for each batch. Saved states are kept
    in `states` by path, as a disk would. `dies_at` (a path): the process ends when that call comes;
    `dies_after`: when it is done, before the answer. `refuse` (a reason): the next call of a kind is refused.
    A rank that a step waits for and that is dead makes the step hang.
    """

    def __init__(
        self, name: str = "trainer-0", *, train_s: float = 1.0, peers: Sequence[FakeTrainerServer] = ()
    ) -> None:
        super().__init__(name)
        self.train_s, self.export_s, self.load_s, self.save_s, self.write_s = train_s, 0.5, 2.0, 0.5, 3.0
        self.peers = peers
        self.dies_at = self.dies_after = ""
        self.refuse: dict[str, str] = {}
        self.weights: list[str] = []
        self.calls: list[str] = []
        self.saved: dict[str, list[str]] = {}
        self.states: dict[str, list[str]] = {}
        self._worker = asyncio.Lock()
        self._pending: tuple[str, list[str]] | None = None

    @property
    def policy_version(self) -> int:
        """Steps that were taken."""
        return len(self.weights)

    def restart(self) -> None:
        super().restart()
        self._worker, self._pending, self.weights = asyncio.Lock(), None, []

    def health(self) -> TrainerHealth:
        is_busy = self._worker.locked()
        return TrainerHealth(policy_version=self.policy_version, device="none", is_busy=is_busy)

    async def post(
        self, path: str, body: BaseModel | bytes | None, answer: type[Answer], *, timeout_s: float | None
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
            raise self.refused(path, reason)

    async def _work(self, path: str, body: Any) -> BaseModel:
        self._refuse(path)
        version = self.policy_version
        match path:
            case "/train":
                header, _ = unpack_batch(body)
                if header.version != version:
                    raise self.refused(path, f"batch {header.version} at version {version}")
                await asyncio.sleep(self.train_s)
                if any(peer.has_ended.is_set() or peer.is_frozen for peer in self.peers):
                    await asyncio.Event().wait()
                trained = (f"{one.prompt_id}#{one.sample_index}" for one in header.trajectories)
                self.weights.append(",".join(trained))
                return TrainResponse(policy_version=version + 1, metrics={"policy/loss": float(version + 1)})
            case "/export":
                await asyncio.sleep(self.export_s)
                digest = "|".join(self.weights)
                return ExportResponse(version=version, path="fake", digest=digest, num_tensors=1, num_bytes=1)
            case "/save":
                await asyncio.sleep(self.save_s)
                self.saved[body.path] = list(self.weights)
            case "/load_state":
                await asyncio.sleep(self.load_s)
                self.weights = list(self.states[body.path])
            case _:
                assert path == "/begin_save_state", path
                self._pending = (body.path, list(self.weights))
        return self.health()


class FakeTrainerProcess(FakeProcess):
    """Of one rank of a trainer."""

    health, fails_at_once = TrainerHealth, True


class FakeEngineProcess(FakeProcess):
    """Of an engine."""

    health = EngineHealth
