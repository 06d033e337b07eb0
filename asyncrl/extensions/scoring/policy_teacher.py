"""The policy as its own teacher, with another prompt (`teacher.policy`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from asyncrl.base.errors import EngineError
from asyncrl.engines.engine import EngineClient, EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.extensions.scoring.scoring_api import ScoreRequest, ScoreResponse
from asyncrl.extensions.scoring.teacher import Scoring
from asyncrl.extensions.scoring.teacher_config import POLICY_SLOTS
from asyncrl.messages.records import Prompt, Rollout

VERSION = "teacher_version"
"""Metric of a rollout: the policy_version of the weights that scored it."""


class PolicyTeacher:
    """Lets the rollout engines score, between their decode steps.

    Waits: annotate sleeps for one of the places, then in an engine's answer, also while
        that sleeps in the trainer's time slice.
    Invariant: one policy_version scores a text, and it is not older than the version that
        its engine had confirmed before. An engine that is lost is replaced by another,
        which reads the whole text.
    """

    def __init__(self, engines: EnginePool, scoring: Scoring) -> None:
        self._engines = engines
        self._scoring = scoring
        # Twice the texts that are read at once: the next requests arrive early.
        self._places = asyncio.Semaphore(2 * POLICY_SLOTS * len(engines.servers))
        self._wait_s = 0.0

    def gauges(self) -> dict[str, float]:
        return self._scoring.gauges() | {"teacher/wait_s": self._wait_s}

    async def annotate(
        self, rollout: Rollout, prompt: Prompt, siblings: Sequence[Rollout]
    ) -> Rollout:
        taught, versions = await self._scoring.annotate(
            self._score, rollout, prompt, siblings
        )
        if not versions:
            return taught
        (branch,) = taught
        metrics = {**branch.metrics, VERSION: float(versions[0])}
        return (replace(branch, metrics=metrics),)

    async def _score(self, request: ScoreRequest) -> ScoreResponse:
        start_s = time.perf_counter()
        try:
            async with self._places:
                ask = partial(_ask, request)
                return await self._engines.ask("scores of a text", ask)
        finally:
            self._wait_s += time.perf_counter() - start_s


async def _ask(request: ScoreRequest, server: EngineClient) -> ScoreResponse:
    """Return one engine's answer. Raises EngineError or EngineLost."""
    assert isinstance(server, EngineServer), "the settings refuse other kinds"
    oldest = server.policy_version
    answer = await server.post("/score", request, ScoreResponse)
    if answer.version < oldest:
        raise EngineError(
            server.name,
            f"scored with policy_version {answer.version}, after it had confirmed {oldest}",
            rule="a text is scored with the newest weights that the engine has",
            way_out=f"read {server.name}'s log.",
        )
    return answer
