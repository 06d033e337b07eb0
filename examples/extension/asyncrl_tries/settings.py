"""Settings that this extension adds."""

from __future__ import annotations

from pydantic import PositiveInt

from asyncrl.base.extensions import AddedField
from asyncrl.config.engine_facts import EngineCapabilities
from asyncrl.config.fields import FrozenConfig

TRIES = AddedField[int | None](
    "tries", PositiveInt | None, "Answers to each prompt; the last is scored.", None
)
FIELDS = (TRIES,)
LENGTH = AddedField[int](
    "fixed_tokens", PositiveInt, "Tokens of each completion of the engine `fixed`.", 8
)
OF_ENGINES = (LENGTH,)
FACTS = EngineCapabilities(title="fixed", settings=("fixed_tokens",), has_model=False)


class TriesArgs(FrozenConfig):
    """generator.args of this harness."""

    again: str | None = None
    """Message between two tries (none = the prompt's last message)."""
