"""Section `task.reward.model`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from asyncrl.config.fields import FrozenConfig, ScoredReward

REWARD_PLACES = 64
"""Texts at the server at once: its batches take the ones of similar length."""
REWARD_BATCH_TOKENS = 8192
"""Tokens of a forward pass, padding included."""


class RewardModelConfig(FrozenConfig):
    """A sequence classification model, whose logit is the reward."""

    path: str
    """Hugging Face folder or hub id, as for model.path."""
    reads: Literal["chat", "pair", "completion"] = "chat"
    """chat: prompt and completion as a chat, by the template of the reward model. pair:
    both as a pair of texts. completion: only the completion.
    """
    label: str | Annotated[int, Field(strict=True)] | None = None
    """Name or number of the label whose logit counts (none = the only label)."""
    mean: float = 0.0
    """The reward is (logit - mean) / std."""
    std: PositiveFloat = 1.0
    """Divisor of the reward."""


class ModelledReward(ScoredReward):
    """A reward by a reward model."""

    title: ClassVar = "the reward model"

    model: RewardModelConfig
    """Model that reads a completion and returns a number, in a separate server."""

    @property
    def called(self) -> str:
        return self.model.path
