"""A trainer that is started again is off its device where the lost one was, before anything is asked of
it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from test_trainer_supervision import House

from asyncrl.messages.base import Moved
from asyncrl.messages.trainer_calls import ExportChunkRequest, ExportChunkResponse, OffloadRequest
from asyncrl.testing.fake_trainer import FakeTrainerServer
from asyncrl.testing.virtual_time import run_virtual


class MovableServer(FakeTrainerServer):
    """Keeps which parts are away, as long as its process lives."""

    def __init__(self) -> None:
        super().__init__()
        self.away: set[str] = set()

    def restart(self) -> None:
        super().restart()
        self.away = set()

    async def _work(self, path: str, body: Any) -> BaseModel:
        if isinstance(body, OffloadRequest) and path not in self.refuse:
            before = len(self.away)
            self.away = self.away | set(body.parts) if path == "/offload" else self.away - set(body.parts)
            return Moved(num_bytes=abs(len(self.away) - before), seconds=0.0)
        if isinstance(body, ExportChunkRequest):
            return ExportChunkResponse(
                **body.model_dump(), path="fake", digest="d", num_tensors=1, num_bytes=1, is_last=True
            )
        return await super()._work(path, body)


class MovableHouse(House):
    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        super().__init__(tasks)
        self.movable = MovableServer()
        self.server, self.ranks[0].server = self.movable, self.movable
        self.client._caller = self.movable


def in_house(story: Any) -> None:
    async def whole() -> None:
        async with asyncio.TaskGroup() as tasks:
            house = MovableHouse(tasks)
            await story(house)
            house.running.cancel()

    run_virtual(whole())


def test_moves_and_chunks_pass_through_and_a_lost_call_is_made_again() -> None:
    async def story(house: MovableHouse) -> None:
        assert (await house.trainer.offload(["weights", "optimizer"])).num_bytes == 2
        assert (await house.trainer.offload(["weights"])).num_bytes == 0
        assert (await house.trainer.onload(["weights"])).num_bytes == 1
        house.movable.dies_at = "/export_chunk"
        answer = await house.trainer.export_chunk(0, 3)
        assert (answer.version, answer.index) == (0, 3)
        assert house.trainer.num_restarts == 1

    in_house(story)


def test_new_processes_are_off_the_device_where_the_lost_ones_were() -> None:
    async def story(house: MovableHouse) -> None:
        await house.go(2)
        await house.trainer.offload(["weights", "gradients", "optimizer"])
        await house.trainer.onload(["weights"])
        house.movable.calls.clear()
        house.movable.die()
        await house.movable.has_ended.wait()
        house.trainer.is_up = False
        await house.trainer.wait_up()
        assert house.movable.away == {"gradients", "optimizer"}
        assert house.movable.calls == ["/train", "/train", "/offload"], (
            "what is trained again needs all of it"
        )
        await house.trainer.onload(["optimizer"])
        await house.go(1)
        house.check()

    in_house(story)
