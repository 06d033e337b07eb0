"""Who may call, and until when: one key for each attempt of a rollout. Knows no HTTP and no engine."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.agents.endpoint.calls import Call, CallTable
from asyncrl.agents.endpoint.capture import Capture, Messages
from asyncrl.agents.endpoint.refusals import invalid, rate_limited, session_ended, unknown_key
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Outcome, Rollout, VersionSpan

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.engine_route import EngineRoute

MAX_EXPIRED = 10_000
"""Sessions whose end can still be explained to a call that comes too late."""
PERSONS_SHARE = 16
"""A person's key may make so many times the calls of a rollout, and hold so many times its tokens, until an
outcome is posted.
"""
REFUSALS_PER_CALL = 10
"""Calls of one rollout that may be refused, for each that it may make."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one session may ask for; see GatewayConfig."""

    max_calls: int = 256
    max_concurrent_calls: int = 16
    max_rollout_tokens: int | None = None


class GatewaySession:
    """One attempt of a rollout: its key, what was sampled under it, and its calls in hand.

    Life:       open -> ended, with a reason. Then the gateway forgets it but for the reason; its owner may
                still ask for the rollout, and what was sampled dies with the owner's reference. One that the
                gateway has ended for what its harness did (fail_nowait) has no rollout.
    Waits:      none; its calls sleep in the engine, within in_hand(), and its owner in while_open().
    Invariant:  no call outlives the session: end_nowait cancels every in_hand() block, which raises ApiError
                410. What is in `capture` was given to a client: deliver_nowait alone records.
    """

    def __init__(
        self,
        rollout_id: str,
        *,
        prompt_id: str,
        sample_index: int,
        attempt: int,
        route_key: str,
        route: EngineRoute,
        forget: Callable[[GatewaySession], None],
        limits: SessionLimits,
        persons_key: str | None = None,
    ) -> None:
        """`route`: where its calls are sampled. `persons_key`: a person tries an agent with it."""
        self.key, self.is_persons = persons_key or secrets.token_urlsafe(24), persons_key is not None
        self.rollout_id, self.prompt_id, self.sample_index = rollout_id, prompt_id, sample_index
        self.attempt, self.route_key, self.route, self.limits = attempt, route_key, route, limits
        self.capture = Capture(route.tokenizer, route.counts)
        self.opening: Messages | None = None
        """Messages of the first call, kept of a person's session alone."""
        self.last_span: VersionSpan | None = None
        """The end of the newest completion: its engine has the conversation in its cache."""
        self.ended: str | None = None
        """Why it has ended; None while it is open."""
        self.num_calls = self.num_refused = self.num_sampling = 0
        """Sampling: choices, each of which is a request to the engine."""
        self.calls = CallTable()
        self.reading = asyncio.Semaphore(limits.max_concurrent_calls)
        """Held while a call is being sent: so many bodies are in memory."""
        self.beginning = asyncio.Lock()
        """Held from the look for a call that is asked again until a new one is in `calls`."""
        self.times_asked: dict[bytes, int] = {}
        """How many calls had the same prompt, by its hash."""
        self._forget = forget
        self._scopes: set[asyncio.Timeout] = set()
        self._failure: RolloutFailure | None = None

    def __repr__(self) -> str:
        state = "open" if self.ended is None else f"ended: {self.ended}"
        return f"<GatewaySession {self.rollout_id}/a{self.attempt} {self.num_calls} calls, {state}>"

    def end_nowait(self, reason: str) -> None:
        """No call is answered any more (410 with `reason`), those in hand included. Idempotent: the first
        reason stays.
        """
        if self.ended is not None:
            return
        self.ended = reason
        self.calls.clear()
        self.times_asked.clear()
        self._forget(self)
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
        most = REFUSALS_PER_CALL * self.limits.max_calls
        if self.num_refused > most and not self.is_persons:
            self.fail_nowait(
                RolloutFailure(
                    f"{self.rollout_id}: {self.num_refused} of its calls were refused",
                    rule=f"a rollout may have {most} refusals, {REFUSALS_PER_CALL} times "
                    f"gateway.max_calls={self.limits.max_calls}",
                    way_out="have the harness read the errors and stop, or wait between its tries.",
                )
            )

    def deliver_nowait(self, call: Call) -> None:
        """The answer goes out to a client that is there: from here on it is part of the rollout."""
        call.deliver_nowait(self.capture)
        num_tokens, most = self.capture.num_branch_tokens, self.limits.max_rollout_tokens
        if most is not None and num_tokens > most and not self.is_persons:
            self.fail_nowait(
                RolloutFailure(
                    f"{self.rollout_id}: its branches have {num_tokens} tokens after {self.num_calls} calls",
                    rule=f"gateway.max_rollout_tokens={most} is the limit; context that branches share "
                    f"counts in each of them",
                    way_out="have the harness keep its history as it is, so that calls go on from each "
                    "other, make fewer calls or ask for fewer choices (n); or raise "
                    "gateway.max_rollout_tokens if the trainer has the time.",
                )
            )

    def check_limits(self, num_choices: int) -> None:
        """Raise ApiError if it may not sample one call more, with so many choices: 429, or 400 if it never
        may.
        """
        limits, most = self.limits, self.limits.max_concurrent_calls
        if num_choices > most:
            raise invalid(
                f"n={num_choices} is refused: each choice counts, and gateway.max_concurrent_calls={most} is "
                f"the most at once.",
                "n",
            )
        if self.is_persons:
            self._check_persons("calls", self.num_calls, "max_calls", limits.max_calls)
            num_tokens = self.capture.num_branch_tokens
            self._check_persons(
                "tokens in its branches", num_tokens, "max_rollout_tokens", limits.max_rollout_tokens
            )
        elif self.num_calls >= limits.max_calls:
            raise rate_limited(
                f"This rollout has made {self.num_calls} calls; gateway.max_calls={limits.max_calls} is the "
                f"limit.",
                retry_after_s=None,
            )
        if self.num_sampling + num_choices > most:
            raise rate_limited(
                f"{self.num_sampling} answers of this rollout are being sampled and {num_choices} more are "
                f"asked for; gateway.max_concurrent_calls={most} is the most at once.",
                retry_after_s=1,
            )

    def _check_persons(self, what: str, number: int, name: str, most: int | None) -> None:
        """What a person's key holds is freed by an outcome, and by nothing else."""
        if most is not None and number >= PERSONS_SHARE * most:
            raise rate_limited(
                f"This rollout has {number} {what} and no outcome yet; {PERSONS_SHARE} times "
                f"gateway.{name}={most} is the limit. Post an outcome to /v1/outcome with the outcome key: "
                f"it ends this rollout, and this key goes on with the next one.",
                retry_after_s=None,
            )

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

    @asynccontextmanager
    async def in_hand(self) -> AsyncIterator[None]:
        """A block that is left with ApiError 410 when the session ends."""
        async with self._until_end(session_ended):
            yield

    @asynccontextmanager
    async def while_open(self) -> AsyncIterator[None]:
        """A block that is left with RolloutFailure when the session ends."""

        def failure(reason: str) -> RolloutFailure:
            return self._failure or RolloutFailure(f"the session of {self.rollout_id} ended: {reason}")

        async with self._until_end(failure):
            yield

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


class Sessions:
    """All open sessions by key, and why the expired ones ended.

    Invariant:  a session that has ended is in no table; there are never more than `max_expired` reasons.
    """

    def __init__(self, limits: SessionLimits, *, max_expired: int = MAX_EXPIRED) -> None:
        self._limits, self._max_expired = limits, max_expired
        self._open: dict[str, GatewaySession] = {}
        self._expired: OrderedDict[str, str] = OrderedDict()
        self._closed: str | None = None

    @property
    def num_open(self) -> int:
        """Sessions that calls are answered for."""
        return len(self._open)

    def open_nowait(
        self,
        rollout_id: str,
        *,
        prompt_id: str,
        sample_index: int,
        attempt: int,
        route_key: str,
        route: EngineRoute,
        persons_key: str | None = None,
    ) -> GatewaySession:
        """A new session, to be ended by its owner. A person's key may open one session after another."""
        session = GatewaySession(
            rollout_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            attempt=attempt,
            route_key=route_key,
            route=route,
            forget=self._expire,
            limits=self._limits,
            persons_key=persons_key,
        )
        self._open[session.key] = session
        if self._closed is not None:
            session.end_nowait(self._closed)
        return session

    def find(self, key: str) -> GatewaySession:
        """The open session of this key. Raises ApiError: 401 for an unknown key, 410 with the reason for an
        expired session.
        """
        session = self._open.get(key)
        if session is not None:
            return session
        reason = self._expired.get(key)
        raise unknown_key() if reason is None else session_ended(reason)

    def end_all_nowait(self, reason: str) -> None:
        """End every session, those too that are opened later."""
        self._closed = reason
        for session in list(self._open.values()):
            session.end_nowait(reason)

    def _expire(self, session: GatewaySession) -> None:
        del self._open[session.key]
        self._expired[session.key] = session.ended or ""
        if len(self._expired) > self._max_expired:
            self._expired.popitem(last=False)
