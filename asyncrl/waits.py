"""Waits: limits that count only the time in which the event loop ran, and waits that are declared where they
happen.

A loop stands still while its process is stopped (Ctrl-Z, SIGSTOP), its machine sleeps, or one step of it is
long. Answers that came meanwhile are read after it, and a plain asyncio.timeout that came due meanwhile would
be told first.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

TICK_S = 1.0
"""Seconds between two checks whether the loop runs."""
LATE_S = 0.1
"""Seconds: an alarm that is later than this was due while the loop stood still."""
GRACE_S = 1.0
"""After that: time to read what came meanwhile."""
ROUNDING_S = 1e-6
"""Seconds: an alarm may come at most this much too early."""


class LoopClock:
    """Seconds in which an event loop has run: its own time, less what it stood still.

    Life: of(loop), one for each loop -> hold_nowait() and release_nowait() in pairs: it ticks while it is
        held; time in which it is not held counts as run.
    Invariant: never goes back, and gets on by TICK_S with each tick: a loop that is always late delays a
        limit, and never for ever.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.proxy(loop)  # the table below would keep it alive
        self._missed_s = 0.0
        self._num_holders = 0
        self._tick: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopClock:
        """The clock of this loop."""
        if loop not in _CLOCKS:
            _CLOCKS[loop] = cls(loop)
        return _CLOCKS[loop]

    def time(self) -> float:
        """Seconds. The next tick stops it, until the loop gets to that."""
        now_s: float = self._loop.time()
        return (now_s if self._tick is None else min(now_s, self._tick.when())) - self._missed_s

    def hold_nowait(self) -> None:
        """Begin to observe whether the loop runs."""
        self._num_holders += 1
        if self._tick is None:
            self._tick = self._loop.call_later(TICK_S, self._on_tick)

    def release_nowait(self) -> None:
        """End one observation."""
        self._num_holders -= 1
        if self._num_holders == 0 and self._tick is not None:
            self._count_missed(self._tick)
            self._tick.cancel()
            self._tick = None

    def _on_tick(self) -> None:
        assert self._tick is not None
        self._count_missed(self._tick)
        self._tick = self._loop.call_later(TICK_S, self._on_tick)

    def _count_missed(self, tick: asyncio.TimerHandle) -> None:
        self._missed_s += max(0.0, self._loop.time() - tick.when())


_CLOCKS = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock]()


class Alarm:
    """Calls `callback` once the loop has run for `delay_s`; if it stood still at the end of that, GRACE_S
    later.

    Life: made, inside the loop -> called back, or cancel(). No later than after twice `delay_s` in which the
        loop ran.
    """

    def __init__(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._loop, self._callback = asyncio.get_running_loop(), callback
        self._clock = LoopClock.of(self._loop)
        self._clock.hold_nowait()
        self._until_s, self._grace_left_s = self._clock.time() + delay_s, delay_s
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(delay_s, self._due)

    @property
    def left_s(self) -> float:
        """Seconds in which the loop has still to run."""
        return max(0.0, self._until_s - self._clock.time())

    def cancel(self) -> None:
        """Do not call; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._clock.release_nowait()

    def _due(self) -> None:
        assert self._timer is not None
        grace_s = min(GRACE_S, self._grace_left_s)
        if self._loop.time() - self._timer.when() > LATE_S and self.left_s < grace_s:
            self._grace_left_s -= grace_s
            self._until_s = self._clock.time() + grace_s
        if self.left_s > ROUNDING_S:
            self._timer = self._loop.call_later(self.left_s, self._due)
            return
        self.cancel()
        self._callback()


class TimeLimit:
    """In place of asyncio.timeout(timeout_s), for whatever is to be blamed when its time is over: `async with
    TimeLimit(60.0) as limit`.

    Raises TimeoutError, and is expired() then, once the loop has run for timeout_s; None is no limit.
    `or_raise` makes the error to raise in place of the TimeoutError.
    """

    def __init__(self, timeout_s: float | None, *, or_raise: Callable[[], Exception] | None = None) -> None:
        self._delay_s, self._or_raise = timeout_s, or_raise
        self._alarm: Alarm | None = None
        self._left_s: float | None = None
        self._inner = asyncio.timeout(None)

    def expired(self) -> bool:
        """Whether the time is over."""
        return self._inner.expired()

    @property
    def left_s(self) -> float | None:
        """Seconds in which the loop has still to run, or had at the end of the block; None for no limit."""
        return self._left_s if self._alarm is None else self._alarm.left_s

    def restart(self, left_s: float | None) -> None:
        """Over once the loop has run for this long from now on (None: never); only inside the block."""
        self._inner.reschedule(None)
        self._stop()
        self._left_s = None
        self._start(left_s)

    async def __aenter__(self) -> TimeLimit:
        await self._inner.__aenter__()
        self._start(self._delay_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        try:
            await self._inner.__aexit__(kind, error, traceback)  # suppresses nothing
        except TimeoutError:
            if self._or_raise is None:
                raise
            raise self._or_raise() from None

    def _start(self, delay_s: float | None) -> None:
        if delay_s is not None:
            now = asyncio.get_running_loop().time
            self._alarm = Alarm(delay_s, lambda: self._inner.reschedule(now()))

    def _stop(self) -> None:
        if self._alarm is not None:
            self._left_s = self._alarm.left_s
            self._alarm.cancel()
            self._alarm = None


async def uncut(work: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """The result of `work`, which goes on to its end however often we are cancelled; the last one."""
    doing = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not doing.done():
        try:
            await asyncio.wait({doing})
        except asyncio.CancelledError as error:
            cancelled = error
    return doing.result(), cancelled


class OpenWait:
    """A task that waits, from __enter__ to __exit__. Cheap: its words are worked out when asked."""

    __slots__ = ("_code", "_waits", "_who", "on", "since_s", "task", "what")

    def __init__(self, what: str | Callable[[], str], on: str, who: str, code: CodeType) -> None:
        self.what, self.on, self._who, self._code = what, on, who, code

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self.task, self.since_s = asyncio.current_task(loop), loop.time()
        self._waits = _OPEN.setdefault(loop, {})
        self._waits[self] = None

    def __exit__(self, *_: object) -> None:
        del self._waits[self]

    def __str__(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    @property
    def where(self) -> str:
        """The function that declared it."""
        return self._code.co_qualname.replace(".<locals>", "")

    @property
    def who(self) -> str:
        """As declared; else the task's name, or the class in whose method it waits."""
        name = self.task.get_name() if self.task is not None else "Task-0"
        return self._who or (self.where.partition(".")[0] if name.startswith("Task-") else name)


_OPEN = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[OpenWait, None]]()


def waiting(what: str | Callable[[], str], *, on: str, who: str = "") -> OpenWait:
    """A wait, declared where it happens, say for "the optimizer step of batch 7" on "trainer-0"

    `on`: the process or task that ends it. `what` may be a function, where the reason changes meanwhile.
    """
    return OpenWait(what, on, who, sys._getframe(1).f_code)


def open_waits() -> list[OpenWait]:
    """The waits of the running loop, the innermost of each task, oldest first."""
    innermost = {wait.task or wait: wait for wait in _OPEN.get(asyncio.get_running_loop(), ())}
    return sorted(innermost.values(), key=lambda wait: wait.since_s)


def await_chain(awaitable: Any) -> Iterator[FrameType]:
    """Frames from a coroutine down to what it waits for, outermost first."""
    names = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
    while found := next((pair for pair in names if hasattr(awaitable, pair[0])), None):
        if (frame := getattr(awaitable, found[0])) is not None:
            yield frame
        awaitable = getattr(awaitable, found[1])


def task_stacks() -> str:
    """Tasks that are not done: names, then function (file:line) down to where they wait, a line a place."""
    tasks_at: dict[str, list[str]] = {}
    for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
        frames = await_chain(task.get_coro())
        places = [
            (frame.f_code, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}") for frame in frames
        ]
        place = " > ".join(f"{code.co_qualname} ({where})" for code, where in places)
        tasks_at.setdefault(place or "not begun", []).append(task.get_name())
    lines = []
    for place, names in tasks_at.items():
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        lines.append(f"task {', '.join(names[:_MAX_NAMES])}{more}: {place}")
    return "\n".join(lines)


_MAX_NAMES = 4


def thread_stacks() -> str:
    """All threads of this process, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)).rstrip("\n")
        for ident, frame in sys._current_frames().items()
    )
