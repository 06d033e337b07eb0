"""Requests to the servers of reward models."""

from __future__ import annotations

from asyncrl.base.errors import Message


class RewardRequest(Message):
    """Score a completion. `question`: the prompt's messages as one text."""

    messages: list[dict[str, object]]
    question: str
    completion: str


class RewardResponse(Message):
    """The logit of the label, and the size of the text in the model's tokens."""

    score: float
    num_tokens: int
