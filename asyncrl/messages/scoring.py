"""Messages by which a teacher is asked for the logprobs of given tokens."""

from __future__ import annotations

from pydantic import Field

from asyncrl.messages.base import Message


class ScoreRequest(Message):
    """POST /score: the logprob of each of these token ids, from number `start` on, after all before it.

    `temperature` is that at which they were sampled: logprobs are those of logits / temperature.
    """

    token_ids: list[int] = Field(min_length=2)
    start: int = Field(ge=1)
    temperature: float = Field(default=1.0, gt=0)


class ScoreResponse(Message):
    """`logprobs`: float32 values in nats, of token_ids[start:]."""

    logprobs: list[float]
