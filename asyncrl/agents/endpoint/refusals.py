"""Errors as the endpoint answers them: OpenAI's statuses, types and codes. Knows no HTTP library and no
session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

NO_RETRY = {"x-should-retry": "false"}
"""What tells an OpenAI client that asking again is of no use."""

_LONGEST_SHOWN = 80


class ApiError(Exception):
    """One call is answered with an error; the session, and the run, go on."""

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
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.headers = dict(headers or {})
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        """The same as bytes."""
        return to_json(self.body(), inf_nan_mode="null")


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """400: the call is not one that can be answered."""
    return ApiError(400, message, code=code, param=param)


def too_long(message: str, param: str) -> ApiError:
    """400 as OpenAI says it of a prompt that does not fit."""
    return ApiError(400, message, code="context_length_exceeded", param=param)


def unknown_key() -> ApiError:
    """401. The key itself is never shown: answers end up in logs."""
    message = "Unknown or missing session key. Send `Authorization: Bearer KEY`, or call /s/KEY/v1/..., with the key that this rollout was given."
    return ApiError(401, message, code="invalid_api_key")


def session_ended(reason: str) -> ApiError:
    """410: the rollout is over, and so is its key."""
    return ApiError(410, f"This session has ended: {reason}", code="session_ended", headers=NO_RETRY)


def outcome_refused(why: str) -> ApiError:
    """403: whoever has this key sets no reward."""
    return ApiError(403, f"No outcome is taken: {why}", code="outcome_refused", headers=NO_RETRY)


def is_refusal(error: ApiError) -> bool:
    """Whether it is the client that did something wrong, or too much."""
    return 400 <= error.status < 500 and error.status != 410


def rate_limited(message: str, *, retry_after_s: int | None) -> ApiError:
    """429; `retry_after_s` None says that waiting does not help."""
    headers = NO_RETRY if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, type="requests", code="rate_limit_exceeded", headers=headers)


def broken(message: str) -> ApiError:
    """503: the run is ending."""
    return ApiError(503, message, type="server_error", code="engine_unavailable", headers=NO_RETRY)


def internal() -> ApiError:
    """500: a mistake of the gateway's own; what it was stands in the log."""
    return ApiError(
        500, "The gateway made a mistake; its log says which.", type="server_error", headers=NO_RETRY
    )


_BY_STATUS = {
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}


def of_status(status: int, message: str) -> ApiError:
    """What the HTTP library refuses by itself, in the same form."""
    type = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(status, message, type=type, code=_BY_STATUS.get(status))


def shown(value: object) -> str:
    """A value of a call, short enough for a message: what is huge in the call is not huge in the answer."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    text = repr(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
