"""Try a task's reward on its reference answer, an empty one, and some rows."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import threading
import time
import warnings
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig, TaskConfig
from asyncrl.config.run_config import key_of
from asyncrl.job.check.config_warnings import tried_prompts
from asyncrl.job.check.found import Found
from asyncrl.messages.records import (
    Prompt,
    Reward,
)
from asyncrl.messages.tokens import NO_COMPLETION
from asyncrl.tasks.rewards import (
    UnreadableAnswer,
    UserCodeFailed,
    call,
    call_async,
    check_spans,
    optional,
    score_of,
    weighted,
)
from asyncrl.tasks.task import PromptTask

TriedReward = Reward | list[float] | UserCodeFailed
"""What a trial of a reward gave."""
MAX_SHOWN = 2000
TRIAL_S = 10.0
"""Seconds for a trial of a reward."""


def try_prompt(
    config: RunConfig, found: Found, name: str, prompt: Prompt
) -> Iterator[str]:
    """Yield the prompt as the model reads it, and rewards of its reference answer and
    of an empty one. Raises ConfigError if the reward returns no numbers.
    """
    key = key_of("task", name)
    settings = config.tasks[name]
    if found.tokenizer is not None:
        yield f"{key}: the first prompt is {found.tokenizer.render(prompt.messages)[:MAX_SHOWN]!r}"
    if config.generators[name].is_harness or not settings.has_score:
        return
    if settings.scored_by is not None:
        return
    task = found.tasks[name]
    texts = [*_reference(settings, prompt), ""]
    rewards = try_reward(task, prompt, texts, settings.reward_weights)
    source = f"{key}: the reward {', '.join(settings.functions) or settings.called}"
    shown = {
        text[:60]: _shown(reward) for text, reward in zip(texts, rewards, strict=False)
    }
    yield f"{key}: rewards of the reference answer, if it is a text or number, and of an empty one: {shown}"
    faults = [str(reward) for reward in rewards if isinstance(reward, UserCodeFailed)]
    if len(rewards) < len(texts):
        yield f"warning: {source} takes more than {TRIAL_S:g} s; it is not checked"
    # Only a wrong return value is surely a fault, and the end of the process, which may
    # be the run's. An exception may be meant: it fails the rollout, for example without
    # an answer.
    elif len(faults) == len(texts) and all(
        fault.startswith(("returned", "ended")) for fault in faults
    ):
        what = f"{source} {faults[0]}"
        raise ConfigError(
            what,
            rule="a reward is one finite number, or a mapping of some by name",
            way_out="return a number for each completion, such as 1.0, or correct task.reward_weights.",
        )
    elif len(faults) == len(texts):
        yield f"warning: {source} {faults[0]} for each answer that was tried: such rollouts fail"
    elif [] not in rewards and len({*map(str, rewards)}) < len(texts):
        yield f"warning: {source} does not tell the two answers apart; is it right?"
    else:
        yield from _try_rows(settings, task, source)


def _try_rows(settings: TaskConfig, task: PromptTask, source: str) -> Iterator[str]:
    """Yield a warning if the reward fails for a row."""
    started_s = time.monotonic()
    for prompt in tried_prompts(task):
        texts = [*_reference(settings, prompt), ""]
        rewards = try_reward(task, prompt, texts, settings.reward_weights)
        for text, reward in zip(texts, rewards, strict=False):
            if isinstance(reward, UserCodeFailed):
                row = f"{text!r:.60} in a row with the answer {prompt.answer!r:.60}"
                yield f"warning: {source} {reward} for {row}: such rollouts fail"
                return
        if time.monotonic() - started_s > TRIAL_S:
            return


def _reference(settings: TaskConfig, prompt: Prompt) -> list[str]:
    """Return the reference answer if it is a text or number."""
    answer = prompt.answer["answer"] if settings.reasoning_gym else prompt.answer
    with suppress(ValueError):  # of an integer with more than 4,300 digits
        if isinstance(answer, str | int | float | Decimal):
            return [str(answer)]
    return []


def _shown(reward: TriedReward) -> object:
    if reward == []:  # of a function that scores tokens; the trial has no tokens
        return "one per token"
    if isinstance(reward, Mapping):
        return {name: part.value for name, part in reward.items()}
    return str(reward) if isinstance(reward, UserCodeFailed) else reward


def try_reward(
    task: PromptTask,
    prompt: Prompt,
    texts: Sequence[str],
    weights: Mapping[str, float] = {},
) -> list[TriedReward]:
    """Return the reward of each text, or its failure; [] after TRIAL_S."""
    function, takes_group = score_of(task)
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def score() -> None:
        rewards = list[TriedReward]()
        for given in [texts] if takes_group else texts:
            asked = {} if takes_group else optional(function, NO_COMPLETION)
            try:
                result = call(function, prompt, given, asked)
                if isinstance(result, Awaitable):
                    result = asyncio.run(call_async(result, given))
                if takes_group:
                    rewards.extend(result)
                    continue
                if isinstance(result, list):
                    check_spans(result, num_tokens=0)
                else:
                    result = weighted(result, weights)
                rewards.append(result)
            except UnreadableAnswer:
                rewards.append(0.0)
            except UserCodeFailed as failure:
                rewards.extend([failure] * (len(texts) if takes_group else 1))
        sending.send(rewards)

    def score_in_thread() -> None:
        """Score in a thread, as a run does: a function may need the main thread."""
        # Only of tasks that the function started.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        thread = threading.Thread(target=score)
        thread.start()
        thread.join()

    # A reward may end or change its process, or never return. The process is a fork:
    # what a task keeps in memory need not be picklable.
    child = multiprocessing.get_context("fork").Process(target=score_in_thread)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads that hold locks: then the trial meets its limit.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sending.close()
    try:
        rewards = receiving.recv() if receiving.poll(TRIAL_S) else []
        child.join(1.0)  # it prints what the function printed
    except EOFError:
        child.join()
        failure = UserCodeFailed(f"ended its process (exit code {child.exitcode})")
        rewards = [failure] * len(texts)
    finally:
        child.kill()
        child.join()
        receiving.close()
    return rewards
