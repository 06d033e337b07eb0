"""Turns a completion into a reward, within a limit: inline, in threads, or in processes that are ended when
they hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, Protocol

from asyncrl.config import TaskConfig
from asyncrl.errors import RewardFailure, TaskError
from asyncrl.messages.records import Prompt
from asyncrl.tasks.from_config import build_score
from asyncrl.tasks.task import Outcome, Score, Task, call, call_async, caught
from asyncrl.tasks.verifiers_task import no_reward
from asyncrl.user_code import UserCalls
from asyncrl.waits import Alarm, TimeLimit, waiting

logger = logging.getLogger(__name__)


class RewardPool(Protocol):
    """Where a score function is called."""

    async def run(self, prompt: Prompt, completion: str) -> Outcome | Awaitable[Any]:
        """Outcome of one call, or what an async score function returned. Raises TaskError if no call can be
        made any more.
        """
        ...

    async def aclose(self) -> None:
        """End what runs; idempotent."""
        ...


class TaskScorer:
    """The Scorer of a run: `task.score` inline, in threads or in processes, as `task.reward_pool` says.

    An async score function is awaited on the event loop, with the same limit and no bound on how many at once
    (in `process` it runs in a process like any other). A call that does not end when it is cancelled is given
    up. Whatever goes wrong is a RewardFailure, never a reward of 0; so is a task that leaves the rewards to
    its harness, which gave none.
    """

    def __init__(
        self, task: Task, config: TaskConfig, *, seed: int, warn: Callable[[str], None] = logger.warning
    ) -> None:
        kind = config.reward_pool
        if kind == "auto":
            kind = "process" if config.reward == "math" else "thread"
        self._timeout_s, self._has_score = config.reward_timeout_s, config.has_score
        self._calls = UserCalls(
            f"the reward function {config.reward or config.python}",
            error=partial(TaskError, "tasks"),
            warn=warn,
        )
        self._pool: RewardPool = Inline(task.score)
        if config.has_score:
            self._pool = {"inline": Inline, "thread": ThreadPool, "process": ProcessPool}[kind](
                task.score, config, seed
            )

    @property
    def num_abandoned(self) -> int:
        """Calls so far that were given up because they did not end when they were cancelled."""
        return self._calls.num_abandoned

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py."""
        return {"rollout/abandoned": self.num_abandoned}

    async def score(self, prompt: Prompt, completion: str) -> float:
        """A finite reward. Raises RewardFailure (data), or TaskError if nothing can be scored any more (ends
        the run).
        """
        if not self._has_score:
            raise no_reward(prompt)
        with waiting("their rewards", on="the reward function"):
            outcome = await self._outcome(prompt, completion)
        if outcome.failure:
            raise RewardFailure(
                f"the reward of prompt {prompt.prompt_id} {outcome.failure}",
                rule="a reward is one finite number",
                way_out=f"correct the reward function if this repeats; the completion began "
                f"{completion[:80]!r}.",
            )
        return outcome.reward

    async def aclose(self) -> None:
        """End the processes; idempotent."""
        await self._pool.aclose()

    async def _outcome(self, prompt: Prompt, completion: str) -> Outcome:
        self._calls.check()
        answer = await self._pool.run(prompt, completion)
        if isinstance(answer, Outcome):
            return answer
        try:
            async with TimeLimit(self._timeout_s):
                return await self._calls.run(call_async(answer))
        except TimeoutError:
            return Outcome(failure=_too_slow(self._timeout_s))


def _too_slow(timeout_s: float) -> str:
    return f"did not return within {timeout_s} s (task.reward_timeout_s)"


class Inline:
    """Calls on the event loop."""

    def __init__(self, score: Score, *_: object) -> None:
        self._score = score

    async def run(self, prompt: Prompt, completion: str) -> Outcome | Awaitable[Any]:
        """At once."""
        return call(self._score, prompt, completion)

    async def aclose(self) -> None:
        """Nothing runs."""


class ThreadPool:
    """At most reward_workers calls at once, each in a daemon thread of its own, so that a hung one cannot
    keep the interpreter alive.

    Call:       waits for a worker, runs, is answered or given up after timeout_s. A call that was given up
                keeps its worker until its thread returns.
    Waits:      callers wait for a worker, woken by a thread that returns, or by the watchdog.
    Invariant:  no wait is endless. Once every worker has been in one call for twice the limit, the watchdog
                declares the pool stuck, and every caller, waiting or to come, gets a TaskError.
    """

    def __init__(self, score: Score, config: TaskConfig, _: int) -> None:
        self._score, self._workers, self._timeout_s = score, config.reward_workers, config.reward_timeout_s
        self._free = asyncio.Semaphore(self._workers)
        self._running: dict[asyncio.Future[Any], Alarm] = {}
        self._overdue: set[asyncio.Future[Any]] = set()
        self._is_stuck = False

    async def run(self, prompt: Prompt, completion: str) -> Outcome | Awaitable[Any]:
        """Raises TaskError if no worker will be free any more."""
        await self._free.acquire()
        if self._is_stuck:
            self._free.release()  # for the next one who waits
            raise TaskError(
                "tasks",
                f"all {self._workers} reward threads have been in one call each for more than "
                f"{2 * self._timeout_s} s",
                rule=f"task.reward_timeout_s={self._timeout_s} is the limit, and a thread that hangs cannot "
                "be ended",
                way_out="set task.reward_pool=process, whose workers are ended when they hang; or correct "
                "the reward function.",
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome | Awaitable[Any]] = loop.create_future()
        self._running[done] = Alarm(2 * self._timeout_s, lambda: self._is_overdue(done))
        work = partial(self._work, loop, done, prompt, completion)
        threading.Thread(target=work, name="reward", daemon=True).start()
        try:
            async with TimeLimit(self._timeout_s):
                return await done
        except TimeoutError:
            return Outcome(failure=_too_slow(self._timeout_s))

    async def aclose(self) -> None:
        """Forget the calls that still run; their daemon threads end with the process."""
        for watchdog in self._running.values():
            watchdog.cancel()

    def _work(
        self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], prompt: Prompt, completion: str
    ) -> None:
        outcome: Outcome | Awaitable[Any]
        try:
            outcome = call(self._score, prompt, completion)
        # Ctrl-C goes to the main thread, so this is the score's own; unanswered, it keeps its worker
        except BaseException as error:
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


START_LIMIT_S = 120.0
"""Seconds in which a process must have started and built the score function."""


class ProcessPool:
    """At most reward_workers calls at once, each in a process that is ended when the call takes too long.

    Life:   processes start with the first call and live until aclose(); one that is ended or dies is
            replaced.
    Waits:  callers wait for a worker, woken by one whose call is over. No call outlives limit plus
            START_LIMIT_S.
    """

    def __init__(self, _: Score, config: TaskConfig, seed: int) -> None:
        from pebble import ProcessPool as PebblePool

        self._timeout_s = config.reward_timeout_s
        self._free = asyncio.Semaphore(config.reward_workers)
        self._pool = PebblePool(
            max_workers=config.reward_workers,
            initializer=_start,
            initargs=(config, seed),
            context=multiprocessing.get_context("spawn"),
        )

    async def run(self, prompt: Prompt, completion: str) -> Outcome:
        """Raises TaskError if the processes cannot start or cannot build the score function."""
        async with self._free:
            try:
                async with TimeLimit(self._timeout_s + START_LIMIT_S):
                    return await self._run(prompt, completion)
            except TimeoutError:
                raise self._broken(
                    f"gave no answer within task.reward_timeout_s={self._timeout_s} s and {START_LIMIT_S} s "
                    f"for their start",
                    "make the task's module import and its construction quick.",
                ) from None

    async def aclose(self) -> None:
        """End the processes."""
        self._pool.stop()
        await asyncio.to_thread(self._pool.join)

    async def _run(self, prompt: Prompt, completion: str) -> Outcome:
        from pebble import ProcessExpired

        try:
            future: Future[Outcome | str] = self._pool.schedule(
                _work, args=(prompt, completion), timeout=self._timeout_s
            )
            answer = await asyncio.wrap_future(future)
        except TimeoutError:
            return Outcome(failure=f"{_too_slow(self._timeout_s)}; its process was ended")
        except ProcessExpired as error:
            return Outcome(failure=f"ended its process (exit code {error.exitcode})")
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return Outcome(failure=f"cannot be called in a process: its prompt cannot be sent there: {error}")
        except (BrokenProcessPool, RuntimeError) as error:
            raise self._broken(
                f"died outside of any call ({error})",
                "see the log for what ended them; memory is the usual cause.",
            ) from error
        if isinstance(answer, str):
            raise self._broken(
                f"cannot build the score function: {answer}",
                "make it importable in a new process, without the state of this one.",
            )
        return answer

    def _broken(self, what: str, way_out: str) -> TaskError:
        return TaskError("tasks", f"the reward processes {what}", way_out=way_out)


_score: Score | str = "never started"
"""In a worker process: the score function, or why there is none."""


def _start(config: TaskConfig, seed: int) -> None:
    """First thing in a worker process: die with the parent, and build the score function."""
    global _score
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    with caught() as boundary:
        _score = build_score(config, seed)
        return
    _score = boundary.failure


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(3)


def _work(prompt: Prompt, completion: str) -> Outcome | str:
    """In a worker process: the outcome of one call, or why no call can be made here."""
    if isinstance(_score, str):
        return _score
    outcome = call(_score, prompt, completion)
    if isinstance(outcome, Outcome):
        return outcome
    with caught() as boundary:  # no caller cancels in here: what a score function cancels is its own failure
        return asyncio.run(call_async(outcome))
    return Outcome(failure=boundary.failure)
