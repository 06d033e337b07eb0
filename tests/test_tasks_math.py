"""The `math` reward: math-verify's verdict, in threads too, and no verdict without a readable reference."""

from __future__ import annotations

import pytest

from asyncrl.config import TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks import TaskScorer
from asyncrl.tasks.scorer import ProcessPool, ThreadPool
from asyncrl.tasks.sources import math_reward
from asyncrl.tasks.task import RowTask

PROMPT = Prompt("0/0", ())
CASES = [
    ("42", "The answer is 42.", 1.0),
    ("42", "The answer is 41.", 0.0),
    ("1/2", "so it is $\\frac{1}{2}$", 1.0),
    ("\\frac{1}{2}", "0.5", 1.0),
    ("5\\sqrt{2}", "$\\sqrt{50}$", 1.0),
    ("x^2+2x+1", "$(x+1)^2$", 1.0),
    ("5 + 3 = <<5+3=8>>8 apples and 10 more.\n#### 18", "Therefore 18", 1.0),
    ("The answer is 42", "42", 1.0),
    ("\\sin x", "$\\sin(x)$", 1.0),
    ("42", "I do not know", 0.0),
]


@pytest.mark.parametrize(("answer", "completion", "reward"), CASES)
def test_a_completion_is_right_if_its_answer_is_the_same_mathematics(
    answer: object, completion: str, reward: float
) -> None:
    assert math_reward(PROMPT, completion, answer) == reward


@pytest.mark.parametrize("answer", [None, "", "???"])
def test_a_reference_that_is_no_mathematics_is_an_error_and_not_a_reward_of_0(answer: object) -> None:
    with pytest.raises(ValueError, match="cannot read the reference answer"):
        math_reward(PROMPT, "42", answer)


def test_math_runs_in_processes_unless_the_config_says_otherwise() -> None:
    task = RowTask([], str, lambda prompt, completion: 0.0, prompt_column="prompt", answer_column=None)
    for settings, kind in (
        ({}, ProcessPool),
        ({"reward_pool": "thread"}, ThreadPool),
        ({"reward": "m:f"}, ThreadPool),
    ):
        config = TaskConfig(**{"files": ["x.jsonl"], "reward": "math", **settings})
        assert isinstance(TaskScorer(task, config, seed=0)._pool, kind)
