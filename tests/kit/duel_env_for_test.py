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


class DuelConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    freeze: bool = False


class DuelEnv(vf.Env[DuelConfig]):
    async def setup(self, agents: Any) -> None:
        agents.second.trainable = not self.config.freeze

    async def run(self, task: vf.Task, agents: Any) -> None:
        async with (
            agents.first.interaction(task) as first,
            agents.second.interaction(task) as second,
        ):
            for _ in range(2):
                await first.turn("first")
                await second.turn("second")
        first.trace.record_reward("points", 1.0)
        second.trace.record_reward("points", 0.25)
