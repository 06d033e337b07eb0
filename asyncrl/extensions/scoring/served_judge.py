"""Client of a judge that the run serves (`task.reward.judge` without base_url)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.base.errors import EngineError, EngineLost, RequestRefused
from asyncrl.base.http import Caller
from asyncrl.base.waits import within
from asyncrl.config import TaskConfig
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.role_client import CALL_TIMEOUT_S, RoleClient, least_busy
from asyncrl.extensions.scoring.judge import Judge, JudgeResponse
from asyncrl.extensions.scoring.scoring_rules import judge_of
from asyncrl.messages.engine_api import EngineHealth
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.worker_api import ChatTokenizer
from asyncrl.tasks.scorer import ClientsOf


class ServedJudge(RoleClient):
    """Asks a model for its answers, through the client of an engine of any kind."""

    def __init__(
        self,
        engine: EngineClient,
        caller: Caller,
        tokenizer: ChatTokenizer,
        *,
        places: int,
        on_lost: Callable[[EngineLost], None] | None = None,
    ) -> None:
        super().__init__(caller, places=places, on_lost=on_lost)
        self.engine = engine
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    def disconnect_nowait(self) -> None:
        super().disconnect_nowait()
        self.engine.disconnect_nowait()

    def reset_nowait(self) -> None:
        super().reset_nowait()
        self.engine.reset_nowait()

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        return await self.engine.health(timeout_s=timeout_s)

    async def ready(self, timeout_s: float) -> EngineHealth:
        return await self.engine.ready(timeout_s)

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a chat with this text as the user's message."""
        chat = [{"role": "user", "content": text}]
        return self._tokenizer.encode(self._tokenizer.render(chat))

    async def ask(
        self, text: str, *, max_tokens: int, temperature: float, seed: int
    ) -> JudgeResponse:
        """Return the answer. Raises RequestRefused (data) or EngineError."""
        try:
            prompt_ids = list(self.encode(text))
        except ValueError as error:
            raise RequestRefused(f"the judge cannot read it: {error}") from error
        request = SamplingRequest(
            request_id=f"judge-{next(self._numbers)}",
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        return await self.repeat("an answer", lambda: self._sample(request))

    async def _sample(self, request: SamplingRequest) -> JudgeResponse:
        # Frozen: the supervisor replaces the process.
        late = EngineLost(self.name, f"gave no answer within {CALL_TIMEOUT_S:g} s")
        async with within(CALL_TIMEOUT_S, lambda: late):
            part = await self.engine.generate_segment(request)
        if part.finish_reason == "abort":
            raise EngineError(self.name, "ended a request early")
        return JudgeResponse(
            text=self._tokenizer.decode(part.token_ids),
            is_cut=part.finish_reason == "length",
            num_tokens=len(request.prompt_ids) + len(part.token_ids),
        )


def ask_judge(task: TaskConfig, clients_of: ClientsOf) -> Judge:
    judge = judge_of(task)
    assert judge is not None, "the reward is a judge's"
    served = clients_of(ServedJudge)

    async def ask(text: str, **sampling: Any) -> JudgeResponse:
        return await least_busy(served).ask(text, **sampling)

    return Judge(judge, timeout_s=task.reward_timeout_s, ask=ask if served else None)
