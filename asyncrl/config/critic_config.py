"""Section `critic`."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.fields import FrozenConfig


class CriticConfig(FrozenConfig):
    """A value model on the trainer's ranks, for algorithm.advantage=gae
    (docs/critic.md).
    """

    path: str | None = None
    """Hugging Face folder or hub id of a model with the vocabulary of `model` (none =
    the policy's initial weights). Its head is replaced by a value head of zeros.
    """
    revision: str | None = None
    """Branch, tag or commit of a hub id (none = main). A resumed run resolves it again.
    """
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate. All else of the optimizer is as in `trainer`."""
    warmup_steps: int = Field(default=0, ge=0)
    """First batches that train only the critic: the policy takes no step."""
    value_clip: float | None = Field(default=None, gt=0)
    """Clip a value to this distance from its value before the batch, as PPO does (none
    = off).
    """
