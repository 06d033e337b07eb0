"""One call of a score function, whatever it does: a number, or words for what went wrong. Knows no pool and no config."""

from __future__ import annotations

import asyncio
import math
import numbers
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncrl.tasks.task import Score
from asyncrl.types import Prompt

LARGEST_REWARD = 1e18
"""The mean, the square and the sum of many such are finite in float32. The gateway asks the same of what harnesses say."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of a score function came to: a finite `reward`, or `failure` in words. Plain values: fit to cross a process."""

    reward: float = math.nan
    failure: str = ""


class caught:  # noqa: N801  reads like contextlib.suppress
    """Keeps an exception of the user's code in `failure`, in words, and goes on. Cancellation of whoever runs it, and Ctrl-C, pass.

    This is the rollout boundary of rewards: what the user's code raises is data about one rollout. So is the CancelledError of
    something that it awaited and somebody else cancelled: a task that ends with that one is forgotten in silence.
    """

    def __init__(self) -> None:
        self.failure = ""
        self.error: BaseException | None = None

    def __enter__(self) -> caught:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, (Exception, SystemExit, asyncio.CancelledError)):
            return False
        if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
            return False
        frames = traceback.extract_tb(trace)
        place = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
        self.failure, self.error = f"raised {type(error).__name__}: {error}{place}", error
        return True


def _is_being_cancelled() -> bool:
    """Whether somebody cancels the task that this runs in. False where none runs: in a thread, or outside of a loop."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return False
    return task is not None and task.cancelling() > 0


def call(score: Score, prompt: Prompt, completion: str) -> Outcome | Awaitable[Any]:
    """Call `score`. An awaitable is for the caller to await, in call_async."""
    with caught() as boundary:
        value: Any = score(prompt, completion)
        return value if isinstance(value, Awaitable) else as_outcome(value)
    return Outcome(failure=boundary.failure)


async def call_async(value: Awaitable[Any]) -> Outcome:
    """Await what an async score function has returned."""
    with caught() as boundary:
        return as_outcome(await value)
    return Outcome(failure=boundary.failure)


def as_outcome(value: object) -> Outcome:
    """A number as a reward: int, float, bool, numpy's, or an array or tensor with one element. All else is a failure."""
    number = value
    if hasattr(number, "item") and getattr(number, "size", None) in (1, ()) or type(number).__module__ == "torch":
        with caught():
            number = number.item()  # type: ignore[attr-defined]
    if not isinstance(number, numbers.Real):
        hint = "; is a `return` missing?" if value is None else ""
        return Outcome(failure=f"returned {value!r:.80} ({type(value).__name__}), not a number{hint}")
    reward = float(number)
    if not math.isfinite(reward):
        return Outcome(failure=f"returned {reward}, which is not finite")
    if abs(reward) > LARGEST_REWARD:
        return Outcome(failure=f"returned {reward}; rewards are {LARGEST_REWARD:g} at most")
    return Outcome(reward)
