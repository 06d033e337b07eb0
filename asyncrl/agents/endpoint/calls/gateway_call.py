"""Calls that wait their turn, are sampled, and are kept for the clients that want their answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING

from asyncrl.agents.endpoint.answers import Answer, ApiError
from asyncrl.agents.endpoint.capture import Planned
from asyncrl.agents.endpoint.forms.chat import Form
from asyncrl.messages.records import SamplingRequest

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.requests import AnyRequest

GRACE_S = 1.0
"""Seconds that a call whose clients are all gone is sampled on, in case one asks again."""
CLIENT_GONE = 499
"""Status of an answer that nobody is there to read."""


def client_gone() -> ApiError:
    """499, which nobody reads."""
    return ApiError(CLIENT_GONE, "The client has gone.")


class Room:
    """The answers of one session that are sampled at once: `most` places, one for each answer of a call.

    Waits: calls enter in the order in which they came. The first in the line takes places as they become
        free, so calls with few answers never pass one with many.
    Invariant: at most `most` places are held. A cancelled call holds none.
    """

    def __init__(self, most: int) -> None:
        self.most, self.num_waiting = most, 0
        self._line, self._free = asyncio.Lock(), asyncio.Semaphore(most)

    @asynccontextmanager
    async def places(self, number: int) -> AsyncIterator[None]:
        """A block that holds `number` places, at most `most`; entering it sleeps until they are free."""
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
    """One sampling, and all clients that want its answer.

    Life: sampled by the request that made it -> done, with answers or an error -> delivered, to the clients
        that are there by then. What was sampled is kept until it is delivered, and recorded then, once. A
        call that is left by all its clients before it is done, and not asked again within GRACE_S, is given
        up: cancelled and forgotten, as if it had never been asked.
    Waits: wait_done, and wait_news for a stream; both are woken by the sampling.
    Invariant: a completion is in the capture if and only if it was written to a client that was there:
        GatewaySession.deliver_nowait alone records.
    """

    def __init__(
        self, form: Form, digest: bytes, planned: Planned, sampled: Mapping[Answer, SamplingRequest]
    ) -> None:
        """`digest`: of what was asked, by which it is known when it is asked again."""
        self.form, self.digest, self.created_s = form, digest, int(time.time())
        self.is_streamed = False
        self.is_trained = True
        """It is sampled from the run's own distribution."""
        self.grammar = next((one.grammar for one in sampled.values()), None)
        self.order = 0
        """Its number among the calls of its session, those included that were refused."""
        self.time_asked: tuple[bytes, int] | None = None
        """What its seed was made of: the hash of its content, and how many equal calls came before."""
        self.choices = tuple(sampled)
        self.requests: tuple[SamplingRequest, ...] = tuple(sampled.values())
        """What is asked of the engine, until it is done."""
        self.num_prompt_tokens = planned.num_prompt
        self.name = f"{form.name}-{planned.number}"
        self.error: ApiError | None = None
        self.undelivered: Planned | None = planned
        self.give_up: Callable[[], None] = lambda: None
        """Called once no client has been there for GRACE_S."""
        self._clients: list[Callable[[], bool]] = []
        self._grace: asyncio.TimerHandle | None = None
        self._news, self._done = asyncio.Event(), asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Sampling has ended, well or not."""
        return self._done.is_set()

    @property
    def is_abandoned(self) -> bool:
        """No client got the answer, and none is there to get it."""
        return self.undelivered is not None and not any(is_there() for is_there in self._clients)

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @contextmanager
    def attended(self, is_there: Callable[[], bool]) -> Iterator[None]:
        """A client waits for the answer, and is connected while `is_there()`; left_nowait() says when it is
        not any more.
        """
        self._clients.append(is_there)
        self.left_nowait()
        try:
            yield
        finally:
            self._clients.remove(is_there)
            self.left_nowait()

    def left_nowait(self) -> None:
        """A client came or went: a call that is left alone has GRACE_S from now on."""
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
        """Sampling has ended. Idempotent: the first end stays."""
        if not self.is_done:
            self.error, self.requests = error, ()  # a call is kept as long as its session
            self._done.set()
            self._news.set()
            self.left_nowait()

    def feed(self, index: int, token_ids: Sequence[int]) -> None:
        """Some more tokens of a choice were sampled."""
        self.choices[index].feed(token_ids)
        self._news.set()

    async def wait_news(self) -> None:
        """Return once there is more text, or the end, since this was asked last."""
        await self._news.wait()
        if not self.is_done:
            self._news.clear()

    async def wait_done(self) -> None:
        """Return once sampling has ended. Raises ApiError if it failed."""
        await self._done.wait()
        if self.error is not None:
            raise self.error


def call_keys(
    number_of: Callable[[bytes], int], planned: Planned, asked: AnyRequest, grammar: str
) -> tuple[list[int], tuple[bytes, int] | None]:
    """(one key for each choice, of which its seed is made; what they are made of). They depend on the content
    of the call and on how many equal calls came before, never on the time.

    Equal calls that run at once may therefore swap their answers; the harness cannot tell them apart.
    """
    digest, shape = planned.prompt_hash.digest(), asked.shape() + grammar.encode()
    if shape:
        digest = blake2b(digest + shape, digest_size=16).digest()
    time_asked = None if asked.seed is not None else (digest, number_of(digest))
    number = f"seed {asked.seed}" if time_asked is None else f"time {time_asked[1]}"
    contents = [digest + f"/{number}/{index}".encode() for index in range(asked.n)]
    keys = [int.from_bytes(blake2b(each, digest_size=8).digest(), "big") >> 1 for each in contents]
    return keys, time_asked
