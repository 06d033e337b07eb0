"""Supervise one engine of a run."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Literal

from asyncrl.base.errors import RoomError
from asyncrl.base.waits import waiting
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.job.colocate import WeightScheduler
from asyncrl.launch.supervise import Server, Supervision, Supervisor


class EngineSupervisor(Supervisor):
    """Supervise one engine, or keep it parked.

    Life: parked, without a process -> starting -> "": works or restarts -> leaving -> parked.
    Waits: park() waits for its requests to move, and for a push.
    Invariant: the pool sends it work only while it serves the announced version, or a newer one. Parking is
        no restart.
    """

    kind = "engine"

    def __init__(
        self,
        process: Server,
        client: EngineClient,
        pool: EnginePool,
        scheduler: WeightScheduler,
        supervision: Supervision,
    ) -> None:
        super().__init__([process], supervision)
        self._client = client
        self._pool = pool
        self._scheduler = scheduler
        self.state: Literal["parked", "starting", "", "leaving"] = ""

    def park_nowait(self) -> None:
        """Mark the engine as parked. It has no process."""
        self._disconnect_nowait()
        self.state = "parked"

    async def park(self) -> None:
        """Move the requests with their tokens, let the push end, and end the process. Call after run()."""
        if self.is_up:
            await self._until_lost(self._hand_over())
        self._disconnect_nowait()
        await self._end()
        self.park_nowait()
        self._on_event("engine parked", {"name": self.name})

    async def _hand_over(self) -> None:
        with waiting("its requests to move, and a push to end", on="rollouts", who="supervisor"):
            await self._pool.drain(self.name)
            await self._scheduler.leave(self.name)

    def _disconnect_nowait(self) -> None:
        self.is_up = False
        self._client.disconnect_nowait()
        self._pool.down_nowait(self.name)
        self._scheduler.down_nowait(self.name)

    def _is_dispensable(self) -> bool:
        return {*self._pool.load} - {*self._pool.down, self.name} != set()

    def _down(self, lost: RoomError) -> None:
        self._disconnect_nowait()

    def _room(self) -> AbstractAsyncContextManager[None]:
        return self._scheduler.room_for_engine(self.name)

    async def _before_start(self) -> None:
        self._client.reset_nowait()

    async def _bring_back(self) -> None:
        await self._scheduler.bring_up(self.name)

    async def _works_again(self) -> None:
        self._pool.up_nowait(self.name)
        if self.state:
            self.state = ""
            self._on_event("engine unparked", {"name": self.name})
        await self._pool.balance()
