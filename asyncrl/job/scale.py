"""Another number of engines in a running job. `asyncrl scale` writes it into RUN_DIR/wanted.json; the run
looks there each second, starts engines and ends them, and begins with what it finds there when it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.config.generation import EngineRange
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import AsyncrlError, ConfigError, RoomError
from asyncrl.files import write_whole
from asyncrl.job.colocate import Turns
from asyncrl.job.life import Voice, run_again
from asyncrl.job.start import Server, end_all
from asyncrl.job.supervision.supervise import NO_LOSS, EngineSupervisor, Supervision, in_short
from asyncrl.observe.status import judge_state, read_config, read_status
from asyncrl.waits import waiting

logger = logging.getLogger("asyncrl.job.scale")

WANTED_FILE = "wanted.json"
LOOK_PERIOD_S = 1.0
ASK_PERIOD_S = 0.25
KEY = "engines"


class EngineScale:
    """How many of a run's engines work: the first `wanted` of those that have a place. The others are parked.

    Life: made with what the run begins with (first_wanted) -> set_nowait(), any number of times. An engine is
        parked -> wanted, and starting -> it works -> not wanted, and leaving -> parked. Those of the highest
        numbers leave first: what is left are the engines of a run that was started with so many, on their
        devices and ports.
    Waits: wait_wanted and wait_leave sleep until another number is wanted, or an engine has come up, is lost
        or has left.
    Invariant: an engine that is up leaves only while as many others as are wanted are up (wait_leave). So
        `min` engines are left at least, and requests have somewhere to go.

    `on_change` is called with the number of engines that work, down for now or not, whenever it has changed.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        pool: EnginePool,
        voice: Voice,
        *,
        on_change: Callable[[int], None],
        num_first: int,
    ) -> None:
        self.range, self.is_fixed = config.rollout.engine_range, not config.rollout.is_scaled
        self._run_dir, self._pool, self._voice, self._on_change = run_dir, pool, voice, on_change
        self._number = {server.name: number for number, server in enumerate(pool.servers)}
        self._changed, self._refused = asyncio.Event(), ""
        self.wanted = num_first
        self._working = {name for name in self._number if self.wants(name)}
        self.parked = self._number.keys() - self._working
        """Engines without a process."""

    def supervisor(
        self, process: Server, client: EngineClient, turns: Turns, supervision: Supervision
    ) -> EngineSupervisor:
        """What keeps one of the engines going."""
        if self.is_fixed:
            return EngineSupervisor(process, client, self._pool, turns, supervision)
        return ScaledEngine(process, client, self._pool, turns, supervision, self)

    def wants(self, name: str) -> bool:
        """Whether this engine is to work."""
        return self._number[name] < self.wanted

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/metrics.py."""
        num_up = len(self._number) - len(self._pool.down)
        return {} if self.is_fixed else {"engine/wanted": self.wanted, "engine/up": num_up}

    def words(self, name: str) -> str:
        """What becomes of an engine that is not simply up or down."""
        if self.wants(name):
            return "" if name in self._working else "starting"
        return "parked" if name in self.parked else "leaving"

    async def follow(self) -> None:
        """Take over what is asked for, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            if (num := self._read()) is not None and num != self.wanted:
                self._voice.say(f"asked for {num} engines; {self.wanted} were wanted before")
                self.set_nowait(num)

    def set_nowait(self, num: int) -> None:
        """So many are wanted from now on, within the range."""
        assert self.range.min <= num <= self.range.max, f"{num} engines are wanted of {self.range}"
        self.wanted = num
        self.changed_nowait()

    def gives_up_nowait(self, name: str, error: AsyncrlError) -> None:
        """An engine does not come up: those before it are wanted, until others are asked for."""
        num, asked = self._number[name], self.wanted
        if num >= asked:
            return
        words = f"the run goes on with {num} of the {asked} engines that were wanted"
        self._voice.warn(f"{in_short(error)}; {words}")
        try:
            if self._read() == asked:  # else there is another wish by now
                write_wanted(self._run_dir, num)
        except OSError as failure:
            self._voice.warn(f"{self._run_dir / WANTED_FILE} cannot be written: {failure.strerror}")
        self.set_nowait(num)

    async def wait_wanted(self, name: str) -> None:
        """Return once this engine is to work."""
        while not self.wants(name):
            await self._changed.wait()
        self.parked.discard(name)

    async def wait_leave(self, name: str) -> None:
        """Return once this engine is to leave; it gets no new work any more then."""
        while self.wants(name) or not self._may_leave(name):
            await self._changed.wait()
        self._pool.down_nowait(name)
        self._works(name, False)

    def up_nowait(self, name: str) -> None:
        """It is up, and the pool has work for it."""
        self._works(name, True)

    def parked_nowait(self, name: str) -> None:
        """Its process has ended."""
        self.parked.add(name)
        self._works(name, False)

    def changed_nowait(self) -> None:
        """Wake who waits; also called when an engine is lost."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _may_leave(self, name: str) -> bool:
        up = [one for one in self._number if one not in self._pool.down]
        return name not in up or (name == up[-1] and len(up) > self.wanted)

    def _works(self, name: str, is_working: bool) -> None:
        before = len(self._working)
        (self._working.add if is_working else self._working.discard)(name)
        if len(self._working) != before:
            self._on_change(len(self._working))
        self.changed_nowait()

    def _read(self) -> int | None:
        """What is asked for; None for nothing, or, with a warning, for what cannot be."""
        try:
            return read_wanted(self._run_dir, self.range)
        except ConfigError as error:
            if str(error) != self._refused:
                self._voice.warn(str(error))
                self._refused = str(error)
            return None


class ScaledEngine(EngineSupervisor):
    """Keeps one engine going while it is wanted.

    Life: parked, without a process -> wanted: started as after a loss -> up, lost and up again, as an
        EngineSupervisor says -> not wanted: the pool gives it nothing, what it samples goes on at other
        engines with its tokens, the push that is under way ends, then its process -> parked. A start, or a
        restart, that is not wanted any more is given up.
    Waits: handing over, for the requests at most DRAIN_TIMEOUT_S, and for a push, which has limits of its
        own. It is watched meanwhile: one that is lost then has nothing left to hand over.
    Invariant: parking counts no restart. An engine that never comes up after it was parked ends no run.
    """

    def __init__(
        self,
        process: Server,
        client: EngineClient,
        pool: EnginePool,
        turns: Turns,
        supervision: Supervision,
        scale: EngineScale,
    ) -> None:
        super().__init__(process, client, pool, turns, supervision)
        self._scale, self._is_new = scale, False
        if not scale.wants(self.name):
            self._leave_nowait()
            self._is_new = True

    async def run(self) -> None:
        """Watch, park and start, until cancelled. Raises the RoomError that ends the run."""
        while True:
            await self._scale.wait_wanted(self.name)
            try:
                await until_left(super().run(), self._scale.wait_leave(self.name), self.name)
            except (RoomError, ConfigError) as error:  # the port that it is to have may be taken by now
                if not self._is_new or isinstance(error, NO_LOSS):
                    raise
                self._scale.gives_up_nowait(self.name, error)
            await self._park()

    async def _park(self) -> None:
        if self.is_up and (lost := await self._until_lost(self._hand_over())) is not None:
            logger.warning("%s was lost while it was to leave: %s", self.name, lost)
        self._leave_nowait()
        await self._end()
        self._restarts.rests_nowait()
        self._is_new = True
        self._scale.parked_nowait(self.name)
        self._on_event("engine parked", {"name": self.name, "wanted": self._scale.wanted})

    async def _hand_over(self) -> None:
        with waiting("its requests to go on elsewhere, and a push to end", on="rollouts", who="supervisor"):
            await self._pool.drain(self.name)
            await self._turns.publisher.leave(self.name)

    def _down(self, lost: RoomError) -> None:
        super()._down(lost)
        self._scale.changed_nowait()

    async def _works_again(self) -> None:
        self._pool.up_nowait(self.name)
        self._scale.up_nowait(self.name)
        if self._is_new:
            self._is_new = False
            self._on_event("engine unparked", {"name": self.name, "wanted": self._scale.wanted})
        await self._pool.balance()


async def until_left(work: Coroutine[Any, Any, None], left: Coroutine[Any, Any, None], name: str) -> None:
    """`work`, which is given up once `left` returns. Raises what it raises. `name`: of what is watched."""
    tasks = working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left)
    for task in tasks:
        task.set_name(f"watch {name}")
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_all(tasks)
    if not working.cancelled():
        working.result()


def first_wanted(config: RunConfig, run_dir: Path | None) -> int:
    """How many engines a run begins with: what the config says, or was asked for before. Of what cannot be
    EngineScale warns.
    """
    limits, asked = config.rollout.engine_range, None
    if config.rollout.is_scaled and run_dir is not None:
        with contextlib.suppress(ConfigError):
            asked = read_wanted(run_dir, limits)
    return asked or limits.first


def read_wanted(run_dir: Path, limits: EngineRange) -> int | None:
    """What RUN_DIR/wanted.json asks for, None if there is none. Raises ConfigError."""
    path = run_dir / WANTED_FILE
    try:
        asked = json.loads(path.read_text(encoding="utf-8"))[KEY]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"{path} does not say how many engines are wanted: {type(error).__name__} {error}"
        raise ConfigError(what, way_out=f"`asyncrl scale {run_dir} engines=N` writes it anew.") from error
    return check_wanted(asked, limits, f"{path} asks for")


def check_wanted(asked: object, limits: EngineRange, who: str) -> int:
    """The number. Raises ConfigError if it is none, or out of range."""
    if type(asked) is int and limits.min <= asked <= limits.max:
        return asked
    raise ConfigError(
        f"{who} {asked!r} engines",
        rule=f"rollout.num_engines allows {limits.min} to {limits.max}: so many have a place in the plan",
        way_out="ask for a number of these, or start the run again with another range.",
    )


def write_wanted(run_dir: Path, num: int) -> None:
    """Ask for so many engines. Raises OSError."""
    write_whole(run_dir / WANTED_FILE, json.dumps({KEY: num}) + "\n")


def scale_run(run_dir: Path, asked: str, wait_s: float, say: Callable[[str], None]) -> None:
    """Ask the run in this directory for another number of engines (`asked`: engines=4), and tell how it gets
    there; returns when that many work, or, with wait_s=0, at once.

    Raises ConfigError if there is no such run, or it cannot have so many, RoomError if it ends meanwhile,
    goes back to another number, or takes longer.
    """
    name, _, text = asked.partition("=")
    if name != KEY or not text.isdecimal():
        raise ConfigError(f"{asked!r} is no number of engines", way_out=f"write {KEY}=4.")
    config, num = read_config(run_dir), int(text)
    if not config.rollout.is_scaled:
        wide = f"rollout.num_engines={{min: 1, max: {max(num, config.rollout.max_engines)}}}"
        again = run_again(run_dir, wide, "--allow-change", "rollout.num_engines")
        raise ConfigError(
            f"the run in {run_dir} has rollout.num_engines={config.rollout.num_engines}, a plain number",
            rule="a run that may be scaled has a range, for which it plans devices, memory and threads",
            way_out=f"stop it with Ctrl-C, and go on with `{again}`.",
        )
    check_wanted(num, config.rollout.engine_range, "you ask for")
    status, (state, why) = _state(run_dir)
    if not status or state not in ("starting", "running", "unknown"):
        way_out = f"start it with `{run_again(run_dir)}`, then scale it."
        raise ConfigError(f"no run is under way in {run_dir}: {why}", way_out=way_out)
    write_wanted(run_dir, num)
    told, until_s = "", time.monotonic() + wait_s
    while wait_s > 0:
        status, (state, why) = _state(run_dir)
        words, is_done = progress(status, num)
        if words != told:
            say(told := words)
        if is_done:
            return
        way_out = f"`asyncrl status {run_dir}` says more; what was asked for holds until something else is."
        if state not in ("starting", "running", "unknown"):
            raise RoomError("scale", f"the run has ended meanwhile: {why}", way_out=way_out)
        now = read_wanted(run_dir, config.rollout.engine_range)
        if now != num and status.get("engines_wanted") == now:  # and so its warnings say why
            warned = (status.get("warnings") or ["another `asyncrl scale` has asked for it"])[-1]
            raise RoomError("scale", f"engines={now} is what holds by now: {warned}", way_out=way_out)
        if time.monotonic() > until_s:
            raise RoomError("scale", f"not done within --wait {wait_s:g} s: {words}", way_out=way_out)
        time.sleep(ASK_PERIOD_S)
    say(f"asked for {num} engines; `asyncrl status {run_dir}` shows them")


def _state(run_dir: Path) -> tuple[Mapping[str, Any], tuple[str, str]]:
    status = read_status(run_dir, [])
    return status, judge_state(status, run_dir)


def progress(status: Mapping[str, Any], num: int) -> tuple[str, bool]:
    """How far a run is, by its status.json, and whether it has so many engines."""
    engines = status.get("engines")
    if not isinstance(engines, dict) or status.get("engines_wanted") != num:
        return "the run has not begun with it", False
    at_work = [name for name, words in engines.items() if words.startswith("policy_version")]
    others = [
        f"{name} is {words}" for name, words in engines.items() if name not in at_work and words != "parked"
    ]
    return ", ".join([f"{len(at_work)} of {num} engines work", *others]), len(at_work) == num and not others
