"""Build the task of a config, or its score function in reward processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.base.errors import ConfigError, TaskError
from asyncrl.base.user_code import check_call, load_function, load_object
from asyncrl.config import EvalConfig, RunConfig, TaskConfig
from asyncrl.config.model_task_eval import EVAL_SEED
from asyncrl.config.run_config import key_of
from asyncrl.messages.records import Prompt
from asyncrl.tasks.pinned_data import check_digest, whole_digest
from asyncrl.tasks.prompt_source import PromptSource, TaskPrompts
from asyncrl.tasks.sources import GymTask, VerifiersTask, math_reward, read_dataset, read_files
from asyncrl.tasks.task import PromptTask, RowTask, Score, UserCodeFailed, no_reward, user_code

LoadTaskset = Callable[[], Any]


def build_task(config: TaskConfig, seed: int, *, load_taskset: LoadTaskset | None = None) -> PromptTask:
    """`load_taskset` is required for task.verifiers. Raises ConfigError."""
    if config.verifiers:
        return VerifiersTask(_taskset(load_taskset), size=config.size)
    if config.python is not None:
        return _python_task(config, config.python, seed)
    if config.reasoning_gym is not None:
        return GymTask(config.reasoning_gym, size=config.size, seed=seed, settings=config.args)
    score = _reward_function(config)
    if config.dataset is not None:
        rows, place, digests = read_dataset(config.dataset, config.split, config.args)
    else:
        rows, place, digests = read_files(config.files or [], config.args)
    check_digest(config, digests)
    prompt, answer = config.prompt_column, config.answer_column
    return RowTask(rows, place, score, prompt_column=prompt, answer_column=answer, digests=digests)


def look_at_task(
    config: TaskConfig, seed: int, *, load_taskset: LoadTaskset | None = None
) -> tuple[PromptTask | None, str]:
    """Return the task and its description before the start. The task is None if only the run may read it.
    Raises like build_task.
    """
    if config.verifiers:
        name = type(_taskset(load_taskset)).__name__
        return None, f"verifiers {name} (its tasks are read when the run starts)"
    if config.dataset is not None and not Path(config.dataset).exists():
        _reward_function(config)
        words = "not checked: it is on the hub"
        return None, f"dataset {config.dataset}, split {config.split}; {words}"
    task = build_task(config, seed)
    TaskPrompts(task, seed=seed, shuffle=config.shuffle, name=task_name(config))
    gym = config.reasoning_gym and f"reasoning-gym {config.reasoning_gym}"
    source = config.python or gym or config.dataset or ", ".join(config.files or [])
    digest = f", digest {whole_digest(task.digests)}" if isinstance(task, RowTask) else ""
    return task, f"{source}, {len(task)} prompts{digest}"


def make_prompt_source(
    config: RunConfig,
    tasks: Mapping[str, PromptTask],
    *,
    in_order: bool = False,
    on_epoch: Callable[[str, int, str], None] = lambda name, epoch, text: None,
) -> PromptSource:
    sources = [
        TaskPrompts(
            tasks[name],
            seed=config.seed,
            shuffle=settings.shuffle and not in_order,
            system_prompt=settings.system_prompt,
            name=task_name(settings),
            label=name,
            by_difficulty=settings.sampling == "by_difficulty",
        )
        for name, settings in config.tasks.items()
    ]
    shares = config.shares if len(sources) > 1 else None
    return PromptSource(*sources, shares=shares, on_epoch=on_epoch)


def task_name(config: TaskConfig) -> str | None:
    return f"task.python={config.python}" if config.python is not None else None


def build_score(config: TaskConfig, seed: int) -> Score:
    """Build only the score function."""
    if config.files is not None or config.dataset is not None or config.verifiers:
        return _reward_function(config)
    return build_task(config, seed).score


def _python_task(config: TaskConfig, spec: str, seed: int) -> PromptTask:
    factory = load_object(spec, "task.python")
    keywords = {"size": config.size, "seed": seed, **config.args}
    usage = f"{spec.partition(':')[2]}({', '.join(f'{name}={value!r}' for name, value in keywords.items())})"
    check_call(factory, (), keywords, said=f"task.python={spec}", usage=usage)
    try:
        with user_code():
            task = factory(**keywords)
    except UserCodeFailed as failure:
        what = f"task.python={spec}: {usage} {failure}"
        raise ConfigError(what, way_out="correct task.args, task.size, or the task.") from failure
    if not isinstance(task, PromptTask):
        what = f"task.python={spec} made a {type(task).__name__}, which lacks a method"
        rule = "a task has __len__(), prompt(index) and score(prompt, completion)"
        raise ConfigError(what, rule=rule, way_out="add it; examples/my_task.py shows one.")
    score = "score(prompt, completion)"
    check_call(task.prompt, (0,), {}, said=f"task.python={spec}", usage="prompt(index)")
    check_call(task.score, (None, ""), {}, said=f"task.python={spec}", usage=score)
    return task


def _taskset(load_taskset: LoadTaskset | None) -> Any:
    if load_taskset is None:
        what = "task.verifiers=true works only for the run's own task"
        raise ConfigError(what, way_out="give this task a source of its own.")
    return load_taskset()


def _reward_function(config: TaskConfig) -> Score:
    function: Any = math_reward
    if config.reward not in ("math", None):
        usage, arguments = "reward(prompt, completion, answer)", (None, "", None)
        function = load_function(config.reward, "task.reward", usage=usage, arguments=arguments)

    def score(prompt: Prompt, completion: str) -> Any:
        if config.reward is None:
            raise no_reward(prompt)
        return function(prompt, completion, prompt.answer)

    return score


EvalTask = tuple[PromptTask, tuple[Prompt, ...]]


def read_eval_task(config: EvalConfig, label: str = "") -> EvalTask:
    """`label`: prefix of its prompt ids. Raises ConfigError."""
    with _named_eval(label):
        return _taken(config, build_task(config.task, EVAL_SEED), label)


def look_at_eval_task(config: EvalConfig, label: str = "") -> tuple[EvalTask | None, str]:
    with _named_eval(label):
        task, words = look_at_task(config.task, EVAL_SEED)
        return (None if task is None else _taken(config, task, label)), words


def _taken(config: EvalConfig, task: PromptTask, label: str) -> EvalTask:
    prompt, name, label = config.task.system_prompt, task_name(config.task), label or config.name or ""
    prompts = TaskPrompts(task, seed=EVAL_SEED, shuffle=False, system_prompt=prompt, name=name, label=label)
    if len(task) < config.num_prompts:
        what = f"num_prompts={config.num_prompts} is above the {len(task)} prompts of its task"
        raise ConfigError(what, way_out=f"set eval.num_prompts={len(task)}, or give a larger task.")
    return task, tuple(map(prompts.make, range(config.num_prompts)))


@contextlib.contextmanager
def _named_eval(label: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, TaskError) as error:  # all its prompts are made before the start
        what = error.fault if isinstance(error, TaskError) else error.what
        what = f"in the section {key_of('eval', label)}, {what}"
        raise ConfigError(what, rule=error.rule, way_out=error.way_out) from error
