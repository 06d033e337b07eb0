"""The generator of rollouts that a harness runs, in some worker, over the gateway. Knows no HTTP, no token, no group, no retry."""

from __future__ import annotations

import asyncio
import math

from asyncrl.errors import RolloutFailure
from asyncrl.producers.rollout import RolloutAttempt
from asyncrl.types import Outcome, Rollout, Scorer, Session, SessionHost, Work, WorkQueue


class HarnessGenerator:
    """Session opened -> work run by a worker -> session ended -> reward -> branches. No state of its own.

    The clock of rollout.timeout_s is held while the work is queued, and runs on once a worker has taken it.
    """

    def __init__(self, host: SessionHost, queue: WorkQueue, scorer: Scorer) -> None:
        self._host, self._queue, self._scorer = host, queue, scorer

    def __repr__(self) -> str:
        return f"<HarnessGenerator over {self._queue!r}>"

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        """All branches of the rollout. Raises RolloutFailure if the harness or its worker fails, or there is nothing to train on."""
        prompt = attempt.prompt
        session = self._host.open_nowait(
            attempt.rollout_id, prompt_id=prompt.seed_id, sample_index=attempt.sample_index, attempt=attempt.attempt,
            route_key=attempt.rollout_id,
        )  # fmt: skip
        try:
            attempt.hold_clock()
            work = Work(attempt.rollout_id, prompt, attempt.sample_index, attempt.attempt, session.key, attempt.clock.left_s)
            async with session.while_open():
                outcome = await self._queue.run(work, started=attempt.resume_clock)
            session.end_nowait("its harness has finished")  # before the reward: what it left behind would sample on
            attempt.stopped_sampling()
            reward = await self._reward(attempt, session, outcome)
            return session.rollout(attempt.sample_index, outcome, reward)
        except RolloutFailure as failure:
            session.end_nowait(f"the rollout failed: {failure.what}")
            raise
        except asyncio.CancelledError:
            session.end_nowait("the rollout was given up: it ran past rollout.timeout_s, or nobody needs it any more")
            raise
        finally:
            session.end_nowait("the rollout has ended")

    async def _reward(self, attempt: RolloutAttempt, session: Session, outcome: Outcome) -> float:
        """What the harness says, else the mean of its parts, else the task's own reward of the last completion."""
        parts = [*outcome.turn_rewards.values(), *outcome.branch_rewards.values()]
        if outcome.reward is None and not parts:
            return await self._scorer.score(attempt.prompt, session.last_text())
        reward = sum(parts) / len(parts) if outcome.reward is None else outcome.reward
        if not math.isfinite(reward):
            raise RolloutFailure(f"{attempt.rollout_id}: its reward is {reward}", rule="a reward is finite", way_out="correct the harness.")
        return reward
