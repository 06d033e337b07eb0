"""Client of a teacher: its logprobs of sampled tokens, for distillation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from asyncrl.base.errors import EngineError, EngineLost
from asyncrl.base.http import Caller
from asyncrl.config.teacher_config import TEACHER_SLOTS
from asyncrl.engines.link import LOGPROB_SLACK
from asyncrl.engines.role_client import RoleClient
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse
from asyncrl.messages.records import Rollout, Trajectory
from asyncrl.messages.tokens import (
    DISTILL_IDS,
    DISTILL_LOGPROBS,
    SUPPORT,
    TEACHER,
    Ragged,
    Values,
)


class Teacher(RoleClient):
    def __init__(
        self,
        caller: Caller,
        *,
        temperature: float,
        top_k: int = 0,
        scores: Callable[[str], bool] = lambda _: True,
        on_lost: Callable[[EngineLost], None] | None,
    ) -> None:
        # Twice the server's slots: the next requests arrive early.
        super().__init__(caller, places=2 * TEACHER_SLOTS, on_lost=on_lost)
        self._temperature = temperature
        self._top_k = top_k
        self._scores = scores
        self._num_scored = 0

    def gauges(self) -> dict[str, float]:
        return {"teacher/tokens": self._num_scored, "teacher/wait_s": self.wait_s}

    async def judge(self, rollout: Rollout, task: str) -> Rollout:
        """Return the rollout with the columns of the teacher in each branch, or as it
        is if another teacher scores its task.
        """
        if not self._scores(task):
            return rollout
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
            top_k=self._top_k,
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
        # Between the first and the last sampled token stand answers of tools and users,
        # which the teacher has scored along.
        has_term = branch.loss_mask.copy()
        # Under a grammar or from adjusted logits the teacher would have sampled other
        # tokens: no term.
        for span in branch.tokens.calls:
            has_term[span.start : span.end] = False
        # The same for a call of an agent with its own top_p, top_k or min_p.
        has_term &= branch.tokens.column(SUPPORT).sizes == 0
        logprobs = branch.tokens.behaviour_logprobs.copy()
        logprobs[has_term] = found[has_term[start:end]]
        self._num_scored += len(places)
        columns: dict[str, Values] = {TEACHER: logprobs}
        if self._top_k > 0:
            columns |= self._tops(answer, has_term, slice(start, end))
        return replace(branch, tokens=branch.tokens.with_columns(columns))

    def _tops(
        self,
        answer: ScoreResponse,
        has_term: npt.NDArray[np.bool_],
        scored: slice,
    ) -> dict[str, Values]:
        """Return the columns of the likeliest ids, of tokens with a term."""
        num_entries = (scored.stop - scored.start) * self._top_k
        ids = np.array(answer.top_ids, np.int32)
        logprobs = np.array(answer.top_logprobs, np.float32)
        is_whole = len(ids) == len(logprobs) == num_entries
        if not is_whole or not np.isfinite(logprobs).all():
            raise EngineError(
                self.name,
                f"answered {len(ids)} likeliest ids with {len(logprobs)} logprobs, of {num_entries}",
                rule=f"{self._top_k} ids with finite logprobs a token",
                way_out=f"read {self.name}'s log.",
            )
        is_kept = np.repeat(has_term[scored], self._top_k)
        sizes = np.where(has_term, self._top_k, 0).astype(np.int32)
        return {
            DISTILL_IDS: Ragged(ids[is_kept], sizes),
            DISTILL_LOGPROBS: Ragged(logprobs[is_kept], sizes),
        }
