"""The tasks of a verifiers environment as prompts. It neither loads environments nor runs or scores their
tasks.

https://github.com/PrimeIntellect-ai/verifiers
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from asyncrl.errors import ConfigError, RewardFailure
from asyncrl.messages.records import Prompt
from asyncrl.tasks.task import Item, caught

INFO_KEY = "verifiers"
"""Item.info has the task's own data under this key: the worker builds the task again from them."""


class VerifiersTask:
    """The tasks of `taskset` in its own order; of one without an end the first `size`.

    All are read when this is built, so that a bad one ends the run before it has started. The messages of a
    prompt are only shown to people: the environment makes its own from the same data.
    """

    def __init__(self, taskset: Any, *, size: int) -> None:
        """Raises ConfigError if a task cannot be made, or cannot be sent to a worker and built again
        there.
        """
        self._name = type(taskset).__name__
        fields = type(taskset).task_type().data_type().model_fields
        if hidden := [name for name, field in fields.items() if field.exclude]:
            raise self._unfit(f"its data leave out {', '.join(hidden)} when they are written as JSON")
        self._items: list[Item] = []
        with caught() as boundary:
            for task in itertools.islice(taskset, None if taskset.bounded else size):
                self._items.append(self._item(task.data, len(self._items)))
        if isinstance(boundary.error, ConfigError):
            raise boundary.error
        if boundary.error is not None:
            raise ConfigError(
                f"task {len(self._items)} of {self._name}: making it {boundary.failure}",
                way_out="correct its taskset, or its settings in generator.args.taskset.",
            ) from boundary.error

    def __repr__(self) -> str:
        return f"<VerifiersTask {self._name}, {len(self)} prompts>"

    def __len__(self) -> int:
        return len(self._items)

    def prompt(self, index: int) -> Item:
        """The task at `index`."""
        return self._items[index]

    def score(self, prompt: Prompt, completion: str) -> float:
        """Raises RewardFailure: a text alone cannot be scored."""
        raise no_reward(prompt)

    def _item(self, data: Any, index: int) -> Item:
        row = data.model_dump(mode="json")
        try:
            json.dumps(row, allow_nan=False)
        except ValueError as error:
            raise self._unfit(f"task {index} has a value that is not JSON ({error})") from error
        messages = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        if isinstance(data.prompt, str):
            messages.append({"role": "user", "content": data.prompt})
        else:
            said = data.prompt or ()
            messages += [{"role": one.role, "content": self._text(one.content, index)} for one in said]
        opening = {"role": "user", "content": "(the environment opens the conversation)"}
        return Item(messages or [opening], info={INFO_KEY: row})

    def _text(self, content: Any, index: int) -> str:
        """The text of a message; there may be none beside tool calls."""
        if content is None or isinstance(content, str):
            return content or ""
        if others := [part.type for part in content if part.type != "text"]:
            raise self._unfit(f"the prompt of task {index} has a part of type {others[0]}, and not of text")
        return "\n".join(part.text for part in content)

    def _unfit(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._name}: {what}",
            rule="the data of a task are text that goes to a worker as JSON, whole",
            way_out="correct the environment's task data.",
        )


def no_reward(prompt: Prompt) -> RewardFailure:
    """The failure of a rollout whose harness gave no reward, where the task has none either."""
    return RewardFailure(
        f"prompt {prompt.prompt_id}: no reward came with the rollout, and the task has no reward function",
        rule="each rollout needs a reward, from its harness (or verifiers environment) or from the task",
        way_out="return one from the harness, add one to the environment, or set task.reward.",
    )
