"""One call between its request and its answers, and which later requests are the same call again. Knows no
engine and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from asyncrl.agents.endpoint.capture import Capture, Planned
from asyncrl.agents.endpoint.choices import Choice
from asyncrl.agents.endpoint.refusals import ApiError, invalid

Kind = Literal["chat", "text"]
"""/v1/chat/completions, or /v1/completions."""

_MAX_REFUSED = 1000
"""Different bodies of one session whose retry is known to be a call of its own."""

IsThere = Callable[[], bool]
"""Whether a client is still connected."""


@dataclass(frozen=True, slots=True)
class AskedAs:
    """What tells one call from another: its body, and what its client's headers say of it."""

    digest: bytes
    idempotency_key: str | None = None
    is_retry: bool = False


class Call:
    """One sampling, and everybody who wants its answer.

    Life:       sampled by the request that made it -> done, with answers or an error -> delivered, to whoever
    is there by then.
                What was sampled is kept until it is delivered, and recorded then, once.
    Waits:      wait_done, and wait_news for a stream; both are woken by the sampling.
    Invariant:  a completion is in the capture if and only if it was written to a client that was there:
    deliver_nowait alone records.
    """

    def __init__(
        self, kind: Kind, asked_as: AskedAs, planned: Planned, choices: Sequence[Choice], *, created_s: int
    ) -> None:
        self.kind, self.asked_as, self.choices, self.created_s = kind, asked_as, tuple(choices), created_s
        self.num_prompt_tokens = len(planned.prompt_ids)
        self.name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{planned.number}"
        self.error: ApiError | None = None
        self._planned: Planned | None = planned
        self._clients: list[IsThere] = []
        self._news, self._done = asyncio.Event(), asyncio.Event()

    def __repr__(self) -> str:
        state = (
            "sampling"
            if not self.is_done
            else "delivered"
            if self._planned is None
            else "waiting for its client"
        )
        return f"<Call {self.name} {state}>"

    @property
    def is_done(self) -> bool:
        """Sampling has ended, well or not."""
        return self._done.is_set()

    @property
    def is_abandoned(self) -> bool:
        """Nobody got the answer, and nobody is there to get it."""
        return self._planned is not None and not any(is_there() for is_there in self._clients)

    @property
    def num_completion_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @contextmanager
    def attended(self, is_there: IsThere) -> Iterator[None]:
        """Somebody waits for the answer."""
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
        if self._planned is None:
            return
        planned, self._planned = self._planned, None
        for choice in self.choices:
            capture.record(
                planned,
                choice.take_completion(),
                choice.message,
                self.choice_name(choice.index),
                choice=choice.index,
            )

    def choice_name(self, index: int) -> str:
        """Name of one completion, for the rewards of an Outcome."""
        return self.name if index == 0 else f"{self.name}/{index}"


class CallTable:
    """The calls of one session, by what tells them apart. Holds no more than the session may make."""

    def __init__(self) -> None:
        self._by_body: dict[bytes, list[Call]] = {}
        self._by_key: dict[str, Call] = {}
        self._refused: Counter[bytes | None] = Counter()

    def add(self, call: Call) -> None:
        """A new call."""
        self._by_body.setdefault(call.asked_as.digest, []).append(call)
        if call.asked_as.idempotency_key is not None:
            self._by_key[call.asked_as.idempotency_key] = call

    def drop(self, call: Call) -> None:
        """It failed: the next one like it is a call of its own."""
        same = self._by_body.get(call.asked_as.digest, [])
        if call in same:
            same.remove(call)
        if (
            call.asked_as.idempotency_key is not None
            and self._by_key.get(call.asked_as.idempotency_key) is call
        ):
            del self._by_key[call.asked_as.idempotency_key]

    def clear(self) -> None:
        """The session has ended."""
        self._by_body.clear()
        self._by_key.clear()
        self._refused.clear()

    def refused_nowait(self, digest: bytes | None) -> None:
        """Its client was told to ask again later: what it retries was never sampled. `digest` None: its body
        was not read.
        """
        if digest in self._refused or len(self._refused) < _MAX_REFUSED:
            self._refused[digest] += 1

    def find(self, asked_as: AskedAs) -> Call | None:
        """The call that this one repeats: by its key, by its client's word, or because it is the same and
        nobody got the answer.
        """
        keyed = self._by_key.get(asked_as.idempotency_key) if asked_as.idempotency_key is not None else None
        if keyed is not None:
            if keyed.asked_as.digest != asked_as.digest:
                raise invalid(
                    "This Idempotency-Key was used with another body; a new call needs a new key.",
                    code="idempotency_key_reused",
                )
            return keyed
        same = self._by_body.get(asked_as.digest, [])
        abandoned = next((call for call in same if call.is_abandoned), None)
        if abandoned is not None:
            return abandoned
        if not asked_as.is_retry or self._is_retry_of_refused(asked_as.digest):
            return None
        return same[-1] if same else None

    def _is_retry_of_refused(self, digest: bytes) -> bool:
        """Whether one that was refused is still to come again; it has, then."""
        for key in (digest, None):
            if self._refused[key]:
                self._refused.subtract([key])
                if not self._refused[key]:
                    del self._refused[key]
                return True
        return False
