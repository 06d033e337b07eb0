"""Client of a teacher: its logprobs of sampled tokens, for distillation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from asyncrl.base.errors import EngineError, EngineLost
from asyncrl.base.http import Caller
from asyncrl.config.teacher_config import TEACHER_SLOTS
from asyncrl.engines.link import LOGPROB_SLACK
from asyncrl.engines.role_client import RoleClient
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse
from asyncrl.messages.records import Rollout, Trajectory
from asyncrl.messages.tokens import SUPPORT, TEACHER


class Teacher(RoleClient):
    def __init__(
        self,
        caller: Caller,
        *,
        temperature: float,
        on_lost: Callable[[EngineLost], None] | None,
    ) -> None:
        # Twice the server's slots: the next requests arrive early.
        super().__init__(caller, places=2 * TEACHER_SLOTS, on_lost=on_lost)
        self._temperature = temperature
        self._num_scored = 0

    def gauges(self) -> dict[str, float]:
        return {"teacher/tokens": self._num_scored, "teacher/wait_s": self.wait_s}

    async def judge(self, rollout: Rollout) -> Rollout:
        """Return the rollout with teacher_logprobs in each branch."""
        return tuple([await self._judge(branch) for branch in rollout])

    async def _judge(self, branch: Trajectory) -> Trajectory:
        (places,) = np.nonzero(branch.loss_mask)
        # All calls of this branch are untrained, such as greedy ones: nothing to score.
        if not len(places):
            zeros = np.zeros(len(branch.token_ids), np.float32)
            return replace(branch, tokens=branch.tokens.with_columns({TEACHER: zeros}))
        start, end = int(places[0]), int(places[-1]) + 1
        request = ScoreRequest(
            # What follows the last sampled token changes no logprob before it.
            token_ids=branch.token_ids[:end].tolist(),
            start=start,
            temperature=self._temperature,
        )
        answer = await self.call("/score", request, ScoreResponse)
        found = np.array(answer.logprobs, np.float32)
        if (
            len(found) != end - start
            or not (found <= LOGPROB_SLACK).all()
            or not np.isfinite(found).all()
        ):
            what = f"answered {len(found)} logprobs for {end - start} tokens: {found[:8].tolist()}"
            rule = "one finite logprob a token, none above 0"
            raise EngineError(
                self.name, what, rule=rule, way_out=f"read {self.name}'s log."
            )
        logprobs = np.zeros(len(branch.token_ids), np.float32)
        logprobs[start:end] = found
        # Between the first and the last sampled token stand answers of tools and users,
        # which the teacher has scored along.
        logprobs[~branch.loss_mask] = 0.0
        # Under a grammar or from adjusted logits the teacher would have sampled other
        # tokens: no term.
        for span in branch.tokens.calls:
            logprobs[span.start : span.end] = branch.tokens.behaviour_logprobs[
                span.start : span.end
            ]
        # The same for a call of an agent with its own top_p, top_k or min_p.
        is_cut = branch.tokens.column(SUPPORT).sizes > 0
        logprobs[is_cut] = branch.tokens.behaviour_logprobs[is_cut]
        self._num_scored += len(places)
        return replace(branch, tokens=branch.tokens.with_columns({TEACHER: logprobs}))
