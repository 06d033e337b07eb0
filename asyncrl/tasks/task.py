"""Tasks and their prompts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import xxhash
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from asyncrl.base.errors import ConfigError, Message
from asyncrl.config import TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks.rewards import Reward, RewardFunction

Content = str | Sequence[Mapping[str, str]]
"""Text of the user, or chat messages with `role` and `content`."""


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

    def score(self, prompt: Prompt, completion: str) -> Reward | Awaitable[Reward]:
        """Return the reward; may be `async def`. An exception fails the rollout.

        An additional parameter `sampled` receives the Completion with token ids and logprobs.
        """
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
    config: TaskConfig
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        digest = xxhash.xxh3_128()
        prompt_column = self.config.prompt_column
        for index, row in enumerate(self.rows):
            place = self.place(index)
            for column in (prompt_column, self.config.answer_column):
                if column is not None and column not in row:
                    what = f"{place} has no column {column}; its columns are {', '.join(map(str, row))}"
                    way_out = "set task.prompt_column and task.answer_column (or none) to two of them."
                    raise ConfigError(what, way_out=way_out)
            as_messages(row[prompt_column], f"{place}, column {prompt_column}")
            digest.update(json.dumps(row, default=str).encode())
        self.digest = f"xxh3:{digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Item:
        info = dict(self.rows[index])
        content, answer_column = info.pop(self.config.prompt_column), self.config.answer_column
        return Item(content, None if answer_column is None else info.pop(answer_column), info)
