"""Notices that a run has stopped moving, reports who waits for whom, and acts."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.base.errors import RoomError
from asyncrl.base.waits import open_waits, task_stacks, thread_stacks, waits_of_tasks
from asyncrl.config import SupervisionConfig

log = logging.getLogger("asyncrl.watchdog")


@dataclass(frozen=True, slots=True)
class Wait:
    """`who` waits in function `where` for `what` since `seconds`; `waker` ends the wait."""

    who: str
    where: str
    what: str
    waker: str
    seconds: float = 0.0

    def __str__(self) -> str:
        waits = f"{self.who} waits in {self.where} for {self.what}, {self.seconds:.0f} s"
        return f"{waits}, to be woken by {self.waker}"


@dataclass(frozen=True, slots=True)
class ChildState:
    """State in the kernel (sleeping, stopped, ended), and answer to /health."""

    name: str
    process: str
    answer: str
    is_well: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.process}; {self.answer}"


@dataclass(frozen=True, slots=True)
class Reported:
    """`marks`: counters; any change is progress. `oldest`: (rollout, seconds since its start), oldest
    first. `is_starting`: a process is restarting, within its own limits.
    """

    marks: Mapping[str, float]
    oldest: tuple[tuple[str, float], ...] = ()
    is_starting: bool = False


class StuckClock:
    """Reports are due watchdog_s after the last change of a counter, then after twice that, four times,
    ... Pure.
    """

    def __init__(self, watchdog_s: float, now_s: float) -> None:
        self.watchdog_s = watchdog_s
        self._marks: dict[str, float] = {}
        self._moved_s = now_s
        self._factor = 1

    @property
    def due_s(self) -> float:
        return self._moved_s + self.watchdog_s * self._factor

    @property
    def is_moving(self) -> bool:
        return self._factor == 1

    def look(self, marks: Mapping[str, float], now_s: float) -> None:
        if dict(marks) != self._marks:
            self._marks = dict(marks)
            self.reset(now_s)

    def reset(self, now_s: float) -> None:
        self._moved_s = now_s
        self._factor = 1

    def forgive(self, seconds: float) -> None:
        """Do not count seconds in which this process was stopped (Ctrl-Z, SIGSTOP)."""
        self._moved_s += seconds

    def quiet_s(self, now_s: float) -> float:
        return now_s - self._moved_s

    def take_due(self, now_s: float) -> bool:
        """Return whether a report is due, and then double the delay."""
        if now_s < self.due_s:
            return False
        while now_s >= self.due_s:
            self._factor *= 2
        return True


@dataclass
class Watchdog:
    """Watches a run and reports once nothing has moved for watchdog_s.

    Waits: run() sleeps until a report would be due; the status calls look() each second.
    Acts: reports to `tell`, to the log with all stacks, and to `note`; then on_stuck: warn, restart the
        engines, or end the run with a RoomError.

    If the loop itself is blocked, faulthandler's timer writes all stacks into `log_path`.
    """

    settings: SupervisionConfig
    report: Callable[[], Reported]
    log_path: Path
    tell: Callable[[str], None]
    way_out: str
    ask_children: Callable[[], Awaitable[tuple[ChildState, ...]]]
    """Makes each child dump its stacks, and returns their states."""
    restart: Callable[[], Awaitable[None]]
    note: Callable[[str, Mapping[str, Any]], None]

    def __post_init__(self) -> None:
        self._clock = StuckClock(self.settings.watchdog_s, asyncio.get_running_loop().time())

    def look(self) -> tuple[Wait, ...]:
        """Notice progress. Return the loop's waits, oldest first; equal waits share a line."""
        reported = self.report()
        now_s = asyncio.get_running_loop().time()
        self._clock.look(reported.marks, now_s)
        if reported.is_starting:
            self._clock.reset(now_s)
        return tuple(
            Wait(
                f"{num} {wait.who}" if num > 1 else wait.who,
                wait.where,
                str(wait),
                wait.on,
                round(now_s - wait.since_s, 1),
            )
            for wait, num in open_waits()
        )

    async def run(self) -> None:
        """Raises RoomError if nothing moves and on_stuck is fail."""
        now = asyncio.get_running_loop().time
        clock = self._clock
        with self.log_path.open("a", encoding="utf-8") as file:
            try:
                while True:
                    until_s = max(clock.due_s, now())
                    blocked_s = until_s - now() + self.settings.watchdog_s
                    faulthandler.dump_traceback_later(blocked_s, file=file)
                    await asyncio.sleep(until_s - now())
                    clock.forgive(max(0.0, now() - until_s))
                    self.look()
                    if clock.take_due(now()):
                        await self._stuck()
            finally:
                faulthandler.cancel_dump_traceback_later()

    async def _stuck(self) -> None:
        children = await self.ask_children()
        waits = self.look()
        if self._clock.is_moving:
            return
        reported = self.report()
        policy = self.settings.on_stuck
        seconds = self._clock.quiet_s(asyncio.get_running_loop().time())
        headline = f"nothing has moved for {seconds:.0f} s"
        places = {name: f"{wait.where} on {wait.on}" for name, wait in waits_of_tasks().items()}
        oldest = [(name, round(s, 1), places.get(f"rollout {name}", "?")) for name, s in reported.oldest]
        lines = [
            headline,
            *map(str, waits),
            *(f"rollout {name} runs for {age_s:.0f} s, in {where}" for name, age_s, where in oldest),
            *map(str, children),
            "at: " + ", ".join(f"{name} {value:.0f}" for name, value in reported.marks.items()),
        ]
        text = "\n  ".join(lines)
        log.error("%s\n%s\n%s", text, task_stacks(), thread_stacks())
        self.tell(text)
        details = {"seconds": round(seconds, 1), "waits": list(map(asdict, waits)), "oldest": oldest}
        self.note("stuck", {**details, "children": list(map(str, children)), "on_stuck": policy})
        if policy == "fail":
            ill = [str(child) for child in children if not child.is_well]
            raise RoomError(
                "watchdog",
                f"{headline}: {'; '.join(ill or map(str, waits))}",
                rule=f"supervision.watchdog_s={self.settings.watchdog_s:g} and on_stuck=fail end such a run",
                way_out=self.way_out,
            )
        if policy == "restart":
            await self.restart()
            self._clock.reset(asyncio.get_running_loop().time())
