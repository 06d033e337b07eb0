"""Section `journal`."""

from __future__ import annotations

from typing import ClassVar, Literal

from asyncrl.config.fields import FrozenConfig


class JournalConfig(FrozenConfig):
    """The journal, journal.sqlite."""

    free_keys: ClassVar = ("keep",)

    keep: Literal["checkpoint", "all"] = "checkpoint"
    """Keep tokens of trained batches since the oldest checkpoint, or always."""
