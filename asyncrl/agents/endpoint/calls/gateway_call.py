"""Calls that wait for a place, are sampled, and are kept for their clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING

from asyncrl.agents.endpoint.answers import Answer, ApiError
from asyncrl.agents.endpoint.capture import PromptPlan
from asyncrl.agents.endpoint.forms.chat import Form
from asyncrl.messages.records import SamplingRequest

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.requests import AnyRequest

GRACE_S = 1.0
"""Seconds to keep sampling without clients, in case one retries."""
CLIENT_GONE = 499


def client_gone() -> ApiError:
    return ApiError(CLIENT_GONE, "The client has gone.")


class Room:
    """Concurrency limit of one session: `most` answers sampled at once.

    Waits: calls enter in arrival order; small calls never overtake large ones.
    Invariant: at most `most` places are held. A cancelled call holds none.
    """

    def __init__(self, most: int) -> None:
        self.most, self.num_waiting = most, 0
        self._line, self._free = asyncio.Lock(), asyncio.Semaphore(most)

    @asynccontextmanager
    async def places(self, number: int) -> AsyncIterator[None]:
        """Wait for `number` places, at most `most`; hold them inside the block."""
        assert number <= self.most, "it would wait for ever"
        async with AsyncExitStack() as held:
            self.num_waiting += 1
            try:
                async with self._line:
                    for _ in range(number):
                        await held.enter_async_context(self._free)
            finally:
                self.num_waiting -= 1
            yield


class GatewayCall:
    """A sampling and all clients that wait for its answer.

    Life: sampled by the request that made it -> done, with answers or an error -> delivered to connected
        clients and recorded once. Without clients for GRACE_S before it is done, it is cancelled and
        forgotten.
    Waits: wait_done, and wait_news for a stream; sampling wakes both.
    Invariant: a completion is in the capture if and only if it was written to a connected client. Only
        GatewaySession.deliver_nowait records.
    """

    def __init__(
        self, form: Form, digest: bytes, planned: PromptPlan, sampled: Mapping[Answer, SamplingRequest]
    ) -> None:
        """`digest`: of the request; identifies retries."""
        self.form, self.digest, self.created_s = form, digest, int(time.time())
        self.is_streamed = False
        self.is_trained = True
        self.grammar = next((one.grammar for one in sampled.values()), None)
        self.order = 0
        """Number among the session's calls, refused ones included."""
        self.time_asked: tuple[bytes, int] | None = None
        """Seed source: hash of the content, and number of equal calls before."""
        self.choices = tuple(sampled)
        self.requests: tuple[SamplingRequest, ...] = tuple(sampled.values())
        """Engine requests; empty once done."""
        self.num_prompt_tokens = planned.num_prompt
        self.name = f"{form.name}-{planned.number}"
        self.error: ApiError | None = None
        self.undelivered: PromptPlan | None = planned
        self.give_up: Callable[[], None] = lambda: None
        """Called after GRACE_S without a client."""
        self._clients: list[Callable[[], bool]] = []
        self._grace: asyncio.TimerHandle | None = None
        self._news, self._done = asyncio.Event(), asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def is_abandoned(self) -> bool:
        return self.undelivered is not None and not any(is_there() for is_there in self._clients)

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @contextmanager
    def attended(self, is_there: Callable[[], bool]) -> Iterator[None]:
        """Register a client inside the block, connected while `is_there()`."""
        self._clients.append(is_there)
        self.left_nowait()
        try:
            yield
        finally:
            self._clients.remove(is_there)
            self.left_nowait()

    def left_nowait(self) -> None:
        """Start or stop the GRACE_S timer after a client came or went."""
        is_alone = self.is_abandoned and not self.is_done
        if is_alone and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(GRACE_S, self._grace_is_over)
        elif not is_alone and self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _grace_is_over(self) -> None:
        self._grace = None
        if self.is_abandoned and not self.is_done:
            self.give_up()

    def done_nowait(self, error: ApiError | None = None) -> None:
        """Mark the sampling as ended. Idempotent: the first end stays."""
        if not self.is_done:
            self.error, self.requests = error, ()  # the session keeps its calls
            self._done.set()
            self._news.set()
            self.left_nowait()

    def feed(self, index: int, token_ids: Sequence[int]) -> None:
        self.choices[index].feed(token_ids)
        self._news.set()

    async def wait_news(self) -> None:
        """Wait for new text or the end."""
        await self._news.wait()
        if not self.is_done:
            self._news.clear()

    async def wait_done(self) -> None:
        """Wait until done. Raises ApiError if sampling failed."""
        await self._done.wait()
        if self.error is not None:
            raise self.error


def call_keys(
    number_of: Callable[[bytes], int], planned: PromptPlan, asked: AnyRequest, grammar: str
) -> tuple[list[int], tuple[bytes, int] | None]:
    """Return (one seed key for each choice, their source).

    They depend only on the call's content and the number of equal calls before, never on time. Equal
    concurrent calls may swap answers.
    """
    digest, shape = planned.prompt_hash.digest(), asked.shape() + grammar.encode()
    if shape:
        digest = blake2b(digest + shape, digest_size=16).digest()
    time_asked = None if asked.seed is not None else (digest, number_of(digest))
    number = f"seed {asked.seed}" if time_asked is None else f"time {time_asked[1]}"
    contents = [digest + f"/{number}/{index}".encode() for index in range(asked.n)]
    keys = [int.from_bytes(blake2b(each, digest_size=8).digest(), "big") >> 1 for each in contents]
    return keys, time_asked
