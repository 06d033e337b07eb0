"""Sessions: keys, limits, calls."""

from __future__ import annotations

import asyncio
import heapq
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from asyncrl.agents.endpoint.answers import Answer, Kind
from asyncrl.agents.endpoint.capture import Capture, PromptPlan
from asyncrl.agents.endpoint.dialects import Kept, KeptAnswers
from asyncrl.agents.endpoint.newest import Newest
from asyncrl.agents.endpoint.prefix_match import Messages
from asyncrl.agents.endpoint.requests import NO_RETRY, TOO_LONG, ApiError
from asyncrl.base.errors import RolloutFailure
from asyncrl.config import GatewayConfig
from asyncrl.messages.records import Outcome, Rollout, SamplingRequest, VersionSpan

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.engine_route import EngineRoute
    from asyncrl.agents.endpoint.listener import Connection

MAX_EXPIRED = 10_000
USER_SHARE = 16
"""Multiple of one rollout's limits for a user's key; then its next rollout begins."""
MAX_CONCURRENT_CALLS = 16
"""Answers of one rollout sampled at once; a call with n counts n times."""
USER_CONCURRENCY = 4
"""Multiple of MAX_CONCURRENT_CALLS for a user's key."""
OPEN_SHARE = 4
"""Requests read per answer being sampled."""
MAX_NUMBERED = 2**16
NUM_RETRIED = 16
FREE_SHARE = 10
"""Refused calls and counted chats, per call of max_calls."""
CLIENT_GONE = 499


def session_ended(reason: str) -> ApiError:
    return ApiError(410, f"This session has ended: {reason}", code="session_ended", headers=NO_RETRY)


def no_session(reason: str) -> ApiError:
    """Return a 410, or a 401 without a reason. It never has the key: answers are logged."""
    if reason:
        return session_ended(reason)
    why = "Unknown or missing session key. Send `Authorization: Bearer KEY` or `x-api-key: KEY`, or call "
    return ApiError(401, why + "/s/KEY/v1/....", code="invalid_api_key")


def client_gone() -> ApiError:
    return ApiError(CLIENT_GONE, "The client has disconnected.")


@dataclass(eq=False, repr=False, kw_only=True)
class GatewayCall:
    """A call from plan to delivery.

    Invariant: an answer is in the capture if and only if it was written to a connected client.
    """

    name: str
    model: str
    order: int
    planned: PromptPlan | None
    number: tuple[bytes, int] | None
    """Seed source; None if the client set a seed."""
    choices: tuple[Answer, ...]
    requests: tuple[SamplingRequest, ...]
    """Empty once sampled."""
    num_prompt_tokens: int
    is_streamed: bool
    is_trained: bool
    grammar: str | None
    created_s: int = field(default_factory=lambda: int(time.time()))
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def feed(self, choice: Answer, token_ids: Sequence[int]) -> None:
        choice.feed(token_ids)
        self.news.set()

    async def pieces(self) -> AsyncIterator[tuple[Answer, Kind, str]]:
        """Yield thoughts and texts as they grow, until the call is sampled."""
        num_yielded = Counter[tuple[int, Kind]]()
        is_last = False
        while not is_last:
            if self.requests:
                await self.news.wait()
                self.news.clear()
            is_last = not self.requests
            for choice in self.choices:
                texts: dict[Kind, str] = {"thought": choice.thought, "text": choice.shown}
                for kind, text in texts.items():
                    if piece := text[num_yielded[choice.index, kind] :]:
                        num_yielded[choice.index, kind] += len(piece)
                        yield choice, kind, piece


@dataclass(eq=False, repr=False)
class GatewaySession:
    """A rollout attempt: its key, recorded samples and calls in flight.

    Life: open -> ended, with a reason; the gateway then keeps only the reason.
    Waits: none; calls wait within in_hand(), the owner in while_open().
    Invariant: end_nowait cancels every call (ApiError 410). Only deliver_nowait adds to `capture`.
    """

    sessions: Sessions
    route: EngineRoute
    rollout_id: str
    _: KW_ONLY
    prompt_id: str
    sample_index: int
    attempt: int
    route_key: str
    user_key: str | None = None
    """Key of a user (`asyncrl serve gateway`)."""
    shows_special: bool = True

    def __post_init__(self) -> None:
        self.key = self.user_key or secrets.token_hex(24)
        self.is_users = self.user_key is not None
        self.limits = self.sessions.limits
        num_slots = MAX_CONCURRENT_CALLS * (USER_CONCURRENCY if self.is_users else 1)
        self.slots = asyncio.Semaphore(num_slots)
        self.capture = Capture(self.route.tokenizer, self.route.counts, self.route.tool_format.thinking)
        self.on_full: Callable[[], None] | None = None
        """Opens the next session of a user's key: this one has USER_SHARE times a rollout's limits."""
        self.kept = KeptAnswers(USER_SHARE * self.limits.max_calls)
        self.delivered = Newest[bytes, tuple[bytes, bool]](NUM_RETRIED)
        """(answer, is a stream) by the call's digest, for retries."""
        self.opening: Messages | None = None
        self.last_span: VersionSpan | None = None
        """Its engine has the cache."""
        self.ended: str | None = None
        self.num_calls = 0
        self.num_free_calls = 0
        self.num_spent = 0
        self.has_trained = False
        self.overflow: str | None = None
        """Limit that no later call's answer follows."""
        self._overflow_order = 0
        self._free_numbers = Newest[bytes, list[int]](MAX_NUMBERED)
        """Free numbers of equal calls, by hash."""
        self._open_requests = asyncio.Semaphore(OPEN_SHARE * num_slots)
        """Bounds bodies in memory."""
        self._scopes: set[asyncio.Timeout] = set()
        self._failure: RolloutFailure | None = None
        self.sessions.add(self)

    def spent_nowait(self, num_tokens: int) -> None:
        self.num_spent += num_tokens

    def end_nowait(self, reason: str) -> None:
        """Answer all calls with 410 and the first `reason`. Idempotent."""
        if self.ended is not None:
            return
        self.ended = reason
        self.delivered.clear()
        self._free_numbers.clear()
        self.kept.clear()
        self.sessions.expire(self)
        for scope in self._scopes:
            scope.reschedule(0.0)

    def fail_nowait(self, failure: RolloutFailure) -> None:
        if self.ended is None:
            self._failure = failure
            self.end_nowait(f"the rollout failed: {failure.what}")

    def free_call_nowait(self) -> None:
        self.num_free_calls += 1
        if self.num_free_calls <= FREE_SHARE * self.limits.max_calls or self.is_users:
            return
        if self.overflow is not None:
            self.end_nowait(f"the agent kept calling after a limit: {self.overflow}")
            return
        what = f"{self.rollout_id}: {self.num_free_calls} of its calls were refused or only counted tokens"
        rule = f"{FREE_SHARE} times gateway.max_calls={self.limits.max_calls} is the limit"
        self.fail_nowait(RolloutFailure(what, rule=rule, way_out="have the harness read the errors."))

    def take_number(self, digest: bytes) -> int:
        if digest not in self._free_numbers:
            self._free_numbers[digest] = [0]
        free = self._free_numbers[digest]
        number = heapq.heappop(free)
        if not free:
            free.append(number + 1)
        return number

    def withdraw_nowait(self, call: GatewayCall) -> None:
        """Forget an undelivered call; the next equal call reuses its seed."""
        if call.planned is None:
            return
        call.planned = None
        digest, number = call.number or (b"", 0)
        if digest in self._free_numbers:
            heapq.heappush(self._free_numbers[digest], number)

    def deliver_nowait(self, call: GatewayCall, continues: Kept | None) -> None:
        """Record answers just before they are written. Raises ApiError if the session ended."""
        if self.ended is not None:
            raise session_ended(self.ended)
        assert call.planned is not None, "a call is delivered once"
        for choice in call.choices:
            name = call.name if choice.index == 0 else f"{call.name}/{choice.index}"
            self.capture.record(
                call.planned,
                choice.completion,
                choice.message,
                name,
                choice=choice.index,
                is_trained=call.is_trained,
                grammar=call.grammar,
            )
        call.planned = None
        if continues is not None:
            messages = [*continues.messages, call.choices[0].message]
            self.kept[call.name] = continues._replace(messages=messages)
        self.has_trained |= call.is_trained
        if call.order > self._overflow_order:
            self.overflow = None
        if self.on_full is not None and self._is_full():
            on_full = self.on_full
            self.on_full = None
            on_full()

    def _is_full(self) -> bool:
        tokens = self.limits.max_rollout_tokens
        is_long = tokens is not None and self.capture.num_branch_tokens > USER_SHARE * tokens
        return is_long or self.num_completions > USER_SHARE * self.limits.max_calls

    def check_limits(self) -> None:
        """Raise ApiError (429) at a limit."""
        for number, unit, name in (
            (self.num_calls, "calls", "max_calls"),
            (self.capture.num_branch_tokens, "tokens in its branches", "max_rollout_tokens"),
        ):
            limit = getattr(self.limits, name)
            if limit is not None and number >= limit and not self.is_users:
                why = f"This rollout has {number} {unit}; gateway.{name}={limit} is the limit."
                self._overflowed_nowait(why)
                raise ApiError(429, why, type="requests", code="rate_limit_exceeded", headers=NO_RETRY)

    def _overflowed_nowait(self, why: str) -> None:
        self.overflow = why
        self._overflow_order = self.num_calls

    @property
    def num_completions(self) -> int:
        return self.capture.num_completions

    def last_text(self) -> str:
        """Raises RolloutFailure if there is none."""
        return self.capture.last_text(shows_special=self.shows_special)

    def rollout(self, sample_index: int, outcome: Outcome, reward: float) -> Rollout:
        """Return all branches, truncated if a limit stopped them. Raises RolloutFailure."""
        if self._failure is not None:
            raise self._failure
        rollout = self.capture.rollout(sample_index, outcome, reward)
        if self.overflow is None:
            return rollout
        return tuple(replace(branch, is_truncated=True) for branch in rollout)

    @asynccontextmanager
    async def in_hand(self, connection: Connection) -> AsyncIterator[None]:
        """Count refusals. Raise ApiError in the block when the session ends (410) or its client leaves."""
        ended = self._until_end(lambda reason: client_gone() if reason is None else session_ended(reason))
        try:
            async with ended as scope:
                connection.on_lost = partial(scope.reschedule, 0.0)
                if connection.transport.is_closing():
                    scope.reschedule(0.0)
                async with self._open_requests:
                    yield
        except ApiError as error:
            if error.error["code"] == TOO_LONG:
                self._overflowed_nowait(str(error))
            if 400 <= error.status < 500 and error.status not in (410, CLIENT_GONE):
                self.free_call_nowait()
            raise
        finally:
            connection.on_lost = lambda: None

    def while_open(self) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Raise RolloutFailure in the block when the session ends."""
        return self._until_end(
            lambda reason: (
                self._failure or RolloutFailure(f"the session of {self.rollout_id} ended: {reason}")
            )
        )

    @asynccontextmanager
    async def _until_end(self, error: Callable[[str | None], Exception]) -> AsyncIterator[asyncio.Timeout]:
        if self.ended is not None:
            raise error(self.ended)
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes.add(scope)
                try:
                    yield scope
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            if scope.expired():
                raise error(self.ended) from None
            raise


class Sessions:
    """Open sessions by key."""

    def __init__(self, limits: GatewayConfig) -> None:
        self.limits = limits
        self._open: dict[str, GatewaySession] = {}
        self._ended = Newest[str, str](MAX_EXPIRED)
        self._closed = ""

    def add(self, session: GatewaySession) -> None:
        self._open[session.key] = session
        if self._closed:
            session.end_nowait(self._closed)

    def find(self, key: str) -> GatewaySession:
        """Raises ApiError: 401 or 410."""
        if (session := self._open.get(key)) is None:
            raise no_session(self._ended.get(key, ""))
        return session

    def end_all_nowait(self, reason: str) -> None:
        self._closed = reason
        for session in list(self._open.values()):
            session.end_nowait(reason)

    def expire(self, session: GatewaySession) -> None:
        del self._open[session.key]
        self._ended[session.key] = session.ended or ""
