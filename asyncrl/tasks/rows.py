"""Rows with named columns as a task. Knows where each row came from, for messages; knows no file format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.tasks.task import Item, Score, as_messages
from asyncrl.types import Prompt


class Rows:
    """Rows, and for messages what `place` calls the row at an index."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], place: Callable[[int], str]) -> None:
        self.rows, self.place = rows, place

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rows[index]


class RowTask:
    """A task out of rows: one column is the prompt, one may be the answer, the others are `info`; `score` is a function.

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
                    way_out=f"set task.{setting} to one of them" + (", or to none." if setting == "answer_column" else "."),
                )
        as_messages(row[self.prompt_column], f"{place}, column {self.prompt_column}")
