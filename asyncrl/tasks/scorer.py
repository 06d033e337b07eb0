"""Score completions within a time limit."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from asyncrl.base.errors import RewardFailure, TaskError
from asyncrl.base.user_code import UserCalls
from asyncrl.base.waits import waiting, within
from asyncrl.config import TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks.from_config import build_score
from asyncrl.tasks.task import PromptTask, Score, UserCodeFailed, call, call_async, no_reward, user_code

logger = logging.getLogger(__name__)


class TaskScorer:
    """Call `task.score` inline, in threads or in processes, by `task.reward_pool`.

    A plain function runs at most `reward_workers` times at once; an async function is unbounded, except in
    processes. A call that cannot be ended at its limit keeps running and is counted. Failures are
    RewardFailures, never a reward of 0.
    """

    def __init__(
        self, task: PromptTask, config: TaskConfig, *, seed: int, warn: Callable[[str], None] = logger.warning
    ) -> None:
        self._score = task.score
        self._has_score = config.has_score
        self._shows_special = config.special_tokens == "visible"
        self._timeout_s = config.reward_timeout_s
        self._is_inline = config.reward_pool == "inline"
        self._free = asyncio.Semaphore(config.reward_workers)
        self._calls = UserCalls(
            f"the reward function {config.reward or config.python}",
            error=partial(TaskError, "tasks"),
            warn=warn,
            way_out="limit what the function waits for, or set task.reward_pool=process. In async functions, "
            "write `except Exception:`, not `except:` or `except BaseException:`.",
        )
        self._processes: ProcessPool | None = None
        is_math = config.reward_pool == "auto" and config.reward == "math"
        if config.has_score and (is_math or config.reward_pool == "process"):
            self._processes = ProcessPool(config, seed)

    @property
    def num_abandoned(self) -> int:
        return self._calls.num_abandoned

    def scores(self, prompt: Prompt) -> bool:
        return self._has_score

    def shows_special(self, prompt: Prompt) -> bool:
        return self._shows_special

    async def score(self, prompt: Prompt, completion: str) -> float:
        """Raises RewardFailure (data), or TaskError (ends the run)."""
        if not self._has_score:
            raise no_reward(prompt)
        try:
            self._calls.check()
            reward: float | Awaitable[Any]
            if self._is_inline:
                reward = call(self._score, prompt, completion)
                if isinstance(reward, float):
                    return reward
            with waiting("their rewards", on="the reward function"):
                if self._processes is not None:
                    async with self._free:
                        return await self._processes.run(prompt, completion)
                if not self._is_inline:
                    reward = await self._in_thread(prompt, completion)
                if isinstance(reward, float):
                    return reward
                async with within(self._timeout_s, self._too_slow):
                    return await self._calls.run(call_async(reward))
        except UserCodeFailed as failure:
            what = f"the reward of prompt {prompt.prompt_id} {failure}"
            way_out = f"correct the reward function; the completion began {completion[:80]!r}."
            raise RewardFailure(what, rule="a reward is one finite number", way_out=way_out) from failure

    async def aclose(self) -> None:
        if self._processes is not None:
            await self._processes.aclose()

    async def _in_thread(self, prompt: Prompt, completion: str) -> float | Awaitable[Any]:
        async with self._free:
            loop = asyncio.get_running_loop()
            called = loop.run_in_executor(None, call, self._score, prompt, completion)
            try:
                async with within(self._timeout_s, self._too_slow):
                    return await asyncio.shield(called)
            except UserCodeFailed:
                if not called.done():
                    self._calls.left_running(called)
                raise

    def _too_slow(self) -> UserCodeFailed:
        return _too_slow(self._timeout_s)


def _too_slow(timeout_s: float) -> UserCodeFailed:
    return UserCodeFailed(f"did not return within {timeout_s} s (task.reward_timeout_s)")


class Scorers:
    def __init__(
        self,
        tasks: Mapping[str, PromptTask],
        settings: Mapping[str, TaskConfig],
        *,
        seed: int,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._scorers = {
            name: TaskScorer(task, settings[name], seed=seed, warn=warn) for name, task in tasks.items()
        }

    def gauges(self) -> dict[str, float]:
        return {"rollout/abandoned": sum(scorer.num_abandoned for scorer in self._scorers.values())}

    def scores(self, prompt: Prompt) -> bool:
        return self._scorers[prompt.task].scores(prompt)

    def shows_special(self, prompt: Prompt) -> bool:
        return self._scorers[prompt.task].shows_special(prompt)

    async def score(self, prompt: Prompt, completion: str) -> float:
        return await self._scorers[prompt.task].score(prompt, completion)

    async def aclose(self) -> None:
        for scorer in self._scorers.values():
            await scorer.aclose()


START_LIMIT_S = 120.0


class ProcessPool:
    """Processes that are killed at the time limit of a call.

    Life: from the first call to aclose(). If an idle process dies, pebble breaks the pool: then it is
    replaced, and its open calls fail.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
        from pebble import ProcessPool as PebblePool

        self._timeout_s = config.reward_timeout_s
        self._make = partial(
            PebblePool,
            max_workers=config.reward_workers,
            initializer=_start,
            initargs=(config, seed),
            context=multiprocessing.get_context("spawn"),
        )
        self._pool = self._make()

    async def run(self, prompt: Prompt, completion: str) -> float:
        """Raises UserCodeFailed, or TaskError if no process can build the function."""
        from pebble import ProcessExpired

        pool = self._pool
        late = partial(UserCodeFailed, f"did not start in a process within {START_LIMIT_S} s")
        try:
            async with within(self._timeout_s + START_LIMIT_S, late):
                future = pool.schedule(_work, args=(prompt, completion), timeout=self._timeout_s)
                reward: float | str = await asyncio.wrap_future(future)
        except TimeoutError:
            raise _too_slow(self._timeout_s) from None
        except ProcessExpired as error:
            raise UserCodeFailed(f"ended its process (exit code {error.exitcode})") from error
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            what = f"cannot be called in a process: its prompt cannot be sent there: {error}"
            raise UserCodeFailed(what) from error
        except RuntimeError as error:  # includes BrokenProcessPool
            if pool is self._pool:
                self._pool = self._make()
                await self._end(pool)
            what = f"lost its process outside of any call ({error}); memory is the usual cause"
            raise UserCodeFailed(what) from error
        if isinstance(reward, str):
            what = f"the reward processes cannot build the score function: {reward}"
            way_out = "make the task's module importable in a new process."
            raise TaskError("tasks", what, way_out=way_out)
        return reward

    async def aclose(self) -> None:
        await self._end(self._pool)

    async def _end(self, pool: Any) -> None:
        pool.stop()
        await asyncio.to_thread(pool.join)


_score: Score | str = "never started"


def _start(config: TaskConfig, seed: int) -> None:
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
    if isinstance(_score, str):
        return _score
    reward = call(_score, prompt, completion)
    if isinstance(reward, float):
        return reward
    with user_code():
        return asyncio.run(call_async(reward))
