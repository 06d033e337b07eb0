"""An asyncio event loop whose clock jumps to the next timer, for fakes without threads
and sockets.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.base.waits import Computation, task_stacks

Result = TypeVar("Result")


MAX_ROUNDS = 200_000
"""Loop rounds at one instant."""


class DeadlockError(Exception):
    """No task can move and no timer remains, or the tasks run on and the clock stands
    still. Carries the virtual time, and where each task waits.
    """

    def __init__(self, what: str, now_s: float) -> None:
        super().__init__(
            f"{what} at t={now_s} s:\n{task_stacks() or 'no task remains'}"
        )


def run_virtual(coro: Coroutine[Any, Any, Result]) -> Result:
    """Run `coro` on a virtual clock that starts at 0 s, and return its result.

    Remaining tasks are cancelled. Raises DeadlockError, and errors that asyncio would
    only log.
    """
    loop = VirtualTimeLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(coro)
    if loop.lost_errors:
        raise loop.lost_errors[0]
    return result


async def all_blocked() -> None:
    """Return when no other task can move at this instant."""
    await _virtual_loop().wait_blocked()


def stand_still(seconds: float) -> None:
    """Let virtual time pass in which no task runs."""
    loop = _virtual_loop()
    loop.set_clock(loop.time() + seconds)


def _virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop), "use run_virtual(...)"
    return loop


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Event loop of run_virtual, and its own selector: where another loop sleeps, it
    sets its clock.

    Waits: select() wakes tasks in all_blocked first, else jumps to the next timer, else
        raises DeadlockError.

    Invariant: the clock moves only while nothing is ready, and only to the next timer,
    except in stand_still().
    """

    def __init__(self) -> None:
        super().__init__()
        # asyncio's loop calls select() of its selector with the time until the next
        # timer, and nothing else here. No socket, no thread and no real sleep remain.
        self._selector = self
        self._rounds = 0
        self._in_all_blocked: list[asyncio.Future[None]] = []
        self.lost_errors: list[BaseException] = []
        self.set_clock(0.0)

    def time(self) -> float:
        return self._now_s

    async def wait_blocked(self) -> None:
        waiting = self.create_future()
        self._in_all_blocked.append(waiting)
        await waiting

    def select(self, timeout: float | None) -> list[object]:
        """Advance the clock. `timeout` is 0 if callbacks are ready or due, None without
        a timer.
        """
        self._rounds += 1
        # Tasks that only yield to each other would spin here forever, without a timer
        # to jump to.
        if self._rounds > MAX_ROUNDS:
            # From zero, so that the tasks' cleanup may run after the error.
            self._rounds = 0
            raise DeadlockError(
                f"time stands still after {MAX_ROUNDS} rounds of the loop", self._now_s
            )
        if timeout is not None and timeout <= 0:
            return []
        if self._wake_all_blocked():
            return []
        if timeout is None:
            raise DeadlockError("nothing can happen", self._now_s)
        self.set_clock(self._scheduled[0].when())  # type: ignore[attr-defined]
        return []

    def run_in_executor(
        self, executor: object, func: Callable[..., Result], *args: object
    ) -> asyncio.Future[Result]:
        """Refuse threads, which have no virtual clock; run a Computation at once."""
        if isinstance(func, Computation):
            done = self.create_future()
            done.set_result(func(*args))
            return done
        name = getattr(func, "__qualname__", func)
        raise RuntimeError(
            f"{name} would run in a thread, without the virtual clock; use a fake"
        )

    def _wake_all_blocked(self) -> bool:
        waiting = [future for future in self._in_all_blocked if not future.done()]
        self._in_all_blocked = []
        for future in waiting:
            future.set_result(None)
        return bool(waiting)

    def set_clock(self, now_s: float) -> None:
        self._now_s = now_s
        self._rounds = 0
        # below one ulp, a timer due now would never be due
        self._clock_resolution = max(1e-9, math.ulp(now_s))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep an error that asyncio would only log."""
        if (error := context.get("exception")) is not None:
            self.lost_errors.append(error)

    def _process_events(self, event_list: list[object]) -> None:
        """Ignore select()'s result, always empty."""

    def _write_to_self(self) -> None:
        """Do nothing: this selector never sleeps."""
