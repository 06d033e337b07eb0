"""Client of a judge that the run serves (`task.reward.judge` without base_url)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.base.errors import EngineLost, RequestRefused
from asyncrl.base.http import Caller
from asyncrl.engines.role_client import RoleClient
from asyncrl.messages.engine_api import JudgeRequest, JudgeResponse


class ServedJudge(RoleClient):
    def __init__(
        self,
        caller: Caller,
        encode: Callable[[str], Sequence[int]],
        *,
        places: int,
        on_lost: Callable[[EngineLost], None] | None = None,
    ) -> None:
        """`encode` returns the ids of a chat with this text as the user's message."""
        super().__init__(caller, places=places, on_lost=on_lost)
        self.encode = encode

    async def ask(
        self, text: str, *, max_tokens: int, temperature: float, seed: int
    ) -> JudgeResponse:
        """Return the answer. Raises RequestRefused (data) or EngineError."""
        try:
            prompt_ids = list(self.encode(text))
        except ValueError as error:
            raise RequestRefused(f"the judge cannot read it: {error}") from error
        request = JudgeRequest(
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        return await self.call("/chat", request, JudgeResponse)
