"""Reward functions: the user's, the `math` reward, their calls, and what they may
return.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import numbers
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from asyncrl.base.errors import RewardFailure
from asyncrl.base.user_code import check_call, load_object, raised
from asyncrl.config import TaskConfig
from asyncrl.messages.records import LARGEST_NUMBER, Completion, Prompt
from asyncrl.messages.tokens import NO_COMPLETION

# Three digits of exponent at most, as _gold writes the number out in full.
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d{1,3}")

Reward = float
"""Return value of a reward function."""
RewardFunction = Callable[..., Reward | Awaitable[Reward]]
"""Called with the prompt, the completion's text, and what optional() adds; runs in any
thread or process.
"""


def reward_function(config: TaskConfig) -> RewardFunction:
    function: Any = math_reward
    if config.reward not in ("math", None):
        function = load_object(config.reward, "task.reward")
        said = f"task.reward={config.reward}"
        usage = "reward(prompt, completion, answer)"
        check_call(
            function,
            (None, "", None),
            optional(function, NO_COMPLETION, 3),
            said=said,
            usage=usage,
        )

    def score(prompt: Prompt, completion: str) -> Any:
        if config.reward is None:
            raise no_reward(prompt)
        return function(prompt, completion, prompt.answer)

    def score_sampled(prompt: Prompt, completion: str, *, sampled: Completion) -> Any:
        return function(prompt, completion, prompt.answer, sampled=sampled)

    return score_sampled if optional(function, NO_COMPLETION, 3) else score


class UserCodeFailed(Exception):  # noqa: N818  data of one rollout, or turned into a ConfigError
    """Error or invalid return value of user code, as text. Picklable."""


@contextlib.contextmanager
def user_code(*passed: type[BaseException]) -> Iterator[None]:
    """Turn every exception of user code into UserCodeFailed, except those in `passed`.
    A child that it forked ends here: it must not continue the run.
    """
    process = os.getpid()
    try:
        yield
    except BaseException as error:  # a sampled program may raise KeyboardInterrupt
        if isinstance(error, (UserCodeFailed, *passed)):
            raise
        raise UserCodeFailed(raised(error)) from error
    finally:
        if os.getpid() != process:
            os._exit(0)


def optional(
    function: Any, sampled: Completion, num_others: int = 2
) -> Mapping[str, Any]:
    """Return what the function asks for by name, after `num_others` positional
    arguments: `sampled`, the ids and logprobs.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not callable, or a builtin
        return {}
    names = [
        one.name
        for one in parameters[num_others:]
        if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    names += [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    return {"sampled": sampled} if "sampled" in names else {}


def call(
    score: RewardFunction, prompt: Prompt, text: str, asked: Mapping[str, Any]
) -> Reward | Awaitable[Any]:
    """Return the reward, or an awaitable for call_async. `asked`: see optional().
    Raises UserCodeFailed.
    """
    with user_code():
        value: Any = score(prompt, text, **asked)
        return value if isinstance(value, Awaitable) else as_reward(value)


async def call_async(value: Awaitable[Any]) -> Reward:
    """Return the reward of an async function. Raises UserCodeFailed; cancellation
    passes.
    """
    with user_code(asyncio.CancelledError):
        return as_reward(await value)


def as_reward(value: Any) -> Reward:
    """Convert a number, or an array or tensor with one element. Raises UserCodeFailed."""
    number = value
    if hasattr(value, "item"):
        with contextlib.suppress(Exception):
            number = value.item()
    if not isinstance(number, numbers.Real):
        hint = "; is a `return` missing?" if value is None else ""
        raise UserCodeFailed(
            f"returned {value!r:.80} ({type(value).__name__}), not a number{hint}"
        )
    reward = float(number)
    # Not `abs(reward) > ...`, which is false for nan.
    if not abs(reward) <= LARGEST_NUMBER:
        raise UserCodeFailed(
            f"returned {reward}; rewards are finite, and {LARGEST_NUMBER:g} at most"
        )
    return reward


def no_reward(prompt: Prompt) -> RewardFailure:
    return RewardFailure(
        f"prompt {prompt.prompt_id}: no reward came with the rollout, and the task has no reward function",
        rule="each rollout needs a reward from its harness, verifiers environment or task",
        way_out="return a reward from the harness, or set task.reward.",
    )


def math_reward(prompt: Prompt, completion: str, answer: Any) -> float:
    """Return 1.0 if the completion's answer equals `answer` (a number, expression or
    LaTeX), else 0.0. Raises ValueError.

    math-verify (https://github.com/huggingface/Math-Verify) limits time by signals,
    which need the main thread, so the scorer's limit applies. Evaluating 9^(9^9) would
    hold the interpreter for hours, so `math` runs in processes by default.
    """
    from math_verify import parse, verify

    gold = _gold(reference_text(answer))
    if not gold:
        raise ValueError(
            f"math-verify cannot read the reference answer {answer!r:.80}; correct that row"
        )
    return float(
        verify(
            list(gold), parse(completion, parsing_timeout=None), timeout_seconds=None
        )
    )


def reference_text(answer: Any) -> str:
    """Return a text or a finite number as text. Raises ValueError."""
    is_number = type(answer) in (int, float, Decimal) and abs(answer) < math.inf
    if not is_number and not isinstance(answer, str):
        raise ValueError(
            f"the reference answer {answer!r:.80} is neither a text nor a finite number"
        )
    return str(answer)


# The rollouts of a group share one reference answer.
@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    """Parse the reference answer, after #### if any (GSM8K).

    Without dollars, math-verify sees only the first number of LaTeX.
    """
    from math_verify import parse

    # It warns that time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = answer.rpartition("####")[2].strip()
    if SCIENTIFIC.fullmatch(answer):  # math-verify reads 1e5 as 5 times e
        answer = f"{Decimal(answer):f}"
    readings = [f"${answer}$", answer]
    if any(mark in answer for mark in ("$", "\\boxed", "\\[", "\\(")):
        readings = [answer]
    elif "\\" not in answer and re.search(r"\b[A-Za-z]{2,}\b", answer):  # a sentence
        readings.reverse()
    for text in readings:
        found = parse(text, parsing_timeout=None)
        # unparsed text is a str
        if any(not isinstance(reading, str) for reading in found):
            return tuple(found)
    return ()
