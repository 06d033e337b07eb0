"""Tasks of verifiers environments."""

from __future__ import annotations

import itertools
import json
from typing import Any

from asyncrl.base.errors import ConfigError
from asyncrl.config import GeneratorConfig, TaskConfig
from asyncrl.extensions.verifiers.settings import ENVIRONMENT, INFO_KEY
from asyncrl.extensions.verifiers.verifiers_harness import load_taskset
from asyncrl.messages.records import Prompt
from asyncrl.tasks.rewards import UserCodeFailed, no_reward, user_code
from asyncrl.tasks.task import Item


def find_tasks(
    config: TaskConfig, generator: GeneratorConfig, *, reads_all: bool
) -> tuple[VerifiersTask | None, str]:
    """Return the tasks of the generator's environment, None without `reads_all`, and
    their description. Raises ConfigError.
    """
    taskset = load_taskset(ENVIRONMENT.of(generator) or "", generator.args, config.args)
    text = f"verifiers {type(taskset).__name__}"
    if not reads_all:
        return None, f"{text} (its tasks are read when the run starts)"
    return VerifiersTask(taskset, size=config.size), text


class VerifiersTask:
    """Tasks of a verifiers environment
    (https://github.com/PrimeIntellect-ai/verifiers), the first `size` of an endless
    taskset.

    All are read here, so that a bad task ends the run before it starts.
    """

    def __init__(self, taskset: Any, *, size: int) -> None:
        self._items: list[Item] = []
        try:
            with user_code():
                # An endless taskset must be cut; a bounded one is used whole.
                for task in itertools.islice(
                    taskset, None if taskset.bounded else size
                ):
                    self._items.append(_item(task.data))
        except UserCodeFailed as failure:
            raise ConfigError(
                f"task {len(self._items)} of {type(taskset).__name__}: making it {failure}",
                way_out="correct it, or generator.args.taskset.",
            ) from failure

    def __len__(self) -> int:
        return len(self._items)

    def prompt(self, index: int) -> Item:
        return self._items[index]

    def score(self, prompt: Prompt, completion: str) -> float:
        raise no_reward(prompt)


def _item(data: Any) -> Item:
    """Return a prompt of a verifiers task, with all its data in `info` for the worker.
    Raises ValueError for data that are not JSON.
    """
    row = data.model_dump(mode="json")
    prompt = row.get("prompt") or []
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if data.system_prompt is not None:
        prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
    messages = []
    for message in prompt:
        content = message.get("content") or ""
        if "image_url" in {part["type"] for part in content if isinstance(part, dict)}:
            raise ValueError("its prompt has an image; the endpoint reads texts")
        text = content if isinstance(content, str) else json.dumps(content)
        messages.append({"role": message["role"], "content": text})
    opening = {"role": "user", "content": "(the environment opens the conversation)"}
    return Item(messages or [opening], info={INFO_KEY: row})
