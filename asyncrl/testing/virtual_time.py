"""An asyncio event loop whose clock jumps to the next timer. For fakes only: no threads, no sockets,
no processes.

run_virtual(story())     runs a coroutine; `asyncio.sleep(3600)` takes no time, and the same story always
                         plays the same
await all_blocked()      lets all other tasks go on until none can; no virtual time passes
stand_still(10.0)        the loop does nothing for 10 s, as a process that was stopped: timers of that time
                         all come due at its end
DeadlockError            no task can move and no timer is left: says where each task waits
BusyLoopError            a task runs for ever without letting the clock go on
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncrl.base.waits import Computation, task_stacks

Result = TypeVar("Result")


class StuckError(Exception):
    """With the virtual time, and where each task waits."""

    def __init__(self, what: str, now_s: float) -> None:
        super().__init__(f"{what} at t={now_s} s:\n{task_stacks() or 'no task is left'}")


class DeadlockError(StuckError):
    """Nothing can happen any more."""


class BusyLoopError(StuckError):
    """The clock stands still while the tasks run on."""


def run_virtual(
    coro: Coroutine[Any, Any, Result], *, start_s: float = 0.0, max_rounds: int = 200_000
) -> Result:
    """Run `coro` on a virtual clock that starts at `start_s` seconds, and return its result.

    Tasks that are left over are cancelled, and the loop is closed. Raises DeadlockError when nothing can
    happen any more, BusyLoopError after `max_rounds` rounds of the loop at one instant, and the error of a
    callback or of a task that was never awaited, which asyncio would only log.
    """
    loop = VirtualTimeLoop(start_s, max_rounds)
    runner = asyncio.Runner(loop_factory=lambda: loop)
    try:
        runner.get_loop()
        result = runner.run(coro)
    except BaseException as error:
        try:
            runner.close()
        except StuckError as stubborn:
            error.add_note(f"And the tasks that were cancelled then did not end: {stubborn}")
        raise
    runner.close()
    if loop.lost_errors:
        raise loop.lost_errors[0]
    return result


async def all_blocked() -> None:
    """Return when no other task can move at this instant. No virtual time passes.

    If several tasks wait here, they all go on at once. Raises RuntimeError outside run_virtual.
    """
    await _virtual_loop("all_blocked").wait_blocked()


def stand_still(seconds: float) -> None:
    """Let virtual time pass in which no task runs, not even one whose timer is due. Raises RuntimeError
    outside run_virtual.
    """
    _virtual_loop("stand_still").stand_still(seconds)


def _virtual_loop(asked: str) -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        raise RuntimeError(f"{asked}() works on the virtual clock alone; run the test with run_virtual(...)")
    return loop


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """The loop behind run_virtual. It is its own selector: where another loop sleeps, this one sets its
    clock.

    Waits: tasks sleep in futures and timers as usual. select(), called whenever the loop has run its ready
        callbacks, wakes those in all_blocked first, else jumps to the next timer, else raises DeadlockError.
    Invariant: the clock moves only while nothing is ready, and only to the time of the next timer;
        stand_still() aside.
    """

    def __init__(self, start_s: float, max_rounds: int) -> None:
        super().__init__()
        self._selector = self
        self._max_rounds, self._rounds = max_rounds, 0
        self._in_all_blocked: list[asyncio.Future[None]] = []
        self.lost_errors: list[BaseException] = []
        self._set_clock(start_s)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    async def wait_blocked(self) -> None:
        """Body of all_blocked()."""
        waiting = self.create_future()
        self._in_all_blocked.append(waiting)
        await waiting

    def stand_still(self, seconds: float) -> None:
        """What the function of this name asks for."""
        self._set_clock(self._now_s + seconds)

    def select(self, timeout: float | None) -> list[Any]:
        """Called by the loop once a round; `timeout` is 0 if callbacks are ready or due, None if there is no
        timer.
        """
        self._rounds += 1
        if self._rounds > self._max_rounds:
            self._rounds = 0
            what = f"time stands still after {self._max_rounds} rounds of the loop"
            raise BusyLoopError(what, self._now_s)
        if timeout is not None and timeout <= 0:
            return []
        if self._wake_all_blocked():
            return []
        if timeout is None:
            raise DeadlockError("nothing can happen", self._now_s)
        self._set_clock(self._scheduled[0].when())  # type: ignore[attr-defined]
        return []

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Refused, since a thread does not run on the virtual clock; a Computation is run here and now."""
        if isinstance(func, Computation):
            done = self.create_future()
            done.set_result(func(*args))
            return done
        name = getattr(func, "__qualname__", func)
        raise RuntimeError(f"{name} would run in a thread, where there is no virtual clock; use a fake")

    def _wake_all_blocked(self) -> bool:
        waiting, self._in_all_blocked = [future for future in self._in_all_blocked if not future.done()], []
        for future in waiting:
            future.set_result(None)
        return bool(waiting)

    def _set_clock(self, now_s: float) -> None:
        self._now_s, self._rounds = now_s, 0
        # below one ulp, a timer due now would never be due
        self._clock_resolution = max(1e-9, math.ulp(now_s))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Called by asyncio with an error that it would only log."""
        if (error := context.get("exception")) is not None:
            self.lost_errors.append(error)

    def _process_events(self, event_list: list[Any]) -> None:
        """Called by asyncio with what select() returned: never anything."""

    def _write_to_self(self) -> None:
        """Called by asyncio to wake a sleeping selector; this one never sleeps."""
