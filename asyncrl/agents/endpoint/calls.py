"""One call between its request and its answers, and which later requests are the same call again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from asyncrl.agents.endpoint.answer_text import Choice
from asyncrl.agents.endpoint.capture import Capture, Planned
from asyncrl.agents.endpoint.refusals import ApiError
from asyncrl.messages.records import SamplingRequest

Kind = Literal["chat", "text"]
"""/v1/chat/completions, or /v1/completions."""

_MAX_REFUSED = 1000
"""Different bodies of one session whose retry is known to be a call of its own."""

IsThere = Callable[[], bool]
"""Whether a client is still connected."""


@dataclass(frozen=True, slots=True)
class AskedAs:
    """What tells one call from another: the hash of its body (with its Idempotency-Key, if it has one), and
    whether its client says that it asks again.
    """

    digest: bytes
    is_retry: bool = False
    has_key: bool = False


class Call:
    """One sampling, and all clients that want its answer.

    Life:       sampled by the request that made it -> done, with answers or an error -> delivered, to the
                clients that are there by then. What was sampled is kept until it is delivered, and recorded
                then, once.
    Waits:      wait_done, and wait_news for a stream; both are woken by the sampling.
    Invariant:  a completion is in the capture if and only if it was written to a client that was there:
                deliver_nowait alone records.
    """

    def __init__(
        self,
        kind: Kind,
        asked_as: AskedAs,
        planned: Planned,
        choices: Sequence[Choice],
        requests: Sequence[SamplingRequest],
    ) -> None:
        self.kind, self.asked_as, self.created_s = kind, asked_as, int(time.time())
        self.choices, self.requests = tuple(choices), tuple(requests)
        self.num_prompt_tokens = len(planned.prompt_ids)
        self.name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{planned.number}"
        self.error: ApiError | None = None
        self._planned: Planned | None = planned
        self._clients: list[IsThere] = []
        self._news, self._done = asyncio.Event(), asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Sampling has ended, well or not."""
        return self._done.is_set()

    @property
    def is_abandoned(self) -> bool:
        """No client got the answer, and none is there to get it."""
        return self._planned is not None and not any(is_there() for is_there in self._clients)

    @property
    def num_completion_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @contextmanager
    def attended(self, is_there: IsThere) -> Iterator[None]:
        """A client waits for the answer."""
        self._clients.append(is_there)
        try:
            yield
        finally:
            self._clients.remove(is_there)

    def done_nowait(self, error: ApiError | None = None) -> None:
        """Sampling has ended. Idempotent: the first end stays."""
        if not self.is_done:
            self.error = error
            self._done.set()
            self._news.set()

    def news_nowait(self) -> None:
        """There is more text."""
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

    def deliver_nowait(self, capture: Capture) -> None:
        """The answer goes out to a client that is there: from here on it is part of the rollout."""
        planned, self._planned = self._planned, None
        if planned is None:
            return
        for choice in self.choices:
            name = self.name if choice.index == 0 else f"{self.name}/{choice.index}"
            capture.record(planned, choice.take_completion(), choice.message, name, choice=choice.index)


class CallTable:
    """The calls of one session, by what tells them apart. Holds no more than the session may make."""

    def __init__(self) -> None:
        self._calls: dict[bytes, list[Call]] = {}
        self._refused: Counter[bytes] = Counter()

    def add(self, call: Call) -> None:
        """A new call."""
        self._calls.setdefault(call.asked_as.digest, []).append(call)

    def drop(self, call: Call) -> None:
        """It failed: the next one like it is a call of its own."""
        same = self._calls.get(call.asked_as.digest, [])
        if call in same:
            same.remove(call)

    def clear(self) -> None:
        """The session has ended."""
        self._calls.clear()
        self._refused.clear()

    def refused_nowait(self, asked_as: AskedAs) -> None:
        """Its client was told to ask again later: what it retries was never sampled."""
        if asked_as.digest in self._refused or len(self._refused) < _MAX_REFUSED:
            self._refused[asked_as.digest] += 1

    def find(self, asked_as: AskedAs) -> Call | None:
        """The call that this one repeats: by its client's word, or because it is the same and no client got
        the answer.
        """
        same = self._calls.get(asked_as.digest, [])
        abandoned = next((call for call in same if call.is_abandoned), None)
        if abandoned is not None or not same:
            return abandoned
        if asked_as.has_key:
            return same[-1]
        if not asked_as.is_retry:
            return None
        if self._refused[asked_as.digest] > 0:  # the retry of one that was refused, and not of its twin
            self._refused[asked_as.digest] -= 1
            return None
        return same[-1]
