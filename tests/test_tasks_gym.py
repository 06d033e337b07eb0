"""reasoning-gym by name: its prompts, its scoring, its settings."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Feed, build_task

TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(name: str = "chain_sum", *, seed: int = 1, **settings: Any) -> Any:
    return build_task(
        TaskConfig(reasoning_gym=name, **{"size": 20, "args": TWO_DIGITS, **settings}), seed=seed
    )


def first_prompt(task: Any) -> Prompt:
    return Feed(task, seed=0, shuffle=False).next_nowait()


def test_prompts_are_those_of_the_library_and_of_the_seed() -> None:
    import reasoning_gym

    theirs = reasoning_gym.create_dataset("chain_sum", size=20, seed=1, **TWO_DIGITS)
    ours = gym()
    assert [ours.prompt(i).content for i in range(20)] == [theirs[i]["question"] for i in range(20)]
    assert [gym(seed=2).prompt(i).content for i in range(20)] != [ours.prompt(i).content for i in range(20)]


def test_the_score_is_the_librarys_own() -> None:
    task = gym()
    prompt = first_prompt(task)
    answer = prompt.answer["answer"]
    assert task.score(prompt, answer) == task.score(prompt, f" {answer}\n") == 1.0
    assert task.score(prompt, f"Two steps ... <answer>{answer}</answer>") == 1.0
    sentence = f"It is {answer}"
    assert task.score(prompt, sentence) == len(answer) / len(sentence), (
        "the library gives a sentence part of the reward"
    )
    assert task.score(prompt, "no idea") == task.score(prompt, "") == 0.0


@pytest.mark.parametrize("name", ["leg_counting", "countdown", "rush_hour"])
def test_reference_answers_score_1_and_others_are_scored_with_their_metadata(name: str) -> None:
    task = gym(name, args={}, size=2)
    prompt = first_prompt(task)
    assert 0.0 <= task.score(prompt, "I do not know") < 1.0
    if (answer := prompt.answer["answer"]) is not None:
        assert task.score(prompt, str(answer)) == 1.0


def test_an_unknown_name_suggests_the_closest_ones() -> None:
    with pytest.raises(ConfigError, match=r"task.reasoning_gym=chain_sums(.|\n)*did you mean chain_sum"):
        gym("chain_sums")


def test_settings_of_another_task_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"'min_term'; its settings are .*max_terms, min_digits, min_terms"):
        gym(args={"min_term": 2})
    with pytest.raises(ConfigError, match="do not suit reasoning-gym's chain_sum"):
        gym(args={"min_terms": 5, "max_terms": 2})


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"Way out: pip install -e '\.\[harness\]'"):
        gym()
