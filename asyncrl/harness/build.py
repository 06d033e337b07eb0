"""Makes the harness that a worker runs. Knows which module each kind lives in; loads no other."""

from __future__ import annotations

import importlib
from typing import Any, Self

from pydantic import Field, model_validator

from asyncrl.harness.task import Harness
from asyncrl.wire import Message

_MODULES = {
    "python": "asyncrl.harness.python",
    "command": "asyncrl.harness.command",
    "verifiers": "asyncrl.harness.verifiers",
}
"""Each has `make(spec: HarnessSpec) -> Harness`, which raises ConfigError for what cannot be run."""


class HarnessSpec(Message):
    """Which harness, and its settings: those of the config's section `generator`. One of python, command, verifiers is given."""

    python: str | None = None
    command: list[str] | None = None
    verifiers: str | None = None
    args: dict[str, Any] = {}
    env: dict[str, str] = {}
    pass_env: list[str] = []
    max_output_bytes: int = Field(default=2**20, ge=1024)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if len(given := [name for name in _MODULES if getattr(self, name)]) != 1:
            raise ValueError(f"give one of {', '.join(_MODULES)} (given: {', '.join(given) or 'none'})")
        return self

    @property
    def kind(self) -> str:
        """`python`, `command` or `verifiers`."""
        return next(name for name in _MODULES if getattr(self, name))


def build_harness(spec: HarnessSpec) -> Harness:
    """The harness. Raises ConfigError if it cannot be run here."""
    harness: Harness = importlib.import_module(_MODULES[spec.kind]).make(spec)
    return harness
