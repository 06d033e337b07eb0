"""Answers to chats, by the sampling of the engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from asyncrl.base.http import Refused
from asyncrl.messages.codec import Asked, Sampled
from asyncrl.messages.engine_api import JudgeRequest, JudgeResponse
from asyncrl.messages.sampling import SamplingRequest
from asyncrl_servers.embedded.embedded_engine import Engine


class JudgeAnswer:
    """The tokens of one request, from the engine's thread to the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids: list[int] = []
        self.done: asyncio.Future[tuple[list[int], str]] = self._loop.create_future()

    def sampled(self, rows: Sequence[Sampled]) -> None:
        for row in rows:
            self._ids += row.part.token_ids
            if row.then not in ("more", "interrupted"):
                self._loop.call_soon_threadsafe(
                    self.done.set_result, (self._ids, row.then)
                )

    def refused(self, number: int, refusal: Refused) -> None:
        self._loop.call_soon_threadsafe(self.done.set_exception, refusal)


class Chats:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loaded = engine.runner.loaded
        self._numbers = itertools.count()

    async def chat(self, body: JudgeRequest) -> JudgeResponse:
        number = next(self._numbers)
        request = SamplingRequest(
            request_id=f"chat {number}",
            prompt_ids=body.prompt_ids,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            seed=body.seed,
        )
        answer = JudgeAnswer()
        run = self._engine.run(Asked(number, request, False), answer)
        self._engine.submit([run])
        token_ids, then = await answer.done
        return JudgeResponse(
            text=self._loaded.decode(token_ids),
            is_cut=then == "length",
            num_tokens=len(body.prompt_ids) + len(token_ids),
        )
