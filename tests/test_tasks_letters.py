"""The quickstart task: honest, dense, and not to be had by doing the same thing every time."""

from __future__ import annotations

import pytest

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Feed, build_task
from asyncrl.tasks.letters import Letters

TASK = Letters(size=1000, seed=0)
FEED = Feed(TASK, seed=0, shuffle=False)
PROMPTS = [FEED.next_nowait() for _ in range(len(TASK))]


def asked(prompt: Prompt) -> tuple[str, int]:
    letter, count = prompt.messages[-1]["content"].split(" ")
    return letter, int(count)


def mean_score(completions: list[str]) -> float:
    scores = [TASK.score(prompt, completion) for prompt, completion in zip(PROMPTS, completions, strict=True)]
    assert all(0.0 <= score <= 1.0 for score in scores)
    return float(sum(scores) / len(scores))


def test_the_right_answer_scores_1_and_nothing_else_does() -> None:
    assert mean_score([letter * count for letter, count in map(asked, PROMPTS)]) == pytest.approx(1.0)
    for prompt in PROMPTS[:50]:
        letter, count = asked(prompt)
        right = letter * count
        for wrong in ("", right + letter, right[1:], right[1:] + "9", right + " "):
            assert TASK.score(prompt, wrong) < 1.0


@pytest.mark.parametrize("length", [0, 1, 4, 12, 48])
def test_always_answering_the_same_does_not_pay(length: int) -> None:
    assert mean_score(["a" * length] * len(PROMPTS)) < 0.35
    assert mean_score([("abcdef" * 8)[:length]] * len(PROMPTS)) < 0.35


def test_each_step_towards_the_answer_pays() -> None:
    prompt = Prompt("0/0", ({"role": "user", "content": "b 4"},))
    ladder = ["", "acac", "abac", "abab", "abbb", "bbbb"]
    assert sorted(ladder, key=lambda text: TASK.score(prompt, text)) == ladder
    lengths = ["b" * 20, "b" * 9, "b" * 6, "b" * 5, "b" * 4]
    assert sorted(lengths, key=lambda text: TASK.score(prompt, text)) == lengths


@pytest.mark.parametrize(
    "args", [{"letters": "aab"}, {"letters": "a1"}, {"median_count": 50.0}, {"sigma": -1.0}]
)
def test_settings_that_make_no_task_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"asyncrl.tasks.letters:Letters(.|\n)*raised ValueError"):
        build_task(TaskConfig(python="asyncrl.tasks.letters:Letters", args=args), seed=0)
