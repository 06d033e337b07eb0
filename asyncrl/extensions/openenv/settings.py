"""Settings of OpenEnv environments."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.base.extensions import AddedField
from asyncrl.config.fields import FrozenConfig

ADDRESS = AddedField[str | None](
    "openenv",
    str | None,
    "Address of an OpenEnv server that is up: each rollout is an episode, with `args`.",
    None,
)
FIELDS = (ADDRESS,)


class OpenEnvArgs(FrozenConfig):
    """generator.args of an OpenEnv server."""

    action: str | None = None
    """Field of the action that gets the answer: a text, number, boolean or choice (none =
    its only required field).
    """
    observation: str | None = None
    """Field of the observation that the model reads (none = the only one, or all as
    JSON).
    """
    reset: dict[str, object] = {}
    """Arguments of every reset. A prompt's info.reset adds others."""
    max_turns: int = Field(default=16, ge=1)
    """Answers of an episode; then it ends, done or not."""
    rewards: Literal["sum", "last", "turns"] = "sum"
    """Reward of the rollout: the sum over its steps, the last one, or one per answer."""
    without_reward: float | None = 0.0
    """Reward of an episode without one that the policy has ended, and if it is set, also
    of an episode that the environment has ended (none = the task scores its last
    answer).
    """
    connect_s: float = Field(default=60.0, gt=0)
    """Time for a server to come back, or to have a free place, before a rollout fails."""
    step_s: float = Field(default=60.0, gt=0)
    """Time limit of each reset and step."""
