"""Client of a judge that the run serves (`task.reward.judge` without base_url)."""

from __future__ import annotations

from asyncrl.engines.role_client import RoleClient
from asyncrl.messages.engine_api import ChatRequest, ChatResponse


class ServedJudge(RoleClient):
    async def ask(self, request: ChatRequest) -> ChatResponse:
        """Return the answer. Raises RequestRefused (data) or EngineError."""
        return await self.call("/chat", request, ChatResponse)
