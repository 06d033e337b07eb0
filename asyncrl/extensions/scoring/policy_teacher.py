"""The policy as its own teacher, with another prompt (`teacher.policy`)."""

from __future__ import annotations

import asyncio

from asyncrl.engines.pool import EnginePool
from asyncrl.extensions.scoring.teacher import Ask
from asyncrl.extensions.scoring.teacher_config import POLICY_SLOTS
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse


def ask_policy(engines: EnginePool) -> Ask:
    """Return a function that lets the rollout engines score, between their decode steps.

    It waits for one of the places, then for an engine's answer, also while that sleeps in
    the trainer's time slice. One policy_version scores a text, and it is not older than
    the version that its engine had confirmed before. An engine that is lost is replaced
    by another, which reads the whole text.
    """
    # Twice the texts that are read at once: the next requests arrive early.
    places = asyncio.Semaphore(2 * POLICY_SLOTS * len(engines.servers))

    async def ask(request: ScoreRequest) -> ScoreResponse:
        async with places:
            return await engines.ask(
                "scores of a text", lambda server: server.score(request)
            )

    return ask
