"""Schedule trainer and engines on separate or time-shared devices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias, TypeVar

from asyncrl.base.errors import ComponentError, EngineLost
from asyncrl.base.waits import Signal, clock, note_span, shielded, waiting
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.role_client import RoleClient
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.launch.lease import (
    SLEEP,
    SLEEP_SERVERS,
    Call,
    Lease,
    LeaseState,
    Side,
)
from asyncrl.messages.engine_api import TransferStats
from asyncrl.rollouts.producers import Spawn
from asyncrl.sync.push import ColocatedPush, PushLoop, at_once

T = TypeVar("T")


@dataclass(eq=False)
class Disaggregated(PushLoop):
    """Separate devices: pushes run during generation. External engines, not `are_ours`,
    hold any weights.
    """

    _: KW_ONLY
    num_steps: int
    spawn: Spawn
    are_ours: bool = True

    async def start(self, version: int) -> None:
        # The run's own engines load version 0 when they start.
        must_push = version > 0 or not self.are_ours
        # Before the task starts. External engines need a push of version 0, too, and an
        # engine that restarts before the first push must wait for it.
        if must_push:
            self.start_before_nowait(version)
        self.spawn(self.run(), name="publisher")
        if must_push:
            await self.wait_announced(version)

    async def to_trainer(self) -> None:
        """Return at once."""

    async def to_engines(
        self, version: int, *, is_for_evaluation: bool = False
    ) -> None:
        """Return once the copy of the weights has begun."""
        # The export must begin between two steps. If the train loop sent the next batch
        # first, this version would be skipped, and the engines would lag a step more.
        # Nobody waits for a push of the last version.
        if version < self.num_steps:
            await self.wait_exported_or_busy(version)

    def device_for_engine(self, name: str) -> AbstractAsyncContextManager[None]:
        """Return a block in which a new engine may start."""
        return contextlib.nullcontext()

    async def bring_up(self, name: str) -> None:
        """Send the announced weights to a new engine."""
        with waiting(
            f"the announced weights in {name}", on="publisher", who="supervisor"
        ):
            await super().bring_up(name)

    def status(self) -> dict[str, object]:
        return {}


@dataclass(eq=False)
class Colocated(ColocatedPush):
    """Trainer and engines time-share devices. Same methods as Disaggregated.

    Life: start() -> to_trainer() and to_engines() alternate; the trainer keeps the
        devices after the last step. A dead engine restarts in the engines' time slice, then
        all get the served weights again; a dead trainer restarts once the engines
        sleep.
    Waits: to_trainer for evaluations and a restarting trainer; each side for the end of
        the other's time slice.
    Invariant: a version is announced after the handover that brought it. Between
        handovers only the lease holder uses the devices, unless both are resident. A
        dead engine takes no part.

    `servers` score rollouts on the trainer's devices, in the engines' time slice. The trainer
    never waits for a server: a batch is complete, and so scored, before its time slice begins.
    `resident`: both sides stay in memory. `wait_released` waits for evaluations.
    """

    trainer: SupervisedTrainer
    _: KW_ONLY
    num_steps: int
    servers: Sequence[RoleClient] = ()
    resident: bool = False
    wait_released: Callable[[], Awaitable[None]] = at_once
    export_for_evaluation: Callable[[int], Awaitable[None]] = at_once

    def __post_init__(self) -> None:
        super().__post_init__()
        self._changed = Signal()
        is_absent = {"trainer": self.resident, "servers": not self.servers}
        self.lease = Lease(
            calls=self._calls,
            timeout_s=self.timeout_s,
            on_change=self._changed.notify,
            without=[side for side in is_absent if is_absent[side]],
            wait_up=self._wait_trainer,
        )
        self._handover = asyncio.Lock()
        self._num_needing = 0
        self._last = dict[Side, TransferStats]()

    def status(self) -> dict[str, object]:
        lease = self.lease
        return {
            "state": lease.state,
            "phase": lease.phase,
            "num_handovers": lease.num_handovers,
        }

    def gauges(self) -> dict[str, float]:
        seconds = {side: report.seconds for side, report in self._last.items()}
        return super().gauges() | {
            "handover/phases": self.lease.num_phases,
            "perf/handover_s": sum(seconds.values()),
            "perf/to_trainer_s": seconds.get("trainer", 0.0),
            "perf/to_engines_s": seconds.get("engines", 0.0),
        }

    async def start(self, version: int) -> None:
        """Begin with the engines' time slice."""
        async with self._handover:
            # A resumed run goes by way of the trainer, because only to_engines()
            # announces the version. Version 0 is never announced.
            await self.lease.hand_to("engines" if version == 0 else "trainer")
        if version > 0:
            await self.to_engines(version)

    async def to_trainer(self) -> None:
        """Hand the devices to the trainer. Raises ComponentError with the failed phase."""
        # Before the lock is taken: an engine that evaluates may have to restart, and
        # device_for_engine() needs the lock for that.
        await self.wait_released()
        with waiting("the trainer's time slice", on="trainer and engines"):
            async with self._handover:
                if self.lease.owner != "trainer":
                    self._last = {"trainer": await self._hand_to_trainer()}

    async def to_engines(
        self, version: int, *, is_for_evaluation: bool = False
    ) -> None:
        """Hand the devices to the engines and announce the weights."""
        with waiting("the engines' time slice", on="trainer and engines"):
            async with self._handover:
                # Before the handover, which may take the weights off the devices. The
                # eval engine reads them from a file.
                await self.export_for_evaluation(version)
                if version < self.num_steps or is_for_evaluation:
                    self._last["engines"] = await self.lease.hand_to("engines")
                    await self.announce()

    @contextlib.asynccontextmanager
    async def device_for_engine(self, name: str) -> AsyncIterator[None]:
        """Extend the engines' time slice until the block ends."""
        while True:
            async with self._handover:
                # The trainer owns the devices although the train loop waits for the
                # engines: a batch, and so the engines' time slice, would never come.
                if self.lease.failed and self.lease.owner != "engines":
                    why = self.lease.failed
                    if self.lease.broken:
                        why = f"the device lease is broken: {self.lease.broken}"
                    raise ComponentError(
                        "placement",
                        f"{name} cannot be restarted: {why}",
                        way_out="start the run again to resume it.",
                    )
                # The lock is held until the engine serves. A handover during the start
                # would bring the trainer's state to devices where a process is loading
                # its weights. bring_up() runs within this block, so it must not take
                # the lock.
                if self.lease.state == LeaseState.GENERATING:
                    yield
                    return
            with waiting(
                f"the engines' time slice, to start {name}",
                on="the train loop",
                who="supervisor",
            ):
                await self._changed.wait()

    async def bring_up(self, name: str) -> None:
        """Let all engines sleep and get the served weights again."""
        self.up_nowait(name)

        # Chunks go to all engines at once, into weights that sleeping has emptied. So
        # the others give up theirs too, and get the same version back.
        async def empty_slice() -> None:
            await self._hand_to_trainer()
            await self.lease.hand_to("engines")

        # The new process may die here, which cancels this call. Between the two
        # handovers all engines sleep, and the train loop would wait for their batch
        # forever.
        _, cancelled = await shielded(empty_slice())
        if cancelled is not None:
            raise cancelled

    @contextlib.asynccontextmanager
    async def device_for_trainer(self) -> AsyncIterator[None]:
        """Enter the block when the engines have no time slice, or a handover waits."""
        with waiting(
            "the engines to leave the devices, to start the trainer",
            on="the train loop",
        ):
            await self._changed.wait_for(
                lambda: (
                    self._num_needing
                    or self.lease.state
                    not in (LeaseState.GENERATING, LeaseState.HANDOVER)
                )
            )
        yield

    async def _hand_to_trainer(self) -> TransferStats:
        now_s = clock()
        since_s = self.lease.since_s
        for engine in self.targets:
            note_span(engine.name, "generate", since_s, now_s, self.version)
        # A new trainer process needs the memory that the engines hold. So their sleep
        # and its restart come before the handover. The lease's own sleep then finds
        # them asleep.
        if not self.trainer.is_up:
            sleeping = self._calls(SLEEP) | self._calls(SLEEP_SERVERS)
            await asyncio.gather(*sleeping.values())
            await self._wait_trainer()
        return await self.lease.hand_to("trainer")

    async def _wait_trainer(self) -> int:
        """Return once the trainer is up, with its number of restarts."""
        # Needing: a push whose call has ended no longer lets the trainer restart.
        await self._needing(self.trainer.wait_up())
        return self.trainer.num_restarts

    def _calls(self, call: Call) -> dict[str, Awaitable[TransferStats]]:
        if call.of == "engines":
            return {engine.name: self._ask(engine, call) for engine in self.targets}
        if call.of == "servers":
            sleeps = call.verb == "sleep"
            return {
                server.name: server.sleep() if sleeps else server.wake()
                for server in self.servers
            }
        if call.of == "publisher":
            return {"publisher": self._needing(self.push())}
        ask = self.trainer.offload if call.verb == "offload" else self.trainer.onload
        return {"trainer": self._needing(ask(call.parts))}

    async def _ask(self, engine: EngineClient, call: Call) -> TransferStats:
        """Call an engine; a lost one is skipped."""
        # The time slice continues with the other engines. The supervisor of a lost one starts
        # it again, and bring_up() gives it the weights.
        try:
            if not self.is_down(engine.name):
                return await (
                    engine.sleep() if call.verb == "sleep" else engine.wake(call.parts)
                )
        except EngineLost as lost:
            self.on_lost(lost)
        return TransferStats(num_bytes=0, seconds=0.0)

    async def _needing(self, call: Awaitable[T]) -> T:
        # Also within a handover, whose answer the trainer may owe: it must be allowed
        # to restart (device_for_trainer), or the handover would run into its limit.
        self._num_needing += 1
        self._changed.notify()
        try:
            return await call
        finally:
            self._num_needing -= 1


WeightScheduler: TypeAlias = Disaggregated | Colocated
