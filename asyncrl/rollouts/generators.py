"""Generators sample and score one attempt of a rollout."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import numpy as np

from asyncrl.base.errors import PromptUnusable, RolloutFailure
from asyncrl.config import OnOverflow
from asyncrl.engines.engine import Teacher
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.engine_api import NO_EXPERT
from asyncrl.messages.records import (
    Completion,
    Outcome,
    Prompt,
    Rollout,
    SamplingRequest,
    Trajectory,
    VersionSpan,
    Work,
)
from asyncrl.messages.work import RolloutSession, SessionHost, WorkQueue, answer_text
from asyncrl.rollouts.rollout import Generator, RolloutAttempt, Score, derive_seed
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.scorer import Scorers, TaskScorer

log = logging.getLogger(__name__)


class EncodedPrompts:
    """Token ids of recent prompts, so that a group's requests share one object."""

    MAX_PROMPTS = 1024

    def __init__(self, tokenizer: HFChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, tuple[Prompt, tuple[int, ...]]] = {}

    def ids_of(self, prompt: Prompt) -> tuple[int, ...]:
        known, ids = self._known.get(prompt.prompt_id, (None, ()))
        if known is not prompt:
            ids = self.tokenizer.encode_chat(prompt.messages)
            self._known.pop(prompt.prompt_id, None)
            self._known[prompt.prompt_id] = prompt, ids
            if len(self._known) > self.MAX_PROMPTS:
                del self._known[next(iter(self._known))]
        return ids


@dataclass(frozen=True, slots=True)
class SingleTurn:
    engine: EnginePool
    prompts: EncodedPrompts
    scorer: TaskScorer | Scorers
    run_seed: int
    max_tokens: int
    max_prompt_tokens: int
    temperature: float
    stop: tuple[str, ...] = ()

    async def sample(self, attempt: RolloutAttempt) -> Score:
        """Raises RolloutFailure if the prompt is too long or refused."""
        prompt, index = attempt.prompt, attempt.sample_index
        prompt_ids = self.prompts.ids_of(prompt)
        if not prompt_ids:
            raise PromptUnusable(
                f"prompt {prompt.prompt_id} has no token",
                rule="a completion needs a prompt",
                way_out="correct the prompt or the chat template.",
            )
        if len(prompt_ids) > self.max_prompt_tokens:
            raise PromptUnusable(
                f"prompt {prompt.prompt_id} has {len(prompt_ids)} tokens",
                rule=f"rollout.max_prompt_tokens={self.max_prompt_tokens} is the limit; none is cut",
                way_out="raise rollout.max_prompt_tokens, or leave long prompts out of the task.",
            )

        num_spent = 0

        def spend(num_tokens: int) -> None:
            nonlocal num_spent
            num_spent += num_tokens

        def keep(partial: Completion) -> None:
            attempt.keep_segment(0, partial)
            attempt.seen.rollout = lambda: (make_trajectory(index, prompt_ids, partial, 0.0),)

        attempt.seen.num_spent = lambda: num_spent
        completion = await self.engine.generate(
            SamplingRequest(
                # a retry may arrive before the first try has ended
                request_id=f"{attempt.rollout_id}/t0/a{attempt.attempt}",
                prompt_ids=prompt_ids,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                stop=self.stop,
                seed=derive_seed(self.run_seed, prompt.seed_id, index, 0, attempt.attempt),
                route_key=f"g{attempt.group_id}",
            ),
            partial=attempt.partial,
            on_segment=keep,
            on_spent=spend,
        )
        attempt.seen.rollout = lambda: (make_trajectory(index, prompt_ids, completion, 0.0),)

        async def score() -> Rollout:
            shows_special = self.scorer.shows_special(prompt)
            text = answer_text(self.prompts.tokenizer, completion.token_ids, shows_special=shows_special)
            reward = await self.scorer.score(prompt, text)
            return (make_trajectory(index, prompt_ids, completion, reward),)

        return score


def make_trajectory(
    sample_index: int,
    prompt_ids: tuple[int, ...],
    completion: Completion,
    reward: float,
) -> Trajectory:
    num_prompt, num_sampled = len(prompt_ids), len(completion.token_ids)
    logprobs = np.zeros(num_prompt + num_sampled, np.float32)
    logprobs[num_prompt:] = completion.behaviour_logprobs
    loss_mask = np.zeros(num_prompt + num_sampled, np.bool_)
    loss_mask[num_prompt:] = True
    routing, is_truncated = None, False
    if isinstance(completion, Completion):
        is_truncated = completion.finish_reason == "length"
    if isinstance(completion, Completion) and completion.routing:
        known = np.frombuffer(completion.routing, "<u2").reshape(len(loss_mask) - 1, -1)
        routing = np.pad(known, ((0, 1), (0, 0)), constant_values=NO_EXPERT)
    return Trajectory(
        sample_index=sample_index,
        token_ids=np.array(prompt_ids + completion.token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        version_spans=tuple(
            VersionSpan(span.start + num_prompt, span.end + num_prompt, span.version, span.engine)
            for span in completion.version_spans
        ),
        reward=reward,
        is_truncated=is_truncated,
        num_interruptions=completion.num_interruptions,
        routing=routing,
    )


class HarnessGenerator:
    """Run the harness on a worker, in a session per attempt.

    The clock of rollout.timeout_s stops while work is queued. A rollout that reached a limit is truncated or
    failed, by `on_overflow`; truncated without reward gets 0.
    """

    def __init__(
        self,
        host: SessionHost,
        queue: WorkQueue,
        scorer: TaskScorer | Scorers,
        *,
        on_overflow: OnOverflow = "truncate",
    ) -> None:
        self._host, self._queue, self._scorer, self._on_overflow = host, queue, scorer, on_overflow

    async def sample(self, attempt: RolloutAttempt) -> Score:
        """Raises RolloutFailure if the harness or its worker fails, or nothing can be trained on."""
        prompt = attempt.prompt
        index = attempt.sample_index
        name = attempt.rollout_id
        session = self._host.open_nowait(
            name,
            prompt_id=prompt.seed_id,
            sample_index=index,
            attempt=attempt.attempt,
            route_key=name,
            shows_special=self._scorer.shows_special(prompt),
        )
        attempt.seen.rollout = functools.partial(session.rollout, index, Outcome(), 0.0)
        attempt.seen.num_spent = lambda: session.num_spent
        ends = "the rollout ran past rollout.timeout_s, or is no longer needed"
        try:
            attempt.clock.hold()
            work = Work(name, prompt, index, attempt.attempt, session.key, attempt.clock.left_s)
            outcome, is_cut = await self._outcome(session, work, attempt)
            ends = "its harness has finished"  # leftover work would keep sampling
        except RolloutFailure as failure:
            ends = f"the rollout failed: {failure.what}"
            raise
        finally:
            session.end_nowait(ends)

        async def score() -> Rollout:
            reward = 0.0 if is_cut and not self._scorer.scores(prompt) else own_reward(outcome)
            if reward is None:
                reward = await self._scorer.score(prompt, session.last_text())
            return session.rollout(index, outcome, reward)

        return score

    async def _outcome(
        self, session: RolloutSession, work: Work, attempt: RolloutAttempt
    ) -> tuple[Outcome, bool]:
        """Return the harness's outcome, and whether a limit cut it."""
        try:
            async with session.while_open():
                outcome = await self._queue.run(work, started=attempt.clock.resume)
        except RolloutFailure as failure:
            if session.overflow is None or self._on_overflow == "fail" or not session.num_completions:
                raise
            # it may be the harness's bug
            log.warning("%s is kept as truncated (%s): %s", work.rollout_id, session.overflow, failure)
            return Outcome(), True
        if session.overflow is not None and self._on_overflow == "fail":
            way_out = "raise it, or set generator.on_overflow to truncate."
            raise RolloutFailure(f"{work.rollout_id} has met a limit: {session.overflow}", way_out=way_out)
        return outcome, False


def own_reward(outcome: Outcome) -> float | None:
    """Return None if the task scores."""
    parts = [*outcome.turn_rewards.values(), *outcome.branch_rewards.values()]
    return sum(parts) / len(parts) if outcome.reward is None and parts else outcome.reward


@dataclass(frozen=True, slots=True)
class DistillingGenerator:
    """Add a teacher's logprobs to rollouts.

    The clock of rollout.timeout_s stops: teacher answers have their own limit.
    """

    generator: Generator
    teacher: Teacher

    async def sample(self, attempt: RolloutAttempt) -> Score:
        score = await self.generator.sample(attempt)

        async def score_and_judge() -> Rollout:
            rollout = await score()
            attempt.clock.hold()
            return await self.teacher.judge(rollout)

        return score_and_judge
