"""Turns a completion into a reward, off the event loop and within a limit. Knows no engine and no group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from asyncrl.config import TaskConfig
from asyncrl.errors import RewardFailure, TaskError
from asyncrl.limits import TimeLimit
from asyncrl.tasks.outcome import Outcome, call, call_async
from asyncrl.tasks.process_pool import ProcessPool
from asyncrl.tasks.task import Task
from asyncrl.tasks.thread_pool import ThreadPool
from asyncrl.tasks.verifiers_env import no_reward
from asyncrl.types import Prompt
from asyncrl.user_calls import UserCalls

logger = logging.getLogger(__name__)


class TaskScorer:
    """The Scorer of a run: `task.score` inline, in threads or in processes, as `task.reward_pool` says.

    An async score function is awaited on the event loop, with the same limit and no bound on how many at once (in
    `process` it runs in a process like any other). A call that does not end when it is cancelled is given up. Whatever goes wrong is a
    RewardFailure, never a reward of 0; so is a task that leaves the rewards to its harness, which gave none.
    """

    def __init__(self, task: Task, config: TaskConfig, *, seed: int, warn: Callable[[str], None] = logger.warning) -> None:
        kind = config.reward_pool
        if kind == "auto":
            kind = "process" if config.reward == "math" else "thread"
        self._task, self._kind, self._timeout_s = task, kind, config.reward_timeout_s
        self._has_score = config.has_score
        self._calls = UserCalls(f"the reward function {config.reward or config.python}", error=partial(TaskError, "tasks"), warn=warn)
        self._threads = ThreadPool(task.score, workers=config.reward_workers, timeout_s=self._timeout_s)
        self._processes = ProcessPool(config, seed) if kind == "process" and config.has_score else None

    def __repr__(self) -> str:
        return f"<TaskScorer {self._kind} {self._task!r}>"

    @property
    def num_abandoned(self) -> int:
        """Calls so far that were given up because they did not end when they were cancelled."""
        return self._calls.num_abandoned

    async def score(self, prompt: Prompt, completion: str) -> float:
        """A finite reward. Raises RewardFailure (data), or TaskError if nothing can be scored any more (ends the run)."""
        if not self._has_score:
            raise no_reward(prompt)
        outcome = await self._outcome(prompt, completion)
        if outcome.failure:
            raise RewardFailure(
                f"the reward of prompt {prompt.prompt_id} {outcome.failure}",
                rule="a reward is one finite number",
                way_out="mend the reward function if this repeats; the completion began " + repr(completion[:80]) + ".",
            )
        return outcome.reward

    async def aclose(self) -> None:
        """End the processes; idempotent."""
        self._threads.close_nowait()
        if self._processes is not None:
            await self._processes.aclose()

    async def _outcome(self, prompt: Prompt, completion: str) -> Outcome:
        if self._processes is not None:
            return await self._processes.run(prompt, completion)
        self._calls.check()
        if self._kind == "thread":
            answer = await self._threads.run(prompt, completion)
        else:
            answer = call(self._task.score, prompt, completion)
        if isinstance(answer, Outcome):
            return answer
        try:
            async with TimeLimit(self._timeout_s):
                return await self._calls.run(call_async(answer))
        except TimeoutError:
            return Outcome(failure=f"did not return within {self._timeout_s} s (task.reward_timeout_s)")
