"""OpenEnv servers for tests: a text environment of several steps, and one of tools."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from faulty_agents_for_test import plant
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    CallToolObservation,
    ToolError,
)
from pydantic import BaseModel, Field


class Say(Action):
    text: str = Field(max_length=50)
    loudness: int = 1


class Heard(Observation):
    said: str = ""
    left: int | None = None


class Backend(BaseModel):
    rows: list[int]


REWARDS = {
    "text": "high",
    "nan": float("nan"),
    "infinity": float("inf"),
    "missing": None,
}


class Counting(Environment):
    """Three steps, each with the length of the text as its reward. Some words fail."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._seed: int | None = None
        self._heard: list[str] = []

    def reset(self, seed: int | None = None, word: str = "start", **_: Any) -> Heard:
        if word == "slow":
            time.sleep(30)
        if word == "broken":
            raise ValueError("the environment is broken")
        self._seed = seed
        self._heard = []
        return Heard(said=f"{word} {seed}", left=3)

    def step(self, action: Say, **_: Any) -> Heard:
        if action.text == "crash":
            raise ValueError("the environment is broken")
        plant(action.text)
        if action.text == "slow":
            time.sleep(30)
        if action.text == "exit":
            os._exit(3)
        if action.text == "validate":
            Backend.model_validate({"rows": None})
        if action.text in REWARDS:
            reward: Any = REWARDS[action.text]
            return Heard.model_construct(reward=reward, done=True, metadata={})
        self._heard.append(action.text)
        left = 3 - len(self._heard)
        return Heard(
            said=" ".join(self._heard),
            left=left,
            reward=len(action.text),
            done=left == 0,
            metadata={"secret": 1},
        )

    @property
    def state(self) -> State:
        return State(step_count=len(self._heard))


class Sums(MCPEnvironment):
    """A tool `add`; a right sum ends the episode with a reward of 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("sums")

        @tools.tool
        def add(first: int, second: int) -> int:
            """Add two numbers."""
            return first + second

        super().__init__(tools)
        self._num_steps = 0

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        self._num_steps = 0
        return Observation(metadata={"status": "ready"})

    def step(self, action: Any, timeout_s: float | None = None, **more: Any) -> Any:
        seen = super().step(action, timeout_s=timeout_s, **more)
        return self._rewarded(action, seen)

    async def step_async(
        self, action: Any, timeout_s: float | None = None, **more: Any
    ) -> Any:
        seen = await super().step_async(action, timeout_s=timeout_s, **more)
        return self._rewarded(action, seen)

    def _rewarded(self, action: Any, seen: Any) -> Any:
        self._num_steps += 1
        if isinstance(action, CallToolAction):
            if action.arguments.get("first") == 9:
                seen.error = ToolError(error_type="timeout", message="30 s are over")
            is_right = action.arguments.get("first") == 2
            seen.reward = float(is_right)
            seen.done = is_right
        return seen

    def _step_impl(self, action: Any, timeout_s: Any = None, **_: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State(step_count=self._num_steps)


def main(kind: str, num_places: str, port: str) -> None:
    if kind == "text":
        app = create_app(Counting, Say, Heard, max_concurrent_envs=int(num_places))
    else:
        app = create_app(
            Sums,
            CallToolAction,
            CallToolObservation,
            max_concurrent_envs=int(num_places),
        )
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], port=sys.argv[4])
