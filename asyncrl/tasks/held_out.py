"""The task of the section `eval`: its prompts in file order, the same each time. Knows tasks; knows no engine, no version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from asyncrl.config import EvalConfig
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks.build import build_task, look_at_task, task_name
from asyncrl.tasks.feed import Feed
from asyncrl.tasks.task import Task
from asyncrl.types import Prompt

EvalTask = tuple[Task, tuple[Prompt, ...]]
"""The task, and its first `num_prompts` prompts."""


def read_eval_task(config: EvalConfig) -> EvalTask:
    """Raises as build_task does, and ConfigError if the task has fewer prompts or cannot make one."""
    with _named_eval():
        return _taken(config, build_task(config.task, config.seed))


def look_at_eval_task(config: EvalConfig) -> tuple[EvalTask | None, str]:
    """What it is before anything starts, and in words; as look_at_task."""
    with _named_eval():
        task, words = look_at_task(config.task, config.seed)
        return (None if task is None else _taken(config, task)), words


def _taken(config: EvalConfig, task: Task) -> EvalTask:
    feed = Feed(task, seed=config.seed, shuffle=False, system_prompt=config.task.system_prompt, name=task_name(config.task))
    _check_size(config, len(task))
    return task, tuple(feed.next_nowait() for _ in range(config.num_prompts))


def _check_size(config: EvalConfig, size: int) -> None:
    if size < config.num_prompts:
        raise ConfigError(
            f"num_prompts={config.num_prompts} is above the {size} prompts of its task",
            rule="an evaluation takes each prompt once", way_out=f"set eval.num_prompts={size}, or give a larger task.",
        )  # fmt: skip


@contextlib.contextmanager
def _named_eval() -> Iterator[None]:
    """Errors of the section `task` say that they are those of `eval`."""
    try:
        yield
    except (ConfigError, TaskError) as error:  # all its prompts are made before anything starts
        what = error.fault if isinstance(error, TaskError) else error.what
        raise ConfigError(f"in the section eval, {what}", rule=error.rule, way_out=error.way_out) from error
