"""Base classes of messages and error answers."""

from __future__ import annotations

import contextlib

from pydantic import BaseModel, ConfigDict

SECRET_ENV = "ASYNCRL_SECRET"


WORKER_KEY_ENV = "ASYNCRL_WORKER_KEY"
"""Environment variable with the worker key, since command lines are public."""
VLLM_KEY_ENV = "ASYNCRL_VLLM_KEY"
NEVER_INHERITED = (VLLM_KEY_ENV, WORKER_KEY_ENV, SECRET_ENV, "RAY_AUTH_TOKEN")
"""Secrets that children get through standard input: /proc shows environments."""


class Message(BaseModel):
    """Frozen message; refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorBody(Message):
    """Body of every error answer."""

    error: str
    rule: str = ""
    way_out: str = ""


FATAL_PREFIX = "asyncrl-error: "
"""Prefix of a failing child's ErrorBody as JSON, on one log line."""


def fatal_line(error: ErrorBody) -> str:
    return FATAL_PREFIX + error.model_dump_json()


def find_fatal(log: str) -> ErrorBody | None:
    lines = [line for line in log.splitlines() if line.startswith(FATAL_PREFIX)]
    with contextlib.suppress(ValueError, IndexError):
        return ErrorBody.model_validate_json(lines[-1].removeprefix(FATAL_PREFIX))
    return None
