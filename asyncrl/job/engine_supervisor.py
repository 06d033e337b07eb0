"""Supervise the engines of a run, as many as RUN_DIR/wanted.json asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from asyncrl.base.errors import AsyncrlError, ConfigError, RoomError
from asyncrl.base.files import write_whole
from asyncrl.base.waits import waiting
from asyncrl.config import RunConfig
from asyncrl.config.rollout_buffer import EngineRange
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.job.colocate import WeightScheduler
from asyncrl.job.lifecycle import RunLog, run_again
from asyncrl.launch.supervise import NO_LOSS, Server, Supervision, Supervisor, cancel_all, summary_of
from asyncrl.observe.run_dir import judge_state, read_config, read_status

logger = logging.getLogger("asyncrl.job.engine_supervisor")

WANTED_FILE = "wanted.json"
LOOK_PERIOD_S = 1.0
KEY = "engines"


class EngineScale:
    """Which engines work: the first `wanted`. The others are parked, without a process.

    Life of an engine: parked -> starting -> "" (works) -> leaving -> parked, the highest number first.
    Invariant: an engine that is up leaves only while `wanted` others are up.
    """

    def __init__(
        self,
        limits: EngineRange,
        run_dir: Path,
        pool: EnginePool,
        log: RunLog,
        *,
        on_change: Callable[[int], None],
        num_first: int,
    ) -> None:
        """`on_change` gets the number of engines that work."""
        self.range = limits
        self.is_fixed = limits.min == limits.max
        self.pool = pool
        self.wanted = num_first
        self._on_change = on_change
        self._run_dir = run_dir
        self._log = log
        self._names = [server.name for server in pool.servers]
        self._changed = asyncio.Event()
        self.states = {name: "" if self.wants(name) else "parked" for name in self._names}

    def wants(self, name: str) -> bool:
        return name in self._names[: self.wanted]

    def gauges(self) -> dict[str, float]:
        return {} if self.is_fixed else {"engine/up": len(self._names) - len(self.pool.down)}

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            try:
                num = read_wanted(self._run_dir, self.range) or self.wanted
            except ConfigError as error:
                self._log.warn(str(error))
                (self._run_dir / WANTED_FILE).unlink(missing_ok=True)
                continue
            if num != self.wanted:
                self._log.info(f"scaling from {self.wanted} to {num} engines")
                self.set_nowait(num)

    def set_nowait(self, num: int) -> None:
        self.wanted = num
        self.changed_nowait()

    def give_up_nowait(self, name: str, error: AsyncrlError) -> None:
        """Want only the engines before `name`."""
        num = self._names.index(name)
        if num < self.wanted:
            self._log.warn(f"{summary_of(error)}; the run continues with {num} of {self.wanted} engines")
            write_wanted(self._run_dir, num)
            self.set_nowait(num)

    async def wait_wanted(self, name: str) -> None:
        while not self.wants(name):
            await self._changed.wait()
        if self.states[name] == "parked":
            self.enter_nowait(name, "starting")

    async def wait_leave(self, name: str) -> None:
        """Wait until this engine may leave."""
        while self.wants(name) or not self._may_leave(name):
            await self._changed.wait()
        self.pool.down_nowait(name)
        self.enter_nowait(name, "leaving")

    def _may_leave(self, name: str) -> bool:
        up = [other for other in self._names if other not in self.pool.down]
        return name not in up or (name == up[-1] and len(up) > self.wanted)

    def enter_nowait(self, name: str, state: str) -> None:
        was_working = self.states[name] == ""
        self.states[name] = state
        if was_working != (state == ""):
            self._on_change(list(self.states.values()).count(""))
        self.changed_nowait()

    def changed_nowait(self) -> None:
        """Wake all waiters; also after a loss."""
        self._changed.set()
        self._changed = asyncio.Event()


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
        self._restarts.rests_nowait()
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


def first_wanted(config: RunConfig, run_dir: Path | None) -> int:
    """Return the engines at the start: as asked before, else from the config."""
    asked = None
    if config.rollout.is_scaled and run_dir is not None:
        with contextlib.suppress(ConfigError):  # follow() warns
            asked = read_wanted(run_dir, config.rollout.engine_range)
    return asked or config.rollout.engine_range.min


def read_wanted(run_dir: Path, limits: EngineRange) -> int | None:
    """Return the number in RUN_DIR/wanted.json, if any. Raises ConfigError."""
    path = run_dir / WANTED_FILE
    try:
        return _in_range(json.loads(path.read_text(encoding="utf-8"))[KEY], limits)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"{path} has no number of engines: {type(error).__name__} {error}"
        raise ConfigError(what, way_out=f"write it with `asyncrl scale {run_dir} engines=N`.") from error


def _in_range(asked: object, limits: EngineRange) -> int:
    if type(asked) is int and limits.min <= asked <= limits.max:
        return asked
    raise ConfigError(
        f"engines={asked!r} is outside rollout.num_engines={{min: {limits.min}, max: {limits.max}}}",
        way_out="choose a number in this range (memory is planned for it), or restart with another range.",
    )


def write_wanted(run_dir: Path, num: int) -> None:
    write_whole(run_dir / WANTED_FILE, json.dumps({KEY: num}) + "\n")


def scale_run(run_dir: Path, asked: str) -> str:
    """Ask a run for `engines=N`; return an answer for the user. Raises ConfigError."""
    name, _, text = asked.partition("=")
    if name != KEY or not text.isdecimal():
        raise ConfigError(f"{asked!r} is not a number of engines", way_out=f"write {KEY}=4.")
    rollout = read_config(run_dir).rollout
    if not rollout.is_scaled:
        wide = f"rollout.num_engines={{min: 1, max: {max(int(text), rollout.max_engines)}}}"
        again = run_again(run_dir, wide, "--allow-change", "rollout.num_engines")
        what = f"the run in {run_dir} has a fixed rollout.num_engines={rollout.num_engines}"
        raise ConfigError(what, way_out=f"stop it with Ctrl-C, and resume it with a range: `{again}`.")
    num = _in_range(int(text), rollout.engine_range)
    state, why = judge_state(read_status(run_dir, []), run_dir)
    if state not in ("starting", "running", "unknown"):
        way_out = f"start it with `{run_again(run_dir)}`, then scale it."
        raise ConfigError(f"no run is active in {run_dir}: {state} {why}".rstrip(), way_out=way_out)
    write_wanted(run_dir, num)
    return f"asked for {num} engines; `asyncrl status {run_dir}` shows their progress"
