"""Sessions: keys, limits, calls. Independent of HTTP and engines."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.agents.endpoint.answers import NO_RETRY, ApiError, invalid
from asyncrl.agents.endpoint.branches import ChatNode, make_rollout
from asyncrl.agents.endpoint.calls.gateway_call import GatewayCall, Room
from asyncrl.agents.endpoint.capture import Capture
from asyncrl.agents.endpoint.forms.responses_written import KeptResponses
from asyncrl.agents.endpoint.prefix_match import Messages
from asyncrl.base.errors import RolloutFailure
from asyncrl.config import GatewayConfig
from asyncrl.messages.records import Outcome, Rollout, VersionSpan

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.engine_route import EngineRoute

MAX_EXPIRED = 10_000
"""Ended sessions with a known reason."""
USER_SHARE = 16
"""Multiple of one rollout's limits that a user's key keeps until an outcome is posted; older conversations
are forgotten.
"""
USER_ROOM = 4
"""Multiple of max_concurrent_calls for a user's key."""
BEGUN_SHARE = 4
"""Calls of a session that are read, per call being sampled."""
MAX_TIMES = 2**16
"""Distinct calls whose repeats are counted."""
REFUSALS_PER_CALL = 10


def unknown_key() -> ApiError:
    """Return a 401 without the key: answers end up in logs."""
    why = "Unknown or missing session key. Send `Authorization: Bearer KEY` or `x-api-key: KEY`, or call "
    why += "/s/KEY/v1/...."
    return ApiError(401, why, code="invalid_api_key")


def session_ended(reason: str) -> ApiError:
    return ApiError(410, f"This session has ended: {reason}", code="session_ended", headers=NO_RETRY)


def used_up(why: str) -> ApiError:
    """Return a 429 that waiting does not reset."""
    return ApiError(429, why, type="requests", code="rate_limit_exceeded", headers=NO_RETRY)


@dataclass(eq=False, repr=False)
class GatewaySession:
    """An attempt of a rollout: its key, its recorded samples, and its calls in flight.

    Life: open -> ended, with a reason. The gateway then forgets all but the reason; the owner may still get
        the rollout, unless fail_nowait ended the session.
    Waits: none; its calls wait in `room` and in the engine, within in_hand(), and its owner in while_open().
        A call that waits for a place holds no lock.
    Invariant: no call outlives the session: end_nowait cancels every in_hand() block, which raises ApiError
        410. All of `capture` was delivered: only deliver_nowait records.
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
    """Key of a user (`asyncrl serve gateway`), who may open sessions one after another."""
    shows_special: bool = True

    def __post_init__(self) -> None:
        self.key, self.is_users = self.user_key or secrets.token_hex(24), self.user_key is not None
        self.limits = self.sessions.limits
        self.room = Room(self.limits.max_concurrent_calls * (USER_ROOM if self.is_users else 1))
        marks = self.route.tool_format.thinking
        self.capture = Capture(self.route.tokenizer, self.route.counts, marks)
        self.on_forgotten: Callable[[Rollout], None] = lambda rollout: None
        """Receives conversations that a user's key drops."""
        self.responses = KeptResponses(USER_SHARE * self.limits.max_calls)
        self.num_counted = 0
        self.opening: Messages | None = None
        """Messages of a user session's first call."""
        self.last_span: VersionSpan | None = None
        """End of the newest completion; its engine has the cache."""
        self.ended: str | None = None
        """Reason of the end; None while open."""
        self.num_calls = self.num_refused = 0
        self.num_spent = 0
        self.has_trained = False
        self.overflow: str | None = None
        """Limit that a call hit, if no later call was answered."""
        self._overflow_order, self._overflowed = 0, dict[ChatNode | None, None]()
        self.begun = asyncio.Semaphore(BEGUN_SHARE * self.room.most)
        """Held until a call is answered; bounds the prompts in memory."""
        self.reading = asyncio.Semaphore(self.room.most)
        """Held while a body is received; bounds the bodies in memory."""
        self.beginning = asyncio.Lock()
        """Held from the search for an equal call until a new one is in `calls`."""
        self.calls: dict[bytes, list[GatewayCall]] = {}
        self._newest: deque[GatewayCall] = deque()
        """Finished calls kept for repeats, oldest first."""
        self._times_asked: OrderedDict[bytes, tuple[int, list[int]]] = OrderedDict()
        """Number of equal calls, and their free numbers, by hash."""
        self._scopes: set[asyncio.Timeout] = set()
        self._failure: RolloutFailure | None = None
        self.sessions.add(self)

    def spent_nowait(self, num_tokens: int) -> None:
        self.num_spent += num_tokens

    def end_nowait(self, reason: str) -> None:
        """End all calls with 410 and `reason`. Idempotent: the first reason stays."""
        if self.ended is not None:
            return
        self.ended = reason
        self.calls.clear()
        self._newest.clear()
        self._times_asked.clear()
        self.responses = KeptResponses(0)
        self.sessions.expire(self)
        for scope in self._scopes:
            scope.reschedule(0.0)

    def fail_nowait(self, failure: RolloutFailure) -> None:
        if self.ended is None:
            self._failure = failure
            self.end_nowait(f"the rollout failed: {failure.what}")

    def refused_nowait(self) -> None:
        """Refusals cost time, so too many end the session."""
        self.num_refused += 1
        if self.num_refused > REFUSALS_PER_CALL * self.limits.max_calls and not self.is_users:
            if self.overflow is not None:
                self.end_nowait(f"it has met a limit, and called on: {self.overflow}")
                return
            what = f"{self.rollout_id}: {self.num_refused} of its calls were refused"
            rule = f"{REFUSALS_PER_CALL} times gateway.max_calls={self.limits.max_calls} is the limit"
            self.fail_nowait(RolloutFailure(what, rule=rule, way_out="have the harness read the errors."))

    def count_nowait(self) -> None:
        """Raises ApiError (429) above the limit."""
        most = REFUSALS_PER_CALL * self.limits.max_calls
        if self.num_counted >= most and not self.is_users:
            why = f"{most} chats were counted, {REFUSALS_PER_CALL} for each of gateway.max_calls."
            raise used_up(why)
        self.num_counted += 1

    def find_call(self, digest: bytes, *, is_retry: bool) -> GatewayCall | None:
        """Return the repeated call: marked as a retry, or equal and undelivered."""
        same = self.calls.get(digest, [])
        abandoned = next((call for call in same if call.is_abandoned), None)
        return same[-1] if abandoned is None and is_retry and same else abandoned

    def keep_nowait(self, call: GatewayCall) -> None:
        """Keep a finished call for repeats."""
        self._newest.append(call)
        if len(self._newest) > self.limits.max_calls:
            self._drop(self._newest.popleft())

    def forget_nowait(self, call: GatewayCall) -> None:
        """Forget a call without an answer: the next equal call gets the same seed. Idempotent: a call that
        was given up is forgotten before its sampling ends, and its number may be in use again.
        """
        self._drop(call)
        planned, call.undelivered = call.undelivered, None
        if planned is not None:
            self.capture.withdraw(planned)
        digest, number = call.time_asked or (b"", 0)
        call.time_asked = None
        if digest in self._times_asked:
            heapq.heappush(self._times_asked[digest][1], number)

    def _drop(self, call: GatewayCall) -> None:
        same = self.calls.get(call.digest, [])
        if call in same:
            same.remove(call)
        if not same:
            self.calls.pop(call.digest, None)

    def number_of(self, digest: bytes) -> int:
        times, free = self._times_asked.pop(digest, (0, []))
        number = heapq.heappop(free) if free else times
        self._times_asked[digest] = max(times, number + 1), free
        if len(self._times_asked) > MAX_TIMES:
            self._times_asked.popitem(last=False)
        return number

    def deliver_nowait(self, call: GatewayCall) -> None:
        """Record the answers at delivery to a connected client."""
        planned, call.undelivered = call.undelivered, None
        if planned is None:
            return
        for choice in call.choices:
            name = call.name if choice.index == 0 else f"{call.name}/{choice.index}"
            completion, number = choice.take_completion(), choice.index
            about: dict[str, Any] = {"is_trained": call.is_trained, "grammar": call.grammar}
            self.capture.record(planned, completion, choice.message, name, choice=number, **about)
        self.has_trained |= call.is_trained
        if call.order > self._overflow_order:
            self.overflow = None
        if self.is_users:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget conversations down to three quarters of a user's limits."""
        tokens, limits = self.limits.max_rollout_tokens, self.limits
        most, most_tokens = USER_SHARE * limits.max_calls, math.inf if tokens is None else USER_SHARE * tokens
        if self.capture.num_completions <= most and self.capture.num_branch_tokens <= most_tokens:
            return
        forgotten = self.capture.forget_oldest(3 * most // 4, 0.75 * most_tokens)
        with contextlib.suppress(RolloutFailure):  # nothing in it is trained
            self.on_forgotten(self._marked(make_rollout(forgotten, 0, Outcome(), 0.0)))
        for node in forgotten:
            self._overflowed.pop(node, None)

    def check_limits(self, num_choices: int) -> None:
        """Raise ApiError if the session may not sample this call: 429, or 400 if it never may. Users'
        sessions have no such limits except on `num_choices`.
        """
        if num_choices > self.room.most:
            raise invalid(f"n={num_choices} is refused: gateway.max_concurrent_calls={self.room.most}.", "n")
        for number, what, name in (
            (self.num_calls, "calls", "max_calls"),
            (self.capture.num_branch_tokens, "tokens in its branches", "max_rollout_tokens"),
        ):
            limit = getattr(self.limits, name)
            if limit is not None and number >= limit and not self.is_users:
                why = f"This rollout has {number} {what}; gateway.{name}={limit} is the limit."
                self.overflowed_nowait(why)
                raise used_up(why)

    def overflowed_nowait(self, why: str, cut: ChatNode | None = None) -> None:
        self.overflow, self._overflow_order = why, self.num_calls
        self._overflowed.pop(cut, None)
        self._overflowed[cut] = None  # the newest is last

    @property
    def num_completions(self) -> int:
        return self.capture.num_completions

    def last_text(self) -> str:
        """Raises RolloutFailure if there is none."""
        return self.capture.last_text(shows_special=self.shows_special)

    def rollout(self, sample_index: int, outcome: Outcome, reward: float) -> Rollout:
        """Return all branches; those that a limit may have ended are truncated. Raises RolloutFailure if
        there are none, or if `outcome` names missing ones.
        """
        if self._failure is not None:
            raise self._failure
        return self._marked(self.capture.rollout(sample_index, outcome, reward))

    def _marked(self, rollout: Rollout) -> Rollout:
        ends = [node.all_ids() for node in self._overflowed if node is not None]
        is_any = self.overflow is not None and next(reversed(self._overflowed)) is None
        return tuple(
            replace(branch, is_truncated=True)
            if is_any or any(np.array_equal(branch.token_ids, ids) for ids in ends)
            else branch
            for branch in rollout
        )

    def in_hand(self) -> AbstractAsyncContextManager[None]:
        """Return a block that raises ApiError 410 when the session ends."""
        return self._until_end(session_ended)

    def while_open(self) -> AbstractAsyncContextManager[None]:
        """Return a block that raises RolloutFailure when the session ends."""

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


class Expired:
    def __init__(self, most: int) -> None:
        self._most = most
        self._reasons: dict[str, str] = {}

    def add(self, key: str, reason: str) -> None:
        self._reasons[key] = reason
        if len(self._reasons) > self._most:
            del self._reasons[next(iter(self._reasons))]

    def why(self, key: str) -> str:
        """Return the reason; empty for an unknown key."""
        return self._reasons.get(key, "")

    def error(self, key: str) -> ApiError:
        """Return a 401 for an unknown key, a 410 for an ended one."""
        return session_ended(reason) if (reason := self.why(key)) else unknown_key()


class Sessions:
    """All open sessions by key. Invariant: an ended session is in no table."""

    def __init__(self, limits: GatewayConfig) -> None:
        self.limits = limits
        self._open: dict[str, GatewaySession] = {}
        self._expired, self._closed = Expired(MAX_EXPIRED), ""

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
        """End every session, including those opened later."""
        self._closed = reason
        for session in list(self._open.values()):
            session.end_nowait(reason)

    def expire(self, session: GatewaySession) -> None:
        del self._open[session.key]
        self._expired.add(session.key, session.ended or "")
