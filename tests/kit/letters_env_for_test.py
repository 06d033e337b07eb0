"""A verifiers environment that a model of random weights can learn: say the letter."""

from __future__ import annotations

import itertools
from typing import Any

import verifiers.v1 as vf
from guessing_env_for_test import ChatHarness

__all__ = ["ChatHarness", "LettersTaskset"]


class LettersData(vf.TaskData):
    letter: str


class LettersTask(vf.Task[LettersData]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        said = trace.last_reply
        return said.count(self.data.letter) / max(1, len(said))

    @vf.metric
    async def is_b(self, trace: vf.Trace) -> float:
        return float(self.data.letter == "b")


class LettersConfig(vf.TasksetConfig):
    letters: str = "a"


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> list[Any]:
        tasks = []
        for letter, number in itertools.product(self.config.letters, range(4)):
            prompt: Any = [{"role": "user", "content": f"{letter} {number}"}]
            data = LettersData(prompt=prompt, letter=letter)
            tasks.append(LettersTask(data, self.config.task))
        return tasks
