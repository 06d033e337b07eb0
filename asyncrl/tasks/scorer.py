"""Scores completions within a time limit: inline, in threads, or in killable processes."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from asyncrl.base.errors import RewardFailure, TaskError
from asyncrl.base.user_code import DaemonThreads, UserCalls
from asyncrl.base.waits import waiting, within
from asyncrl.config import TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks.from_config import build_score
from asyncrl.tasks.task import PromptTask, Score, UserCodeFailed, call, call_async, no_reward, user_code

logger = logging.getLogger(__name__)

TOO_SLOW = "did not return within {} s (task.reward_timeout_s)"


class TaskScorer:
    """Calls `task.score` inline, in threads or in processes, by `task.reward_pool`.

    An async score function is awaited on the event loop, with the same limit and unbounded concurrency (with
    `process` it runs in a process). A call that ignores its cancellation is abandoned. Every failure is a
    RewardFailure, never a reward of 0; so is a missing reward of the harness.
    """

    def __init__(
        self, task: PromptTask, config: TaskConfig, *, seed: int, warn: Callable[[str], None] = logger.warning
    ) -> None:
        kind = config.reward_pool
        if kind == "auto":
            kind = "process" if config.reward == "math" else "thread"
        self._score, self._has_score = task.score, config.has_score
        self._shows_special = config.special_tokens == "visible"
        self._timeout_s = config.reward_timeout_s
        name = f"the reward function {config.reward or config.python}"
        self._calls = UserCalls(name, error=partial(TaskError, "tasks"), warn=warn)
        self._pool: ThreadPool | ProcessPool | None = None
        if config.has_score and kind == "thread":
            self._pool = ThreadPool(task.score, config)
        elif config.has_score and kind == "process":
            self._pool = ProcessPool(config, seed)

    @property
    def num_abandoned(self) -> int:
        return self._calls.num_abandoned

    def gauges(self) -> dict[str, float]:
        return {"rollout/abandoned": self.num_abandoned}

    def scores(self, prompt: Prompt) -> bool:
        """Return whether a text can be scored; otherwise rewards must come from the harness."""
        return self._has_score

    def shows_special(self, prompt: Prompt) -> bool:
        """Return whether answers contain the text of special tokens (task.special_tokens)."""
        return self._shows_special

    async def score(self, prompt: Prompt, completion: str) -> float:
        """Return a finite reward. Raises RewardFailure (data), or TaskError if scoring is impossible (ends
        the run).
        """
        if not self._has_score:
            raise no_reward(prompt)
        try:
            self._calls.check()
            if self._pool is None:
                answer = call(self._score, prompt, completion)
                if isinstance(answer, float):  # without waiting
                    return answer
            with waiting("their rewards", on="the reward function"):
                if self._pool is not None:
                    answer = await self._pool.run(prompt, completion)
                return answer if isinstance(answer, float) else await self._awaited(answer)
        except UserCodeFailed as failure:
            what = f"the reward of prompt {prompt.prompt_id} {failure}"
            way_out = f"correct the reward function; the completion began {completion[:80]!r}."
            raise RewardFailure(what, rule="a reward is one finite number", way_out=way_out) from failure

    async def aclose(self) -> None:
        """End the processes. Idempotent. Threads end with the interpreter."""
        if isinstance(self._pool, ProcessPool):
            await self._pool.aclose()

    async def _awaited(self, answer: Awaitable[Any]) -> float:
        async with _within(self._timeout_s):
            return await self._calls.run(call_async(answer))


class Scorers:
    def __init__(
        self,
        tasks: Mapping[str, PromptTask],
        settings: Mapping[str, TaskConfig],
        *,
        seed: int,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        made = (
            (name, TaskScorer(task, settings[name], seed=seed, warn=warn)) for name, task in tasks.items()
        )
        self._scorers = dict(made)

    def gauges(self) -> dict[str, float]:
        return {"rollout/abandoned": sum(scorer.num_abandoned for scorer in self._scorers.values())}

    def scores(self, prompt: Prompt) -> bool:
        return self._scorers[prompt.task].scores(prompt)

    def shows_special(self, prompt: Prompt) -> bool:
        return self._scorers[prompt.task].shows_special(prompt)

    async def score(self, prompt: Prompt, completion: str) -> float:
        return await self._scorers[prompt.task].score(prompt, completion)

    async def aclose(self) -> None:
        """End all processes. Idempotent."""
        for scorer in self._scorers.values():
            await scorer.aclose()


def _within(timeout_s: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
    return within(timeout_s, lambda: UserCodeFailed(TOO_SLOW.format(timeout_s)))


class ThreadPool:
    """At most reward_workers concurrent calls in daemon threads, so that a hung call cannot keep the
    interpreter alive.

    Life: of a call: waits for a worker -> runs -> is answered, or abandoned after timeout_s. An abandoned
        call keeps its worker until its thread returns.
    Waits: callers wait for a worker, woken by a returning thread or an alarm.
    Invariant: no wait is endless. If every worker has been in one call for twice the limit, every caller gets
        a TaskError.
    """

    def __init__(self, score: Score, config: TaskConfig) -> None:
        self._score, self._workers, self._timeout_s = score, config.reward_workers, config.reward_timeout_s
        self._threads, self._free = DaemonThreads(), asyncio.Semaphore(self._workers)
        self._overdue: set[asyncio.TimerHandle] = set()

    async def run(self, prompt: Prompt, completion: str) -> float | Awaitable[Any]:
        """Score a completion. Raises UserCodeFailed, or TaskError if no worker will be free again."""
        await self._free.acquire()
        if len(self._overdue) == self._workers:
            self._free.release()  # for the next waiting call
            limit = f"2 * task.reward_timeout_s={self._timeout_s} s, and a thread cannot be ended"
            what = f"all {self._workers} reward threads have been in one call each for more than {limit}"
            way_out = "set task.reward_pool=process, or correct the reward function."
            raise TaskError("tasks", what, way_out=way_out)
        loop = asyncio.get_running_loop()
        alarm: asyncio.TimerHandle = loop.call_later(2 * self._timeout_s, lambda: self._is_overdue(alarm))
        called = loop.run_in_executor(self._threads, call, self._score, prompt, completion)
        called.add_done_callback(lambda call: self._is_back(call, alarm))
        async with _within(self._timeout_s):
            return await asyncio.shield(called)

    def _is_back(self, call: asyncio.Future[Any], alarm: asyncio.TimerHandle) -> None:
        if not call.cancelled():
            call.exception()  # else asyncio would log an unread exception
        alarm.cancel()
        self._overdue.discard(alarm)
        self._free.release()

    def _is_overdue(self, alarm: asyncio.TimerHandle) -> None:
        self._overdue.add(alarm)
        if len(self._overdue) == self._workers:
            self._free.release()


START_LIMIT_S = 120.0
"""Maximum seconds to start a process and build the score function."""


class ProcessPool:
    """At most reward_workers concurrent calls, in processes that are killed at the time limit.

    Life: processes start with the first call and live until aclose(); a killed or dead one is replaced.
        pebble breaks the whole pool if an idle process dies (killed by the kernel for memory): then all are
        replaced and the open calls repeated once.
    Waits: callers wait for a worker. No call outlives the limit plus START_LIMIT_S.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
        from pebble import ProcessPool as PebblePool

        self._timeout_s = config.reward_timeout_s
        self._free = asyncio.Semaphore(config.reward_workers)
        self._make = partial(
            PebblePool,
            max_workers=config.reward_workers,
            initializer=_start,
            initargs=(config, seed),
            context=multiprocessing.get_context("spawn"),
        )
        self._pool = self._make()

    async def run(self, prompt: Prompt, completion: str) -> float:
        """Score a completion. Raises UserCodeFailed, or TaskError if processes cannot start or build the
        score function.
        """
        late = f"did not start within {START_LIMIT_S} s"
        limit_s = self._timeout_s + START_LIMIT_S
        async with self._free, within(limit_s, lambda: self._broken(late)):
            pool = self._pool
            try:
                return await self._run(pool, prompt, completion)
            except RuntimeError:  # includes BrokenProcessPool
                await self._replace(pool)
            try:
                return await self._run(self._pool, prompt, completion)
            except RuntimeError as error:
                what = f"died outside of any call, twice ({error}); memory is the usual cause"
                raise self._broken(what) from error

    async def aclose(self) -> None:
        await self._end(self._pool)

    async def _replace(self, pool: Any) -> None:
        if pool is self._pool:  # else another call has replaced it
            self._pool = self._make()
            await self._end(pool)

    async def _end(self, pool: Any) -> None:
        pool.stop()
        await asyncio.to_thread(pool.join)

    async def _run(self, pool: Any, prompt: Prompt, completion: str) -> float:
        from pebble import ProcessExpired

        try:
            future = pool.schedule(_work, args=(prompt, completion), timeout=self._timeout_s)
            answer: float | str = await asyncio.wrap_future(future)
        except TimeoutError:
            raise UserCodeFailed(TOO_SLOW.format(self._timeout_s)) from None
        except ProcessExpired as error:
            raise UserCodeFailed(f"ended its process (exit code {error.exitcode})") from error
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            what = f"cannot be called in a process: its prompt cannot be sent there: {error}"
            raise UserCodeFailed(what) from error
        if isinstance(answer, str):
            raise self._broken(f"cannot build the score function: {answer}")
        return answer

    def _broken(self, what: str) -> TaskError:
        way_out = "make the task's module importable, fast, in a new process that has no state of this one."
        return TaskError("tasks", f"the reward processes {what}", way_out=way_out)


_score: Score | str = "never started"
"""In a worker process: the score function, or an error message."""


def _start(config: TaskConfig, seed: int) -> None:
    """Build the score function of a worker process, which dies with its parent.

    SIGINT is ignored, so a KeyboardInterrupt here comes from the user's code.
    """
    global _score
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    try:
        with user_code():
            _score = build_score(config, seed)
    except UserCodeFailed as failure:
        _score = str(failure)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(3)


def _work(prompt: Prompt, completion: str) -> float | str:
    """Return the reward, or an error message if no call is possible. Raises UserCodeFailed."""
    if isinstance(_score, str):
        return _score
    answer = call(_score, prompt, completion)
    if isinstance(answer, float):
        return answer
    with user_code():  # a cancellation here is the score function's own failure
        return asyncio.run(call_async(answer))
