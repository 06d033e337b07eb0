"""Sessions: their keys, their limits and their calls. It knows neither HTTP nor engines."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from asyncrl.agents.endpoint.answers import NO_RETRY, Answer, ApiError, invalid
from asyncrl.agents.endpoint.capture import Capture, Planned
from asyncrl.agents.endpoint.chats import Messages
from asyncrl.agents.endpoint.forms.chat import Form
from asyncrl.agents.endpoint.forms.responses_written import KeptResponses
from asyncrl.agents.endpoint.sent_chats import SentChats
from asyncrl.config import GatewayConfig
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Outcome, Rollout, SamplingRequest, VersionSpan

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.engine_route import EngineRoute

MAX_EXPIRED = 10_000
"""Sessions whose end can still be explained to a call that comes too late."""
USER_SHARE = 16
"""A user's key may make this many times the calls of one rollout, and hold this many times its tokens, until
an outcome is posted.
"""
REFUSALS_PER_CALL = 10
"""Calls of one rollout that may be refused, for each that it may make."""


def unknown_key() -> ApiError:
    """401. The key itself is never shown: answers end up in logs."""
    why = "Unknown or missing session key. Send `Authorization: Bearer KEY` or `x-api-key: KEY`, or call "
    why += "/s/KEY/v1/...."
    return ApiError(401, why, code="invalid_api_key")


def session_ended(reason: str) -> ApiError:
    """410: the rollout is over, and so is its key."""
    return ApiError(410, f"This session has ended: {reason}", code="session_ended", headers=NO_RETRY)


def rate_limited(message: str, headers: Mapping[str, str]) -> ApiError:
    """429; `headers` say whether waiting helps."""
    return ApiError(429, message, type="requests", code="rate_limit_exceeded", headers=headers)


class GatewayCall:
    """One sampling, and all clients that want its answer.

    Life: sampled by the request that made it -> done, with answers or an error -> delivered, to the clients
        that are there by then. What was sampled is kept until it is delivered, and recorded then, once.
    Waits: wait_done, and wait_news for a stream; both are woken by the sampling.
    Invariant: a completion is in the capture if and only if it was written to a client that was there:
        GatewaySession.deliver_nowait alone records.
    """

    def __init__(
        self, form: Form, digest: bytes, planned: Planned, sampled: Mapping[Answer, SamplingRequest]
    ) -> None:
        """`digest`: of what was asked, by which it is known when it is asked again."""
        self.form, self.digest, self.created_s = form, digest, int(time.time())
        self.choices = tuple(sampled)
        self.requests: tuple[SamplingRequest, ...] = tuple(sampled.values())
        """What is asked of the engine, until it is done."""
        self.num_prompt_tokens = planned.num_prompt
        self.name = f"{form.name}-{planned.number}"
        self.error: ApiError | None = None
        self.undelivered: Planned | None = planned
        self._clients: list[Callable[[], bool]] = []
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
        """A client waits for the answer, and is connected while `is_there()`."""
        self._clients.append(is_there)
        try:
            yield
        finally:
            self._clients.remove(is_there)

    def done_nowait(self, error: ApiError | None = None) -> None:
        """Sampling has ended. Idempotent: the first end stays."""
        if not self.is_done:
            self.error, self.requests = error, ()  # a call is kept as long as its session
            self._done.set()
            self._news.set()

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


@dataclass(eq=False, repr=False)
class GatewaySession:
    """One attempt of a rollout: its key, what was sampled under it, and its calls in hand.

    Life: open -> ended, with a reason. Then the gateway forgets it but for the reason; its owner may still
        ask for the rollout, and what was sampled dies with the owner's reference. One that the gateway has
        ended for what its harness did (fail_nowait) has no rollout.
    Waits: none; its calls sleep in the engine, within in_hand(), and its owner in while_open().
    Invariant: no call outlives the session: end_nowait cancels every in_hand() block, which raises ApiError
        410. What is in `capture` was given to a client: deliver_nowait alone records.
    """

    sessions: Sessions
    route: EngineRoute
    """Where its calls are sampled."""
    rollout_id: str
    _: KW_ONLY
    prompt_id: str
    sample_index: int
    attempt: int
    route_key: str
    user_key: str | None = None
    """The key is a user's (`asyncrl serve gateway`), who may open one session after another."""

    def __post_init__(self) -> None:
        self.key, self.is_users = self.user_key or secrets.token_urlsafe(24), self.user_key is not None
        self.limits = self.sessions.limits
        self.capture = Capture(self.route.tokenizer, self.route.counts)
        self.sent = SentChats()
        self.kept = KeptResponses()
        self.num_counted = 0
        self.opening: Messages | None = None
        """Messages of the first call, kept of a user's session alone."""
        self.last_span: VersionSpan | None = None
        """The end of the newest completion: its engine has the conversation in its cache."""
        self.ended: str | None = None
        """Why it has ended; None while it is open."""
        self.num_calls = self.num_refused = self.num_sampling = 0
        """Sampling: choices, each of which is a request to the engine."""
        self.reading = asyncio.Semaphore(self.limits.max_concurrent_calls)
        """Held while a call is being sent; bounds the bodies in memory."""
        self.beginning = asyncio.Lock()
        """Held from the search for an equal call until a new one is in `calls`."""
        self.calls: dict[bytes, list[GatewayCall | None]] = {}
        """By what was asked. None: a call that was refused for now, and will be asked again."""
        self.times_asked: dict[bytes, int] = {}
        """How many calls had the same prompt, by its hash."""
        self._scopes: set[asyncio.Timeout] = set()
        self._failure: RolloutFailure | None = None
        self.sessions.add(self)

    def end_nowait(self, reason: str) -> None:
        """No call is answered any more (410 with `reason`), those in hand included. Idempotent: the first
        reason stays.
        """
        if self.ended is not None:
            return
        self.ended = reason
        self.calls.clear()
        self.times_asked.clear()
        self.sent, self.kept = SentChats(), KeptResponses()
        self.sessions.expire(self)
        for scope in self._scopes:
            scope.reschedule(0.0)

    def fail_nowait(self, failure: RolloutFailure) -> None:
        """End it, and its rollout with it."""
        if self.ended is None:
            self._failure = failure
            self.end_nowait(f"the rollout failed: {failure.what}")

    def refused_nowait(self) -> None:
        """One of its calls was refused. That costs time too, so a harness that goes on is stopped."""
        self.num_refused += 1
        if self.num_refused > REFUSALS_PER_CALL * self.limits.max_calls and not self.is_users:
            what = f"{self.rollout_id}: {self.num_refused} of its calls were refused"
            rule = f"{REFUSALS_PER_CALL} times gateway.max_calls={self.limits.max_calls} is the limit"
            self.fail_nowait(RolloutFailure(what, rule=rule, way_out="have the harness read the errors."))

    def count_nowait(self) -> None:
        """One of its chats is counted. Raises ApiError (429) for the one that is too much."""
        most = REFUSALS_PER_CALL * self.limits.max_calls
        if self.num_counted >= most and not self.is_users:
            why = f"{most} chats were counted, {REFUSALS_PER_CALL} for each of gateway.max_calls."
            raise rate_limited(why, NO_RETRY)
        self.num_counted += 1

    def find_call(self, digest: bytes, *, is_retry: bool) -> GatewayCall | None:
        """The call that this one repeats: the client says so, or it is equal and its answer reached no
        client.
        """
        same = self.calls.get(digest, [])
        abandoned = next((call for call in same if call is not None and call.is_abandoned), None)
        if abandoned is not None or not is_retry or not same:
            return abandoned
        if None in same:  # the retry of one that was refused, and not of its twin
            same.remove(None)
            return None
        return same[-1]

    def deliver_nowait(self, call: GatewayCall) -> None:
        """The answer goes out to a client that is there: from here on it is part of the rollout."""
        planned, call.undelivered = call.undelivered, None
        if planned is None:
            return
        for choice in call.choices:
            name = call.name if choice.index == 0 else f"{call.name}/{choice.index}"
            completion = choice.take_completion()
            self.capture.record(planned, completion, choice.message, name, choice=choice.index)
        num_tokens, most = self.capture.num_branch_tokens, self.limits.max_rollout_tokens
        if most is not None and num_tokens > most and not self.is_users:
            what = f"{self.rollout_id}: its branches have {num_tokens} tokens after {self.num_calls} calls"
            rule = f"gateway.max_rollout_tokens={most}; context that branches share counts in each"
            way_out = "have the harness keep its history, so that calls go on from each other, or raise it."
            self.fail_nowait(RolloutFailure(what, rule=rule, way_out=way_out))

    def check_limits(self, num_choices: int) -> None:
        """Raise ApiError if it may not sample one call more, with so many choices: 429, or 400 if it never
        may.
        """
        most, share, more = self.limits.max_concurrent_calls, 1, ""
        if num_choices > most:
            raise invalid(f"n={num_choices} is refused: gateway.max_concurrent_calls={most}.", "n")
        if self.is_users:
            share, more = USER_SHARE, f", {USER_SHARE} times for a user. Post an outcome to /v1/outcome with "
            more += "the outcome key: it begins the next rollout"
        for number, what, name in (
            (self.num_calls, "calls", "max_calls"),
            (self.capture.num_branch_tokens, "tokens in its branches", "max_rollout_tokens"),
        ):
            limit = getattr(self.limits, name)
            if limit is not None and number >= share * limit:
                why = f"This rollout has {number} {what}; gateway.{name}={limit} is the limit{more}."
                raise rate_limited(why, NO_RETRY)
        if self.num_sampling + num_choices > most:
            why = (
                f"{self.num_sampling} answers of this rollout are being sampled, {num_choices} more are asked"
            )
            why += f" for; gateway.max_concurrent_calls={most} is the most at once."
            raise rate_limited(why, {"Retry-After": "1"})

    def last_text(self) -> str:
        """Text of the completion that was asked for last. Raises RolloutFailure if there is none."""
        return self.capture.last_text()

    def rollout(self, sample_index: int, outcome: Outcome, reward: float) -> Rollout:
        """Everything that was sampled, by branches. Raises RolloutFailure if that is nothing, or `outcome`
        names what is not there.
        """
        if self._failure is not None:
            raise self._failure
        return self.capture.rollout(sample_index, outcome, reward)

    def in_hand(self) -> AbstractAsyncContextManager[None]:
        """A block that is left with ApiError 410 when the session ends."""
        return self._until_end(session_ended)

    def while_open(self) -> AbstractAsyncContextManager[None]:
        """A block that is left with RolloutFailure when the session ends."""

        def failure(reason: str) -> RolloutFailure:
            return self._failure or RolloutFailure(f"the session of {self.rollout_id} ended: {reason}")

        return self._until_end(failure)

    @asynccontextmanager
    async def _until_end(self, error: Callable[[str], Exception]) -> AsyncIterator[None]:
        if self.ended is not None:
            raise error(self.ended)
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            if scope.expired() and self.ended is not None:
                raise error(self.ended) from None
            raise


class Expired(OrderedDict[str, str]):
    """Why what is gone has ended, by its key: the newest `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def add(self, key: str, reason: str) -> None:
        self[key] = reason
        if len(self) > self._most:
            self.popitem(last=False)

    def error(self, key: str) -> ApiError:
        """401 for a key that was never there, 410 with the reason."""
        return session_ended(self[key]) if key in self else unknown_key()


class Sessions:
    """All open sessions by key, and why the expired ones ended.

    Invariant: a session that has ended is in no table.
    """

    def __init__(self, limits: GatewayConfig) -> None:
        self.limits = limits
        self._open: dict[str, GatewaySession] = {}
        self._expired, self._closed = Expired(MAX_EXPIRED), ""

    def add(self, session: GatewaySession) -> None:
        self._open[session.key] = session
        if self._closed:
            session.end_nowait(self._closed)

    def find(self, key: str) -> GatewaySession:
        """The open session of this key. Raises ApiError: 401 or 410."""
        if (session := self._open.get(key)) is None:
            raise self._expired.error(key)
        return session

    def end_all_nowait(self, reason: str) -> None:
        """End every session, those too that are opened later."""
        self._closed = reason
        for session in list(self._open.values()):
            session.end_nowait(reason)

    def expire(self, session: GatewaySession) -> None:
        del self._open[session.key]
        self._expired.add(session.key, session.ended or "")
