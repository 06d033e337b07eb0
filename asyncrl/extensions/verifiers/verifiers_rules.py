"""Refused settings of verifiers environments."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config import RunConfig, TaskConfig
from asyncrl.extensions.verifiers.settings import ENVIRONMENT, IS_SOURCE


def refuse_half(config: RunConfig) -> Iterator[str]:
    """Refuse an environment without its tasks, and tasks without their environment."""
    for key, (task, player) in config.players.items():
        if IS_SOURCE.of(task) != (ENVIRONMENT.of(player) is not None):
            yield f"set both {key}.verifiers and the verifiers of its generator, or none"


def refuse_unread(config: TaskConfig) -> Iterator[str]:
    """Refuse settings of a task that do not reach the environment."""
    if not IS_SOURCE.of(config):
        return
    if "task" in config.args:
        yield (
            ".args.task does not reach the workers that play and score; remove it, and set "
            "generator.args.taskset.task"
        )
    if config.system_prompt is not None:
        yield (
            ".system_prompt does not reach a verifiers environment; remove it, and set the environment's "
            "own in generator.args.taskset"
        )
