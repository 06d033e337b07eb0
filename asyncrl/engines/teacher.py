"""Client of a teacher, a second model that scores sampled tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from asyncrl.base.errors import EngineError, EngineLost, RequestRefused
from asyncrl.base.http import Caller, CallRefused
from asyncrl.base.waits import waiting
from asyncrl.engines.engine import CallScope
from asyncrl.engines.segment_check import LOGPROB_SLACK
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse
from asyncrl.messages.records import Rollout, Trajectory


class Teacher:
    """Client of one teacher process.

    Life: up -> down_nowait(): open calls restart later -> reset_nowait() -> up_nowait().
    Waits: judge sleeps until the teacher is up, for a place, then for the answer, at most timeout_s.

    `on_lost` gets every EngineLost and must take the teacher down; without it the error reaches the
    caller.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        temperature: float,
        places: int,
        timeout_s: float,
        on_lost: Callable[[EngineLost], None] | None,
    ) -> None:
        self._caller, self.name, self._on_lost = caller, caller.name, on_lost
        self._temperature, self._timeout_s = temperature, timeout_s
        self._places = asyncio.Semaphore(places)
        self._line = CallScope(caller)
        self._is_up, self._changed = True, asyncio.Event()
        self._num_scored = 0

    def gauges(self) -> dict[str, float]:
        return {"teacher/tokens": self._num_scored}

    def down_nowait(self) -> None:
        """Idempotent."""
        self._is_up = False
        self._line.disconnect_nowait()

    def reset_nowait(self) -> None:
        self.down_nowait()
        self._line = CallScope(self._caller)

    def up_nowait(self) -> None:
        self._is_up = True
        self._changed.set()
        self._changed = asyncio.Event()

    async def judge(self, rollout: Rollout) -> Rollout:
        """Return the rollout with teacher_logprobs in each branch. Raises RequestRefused (data) or
        EngineError.
        """
        return tuple([await self._judge(branch) for branch in rollout])

    async def _judge(self, branch: Trajectory) -> Trajectory:
        (places,) = np.nonzero(branch.loss_mask)
        start, end = int(places[0]), int(places[-1]) + 1
        request = ScoreRequest(
            token_ids=branch.token_ids[:end].tolist(), start=start, temperature=self._temperature
        )
        found = np.array((await self._score(request)).logprobs, np.float32)
        if len(found) != end - start or not (found <= LOGPROB_SLACK).all() or not np.isfinite(found).all():
            what = f"answered {len(found)} logprobs for {end - start} tokens: {found[:8].tolist()}"
            rule = "one finite logprob a token, none above 0"
            raise EngineError(self.name, what, rule=rule, way_out=f"read {self.name}'s log.")
        logprobs = np.zeros(len(branch.token_ids), np.float32)
        logprobs[start:end] = found
        logprobs[~branch.loss_mask] = 0.0
        self._num_scored += len(places)
        return replace(branch, teacher_logprobs=logprobs)

    async def _score(self, request: ScoreRequest) -> ScoreResponse:
        while True:
            while not self._is_up:
                with waiting("a teacher that is up", on="supervisor", who="rollouts"):
                    await self._changed.wait()
            try:
                with waiting("teacher logprobs", on=self.name, who="rollouts"):
                    async with self._places:
                        return await self._post(request)
            except EngineLost as lost:
                if self._on_lost is None:
                    raise
                self._on_lost(lost)

    async def _post(self, request: ScoreRequest) -> ScoreResponse:
        async with self._line.calls():
            try:
                return await self._caller.post("/score", request, ScoreResponse, timeout_s=self._timeout_s)
            except CallRefused as refusal:
                if refusal.status != 400:
                    raise
                what = f"{self.name} cannot score {len(request.token_ids)} tokens: {refusal.body.error}"
                raise RequestRefused(what, rule=refusal.body.rule, way_out=refusal.body.way_out) from refusal
