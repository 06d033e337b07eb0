"""Scale the engines of a run: RUN_DIR/wanted.json asks for their number."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from asyncrl.base.errors import AsyncrlError, ConfigError
from asyncrl.base.files import write_whole
from asyncrl.config import RunConfig
from asyncrl.config.rollout_buffer import EngineRange
from asyncrl.engines.pool import EnginePool
from asyncrl.job.lifecycle import RunLog, run_again
from asyncrl.launch.supervise import summary_of
from asyncrl.observe.run_dir import judge_state, read_config, read_status

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
