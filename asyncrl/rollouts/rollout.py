"""Run rollouts with limits and retries: a single turn, or a harness in a session.
Failures become data.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import heapq
import itertools
import logging
import operator
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from statistics import fmean
from typing import Literal, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from asyncrl.base.errors import (
    ComponentError,
    PromptUnusable,
    RewardFailure,
    RolloutFailure,
    RolloutTimeout,
)
from asyncrl.base.failures import FailureKind, kind_of_error
from asyncrl.base.user_code import message_of
from asyncrl.base.waits import Signal, clock, waiting
from asyncrl.config import OnTimeout
from asyncrl.engines.pool import EnginePool
from asyncrl.engines.role_client import Annotate
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import (
    RUN_RULES,
    Completion,
    Credit,
    GroupId,
    Outcome,
    PolicyCall,
    Prompt,
    Reward,
    RewardPart,
    Rollout,
    SessionRules,
    Trajectory,
    Work,
    num_sampled,
    total,
)
from asyncrl.messages.sampling import SamplingParameters, SamplingRequest
from asyncrl.messages.turn_rewards import with_turn_rewards
from asyncrl.messages.worker_api import (
    ChatTokenizer,
    RolloutSession,
    SessionHost,
    WorkQueue,
)
from asyncrl.rollouts.late_rewards import LateRewards
from asyncrl.rollouts.recent_failures import RecentFailures
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.rewards import (
    UnreadableAnswer,
    UserCodeFailed,
    as_reward,
    weighted,
)
from asyncrl.tasks.scorer import Scorers, TaskScorer

log = logging.getLogger(__name__)

MAX_KNOWN_PROMPTS = 1024

TIMEOUT_GRACE_S = 60.0
"""With generator.on_timeout=score, the worker's own limit must come first: it ends the
agent and reports that it was late.
"""
Phase = Literal["sampling", "scoring", "teaching"]
Score = Callable[[], Awaitable[Rollout]]
"""Score a sampled rollout."""


def derive_seed(
    run_seed: int, seed_id: str, sample_index: int, turn: int, attempt: int = 0
) -> int:
    """Return a request's seed in [0, 2**63).

    A retry must not repeat the failed tokens. First attempts add nothing to the hash,
    so that a plain loop derives the same seeds.
    """
    parts = [str(run_seed), seed_id, str(sample_index), str(turn)]
    if attempt:
        parts.append(f"attempt {attempt}")
    # Not hash(), whose value for a text differs between processes: a resumed run needs
    # the same seeds. The separator keeps 1, 23 and 12, 3 apart.
    key = "\x1f".join(parts)
    return (
        int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
        >> 1
    )


class Slots:
    """`capacity` slots for sampling rollouts.

    Waits: wait sleeps until the rollout holds a slot, wait_spare until one is free.

    Invariant: no rollout waits while a slot is free; the smallest `order` is next.
        Shrinking revokes nothing.

    Example: capacity 2.

        g0/r0 and g0/r1 ask           both hold a slot
        g0/r2 asks                    it is queued
        g0/r0 gives back              g0/r2 holds the slot; wait_spare sleeps on
        g0/r1 gives back              nothing is queued: wait_spare returns, and the
                                      producers may admit group 1
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_ended = 0
        # By rollouts that hold or want a slot; done once they hold it.
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._held: set[str] = set()
        # A heap. A name that has left stays until it is popped, since removing it would
        # cost a pass over the heap; _hand_out skips it.
        self._queue: list[tuple[tuple[int, ...], str]] = []
        self._spare = Signal()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def ask_nowait(self, name: str, order: tuple[int, ...]) -> None:
        """Take or queue for a slot. Idempotent."""
        if name not in self._asked:
            self._asked[name] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._queue, (order, name))
            self._hand_out()

    async def wait(self, name: str) -> None:
        asked = self._asked[name]
        if not asked.done():
            with waiting(self._what_is_free, on="a rollout that ends"):
                await asked

    async def wait_spare(self) -> None:
        with waiting(self._what_is_free, on="a rollout that ends"):
            await self._spare.wait_for(lambda: self.num_held < self.capacity)

    def _what_is_free(self) -> str:
        return f"a free sequence in the engines ({self.num_held} of {self.capacity} sample)"

    def give_back_nowait(self, name: str) -> None:
        """Release the slot or leave the queue. Idempotent."""
        if self._asked.pop(name, None) is not None:
            if name in self._held:
                self._held.remove(name)
                self.num_ended += 1
            self._hand_out()

    def resize_nowait(self, capacity: int) -> None:
        self.capacity = capacity
        self._hand_out()

    def _hand_out(self) -> None:
        held = self._held
        while len(held) < self.capacity and self._queue:
            name = heapq.heappop(self._queue)[1]
            asked = self._asked.get(name)
            if asked is not None:
                held.add(name)
                # cancelled just now; its end releases the slot
                if not asked.done():
                    asked.set_result(None)
        if len(held) < self.capacity:
            # The queue is empty here, so rollouts of admitted groups, retries included,
            # precede new groups.
            self._spare.notify()


class RolloutClock:
    """Time budget of a rollout over all attempts. It stands still between hold() and
    resume() or start().

    Example: 600 s. An agent waits 300 s for a worker (held), runs 200 s and fails; its
    retry has 400 s.
    """

    _limit = asyncio.Timeout(None)  # until start()

    def __init__(self, timeout_s: float | None) -> None:
        self.left_s = timeout_s

    def start(self) -> asyncio.Timeout:
        self._limit = asyncio.timeout(self.left_s)
        return self._limit

    def hold(self) -> None:
        self.note_left()
        # A limit that has fired cannot be moved: asyncio raises RuntimeError.
        if self._limit.when() is not None and not self._limit.expired():
            self._limit.reschedule(None)

    def note_left(self) -> None:
        if self._limit.expired():
            self.left_s = 0.0
        elif (when_s := self._limit.when()) is not None:
            self.left_s = max(0.0, when_s - clock())

    def resume(self, grace_s: float = 0.0) -> None:
        # The queue calls this for each worker that gets the item. A clock that runs
        # already must not get its time back.
        if (
            self.left_s is not None
            and self._limit.when() is None
            and not self._limit.expired()
        ):
            now_s = clock()
            self._limit.reschedule(now_s + self.left_s + grace_s)


class AttemptProgress:
    """What an attempt has sampled so far; here nothing. An attempt that fails or is
    cancelled returns nothing, and its tokens must still be counted and shown.
    """

    @property
    def num_spent(self) -> int:
        """Return the number of sampled tokens, without the tokens of a killed run."""
        return 0

    @property
    def has_asked(self) -> bool:
        """Return whether the policy was asked: its text, or its length, may then be why
        the attempt fails.
        """
        return False

    def rollout(self) -> Rollout:
        """Return the tokens so far. Raises RolloutFailure."""
        return ()


@dataclass(slots=True)
class RolloutAttempt:
    """`rollout_id` (`g17/r3`) is the same for all attempts. `partial`: tokens from a
    killed run. `num_kept`: tokens in the journal's unfinished completion.

    `on_phase` is called after sampling, and before a retry samples again. The generator
    replaces `progress` by its own.
    """

    rollout_id: str
    group_id: GroupId
    prompt: Prompt
    sample_index: int
    attempt: int = 0
    partial: Completion | None = None
    journal: Journal | None = None
    on_phase: Callable[[Phase], None] = lambda phase: None
    clock: RolloutClock = field(default_factory=lambda: RolloutClock(None))
    progress: AttemptProgress = field(default_factory=AttemptProgress, init=False)
    num_kept: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_kept = 0 if self.partial is None else self.partial.tokens.num_sampled

    def keep_segment(self, partial: Completion) -> None:
        if self.journal is not None:
            self.journal.add_segment_nowait(
                self.group_id, self.sample_index, self.attempt, partial
            )
            self.num_kept = partial.tokens.num_sampled

    def count_lost(self, outcome: Rollout | RolloutFailure | None) -> None:
        """Journal the sampled tokens that are in no trajectory, each once.

        A cancelled attempt (None) keeps its completion for a resume. Example: of 300
        tokens the journal has a completion of 200.

            finished with 300     none is lost
            cancelled             100; a resume continues from the 200
            failed                100, and 200 when the journal drops the completion
        """
        num_lost = self.progress.num_spent + (
            0 if self.partial is None else self.partial.tokens.num_sampled
        )
        if isinstance(outcome, tuple):
            num_lost -= num_sampled(outcome)
        else:
            num_lost -= self.num_kept
        is_failed = isinstance(outcome, RolloutFailure)
        if self.journal is not None and (num_lost > 0 or is_failed):
            index = self.sample_index if is_failed else None
            self.journal.add_lost_tokens_nowait(self.group_id, max(0, num_lost), index)


class Generator(Protocol):
    async def sample(self, attempt: RolloutAttempt) -> Score:
        """Sampling and scoring raise RolloutFailure (data), or ComponentError (ends the
        run).
        """
        ...


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """`num_attempts` 0: the prompt is impossible. `seen`: of the last attempt."""

    sample_index: int
    num_attempts: int
    failure: RolloutFailure
    seen: Callable[[], Rollout] = tuple


def how_failed(num_attempts: int) -> str:
    if num_attempts == 0:
        return "cannot be sampled"
    return "failed" if num_attempts == 1 else f"failed {num_attempts} times, last"


@dataclass(eq=False)
class RolloutRunner:
    """Run rollouts within rollout.timeout_s each, retries included. `task_timeouts_s`:
    of tasks with another limit (task.limits.timeout_s). `retries_policy`: retry failures
    that the policy may have caused, too. `is_ending`: the run stops, and the signal that
    stops it may have ended an agent's program. A rollout that fails then waits until it
    is cancelled, and a resume repeats it.

    Waits: run waits for a slot before each attempt, then in the generator, at most
    timeout_s in total unless the generator holds the clock.

    Invariant: run returns data for any failure; only ComponentError and CancelledError
        pass. An attempt holds a slot exactly while it samples.
    """

    generator: Generator
    _: KW_ONLY
    timeout_s: float | None
    retries: int
    failures: RecentFailures = field(default_factory=RecentFailures)
    task_timeouts_s: Mapping[str, float] = field(default_factory=dict)
    retries_policy: bool = True
    is_ending: Callable[[], bool] = lambda: False
    num_retried: int = field(default=0, init=False)
    started_s: dict[str, float] = field(default_factory=dict, init=False)

    async def run(
        self,
        attempt: RolloutAttempt,
        *,
        slots: Slots,
        order: tuple[int, ...],
    ) -> Rollout | FailedRollout:
        """A resumed rollout gets a new time budget."""
        attempt.clock = RolloutClock(self._timeout_of(attempt.prompt))
        try:
            while True:
                # Producers have asked for a first attempt; evaluations and retries do
                # it here. By its old order a retry precedes newer groups.
                slots.ask_nowait(attempt.rollout_id, order)
                outcome: Rollout | RolloutFailure | None = None
                try:
                    await slots.wait(attempt.rollout_id)
                    # Status and watchdog show the age from here: a queued rollout is
                    # not a slow one.
                    self.started_s.setdefault(attempt.rollout_id, clock())
                    ended = await self._run_attempt(attempt, slots)
                    if isinstance(ended, RolloutFailure) and self.is_ending():
                        await asyncio.Event().wait()
                    outcome = ended
                finally:
                    slots.give_back_nowait(attempt.rollout_id)
                    attempt.count_lost(outcome)
                if not isinstance(outcome, RolloutFailure):
                    # Producers count it once its group has its rewards.
                    if outcome[0].is_scored:
                        self.failures.note_end_nowait(None, attempt.prompt.prompt_id)
                    return outcome
                attempt.clock.note_left()
                if attempt.progress.has_asked:
                    outcome.kind = outcome.kind.after_answer
                self.failures.note_end_nowait(outcome, attempt.prompt.prompt_id)
                num_attempts = attempt.attempt + 1
                # An evaluation measures the policy, and its failures too.
                may_retry = self.retries_policy or outcome.kind.is_infrastructure
                retries = self.retries if may_retry else 0
                tries = f"{num_attempts} of {retries + 1}"
                log.warning(
                    "%s attempt %s failed (%s): %s",
                    attempt.rollout_id,
                    tries,
                    outcome.kind,
                    outcome,
                )
                # No retry can help; producers give up a prompt with 0 attempts.
                if isinstance(outcome, PromptUnusable):
                    num_attempts = 0
                if not 0 < num_attempts <= retries or attempt.clock.left_s == 0.0:
                    return FailedRollout(
                        attempt.sample_index,
                        num_attempts,
                        outcome,
                        attempt.progress.rollout,
                    )
                # replace() also resets progress and num_kept, which are of one attempt.
                attempt = replace(attempt, attempt=num_attempts, partial=None)
                self.num_retried += 1
                attempt.on_phase("sampling")
        finally:
            self.started_s.pop(attempt.rollout_id, None)

    def _timeout_of(self, prompt: Prompt) -> float | None:
        return self.task_timeouts_s.get(prompt.task, self.timeout_s)

    async def _run_attempt(
        self, attempt: RolloutAttempt, slots: Slots
    ) -> Rollout | RolloutFailure:
        name = f"{attempt.rollout_id} (prompt {attempt.prompt.prompt_id})"
        limit = attempt.clock.start()
        try:
            async with limit:
                score = await self.generator.sample(attempt)
                # A reward or a judge may take long, and needs no sequence of an engine.
                slots.give_back_nowait(attempt.rollout_id)
                attempt.on_phase("scoring")
                rollout = await score()
            if not all(branch.tokens.spans for branch in rollout):
                return RolloutFailure(f"{name} has a branch without a sampled token")
            return rollout
        # A broken part of the run says nothing about this rollout, so it must not
        # become data.
        except ComponentError:
            raise
        except RolloutFailure as failure:
            return failure
        except Exception as error:
            # User code raises TimeoutError too. Only our limit has expired.
            if isinstance(error, TimeoutError) and limit.expired():
                what = f"{name} is not finished after rollout.timeout_s={self._timeout_of(attempt.prompt)} s"
                return RolloutTimeout(
                    f"{what}, in attempt {attempt.attempt + 1}",
                    way_out="if rollout/failed keeps rising, raise it, or lower rollout.max_tokens.",
                )
            log.warning("%s broke", attempt.rollout_id, exc_info=True)
            return RolloutFailure(
                f"{name} raised {type(error).__name__}: {error}",
                way_out="see logs/controller.log.",
                kind=kind_of_error(error, FailureKind.AGENT_CRASH),
            )


# ---- generators


@dataclass(eq=False)
class TurnProgress(AttemptProgress):
    """Of one completion. `ended_s` is 0 until its end."""

    sample_index: int
    num_spent: int = 0
    has_asked: bool = True
    completion: Completion | None = None
    begun_s: float = field(default_factory=time.time)
    ended_s: float = 0.0

    def add_spent(self, num_tokens: int) -> None:
        self.num_spent += num_tokens

    def rollout(self, reward: float = 0.0) -> Rollout:
        if self.completion is None:
            return ()
        trajectory = make_trajectory(
            self.sample_index,
            self.completion,
            reward,
            self.begun_s,
            self.ended_s or time.time(),
        )
        return (trajectory,)


def ids_of(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, str]],
    limit: int,
    name: str,
) -> Sequence[int]:
    """Return the token ids of a chat up to the answer. Raises PromptUnusable if the
    template refuses it, and for more than `limit` ids.
    """
    try:
        ids = tokenizer.encode_chat(messages)
    except ValueError as error:  # another attempt would render the same
        raise PromptUnusable(
            f"the chat template refuses {name}: {error}",
            way_out="correct the messages, or leave the prompt out of the task.",
        ) from error
    if not 0 < len(ids) <= limit:
        raise PromptUnusable(
            f"{name} has {len(ids)} tokens",
            rule=f"1 to rollout.max_prompt_tokens={limit} are allowed; none is cut",
            way_out="raise rollout.max_prompt_tokens, or leave such prompts out of the task.",
        )
    return ids


@dataclass(frozen=True, slots=True)
class SingleTurn:
    engine: EnginePool
    tokenizer: HFChatTokenizer
    scorers: Scorers
    run_seed: int
    max_tokens: int
    max_prompt_tokens: int
    sampling: SamplingParameters = SamplingParameters()
    stop: tuple[str, ...] = ()
    reseeds: bool = True
    """A retry samples other tokens. An evaluation must not sample until its reward
    function can read the text.
    """
    _known_ids: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """Token ids of recent prompts, so that a group's requests share one object."""

    def _prompt_ids(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        ids = self._known_ids.get(prompt.prompt_id)
        if ids is None:
            name = f"prompt {prompt.prompt_id}"
            given = ids_of(
                self.tokenizer, prompt.messages, self.max_prompt_tokens, name
            )
            ids = np.array(given, np.int32)
            self._known_ids[prompt.prompt_id] = ids
            if len(self._known_ids) > MAX_KNOWN_PROMPTS:
                del self._known_ids[next(iter(self._known_ids))]
        return ids

    async def sample(self, attempt: RolloutAttempt) -> Score:
        """Sample one completion. Raises RolloutFailure if the prompt is too long or
        refused.
        """
        prompt, index = attempt.prompt, attempt.sample_index
        prompt_ids = self._prompt_ids(prompt)
        progress = TurnProgress(index)
        attempt.progress = progress

        def keep(partial: Completion) -> None:
            attempt.keep_segment(partial)
            progress.completion = partial

        completion = await self.engine.generate(
            SamplingRequest(
                # a retry may arrive before the first try has ended
                request_id=f"{attempt.rollout_id}/t0/a{attempt.attempt}",
                prompt_ids=prompt_ids,
                max_tokens=self.max_tokens,
                **self.sampling.parameters,
                stop=self.stop,
                seed=derive_seed(
                    self.run_seed,
                    prompt.seed_id,
                    index,
                    0,
                    attempt.attempt if self.reseeds else 0,
                ),
                # Siblings share the prompt, so they prefer the engine that has read it.
                route_key=f"g{attempt.group_id}",
            ),
            partial=attempt.partial,
            on_segment=keep,
            on_spent=progress.add_spent,
        )
        progress.completion = completion
        progress.ended_s = time.time()
        scorer = self.scorers.of(prompt)
        return functools.partial(
            score_completion, scorer, attempt, completion, progress.rollout
        )


def make_trajectory(
    sample_index: int,
    completion: Completion,
    reward: float,
    begun_s: float = 0.0,
    ended_s: float = 0.0,
) -> Trajectory:
    """Return the trajectory of one completion; with the call's times."""
    call = PolicyCall(
        completion.num_prompt,
        len(completion.tokens),
        f"r{sample_index}",
        begun_s,
        ended_s,
        completion.finish_reason or "",
    )
    return Trajectory(
        sample_index=sample_index,
        tokens=completion.tokens,
        reward=reward,
        is_truncated=completion.finish_reason == "length",
        num_interruptions=completion.num_interruptions,
        calls=(call,),
    )


@dataclass(frozen=True, slots=True)
class SessionProgress(AttemptProgress):
    session: RolloutSession
    sample_index: int

    @property
    def num_spent(self) -> int:
        return self.session.num_spent

    @property
    def has_asked(self) -> bool:
        return self.session.num_calls > 0

    def rollout(self) -> Rollout:
        return self.session.rollout(self.sample_index, Outcome(), 0.0)


@dataclass(frozen=True, slots=True)
class HarnessGenerator:
    """Run the harness on a worker, in a session per attempt.

    The clock of rollout.timeout_s stops while work is queued. A rollout that reached a
    limit is truncated; without a reward it gets 0. One that ran out of time fails or is
    scored, by `on_timeout`; without reward it fails.
    `by_turn`: give each turn a credit (algorithm.turn_discount). `harness`: see Work.
    `rules`: of the task's sessions.
    """

    host: SessionHost
    queue: WorkQueue
    scorers: Scorers
    on_timeout: OnTimeout = "fail"
    late: LateRewards | None = None
    """Set if rewards are posted later."""
    by_turn: bool = False
    harness: int = 0
    rules: SessionRules = RUN_RULES
    task_seed: Callable[[str, int], int] | None = None
    """Task.seed of a prompt's sample, in all attempts; None: see Work."""

    async def sample(self, attempt: RolloutAttempt) -> Score:
        """Let a worker run the harness, and end the session. Raises RolloutFailure if
        the harness or its worker fails, or nothing can be trained on.
        """
        prompt, index, name = attempt.prompt, attempt.sample_index, attempt.rollout_id
        scorer = self.scorers.of(prompt)
        session = self.host.open_nowait(
            name,
            prompt_id=prompt.seed_id,
            sample_index=index,
            attempt=attempt.attempt,
            # The calls of an agent extend each other, so they prefer the engine that
            # has their prefix. Siblings may use other engines.
            route_key=name,
            rules=replace(self.rules, shows_special=scorer.shows_special),
        )
        attempt.progress = SessionProgress(session, index)
        outcome_key = digest = None
        if self.late is not None:
            outcome_key, digest = self.late.expect_nowait(name)
        ends = "the rollout ran past rollout.timeout_s, or is no longer needed"
        try:
            attempt.clock.hold()
            work = Work(
                name,
                prompt,
                index,
                attempt.attempt,
                session.key,
                attempt.clock.left_s,
                self.harness,
                outcome_key,
                self.task_seed and self.task_seed(prompt.seed_id, index),
            )
            outcome, is_cut = await self._outcome(session, work, attempt)
            ends = "its harness has finished"  # leftover work would keep sampling
        except RolloutFailure as failure:
            ends = f"the rollout failed: {failure.what}"
            raise
        finally:
            # Before score(), which reads the session: calls that the agent left running
            # would still change it.
            session.end_nowait(ends)

        outcome = weighted_outcome(outcome, scorer.weights)
        rollout = functools.partial(
            session.rollout, index, outcome, by_turn=self.by_turn
        )

        def posted_later(digest: str) -> Rollout:
            assert self.late is not None
            bare = rollout(0.0)
            first = replace(bare[0], awaits=digest, untrained=session.untrained)
            unpaid = (first, *bare[1:])
            # Rewards that do not fit fail the attempt, also of an earlier post.
            paid = functools.partial(with_outcome, unpaid, weights=scorer.weights)
            self.late.note_end_nowait(digest, paid)
            if not is_cut:
                return unpaid
            # Its harness has failed at a limit, so nobody may know that it has ended.
            early = self.late.early_nowait(digest)
            if early is not None:
                return paid(early)
            self.late.withdraw_nowait(name, "a limit cut it, and its reward is 0")
            return bare

        async def score() -> Rollout:
            if digest is not None:
                return posted_later(digest)
            if is_cut and not scorer.has_score:
                return rollout(0.0)
            reward = own_reward(outcome)
            if reward is not None:
                return earning(rollout, reward)
            completion = session.last_completion()
            return await score_completion(scorer, attempt, completion, rollout)

        return score

    async def _outcome(
        self, session: RolloutSession, work: Work, attempt: RolloutAttempt
    ) -> tuple[Outcome, bool]:
        """Return the harness's outcome, and whether a limit cut it."""
        is_scored_late = self.on_timeout == "score"
        resume = functools.partial(
            attempt.clock.resume, grace_s=TIMEOUT_GRACE_S if is_scored_late else 0.0
        )
        try:
            async with session.while_open():
                outcome = await self.queue.run(work, started=resume)
        except RolloutFailure as failure:
            is_late = failure.kind is FailureKind.AGENT_TIMEOUT
            if is_late and is_scored_late and session.num_completions:
                return Outcome(), False
            if (
                session.overflow is None
                # A full disk or a lost worker says nothing about the policy.
                or not failure.kind.may_be_policys
                or not session.num_completions
            ):
                raise
            # it may be the harness's bug
            log.warning(
                "%s is kept as truncated (%s): %s",
                work.rollout_id,
                session.overflow,
                failure,
            )
            return Outcome(), True
        if outcome.timed_out and not is_scored_late:
            raise RolloutTimeout(
                f"{work.rollout_id}: its agent reached its own time limit",
                way_out="raise that limit, or set generator.on_timeout to score.",
            )
        return outcome, False


async def score_completion(
    scorer: TaskScorer,
    attempt: RolloutAttempt,
    completion: Completion,
    rollout: Callable[[float], Rollout],
) -> Rollout:
    """Return `rollout` of the completion's reward, or unscored if the task scores whole
    groups.
    """
    if not scorer.scores_groups:
        # Its requests queue for a server, which is not time of the rollout.
        if scorer.asked is not None:
            attempt.clock.hold()
        try:
            reward = await scorer.score(attempt.prompt, completion)
        except UnreadableAnswer as error:
            log.debug("the reward of prompt %s %s", attempt.prompt.prompt_id, error)
            return _noted(rollout(0.0), UNREADABLE, 1.0)
        if isinstance(reward, list):
            return with_credits(rollout(fmean(reward)), completion, reward)
        scored = earning(rollout, reward)
        return _noted(scored, UNREADABLE, 0.0) if scorer.is_library else scored
    first, *others = rollout(0.0)
    return (replace(first, unscored=scorer.text_of(completion)), *others)


def earning(rollout: Callable[[float], Rollout], reward: Reward) -> Rollout:
    """Return `rollout` of the reward, with its parts."""
    if isinstance(reward, float):
        return rollout(reward)
    return tuple(replace(branch, parts=reward) for branch in rollout(total(reward)))


UNREADABLE = "unreadable"
"""Metric of rollouts whose reward a library computes: 1 if it raised on the answer."""


def _noted(rollout: Rollout, name: str, value: float) -> Rollout:
    first, *others = rollout
    return (replace(first, metrics={**first.metrics, name: value}), *others)


def with_credits(
    rollout: Rollout, completion: Completion, rewards: Sequence[float]
) -> Rollout:
    """Give each span of tokens with equal rewards its own credit, a sample of the
    advantage. Raises RewardFailure if other tokens are trained, too.

    Example: a prompt of 2 tokens, and the rewards [0, 0, 1]: tokens 2 and 3 are a span
    with reward 0, token 4 is a span with reward 1.
    """
    places = [index for branch in rollout for index in np.flatnonzero(branch.loss_mask)]
    ids = [
        token
        for branch in rollout
        for token in branch.token_ids[branch.loss_mask].tolist()
    ]
    if len(rollout) > 1 or ids != list(completion.token_ids):
        raise RewardFailure(
            f"the reward returned {len(rewards)} numbers, and the rollout has {len(ids)} sampled tokens",
            rule="rewards per token need rollouts of one trained completion",
            way_out="return one number, or rewards of turns from the harness (turn_rewards).",
        )
    credits = list[Credit]()
    pairs = zip(rewards, places, strict=True)
    spans = itertools.groupby(pairs, key=operator.itemgetter(0))
    for unit, (reward, span) in enumerate(spans):
        inner = [int(place) for _, place in span]
        credits.append(Credit(inner[0], inner[-1] + 1, reward, unit))
    return (replace(rollout[0], credits=tuple(credits)),)


Scored: TypeAlias = Mapping[int, Rollout | RolloutFailure]
"""By sample_index: rollouts with what they got, or why they failed."""


async def score_group(
    scorer: TaskScorer, prompt: Prompt, rollouts: Mapping[int, Rollout], size: int
) -> Scored:
    """Score the unscored rollouts of a group of `size`, by sample_index. Return them
    with their reward, or why they have none.
    """
    texts = {index: rollout[0].unscored for index, rollout in rollouts.items()}
    asked = sorted(index for index, text in texts.items() if text is not None)
    # A resumed group may be larger than rollout.group_size, which has changed since.
    size = max(size, max(rollouts, default=-1) + 1)
    try:
        results = await scorer.score_group(
            prompt, [texts.get(index) for index in range(size)]
        )
    except RolloutFailure as failure:
        return dict.fromkeys(asked, failure)
    except ComponentError:
        raise
    # As in a rollout: what user code and its pool raise costs rollouts, not the run.
    except Exception as error:
        log.exception("the reward of a group of prompt %s failed", prompt.prompt_id)
        broken = RewardFailure(
            f"the group's reward for prompt {prompt.prompt_id} raised {message_of(error)}",
            way_out="the log has the traceback.",
            kind=kind_of_error(error, FailureKind.REWARD_CRASH),
        )
        return dict.fromkeys(asked, broken)
    scored = dict[int, Rollout | RolloutFailure]()
    for index in asked:
        result = results[index]
        if isinstance(result, RolloutFailure):
            scored[index] = result
        else:
            scored[index] = _paid(rollouts[index], result)
    return scored


async def annotate_group(
    annotations: Sequence[Annotate], prompt: Prompt, rollouts: Mapping[int, Rollout]
) -> Scored:
    """Let servers add to the rollouts of a group that have their rewards. Return the
    rollouts by sample_index, or why they failed.
    """

    async def annotated(index: int) -> Rollout | RolloutFailure:
        rollout = rollouts[index]
        siblings = [rollouts[other] for other in sorted(rollouts) if other != index]
        try:
            for annotate in annotations:
                rollout = await annotate(rollout, prompt, siblings)
        except RolloutFailure as failure:
            return failure
        return rollout

    results = await asyncio.gather(*map(annotated, rollouts))
    return dict(zip(rollouts, results, strict=True))


def with_outcome(
    rollout: Rollout, outcome: Outcome, weights: Mapping[str, float] = {}
) -> Rollout:
    """Give a rollout the reward that was posted later. `weights`: of its parts. Raises
    RolloutFailure if its turn_rewards, or names of parts, do not fit.
    """
    outcome = weighted_outcome(outcome, weights)
    reward = own_reward(outcome)
    assert reward is not None, "a posted outcome has a reward"
    if outcome.turn_rewards:
        credited = with_turn_rewards(rollout, outcome)
        paid = earning(
            lambda number: tuple(replace(one, reward=number) for one in credited),
            reward,
        )
    else:
        paid = _paid(rollout, reward)
    return tuple(
        replace(
            branch,
            metrics={**branch.metrics, **outcome.metrics},
            awaits=None,
            untrained=(),
        )
        for branch in paid
    )


def _paid(rollout: Rollout, reward: Reward) -> Rollout:
    """Return a scored rollout. Of its turns, if it has credits, the last one earns."""
    return earning(functools.partial(_with_reward, rollout), reward)


def _with_reward(rollout: Rollout, reward: float) -> Rollout:
    credits = [credit for branch in rollout for credit in branch.credits]
    last = max((credit.unit for credit in credits), default=0)
    paid = list[Trajectory]()
    for branch in rollout:
        of_branch = [
            replace(credit, reward=reward) if credit.unit == last else credit
            for credit in branch.credits
        ]
        paid.append(
            replace(branch, reward=reward, unscored=None, credits=tuple(of_branch))
        )
    return tuple(paid)


def weighted_outcome(outcome: Outcome, weights: Mapping[str, float] = {}) -> Outcome:
    """Return an outcome whose rewards are numbers, or parts with their weights. Raises
    RewardFailure for `weights` of other parts, and for turns with other parts.
    """

    def converted(given: object) -> Reward:
        reward = as_reward(given)
        return reward if isinstance(reward, float) else weighted(reward, weights)

    try:
        reward = outcome.reward
        if reward is not None:
            reward = weighted(as_reward(reward), weights)
        turns = {name: converted(one) for name, one in outcome.turn_rewards.items()}
        names = {frozenset(_parts_of(one)) for one in turns.values()}
        if len(names) > 1:
            named = " and ".join(
                sorted(", ".join(sorted(one)) or "none" for one in names)
            )
            raise UserCodeFailed(
                f"returned turn_rewards with other parts: {named}",
                kind=FailureKind.CORRUPT_RESULT,
            )
    except UserCodeFailed as failure:
        raise RewardFailure(
            f"its harness or a post {failure}",
            rule="a reward is one number, or has each part that task.reward_weights names",
            way_out="correct its names, or task.reward_weights.",
            kind=failure.kind,
        ) from failure
    return replace(outcome, reward=reward, turn_rewards=turns)


def own_reward(outcome: Outcome) -> Reward | None:
    """Return the harness's reward, else the mean of its rewards by turn, of each part
    over the turns to which it applies; None: the task scores. `outcome`: a weighted one.
    """
    if outcome.reward is not None:
        return cast(Reward, outcome.reward)
    turns = [*outcome.earned.values()]
    if not turns:
        return None
    parts = _parts_of(turns[0])
    if not parts:
        return fmean(map(total, turns))
    means = dict[str, RewardPart]()
    for name, part in parts.items():
        of_turns = [_parts_of(one)[name].value for one in turns]
        values = [value for value in of_turns if value is not None]
        means[name] = part._replace(value=fmean(values) if values else None)
    return means


def _parts_of(reward: Reward) -> Mapping[str, RewardPart]:
    return reward if isinstance(reward, Mapping) else {}


@dataclass(frozen=True, slots=True)
class ByTask:
    """Sample each prompt with its task's generator."""

    generators: Mapping[str, Generator]

    async def sample(self, attempt: RolloutAttempt) -> Score:
        return await self.generators[attempt.prompt.task].sample(attempt)


@dataclass(frozen=True, slots=True)
class AnnotatedGenerator:
    """Let a server add to each finished rollout, such as another model's logprobs.

    The clock of rollout.timeout_s stops: the server's answers have their own limit.
    """

    generator: Generator
    annotate: Annotate

    async def sample(self, attempt: RolloutAttempt) -> Score:
        score = await self.generator.sample(attempt)

        async def score_and_annotate() -> Rollout:
            rollout = await score()
            attempt.clock.hold()
            # A reward of the whole group, or a later post, is still missing.
            if rollout[0].is_scored:
                attempt.on_phase("teaching")
            return await self.annotate(rollout, attempt.prompt, ())

        return score_and_annotate
