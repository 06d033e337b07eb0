"""Waits: limits that count only the time in which the event loop ran, and waits that are declared where they
happen.

A loop stands still while its process is stopped (Ctrl-Z, SIGSTOP), its machine sleeps, or one step of it is
long. Answers that came meanwhile are read after it, and a plain asyncio.timeout that came due meanwhile would
be told first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from itertools import islice
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
        if (clock := _CLOCKS.get(loop)) is None:
            clock = _CLOCKS[loop] = cls(loop)
        return clock

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
        self._timer: asyncio.Handle | None = self._wake_after(delay_s)

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

    def _wake_after(self, delay_s: float) -> asyncio.Handle:
        return self._loop.call_later(delay_s, self._due, self._loop.time() + delay_s)

    def _due(self, due_s: float) -> None:  # not asked of the timer: uvloop's is no asyncio.TimerHandle
        grace_s = min(GRACE_S, self._grace_left_s)
        if self._loop.time() - due_s > LATE_S and self.left_s < grace_s:
            self._grace_left_s -= grace_s
            self._until_s = self._clock.time() + grace_s
        is_early = self.left_s > ROUNDING_S  # else after those whose answer came in this very turn
        self._timer = self._wake_after(self.left_s) if is_early else self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self.cancel()
        self._callback()


class TimeLimit:
    """In place of asyncio.timeout(timeout_s), for whatever is to be blamed when its time is over.

    Raises TimeoutError, and is expired() then, once the loop has run for timeout_s; None is no limit.
    `or_raise` makes the error to raise in place of the TimeoutError.
    """

    def __init__(self, timeout_s: float | None, *, or_raise: Callable[[], Exception] | None = None) -> None:
        self._delay_s, self._or_raise = timeout_s, or_raise
        self._alarm: Alarm | None = None
        self._left_s: float | None = None
        self._task: asyncio.Task[Any] | None = None
        self._num_cancelled, self._is_over = 0, False  # so often the task was cancelled before the block

    def expired(self) -> bool:
        """Whether the time is over."""
        return self._is_over

    @property
    def left_s(self) -> float | None:
        """Seconds in which the loop has still to run, or had at the end of the block; None for no limit."""
        return self._left_s if self._alarm is None else self._alarm.left_s

    def restart(self, left_s: float | None) -> None:
        """Over once the loop has run for this long from now on (None: never)."""
        assert self._task is not None, "a limit is restarted inside its block"
        assert not self._is_over, "and before it is over"
        self._stop()
        self._left_s = None
        self._start(left_s)

    async def __aenter__(self) -> TimeLimit:
        self._task = asyncio.current_task()
        assert self._task is not None, "a limit is one of a task"
        self._num_cancelled = self._task.cancelling()
        self._start(self._delay_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        task, self._task = self._task, None
        if not self._is_over or task is None:
            return
        # cancelled by others too, or not at all: then it is no matter of ours (as in asyncio.timeout)
        if task.uncancel() > self._num_cancelled or kind is not asyncio.CancelledError:
            return
        if self._or_raise is None:
            raise TimeoutError from error
        raise self._or_raise() from None

    def _start(self, delay_s: float | None) -> None:
        if delay_s is not None:
            self._alarm = Alarm(delay_s, self._end)

    def _end(self) -> None:
        assert self._task is not None
        self._is_over = True
        self._task.cancel()

    def _stop(self) -> None:
        if self._alarm is not None:
            self._left_s = self._alarm.left_s
            self._alarm.cancel()
            self._alarm = None


@contextlib.asynccontextmanager
async def within(
    timeout_s: float | None, late: Callable[[], Exception] = TimeoutError
) -> AsyncIterator[asyncio.Timeout]:
    """Limit a block to timeout_s seconds (None: no limit). Like asyncio.timeout, but it raises `late()`."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise late() from None


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

    __slots__ = ("_code", "_declared", "_table", "kind", "on", "outer", "since_s", "task", "what", "who")
    outer: OpenWait | None
    """The wait of the same task around it."""
    kind: tuple[object, ...]
    """The same for waits that are told as one."""

    def __init__(self, what: str | Callable[[], str], on: str, who: str, code: CodeType) -> None:
        self.what, self.on, self._declared, self._code = what, on, who, code

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self.task, self.since_s = asyncio.current_task(loop), loop.time()
        self.who = self._declared or self._named()
        self.kind = self.who, self._code, self.what, self.on
        if (table := _OPEN.get(loop)) is None:
            table = _OPEN[loop] = OpenWaits()
        self._table = table
        table.add(self)

    def __exit__(self, *_: object) -> None:
        self._table.remove(self)

    def __str__(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    @property
    def where(self) -> str:
        """The function that declared it."""
        return self._code.co_qualname.replace(".<locals>", "")

    def _named(self) -> str:
        """The task's name, or the class in whose method it waits; rollouts have one name together."""
        name = self.task.get_name() if self.task is not None else "Task-0"
        if name.startswith("rollout "):
            return "rollouts"
        return self.where.partition(".")[0] if name.startswith("Task-") else name


class OpenWaits:
    """The open waits of one loop, the innermost of each task, by kind. What it costs to add, remove and tell
    them does not grow with the number of tasks.
    """

    MAX_ASKED = 32
    """Waits of a kind that are asked since when they are open: the oldest are the first, but for those whose
    inner wait has ended.
    """

    def __init__(self) -> None:
        self.innermost: dict[asyncio.Task[Any] | None, OpenWait] = {}
        self._by_kind: dict[tuple[object, ...], dict[OpenWait, None]] = {}

    def add(self, wait: OpenWait) -> None:
        """It has begun."""
        wait.outer = self.innermost.get(wait.task)
        if wait.outer is not None:
            self._hide(wait.outer)
        self.innermost[wait.task] = wait
        self._by_kind.setdefault(wait.kind, {})[wait] = None

    def remove(self, wait: OpenWait) -> None:
        """It has ended."""
        inner = self.innermost[wait.task]
        if inner is not wait:  # blocks in generators may end in another order
            while inner.outer is not wait:
                assert inner.outer is not None, f"{wait} was not open"
                inner = inner.outer
            inner.outer = wait.outer
            return
        self._hide(wait)
        if wait.outer is None:
            del self.innermost[wait.task]
        else:
            self.innermost[wait.task] = wait.outer
            self._by_kind.setdefault(wait.outer.kind, {})[wait.outer] = None

    def told(self) -> list[tuple[OpenWait, int]]:
        """As open_waits() says."""
        found = [
            (min(islice(waits, self.MAX_ASKED), key=lambda wait: wait.since_s), len(waits))
            for waits in self._by_kind.values()
        ]
        return sorted(found, key=lambda one: one[0].since_s)

    def _hide(self, wait: OpenWait) -> None:
        alike = self._by_kind[wait.kind]
        del alike[wait]
        if not alike:
            del self._by_kind[wait.kind]


_OPEN = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, OpenWaits]()


def waiting(what: str | Callable[[], str], *, on: str, who: str = "") -> OpenWait:
    """A wait, declared where it happens, say for "the optimizer step of batch 7" on "trainer-0"

    `on`: the process or task that ends it. `what` may be a function, where the reason changes meanwhile.
    """
    return OpenWait(what, on, who, sys._getframe(1).f_code)


def open_waits() -> list[tuple[OpenWait, int]]:
    """What the tasks of the running loop wait for, the innermost wait of each: one of the oldest of those
    that wait alike, and how many they are; oldest first.
    """
    table = _OPEN.get(asyncio.get_running_loop())
    return [] if table is None else table.told()


def waits_of_tasks() -> dict[str, OpenWait]:
    """By the names of the tasks. It looks at all of them: not for what is asked again and again."""
    table = _OPEN.get(asyncio.get_running_loop())
    innermost = {} if table is None else table.innermost
    return {task.get_name(): wait for task, wait in innermost.items() if task is not None}


class Computation(functools.partial[T]):
    """A call that waits for nothing, so that a virtual clock may run it in place of a thread."""


async def computed(func: Callable[..., T], *args: Any) -> T:
    """What `func` returns, computed in a thread: for work that grows with a batch. It must not be changed
    meanwhile, and `func` must wait for nothing.
    """
    return await asyncio.get_running_loop().run_in_executor(None, Computation(func, *args))


_TURNS = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()


@contextlib.asynccontextmanager
async def loop_turn() -> AsyncIterator[None]:
    """A block of work in a turn of the event loop that no other such block shares, for one that wakes many
    tasks; they have run when it is over.
    """
    lock = _TURNS.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        yield
        await asyncio.sleep(0)


def await_chain(awaitable: Any) -> Iterator[FrameType]:
    """Frames from a coroutine down to what it waits for, outermost first."""
    names = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
    while found := next((pair for pair in names if hasattr(awaitable, pair[0])), None):
        if (frame := getattr(awaitable, found[0])) is not None:
            yield frame
        awaitable = getattr(awaitable, found[1])


def task_stacks() -> str:
    """Tasks that are not done: names, then function (file:line) down to where they wait, a line a place; of
    rollouts some, where there are many.
    """
    tasks_at: dict[str, list[str]] = {}
    rollouts, others = list[asyncio.Task[Any]](), list[asyncio.Task[Any]]()
    for task in asyncio.all_tasks():
        (rollouts if task.get_name().startswith("rollout ") else others).append(task)
    for task in sorted(others + rollouts[:_MAX_ROLLOUTS], key=asyncio.Task.get_name):
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
    if len(rollouts) > _MAX_ROLLOUTS:
        lines.append(f"{len(rollouts) - _MAX_ROLLOUTS} more rollouts were not looked at")
    return "\n".join(lines)


_MAX_ROLLOUTS = 1000
_MAX_NAMES = 4


def thread_stacks() -> str:
    """All threads of this process, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)).rstrip("\n")
        for ident, frame in sys._current_frames().items()
    )
