"""Errors as the endpoint answers them: OpenAI's statuses, types and codes."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from pydantic_core import to_json

NO_RETRY = {"x-should-retry": "false"}
"""Tells an OpenAI client that asking again is of no use."""

_LONGEST_SHOWN = 80
_CODES = {
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}


class ApiError(Exception):
    """One call is answered with an error; the session and the run go on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.message, self.type, self.param = status, message, type, param
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})
        super().__init__(message)

    def body(self) -> bytes:
        """The error as OpenAI writes it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return to_json({"error": error}, inf_nan_mode="null")

    def response(self) -> web.Response:
        """The error as an answer of its own."""
        return web.Response(
            body=self.body(), status=self.status, headers=self.headers, content_type="application/json"
        )


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """400: the call cannot be answered."""
    return ApiError(400, message, code=code, param=param)


def too_long(message: str, param: str) -> ApiError:
    """400 as OpenAI says it of a prompt that does not fit."""
    return invalid(message, param, code="context_length_exceeded")


def unknown_key() -> ApiError:
    """401. The key itself is never shown: answers end up in logs."""
    return ApiError(
        401,
        "Unknown or missing session key. Send `Authorization: Bearer KEY`, or call /s/KEY/v1/..., with the "
        "key that this rollout was given.",
        code="invalid_api_key",
    )


def session_ended(reason: str) -> ApiError:
    """410: the rollout is over, and so is its key."""
    return ApiError(410, f"This session has ended: {reason}", code="session_ended", headers=NO_RETRY)


def rate_limited(message: str, *, retry_after_s: int | None) -> ApiError:
    """429; `retry_after_s` None says that waiting does not help."""
    headers = NO_RETRY if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, type="requests", code="rate_limit_exceeded", headers=headers)


def shown(value: object) -> str:
    """A value of a call, short enough for a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    text = repr(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
