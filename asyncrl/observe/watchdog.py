"""Notices that a run has stopped moving, says who waits for whom, and acts. Knows counters and a clock;
imports no rooms.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config import SupervisionConfig
from asyncrl.errors import RoomError
from asyncrl.observe.known_waits import ChildState, Reported, Wait, WaitClock, known_function, place_of
from asyncrl.waits import Place, task_stacks, thread_stacks

# What a run looks like that does not move, for people and as plain values. Knows waits; knows no rooms, no
# clock.


@dataclass(frozen=True, slots=True)
class StuckReport:
    """What a run looks like that has not moved for `seconds`."""

    seconds: float
    waits: tuple[Wait, ...]
    oldest: tuple[tuple[str, float, str], ...]
    """(rollout, seconds since its start, where it waits)."""
    children: tuple[ChildState, ...] = ()
    marks: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, seconds: float, waits: tuple[Wait, ...], reported: Reported, children: tuple[ChildState, ...]
    ) -> StuckReport:
        """With the places of the oldest rollouts looked up."""
        oldest = []
        for rollout, age_s in reported.oldest:
            place = place_of(rollout, reported.places)
            oldest.append((rollout, age_s, "a place unknown" if place is None else _where(place)))
        return cls(seconds, waits, tuple(oldest), children, reported.marks)

    @property
    def blame(self) -> str:
        """The processes that are not well, or who waits for whom if all of them are."""
        ill = [str(child) for child in self.children if not child.is_well]
        return "; ".join(ill or map(str, self.waits)) or "no room waits in a function that is known"

    def text(self) -> str:
        """For people: a line each wait, rollout and process."""
        lines = [f"nothing has moved for {self.seconds:.0f} s"]
        lines += [f"  {wait}" for wait in self.waits]
        lines += [
            f"  rollout {rollout} runs for {age_s:.0f} s, in {where}" for rollout, age_s, where in self.oldest
        ]
        lines += [f"  {child}" for child in self.children]
        lines.append("  at: " + ", ".join(f"{name} {value:.0f}" for name, value in self.marks.items()))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {
            "seconds": round(self.seconds, 1),
            "waits": [wait.as_dict() for wait in self.waits],
            "oldest": [[rollout, round(age_s, 1), where] for rollout, age_s, where in self.oldest],
            "children": [str(child) for child in self.children],
        }


def _where(place: Place) -> str:
    """EnginePool.generate on engine-1, turn 0."""
    function = known_function(place)
    server = place.name_below(function)
    turn = next((part[1:] for part in place.request.split("/") if part[:1] == "t" and part[1:].isdigit()), "")
    return function + (f" on {server}" if server else "") + (f", turn {turn}" if turn else "")


log = logging.getLogger("asyncrl.watchdog")

AskChildren = Callable[[], Awaitable[tuple[ChildState, ...]]]
"""Has each child process dump its stacks into its log, and says how each one does."""


class StuckClock:
    """When a report is due: watchdog_s after the last change of any counter, then after twice that, four
    times, and so on. Pure.
    """

    def __init__(self, watchdog_s: float, now_s: float) -> None:
        self.watchdog_s = watchdog_s
        self._marks: dict[str, float] = {}
        self._moved_s, self._factor = now_s, 1

    def __repr__(self) -> str:
        return f"<StuckClock moved at {self._moved_s} s, next report at {self.due_s} s>"

    @property
    def due_s(self) -> float:
        """The time of the next report if nothing moves."""
        return self._moved_s + self.watchdog_s * self._factor

    @property
    def is_moving(self) -> bool:
        """No report was due since the last change."""
        return self._factor == 1

    def look(self, marks: Mapping[str, float], now_s: float) -> None:
        """Take in the counters as they are now."""
        if dict(marks) != self._marks:
            self._marks = dict(marks)
            self.reset(now_s)

    def reset(self, now_s: float) -> None:
        """Count from now on, as if something had moved."""
        self._moved_s, self._factor = now_s, 1

    def forgive(self, seconds: float) -> None:
        """So long this very process did not run (Ctrl-Z, SIGSTOP): nobody can be blamed for it."""
        self._moved_s += seconds

    def quiet_s(self, now_s: float) -> float:
        """Seconds since the last change."""
        return now_s - self._moved_s

    def take_due(self, now_s: float) -> bool:
        """Whether a report is due; if so the next one is due after twice as many seconds without a change."""
        if now_s < self.due_s:
            return False
        while now_s >= self.due_s:
            self._factor *= 2
        return True


class Watchdog:
    """Looks at a run, and speaks up once nothing has moved for watchdog_s.

    Life:       made with how to ask the run -> run() beside everything else, until cancelled; look() as often
    as anybody likes. Waits:      run sleeps until the moment at which a report would be due, no shorter.
    Progress is noticed when somebody looks: the
                status that is written each second does, so a report comes a second late at most; without it,
                watchdog_s late.
    Acts:       the report goes to `tell`, to the log together with all stacks, and to `note`; then on_stuck:
    warn again after twice
                as long, restart the engines and count from there, or end the run with a RoomError that names
                who is stuck.
    The loop itself may be blocked: then a timer of faulthandler's own writes all threads into `log_path`.
    """

    name = "watchdog"

    def __init__(
        self,
        settings: SupervisionConfig,
        report: Callable[[bool], Reported],
        *,
        log_path: Path,
        tell: Callable[[str], None],
        way_out: str,
        ask_children: AskChildren,
        restart: Callable[[], Awaitable[None]],
        note: Callable[[str, Mapping[str, Any]], None] = lambda what, detail: None,
    ) -> None:
        """`report(with_rollouts)`: what the run says of itself, with the places of its rollouts or
        without.
        """
        self._settings, self._report, self._log_path = settings, report, log_path
        self._tell, self._way_out, self._ask_children, self._restart, self._note = (
            tell,
            way_out,
            ask_children,
            restart,
            note,
        )
        self._clock: StuckClock | None = None
        self._wait_clock = WaitClock()
        self.num_reports = 0

    def __repr__(self) -> str:
        return f"<Watchdog {self._settings.watchdog_s} s, {self._settings.on_stuck}, {self.num_reports} reports, {self._clock}>"

    def look(self, *, with_rollouts: bool = False) -> tuple[Wait, ...]:
        """Take notice of progress, and say who waits for whom right now."""
        return self._look(with_rollouts)[1]

    async def run(self) -> None:
        """Watch until cancelled. Raises RoomError if nothing moves and on_stuck is fail."""
        now = asyncio.get_running_loop().time
        clock = self._started_clock()
        with self._log_path.open("a", encoding="utf-8") as file:
            try:
                while True:
                    until_s = max(clock.due_s, now())
                    faulthandler.dump_traceback_later(
                        until_s - now() + self._settings.watchdog_s, file=file
                    )  # unless the loop comes back
                    await asyncio.sleep(until_s - now())
                    clock.forgive(max(0.0, now() - until_s))
                    self._look(with_rollouts=False)
                    if clock.take_due(now()):
                        await self._stuck(clock)
            finally:
                faulthandler.cancel_dump_traceback_later()

    async def aclose(self) -> None:
        """Nothing is held."""

    def _started_clock(self) -> StuckClock:
        if self._clock is None:
            self._clock = StuckClock(self._settings.watchdog_s, asyncio.get_running_loop().time())
        return self._clock

    def _look(self, with_rollouts: bool) -> tuple[Reported, tuple[Wait, ...]]:
        reported, now_s = self._report(with_rollouts), asyncio.get_running_loop().time()
        clock = self._started_clock()
        clock.look(reported.marks, now_s)
        if (
            reported.is_mending
        ):  # else an engine that takes longer to load than watchdog_s would be restarted for ever
            clock.reset(now_s)
        return reported, self._wait_clock.waits(reported, now_s)

    async def _stuck(self, clock: StuckClock) -> None:
        """Ask everybody, tell, act."""
        children = await self._ask_children()
        reported, waits = self._look(with_rollouts=True)
        if clock.is_moving:  # meanwhile
            return
        self.num_reports += 1
        seconds = clock.quiet_s(asyncio.get_running_loop().time())
        report, policy = StuckReport.of(seconds, waits, reported, children), self._settings.on_stuck
        log.error("%s\n%s\n%s", report.text(), task_stacks(), thread_stacks())
        self._tell(report.text())
        self._note("stuck", report.as_dict() | {"on_stuck": policy})
        if policy == "fail":
            raise RoomError(
                self.name,
                f"nothing has moved for {seconds:.0f} s: {report.blame}",
                rule=f"supervision.watchdog_s={self._settings.watchdog_s:g} without any progress end a run "
                f"with supervision.on_stuck=fail",
                way_out=self._way_out,
            )
        if policy == "restart":
            await self._restart()
            clock.reset(asyncio.get_running_loop().time())
