"""Base class of all messages, the error body, and the last words of a child process."""

from __future__ import annotations

import contextlib

from pydantic import BaseModel, ConfigDict

SECRET_ENV = "ASYNCRL_SECRET"


WORKER_KEY_ENV = "ASYNCRL_WORKER_KEY"
"""Environment variable with the worker key; every user of the machine can read command lines."""


class Message(BaseModel):
    """Base of all messages: frozen, and a field that is not known is an error at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorBody(Message):
    """Body of every answer with a status of 400 or above: what failed, the rule, the way out."""

    error: str
    rule: str = ""
    way_out: str = ""


FATAL_PREFIX = "asyncrl-error: "
"""A child process that cannot start or go on prints this and an ErrorBody as JSON on one line of its log."""


def fatal_line(error: ErrorBody) -> str:
    """The log line from which the parent learns why a child ended."""
    return FATAL_PREFIX + error.model_dump_json()


def find_fatal(log: str) -> ErrorBody | None:
    """The error in the last such line of a log, if there is one."""
    lines = [line for line in log.splitlines() if line.startswith(FATAL_PREFIX)]
    with contextlib.suppress(ValueError, IndexError):
        return ErrorBody.model_validate_json(lines[-1].removeprefix(FATAL_PREFIX))
    return None
