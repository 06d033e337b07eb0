"""Reward functions: the user's, the `math` reward, their calls, and what they may
return.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import itertools
import logging
import math
import numbers
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache, wraps
from typing import Any, cast

from asyncrl.base.errors import ConfigError, RewardFailure
from asyncrl.base.failures import FailureKind, kind_of_error
from asyncrl.base.user_code import check_call, load_object, raised
from asyncrl.config import TaskConfig
from asyncrl.config.task_config import part_name
from asyncrl.messages.records import (
    LARGEST_NUMBER,
    MAX_METRICS,
    Completion,
    Prompt,
    Reward,
    RewardPart,
    total,
)
from asyncrl.messages.tokens import NO_COMPLETION

# Three digits of exponent at most, as the number is written out in full.
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d{1,3}")

MAX_SPANS = 1024
"""Spans of equal rewards in a completion: each is a sample of the advantage, and
travels as its own object.
"""
Completions = Sequence[str | None]
"""Texts of a group by sample_index; None: failed, or rewarded by its harness."""
RewardFunction = Callable[..., Any]
"""Called with the prompt, the completion's text, and what optional() adds, or with the
prompt and the Completions of a group; runs in any thread or process.
"""


def reward_function(config: TaskConfig) -> RewardFunction:
    if isinstance(config.reward, list):
        return _several(config.reward)
    if isinstance(config.reward, str):
        return _function(config.reward)
    # The harness or a model gives the reward.
    return _no_function


def _function(name: str) -> RewardFunction:
    function: RewardFunction = math_reward
    if name != "math":
        function = load_object(name, "task.reward")
        usage = "reward(prompt, completion, answer)"
        asked = optional(function, NO_COMPLETION)
        if takes_group(function):
            usage = "score_group(prompt, completions, answer)"
            asked = {}
        check_call(
            function, (None, "", None), asked, said=f"task.reward={name}", usage=usage
        )

    # With the function's own parameters, by which takes_group() and optional() know what
    # to pass.
    @wraps(function, updated=())
    def score(prompt: Prompt, given: str | Completions, **asked: Completion) -> object:
        return function(prompt, given, prompt.answer, **asked)

    return score


def _several(names: Sequence[str]) -> RewardFunction:
    """Return a function whose parts are the rewards of the named ones."""
    functions = {part_name(name): _function(name) for name in names}
    if any(map(takes_group, functions.values())):
        raise ConfigError(
            f"task.reward={list(names)} has a function that takes the completions of a group",
            rule="functions of a list take one completion",
            way_out="name it alone, and let it return a list of mappings, each with all parts.",
        )

    def score(prompt: Prompt, completion: str, sampled: Completion) -> object:
        results = dict[str, object]()
        for name, function in functions.items():
            asked = optional(function, sampled)
            try:
                results[name] = function(copy_of(prompt), completion, **asked)
            except UnreadableAnswer:
                results[name] = 0.0
        is_async = any(isinstance(one, Awaitable) for one in results.values())
        return _joined(results) if is_async else results

    return score


async def _joined(results: Mapping[str, object]) -> Mapping[str, object]:
    try:
        return {
            name: await one if isinstance(one, Awaitable) else one
            for name, one in results.items()
        }
    finally:
        for one in results.values():  # those behind one that has raised
            if inspect.iscoroutine(one):
                one.close()


def _no_function(prompt: Prompt, completion: str) -> Reward:
    raise no_reward(prompt)


def takes_group(function: RewardFunction) -> bool:
    """Return whether the second parameter asks for `completions`, the whole group."""
    return [*_parameters(function)][1:2] == ["completions"]


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # not callable, or a builtin
        return {}


def score_of(task: Any) -> tuple[RewardFunction, bool]:
    """Return the task's score function, and whether it scores a whole group."""
    function: RewardFunction | None = getattr(task, "score_group", None)
    if function is not None:
        return function, True
    return task.score, takes_group(task.score)


class UserCodeFailed(Exception):  # noqa: N818  data of one rollout, or turned into a ConfigError
    """Error or invalid return value of user code, as text. Picklable."""

    def __init__(self, what: str, kind: FailureKind = FailureKind.REWARD_CRASH) -> None:
        super().__init__(what)
        self.kind = kind


class UnreadableAnswer(UserCodeFailed):
    """A library's error on the model's answer, which earns 0."""


@contextlib.contextmanager
def user_code(*passed: type[BaseException]) -> Iterator[None]:
    """Turn every exception of user code into UserCodeFailed, except those in `passed`.
    A child that it forked ends here: it must not continue the run.
    """
    process = os.getpid()
    try:
        yield
    # Any exception: a sampled program may raise KeyboardInterrupt.
    except BaseException as error:
        if isinstance(error, (UserCodeFailed, *passed)):
            raise
        failure = kind_of_error(error, FailureKind.REWARD_CRASH)
        raise UserCodeFailed(raised(error), failure) from error
    finally:
        if os.getpid() != process:
            os._exit(0)


def optional(function: RewardFunction, sampled: Completion) -> Mapping[str, Completion]:
    """Return what the function asks for by name, after prompt and completion:
    `sampled`, the ids and logprobs.
    """
    names = [
        one.name
        for place, one in enumerate(_parameters(function).values())
        if one.kind is one.KEYWORD_ONLY
        or (place >= 2 and one.kind is one.POSITIONAL_OR_KEYWORD)
    ]
    return {"sampled": sampled} if "sampled" in names else {}


def call(
    score: RewardFunction,
    prompt: Prompt,
    given: str | Completions,
    asked: Mapping[str, Completion],
) -> Any:
    """Return the result for a completion (as_reward) or a group (as_rewards), or an
    awaitable for call_async. `asked`: see optional(). Raises UserCodeFailed.
    """
    with user_code():
        # Copies: the function may change them, and the next rollout must not see that.
        shown = given if isinstance(given, str) else [*given]
        value = score(copy_of(prompt), shown, **asked)
        if type(value) is float and isinstance(given, str):
            return as_reward(value)  # without the questions of the other types
        return value if isinstance(value, Awaitable) else _result(value, given)


def copy_of(prompt: Prompt) -> Prompt:
    try:
        # Most values are texts. One deepcopy of all takes four times as long, for each
        # rollout.
        messages = tuple(
            [
                {key: _unshared(value) for key, value in message.items()}
                for message in prompt.messages
            ]
        )
        answer = _unshared(prompt.answer)
        info = copy.deepcopy(prompt.info) if prompt.info else {}
    except Exception:  # a task's answer may hold anything, for example a lock
        return prompt
    return Prompt(prompt.prompt_id, messages, answer, info, prompt.num_requeued)


def _unshared(value: Any) -> Any:
    return value if type(value) is str else copy.deepcopy(value)


async def call_async(value: Awaitable[object], given: str | Completions) -> Any:
    """Return the result of an async function, like call(). Raises UserCodeFailed;
    cancellation passes.
    """
    with user_code(asyncio.CancelledError):
        return _result(await value, given)


def _result(value: Any, given: str | Completions) -> Any:
    if not isinstance(given, str):
        return as_rewards(value, given)
    # An array with one element is a number (as_reward).
    if getattr(value, "ndim", 0) == 1 and len(value) != 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return as_reward(value)
    try:
        return [as_number(entry) for entry in value]
    except UserCodeFailed as failure:
        # A list has one reward for each token, and its entry is named.
        if isinstance(value, list):
            raise
        raise _wrong_type(value, "a number") from failure


def check_spans(rewards: Sequence[float], num_tokens: int) -> None:
    """Check the rewards of a completion's tokens. Raises UserCodeFailed."""
    if len(rewards) != num_tokens:
        raise _corrupt(f"{len(rewards)} rewards for {num_tokens} sampled tokens")
    num_spans = sum(1 for _ in itertools.groupby(rewards))
    if num_spans > MAX_SPANS:
        raise _corrupt(f"{num_spans} spans of equal rewards; {MAX_SPANS} at most")


def as_rewards(
    value: object, completions: Completions
) -> list[Reward | UserCodeFailed]:
    """Convert the result of a group. An entry that is not a finite number fails only
    its rollout; the entry of a None is ignored. Raises UserCodeFailed for another
    length or type.
    """
    if hasattr(value, "tolist"):  # an array or tensor
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise _wrong_type(value, "a list of numbers")
    if len(value) != len(completions):
        raise _corrupt(
            f"{len(value)} rewards for {len(completions)} completions: {value!r:.80}"
        )
    rewards = list[Reward | UserCodeFailed]()
    for entry, completion in zip(value, completions, strict=True):
        try:
            rewards.append(0.0 if completion is None else as_reward(entry))
        except UserCodeFailed as failure:
            rewards.append(failure)
    return rewards


def as_reward(value: object) -> Reward:
    """Convert a number, or a mapping of parts: numbers, or None for one that does not
    apply. Raises UserCodeFailed.
    """
    if not isinstance(value, Mapping):
        return as_number(value)
    if len(value) > MAX_METRICS or not all(isinstance(n, str) and n for n in value):
        raise _corrupt(
            f"{dict(value)!r:.80}; the names of parts are texts, and {MAX_METRICS} at most"
        )
    parts = dict[str, RewardPart]()
    for name, given in value.items():
        part = given if isinstance(given, RewardPart) else RewardPart(given)
        try:
            number = None if part.value is None else as_number(part.value)
            weight = as_number(part.weight)
        except UserCodeFailed as failure:
            why = str(failure).removeprefix("returned ")
            raise _corrupt(f"for its part {name} {why}") from failure
        parts[name] = RewardPart(number, weight)
    if all(part.value is None for part in parts.values()):
        raise _corrupt(f"{dict(value)!r:.80}, of which no part is a number")
    return parts


def weighted(reward: Reward, weights: Mapping[str, float]) -> Reward:
    """Return a reward whose parts have these weights, and others their own. Raises
    UserCodeFailed for a weight of an unknown part.
    """
    given = {} if isinstance(reward, float) else reward
    parts = {
        name: part._replace(weight=weights.get(name, part.weight))
        for name, part in given.items()
    }
    if unknown := sorted(weights.keys() - parts.keys()):
        said = f"the parts {', '.join(parts)}" if parts else "one number"
        raise _corrupt(f"{said}; task.reward_weights names {', '.join(unknown)}")
    as_number(total(parts))  # may be too large
    return parts or reward


def as_number(value: object) -> float:
    """Convert a number, or an array or tensor with one element. Raises UserCodeFailed."""
    number = value
    if hasattr(value, "item"):
        with contextlib.suppress(Exception):
            number = value.item()
    if not isinstance(number, float | numbers.Real):
        raise _wrong_type(value, "a number")
    # Not `abs(number) > ...`, which is false for nan.
    if not abs(cast(float, number)) <= LARGEST_NUMBER:
        limit = f"rewards are finite, and {LARGEST_NUMBER:g} at most"
        raise _corrupt(f"{number!s:.80}; {limit}")
    return float(number)


def _wrong_type(value: object, expected: str) -> UserCodeFailed:
    hint = "; is a `return` missing?" if value is None else ""
    return _corrupt(f"{value!r:.80} ({type(value).__name__}), not {expected}{hint}")


def _corrupt(value: str) -> UserCodeFailed:
    return UserCodeFailed(f"returned {value}", FailureKind.CORRUPT_RESULT)


def no_reward(prompt: Prompt) -> RewardFailure:
    return RewardFailure(
        f"prompt {prompt.prompt_id}: no reward came with the rollout, and the task has no reward function",
        rule="each rollout needs a reward from its harness or task",
        way_out="return a reward from the harness, or set task.reward.",
    )


def math_reward(prompt: Prompt, completion: str, answer: object) -> float:
    """Return 1.0 if the completion's answer equals `answer` (a number, expression or
    LaTeX), else 0.0. Raises ValueError, or UnreadableAnswer.

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
    try:
        said = parse(completion, parsing_timeout=None)
        return float(verify([*gold], said, timeout_seconds=None))
    except Exception as error:  # of sympy, for example
        raise UnreadableAnswer(raised(error)) from error


FINAL_ANSWER = "####"
"""GSM8K's mark between a solution and its answer."""
LEAD_IN = re.compile(
    r"^(?:the )?(?:final |correct )?(?:answer|result|solution)\b(?: is| =|:)*\s*(?=\S)",
    re.IGNORECASE,
)
FUNCTION = re.compile(r"(?<![\\A-Za-z])(?=(?:sin|cos|tan|log|ln|pi)\b)")
"""Place of a name that math-verify reads as a product of letters."""
AMOUNT = re.compile(
    r"""([-+]?[\d.,]*\d(?:/\d+)?)
    (?:\s*(?:[ckm]?m|k?g|ft|in|lbs?|oz|mi|h|hrs?|s|min|sec|mph|cup|day)(?:/[a-z]+)?
    |(?:\s+(?:per|of|sq\.?|[A-Za-z]{4,})){1,3})\.?""",
    re.VERBOSE,
)
"""A number with its unit, which does not count."""
SENTENCE = re.compile(
    r"\b(?:and|or|to|of|[A-Za-z]{4,})\b|[A-Za-z]\.|\d\s+[A-Za-z]{2,3}\b"
)
NOT_ONE_VALUE = re.compile(
    r"""--|\\aleph
    |\.\.\.|\u2026|\\[lc]?dots|\.\d*\s*(?:\\overline|\\bar|\\dot|\(\d+\))
    |\\equiv|mod\b
    |\d\s+\d+\s*/\s*\d                                  # a mixed number: half of it
    |^\s*\d+(?:\s*[-\u2013\u2014]\s*\d+)+\s*$           # a range or a date: a difference
    |:\s*0\d|\d\s*:\s*\d+\s*:|\d\s*[ap]\.?m\b           # a time, or a ratio of three
    |\d\s*x\s*10\s*\^                                   # a variable x
    |\d.*\b(?:and\sa|half|halves|thirds?|quarters?|dozens?|hundred|thousand|[mb]illion|trillion)\b
    |\d.*\b(?:squared|cubed|plus|minus|over|one|two|three|four|five|six|seven|eight|nine|ten)\b
    |\\boxed.*\}[^{}]*\d[^{}]*$
    |\d\s*\\(?:text|mbox|mathrm|textrm)\{(?!\s*(?:and|or|,))[^}]*\}\s*\d
    |\\(?:text|mbox|mathrm|textrm)\{(?!\s*(?:and|or))[^}]*[A-Za-z]{2}[^}]*\}\s*\$?-?\d
    |[\u221a\u00d7\u00f7]""",
    re.VERBOSE | re.IGNORECASE,
)
"""math-verify reads another value of such a reference, or only a part."""
MARKED = re.compile(r"\\boxed|\\\[|\\\(|\$.*\$", re.DOTALL)
"""Text with marked mathematics. In other texts math-verify sees only the first number of
LaTeX.
"""


def reference_text(answer: Any) -> str:
    """Return a text or a finite number as a text that math-verify reads as one value.
    Raises ValueError if it cannot, also for a text without an answer.
    """
    is_number = type(answer) in (int, float, Decimal) and abs(answer) < math.inf
    if not is_number and not isinstance(answer, str):
        raise ValueError(
            f"the reference answer {answer!r:.80} is neither a text nor a finite number"
        )
    text = str(answer).rpartition(FINAL_ANSWER)[2].strip()
    if not text:
        raise ValueError(f"the reference answer {answer!r:.80} is empty")
    if SCIENTIFIC.fullmatch(text):  # math-verify reads 1e5 as 5 times e
        return f"{Decimal(text):f}"
    text = re.sub(r"\\\$|[€£]", "", LEAD_IN.sub("", text))
    text = re.sub(r"\s*percent\b", r"\\%", text)
    if text.count("$") == 1:  # a currency
        text = text.replace("$", "")
    # A solution ends with its answer.
    unread = text[max(0, text.rfind("\\boxed")) :]
    is_foreign = any(sign.isnumeric() and not sign.isascii() for sign in unread)
    is_sentence = False
    if amount := AMOUNT.fullmatch(text):
        text = amount[1]
    elif "\\" not in text:
        text = FUNCTION.sub(r"\\", text)
        words = re.sub(r"\$[^$]*\$", "", text)
        is_sentence = bool(re.search(r"\d", words) and SENTENCE.search(words))
    if is_foreign or is_sentence or NOT_ONE_VALUE.search(unread):
        raise ValueError(
            f"the reference answer {answer!r:.80} is not one value for math-verify; write a number, an "
            "expression or LaTeX, or compare it in a reward function of your own (docs/rewards.md)"
        )
    return text


# The rollouts of a group share one reference answer.
@lru_cache(maxsize=4096)
def _gold(text: str) -> tuple[object, ...]:
    """Parse the text of a reference."""
    from math_verify import parse

    # It warns that time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found = parse(text if MARKED.search(text) else f"${text}$", parsing_timeout=None)
    # unparsed text is a str
    is_read = any(not isinstance(reading, str) for reading in found)
    return tuple(found) if is_read else ()
