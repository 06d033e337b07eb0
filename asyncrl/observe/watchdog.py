"""Notices that a run has stopped moving, reports who waits for whom, and acts."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from asyncrl.base.errors import ComponentError
from asyncrl.base.user_code import place_of
from asyncrl.base.waits import open_waits, task_stacks, waits_of_tasks
from asyncrl.config.supervision_config import SupervisionConfig

log = logging.getLogger("asyncrl.watchdog")


MAX_BLOCKED_S = 30.0
"""The loop's own work takes milliseconds, imports on a busy machine seconds."""


class Reported(NamedTuple):
    """`marks`: counters; any change is progress. `oldest`: (rollout, seconds since its
    start), oldest first. `is_starting`: a process is restarting, within its own limits.
    """

    marks: Mapping[str, float]
    oldest: tuple[tuple[str, float], ...] = ()
    is_starting: bool = False
    awaited: str = ""
    """What the whole run waits for outside of it, within its own limit."""


@dataclass
class Watchdog:
    """Watches a run and reports once nothing has moved for watchdog_s, then after twice
    that, four times...

    Waits: run() sleeps until a report would be due; the status calls look() each
    second. Acts: reports to `tell`, to the log with all stacks, and to `note`; then
    on_stuck: warn, restart the engines, or end the run with a ComponentError.

    A daemon thread reports what blocks the loop itself, such as an async reward with
    plain code in it. Code that also keeps Python's global lock is in the stacks that
    faulthandler's timer writes into `log_path`.

    Example: watchdog_s 900, and nothing moves after t = 0. Reports are at 900, 1800 and
    3600 s. An answer of the trainer at 4000 s is progress, so the next report would be
    at 4900 s.
    """

    settings: SupervisionConfig
    report: Callable[[], Reported]
    log_path: Path
    tell: Callable[[str], None]
    way_out: str
    ask_children: Callable[[], Awaitable[Mapping[str, bool]]]
    """Makes each child dump its stacks. Returns a sentence about each, and whether it
    is well.
    """
    restart: Callable[[], Awaitable[None]]
    note: Callable[[str, Mapping[str, object]], None]

    def __post_init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._marks: Mapping[str, float] = {}
        self._moved()

    def _moved(self) -> None:
        self._moved_s = self._now()
        self._delay_s = self.settings.watchdog_s

    def look(self) -> dict[str, float]:
        """Notice progress. Return the loop's waits as sentences with their seconds,
        oldest first.
        """
        reported = self.report()
        # Any change, not only growth: a counter of a process falls when that is
        # restarted. A start counts as progress because start_timeout_s limits it.
        if reported.marks != self._marks or reported.is_starting:
            self._marks = dict(reported.marks)
            self._moved()
        waits = dict[str, float]()
        for wait, num in open_waits():
            who = f"{num} {wait.who}" if num > 1 else wait.who
            text = f"{who} waits in {wait.where} for {wait}, to be woken by {wait.on}"
            waits[text] = round(self._now() - wait.since_s, 1)
        return waits

    async def run(self) -> None:
        """Watch until cancelled. Raises ComponentError if nothing moves and on_stuck is
        fail.
        """
        here = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(
            target=self._watch_loop, args=here, name="loop watch", daemon=True
        ).start()
        with self.log_path.open("a", encoding="utf-8") as file:
            try:
                while True:
                    due_s = max(self._moved_s + self._delay_s, self._now())
                    # If the loop itself is blocked, no report comes at due_s.
                    # faulthandler's timer is a thread in C, which needs no lock of
                    # Python to write the stacks.
                    blocked_s = due_s - self._now() + self.settings.watchdog_s
                    faulthandler.dump_traceback_later(blocked_s, file=file)
                    await asyncio.sleep(due_s - self._now())
                    # it was stopped (Ctrl-Z, SIGSTOP)
                    self._moved_s += max(0.0, self._now() - due_s)
                    self.look()
                    if self._now() >= self._moved_s + self._delay_s:
                        # Before _stuck, which compares: if anything moves while it asks
                        # the children, _moved() sets the delay back.
                        self._delay_s *= 2
                        await self._stuck()
            finally:
                faulthandler.cancel_dump_traceback_later()

    def _watch_loop(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        """Report what `thread` does if its loop does not run for MAX_BLOCKED_S, or
        watchdog_s.
        """
        part_s = min(self.settings.watchdog_s, MAX_BLOCKED_S) / 8
        ran = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while True:
                loop.call_soon_threadsafe(ran.set)
                # a process that was stopped (Ctrl-Z) misses only one part
                if not any(ran.wait(part_s) for _ in range(8)):
                    self.tell(
                        f"the run has stood still for {8 * part_s:g} s in\n{place_of(thread)}  Way out: move "
                        "such code to a plain function, with task.reward_pool=thread or process."
                    )
                    # One report for each block, however long it is.
                    ran.wait()
                ran.clear()
                time.sleep(part_s)

    async def _stuck(self) -> None:
        children = await self.ask_children()
        waits = self.look()
        # The status task has looked, too, while the children had time to answer.
        if self._delay_s == self.settings.watchdog_s:  # it has moved
            return
        reported = self.report()
        # No restart brings a person's reward, and its limit ends the wait.
        policy = "warn" if reported.awaited else self.settings.on_stuck
        seconds = self._now() - self._moved_s
        headline = f"nothing has moved for {seconds:.0f} s"
        if reported.awaited:
            headline += f", because {reported.awaited}"
        places = {
            name: f"{wait.where} on {wait.on}"
            for name, wait in waits_of_tasks().items()
        }
        oldest = [
            (name, round(s, 1), places.get(f"rollout {name}", "?"))
            for name, s in reported.oldest
        ]
        lines = [
            headline,
            *(f"{wait}, since {wait_s:.0f} s" for wait, wait_s in waits.items()),
            *(
                f"rollout {name} runs for {age_s:.0f} s, in {where}"
                for name, age_s, where in oldest
            ),
            *children,
            "at: "
            + ", ".join(
                f"{name} {value:.0f}" for name, value in reported.marks.items()
            ),
        ]
        text = "\n  ".join(lines)
        log.error("%s\n%s", text, task_stacks())
        # Also the other threads: a reward in a thread or the journal may be what hangs.
        with self.log_path.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        self.tell(text)
        self.note(
            "stuck",
            {
                "seconds": round(seconds, 1),
                "waits": waits,
                "oldest": oldest,
                "children": list(children),
                "on_stuck": policy,
            },
        )
        if policy == "fail":
            ill = [child for child, is_well in children.items() if not is_well]
            raise ComponentError(
                "watchdog",
                f"{headline}: {'; '.join(ill or waits)}",
                rule=f"supervision.watchdog_s={self.settings.watchdog_s:g} and on_stuck=fail end such a run",
                way_out=self.way_out,
            )
        if policy == "restart":
            await self.restart()
            self._moved()
