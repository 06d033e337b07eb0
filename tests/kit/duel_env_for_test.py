"""A verifiers environment of two agents that take turns, with a reward for each."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from guessing_env_for_test import ChatHarness

__all__ = ["ChatHarness", "DuelEnv", "DuelTaskset"]


class DuelTask(vf.Task[vf.TaskData]):
    pass


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self) -> list[Any]:
        return [DuelTask(vf.TaskData(), self.config.task)]


def share_of(letter: str, text: str) -> float:
    return text.count(letter) / max(1, len(text))


class DuelConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    freeze: bool = False
    letters: bool = False
    """The first agent earns the letters a of its answers, the second the letters b."""


class DuelEnv(vf.Env[DuelConfig]):
    async def setup(self, agents: Any) -> None:
        agents.second.trainable = not self.config.freeze

    async def run(self, task: vf.Task, agents: Any) -> None:
        async with (
            agents.first.interaction(task) as first,
            agents.second.interaction(task) as second,
        ):
            said: dict[str, list[str]] = {"a": [], "b": []}
            for _ in range(2):
                said["a"].append((await first.turn("first")).last_reply)
                said["b"].append((await second.turn("second")).last_reply)
        points = {"a": 1.0, "b": 0.25}
        if self.config.letters:
            points = {
                letter: share_of(letter, "".join(said[letter])) for letter in said
            }
        first.trace.record_reward("points", points["a"])
        second.trace.record_reward("points", points["b"])
