"""Sessions: keys, limits, calls."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.agents.endpoint.answers import Answer
from asyncrl.agents.endpoint.capture import Capture, ChatNode, PromptPlan, make_rollout
from asyncrl.agents.endpoint.dialects import KeptAnswers
from asyncrl.agents.endpoint.prefix_match import Messages
from asyncrl.agents.endpoint.requests import NO_RETRY, ApiError, PromptTooLongError
from asyncrl.base.errors import RolloutFailure
from asyncrl.config import GatewayConfig
from asyncrl.messages.records import Outcome, Rollout, SamplingRequest, VersionSpan

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.engine_route import EngineRoute

MAX_EXPIRED = 10_000
USER_SHARE = 16
"""Multiple of one rollout's limits for a user's key; older conversations are forgotten."""
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


def unknown_key() -> ApiError:
    """Return a 401 without the key: answers are logged."""
    why = "Unknown or missing session key. Send `Authorization: Bearer KEY` or `x-api-key: KEY`, or call "
    return ApiError(401, why + "/s/KEY/v1/....", code="invalid_api_key")


def session_ended(reason: str) -> ApiError:
    return ApiError(410, f"This session has ended: {reason}", code="session_ended", headers=NO_RETRY)


@dataclass(eq=False, repr=False, kw_only=True)
class GatewayCall:
    """A call from plan to delivery.

    Invariant: an answer is in the capture if and only if it was written to a connected client.
    """

    name: str
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

    def feed(self, index: int, token_ids: Sequence[int]) -> None:
        self.choices[index].feed(token_ids)
        self.news.set()


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
        self.open_requests = asyncio.Semaphore(OPEN_SHARE * num_slots)
        """Bounds bodies in memory."""
        self.capture = Capture(self.route.tokenizer, self.route.counts, self.route.tool_format.thinking)
        self.on_forgotten: Callable[[Rollout], None] = lambda rollout: None
        self.kept = KeptAnswers(USER_SHARE * self.limits.max_calls)
        self.opening: Messages | None = None
        self.last_span: VersionSpan | None = None
        """Its engine has the cache."""
        self.ended: str | None = None
        self.num_calls = 0
        self.num_free_calls = 0
        self.num_spent = 0
        self.has_trained = False
        self.overflow: str | None = None
        """Limit hit by the last call."""
        self.delivered: dict[bytes, GatewayCall] = {}
        """Delivered calls by digest, for retries."""
        self._overflow_order = 0
        self._cut: dict[ChatNode | None, None] = {}
        """None: any."""
        self._free_numbers: dict[bytes, list[int]] = {}
        """Free numbers of equal calls, by hash."""
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
        self.kept = KeptAnswers(0)
        self.sessions.expire(self)
        for scope in self._scopes:
            scope.reschedule(0.0)

    def fail_nowait(self, failure: RolloutFailure) -> None:
        if self.ended is None:
            self._failure = failure
            self.end_nowait(f"the rollout failed: {failure.what}")

    def refused_nowait(self, error: ApiError) -> None:
        if isinstance(error, PromptTooLongError):
            self.overflowed_nowait(str(error), error.parent)
        if 400 <= error.status < 500 and error.status not in (410, CLIENT_GONE):
            self.free_call_nowait()

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
        free = self._free_numbers.setdefault(digest, [0])
        number = heapq.heappop(free)
        if not free:
            free.append(number + 1)
        if len(self._free_numbers) > MAX_NUMBERED:
            del self._free_numbers[next(iter(self._free_numbers))]
        return number

    def withdraw_nowait(self, call: GatewayCall) -> None:
        """Forget an undelivered call; the next equal call reuses its seed."""
        if call.planned is None:
            return
        self.capture.withdraw(call.planned)
        call.planned = None
        digest, number = call.number or (b"", 0)
        if digest in self._free_numbers:
            heapq.heappush(self._free_numbers[digest], number)

    def deliver_nowait(self, call: GatewayCall, digest: bytes) -> None:
        """Record answers just before they are written. Raises ApiError if the session ended."""
        if self.ended is not None:
            raise session_ended(self.ended)
        assert call.planned is not None, "a call is delivered once"
        for choice in call.choices:
            name = call.name if choice.index == 0 else f"{call.name}/{choice.index}"
            self.capture.record(
                call.planned,
                choice.take_completion(),
                choice.message,
                name,
                choice=choice.index,
                is_trained=call.is_trained,
                grammar=call.grammar,
            )
        call.planned = None
        self.delivered[digest] = call
        if len(self.delivered) > NUM_RETRIED:
            del self.delivered[next(iter(self.delivered))]
        self.has_trained |= call.is_trained
        if call.order > self._overflow_order:
            self.overflow = None
        if self.is_users:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        tokens = self.limits.max_rollout_tokens
        most = USER_SHARE * self.limits.max_calls
        most_tokens = math.inf if tokens is None else USER_SHARE * tokens
        if self.capture.num_completions <= most and self.capture.num_branch_tokens <= most_tokens:
            return
        forgotten = self.capture.forget_oldest(3 * most // 4, 0.75 * most_tokens)
        with contextlib.suppress(RolloutFailure):  # untrained
            self.on_forgotten(self._marked(make_rollout(forgotten, 0, Outcome(), 0.0)))
        for node in forgotten:
            self._cut.pop(node, None)

    def check_limits(self) -> None:
        """Raise ApiError (429) at a limit."""
        for number, unit, name in (
            (self.num_calls, "calls", "max_calls"),
            (self.capture.num_branch_tokens, "tokens in its branches", "max_rollout_tokens"),
        ):
            limit = getattr(self.limits, name)
            if limit is not None and number >= limit and not self.is_users:
                why = f"This rollout has {number} {unit}; gateway.{name}={limit} is the limit."
                self.overflowed_nowait(why)
                raise ApiError(429, why, type="requests", code="rate_limit_exceeded", headers=NO_RETRY)

    def overflowed_nowait(self, why: str, cut: ChatNode | None = None) -> None:
        self.overflow = why
        self._overflow_order = self.num_calls
        self._cut.pop(cut, None)
        self._cut[cut] = None

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
        return self._marked(self.capture.rollout(sample_index, outcome, reward))

    def _marked(self, rollout: Rollout) -> Rollout:
        ends = [node.all_ids() for node in self._cut if node is not None]
        is_any = self.overflow is not None and next(reversed(self._cut)) is None
        return tuple(
            replace(branch, is_truncated=True)
            if is_any or any(np.array_equal(branch.token_ids, ids) for ids in ends)
            else branch
            for branch in rollout
        )

    def in_hand(self) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Raise ApiError in the block when the session ends (410) or its client leaves."""
        return self._until_end(lambda reason: client_gone() if reason is None else session_ended(reason))

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


CLIENT_GONE = 499


def client_gone() -> ApiError:
    return ApiError(CLIENT_GONE, "The client has disconnected.")


class Expired:
    def __init__(self, most: int) -> None:
        self._most = most
        self._reasons: dict[str, str] = {}

    def add(self, key: str, reason: str) -> None:
        self._reasons[key] = reason
        if len(self._reasons) > self._most:
            del self._reasons[next(iter(self._reasons))]

    def why(self, key: str) -> str:
        return self._reasons.get(key, "")

    def error(self, key: str) -> ApiError:
        return session_ended(reason) if (reason := self.why(key)) else unknown_key()


class Sessions:
    """Open sessions by key."""

    def __init__(self, limits: GatewayConfig) -> None:
        self.limits = limits
        self._open: dict[str, GatewaySession] = {}
        self._expired = Expired(MAX_EXPIRED)
        self._closed = ""

    def add(self, session: GatewaySession) -> None:
        self._open[session.key] = session
        if self._closed:
            session.end_nowait(self._closed)

    def find(self, key: str) -> GatewaySession:
        """Raises ApiError: 401 or 410."""
        if (session := self._open.get(key)) is None:
            raise self._expired.error(key)
        return session

    def end_all_nowait(self, reason: str) -> None:
        self._closed = reason
        for session in list(self._open.values()):
            session.end_nowait(reason)

    def expire(self, session: GatewaySession) -> None:
        del self._open[session.key]
        self._expired.add(session.key, session.ended or "")
