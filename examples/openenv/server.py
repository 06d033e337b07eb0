"""An OpenEnv server: the quickstart's task as an environment.

    pip install -e '.[openenv]'
    uvicorn examples.openenv.server:app --port 8000

An episode: the environment says "b 3", the model answers "bbb", and gets its reward.
"""

from __future__ import annotations

from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app

from asyncrl.messages.records import Prompt
from asyncrl.tasks.toy import Letters

MAX_EPISODES = 256


class Answer(Action):
    message: str


class Request(Observation):
    text: str = ""


class LettersEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        # The task of configs/quickstart.yaml.
        self._task = Letters(
            size=2**31, seed=0, letters="abcdefghijkl", sigma=0.7, max_count=9
        )
        self._prompt: Prompt | None = None
        self._num_steps = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> Request:
        item = self._task.prompt(seed or 0)
        text = str(item.content)
        self._prompt = Prompt(
            episode_id or "0", ({"role": "user", "content": text},), item.answer
        )
        self._num_steps = 0
        return Request(text=text)

    def step(self, action: Answer, timeout_s: float | None = None, **_: Any) -> Request:
        assert self._prompt is not None, "reset comes first"
        self._num_steps += 1
        reward = self._task.score(self._prompt, action.message)
        return Request(done=True, reward=reward)

    @property
    def state(self) -> State:
        return State(step_count=self._num_steps)


app = create_app(LettersEnvironment, Answer, Request, max_concurrent_envs=MAX_EPISODES)
