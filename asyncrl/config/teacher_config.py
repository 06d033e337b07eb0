"""Section `teacher`."""

from __future__ import annotations

from asyncrl.config.fields import FrozenConfig

TEACHER_SLOTS = 16
"""Sequences that a teacher reads at once."""


class TeacherConfig(FrozenConfig):
    """A second model for on-policy distillation (docs/algorithms.md), in a separate
    engine server.
    """

    path: str
    """Hugging Face folder or hub id of a model with the vocabulary of `model`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id (none = main). A resumed run resolves it again.
    """
