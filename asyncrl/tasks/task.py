"""Tasks, and calls of their score."""

from __future__ import annotations

import asyncio
import contextlib
import json
import numbers
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import xxhash
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from asyncrl.base.errors import ConfigError, RewardFailure
from asyncrl.base.message import Message
from asyncrl.base.user_code import raised
from asyncrl.messages.records import LARGEST_NUMBER, Prompt

Content = str | Sequence[Mapping[str, str]]
"""Text of the user, or chat messages with `role` and `content`."""

RewardFunction = Callable[[Prompt, str], float | Awaitable[float]]
"""Depends only on prompt and text; runs in any thread or process."""


@dataclass(frozen=True, slots=True)
class Item:
    """The model never sees `answer` and `info`."""

    content: Content
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class PromptTask(Protocol):
    """Interface of `task.python`. Built as `Class(size=..., seed=..., **task.args)`."""

    def __len__(self) -> int: ...

    def prompt(self, index: int) -> str | Item:
        """Return the prompt at `index` (0 .. len - 1), always the same."""
        ...

    def score(self, prompt: Prompt, completion: str) -> float | Awaitable[float]:
        """Return the reward; may be `async def`. An exception fails the rollout."""
        ...


class _ChatMessage(Message):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Field(strict=True)]

    @model_validator(mode="before")
    @classmethod
    def _without_none(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, Mapping) else given


_CHAT = TypeAdapter(Annotated[list[_ChatMessage], Field(min_length=1)])


def as_messages(content: Any, where: str) -> tuple[Mapping[str, str], ...]:
    """Return the chat messages of a prompt's content; `where` names it in errors. Raises ConfigError."""
    chat = [{"role": "user", "content": content}] if isinstance(content, str) and content else content
    try:
        return tuple(message.model_dump() for message in _CHAT.validate_python(chat))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{where} is no prompt: {content!r:.160} ({'.'.join(map(str, first['loc']))} {first['msg']})",
            rule="a prompt is a text, or a list of chat messages with `role` and `content`, not empty",
            way_out="correct it, or name the right column as task.prompt_column.",
        ) from error


@dataclass(slots=True, eq=False)
class RowTask:
    """Rows with a prompt column, an optional answer column, and others as `info`. `place` names a row in
    errors. `digest`: of all rows in order.

    All rows are checked here, so that a bad row ends the run before it starts.
    """

    rows: Sequence[Mapping[str, Any]]
    place: Callable[[int], str]
    score: RewardFunction
    prompt_column: str
    answer_column: str | None
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        digest = xxhash.xxh3_128()
        for index, row in enumerate(self.rows):
            place = self.place(index)
            for column in (self.prompt_column, self.answer_column):
                if column is not None and column not in row:
                    what = f"{place} has no column {column}; its columns are {', '.join(map(str, row))}"
                    way_out = "set task.prompt_column and task.answer_column (or none) to two of them."
                    raise ConfigError(what, way_out=way_out)
            as_messages(row[self.prompt_column], f"{place}, column {self.prompt_column}")
            digest.update(json.dumps(row, default=str).encode())
        self.digest = f"xxh3:{digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Item:
        info = dict(self.rows[index])
        content = info.pop(self.prompt_column)
        return Item(content, None if self.answer_column is None else info.pop(self.answer_column), info)


class UserCodeFailed(Exception):  # noqa: N818  data of one rollout, or turned into a ConfigError
    """Error or invalid return value of user code, as text. Picklable."""


@contextlib.contextmanager
def user_code(*passed: type[BaseException]) -> Iterator[None]:
    """Turn exceptions of user code into UserCodeFailed, except those in `passed`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, UserCodeFailed, *passed)):
            raise
        raise UserCodeFailed(raised(error)) from error


def call(score: RewardFunction, prompt: Prompt, completion: str) -> float | Awaitable[Any]:
    """Return the reward, or an awaitable for call_async. Raises UserCodeFailed."""
    with user_code():
        value: Any = score(prompt, completion)
        return value if isinstance(value, Awaitable) else as_reward(value)


async def call_async(value: Awaitable[Any]) -> float:
    """Raises UserCodeFailed; cancellation passes."""
    with user_code(asyncio.CancelledError):
        return as_reward(await value)


def as_reward(value: Any) -> float:
    """Convert a number, or an array or tensor with one element. Raises UserCodeFailed."""
    number = value
    if hasattr(value, "item"):
        with contextlib.suppress(Exception):
            number = value.item()
    if not isinstance(number, numbers.Real):
        hint = "; is a `return` missing?" if value is None else ""
        raise UserCodeFailed(f"returned {value!r:.80} ({type(value).__name__}), not a number{hint}")
    reward = float(number)
    if not abs(reward) <= LARGEST_NUMBER:
        raise UserCodeFailed(f"returned {reward}; rewards are finite, and {LARGEST_NUMBER:g} at most")
    return reward


def no_reward(prompt: Prompt) -> RewardFailure:
    return RewardFailure(
        f"prompt {prompt.prompt_id}: no reward came with the rollout, and the task has no reward function",
        rule="each rollout needs a reward from its harness, verifiers environment or task",
        way_out="return a reward from the harness, or set task.reward.",
    )
