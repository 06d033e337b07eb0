"""Who may call, and until when: one key an attempt of a rollout. Knows no HTTP, no messages, no engine."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from asyncrl.agents.endpoint.calls import Call, CallTable
from asyncrl.agents.endpoint.capture import Capture, CaptureCounts
from asyncrl.agents.endpoint.refusals import invalid, rate_limited, session_ended, unknown_key
from asyncrl.errors import RolloutFailure
from asyncrl.messages.protocols import ChatRenderer
from asyncrl.messages.records import Outcome, Rollout, VersionSpan

MAX_TOMBSTONES = 10_000
"""Ended sessions whose reason can still be told to a call that comes too late."""

PEOPLES_SHARE = 16
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
    """One attempt of a rollout: its key, what was sampled under it, and its calls in hand. It is the Session
    of its owner.

    Life:       open -> ended, with a reason. Then its host forgets it but for the reason; the owner may still
    ask for the rollout,
                and what was sampled dies with the owner's reference. One that the gateway has ended for what
                its harness did (fail_nowait) has no rollout.
    Waits:      none; its calls sleep in the engine, within in_hand(), and its owner in while_open().
    Invariant:  no call outlives the session: end_nowait cancels every in_hand() block, which raises ApiError
    410. What is in
                `capture` was given to somebody: deliver_nowait alone records.
    """

    def __init__(
        self,
        rollout_id: str,
        *,
        prompt_id: str,
        sample_index: int,
        attempt: int,
        route_key: str,
        capture: Capture,
        renderer: ChatRenderer,
        forget: Callable[[GatewaySession], None],
        limits: SessionLimits,
        lane: str = "",
        peoples_key: str | None = None,
    ) -> None:
        """`lane`: who answers its calls. `peoples_key`: a person tries an agent with it, with PEOPLES_SHARE
        times the limits.
        """
        self.key = peoples_key or secrets.token_urlsafe(24)
        self.lane, self.is_peoples = lane, peoples_key is not None
        self.opening: Sequence[Mapping[str, Any]] | None = None
        """Messages of the first call, kept of a person's session alone."""
        self.rollout_id, self.prompt_id, self.sample_index, self.attempt = (
            rollout_id,
            prompt_id,
            sample_index,
            attempt,
        )
        self.route_key, self.capture = route_key, capture
        self.last_span: VersionSpan | None = None
        """The end of the newest completion: its engine has the conversation in its cache."""
        self.ended: str | None = None
        """Why it has ended; None while it is open."""
        self.limits = limits
        self.num_calls = self.num_refused = self.num_sampling = self.num_reading = 0
        """Sampling: choices, each of which is a request to the engine. Reading: calls that are being sent."""
        self.calls = CallTable()
        self.beginning = asyncio.Lock()
        """Held from the look for a call that is asked again until a new one is in `calls`."""
        self.times_asked: dict[bytes, int] = {}
        """How many calls had the same prompt, by its hash."""
        self._renderer, self._forget = renderer, forget
        self._scopes: set[asyncio.Timeout] = set()
        self._failure: RolloutFailure | None = None

    def __repr__(self) -> str:
        state = "open" if self.ended is None else f"ended: {self.ended}"
        return f"<GatewaySession {self.rollout_id}/a{self.attempt} {self.num_calls} calls, {self.num_sampling} in flight, {state}>"

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
        """End it, and its rollout with it, wherever that is by now."""
        if self.ended is None:
            self._failure = failure
            self.end_nowait(f"the rollout failed: {failure.what}")

    def refused_nowait(self) -> None:
        """One of its calls was refused. Refusing costs time too, so a harness that does not stop is
        stopped.
        """
        self.num_refused += 1
        most = REFUSALS_PER_CALL * self.limits.max_calls
        if self.num_refused > most and not self.is_peoples:
            self.fail_nowait(
                RolloutFailure(
                    f"{self.rollout_id}: {self.num_refused} of its calls were refused",
                    rule=f"a rollout may have {most} refusals, {REFUSALS_PER_CALL} times "
                    f"gateway.max_calls={self.limits.max_calls}",
                    way_out="have the harness read the errors and stop, or wait between its tries.",
                )
            )

    def deliver_nowait(self, call: Call) -> None:
        """The answer of the call goes out to a client that is there: from here on it is part of the
        rollout.
        """
        call.deliver_nowait(self.capture)
        num_tokens, most = self.capture.num_branch_tokens, self.limits.max_rollout_tokens
        if most is not None and num_tokens > most and not self.is_peoples:
            self.fail_nowait(
                RolloutFailure(
                    f"{self.rollout_id}: its branches have {num_tokens} tokens after {self.num_calls} calls",
                    rule=f"gateway.max_rollout_tokens={most} is the limit; context that branches share "
                    f"counts in each of them",
                    way_out="have the harness keep its history as it is, so that calls go on from each "
                    "other, make fewer calls or ask "
                    "for fewer choices (n); or raise gateway.max_rollout_tokens if the trainer has the time.",
                )
            )

    def last_text(self) -> str:
        """Text of the completion that was asked for last. Raises RolloutFailure if there is none."""
        return self._renderer.decode(self.capture.last_text_ids())

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
        async with self._until_end(
            lambda reason: (
                self._failure or RolloutFailure(f"the session of {self.rollout_id} ended: {reason}")
            )
        ):
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
    """The SessionHost: all open sessions by key, and why the others ended.

    Life:       open_nowait -> found by its key -> end_nowait of the session -> a tombstone, the oldest of
    which go. Waits:      none.
    Invariant:  a session that has ended is in no table; there are never more than `max_tombstones` reasons.
    """

    def __init__(
        self, renderer: ChatRenderer, limits: SessionLimits, *, max_tombstones: int = MAX_TOMBSTONES
    ) -> None:
        self._renderer, self._limits, self._max_tombstones = renderer, limits, max_tombstones
        self.counts = CaptureCounts()
        self._open: dict[str, GatewaySession] = {}
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._closed: str | None = None

    def __repr__(self) -> str:
        return f"<Sessions {len(self._open)} open, {len(self._tombstones)} tombstones>"

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
        lane: Lane | None = None,
        peoples_key: str | None = None,
    ) -> GatewaySession:
        """A new session, to be ended by whoever opened it. A person's key may open one session after
        another.
        """
        session = GatewaySession(
            rollout_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            attempt=attempt,
            route_key=route_key,
            capture=Capture(self._renderer, self.counts if lane is None else lane.counts),
            renderer=self._renderer,
            forget=self._bury,
            limits=self._limits,
            lane="" if lane is None else lane.name,
            peoples_key=peoples_key,
        )
        self._open[session.key] = session
        if self._closed is not None:
            session.end_nowait(self._closed)
        return session

    def find(self, key: str) -> GatewaySession:
        """The open session of this key. Raises ApiError: 401 for an unknown key, 410 with the reason for one
        that has ended.
        """
        session = self._open.get(key)
        if session is not None:
            return session
        reason = self._tombstones.get(key)
        raise unknown_key() if reason is None else session_ended(reason)

    def end_all_nowait(self, reason: str) -> None:
        """End every session, those too that are opened later."""
        self._closed = reason
        for session in list(self._open.values()):
            session.end_nowait(reason)

    def _bury(self, session: GatewaySession) -> None:
        del self._open[session.key]
        self._tombstones[session.key] = session.ended or ""
        if len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)


class Lane:
    """The SessionHost of sessions whose calls somebody else answers: another engine, under the same port. It
    counts for itself.
    """

    def __init__(self, name: str, sessions: Sessions) -> None:
        self.name, self._sessions = name, sessions
        self.counts = CaptureCounts()

    def __repr__(self) -> str:
        return f"<Lane {self.name}>"

    def open_nowait(
        self, rollout_id: str, *, prompt_id: str, sample_index: int, attempt: int, route_key: str
    ) -> GatewaySession:
        """A new session, to be ended by whoever opened it."""
        return self._sessions.open_nowait(
            rollout_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            attempt=attempt,
            route_key=route_key,
            lane=self,
        )


def check_limits(session: GatewaySession, num_choices: int) -> None:
    """Raise ApiError if the session may not sample one call more, with so many choices: 429, or 400 if it
    never may.
    """
    limits, most = session.limits, session.limits.max_concurrent_calls
    if num_choices > most:
        raise invalid(
            f"n={num_choices} is refused: each choice counts, and gateway.max_concurrent_calls={most} is the "
            f"most at once.",
            "n",
        )
    if session.is_peoples:
        _check_peoples(session)
    elif session.num_calls >= limits.max_calls:
        raise rate_limited(
            f"This rollout has made {session.num_calls} calls; gateway.max_calls={limits.max_calls} is the "
            f"limit.",
            retry_after_s=None,
        )
    if session.num_sampling + num_choices > most:
        raise rate_limited(
            f"{session.num_sampling} answers of this rollout are being sampled and {num_choices} more are "
            f"asked for; "
            f"gateway.max_concurrent_calls={most} is the most at once.",
            retry_after_s=1,
        )


def _check_peoples(session: GatewaySession) -> None:
    """What a person's key holds is freed by an outcome, and by nothing else."""
    limits, num_tokens = session.limits, session.capture.num_branch_tokens
    for number, what, name, most in (
        (session.num_calls, "calls", "max_calls", limits.max_calls),
        (num_tokens, "tokens in its branches", "max_rollout_tokens", limits.max_rollout_tokens),
    ):
        if most is not None and number >= PEOPLES_SHARE * most:
            raise rate_limited(
                f"This rollout has {number} {what} and no outcome yet; {PEOPLES_SHARE} times "
                f"gateway.{name}={most} is the limit. Post an "
                "outcome to /v1/outcome with the outcome key: it ends this rollout, and this key goes on "
                "with the next one.",
                retry_after_s=None,
            )
