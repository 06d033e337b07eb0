"""The tasks of a verifiers environment as prompts, and tasks whose rewards come from a
harness.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeTokenizer

from asyncrl.base.errors import ConfigError, RewardFailure
from asyncrl.config import GeneratorConfig, TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.messages.tokens import NO_COMPLETION
from asyncrl.tasks import PromptSource, TaskPrompts, TaskScorer
from asyncrl.tasks.sources import look_at_task
from asyncrl.tasks.task import PromptTask

pytestmark = [pytest.mark.extras, pytest.mark.extension("verifiers")]
EXAMPLE = Path(__file__).parents[1] / "examples" / "verifiers_env"


@pytest.fixture(autouse=True)
def in_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.setattr(sys, "path", [*sys.path])


def task_of(
    name: str = "calculator_env",
    args: dict[str, Any] | None = None,
    args_of_task: dict[str, Any] | None = None,
) -> PromptTask:
    config = TaskConfig(verifiers=True, args=args_of_task or {})
    generator = GeneratorConfig(verifiers=name, args=args or {})
    task, _ = look_at_task(config, 0, generator=generator, reads_all=True)
    assert task is not None
    return task


def prompts_of(task: PromptTask, count: int) -> list[Prompt]:
    feed = PromptSource(TaskPrompts(task, seed=0, shuffle=True))
    return [feed.next_nowait() for _ in range(count)]


def test_prompts_are_the_tasks_of_the_environment() -> None:
    args = {"taskset": {"num_tasks": 20}}
    first, second = (prompts_of(task_of(args=args), 40) for _ in range(2))
    assert first == second
    assert len({prompt.prompt_id for prompt in first}) == 40
    assert {prompt.prompt_id for prompt in first[:20]} == {
        f"0/{index}" for index in range(20)
    }
    assert [message["role"] for message in first[0].messages] == ["system", "user"]
    assert first[0].messages[1]["content"].startswith("What is ")


def test_checking_a_config_reads_no_tasks() -> None:
    config = TaskConfig(verifiers=True)
    args = {"taskset": {"fail_at": 0}}
    generator = GeneratorConfig(verifiers="guessing_env_for_test", args=args)
    task, words = look_at_task(config, 0, generator=generator)
    assert task is None
    assert words == "verifiers GuessingTaskset (its tasks are read when the run starts)"
    with pytest.raises(
        ConfigError,
        match="task 3 of GuessingTaskset: making it raised LookupError: no more",
    ):
        task_of("guessing_env_for_test", {"taskset": {"fail_at": 3}})
    with pytest.raises(ConfigError, match="No module named 'no_such_env'"):
        look_at_task(config, 0, generator=GeneratorConfig(verifiers="no_such_env"))


def test_fields_of_the_taskset_come_from_task_args() -> None:
    args = {"taskset": {"num_tasks": 20, "seed": 1}}
    ours, others = (task_of(args=args, args_of_task=more) for more in ({}, {"seed": 2}))
    assert len(ours) == len(others) == 20
    assert ours.prompt(0) != others.prompt(0)
    with pytest.raises(ConfigError, match=r"taskset.seeds Extra inputs are not"):
        task_of(args=args, args_of_task={"seeds": 2})


def test_prompt_with_an_image_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="task 0 of .* has an image"):
        task_of("guessing_env_for_test", {"taskset": {"has_images": True}})


def test_reward_that_nobody_gives_is_a_failure() -> None:
    task, config = task_of(), TaskConfig(verifiers=True)
    (prompt,) = prompts_of(task, 1)
    tokenizer: Any = FakeTokenizer()
    with pytest.raises(
        RewardFailure,
        match=f"prompt {prompt.prompt_id}: no reward came with the rollout",
    ):
        asyncio.run(
            TaskScorer(task, config, tokenizer, seed=0).score(prompt, NO_COMPLETION)
        )
