"""Scale the engines of a run: RUN_DIR/wanted.json asks for their number."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from asyncrl.base.errors import ConfigError, RoomError
from asyncrl.base.files import write_whole
from asyncrl.config.rollout_buffer import EngineRange
from asyncrl.job.engine_supervisor import EngineSupervisor
from asyncrl.job.lifecycle import RunLog, run_again
from asyncrl.launch.supervise import NO_LOSS, summary_of
from asyncrl.observe.run_dir import read_config
from asyncrl.rollouts.producers import Spawn

WANTED_FILE = "wanted.json"
LOOK_PERIOD_S = 1.0
KEY = "engines"


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
    def states(self) -> dict[str, str]:
        return {engine.name: engine.state for engine in self.engines}

    @property
    def num_working(self) -> int:
        return list(self.states.values()).count("")

    def gauges(self) -> dict[str, float]:
        return {} if self.is_fixed else {"engine/up": sum(engine.is_up for engine in self.engines)}

    def watch_nowait(self) -> None:
        """Supervise each wanted engine, in a task of its own."""
        for engine in self.engines[: self.wanted]:
            if engine.name not in self._watching:
                engine.state = "starting" if engine.state else ""
                self._watching[engine.name] = self.spawn(self._watch(engine), name=f"watch {engine.name}")

    async def follow(self) -> None:
        """Start and park engines as RUN_DIR/wanted.json asks."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            wanted = read_wanted(self.run_dir, self.range) or self.wanted
            if wanted != self.wanted:
                self.log.info(f"scaling from {self.wanted} to {wanted} engines")
                self.wanted = wanted
            self.watch_nowait()
            for engine in reversed(self.engines[wanted:]):
                if engine.state == "parked":
                    continue
                if (task := self._watching.pop(engine.name, None)) is not None:
                    task.cancel()
                    await asyncio.wait({task})
                engine.state = "leaving"
                self.on_change(self.num_working)
                await engine.park()
            self.on_change(self.num_working)

    async def _watch(self, engine: EngineSupervisor) -> None:
        try:
            await engine.run()
        except (RoomError, ConfigError) as error:
            if not engine.state or isinstance(error, NO_LOSS):
                raise
            num = self.engines.index(engine)
            if num < self.wanted:
                self.log.warn(f"{summary_of(error)}; the run continues with {num} of {self.wanted} engines")
                write_wanted(self.run_dir, num)
                self.wanted = num
            await engine.park()
            self._watching.pop(engine.name, None)


def read_wanted(run_dir: Path, limits: EngineRange) -> int | None:
    """Return the number in RUN_DIR/wanted.json, if there is one in range."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        num = int(json.loads((run_dir / WANTED_FILE).read_text(encoding="utf-8"))[KEY])
        if limits.min <= num <= limits.max:
            return num
    return None


def write_wanted(run_dir: Path, num: int) -> None:
    write_whole(run_dir / WANTED_FILE, json.dumps({KEY: num}) + "\n")


def scale_run(run_dir: Path, asked: str) -> str:
    """Ask a run for `engines=N`; return an answer for the user. Raises ConfigError."""
    name, _, text = asked.partition("=")
    num = int(text) if name == KEY and text.isdecimal() else 0
    limits = read_config(run_dir).rollout.engine_range
    if not limits.min <= num <= limits.max:
        wide = f"rollout.num_engines={{min: 1, max: {max(num, limits.max)}}}"
        again = run_again(run_dir, wide, "--allow-change", "rollout.num_engines")
        raise ConfigError(
            f"{asked!r} is not {KEY}=N within rollout.num_engines={{min: {limits.min}, max: {limits.max}}}",
            rule="memory is planned for this range",
            way_out=f"choose a number in it; or stop the run, and resume it with another range: `{again}`.",
        )
    write_wanted(run_dir, num)
    return f"asked for {num} engines; `asyncrl status {run_dir}` shows their progress"
