"""Calls to a server with OpenAI's API and error bodies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, RootModel

from asyncrl.base.errors import EngineError, ErrorBody
from asyncrl.base.http import Answer, CallGarbled, CallLost, CallRefused
from asyncrl.engines.engine import CallScope

ASK_AGAIN_S = 0.1
"""Retry period: an abort that overtook its request has no effect."""
_HEALTH_LIMIT_S = 5.0

Json = RootModel[dict[str, Any]]


class Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


@contextlib.contextmanager
def openai_errors() -> Iterator[None]:
    """Turn error bodies into CallRefused: {"error": {"message": ..}}, {"error": "..."} or
    {"detail": ..}.
    """
    try:
        yield
    except CallGarbled as garbled:
        if garbled.status < 400:
            raise
        error: Any = None
        with contextlib.suppress(ValueError, AttributeError):
            answer = json.loads(garbled.text)
            error = answer.get("error") or answer.get("detail")
        error = error if isinstance(error, dict) else {"message": error}
        body = ErrorBody(error=str(error.get("message") or garbled.why))
        # In a stream the status was 200 before the error came, so the error has a code.
        # Some servers write words there, such as "invalid_api_key".
        code = str(error.get("code"))
        status = int(code) if code.isdecimal() else garbled.status
        raise CallRefused(garbled.server, garbled.path, status, body) from garbled


class OpenAIScope(CallScope):
    """Calls to one process of such a server. They raise CallRefused with its error, or
    CallLost. `timeout_s` None: no limit.
    """

    async def error_of(self, failure: CallLost | CallRefused) -> EngineError:
        """Return EngineLost if the engine is dead: its server briefly answers 500 or
        above.
        """
        # Otherwise a dead engine would look like a refusal, which ends the run.
        # EngineLost restarts the server.
        if isinstance(failure, CallRefused) and failure.status >= 500:
            try:
                await self.read("/health", _HEALTH_LIMIT_S)
            except (CallLost, CallRefused) as dead:
                answer = f"answered {failure.status} to {failure.path} ({failure.body.error})"
                return self.lost(f"{answer} and is not well: {dead}")
        return await super().error_of(failure)

    async def get(
        self, path: str, answer: type[Answer], timeout_s: float | None = None
    ) -> Answer:
        with openai_errors():
            return await self.caller.get(path, answer, timeout_s=timeout_s)

    async def read(self, path: str, timeout_s: float | None = None) -> bytes:
        with openai_errors():
            return await self.caller.read("GET", path, None, timeout_s)

    async def post(
        self,
        path: str,
        body: dict[str, object] | None,
        answer: type[Answer],
        timeout_s: float | None = None,
    ) -> Answer:
        with openai_errors():
            return await self.caller.post(
                path, body if body is None else Json(body), answer, timeout_s=timeout_s
            )
