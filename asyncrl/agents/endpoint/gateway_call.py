"""A planned call, its engine requests and its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from asyncrl.agents.endpoint.answers import Answer
from asyncrl.agents.endpoint.capture import PromptPlan
from asyncrl.messages.records import SamplingRequest

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.requests import AnyRequest


@dataclass(eq=False, repr=False, kw_only=True)
class GatewayCall:
    """A call of a session, from its plan to the delivery of its answers.

    Invariant: an answer is in the capture if and only if it was written to a connected client. Only
        GatewaySession.deliver_nowait records.
    """

    name: str
    """The id of its first answer."""
    order: int
    """Number among the session's calls, refused ones included."""
    planned: PromptPlan | None
    """None once delivered or withdrawn."""
    number: tuple[bytes, int] | None
    """Seed source: hash of the content, and number among equal calls; None with a seed of the client's."""
    choices: tuple[Answer, ...]
    requests: tuple[SamplingRequest, ...]
    """Engine requests of the choices; empty once sampled."""
    num_prompt_tokens: int
    is_streamed: bool
    is_trained: bool
    grammar: str | None
    created_s: int = field(default_factory=lambda: int(time.time()))
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by new tokens."""

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def feed(self, index: int, token_ids: Sequence[int]) -> None:
        self.choices[index].feed(token_ids)
        self.news.set()


def call_keys(
    take_number: Callable[[bytes], int], planned: PromptPlan, asked: AnyRequest, grammar: str
) -> tuple[list[int], tuple[bytes, int] | None]:
    """Return (one seed key for each choice, their source).

    They depend only on the call's content and the number of equal calls before, never on time. Equal
    concurrent calls may swap answers.
    """
    digest = planned.prompt_hash.digest()
    if shape := asked.shape() + grammar.encode():
        digest = blake2b(digest + shape, digest_size=16).digest()
    number = None if asked.seed is not None else (digest, take_number(digest))
    source = f"seed {asked.seed}" if number is None else f"time {number[1]}"
    contents = [digest + f"/{source}/{index}".encode() for index in range(asked.n)]
    keys = [int.from_bytes(blake2b(each, digest_size=8).digest(), "big") >> 1 for each in contents]
    return keys, number
