"""The Task protocol, tasks made of rows, and one call of a score function: a number, or a failure."""

from __future__ import annotations

import asyncio
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import Field, TypeAdapter, ValidationError

from asyncrl.errors import ConfigError
from asyncrl.messages.base import Message
from asyncrl.messages.records import Prompt

Content = str | Sequence[Mapping[str, str]]
"""A prompt as users write it: the user's text, or chat messages with `role` and `content`."""

Score = Callable[[Prompt, str], float | Awaitable[float]]
"""Reward of a completion's text. Pure: from the prompt and the text alone, whatever thread or process it runs
in.
"""


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a task. `answer` and `info` reach the score alone, never the model."""

    content: Content
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class PromptTask(Protocol):
    """What `task.python: module:Class` must offer. Built as `Class(size=..., seed=..., **task.args)`."""

    def __len__(self) -> int:
        """Number of prompts; one epoch."""
        ...

    def prompt(self, index: int) -> str | Item:
        """The prompt at `index` (0 .. len - 1), the same one each time it is asked for. A text is an Item of
        that text.
        """
        ...

    def score(self, prompt: Prompt, completion: str) -> float | Awaitable[float]:
        """Reward of a completion of `prompt`; may be `async def`. An exception is a failed rollout, not a
        reward of 0.
        """
        ...


class _ChatMessage(Message):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Field(strict=True)]


_CHAT = TypeAdapter(Annotated[list[_ChatMessage], Field(min_length=1)])


def as_messages(content: Any, where: str) -> tuple[Mapping[str, str], ...]:
    """The chat messages of a prompt's content; `where` is how an error calls its place.

    Fields that are None are left out (parquet has them). Raises ConfigError if it is neither a text nor a
    list of messages with a known role and a text each.
    """
    chat = content
    if isinstance(content, str):
        chat = [{"role": "user", "content": content}] if content else []
    elif isinstance(content, Sequence):
        chat = [
            {key: value for key, value in message.items() if value is not None}
            if isinstance(message, Mapping)
            else message
            for message in content
        ]
    try:
        _CHAT.validate_python(chat)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{where} is no prompt: {content!r:.160} ({'.'.join(map(str, first['loc']))} {first['msg']})",
            rule="a prompt is a text, or a list of chat messages with `role` and `content`, not empty",
            way_out="correct it, or name the right column as task.prompt_column.",
        ) from error
    return tuple(chat)


class RowTask:
    """A task out of rows: one column is the prompt, one may be the answer, the others are `info`; `score` is
    a function. `place` is what errors call the row at an index.

    Every row is looked at when the task is built, so that a bad one ends the run before it has started.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        place: Callable[[int], str],
        score: Score,
        *,
        prompt_column: str,
        answer_column: str | None,
    ) -> None:
        self.rows, self.score = rows, score
        self.prompt_column, self.answer_column = prompt_column, answer_column
        for index, row in enumerate(rows):
            for column in (prompt_column, answer_column):
                if column is not None and column not in row:
                    raise ConfigError(
                        f"{place(index)} has no column {column}; its columns are {', '.join(map(str, row))}",
                        way_out="set task.prompt_column and task.answer_column (or none) to two of them.",
                    )
            as_messages(row[prompt_column], f"{place(index)}, column {prompt_column}")

    def __repr__(self) -> str:
        return f"<RowTask {len(self)} prompts, {self.prompt_column} -> {self.answer_column}>"

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Item:
        """The row at `index` as an item."""
        info = dict(self.rows[index])
        content = info.pop(self.prompt_column)
        return Item(content, None if self.answer_column is None else info.pop(self.answer_column), info)


LARGEST_REWARD = 1e18
"""Largest absolute value: means, squares and sums of many rewards stay finite in float32. The gateway has the
same limit for the outcomes of harnesses.
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a call of a score function came to: a finite `reward`, or `failure` in words. Plain values: fit to
    cross a process.
    """

    reward: float = math.nan
    failure: str = ""


class caught:  # noqa: N801  reads like contextlib.suppress
    """Keeps an exception of the user's code in `failure`, in words, and goes on. Cancellation of the caller
    and Ctrl-C pass.

    This is the rollout boundary of rewards: what the user's code raises is data about one rollout. So is a
    CancelledError of something that it awaited and that was cancelled elsewhere: asyncio would silently drop
    a task that ends with it.
    """

    failure = ""
    error: BaseException | None = None

    def __enter__(self) -> caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, (Exception, SystemExit, asyncio.CancelledError)):
            return False
        if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
            return False
        frames = traceback.extract_tb(trace)
        place = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
        self.failure, self.error = f"raised {type(error).__name__}: {error}{place}", error
        return True


def _is_being_cancelled() -> bool:
    """Whether the task that this runs in is being cancelled. False in a thread, or outside of a loop."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return False
    return task is not None and task.cancelling() > 0


def call(score: Score, prompt: Prompt, completion: str) -> Scored | Awaitable[Any]:
    """Call `score`. An awaitable is for the caller to await, in call_async."""
    with caught() as boundary:
        value: Any = score(prompt, completion)
        return value if isinstance(value, Awaitable) else as_scored(value)
    return Scored(failure=boundary.failure)


async def call_async(value: Awaitable[Any]) -> Scored:
    """Await what an async score function has returned."""
    with caught() as boundary:
        return as_scored(await value)
    return Scored(failure=boundary.failure)


def as_scored(value: Any) -> Scored:
    """A number as a reward: int, float, bool, numpy's, or an array or tensor with one element. All else is a
    failure.
    """
    number = value
    if hasattr(value, "item"):
        with caught():
            number = value.item()
    if not isinstance(number, numbers.Real):
        hint = "; is a `return` missing?" if value is None else ""
        return Scored(failure=f"returned {value!r:.80} ({type(value).__name__}), not a number{hint}")
    reward = float(number)
    if not abs(reward) <= LARGEST_REWARD:
        return Scored(failure=f"returned {reward}; rewards are finite, and {LARGEST_REWARD:g} at most")
    return Scored(reward)
