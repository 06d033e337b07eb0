"""Score completions within a time limit."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from asyncrl.base.errors import RewardFailure, TaskError
from asyncrl.base.extensions import load_place, rows
from asyncrl.base.failures import FailureKind
from asyncrl.base.signals import END, STOPS, blocked, ignore_stops
from asyncrl.base.user_code import UserCalls
from asyncrl.base.waits import waiting, within
from asyncrl.config import TaskConfig
from asyncrl.messages.records import (
    Completion,
    Prompt,
    Reward,
    by_task,
)
from asyncrl.messages.tokens import BEHAVIOUR, NO_COMPLETION
from asyncrl.messages.worker_api import ChatTokenizer, answer_text
from asyncrl.tasks.rewards import (
    Completions,
    RewardFunction,
    UnreadableAnswer,
    UserCodeFailed,
    call,
    call_async,
    check_spans,
    no_reward,
    optional,
    score_of,
    user_code,
    weighted,
)
from asyncrl.tasks.sources import build_score
from asyncrl.tasks.task import PromptTask

logger = logging.getLogger(__name__)
# A new process imports the user's module, for example torch, before its first call.
# That is not the reward's time.
START_LIMIT_S = 120.0
Client = TypeVar("Client")


class ClientsOf(Protocol):
    """Returns the clients of this class, of the run's servers."""

    def __call__(self, kind: type[Client], /) -> list[Client]: ...


def no_clients(kind: type[Client], /) -> list[Client]:
    return []


class AskedScorer:
    """Asks others for rewards, within limits of its own (ScoredReward)."""

    scores_groups = False

    async def __call__(self, prompt: Prompt, given: str | Completions) -> Any:
        """Return the reward of a completion, or the list of a group. Raises
        UserCodeFailed or RequestRefused (data), or ComponentError.
        """
        raise NotImplementedError

    def gauges(self) -> Mapping[str, float]:
        return {}

    async def aclose(self) -> None:
        """Close its connections."""


class Scorers:
    """A scorer per task."""

    def __init__(
        self,
        tasks: Mapping[str, PromptTask],
        settings: Mapping[str, TaskConfig],
        tokenizer: ChatTokenizer,
        *,
        seed: int,
        warn: Callable[[str], None] = logger.warning,
        clients_of: ClientsOf = no_clients,
    ) -> None:
        self._scorers = {
            name: TaskScorer(
                task,
                settings[name],
                tokenizer,
                seed=seed,
                warn=warn,
                clients_of=clients_of,
            )
            for name, task in tasks.items()
        }

    def of(self, prompt: Prompt) -> TaskScorer:
        return self._scorers[prompt.task]

    def gauges(self) -> dict[str, float]:
        scorers = self._scorers
        return {
            "rollout/abandoned": sum(
                scorer.num_abandoned for scorer in scorers.values()
            ),
            **by_task(
                "perf/rewards_s",
                {name: scorer.busy_s for name, scorer in scorers.items()},
            ),
            **by_task(
                "perf/scoring_s",
                {name: scorer.wait_s for name, scorer in scorers.items()},
            ),
        }

    @property
    def asked(self) -> list[AskedScorer]:
        return [each.asked for each in self._scorers.values() if each.asked]

    async def aclose(self) -> None:
        for scorer in self._scorers.values():
            await scorer.aclose()


def asked_gauges(scorers: Iterable[Scorers]) -> Mapping[str, float]:
    """Return the sums over all AskedScorers; {} with functions only."""
    sums = Counter[str]()
    for each in scorers:
        for asked in each.asked:
            sums.update(asked.gauges())
    return sums


class TaskScorer:
    """Call `task.score` or `score_group` inline, in threads or in processes, by
    `task.reward_pool`.

    A plain function runs at most `reward_workers` times at once; an async function is
    unbounded, except in processes. A call that cannot be ended at its limit keeps
    running and is counted. Failures are RewardFailures, never a reward of 0.
    """

    def __init__(
        self,
        task: PromptTask,
        config: TaskConfig,
        tokenizer: ChatTokenizer,
        *,
        seed: int,
        warn: Callable[[str], None] = logger.warning,
        clients_of: ClientsOf = no_clients,
    ) -> None:
        self.has_score = config.has_score
        self.is_library = config.reward == "math" or config.reasoning_gym is not None
        self.weights: Mapping[str, float] = config.reward_weights
        """Of the reward's parts."""
        self.shows_special = config.special_tokens == "visible"
        self._tokenizer = tokenizer
        self._score, takes_group = score_of(task)
        self.asked: AskedScorer | None = None
        if config.scored_by is not None:
            make = load_place(rows("rewards")[config.scored_by.kind].scorer)
            self.asked = make(config, clients_of)
        if self.asked is not None:
            takes_group = self.asked.scores_groups
        self.scores_groups = self.has_score and takes_group
        """Then score_group is called, not score."""
        self._wants_sampled = bool(optional(self._score, NO_COMPLETION))
        self._is_inline = config.reward_pool == "inline"
        self.busy_s = 0.0
        """Time in plain reward calls, inline or of all reward workers."""
        self.wait_s = 0.0
        """Time of rollouts and groups between question and reward, all together."""
        self._free = asyncio.Semaphore(config.reward_workers)
        self._within_limit = partial(
            within, config.reward_timeout_s, partial(_too_slow, config)
        )
        self._calls = UserCalls(
            config.reward_name,
            error=partial(TaskError, "tasks"),
            warn=warn,
            way_out="limit what the function waits for, or set task.reward_pool=process. In async functions, "
            "write `except Exception:`, not `except:` or `except BaseException:`.",
        )
        self._processes: ProcessPool | None = None
        is_math = config.reward_pool == "auto" and config.uses_math
        if config.has_score and (is_math or config.reward_pool == "process"):
            self._processes = ProcessPool(config, seed)

    @property
    def num_abandoned(self) -> int:
        return self._calls.num_abandoned

    def _timed(
        self,
        prompt: Prompt,
        given: str | Completions,
        asked: Mapping[str, Completion],
    ) -> object:
        start_s = time.perf_counter()
        try:
            return call(self._score, prompt, given, asked)
        finally:
            # a race of threads may lose one call
            self.busy_s += time.perf_counter() - start_s

    def text_of(self, sampled: Completion) -> str:
        """Return the text that the reward sees."""
        return answer_text(
            self._tokenizer, sampled.token_ids, shows_special=self.shows_special
        )

    async def score(self, prompt: Prompt, sampled: Completion) -> Reward | list[float]:
        """Return the reward of a completion, or of each sampled token. Raises
        RewardFailure or UnreadableAnswer (data), or TaskError (ends the run).
        """
        if not self.has_score:
            raise no_reward(prompt)
        text = self.text_of(sampled)
        asked = {"sampled": sampled} if self._wants_sampled else {}
        try:
            reward: Reward | list[float] = await self._call(prompt, text, asked)
            if isinstance(reward, list):
                check_spans(reward, len(sampled.token_ids))
                return reward
            return weighted(reward, self.weights)
        except UnreadableAnswer:
            raise
        except UserCodeFailed as failure:
            raise self._failure(prompt, text, failure) from failure

    async def score_group(
        self, prompt: Prompt, completions: Completions
    ) -> list[Reward | RewardFailure]:
        """Return the rewards of a group, or why a rollout has none; of a None, 0.0.
        Raises like score if the call gave no list of this length.
        """
        try:
            results = await self._call(prompt, completions, {})
        except UserCodeFailed as failure:
            raise self._failure(prompt, completions, failure) from failure
        rewards = list[Reward | RewardFailure]()
        for result, completion in zip(results, completions, strict=True):
            try:
                if isinstance(result, UserCodeFailed):
                    raise result
                has_reward = completion is not None
                rewards.append(weighted(result, self.weights) if has_reward else 0.0)
            except UserCodeFailed as failure:
                rewards.append(self._failure(prompt, completion or "", failure))
        return rewards

    def _failure(
        self, prompt: Prompt, given: str | Completions, failure: UserCodeFailed
    ) -> RewardFailure:
        if isinstance(given, str):
            return RewardFailure(
                f"the reward of prompt {prompt.prompt_id} {failure}",
                rule="a reward is one finite number, a mapping of some, or one for each sampled token",
                way_out=f"correct {self._calls.name}; the completion began {given[:80]!r}.",
                kind=failure.kind,
            )
        return RewardFailure(
            f"the rewards of the group of prompt {prompt.prompt_id} {failure}",
            rule="a group's reward is a list with one finite number for each completion",
            way_out=f"correct {self._calls.name}.",
            kind=failure.kind,
        )

    async def _call(
        self,
        prompt: Prompt,
        given: str | Completions,
        asked: Mapping[str, Completion],
    ) -> Any:
        self._calls.check()
        start_s = time.perf_counter()
        try:
            return await self._ask(prompt, given, asked)
        finally:
            self.wait_s += time.perf_counter() - start_s

    async def _ask(
        self,
        prompt: Prompt,
        given: str | Completions,
        asked: Mapping[str, Completion],
    ) -> object:
        if self.asked is not None:
            return await self.asked(prompt, given)
        result: object = None
        # Before the wait is declared: most inline rewards have none.
        if self._is_inline:
            result = self._timed(prompt, given, asked)
            if type(result) is float or not isinstance(result, Awaitable):
                return result
        with waiting("their rewards", on="the reward function"):
            if self._processes is not None:
                sent = _sent(asked["sampled"]) if asked else NO_COMPLETION
                async with self._free:
                    start_s = time.perf_counter()
                    try:
                        return await self._processes.run(prompt, given, sent)
                    finally:
                        self.busy_s += time.perf_counter() - start_s
            if not self._is_inline:
                async with self._free:
                    timed = partial(self._timed, prompt, given, asked)
                    result = await self._calls.in_thread(timed, self._within_limit())
            # The call of an async function only made its coroutine. It runs in this
            # loop, so its waits occupy no reward worker.
            if not isinstance(result, Awaitable):
                return result
            async with self._within_limit():
                return await self._calls.run(call_async(result, given))

    async def aclose(self) -> None:
        if self._processes is not None:
            await self._processes.end()
        if self.asked is not None:
            await self.asked.aclose()


def _too_slow(config: TaskConfig) -> UserCodeFailed:
    # Of a library too: a busy machine makes it as slow as an answer like 9^(9^9).
    return UserCodeFailed(
        f"did not return within {config.reward_timeout_s} s (task.reward_timeout_s)",
        FailureKind.REWARD_TIMEOUT,
    )


def _sent(sampled: Completion) -> Completion:
    """Return what a reward in another process gets: no prompt, no experts."""
    tokens = sampled.sampled.kept(lambda column: column.name == BEHAVIOUR)
    return replace(sampled, tokens=tokens, num_prompt=0)


class _PoolProcess(multiprocessing.context.SpawnProcess):
    """A process that signals to all processes of a run do not end."""

    def start(self) -> None:
        with blocked(STOPS):  # until _start()
            super().start()

    def terminate(self) -> None:
        if self.pid is not None and self.is_alive():
            os.kill(self.pid, END)


class _PoolContext(multiprocessing.context.SpawnContext):
    Process = _PoolProcess


class ProcessPool:
    """Processes that are killed at the time limit of a call.

    Life: from the first call to end(). If an idle process dies, pebble breaks the pool:
    then it is replaced, and its open calls fail.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
        from pebble import ProcessPool as PebblePool

        self._config = config
        self._make = partial(
            PebblePool,
            max_workers=config.reward_workers,
            initializer=_start,
            initargs=(config, seed),
            # A fork would copy locks that other threads of the controller hold.
            context=_PoolContext(),
        )
        self._pool: Any = self._make()

    async def run(
        self, prompt: Prompt, given: str | Completions, sampled: Completion
    ) -> object:
        """Return what a process computes. Raises UserCodeFailed."""
        from pebble import ProcessExpired

        pool = self._pool
        timeout_s = self._config.reward_timeout_s
        late = partial(
            UserCodeFailed, f"did not start in a process within {START_LIMIT_S} s"
        )
        try:
            # pebble counts its timeout from when a process takes the call. Until then
            # only this limit holds.
            async with within(timeout_s + START_LIMIT_S, late):
                future = pool.schedule(
                    _work, args=(prompt, given, sampled), timeout=timeout_s
                )
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise _too_slow(self._config) from None
        except ProcessExpired as error:
            raise UserCodeFailed(
                f"ended its process (exit code {error.exitcode})"
            ) from error
        except RuntimeError as error:  # includes BrokenProcessPool
            # All open calls of a broken pool fail with this. The first one replaces it.
            if pool is self._pool:
                self._pool = self._make()
                await self.end(pool)
            raise UserCodeFailed(
                f"lost its process outside of any call ({error}); memory is the usual cause"
            ) from error

    async def end(self, pool: Any = None) -> None:
        pool = pool or self._pool
        pool.stop()
        await asyncio.to_thread(pool.join)


_built: RewardFunction | BaseException


def _start(config: TaskConfig, seed: int) -> None:
    global _built
    end = signal.getsignal(signal.SIGTERM)  # pebble's
    ignore_stops()
    signal.signal(END, end)
    # A controller that is killed cannot end its pool.
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    try:
        _built = build_score(config, seed)
    # Kept for _work: there it fails a rollout with its text, while an error here would
    # only end the process.
    except BaseException as error:  # user code may raise anything
        _built = error


def _die_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(3)


def _work(prompt: Prompt, given: str | Completions, sampled: Completion) -> object:
    with user_code():
        if isinstance(_built, BaseException):
            raise _built
        asked = optional(_built, sampled) if isinstance(given, str) else {}
        result = call(_built, prompt, given, asked)
        if isinstance(result, Awaitable):
            return asyncio.run(call_async(result, given))
        return result
