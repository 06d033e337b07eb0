"""The task of the section `eval`: its prompts in file order, the same each time. Knows tasks; knows no engine, no version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from asyncrl.config import EvalConfig
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks.build import build_task, check_task
from asyncrl.tasks.feed import Feed
from asyncrl.tasks.task import Task
from asyncrl.types import Prompt


def read_eval_task(config: EvalConfig) -> tuple[Task, tuple[Prompt, ...]]:
    """The task, and its first `num_prompts` prompts. Raises as build_task does, and ConfigError if it has fewer."""
    with _named_eval():
        task = build_task(config.task, config.seed)
        feed = Feed(task, seed=config.seed, shuffle=False, system_prompt=config.task.system_prompt)
        _check_size(config, len(task))
        return task, tuple(feed.next_nowait() for _ in range(config.num_prompts))


def check_eval_task(config: EvalConfig) -> str:
    """What the task is, in words, for `asyncrl check`; like check_task, it reads what needs neither seconds nor the network."""
    with _named_eval():
        words = check_task(config.task, config.seed)
        if config.task.python is not None or config.task.files is not None:
            _check_size(config, len(build_task(config.task, config.seed)))
        elif config.task.reasoning_gym is not None:
            _check_size(config, config.task.size)
        return words


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
    except ConfigError as error:
        raise ConfigError(f"in the section eval, {error.what}", rule=error.rule, way_out=error.way_out) from error
    except TaskError as error:
        raise TaskError("eval", error.what, rule=error.rule, way_out=error.way_out) from error
