"""Section `teacher`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from asyncrl.config.fields import FrozenConfig, Name, tag_of

TEACHER_SLOTS = 16
"""Sequences that a teacher reads at once."""


class TeacherConfig(FrozenConfig):
    """A second model for on-policy distillation (docs/algorithms.md), in a separate
    engine server. A list of sections gives several teachers.
    """

    path: str
    """Hugging Face folder or hub id of a model with the vocabulary of `model`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id (none = main). A resumed run resolves it again.
    """
    tasks: Annotated[list[Name], Field(min_length=1)] | None = None
    """Names of the tasks whose rollouts it scores (none = all)."""

    def scores(self, task: str) -> bool:
        return self.tasks is None or task in self.tasks


Teachers = Annotated[
    Annotated[TeacherConfig, Tag("[one]")]
    | Annotated[list[TeacherConfig], Field(min_length=1), Tag("[several]")],
    Discriminator(tag_of),
]
