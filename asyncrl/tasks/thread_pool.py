"""Score functions in daemon threads. Knows one function and one time limit; cannot end a thread that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.limits import Alarm, TimeLimit
from asyncrl.tasks.outcome import Outcome, call
from asyncrl.tasks.task import Score
from asyncrl.types import Prompt


class ThreadPool:
    """At most `workers` calls at once, each in a daemon thread of its own, so that a hung one cannot keep the interpreter alive.

    Life of a call: waits for a worker, runs, is answered or given up after timeout_s. A call that was given up keeps its
                    worker until its thread returns.
    Waits:          callers wait for a worker, woken by a thread that returns, or by the watchdog.
    Invariant:      no wait is endless. Once every worker has been in one call for twice the limit, the watchdog declares
                    the pool stuck, and every caller, waiting or to come, gets a TaskError.
    """

    def __init__(self, score: Score, *, workers: int, timeout_s: float) -> None:
        self._score, self._workers, self._timeout_s = score, workers, timeout_s
        self._free = asyncio.Semaphore(workers)
        self._running: dict[asyncio.Future[Any], Alarm] = {}
        self._overdue: set[asyncio.Future[Any]] = set()
        self._is_stuck = False

    def __repr__(self) -> str:
        return f"<ThreadPool {len(self._running)}/{self._workers} running{', stuck' if self._is_stuck else ''}>"

    async def run(self, prompt: Prompt, completion: str) -> Outcome | Awaitable[Any]:
        """Outcome of one call, or what an async score function returned. Raises TaskError if no worker will be free any more."""
        await self._free.acquire()
        if self._is_stuck:
            self._free.release()  # for the next one who waits
            raise self._stuck()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome | Awaitable[Any]] = loop.create_future()
        self._running[done] = Alarm(2 * self._timeout_s, lambda: self._is_overdue(done))
        threading.Thread(target=self._work, args=(loop, done, prompt, completion), name="reward", daemon=True).start()
        try:
            async with TimeLimit(self._timeout_s):
                return await done
        except TimeoutError:
            return Outcome(failure=f"did not return within {self._timeout_s} s (task.reward_timeout_s)")

    def close_nowait(self) -> None:
        """Forget the calls that still run; their daemon threads end with the process."""
        for watchdog in self._running.values():
            watchdog.cancel()

    def _work(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], prompt: Prompt, completion: str) -> None:
        outcome: Outcome | Awaitable[Any]
        try:
            outcome = call(self._score, prompt, completion)
        except BaseException as error:  # Ctrl-C goes to the main thread, so this is the score's own; unanswered, it keeps its worker
            outcome = Outcome(failure=f"raised {type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: the run is over
            loop.call_soon_threadsafe(self._finish, done, outcome)

    def _finish(self, done: asyncio.Future[Any], outcome: Outcome | Awaitable[Any]) -> None:
        self._running.pop(done).cancel()
        self._overdue.discard(done)
        self._free.release()
        if not done.done():
            done.set_result(outcome)
        elif asyncio.iscoroutine(outcome):
            outcome.close()

    def _is_overdue(self, done: asyncio.Future[Any]) -> None:
        self._overdue.add(done)
        if len(self._overdue) == self._workers:
            self._is_stuck = True
            self._free.release()

    def _stuck(self) -> TaskError:
        return TaskError(
            "tasks",
            f"all {self._workers} reward threads have been in one call each for more than {2 * self._timeout_s} s",
            rule=f"task.reward_timeout_s={self._timeout_s} is the limit, and a thread that hangs cannot be ended",
            way_out="set task.reward_pool=process, whose workers are ended when they hang; or mend the reward function.",
        )
