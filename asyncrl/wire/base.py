"""What all messages share: their base, the error body, and how a child says why it ended."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SECRET_ENV = "ASYNCRL_SECRET"

Interrupt = Literal["abort", "keep", "keep_kv", "wait"]
WeightKind = Literal["weights", "lora"]


class Message(BaseModel):
    """Base of all messages: frozen, and a field that is not known is an error at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorBody(Message):
    """Body of every answer with a status of 400 or above: what failed, the rule, the way out."""

    error: str
    rule: str = ""
    way_out: str = ""


EnginePart = Literal["weights", "kv"]
TrainerPart = Literal["weights", "gradients", "optimizer"]


class Moved(Message):
    """Answer of /sleep, /wake, /offload and /onload: bytes freed, taken or moved, and the seconds it took."""

    num_bytes: int
    seconds: float


FATAL_PREFIX = "asyncrl-error: "
"""A child process that cannot start or go on prints this and an ErrorBody as JSON on one line of its log."""


def fatal_line(error: ErrorBody) -> str:
    """The log line from which the parent learns why a child ended."""
    return FATAL_PREFIX + error.model_dump_json()


def find_fatal(log: str) -> ErrorBody | None:
    """The last such line of a log, if there is one."""
    for line in reversed(log.splitlines()):
        if line.startswith(FATAL_PREFIX):
            try:
                return ErrorBody.model_validate_json(line.removeprefix(FATAL_PREFIX))
            except ValueError:
                return None
    return None
