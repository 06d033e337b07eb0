"""The lock on every route of a vLLM server. vLLM's own --api-key leaves /pause, /collective_rpc and others open, and lies in argv."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi.responses import JSONResponse

from asyncrl.wire import ErrorBody

_expected: list[bytes] = []


def lock_with(secret: str) -> None:
    """From here on BearerOnly lets through whoever has this secret, and nobody else."""
    _expected[:] = [f"Bearer {secret}".encode()]


class BearerOnly:
    """ASGI middleware, given to vLLM by name (--middleware). Not locked yet, it lets nobody through."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hand on what may pass, 401 or a closed websocket to all else."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = ErrorBody(error="wrong or missing bearer token", rule="internal servers answer to the run that started them alone")
            await JSONResponse(body.model_dump(), status_code=401)(scope, receive, send)

    def _may_pass(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return bool(_expected) and hmac.compare_digest(given, _expected[0])
