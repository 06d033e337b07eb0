"""Prompts and scoring out of reasoning-gym, by name. Knows that library alone.

https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import ConfigError, install_extra
from asyncrl.tasks.task import Item
from asyncrl.types import Prompt


class GymTask:
    """The reasoning-gym task `name` with `size` prompts; scored by that task's own score_answer.

    What is scored is what stands in the last <answer> tags (by the library's own extraction), or the whole completion
    where there are none. Many tasks give part of the reward to an answer with words around it, as that library has it.
    """

    def __init__(self, name: str, *, size: int, seed: int, settings: Mapping[str, Any]) -> None:
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
            from reasoning_gym.utils import extract_answer
        except ModuleNotFoundError as error:
            raise not_installed(name, str(error.name)) from error
        if name not in DATASETS:
            close = difflib.get_close_matches(name, DATASETS, n=3)
            raise ConfigError(
                f"task.reasoning_gym={name}: reasoning-gym has no such task",
                rule=f"it has {len(DATASETS)} tasks",
                way_out=f"did you mean {' or '.join(close)}?" if close else f"the names begin with {', '.join(sorted(DATASETS)[:5])}, ...",
            )
        try:
            self._dataset = create_dataset(name, size=size, seed=seed, **settings)
        except (TypeError, ValueError, AssertionError) as error:
            known = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("size", "seed")]
            raise ConfigError(
                f"task.args={dict(settings)} do not suit reasoning-gym's {name}: {error}",
                rule=f"its settings are {', '.join(known)}",
                way_out="correct task.args.",
            ) from error
        self._name, self._extract = name, extract_answer

    def __repr__(self) -> str:
        return f"<GymTask {self._name}, {len(self)} prompts>"

    def __len__(self) -> int:
        return len(self._dataset)

    def prompt(self, index: int) -> Item:
        """Question of entry `index`; its answer is {"answer", "metadata"}, for the metadata of many tasks hold the answer too."""
        entry = self._dataset[index]
        return Item(entry["question"], answer={"answer": entry["answer"], "metadata": entry["metadata"]})

    def score(self, prompt: Prompt, completion: str) -> float:
        """The library's own score of the answer, 0 to 1."""
        answer = self._extract(completion)
        entry = {"question": prompt.messages[-1]["content"], **prompt.answer}
        return float(self._dataset.score_answer(completion.strip() if answer is None else answer, entry=entry))


def not_installed(name: str, package: str) -> ConfigError:
    """The error of a missing extra, which it names."""
    return ConfigError(f"task.reasoning_gym={name}: the package {package} is not installed", way_out=install_extra("harness"))
