"""Requests to the servers of teachers and reward models."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat

from asyncrl.base.errors import Message
from asyncrl.messages.records import Count


class ScoreRequest(Message):
    """Return the logprob of each token id from `start` on, of logits / `temperature`,
    and the `top_k` likeliest ids there.
    """

    token_ids: list[int] = Field(min_length=2)
    start: Count
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    adapter: str = ""


class ScoreResponse(Message):
    """float32 in nats, of token_ids[start:]. `top_ids`, `top_logprobs`: top_k values for
    each of these tokens, one token after the other. `version`: policy_version of the
    weights that scored; all tokens have one.
    """

    version: int = 0
    logprobs: list[float]
    top_ids: list[int] = Field(default_factory=list)
    top_logprobs: list[float] = Field(default_factory=list)


class RewardRequest(Message):
    """Score a completion. `question`: the prompt's messages as one text."""

    messages: list[dict[str, object]]
    question: str
    completion: str


class RewardResponse(Message):
    """The logit of the label, and the size of the text in the model's tokens."""

    score: float
    num_tokens: int
