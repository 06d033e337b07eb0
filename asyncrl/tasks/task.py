"""Tasks and their prompts."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, Protocol, runtime_checkable
from uuid import UUID

import xxhash
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from asyncrl.base.errors import ConfigError, Message, first_fault
from asyncrl.base.progress import LongWork, told_if_long
from asyncrl.base.user_code import message_of
from asyncrl.config import TaskConfig
from asyncrl.messages.json_values import without_nulls
from asyncrl.messages.records import (
    Prompt,
    Reward,
)
from asyncrl.tasks.rewards import (
    RewardFunction,
    reference_text,
)

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

        An additional parameter `sampled` receives the Completion with token ids and
        logprobs.
        """
        ...


@runtime_checkable
class GroupTask(Protocol):
    """A task that scores whole groups, in place of `score`."""

    def __len__(self) -> int: ...

    def prompt(self, index: int) -> str | Item: ...

    def score_group(
        self, prompt: Prompt, completions: Sequence[str | None]
    ) -> Sequence[Reward] | Awaitable[Sequence[Reward]]:
        """Return a reward for each completion, by sample_index; may be `async def`.

        None is a rollout that failed, or has a reward from its harness; its entry is
        ignored. An exception or another length fails all rollouts of the group, an
        entry that is not a finite number its own.
        """
        ...


class _ChatMessage(Message):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Field(strict=True)]


_CHAT = TypeAdapter(
    Annotated[
        list[Annotated[_ChatMessage, BeforeValidator(without_nulls)]],
        Field(min_length=1),
    ]
)


def as_messages(content: object, where: str) -> tuple[Mapping[str, str], ...]:
    """Return the chat messages of a prompt's content; `where` names it in errors.
    Raises ConfigError.
    """
    # Messages that were written as a text would be one message of the user.
    is_text = isinstance(content, str) and not content.startswith(
        ("[{'role'", '[{"role"')
    )
    chat = [{"role": "user", "content": content}] if content and is_text else content
    try:
        return tuple(message.model_dump() for message in _CHAT.validate_python(chat))
    except ValidationError as error:
        raise ConfigError(
            f"{where} is not a valid prompt: {content!r:.160} ({first_fault(error)})",
            rule="a prompt is a text, or a list of chat messages with `role` and `content`, not empty",
            way_out="correct it, or name the right column as task.prompt_column.",
        ) from error


STORED = (bytes, date, time, timedelta, Decimal, UUID)
"""Types of parquet columns that JSON lacks."""


def plain(value: object) -> list[str]:
    """Return a value's type and content for a digest. Raises TypeError for a type
    without a fixed text.
    """
    if not isinstance(value, STORED):
        raise TypeError(
            f"a {type(value).__name__} has no digest; store a text, number, list or bytes"
        )
    return [
        type(value).__name__,
        value.hex() if isinstance(value, bytes) else str(value),
    ]


@dataclass(slots=True, eq=False)
class RowTask:
    """Rows with a prompt column, an optional answer column, and others as `info`.
    `place` names a row in errors. `digest`: of the task's rows in order.

    With config.split={eval: ...}, the task has only the rows for training, or the
    held-out rows if it `is_evaluated`.

    All rows are checked here, so that a bad row ends the run before it starts.
    """

    rows: Sequence[Mapping[str, Any]]
    place: Callable[[int], str]
    score: RewardFunction
    config: TaskConfig
    is_evaluated: bool = False
    digest: str = field(init=False)
    num_prompts: int = field(init=False, default=0)
    """Different prompts."""
    _kept: list[int] = field(init=False, default_factory=list)
    """Places in `rows`."""

    def __post_init__(self) -> None:
        with told_if_long("checking the rows of the task", len(self.rows)) as work:
            self.digest = self._check_rows(work)

    def _check_rows(self, work: LongWork) -> str:
        """Return the digest of the rows. Raises ConfigError."""
        digest = xxhash.xxh3_128()
        prompt_column = self.config.prompt_column
        prompts = set[int]()
        place = "the first row"
        try:
            for index, row in enumerate(self.rows):
                place = self.place(index)
                work.num_done = index
                for column in (prompt_column, self.config.answer_column):
                    if column is not None and column not in row:
                        raise ConfigError(
                            f"{place} has no column {column}; its columns are {list(row)}",
                            way_out="set task.prompt_column and task.answer_column (or none) to two of them.",
                        )
                where = f"{place}, column {prompt_column}"
                messages = as_messages(row[prompt_column], where)
                last = messages[-1]
                # Often data for fine-tuning, with the answer in the prompt. Some
                # trainers let the model continue such a message, others let it write a
                # second one.
                if last["role"] == "assistant":
                    raise ConfigError(
                        f"{where} ends with the assistant's message {last['content']!r:.80}",
                        rule="a prompt ends where the model's answer begins",
                        way_out="remove that message; `asyncrl sft` trains on answers.",
                    )
                if self.config.uses_math:
                    reference_text(row.get(self.config.answer_column or ""))
                encoded = json.dumps(row, default=plain).encode()
                if self._has(messages):
                    self._kept.append(index)
                    digest.update(encoded)
                    prompts.add(hash(str(messages)))
                # A dataset decodes the next row in the head of this loop. If that
                # fails, the error must already name the next row.
                place = f"the row after {place}"
        except ConfigError:
            raise
        except Exception as error:  # of many kinds, as a dataset decodes its row
            raise ConfigError(
                f"{place} cannot be used: {message_of(error)}",
                way_out="correct it, name another column, or remove a column that is not used.",
            ) from error
        self.num_prompts = len(prompts)
        fraction, num_rows = self.config.held_out_fraction, len(self.rows)
        if fraction and len(self._kept) in (0, num_rows):
            raise ConfigError(
                f"task.split={{eval: {fraction}}} leaves one side of {num_rows} rows empty",
                rule="the hash of its prompt puts a row on a side, so equal prompts stay together",
                way_out="give more rows or another fraction, or other files in eval.task.files.",
            )
        return f"xxh3:{digest.hexdigest()}"

    def _has(self, messages: Sequence[Mapping[str, str]]) -> bool:
        """Return whether a row with this prompt is on the task's side of the split."""
        fraction = self.config.held_out_fraction
        place = xxhash.xxh3_64_intdigest(json.dumps(messages).encode()) / 2**64
        return not fraction or (place < fraction) == self.is_evaluated

    def __len__(self) -> int:
        return len(self._kept)

    def prompt(self, index: int) -> Item:
        info = dict(self.rows[self._kept[index]])
        content = info.pop(self.config.prompt_column)
        answer_column = self.config.answer_column
        return Item(
            content, None if answer_column is None else info.pop(answer_column), info
        )
