"""A rollout with limits and retries; failures become data."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from asyncrl.base.errors import PromptUnusable, RolloutFailure, RolloutTimeout, RoomError
from asyncrl.base.waits import waiting
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Completion, GroupId, Prompt, Rollout

log = logging.getLogger(__name__)


def derive_seed(run_seed: int, seed_id: str, sample_index: int, turn: int, attempt: int = 0) -> int:
    """Return a request's seed in [0, 2**63).

    A retry must not repeat the failed tokens. First attempts add nothing to the hash, so that a plain loop
    derives the same seeds.
    """
    parts = [str(run_seed), seed_id, str(sample_index), str(turn)]
    if attempt:
        parts.append(f"attempt {attempt}")
    key = "\x1f".join(parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


class Slots:
    """`capacity` slots for sampling rollouts.

    Waits: wait sleeps until the rollout holds a slot, wait_spare until one is free.

    Invariant: no rollout waits while a slot is free; the smallest `order` is next. Shrinking revokes nothing.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._queue: list[tuple[tuple[int, ...], str]] = []  # heap; names not in _waiting are skipped
        self._spare = asyncio.Event()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def ask_nowait(self, name: str, order: tuple[int, ...]) -> None:
        """Take or queue for a slot. Idempotent."""
        if name in self._held or name in self._waiting:
            return
        if self.num_held < self.capacity:
            self._held.add(name)
            return
        self._waiting[name] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (order, name))

    async def wait(self, name: str) -> None:
        if name in self._waiting:
            with waiting(self._what_is_free, on="a rollout that ends"):
                await self._waiting[name]

    async def wait_spare(self) -> None:
        with waiting(self._what_is_free, on="a rollout that ends"):
            while self.num_held >= self.capacity:
                await self._spare.wait()

    def _what_is_free(self) -> str:
        return f"a free sequence in the engines ({self.num_held} of {self.capacity} sample)"

    def give_back_nowait(self, name: str) -> None:
        """Release the slot or leave the queue. Idempotent."""
        if name not in self._held and name not in self._waiting:
            return
        self._waiting.pop(name, None)
        self._held.discard(name)
        self._hand_out()

    def resize_nowait(self, capacity: int) -> None:
        self.capacity = capacity
        self._hand_out()

    def _hand_out(self) -> None:
        while self.num_held < self.capacity and self._queue:
            found = heapq.heappop(self._queue)[1]
            future = self._waiting.pop(found, None)
            if future is not None:
                self._held.add(found)
                if not future.done():  # cancelled just now; its end releases the slot
                    future.set_result(None)
        if self.num_held < self.capacity:
            self._spare.set()
            self._spare = asyncio.Event()


class RolloutClock:
    """Time budget of a rollout over all attempts."""

    def __init__(self, timeout_s: float | None) -> None:
        self.left_s = timeout_s
        self._limit: asyncio.Timeout | None = None

    def start(self) -> asyncio.Timeout:
        self._limit = asyncio.timeout(self.left_s)
        return self._limit

    def hold(self) -> None:
        if self._limit is None or self.left_s is None:
            return
        if self._limit.expired():
            self.left_s = 0.0
        elif (when_s := self._limit.when()) is not None:
            self.left_s = max(0.0, when_s - asyncio.get_running_loop().time())
            self._limit.reschedule(None)

    def resume(self) -> None:
        limit = self._limit
        if limit is not None and self.left_s is not None and limit.when() is None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time() + self.left_s)


@dataclass(slots=True)
class Seen:
    rollout: Callable[[], Rollout] = tuple
    """May raise RolloutFailure."""
    num_spent: Callable[[], int] = int
    """Without a killed run's tokens."""
    num_kept: int = 0
    """Tokens in the journal's unfinished completion."""


@dataclass(frozen=True, slots=True)
class RolloutAttempt:
    """`rollout_id` (`g17/r3`) is the same for all attempts. `partial`: tokens from a killed run."""

    rollout_id: str
    group_id: GroupId
    prompt: Prompt
    sample_index: int
    attempt: int = 0
    partial: Completion | None = None
    journal: Journal | None = None
    clock: RolloutClock = field(default_factory=lambda: RolloutClock(None))
    seen: Seen = field(default_factory=Seen)

    def keep_segment(self, turn: int, partial: Completion) -> None:
        if self.journal is not None:
            self.journal.segment_nowait(self.group_id, self.sample_index, self.attempt, turn, partial)
            self.seen.num_kept = len(partial.token_ids)

    def count_lost(self, outcome: Rollout | RolloutFailure | None) -> None:
        """A cancelled attempt (None) keeps its completion for a resume."""
        if self.journal is None:
            return
        num_lost = self.seen.num_spent() + (0 if self.partial is None else len(self.partial.token_ids))
        if isinstance(outcome, tuple):
            num_lost -= sum(branch.num_sampled for branch in outcome)
        else:
            num_lost -= self.seen.num_kept
        if isinstance(outcome, RolloutFailure):
            self.journal.tokens_lost_nowait(self.group_id, max(0, num_lost), self.sample_index)
        elif num_lost > 0:
            self.journal.tokens_lost_nowait(self.group_id, num_lost)


Score = Callable[[], Awaitable[Rollout]]


class Generator(Protocol):
    async def sample(self, attempt: RolloutAttempt) -> Score:
        """Sampling and scoring raise RolloutFailure (data), or RoomError (ends the run)."""
        ...


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """`num_attempts` 0: the prompt is impossible. `seen`: of the last attempt."""

    sample_index: int
    num_attempts: int
    failure: RolloutFailure
    seen: Seen = field(default_factory=Seen)

    @property
    def how(self) -> str:
        return f"failed {self.num_attempts} times, last" if self.num_attempts else "cannot be sampled"


Phase = Literal["sampling", "scoring"]


class RolloutRunner:
    """Run rollouts within rollout.timeout_s each, retries included.

    Waits: run waits for a slot before each attempt, then in the generator, at most timeout_s in total unless
    the generator holds the clock.

    Invariant: run returns data for any failure; only RoomError and CancelledError pass. An attempt holds a
    slot exactly while it samples.
    """

    def __init__(self, generator: Generator, *, timeout_s: float | None, retries: int) -> None:
        self._generator = generator
        self.timeout_s = timeout_s
        self.retries = retries
        self.num_retried = 0
        self.started_s: dict[str, float] = {}

    async def run(
        self,
        attempt: RolloutAttempt,
        *,
        slots: Slots,
        order: tuple[int, ...],
        on_phase: Callable[[Phase], None] = lambda phase: None,
    ) -> Rollout | FailedRollout:
        """`on_phase` is called after sampling, and before a retry samples again. A resumed rollout gets a new
        time budget.
        """
        clock = RolloutClock(self.timeout_s)
        try:
            while True:
                num_kept = 0 if attempt.partial is None else len(attempt.partial.token_ids)
                attempt = replace(attempt, clock=clock, seen=Seen(num_kept=num_kept))
                slots.ask_nowait(attempt.rollout_id, order)
                outcome: Rollout | RolloutFailure | None = None
                try:
                    await slots.wait(attempt.rollout_id)
                    self.started_s.setdefault(attempt.rollout_id, asyncio.get_running_loop().time())
                    outcome = await self._run_attempt(attempt, slots, on_phase)
                finally:
                    slots.give_back_nowait(attempt.rollout_id)
                    attempt.count_lost(outcome)
                if not isinstance(outcome, RolloutFailure):
                    return outcome
                num_attempts = attempt.attempt + 1
                tries = f"{num_attempts} of {self.retries + 1}"
                log.warning("%s attempt %s failed: %s", attempt.rollout_id, tries, outcome)
                if isinstance(outcome, PromptUnusable):
                    return FailedRollout(attempt.sample_index, 0, outcome, attempt.seen)
                if num_attempts > self.retries or clock.left_s == 0.0:
                    return FailedRollout(attempt.sample_index, num_attempts, outcome, attempt.seen)
                attempt = replace(attempt, attempt=num_attempts, partial=None)
                self.num_retried += 1
                on_phase("sampling")
        finally:
            self.started_s.pop(attempt.rollout_id, None)

    async def _run_attempt(
        self, attempt: RolloutAttempt, slots: Slots, on_phase: Callable[[Phase], None]
    ) -> Rollout | RolloutFailure:
        name = f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id})"
        limit = attempt.clock.start()
        try:
            async with limit:
                try:
                    score = await self._generator.sample(attempt)
                    slots.give_back_nowait(attempt.rollout_id)
                    on_phase("scoring")
                    rollout = await score()
                finally:
                    attempt.clock.hold()
            if not all(branch.version_spans for branch in rollout):
                return RolloutFailure(f"{name} has a branch without a sampled token")
            return rollout
        except RoomError:
            raise
        except RolloutFailure as failure:
            return failure
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                what = f"{name} is not finished after rollout.timeout_s={self.timeout_s} s"
                way_out = "if rollout/failed keeps rising, raise it, or lower rollout.max_tokens."
                return RolloutTimeout(f"{what}, in attempt {attempt.attempt + 1}", way_out=way_out)
            log.warning("%s broke", attempt.rollout_id, exc_info=True)
            what = f"{name} raised {type(error).__name__}: {error}"
            return RolloutFailure(what, way_out="see logs/controller.log.")
