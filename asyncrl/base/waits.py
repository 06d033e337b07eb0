"""Declared waits, to report hangs; helpers for timeouts and cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple, TypeVar

T = TypeVar("T")


def clock() -> float:
    """Return the event loop's time in seconds, which tests make virtual."""
    return asyncio.get_running_loop().time()


class within:  # noqa: N801
    """Like asyncio.timeout (None: no limit), but raises `late()`.

    A class, since a generator would cost each call of an agent 5 us.
    """

    def __init__(
        self, timeout_s: float | None, late: Callable[[], Exception] = TimeoutError
    ) -> None:
        self._limit = asyncio.timeout(timeout_s)
        self._late = late

    async def __aenter__(self) -> asyncio.Timeout:
        return await self._limit.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_late = isinstance(error, TimeoutError)
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            is_late = True
        # Otherwise it is the block's own TimeoutError, for example of a socket: not
        # ours to rename.
        if is_late and self._limit.expired():
            raise self._late() from None


@contextlib.asynccontextmanager
async def at_most(limit_s: float | None) -> AsyncIterator[None]:
    """Leave the block after `limit_s` without an error; None: no limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            yield


async def shielded(
    work: Awaitable[T],
) -> tuple[T, asyncio.CancelledError | None]:
    """Run `work` to its end despite cancellations; return its result and the last
    cancellation.

    If `work` fails after a cancellation, raise the cancellation.
    """
    doing = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not doing.done():
        try:
            # wait() leaves the task running when we are cancelled; `await doing` would
            # cancel it too.
            await asyncio.wait({doing})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and doing.exception() is not None:
        raise cancelled from doing.exception()
    return doing.result(), cancelled


class Signal:
    """Wakes the tasks that wait for a change of state. It holds no state.

    Waits: wait sleeps until the next notify; wait_for until a notify after which
        `predicate()` is true.

    Invariant: no change is missed, since nothing is awaited between a test of the
        predicate and the sleep.

    >>> free, has_changed = [], Signal()
    >>> async def take():
    ...     await has_changed.wait_for(lambda: len(free) > 0)
    ...     return free.pop()
    >>> async def give():
    ...     free.append("engine-0")
    ...     has_changed.notify()
    >>> async def both():
    ...     return await asyncio.gather(take(), give())
    >>> asyncio.run(both())
    ['engine-0', None]
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        # Current waits; later waits need another notify. Most notifies find
        # nobody, and cost nothing.
        if self._waiting:
            woken, self._waiting = self._waiting, {}
            for future in woken:
                if not future.done():  # cancelled just now
                    future.set_result(None)

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await future
        finally:
            self._waiting.pop(future, None)  # cancelled

    async def wait_for(self, predicate: Callable[[], object]) -> None:
        """Return once `predicate()` is true: at once, or after a notify."""
        while not predicate():
            await self.wait()


class OpenWait:
    """A waiting task. Its text is computed on demand."""

    __slots__ = (
        "_code",
        "_declared",
        "_table",
        "kind",
        "on",
        "since_s",
        "task",
        "what",
        "who",
    )
    kind: tuple[object, ...]
    """Key of waits that are reported together."""

    def __init__(
        self, what: str | Callable[[], str], on: str, who: str, code: CodeType
    ) -> None:
        self.what, self.on, self._declared, self._code = what, on, who, code

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self.task, self.since_s = asyncio.current_task(loop), loop.time()
        self.who = self._declared or self._named()
        # By id: the hash of a code object reads all its names and constants.
        self.kind = self.who, id(self._code), self.what, self.on
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
        return self._code.co_qualname.replace(".<locals>", "")

    def _named(self) -> str:
        name = self.task.get_name() if self.task is not None else "Task-0"
        # Thousands of rollouts wait for the same thing: one line in the report, with
        # their number.
        if name.startswith("rollout "):
            return "rollouts"
        if name.startswith("reward g"):
            return "rewards of groups"
        return self.where.partition(".")[0] if name.startswith("Task-") else name


class OpenWaits:
    """Open waits of one loop, by task and by kind. A change takes constant time."""

    MAX_ASKED = 32
    """Waits of a kind to check for the oldest."""

    def __init__(self) -> None:
        self.by_task: dict[asyncio.Task[object] | None, list[OpenWait]] = {}
        """Outermost first."""
        self._by_kind: dict[tuple[object, ...], dict[OpenWait, None]] = {}

    def add(self, wait: OpenWait) -> None:
        self.by_task.setdefault(wait.task, []).append(wait)
        self._by_kind.setdefault(wait.kind, {})[wait] = None

    def remove(self, wait: OpenWait) -> None:
        nested = self.by_task[wait.task]
        nested.remove(wait)  # generators may exit in another order
        if not nested:
            del self.by_task[wait.task]
        alike = self._by_kind[wait.kind]
        del alike[wait]
        if not alike:
            del self._by_kind[wait.kind]

    def summary(self) -> list[tuple[OpenWait, int]]:
        """Return the oldest innermost wait of each kind, and how many waits of its kind
        are open; the oldest of all first.
        """
        found = []
        for waits in self._by_kind.values():
            # A wait counts if it is its task's innermost: an outer one only says why
            # the inner one exists. The bound keeps a report short with 100,000 tasks,
            # all in an inner wait.
            asked = islice(waits, self.MAX_ASKED)  # oldest first
            if (
                wait := next(
                    (one for one in asked if self.by_task[one.task][-1] is one), None
                )
            ) is not None:
                found.append((wait, len(waits)))
        return sorted(found, key=lambda one: one[0].since_s)


# By loop: tests run many loops in one process, and a table ends with its loop.
_OPEN = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, OpenWaits]()


def waiting(what: str | Callable[[], str], *, on: str, who: str = "") -> OpenWait:
    """Declare a wait, such as "the optimizer step of batch 7" on "trainer-0"."""
    return OpenWait(what, on, who, sys._getframe(1).f_code)


def open_waits() -> list[tuple[OpenWait, int]]:
    """Return innermost waits: the oldest of each kind, and their number."""
    table = _OPEN.get(asyncio.get_running_loop())
    return [] if table is None else table.summary()


def waits_of_tasks() -> dict[str, OpenWait]:
    """Return waits by task name. Slow with many tasks."""
    table = _OPEN.get(asyncio.get_running_loop())
    by_task = {} if table is None else table.by_task
    return {
        task.get_name(): waits[-1]
        for task, waits in by_task.items()
        if task is not None
    }


# The virtual clock of tests refuses threads: their duration would be real. A
# Computation has no wait, so it takes no virtual time.
class Computation(functools.partial[T]):
    """A call without waits, which a virtual clock may run inline."""


async def run_in_thread(func: Callable[..., T], *args: object) -> T:
    """Run `func`, which must not wait, in a thread. Its data must not change."""
    return await asyncio.get_running_loop().run_in_executor(
        None, Computation(func, *args)
    )


_ITERATIONS = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()


@contextlib.asynccontextmanager
async def loop_iteration() -> AsyncIterator[None]:
    """Run a block that wakes many tasks in its own loop iteration."""
    # The lock is held until the next iteration of the loop. So blocks of several links
    # share no iteration, and timers and other connections run between them.
    lock = _ITERATIONS.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        yield
        await asyncio.sleep(0)


def await_chain(awaitable: object) -> Iterator[FrameType]:
    """Yield the frames from a task's coroutine down to its innermost await.

    Task.get_stack() shows only the outermost frame of a suspended coroutine.
    """
    names = (
        ("cr_frame", "cr_await"),
        ("gi_frame", "gi_yieldfrom"),
        ("ag_frame", "ag_await"),
    )
    while found := next((pair for pair in names if hasattr(awaitable, pair[0])), None):
        if (frame := getattr(awaitable, found[0])) is not None:
            yield frame
        awaitable = getattr(awaitable, found[1])


_MAX_NAMES = 4


def task_stacks() -> str:
    """Return unfinished tasks by place: names, then function (file:line) down to the
    wait.
    """
    names_at: dict[str, list[str]] = {}
    for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
        places = [
            f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
            for frame in await_chain(task.get_coro())
        ]
        names_at.setdefault(" > ".join(places) or "not begun", []).append(
            task.get_name()
        )
    lines = []
    for place, names in names_at.items():
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        lines.append(f"task {', '.join(names[:_MAX_NAMES])}{more}: {place}")
    return "\n".join(lines)


# Seconds. Shorter spans would be invisible in the timeline, and fill it.
SHORTEST_S = 0.0005


class TimedSpan(NamedTuple):
    """`lane`: actor; `kind`: activity (observe/timeline.py); times are time.monotonic;
    `number`: batch or policy_version, or -1.
    """

    lane: str
    kind: str
    start_s: float
    end_s: float
    number: int = -1
    text: str = ""


_listener: ContextVar[Callable[[TimedSpan], None] | None] = ContextVar(
    "listener", default=None
)


def listen_to_spans(listener: Callable[[TimedSpan], None]) -> None:
    """Report spans of this task and its later child tasks."""
    _listener.set(listener)


def note_span(
    lane: str, kind: str, start_s: float, end_s: float, number: int = -1, text: str = ""
) -> None:
    if (listener := _listener.get()) is not None:
        listener(TimedSpan(lane, kind, start_s, end_s, number, text))


@contextlib.contextmanager
def span(lane: str, kind: str, number: int = -1) -> Iterator[None]:
    started_s = time.monotonic()
    try:
        yield
    finally:
        if (ended_s := time.monotonic()) - started_s >= SHORTEST_S:
            note_span(lane, kind, started_s, ended_s, number)
