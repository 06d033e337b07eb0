"""One rollout with its limits and retries: the one boundary where a failure becomes data. Knows no group, no
buffer.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import heapq
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from asyncrl.errors import PromptUnusable, RolloutFailure, RolloutTimeout, RoomError
from asyncrl.messages.protocols import RolloutJournal
from asyncrl.messages.records import (
    Group,
    GroupId,
    PartialCompletion,
    Prompt,
    Rollout,
    Ticket,
    UnfinishedGroup,
)
from asyncrl.waits import TimeLimit, waiting

# The seed of each request to the model: a pure function of who asks, never of when.


def derive_seed(run_seed: int, seed_id: str, sample_index: int, turn: int, attempt: int = 0) -> int:
    """Seed in [0, 2**63) of one request, the same in every run with the same arguments.

    `seed_id` names the prompt and how often it was handed back (Prompt.seed_id), `attempt` counts the retries
    of a rollout: with the same seed it would sample the same tokens, and what failed for what it said, or was
    too long, would do so again. The first of each leaves no trace in the hash, so that a plain loop without
    retries needs to know nothing of them.
    """
    parts = [str(run_seed), seed_id, str(sample_index), str(turn)]
    if attempt:
        parts.append(f"attempt {attempt}")
    key = "\x1f".join(parts)
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


# Places in the engines, given to rollouts one by one. Knows names and an order; knows no engine, no group.


class Slots:
    """`capacity` places for rollouts that sample.

    Life:       of an asker: ask_nowait -> holds a place at once, or waits for one -> give_back_nowait, in
    either case. Waits:      wait sleeps until the asker holds its place; wait_spare until a place is free.
    Both are woken by give_back_nowait. Invariant:  no more than `capacity` hold a place, and nobody waits
    while one is free: the next one goes to the smallest `order`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._queue: list[
            tuple[tuple[int, ...], int, str, asyncio.Future[None]]
        ] = []  # heap; those that gave up waiting are skipped
        self._numbers = count()
        self._spare = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Slots {self.num_held}/{self.capacity} held, {self.num_waiting} wait>"

    @property
    def num_held(self) -> int:
        """Rollouts that hold a place."""
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        """Rollouts that wait for one."""
        return len(self._waiting)

    @property
    def has_spare(self) -> bool:
        """Whether a place is free; then nobody waits for it."""
        return len(self._held) < self.capacity

    def ask_nowait(self, name: str, order: tuple[int, ...]) -> None:
        """Hold a place if one is free, else wait for one. Means nothing for whoever holds a place or
        waits.
        """
        if name in self._held or name in self._waiting:
            return
        if self.has_spare:
            self._held.add(name)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        heapq.heappush(self._queue, (order, next(self._numbers), name, future))

    async def wait(self, name: str) -> None:
        """Return when the asker holds its place."""
        if name in self._waiting:
            with waiting(self._what_is_free, on="a rollout that ends"):
                await self._waiting[name]

    async def wait_spare(self) -> None:
        """Return when a place is free."""
        with waiting(self._what_is_free, on="a rollout that ends"):
            while not self.has_spare:
                await self._spare.wait()

    def _what_is_free(self) -> str:
        return f"a free sequence in the engines ({self.num_held} of {self.capacity} sample)"

    def give_back_nowait(self, name: str) -> None:
        """Hold no place and wait for none; the place goes to whoever is next."""
        self._waiting.pop(name, None)
        self._held.discard(name)
        while self.has_spare and self._queue:
            _, _, found, future = heapq.heappop(self._queue)
            if self._waiting.get(found) is future:
                del self._waiting[found]
                self._held.add(found)
                if not future.done():  # cancelled in this very moment: its end gives the place back
                    future.set_result(None)
        if self.has_spare:
            self._spare.set()
            self._spare = asyncio.Event()


log = logging.getLogger(__name__)


class RolloutClock:
    """The one budget of seconds that a rollout has for all its attempts, None for no limit.

    Life:       for each attempt: start() and entering what it returns -> hold() -> resume(): runs on with
    what is left; as often as
                it pleases -> end(). Outside of an attempt, and once the time is up, hold and resume mean
                nothing.
    Waits:      whoever holds it may wait for ever: nothing here ends that wait. The watchdog owns it, which
    tells of a run in
                which nothing moves and names its oldest rollouts.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._left_s = timeout_s
        self._limit: TimeLimit | None = None

    def __repr__(self) -> str:
        return f"<RolloutClock {self._left_s} s left{'' if self._limit is None else f' until {self._limit.when()}'}>"

    @property
    def left_s(self) -> float | None:
        """What the attempts to come have, or this one if it holds the clock; None for no limit."""
        return self._left_s

    def start(self) -> TimeLimit:
        """The limit of one attempt, to be entered at once."""
        self._limit = TimeLimit(self._left_s)
        return self._limit

    def hold(self) -> None:
        """Stand still."""
        if self._limit is not None and not self._limit.expired():
            self._count()
            self._limit.reschedule(None)

    def resume(self) -> None:
        """Run on, if it was held."""
        if (
            self._limit is not None
            and not self._limit.expired()
            and self._limit.when() is None
            and self._left_s is not None
        ):
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left_s)

    def end(self) -> None:
        """The attempt has ended."""
        self._count()
        self._limit = None

    def _count(self) -> None:
        if self._limit is not None and self._limit.left_s is not None:
            self._left_s = 0.0 if self._limit.expired() else self._limit.left_s


@dataclass(frozen=True, slots=True)
class RolloutAttempt:
    """One try at one prompt. `attempt` counts from 0; `stopped_sampling` tells that it needs no engine slot
    any more.

    `partial`: what a killed run had sampled in this very attempt; `on_segment` is told (turn, all that was
    sampled of it so far).
    """

    group_id: GroupId
    prompt: Prompt
    sample_index: int
    attempt: int
    stopped_sampling: Callable[[], None]
    partial: PartialCompletion | None = None
    on_segment: Callable[[int, PartialCompletion], None] = lambda turn, partial: None
    clock: RolloutClock = field(default_factory=lambda: RolloutClock(None))

    @property
    def rollout_id(self) -> str:
        """`g17/r3`, the same for all attempts."""
        return f"g{self.group_id}/r{self.sample_index}"

    def request_id(self, turn: int) -> str:
        """Unique within the run: a retry may be sent before the server has seen that the first try is
        gone.
        """
        return f"{self.rollout_id}/t{turn}/a{self.attempt}"

    def hold_clock(self) -> None:
        """What follows does not count towards rollout.timeout_s: the attempt waits for somebody who runs
        it.
        """
        self.clock.hold()

    def resume_clock(self) -> None:
        """Somebody runs it: what is left of rollout.timeout_s runs on. May come from another task, twice, and
        late.
        """
        self.clock.resume()


class Generator(Protocol):
    """A way to run a rollout: single_turn and its like."""

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        """The finished rollout, all its branches. Raises RolloutFailure (data), or RoomError (ends the
        run).
        """
        ...


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """A rollout that failed at each of its `num_attempts`; `failure` is the last one. 0: its prompt can never
    be sampled.
    """

    sample_index: int
    num_attempts: int
    failure: RolloutFailure

    @property
    def how(self) -> str:
        """In words that its failure follows."""
        return f"failed {self.num_attempts} times, last" if self.num_attempts else "cannot be sampled"


class RolloutRunner:
    """Runs rollouts within rollout.timeout_s each, and tries failed ones again in what is left of it.

    Waits:      run sleeps in wait_slot, then in the generator, at most timeout_s for all attempts together
    (None = no limit). While
                the generator holds the clock, it has no limit of its own: see RolloutClock.
    Invariant:  run returns data for whatever goes wrong in a rollout; RoomError and CancelledError alone
    pass.
    """

    def __init__(self, generator: Generator, *, timeout_s: float | None, retries: int) -> None:
        self._generator = generator
        self.timeout_s, self.retries = timeout_s, retries
        self.num_retried = 0
        """Attempts after a failed one, so far."""
        self.num_timeouts = 0
        """Rollouts that ran past timeout_s, so far."""

    def __repr__(self) -> str:
        return (
            f"<RolloutRunner timeout {self.timeout_s} s, {self.retries} retries, {self.num_retried} retried>"
        )

    async def run(
        self,
        group_id: GroupId,
        prompt: Prompt,
        sample_index: int,
        *,
        wait_slot: Callable[[], Awaitable[None]],
        stopped_sampling: Callable[[], None],
        journal: RolloutJournal,
        resumed: tuple[int, PartialCompletion] | None = None,
    ) -> Rollout | FailedRollout:
        """One rollout, retries included. Each attempt begins once `wait_slot` returns.

        `resumed`: the attempt that a killed run was in, counted from 0, and what it had sampled; the budget
        begins in full.
        """
        number, partial = resumed or (0, None)
        clock = RolloutClock(self.timeout_s)
        while True:
            tell = functools.partial(journal.segment_nowait, group_id, sample_index, number)
            attempt = RolloutAttempt(
                group_id, prompt, sample_index, number, stopped_sampling, partial, tell, clock
            )
            partial = None
            try:
                await wait_slot()
                outcome = await self._run_attempt(attempt)
            finally:
                stopped_sampling()
            if not isinstance(outcome, RolloutFailure):
                return outcome
            log.warning(
                "%s attempt %d of %d failed: %s", attempt.rollout_id, number + 1, self.retries + 1, outcome
            )
            if isinstance(outcome, PromptUnusable):
                return FailedRollout(sample_index, 0, outcome)
            if number >= self.retries or clock.left_s == 0.0:  # above it, if a killed run had more
                return FailedRollout(sample_index, number + 1, outcome)
            number += 1
            self.num_retried += 1

    async def _run_attempt(self, attempt: RolloutAttempt) -> Rollout | RolloutFailure:
        limit = attempt.clock.start()
        try:
            async with limit:
                rollout = await self._generator.run_attempt(attempt)
            check_rollout(rollout, attempt)
            return rollout
        except RoomError:
            raise
        except RolloutFailure as failure:
            return failure
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return self._timed_out(attempt)
            log.warning("%s broke", attempt.rollout_id, exc_info=True)
            broken = RolloutFailure(
                f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id}) raised {type(error).__name__}: "
                f"{error}",
                rule="a rollout ends with its branches or a RolloutFailure",
                way_out="the controller's log has the traceback.",
            )
            broken.__cause__ = error
            return broken
        finally:
            attempt.clock.end()

    def _timed_out(self, attempt: RolloutAttempt) -> RolloutTimeout:
        self.num_timeouts += 1
        return RolloutTimeout(
            f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id}) is not finished after "
            f"{self.timeout_s} s",
            rule=f"rollout.timeout_s={self.timeout_s} is the limit of all its attempts together; this was "
            f"number {attempt.attempt + 1}",
            way_out="none needed for one; if rollout/failed keeps rising, raise rollout.timeout_s or lower "
            "rollout.max_tokens.",
        )


def check_rollout(rollout: Rollout, attempt: RolloutAttempt) -> None:
    """Raises RolloutFailure unless these are the branches of one rollout, each with a sampled token: a
    generator may be anybody's.
    """
    places = [(branch.sample_index, branch.branch) for branch in rollout]
    if not rollout or places != [(attempt.sample_index, number) for number in range(len(rollout))]:
        what = f"has branches (sample_index, branch) {places}"
    elif any(branch.reward != rollout[0].reward for branch in rollout):
        what = f"has branches with rewards {[branch.reward for branch in rollout]}"
    elif any(bool(branch.credits) != bool(rollout[0].credits) for branch in rollout):
        what = "has branches with credits and branches without"
    elif any(not branch.version_spans for branch in rollout):
        what = "has a branch without a sampled token"
    else:
        return
    raise RolloutFailure(
        f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id}) {what}",
        rule="a rollout has at least one branch; they are numbered from 0, have its one reward and tokens of "
        "their own, "
        "and all of them have credits or none",
        way_out="this is a fault of the generator: please report it.",
    )


# The rollouts of one prompt on their way to a group. Pure bookkeeping: knows no engine, no buffer, no clock.


class RunningGroup:
    """One admitted group while its rollouts run.

    Life:       made with its ticket -> one add() a rollout, in any order -> is_complete -> group(), or None
    if too
                few rollouts are usable. Or cancel(), when the buffer takes the admission back.
    Invariant:  a failed rollout costs its own place alone: its siblings stay.
    """

    def __init__(
        self, ticket: Ticket, prompt: Prompt, group_size: int, before: UnfinishedGroup | None = None
    ) -> None:
        """`before`: how far a killed run had come with it."""
        self.ticket, self.prompt, self.group_size = ticket, prompt, group_size
        self.tasks: list[asyncio.Task[Any]] = []
        self._rollouts: dict[int, Rollout] = {} if before is None else dict(before.rollouts)
        failures = {} if before is None else before.failures
        self._failures = {
            index: FailedRollout(index, attempts, RolloutFailure(why))
            for index, (attempts, why) in failures.items()
        }
        self._partials = {} if before is None else before.partials

    def __repr__(self) -> str:
        done, failed = len(self._rollouts), len(self._failures)
        return f"<RunningGroup g{self.ticket.group_id} {done} done, {failed} failed of {self.group_size}>"

    @property
    def to_run(self) -> list[int]:
        """Sample indices of the rollouts that have not ended."""
        return [
            index
            for index in range(self.group_size)
            if index not in self._rollouts and index not in self._failures
        ]

    def resumed(self, sample_index: int) -> tuple[int, PartialCompletion] | None:
        """(number of the attempt, what it had sampled) that a rollout goes on from."""
        return self._partials.get(sample_index)

    @property
    def is_complete(self) -> bool:
        """Every rollout has ended. Those beyond group_size, if a killed run had a larger one, are the group's
        too.
        """
        return not self.to_run

    @property
    def num_needed(self) -> int:
        """Fewest rollouts that can be scored against each other."""
        return min(2, self.group_size)

    def add(self, outcome: Rollout | FailedRollout) -> None:
        """One rollout has ended."""
        if isinstance(outcome, FailedRollout):
            self._failures[outcome.sample_index] = outcome
        else:
            self._rollouts[outcome[0].sample_index] = outcome

    def group(self) -> Group | None:
        """The finished group, all branches by sample_index and number; None if fewer than num_needed rollouts
        are usable.
        """
        if len(self._rollouts) < self.num_needed:
            return None
        by_index = sorted(self._rollouts.items())
        return Group(
            self.ticket.group_id, self.prompt, tuple(branch for _, rollout in by_index for branch in rollout)
        )

    @property
    def can_be_tried_again(self) -> bool:
        """False once a rollout found that the prompt can never be sampled."""
        return all(failed.num_attempts for failed in self._failures.values())

    def why_failed(self) -> str:
        """Why group() is None, with the last failure."""
        last = list(self._failures.values())[-1]
        return (
            f"g{self.ticket.group_id} (prompt {self.prompt.prompt_id}) has {len(self._rollouts)} usable "
            f"rollouts of "
            f"{self.group_size} and needs {self.num_needed}; r{last.sample_index} {last.how}: {last.failure}"
        )

    def cancel(self) -> None:
        """End the rollouts that still run; without waiting for them."""
        for task in self.tasks:
            task.cancel()


# Attempts that belong to no group: those of an evaluation. What they come to goes to whoever asks, and to no
# buffer and no journal.


NO_GROUP = GroupId(-1)


@dataclass(frozen=True, slots=True)
class AttemptApart(RolloutAttempt):
    """One try, under a name of its own."""

    name: str = ""

    @property
    def rollout_id(self) -> str:
        """The name."""
        return self.name


class AttemptsApart:
    """Runs single attempts within a limit, without retries.

    Waits:      run sleeps in the generator, timeout_s at most (None: no limit); while the generator holds the
    clock, without a limit.
    """

    def __init__(self, generator: Generator, *, timeout_s: float | None) -> None:
        self._generator, self.timeout_s = generator, timeout_s
        self._broken: RoomError | None = None

    def __repr__(self) -> str:
        return f"<AttemptsApart {self._generator!r}>"

    def on_broken(self, error: RoomError) -> None:
        """A room that answers harnesses, and not us, is broken: run raises that from here on."""
        self._broken = self._broken or error

    async def run(self, name: str, prompt: Prompt, sample_index: int) -> Rollout:
        """The rollout, all its branches. Raises RolloutFailure, or RoomError if what samples is broken."""
        clock = RolloutClock(self.timeout_s)
        attempt = AttemptApart(NO_GROUP, prompt, sample_index, 0, lambda: None, clock=clock, name=name)
        limit = clock.start()
        try:
            async with limit:
                return await self._generator.run_attempt(attempt)
        except RolloutFailure as failure:
            if self._broken is not None:  # the harness failed because its calls did
                raise self._broken from failure
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            raise RolloutTimeout(f"{name} is not finished after {self.timeout_s} s") from None
        finally:
            clock.end()
