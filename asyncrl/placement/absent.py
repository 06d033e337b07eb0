"""Both sides as a handover sees them when their processes may be down. Knows calls; knows no process and no lease."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from asyncrl.errors import EngineLost
from asyncrl.types import OffloadingTrainer, SleepingEngine
from asyncrl.wire import EnginePart, Moved, TrainerPart


class NeededTrainer:
    """The trainer as a handover sees it: who calls it needs it."""

    def __init__(self, trainer: OffloadingTrainer, needing: Callable[[Callable[[], Awaitable[Moved]]], Awaitable[Moved]]) -> None:
        self._trainer, self._needing = trainer, needing

    async def offload(self, parts: Sequence[TrainerPart]) -> Moved:
        """As the trainer's."""
        return await self._needing(lambda: self._trainer.offload(parts))

    async def onload(self, parts: Sequence[TrainerPart]) -> Moved:
        """As the trainer's."""
        return await self._needing(lambda: self._trainer.onload(parts))


class MaybeDown:
    """One engine server as a handover sees it: while it is down it has nothing on the device, and one that is lost is soon down."""

    def __init__(self, engine: SleepingEngine, is_down: Callable[[str], bool], on_lost: Callable[[EngineLost], None] | None) -> None:
        self._engine, self._is_down, self._on_lost = engine, is_down, on_lost
        self.name = engine.name

    async def sleep(self, parts: Sequence[EnginePart]) -> Moved:
        """As the engine's."""
        return await self._unless_down(lambda: self._engine.sleep(parts))

    async def wake(self, parts: Sequence[EnginePart], *, restore: bool = False) -> Moved:
        """As the engine's."""
        return await self._unless_down(lambda: self._engine.wake(parts, restore=restore))

    async def _unless_down(self, call: Callable[[], Coroutine[Any, Any, Moved]]) -> Moved:
        if not self._is_down(self.name):
            try:
                return await call()
            except EngineLost as lost:
                if self._on_lost is None:
                    raise
                self._on_lost(lost)
        return Moved(num_bytes=0, seconds=0.0)
