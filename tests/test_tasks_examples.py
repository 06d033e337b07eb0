"""The code that docs/tasks.md, docs/rewards.md, examples/ and configs/ show runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from token_cases import completion_of

from asyncrl.config import TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks import PromptSource, TaskPrompts, build_task

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE
    )


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


@pytest.mark.parametrize("text", blocks("python"))
def test_python_of_the_page_runs(text: str) -> None:
    exec(compile(text, "docs/tasks.md", "exec"), {"__name__": "page"})


def with_marks(text: str) -> object:
    return pytest.param(
        text, marks=pytest.mark.extras if "reasoning_gym" in text else ()
    )


@pytest.mark.parametrize("text", [with_marks(text) for text in blocks("yaml")])
def test_configs_of_the_page_make_tasks(text: str) -> None:
    given = yaml.safe_load(text)["task"]
    for one in given if isinstance(given, list) else [given]:
        config = TaskConfig(**one)
        if config.dataset is None:  # that one needs the network
            task = build_task(config, seed=0)
            feed = PromptSource(
                TaskPrompts(
                    task, seed=0, shuffle=True, system_prompt=config.system_prompt
                )
            )
            assert feed.next_nowait().messages


def test_page_shows_the_examples_as_they_are() -> None:
    for name in ("my_task.py", "my_reward.py"):
        code = (
            (ROOT / "examples" / name)
            .read_text(encoding="utf-8")
            .partition('"""\n\n')[2]
        )
        assert code in PAGE, f"docs/tasks.md shows another examples/{name}"


@pytest.mark.parametrize(
    ("file", "reward", "right", "wrong"),
    [
        ("capitals", "examples.my_reward:names_it", "It is {}.", "I do not know"),
        ("sums", "math", "so it is $\\boxed{{{}}}$", "$\\boxed{{123456}}$"),
        ("words", "examples.words:shortest", "{}.", "It is 42"),
        ("words_held_out", "examples.words:exact", "{}.", "It is {}."),
    ],
)
def test_example_data_can_be_answered(
    file: str, reward: str, right: str, wrong: str
) -> None:
    task = build_task(
        TaskConfig(files=[f"examples/data/{file}.jsonl"], reward=reward), seed=0
    )
    feed = PromptSource(TaskPrompts(task, seed=0, shuffle=False))
    for prompt in [feed.next_nowait() for _ in range(len(task))]:
        said = (text.format(prompt.answer) for text in (right, wrong))
        assert [task.score(prompt, text) for text in said] == [1.0, 0.0]


# ---- docs/rewards.md

REWARDS_PAGE = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
REWARDS = "\n".join(blocks("python", REWARDS_PAGE))
REWARD_PROMPT = Prompt("0", ({"role": "user", "content": "1 + 1?"},), "1")


@pytest.fixture(scope="module")
def rewards() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(REWARDS, "docs/rewards.md", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("name", "completion", "answer", "reward"),
    [
        ("exact", " paris.", "Paris", 1.0),
        ("mathematics", "So it is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("mathematics", "So it is \\boxed{3}.", "0.5", 0.0),
        ("form", "<think>a</think> <answer>Paris</answer>", "Paris", 1.0),
        ("form", "<think>a</think><answer>a</answer><answer>b</answer>", "a", 0.0),
        ("combined", "<think>a</think><answer>Paris</answer>", "Paris", 1.0),
        ("combined", f"<think>{'a' * 400}</think><answer>Paris</answer>", "Paris", 0.9),
        ("combined", "<think>a</think><answer>Rome</answer>", "Paris", 0.1),
        ("parts", "Rome", "Paris", {"exact": 0.0, "form": 0.0, "short": None}),
        ("parts", "Paris" + " " * 95, "Paris", {"exact": 1, "form": 0, "short": 0.75}),
    ],
)
def test_a_reward_of_the_page(
    rewards: dict[str, Any], name: str, completion: str, answer: str, reward: Any
) -> None:
    assert rewards[name](REWARD_PROMPT, completion, answer) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("name", "completions", "expected"),
    [
        ("shortest_right", ["Paris", "It is Paris", None, "Rome"], [1, 0.5, 0, 0]),
        ("shortest_right", ["Rome", None], [0, 0]),
        ("diverse", ["paris", "paris", None], [0.8, 0.8, 0]),
        ("diverse", ["paris", "big paris", "Rome"], [0.8, 0.9, 0.2]),
    ],
)
def test_a_group_reward_of_the_page(
    rewards: dict[str, Any],
    name: str,
    completions: list[str | None],
    expected: list[float],
) -> None:
    found = rewards[name](REWARD_PROMPT, completions, "Paris")
    assert found == pytest.approx(expected)


def test_a_token_reward_of_the_page(rewards: dict[str, Any]) -> None:
    sampled = completion_of([1, 2, 3, 4, 1, 2, 3, 4, 9])
    found = rewards["without_loops"](REWARD_PROMPT, "Paris", "Paris", sampled)
    assert found == [1.0] * 4 + [-1.0] * 5
    sampled = completion_of([1, 2, 3])
    found = rewards["without_loops"](REWARD_PROMPT, "Rome", "Paris", sampled)
    assert found == [0.0] * 3
