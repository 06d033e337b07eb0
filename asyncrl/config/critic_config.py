"""Section `critic`."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat

from asyncrl.config.fields import FrozenConfig


class CriticConfig(FrozenConfig):
    """A value model on the trainer's ranks, for algorithm.advantage=gae
    (docs/critic.md).
    """

    path: str | None = None
    """Hugging Face folder or hub id, as for model.path, of a model with the vocabulary of
    `model` (none = the policy's initial weights). Its head is replaced by a value head of
    zeros.
    """
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate. All else of the optimizer is as in `trainer`."""
    warmup_steps: NonNegativeInt = 0
    """First batches that train only the critic: the policy takes no step."""
    value_clip: PositiveFloat | None = None
    """Clip a value to this distance from its value before the batch, as PPO does (none
    = off).
    """
