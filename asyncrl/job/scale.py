"""Supervise and scale the engines of a run; job/live_settings.py has their number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from asyncrl.base.errors import ComponentError, ConfigError
from asyncrl.base.waits import waiting
from asyncrl.config.rollout_config import EngineRange
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.job.colocate import WeightScheduler
from asyncrl.job.live_settings import read_wanted, write_wanted
from asyncrl.launch.supervise import (
    NO_LOSS,
    Server,
    Supervision,
    Supervisor,
    summary_of,
)
from asyncrl.observe.console import RunLog
from asyncrl.rollouts.producers import Spawn

LOOK_PERIOD_S = 1.0


class EngineState(StrEnum):
    PARKED = "parked"
    STARTING = "starting"
    WORKING = "working"
    LEAVING = "leaving"


class EngineSupervisor(Supervisor):
    """Supervise one engine, or keep it parked.

    Life: parked, without a process -> starting -> working, also while it restarts ->
        leaving -> parked.
    Waits: park() waits for its requests to move, and for a push.
    Invariant: the pool sends it work only while it serves the announced version, or a
        newer one. Parking is not a restart.
    """

    def __init__(
        self,
        process: Server,
        client: EngineClient,
        pool: EnginePool,
        scheduler: WeightScheduler,
        supervision: Supervision,
    ) -> None:
        super().__init__(
            [process],
            supervision,
            kind="engine",
            on_down=lambda _: self._disconnect_nowait(),
            on_start=client.reset_nowait,
            on_up=self._up_nowait,
        )
        self._client = client
        self._pool = pool
        self._scheduler = scheduler
        self.start_within(partial(scheduler.device_for_engine, self.name))
        self.state = EngineState.WORKING

    def park_nowait(self) -> None:
        """Mark the engine as parked. It has no process."""
        self._disconnect_nowait()
        self.state = EngineState.PARKED

    async def park(self) -> None:
        """Move the requests with their tokens, let the push end, and end the process.
        Call after run().
        """
        # If the process dies during that, its requests move as with any loss.
        if self.is_up:
            await self._until_lost(self._hand_over())
        self._disconnect_nowait()
        await self._end()
        self.park_nowait()
        self._on_event("engine parked", {"name": self.name})

    async def _hand_over(self) -> None:
        with waiting(
            "its requests to move, and a push to end", on="rollouts", who="supervisor"
        ):
            await self._pool.drain(self.name)
            await self._scheduler.leave(self.name)

    def _disconnect_nowait(self) -> None:
        self.is_up = False
        self._client.disconnect_nowait()
        self._pool.down_nowait(self.name)
        self._scheduler.down_nowait(self.name)

    def _is_dispensable(self) -> bool:
        # While another engine works, the run can wait for this one's lost node.
        return {*self._pool.load} - {*self._pool.down, self.name} != set()

    async def _bring_back(self) -> None:
        await self._scheduler.bring_up(self.name)

    def _up_nowait(self) -> None:
        self._pool.up_nowait(self.name)
        if self.state != EngineState.WORKING:
            self.state = EngineState.WORKING
            self._on_event("engine unparked", {"name": self.name})


@dataclass(eq=False)
class EngineScale:
    """Keep the first `wanted` engines working, and park the others.

    Invariant: a new engine that never comes up ends no run.

    `on_change` gets the number of engines that work.
    """

    engines: Sequence[EngineSupervisor]
    range: EngineRange
    run_dir: Path
    log: RunLog
    _: KW_ONLY
    wanted: int
    spawn: Spawn
    on_change: Callable[[int], None]

    def __post_init__(self) -> None:
        self.is_fixed = self.range.min == self.range.max
        self._watching = dict[str, asyncio.Task[None]]()
        for engine in self.engines[self.wanted :]:
            engine.park_nowait()

    @property
    def states(self) -> dict[str, EngineState]:
        return {engine.name: engine.state for engine in self.engines}

    @property
    def num_working(self) -> int:
        return list(self.states.values()).count(EngineState.WORKING)

    def gauges(self) -> dict[str, float]:
        return (
            {}
            if self.is_fixed
            else {"engine/up": sum(engine.is_up for engine in self.engines)}
        )

    def watch_nowait(self) -> None:
        """Supervise each wanted engine, in a task for each."""
        for engine in self.engines[: self.wanted]:
            if engine.name not in self._watching:
                if engine.state != EngineState.WORKING:
                    engine.state = EngineState.STARTING
                self._watching[engine.name] = self.spawn(
                    self._watch(engine), name=f"watch {engine.name}"
                )

    async def follow(self) -> None:
        """Keep the number of engines working that RUN_DIR/wanted.json asks for."""
        while True:
            # Polled: an engine that comes up, or fails to, also changes the number of
            # rollouts.
            await asyncio.sleep(LOOK_PERIOD_S)
            num = read_wanted(self.run_dir, self.range.numbers)
            if num and num != self.wanted:
                self.log.info(f"scaling from {self.wanted} to {num} engines")
                self.wanted = num
            self.watch_nowait()
            for engine in reversed(self.engines[self.wanted :]):
                if engine.state == EngineState.PARKED:
                    continue
                # First the supervisor, which would take the end of the process for a
                # loss.
                if (task := self._watching.pop(engine.name, None)) is not None:
                    task.cancel()
                    await asyncio.wait({task})
                # Fewer rollouts before the engine leaves, so none starts that it would
                # have to hand over.
                engine.state = EngineState.LEAVING
                self.on_change(self.num_working)
                await engine.park()
            self.on_change(self.num_working)

    async def _watch(self, engine: EngineSupervisor) -> None:
        try:
            await engine.run()
        except (ComponentError, ConfigError) as error:
            # A working engine has used up its restarts: the run ends, as without
            # scaling. Any other was added by `asyncrl scale`, and the run has done
            # without it so far.
            if engine.state == EngineState.WORKING or isinstance(error, NO_LOSS):
                raise
            num = self.engines.index(engine)
            if num < self.wanted:
                self.log.warn(
                    f"{summary_of(error)}; the run continues with {num} of {self.wanted} engines"
                )
                # Into the file too: otherwise follow() would ask for the old number
                # again within a second, and the start would fail again.
                write_wanted(self.run_dir, num)
                self.wanted = num
            await engine.park()
            self._watching.pop(engine.name, None)
