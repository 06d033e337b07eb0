"""Score functions in processes of their own, which are ended when they hang. Knows the task's config and one time limit."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import threading
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

from asyncrl.config import TaskConfig
from asyncrl.errors import TaskError
from asyncrl.limits import TimeLimit
from asyncrl.tasks.build import build_score
from asyncrl.tasks.outcome import Outcome, call, call_async, caught
from asyncrl.tasks.task import Score
from asyncrl.types import Prompt

START_LIMIT_S = 120.0
"""Seconds in which a process must have started and built the score function."""


class ProcessPool:
    """At most `config.reward_workers` calls at once, each in a process that is ended when the call takes too long.

    Life:       processes start with the first call and live until aclose(); one that is ended or dies is replaced.
    Waits:      callers wait for a worker, woken by one whose call is over. No call outlives limit plus START_LIMIT_S.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
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
        """Outcome of one call. Raises TaskError if the processes cannot start or cannot build the score function."""
        async with self._free:
            try:
                async with TimeLimit(self._timeout_s + START_LIMIT_S):
                    return await self._run(prompt, completion)
            except TimeoutError:
                raise self._broken(
                    f"gave no answer within task.reward_timeout_s={self._timeout_s} s and {START_LIMIT_S} s for their start",
                    "make the task's module import and its construction quick.",
                ) from None

    async def aclose(self) -> None:
        """End the processes."""
        self._pool.stop()
        await asyncio.to_thread(self._pool.join)

    async def _run(self, prompt: Prompt, completion: str) -> Outcome:
        from pebble import ProcessExpired

        try:
            future: Future[Outcome | str] = self._pool.schedule(_work, args=(prompt, completion), timeout=self._timeout_s)
            answer = await asyncio.wrap_future(future)
        except TimeoutError:
            return Outcome(failure=f"did not return within {self._timeout_s} s (task.reward_timeout_s); its process was ended")
        except ProcessExpired as error:
            return Outcome(failure=f"ended its process (exit code {error.exitcode})")
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return Outcome(failure=f"cannot be called in a process: its prompt cannot be sent there: {error}")
        except (BrokenProcessPool, RuntimeError) as error:
            raise self._broken(
                f"died outside of any call ({error})", "see the log for what ended them; memory is the usual cause."
            ) from error
        if isinstance(answer, str):
            raise self._broken(
                f"cannot build the score function: {answer}", "make it importable in a new process, without the state of this one."
            )
        return answer

    def _broken(self, what: str, way_out: str) -> TaskError:
        return TaskError(
            "tasks", f"the reward processes {what}", rule="task.reward_pool=process scores in processes of its own", way_out=way_out
        )


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
    with caught() as boundary:  # nobody cancels a call in here: what a score function does to its own task is its failure, too
        return asyncio.run(call_async(outcome))
    return Outcome(failure=boundary.failure)
