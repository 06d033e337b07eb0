"""Who works when: trainer and engines side by side, or in turns on the devices that they share. Knows no
batch and no rollout.

The train loop says when it needs the trainer and when a new version is there; what that means follows from
the placement.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from asyncrl.errors import EngineLost, RoomError
from asyncrl.messages.base import EnginePart, Moved, TrainerPart
from asyncrl.messages.protocols import OffloadingTrainer, SleepingEngine
from asyncrl.placement.lease import HandOver, HandoverReport, Lease, Side
from asyncrl.sync.publisher import Publisher
from asyncrl.waits import uncut

T = TypeVar("T")
ALL_PARTS: tuple[EnginePart, ...] = ("kv", "weights")


@dataclass(frozen=True, slots=True)
class TurnStats:
    """`state` of the lease, `phase` of a handover; `num_phases`: done so far. Seconds and bytes of the last
    handover to each side, 0 where the train loop has not come back to it yet.
    """

    state: str
    phase: str
    num_handovers: int
    num_phases: int
    to_trainer_s: float = 0.0
    to_engines_s: float = 0.0
    num_bytes: int = 0


class Turns(Protocol):
    """What the train loop and the supervisors need to know of whose turn it is."""

    async def start(self, version: int) -> None:
        """Before the first batch: engines serve `version` when this returns."""
        ...

    async def to_trainer(self) -> None:
        """Return when the trainer may work. Idempotent."""
        ...

    async def to_engines(self, version: int) -> None:
        """The trainer has made `version`: return when it may go on."""
        ...

    def room_for_engine(self, name: str) -> AbstractAsyncContextManager[None]:
        """While a new process of this engine starts and is brought up, its device is the engines'."""
        ...

    async def bring_up(self, name: str) -> None:
        """In that room: give an engine whose process is new the announced weights."""
        ...

    def down_nowait(self, name: str) -> None:
        """An engine is lost."""
        ...

    async def wait_room_for_trainer(self) -> None:
        """Return when new processes of the trainer may take memory."""
        ...

    def stats(self) -> TurnStats | None:
        """None where nobody takes turns."""
        ...


class SideBySide:
    """Each side has devices of its own: nobody waits for a turn, and the publisher goes on beside both."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        num_steps: int,
        spawn: Callable[..., object],
        are_engines_ours: bool = True,
    ) -> None:
        """`are_engines_ours`: the run started them, with the initial weights; what somebody else's have is
        not known.
        """
        self._publisher, self._num_steps, self._spawn = publisher, num_steps, spawn
        self._are_engines_ours = are_engines_ours

    async def start(self, version: int) -> None:
        """Start the publisher; a version that the engines do not have from their start is waited for."""
        must_push = version > 0 or not self._are_engines_ours
        if must_push:
            self._publisher.start_before_nowait(version)
        self._spawn(self._publisher.run(), name="publisher")
        if must_push:
            await self._publisher.wait_announced(version)

    async def to_trainer(self) -> None:
        """At once."""

    async def to_engines(self, version: int) -> None:
        """Once the weights are copied, so that the next step may change them; the push goes on by itself."""
        if version < self._num_steps:
            await self._publisher.wait_exported_or_busy(version)

    def room_for_engine(self, name: str) -> AbstractAsyncContextManager[None]:
        """Always there."""
        return contextlib.nullcontext()

    async def bring_up(self, name: str) -> None:
        """The publisher does it."""
        await self._publisher.bring_up(name)

    def down_nowait(self, name: str) -> None:
        """The publisher leaves it out."""
        self._publisher.down_nowait(name)

    async def wait_room_for_trainer(self) -> None:
        """Always there."""

    def stats(self) -> None:
        """Nobody takes turns."""


class TurnTrainer(OffloadingTrainer, Protocol):
    """The trainer, which may be down for a while; LivingTrainer is it."""

    @property
    def is_up(self) -> bool:
        """Whether it answers."""
        ...

    async def wait_up(self) -> None:
        """Return once it does."""
        ...


class TakingTurns:
    """Trainer and engines share devices: one side works, then the other.

    Life:       made -> start() -> to_trainer() and to_engines() in turn, from the train loop. After the last
    step the trainer keeps the
                devices, for what is to be saved. A process that died starts again only in its own side's
                turn: an engine between two handovers, and an empty turn then brings all engines the weights
                that are served; the trainer once the engines sleep, which is when it is needed, or at once
                where they sleep already.
    Waits:      to_trainer, to_engines and room_for_engine sleep for each other; to_trainer for a trainer that
    starts again, as long as
                that takes; wait_room_for_trainer and room_for_engine for the other side's turn to end.
    Invariant:  a version is announced only after the handover to the engines that brought it. Between two
    handovers the side that has
                the lease has all it needs on the devices, and the other has nothing there. An engine that is
                down has no part in it.
    """

    def __init__(
        self,
        engines: Sequence[SleepingEngine],
        trainer: TurnTrainer,
        publisher: Publisher,
        *,
        num_steps: int,
        timeout_s: float,
        on_event: Callable[[str, Mapping[str, Any]], None],
        on_lost: Callable[[EngineLost], None] | None,
    ) -> None:
        self._trainer, self._publisher, self._num_steps = trainer, publisher, num_steps
        self._on_event = on_event
        self._engines = tuple(MaybeDown(engine, publisher.is_down, on_lost) for engine in engines)
        self.lease = Lease()
        needed = NeededTrainer(trainer, self._needing)
        self._handover = HandOver(
            self.lease, self._engines, needed, timeout_s=timeout_s, on_event=self._heard
        )
        self._one_at_a_time = asyncio.Lock()
        self._num_needing = 0
        self._changed = asyncio.Event()
        self._num_phases = 0
        self.last: dict[Side, HandoverReport] = {}
        """The last handover to the trainer, and the one to the engines since, if there was one."""

    def __repr__(self) -> str:
        return f"<TakingTurns {self.lease!r}, {'trainer is needed' if self._num_needing else 'trainer is not needed'}>"

    def stats(self) -> TurnStats:
        """Where the lease is, and the last handovers."""
        lease, trainer, engines = self.lease.stats(), self.last.get("trainer"), self.last.get("engines")
        return TurnStats(
            lease.state,
            lease.phase,
            lease.num_handovers,
            self._num_phases,
            to_trainer_s=trainer.seconds if trainer else 0.0,
            to_engines_s=engines.seconds if engines else 0.0,
            num_bytes=sum(phase.num_bytes for report in self.last.values() for phase in report.phases),
        )

    async def start(self, version: int) -> None:
        """The first turn: the engines' with the weights of their start, or after a push if the trainer has
        made others.
        """
        async with self._one_at_a_time:
            if version == 0:
                await self._handover.start("engines")
                return
            await self._handover.start("trainer")
        await self.to_engines(version)

    async def to_trainer(self) -> None:
        """Hand over to the trainer, if the engines have their turn. Raises RoomError, with the phase that
        failed.
        """
        async with self._one_at_a_time:
            if self.lease.owner != "trainer":
                self.last = {"trainer": await self._hand_to_trainer()}

    async def to_engines(self, version: int) -> None:
        """Hand over to the engines with these weights, and announce them; after the last step the trainer
        keeps its turn.

        Raises RoomError, with the phase that failed.
        """
        async with self._one_at_a_time:
            await self._publisher.evaluate(version)
            if version >= self._num_steps:
                return
            self.last["engines"] = await self._handover.to_generating(self._push)
            self._publisher.announce()

    @contextlib.asynccontextmanager
    async def room_for_engine(self, name: str) -> AsyncIterator[None]:
        """The engines' turn, which does not end meanwhile. Raises RoomError if there will be none any
        more.
        """
        while True:
            async with self._one_at_a_time:
                if self.lease.state == "broken":
                    raise RoomError(
                        "placement",
                        f"{name} cannot be started again: the lease is broken: {self.lease.broken}",
                        rule="nobody can say what the devices hold",
                        way_out="start the run again; it goes on where it was.",
                    )
                if self.lease.state == "generating":
                    yield
                    return
            await self._changed.wait()

    async def bring_up(self, name: str) -> None:
        """An empty turn: all engines sleep, and get the weights that are served from the trainer. Not cut
        short by a cancellation.
        """
        self._publisher.up_nowait(name)
        _, cancelled = await uncut(self._empty_turn())
        if cancelled is not None:
            raise cancelled

    def down_nowait(self, name: str) -> None:
        """No push to this engine, and no handover waits for it."""
        self._publisher.down_nowait(name)

    async def wait_room_for_trainer(self) -> None:
        """Return when nobody but the trainer has a turn, or somebody who hands over waits for it."""
        while self.lease.state in ("generating", "handover") and not self._num_needing:
            await self._changed.wait()

    async def _empty_turn(self) -> None:
        await self._hand_to_trainer()
        await self._handover.to_generating(self._push)

    async def _hand_to_trainer(self) -> HandoverReport:
        """A trainer that is down starts first, on devices from which the engines have gone; that has limits
        of its own.
        """
        if not self._trainer.is_up:
            await asyncio.gather(*(engine.sleep(ALL_PARTS) for engine in self._engines))
            await self._needing(self._trainer.wait_up)
        return await self._handover.to_training(self._push)

    async def _push(self) -> Moved:
        return await self._needing(self._publisher.push)

    async def _needing(self, call: Callable[[], Awaitable[T]]) -> T:
        """A call that a trainer which is down must start for."""
        self._num_needing += 1
        self._wake()
        try:
            return await call()
        finally:
            self._num_needing -= 1

    def _heard(self, what: str, detail: Mapping[str, Any]) -> None:
        self._num_phases += what == "handover phase"
        self._on_event(what, detail)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


# Both sides as a handover sees them when their processes may be down. Knows calls; knows no process and no
# lease.


class NeededTrainer:
    """The trainer as a handover sees it: who calls it needs it."""

    def __init__(
        self,
        trainer: OffloadingTrainer,
        needing: Callable[[Callable[[], Awaitable[Moved]]], Awaitable[Moved]],
    ) -> None:
        self._trainer, self._needing = trainer, needing

    async def offload(self, parts: Sequence[TrainerPart]) -> Moved:
        """As the trainer's."""
        return await self._needing(lambda: self._trainer.offload(parts))

    async def onload(self, parts: Sequence[TrainerPart]) -> Moved:
        """As the trainer's."""
        return await self._needing(lambda: self._trainer.onload(parts))


class MaybeDown:
    """One engine server as a handover sees it: while it is down it has nothing on the device, and one that is
    lost is soon down.
    """

    def __init__(
        self,
        engine: SleepingEngine,
        is_down: Callable[[str], bool],
        on_lost: Callable[[EngineLost], None] | None,
    ) -> None:
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
