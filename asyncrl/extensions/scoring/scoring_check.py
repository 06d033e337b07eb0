"""What `asyncrl check` tries of teachers, judges and reward models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import CallLost
from asyncrl.config import ModelConfig, RunConfig
from asyncrl.config.run_config import key_of
from asyncrl.extensions.scoring.judge import check_endpoint
from asyncrl.extensions.scoring.judge_config import JudgeConfig
from asyncrl.extensions.scoring.reward_client import find_label
from asyncrl.extensions.scoring.scoring_roles import remote_caller, teacher_client
from asyncrl.extensions.scoring.scoring_rules import judge_of, reward_models, teachers
from asyncrl.extensions.scoring.teacher_config import TeacherConfig
from asyncrl.extensions.scoring.teacher_prompt import (
    column_of,
    load_prompt_function,
    teacher_messages,
)
from asyncrl.job.check.model_check import positions_of
from asyncrl.launch.model_sizes import read_architecture
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.task import Item, PromptTask, RowTask
from asyncrl.trainer.model.model_folder import find_on_disk

REACH_S = 10.0
"""Limit for the answers of a server that others have started."""


def check_models(config: RunConfig, tasks: Mapping[str, PromptTask]) -> Iterator[str]:
    """Reach each judge's endpoint, read the reward model's config.json, and reach the
    teachers that others have started. Blocks. Raises ConfigError.
    """
    for judge in dict.fromkeys(map(judge_of, config.all_tasks)):
        if judge is None:
            continue
        if judge.is_served:
            _check_served_judge(judge)
            yield f"judge: {judge.model} in a server of the run"
        else:
            check_endpoint(judge)
            yield f"judge: {judge.model} at {judge.base_url} answers"
    for model in reward_models(config):
        here = ModelConfig(path=model.path)
        if architecture := read_architecture(here):
            label = find_label(model, architecture)
            yield f"reward model: {model.path}, the logit {label}"
    for teacher in teachers(config):
        if teacher.base_url is not None:
            asyncio.run(_reach(teacher, config))
            yield f"teacher: {teacher.path} at {teacher.base_url} answers"
        if teacher.prompt is not None and load_prompt_function(teacher.prompt) is None:
            for name, task in tasks.items():
                if teacher.scores(name):
                    _check_column(teacher.prompt, key_of("task", name), task)


def _check_column(column: str, key: str, task: PromptTask) -> None:
    """Raise ConfigError if a row has no prompt for the teacher. Of a task in Python only the
    first prompt is read.
    """
    num = len(task) if isinstance(task, RowTask) else 1
    for index in range(num):
        item = task.prompt(index)
        where = f"{key}, prompt {index}"
        info = item.info if isinstance(item, Item) else {}
        made = column_of(info, column, where)
        teacher_messages((), made, f"{where}, column {column}")


def _check_served_judge(judge: JudgeConfig) -> None:
    """Raise ConfigError if the model answers no chat of `max_length` tokens."""
    key = "task.reward.judge"
    source = f"{key}.model={judge.model}"
    here = ModelConfig(path=judge.model)
    architecture = read_architecture(here)
    kind = (architecture.get("architectures") or [""])[0]
    if kind.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{source} is {kind}",
            rule="a judge generates text",
            way_out="name a chat model, or give this model to task.reward.model (docs/rewards.md).",
        )
    positions = positions_of(here)
    if positions is not None and judge.max_length > positions:
        raise ConfigError(
            f"{key}.max_length={judge.max_length}, and {judge.model} has max_position_embeddings={positions}",
            way_out=f"set {key}.max_length to {positions} or less.",
        )
    folder = find_on_disk(judge.model, f"{key}.model", needs_weights=False)
    if folder is None:
        return  # It is on the hub. The start of a run reads its tokenizer.
    try:
        HFChatTokenizer(folder, parse_special_tokens=False)
    except ConfigError as error:
        raise ConfigError(
            f"{source}: {error.what}", way_out="name a model that answers chats."
        ) from error


async def _reach(teacher: TeacherConfig, config: RunConfig) -> None:
    caller = remote_caller(teacher)
    try:
        await teacher_client(teacher, config, caller).ready(REACH_S)
    except CallLost as lost:
        raise ConfigError(
            f"teacher.base_url={teacher.base_url} cannot be reached: {lost}",
            way_out="start the server, or correct teacher.base_url.",
        ) from lost
    finally:
        await caller.aclose()
