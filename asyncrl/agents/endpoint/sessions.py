"""Sessions: keys, limits, calls."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from asyncrl.agents.endpoint.calls import ChatsByAnswer
from asyncrl.agents.endpoint.capture import Capture
from asyncrl.agents.endpoint.prefix_match import Messages
from asyncrl.agents.endpoint.requests import NO_RETRY, TOO_LONG, ApiError
from asyncrl.base.errors import RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.base.waits import within
from asyncrl.config import GatewayConfig
from asyncrl.messages.records import (
    RUN_RULES,
    Completion,
    Outcome,
    Rollout,
    SessionRules,
    VersionSpan,
)
from asyncrl.messages.turn_rewards import by_completion

# Per rollout, so that one agent that floods the endpoint cannot fill the engines.
MAX_CONCURRENT_CALLS = 16
"""Answers of one rollout sampled at once."""
OPEN_SHARE = 4
"""Requests read per answer being sampled."""
MAX_LARGE_BODIES = 4
"""Requests with large bodies that are read or sampled at once."""
NUM_RETRIED = 16
"""Answers that a session remembers for retries."""
MAX_REMEMBERED = 2**18
"""Bytes of the longest of them."""
# Refused calls do not count toward max_calls. Without this limit, an agent that repeats
# a wrong call would go on until rollout.timeout_s.
FREE_SHARE = 10
"""Refused calls and counted chats, per call of max_calls."""
CLIENT_GONE = 499


@dataclass(eq=False, repr=False)
class Written:
    """An answer that was written to a client."""

    content: bytes
    is_stream: bool
    is_lost: bool = False
    """The connection broke before the client had read the answer."""


class Client(Protocol):
    on_lost: Callable[[], None]
    written: Written | None
    """The last answer, until the next request: a client that sends one has read the
    answer.
    """


class Retries:
    """Answers for retried calls, by a digest of the body, except answers of equal
    calls.

    A client retries a call whose answer it does not have. A retry gets

    1. an answer whose connection broke before the client had read it: a client that
       closes a connection with unread data resets it;
    2. otherwise a new answer, if an equal call lacks one: it is being sampled, or its
       client left;
    3. otherwise the answer of the only equal call: a proxy may have lost it;
    4. otherwise a new answer.

    Example: of three equal calls one times out, the others are answered. Its retry is
    sampled with the seed of the call that timed out.
    """

    def __init__(self) -> None:
        self._num_open = Counter[bytes]()
        self._num_answered = Counter[bytes]()
        self._written = deque[tuple[bytes, Written]](maxlen=NUM_RETRIED)

    def begin(self, digest: bytes, *, is_retry: bool) -> Written | None:
        """Count a call, or return the answer that its client gets again."""
        num_open = self._num_open[digest]
        if is_retry:
            written = [each for key, each in self._written if key == digest]
            found = [each for each in written if each.is_lost]
            if num_open == 0 and self._num_answered[digest] == 1:
                found += written
            if found:
                # The connection that carries the copy sets this again if it breaks,
                # too.
                found[0].is_lost = False
                return found[0]
        # A retry takes over the place of a call without an answer. The gateway may
        # notice only later that the first client has left, and must not count the call
        # twice.
        if num_open == 0 or not is_retry:
            self._num_open[digest] += 1
        return None

    def keep_nowait(self, digest: bytes, written: Written) -> None:
        self._num_answered[digest] += 1
        self.withdraw_nowait(digest)
        # The retry of a longer answer is sampled like a new call.
        if len(written.content) <= MAX_REMEMBERED:
            self._written.append((digest, written))

    def withdraw_nowait(self, digest: bytes) -> None:
        # A first try and the retry that took over its place share one count, and both
        # may end.
        self._num_open[digest] = max(0, self._num_open[digest] - 1)


def session_ended(reason: str) -> ApiError:
    return ApiError(
        410, f"This session has ended: {reason}", code="session_ended", headers=NO_RETRY
    )


def engine_unavailable(reason: str) -> ApiError:
    why = f"The run is ending: {reason}"
    return ApiError(
        503, why, type="server_error", code="engine_unavailable", headers=NO_RETRY
    )


def _cut(scope: asyncio.Timeout) -> None:
    """Cancel the block of a scope, unless that has begun already: a client may leave
    while its session ends.
    """
    if not scope.expired():
        scope.reschedule(0.0)


def client_gone() -> ApiError:
    return ApiError(CLIENT_GONE, "The client has disconnected.")


@dataclass(eq=False, repr=False)
class OpenSession:
    """A rollout attempt: its key, limits, recorded samples and calls in flight.

    Life: open -> ended, with a reason; then its key is unknown.
    Waits: none; calls wait within in_hand(), the owner in while_open().
    Invariant: end_nowait cancels every call (ApiError 410). Only record_nowait of
        GatewaySession adds to `capture`.
    """

    sessions: Sessions[Any]
    capture: Capture = field(init=False)
    rollout_id: str
    _: KW_ONLY
    prompt_id: str
    sample_index: int
    attempt: int
    route_key: str
    user_key: str | None = None
    """Key of a user (`asyncrl serve gateway`)."""
    rules: SessionRules = RUN_RULES

    def __post_init__(self) -> None:
        self.key = self.user_key or secrets.token_hex(24)
        self.limits = self.sessions.limits
        self.max_calls = self.rules.max_calls or self.limits.max_calls
        self.slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self.chats = ChatsByAnswer(self.max_calls)
        self.retries = Retries()
        self.opening: Messages | None = None
        self.last_span: VersionSpan | None = None
        """The engine of the last call has the cache."""
        self.ended: str | None = None
        self.num_calls = 0
        self.num_free_calls = 0
        self.num_spent = 0
        self.overflow: str | None = None
        """Limit that no later call's answer follows."""
        self._overflow_order = 0
        self._numbers = defaultdict[bytes, set[int | None]](set)
        """Numbers of equal calls, by hash."""
        self._open_requests = asyncio.Semaphore(OPEN_SHARE * MAX_CONCURRENT_CALLS)
        """Bounds bodies in memory."""
        self.large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)
        self._scopes: set[asyncio.Timeout] = set()
        self._failure: RolloutFailure | None = None

    def add_spent_nowait(self, num_tokens: int) -> None:
        self.num_spent += num_tokens

    def end_nowait(self, reason: str) -> None:
        """Answer all calls with 410 and the first `reason`. Idempotent."""
        if self.ended is not None:
            return
        self.ended = reason
        # The owner keeps this object until the rollout is scored. Until then,
        # remembered answers and chats would hold memory for nothing.
        self.retries = Retries()
        self._numbers.clear()
        self.chats.clear()
        del self.sessions.open[self.key]
        # A deadline in the past: the loop cancels each block in its next rounds, and
        # _until_end turns that into the block's own error.
        for scope in self._scopes:
            _cut(scope)

    def fail_nowait(self, failure: RolloutFailure) -> None:
        if self.ended is None:
            self._failure = failure
            self.end_nowait(f"the rollout failed: {failure.what}")

    def free_call_nowait(self) -> None:
        self.num_free_calls += 1
        if self.num_free_calls <= FREE_SHARE * self.max_calls or self.user_key:
            return
        # The agent ignores a limit that has already truncated the rollout. Ending the
        # session keeps its answers; failing it would sample the rollout again.
        if self.overflow is not None:
            self.end_nowait(f"the agent kept calling after a limit: {self.overflow}")
            return
        what = f"{self.rollout_id}: {self.num_free_calls} of its calls were refused or only counted tokens"
        rule = f"{FREE_SHARE} times gateway.max_calls={self.max_calls} is the limit"
        self.fail_nowait(
            RolloutFailure(
                what,
                rule=rule,
                way_out="have the harness read the errors.",
                kind=FailureKind.LIMIT,
            )
        )

    def check_limits(self) -> None:
        """Raise ApiError (429) at a limit of the rollout."""
        for number, unit, name, limit in (
            (self.num_calls, "calls", "max_calls", self.max_calls),
            (
                self.capture.num_branch_tokens,
                "tokens in its branches",
                "max_rollout_tokens",
                self.rules.max_rollout_tokens or self.limits.max_rollout_tokens,
            ),
        ):
            # The users of `asyncrl serve gateway` have their own keys, and no limits.
            if limit is not None and number >= limit and not self.user_key:
                why = f"This rollout has {number} {unit}; gateway.{name}={limit} is the limit."
                self._note_overflow_nowait(why)
                raise ApiError(
                    429,
                    why,
                    type="requests",
                    code="rate_limit_exceeded",
                    headers=NO_RETRY,
                )

    def _note_overflow_nowait(self, why: str) -> None:
        self.overflow = why
        self._overflow_order = self.num_calls

    @property
    def num_completions(self) -> int:
        return len(self.capture.agents)

    @property
    def untrained(self) -> tuple[tuple[str, str], ...]:
        return self.capture.untrained

    def last_completion(self) -> Completion:
        """Return the completion of the call that was planned last. Raises
        RolloutFailure if there is none.
        """
        return self.capture.last_completion()

    def rollout(
        self,
        sample_index: int,
        outcome: Outcome,
        reward: float,
        *,
        by_turn: bool = False,
    ) -> Rollout:
        """Return all branches, truncated if a limit stopped them. `turn_rewards` are of
        answers, or of agents. `by_turn`: see Capture.rollout. Raises RolloutFailure.
        """
        if self._failure is not None:
            raise self._failure
        outcome = by_completion(outcome, self.capture.agents, by_turn=by_turn)
        rollout = self.capture.rollout(sample_index, outcome, reward, by_turn=by_turn)
        if self.overflow is None:
            return rollout
        return tuple(replace(branch, is_truncated=True) for branch in rollout)

    @asynccontextmanager
    async def in_hand(self, connection: Client) -> AsyncIterator[AsyncExitStack]:
        """Count refusals. Raise ApiError in the block when the session ends (410) or
        its client leaves.

        Yield the request's place among the open ones. A planned stream closes it:
        otherwise streams that wait for a slot would hold up the heads of later ones.
        gateway.max_calls bounds them.
        """

        def cut(reason: str | None) -> ApiError:
            if reason is None:
                return client_gone()
            # If the session ended because the run ends, clients get the 503 of all
            # other calls, not the 410 of a finished rollout.
            run_end = self.sessions.run_end
            return (
                session_ended(reason)
                if run_end is None
                else engine_unavailable(run_end)
            )

        try:
            async with self._until_end(cut) as scope, AsyncExitStack() as place:
                connection.on_lost = partial(_cut, scope)
                await place.enter_async_context(self._open_requests)
                yield place
        except ApiError as error:
            # A prompt that no longer fits is a limit like max_calls: unless the agent
            # continues with a shorter prompt, its rollout is truncated, not failed.
            if error.error["code"] == TOO_LONG:
                self._note_overflow_nowait(str(error))
            # 410 says that the session has ended, 499 that the client has left. Neither
            # refuses what the agent asked for.
            if 400 <= error.status < 500 and error.status not in (410, CLIENT_GONE):
                self.free_call_nowait()
            raise
        finally:
            connection.on_lost = lambda: None

    def while_open(self) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Raise RolloutFailure in the block when the session ends."""
        return self._until_end(
            lambda reason: (
                self._failure
                or RolloutFailure(f"the session of {self.rollout_id} ended: {reason}")
            )
        )

    @asynccontextmanager
    async def _until_end(
        self, error: Callable[[str | None], Exception]
    ) -> AsyncIterator[asyncio.Timeout]:
        # A timeout without a limit, whose rescheduling cancels exactly this block.
        async with within(None, lambda: error(self.ended)) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)


Session = TypeVar("Session", bound=OpenSession)


class Sessions(Generic[Session]):
    """Open sessions by key."""

    def __init__(self, limits: GatewayConfig) -> None:
        self.limits = limits
        self.open: dict[str, Session] = {}
        self.run_end: str | None = None
        """Why the run is ending. From then on, unknown keys may be keys of its
        sessions.
        """

    def find(self, key: str) -> Session:
        """Return the session of a key. Raises ApiError (401, 503 while the run ends),
        never with the key: answers are logged.
        """
        if (session := self.open.get(key)) is None:
            # The run's end has closed its sessions. An agent that still calls should
            # stop retrying, not believe that its key was wrong.
            if self.run_end is not None:
                raise engine_unavailable(self.run_end)
            why = "Unknown or missing session key, or its session has ended. Send `Authorization: Bearer KEY`"
            raise ApiError(
                401,
                f"{why} or `x-api-key: KEY`, or call /s/KEY/v1/....",
                code="invalid_api_key",
            )
        return session

    def end_run_nowait(self, reason: str) -> None:
        """Answer calls of ended sessions with 503. Idempotent."""
        self.run_end = self.run_end or reason

    def end_all_nowait(self, reason: str) -> None:
        self.end_run_nowait(reason)
        for session in list(self.open.values()):
            session.end_nowait(reason)
