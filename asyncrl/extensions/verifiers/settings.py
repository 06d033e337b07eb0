"""Settings of verifiers environments."""

from __future__ import annotations

from asyncrl.base.extensions import AddedField

ENVIRONMENT = AddedField[str | None](
    "verifiers",
    str | None,
    "Id of a verifiers environment, loaded with `args`; its dataset is the task (task.verifiers).",
    None,
)
IS_SOURCE = AddedField[bool](
    "verifiers",
    bool,
    "Tasks and rewards of the environment in generator.verifiers.",
    False,
)
FIELDS = (ENVIRONMENT,)
FIELDS_OF_TASK = (IS_SOURCE,)
INFO_KEY = "verifiers"
"""Key in a prompt's info of a verifiers task's data."""
