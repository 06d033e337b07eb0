"""A rollout with limits and retries; at this boundary failures become data."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.base.errors import PromptUnusable, RolloutFailure, RolloutTimeout, RoomError
from asyncrl.base.waits import waiting
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Completion, GroupId, Prompt, Rollout

log = logging.getLogger(__name__)


def derive_seed(run_seed: int, seed_id: str, sample_index: int, turn: int, attempt: int = 0) -> int:
    """Return the reproducible seed in [0, 2**63) of a request.

    `seed_id` contains the prompt and its number of repeats (Prompt.seed_id). A retry must not repeat the
    failed tokens. First attempts and admissions add nothing to the hash, so a plain loop derives the same
    seeds.
    """
    parts = [str(run_seed), seed_id, str(sample_index), str(turn)]
    if attempt:
        parts.append(f"attempt {attempt}")
    key = "\x1f".join(parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


class Slots:
    """`capacity` slots for sampling rollouts.

    Life: of a rollout: ask_nowait -> holds a slot, or waits for one -> give_back_nowait.
    Waits: wait sleeps until the rollout holds a slot, wait_spare until one is free.
    Invariant: at most `capacity` rollouts get slots, and none waits while one is free; the smallest `order`
        is next. Shrinking revokes nothing.
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
        """Take a free slot or wait for one. Idempotent."""
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
        """Wait until a slot is free and no rollout waits."""
        with waiting(self._what_is_free, on="a rollout that ends"):
            while self.num_held >= self.capacity:
                await self._spare.wait()

    def _what_is_free(self) -> str:
        return f"a free sequence in the engines ({self.num_held} of {self.capacity} sample)"

    def give_back_nowait(self, name: str) -> None:
        """Release the slot or stop waiting for one. Idempotent."""
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
    """A rollout's time budget over all attempts; None: no limit.

    Life: for each attempt: start() and entering its result -> hold() and resume() any number of times ->
        end(). Otherwise hold and resume do nothing.
    Waits: a held clock ends no wait; the watchdog reports a stuck run.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.left_s = timeout_s
        """Remaining seconds at the last stop; None: no limit."""
        self._limit: asyncio.Timeout | None = None

    def start(self) -> asyncio.Timeout:
        """Return the limit of one attempt, to enter at once."""
        self._limit = asyncio.timeout(self.left_s)
        return self._limit

    def hold(self) -> None:
        if self._limit is not None and not self._limit.expired():
            self._count(self._limit)
            self._limit.reschedule(None)

    def resume(self) -> None:
        limit, left_s = self._limit, self.left_s
        if limit is not None and left_s is not None and limit.when() is None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time() + left_s)

    def end(self) -> None:
        if self._limit is not None:
            self._count(self._limit)
            self._limit = None

    def _count(self, limit: asyncio.Timeout) -> None:
        when_s = limit.when()
        if when_s is not None:
            now_s = asyncio.get_running_loop().time()
            self.left_s = 0.0 if limit.expired() else max(0.0, when_s - now_s)


@dataclass(slots=True)
class Seen:
    """Tokens sampled so far in an attempt."""

    rollout: Callable[[], Rollout] = tuple
    """Branches so far, without a reward. May raise RolloutFailure if there are none."""
    num_spent: Callable[[], int] = int
    """Number of tokens that the engines returned, trained or not. Excludes a killed run's tokens."""
    num_kept: int = 0
    """Number of tokens in the journal's unfinished completion, including a killed run's."""


@dataclass(frozen=True, slots=True)
class RolloutAttempt:
    """An attempt at a prompt. `rollout_id` (`g17/r3`) is the same for all attempts; `attempt` counts from 0.
    `stopped_sampling` releases the engine slot.

    `partial`: tokens of this attempt from a killed run.
    """

    rollout_id: str
    group_id: GroupId
    prompt: Prompt
    sample_index: int
    attempt: int
    stopped_sampling: Callable[[], None]
    partial: Completion | None = None
    journal: Journal | None = None
    clock: RolloutClock = field(default_factory=lambda: RolloutClock(None))
    seen: Seen = field(default_factory=Seen)

    def keep_segment(self, turn: int, partial: Completion) -> None:
        if self.journal is not None:
            self.journal.segment_nowait(self.group_id, self.sample_index, self.attempt, turn, partial)
            self.seen.num_kept = len(partial.token_ids)

    def count_lost(self, outcome: Rollout | RolloutFailure | None) -> None:
        """Journal the number of wasted tokens. `outcome` is None if the attempt was cancelled: a resumed run
        continues its unfinished completion.
        """
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


class Generator(Protocol):
    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        """Return the finished rollout, all branches. Raises RolloutFailure (data), or RoomError (ends the
        run).
        """
        ...


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """A rollout that failed `num_attempts` times, last with `failure`. 0: its prompt is impossible. `seen`:
    from the last attempt.
    """

    sample_index: int
    num_attempts: int
    failure: RolloutFailure
    seen: Seen = field(default_factory=Seen)

    @property
    def how(self) -> str:
        return f"failed {self.num_attempts} times, last" if self.num_attempts else "cannot be sampled"


class RolloutRunner:
    """Runs rollouts within rollout.timeout_s each, retries included.

    Waits: run sleeps for a slot before each attempt, then in the generator, at most timeout_s for all
        attempts (None = no limit) unless the generator holds the clock.
    Invariant: run returns data for any failure of a rollout; only RoomError and CancelledError pass.
    """

    def __init__(self, generator: Generator, *, timeout_s: float | None, retries: int) -> None:
        self._generator = generator
        self.timeout_s, self.retries = timeout_s, retries
        self.num_retried = 0
        self.started_s: dict[str, float] = {}
        """Time of the first slot of each running rollout, oldest first."""

    async def run(
        self,
        group_id: GroupId,
        prompt: Prompt,
        sample_index: int,
        *,
        slots: Slots,
        order: tuple[int, ...],
        journal: Journal | None = None,
        resumed: tuple[int, Completion] | None = None,
        name: str = "",
        sampled: Callable[[], None] = lambda: None,
        again: Callable[[], None] = lambda: None,
    ) -> Rollout | FailedRollout:
        """Run a rollout with retries. An attempt holds a slot until it has sampled, then calls `sampled`; a
        retry calls `again` first.

        `resumed`: (attempt, tokens) of a killed run; the time budget restarts. `name`: rollout_id outside
        groups.
        """
        rollout_id = name or f"g{group_id}/r{sample_index}"
        number, partial = resumed or (0, None)
        clock = RolloutClock(self.timeout_s)
        give_back = functools.partial(slots.give_back_nowait, rollout_id)

        def stopped() -> None:
            give_back()
            sampled()

        try:
            while True:
                attempt = RolloutAttempt(
                    rollout_id, group_id, prompt, sample_index, number, stopped, partial, journal, clock
                )
                attempt.seen.num_kept = 0 if partial is None else len(partial.token_ids)
                slots.ask_nowait(rollout_id, order)
                outcome: Rollout | RolloutFailure | None = None
                try:
                    await slots.wait(rollout_id)
                    self.started_s.setdefault(rollout_id, asyncio.get_running_loop().time())
                    outcome = await self._run_attempt(attempt)
                finally:
                    give_back()
                    attempt.count_lost(outcome)
                if not isinstance(outcome, RolloutFailure):
                    return outcome
                log.warning(
                    "%s attempt %d of %d failed: %s", rollout_id, number + 1, self.retries + 1, outcome
                )
                if isinstance(outcome, PromptUnusable):
                    return FailedRollout(sample_index, 0, outcome, attempt.seen)
                if number >= self.retries or clock.left_s == 0.0:  # above it if a killed run had more retries
                    return FailedRollout(sample_index, number + 1, outcome, attempt.seen)
                number, partial = number + 1, None
                self.num_retried += 1
                again()
        finally:
            self.started_s.pop(rollout_id, None)

    async def _run_attempt(self, attempt: RolloutAttempt) -> Rollout | RolloutFailure:
        name = f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id})"
        limit = attempt.clock.start()
        try:
            async with limit:
                rollout = await self._generator.run_attempt(attempt)
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
        finally:
            attempt.clock.end()
