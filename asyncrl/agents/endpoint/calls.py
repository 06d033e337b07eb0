"""Calls of a session, and the answers that later calls refer to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.agents.endpoint.answers import Answer
from asyncrl.agents.endpoint.capture import PromptPlan
from asyncrl.agents.endpoint.requests import ApiError, Newest, shown
from asyncrl.agents.endpoint.sub_agents import Agent
from asyncrl.agents.endpoint.tool_formats import Block
from asyncrl.messages.sampling import SamplingRequest

PING_S = 10.0
"""Seconds without a piece after which a stream sends a ping."""
NOT_KEPT = "previous_response_not_found"


class StoredChat(NamedTuple):
    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] = ()
    items: Sequence[Mapping[str, object]] = ()
    """Of a response, for later references."""


ChatsByAnswer = Newest[str, StoredChat]
"""Messages through delivered answers of a session, by the ids of their calls."""


def find_chat(name: str | None, param: str, chats: ChatsByAnswer) -> StoredChat:
    """Return the chat through the answer `name`; without a name, an empty one. Raises
    ApiError: 404.
    """
    if name is None:
        return StoredChat(())
    if (answer := chats.get(name)) is not None:
        return answer
    why = f"{shown(name)} is not kept: it had store=false or no thread, belongs to another session, or is"
    raise ApiError(
        404, f"{why} older than the newest {chats.most}.", code=NOT_KEPT, param=param
    )


@dataclass(eq=False, repr=False, kw_only=True)
class GatewayCall:
    """A call from plan to delivery.

    Invariant: an answer is in the capture if and only if it was written to a connected
        client.
    """

    name: str
    model: str
    order: int
    planned: PromptPlan
    number: int | None
    """Among equal calls; None if the client set a seed."""
    answer: Answer
    request: SamplingRequest
    is_trained: bool
    agent: Agent
    key: bytes
    """Equal for equal calls of an agent."""
    is_sampled: bool = False
    begun_s: float = field(default_factory=time.time)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def created_s(self) -> int:
        return int(self.begun_s)

    @property
    def num_prompt(self) -> int:
        """Count the tokens of the prompt."""
        return self.planned.whole.length

    def feed(self, token_ids: Sequence[int]) -> None:
        self.answer.feed(token_ids)
        self.news.set()

    async def pieces(self) -> AsyncIterator[tuple[Block | None, str]]:
        """Yield what grows until the call is sampled, and None as a ping after PING_S
        without a piece.
        """
        loop = asyncio.get_running_loop()
        num_yielded = 0
        ping_at = loop.time() + PING_S
        is_last = False
        while not is_last:
            if not self.is_sampled:
                timer = loop.call_at(ping_at, self.news.set)
                await self.news.wait()
                timer.cancel()
                self.news.clear()
            # Read before the pieces are: once it is true, the answer has all of them.
            # Pieces that arrive while the consumer writes belong to the next round.
            is_last = self.is_sampled
            for piece in self.answer.reader.pieces[num_yielded:]:
                num_yielded += 1
                ping_at = loop.time() + PING_S
                yield piece
            if loop.time() >= ping_at and not is_last:
                ping_at = loop.time() + PING_S
                yield None, ""
