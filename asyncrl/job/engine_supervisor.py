"""Supervise the engines of a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from asyncrl.base.errors import ConfigError, RoomError
from asyncrl.base.waits import waiting
from asyncrl.engines.engine import EngineClient
from asyncrl.job.colocate import WeightScheduler
from asyncrl.job.scale import EngineScale
from asyncrl.launch.supervise import NO_LOSS, Server, Supervision, Supervisor, cancel_all

logger = logging.getLogger("asyncrl.job.engine_supervisor")


class EngineSupervisor(Supervisor):
    """Supervise one engine while it is wanted.

    Life: parked -> wanted: started as after a loss -> supervised -> not wanted: its requests move to other
        engines with their tokens, the current push ends, then its process -> parked.
    Waits: for its requests and for a push.
    Invariant: the pool sends it work only while it serves the announced version, or a newer one. Parking is
        no restart; an engine that never comes up after parking ends no run.
    """

    kind = "engine"

    def __init__(
        self,
        process: Server,
        client: EngineClient,
        scale: EngineScale,
        scheduler: WeightScheduler,
        supervision: Supervision,
    ) -> None:
        super().__init__([process], supervision)
        self._client = client
        self._pool = scale.pool
        self._scale = scale
        self._scheduler = scheduler
        if not scale.wants(self.name):
            self._leave_nowait()

    async def run(self) -> None:
        while True:
            await self._scale.wait_wanted(self.name)
            try:
                await _until_left(super().run(), self._scale.wait_leave(self.name), self.name)
            except (RoomError, ConfigError) as error:
                has_worked = self._scale.states[self.name] == ""
                if has_worked or isinstance(error, NO_LOSS):
                    raise
                self._scale.give_up_nowait(self.name, error)
            await self._park()

    async def _park(self) -> None:
        if self.is_up and (lost := await self._until_lost(self._hand_over())) is not None:
            logger.warning("%s was lost while it was leaving: %s", self.name, lost)
        self._leave_nowait()
        await self._end()
        self._scale.enter_nowait(self.name, "parked")
        self._on_event("engine parked", {"name": self.name, "wanted": self._scale.wanted})

    async def _hand_over(self) -> None:
        with waiting("its requests to move, and a push to end", on="rollouts", who="supervisor"):
            await self._pool.drain(self.name)
            await self._scheduler.publisher.leave(self.name)

    def _leave_nowait(self) -> None:
        self.is_up = False
        self._client.disconnect_nowait()
        self._pool.down_nowait(self.name)
        self._scheduler.publisher.down_nowait(self.name)

    def _is_dispensable(self) -> bool:
        return {*self._pool.load} - {*self._pool.down, self.name} != set()

    def _down(self, lost: RoomError) -> None:
        self._leave_nowait()
        self._scale.changed_nowait()

    def _room(self) -> AbstractAsyncContextManager[None]:
        return self._scheduler.room_for_engine(self.name)

    async def _before_start(self) -> None:
        self._client.reset_nowait()

    async def _bring_back(self) -> None:
        await self._scheduler.bring_up(self.name)

    async def _works_again(self) -> None:
        self._pool.up_nowait(self.name)
        is_new = self._scale.states[self.name] != ""
        self._scale.enter_nowait(self.name, "")
        if is_new:
            self._on_event("engine unparked", {"name": self.name, "wanted": self._scale.wanted})
        await self._pool.balance()


async def _until_left(work: Coroutine[Any, Any, None], left: Coroutine[Any, Any, None], name: str) -> None:
    working = asyncio.create_task(work, name=f"watch {name}")
    leaving = asyncio.create_task(left, name=f"watch {name}")
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all([working, leaving])
    if not working.cancelled():
        working.result()
