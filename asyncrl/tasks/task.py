"""What a task is, tasks out of rows, and one call of a score function: a number, or words for what failed."""

from __future__ import annotations

import asyncio
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from asyncrl.errors import ConfigError
from asyncrl.messages.records import Prompt

Content = str | Sequence[Mapping[str, str]]
"""A prompt as users write it: the user's text, or chat messages with `role` and `content`."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of chat messages, as the gateway takes them too."""

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
class Task(Protocol):
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


def as_messages(content: object, where: str) -> tuple[Mapping[str, str], ...]:
    """The chat messages of a prompt's content; `where` is how an error calls its place.

    Raises ConfigError if it is neither a text nor a list of messages with a known role and a text each.
    """
    if isinstance(content, str):
        if not content:
            raise _not_a_prompt(where, "an empty text")
        return ({"role": "user", "content": content},)
    if not isinstance(content, Sequence) or not content:
        raise _not_a_prompt(where, f"{content!r:.80} ({type(content).__name__})")
    messages = []
    for number, message in enumerate(content):
        if not isinstance(message, Mapping):
            raise _not_a_prompt(where, f"message {number} is {message!r:.80}")
        used = {key: value for key, value in message.items() if value is not None}
        if set(used) != {"role", "content"} or not all(isinstance(value, str) for value in used.values()):
            raise _not_a_prompt(where, f"message {number} is {used!r:.160}")
        if used["role"] not in ROLES:
            raise ConfigError(
                f"{where} is no prompt: message {number} has the role {used['role']!r:.80}",
                rule=f"roles are {', '.join(ROLES)}",
                way_out="correct the role: most chat templates write any word, and the model then reads one "
                "that it was never taught.",
            )
        messages.append(used)
    return tuple(messages)


def _not_a_prompt(where: str, found: str) -> ConfigError:
    return ConfigError(
        f"{where} is no prompt: {found}",
        rule="a prompt is a text that is not empty, or a list of chat messages with a text as `role` and as "
        "`content`",
        way_out="correct it, or name the right column as task.prompt_column.",
    )


class Rows:
    """Rows, and for messages what `place` calls the row at an index."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], place: Callable[[int], str]) -> None:
        self.rows, self.place = rows, place

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rows[index]


class RowTask:
    """A task out of rows: one column is the prompt, one may be the answer, the others are `info`; `score` is
    a function.

    Every row is looked at when the task is built, so that a bad one ends the run before it has started.
    """

    def __init__(self, rows: Rows, score: Score, *, prompt_column: str, answer_column: str | None) -> None:
        self.rows, self._score = rows, score
        self.prompt_column, self.answer_column = prompt_column, answer_column
        for index in range(len(rows)):
            self._check(index)

    def __repr__(self) -> str:
        return f"<RowTask {len(self)} prompts, {self.prompt_column} -> {self.answer_column}>"

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Item:
        """The row at `index` as an item."""
        row = self.rows[index]
        named = (self.prompt_column, self.answer_column)
        return Item(
            row[self.prompt_column],
            answer=row[self.answer_column] if self.answer_column is not None else None,
            info={name: value for name, value in row.items() if name not in named},
        )

    def score(self, prompt: Prompt, completion: str) -> float | Awaitable[float]:
        """What the reward function says."""
        return self._score(prompt, completion)

    def _check(self, index: int) -> None:
        row, place = self.rows[index], self.rows.place(index)
        for setting, column in (("prompt_column", self.prompt_column), ("answer_column", self.answer_column)):
            if column is not None and column not in row:
                raise ConfigError(
                    f"{place} has no column {column} (task.{setting})",
                    rule=f"its columns are {', '.join(map(str, row)) or 'none'}",
                    way_out=f"set task.{setting} to one of them"
                    + (", or to none." if setting == "answer_column" else "."),
                )
        as_messages(row[self.prompt_column], f"{place}, column {self.prompt_column}")


LARGEST_REWARD = 1e18
"""The mean, the square and the sum of many such are finite in float32. The gateway asks the same of what
harnesses say.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of a score function came to: a finite `reward`, or `failure` in words. Plain values: fit to
    cross a process.
    """

    reward: float = math.nan
    failure: str = ""


class caught:  # noqa: N801  reads like contextlib.suppress
    """Keeps an exception of the user's code in `failure`, in words, and goes on. Cancellation of the caller
    and Ctrl-C pass.

    This is the rollout boundary of rewards: what the user's code raises is data about one rollout. So is the
    CancelledError of something that it awaited and that was cancelled elsewhere: a task that ends with that
    one is forgotten in silence.
    """

    def __init__(self) -> None:
        self.failure = ""
        self.error: BaseException | None = None

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
    """A number as a reward: int, float, bool, numpy's, or an array or tensor with one element. All else is a
    failure.
    """
    number = value
    if (
        hasattr(number, "item")
        and getattr(number, "size", None) in (1, ())
        or type(number).__module__ == "torch"
    ):
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
