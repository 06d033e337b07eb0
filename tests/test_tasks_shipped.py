"""The tasks and rewards that come with the package: reasoning-gym by name, letters, and
math.
"""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.config import TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks import PromptSource, TaskPrompts, build_task
from asyncrl.tasks.rewards import math_reward
from asyncrl.tasks.toy import Letters

# reasoning-gym

TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(name: str = "chain_sum", *, seed: int = 1, **settings: Any) -> Any:
    values = {"size": 20, "args": TWO_DIGITS, **settings}
    return build_task(TaskConfig(reasoning_gym=name, **values), seed=seed)


@pytest.mark.extras
def test_gym_prompts_and_scores_follow_the_library() -> None:
    import reasoning_gym

    theirs = reasoning_gym.create_dataset("chain_sum", size=20, seed=1, **TWO_DIGITS)
    task = gym()
    assert [task.prompt(i).content for i in range(20)] == [
        theirs[i]["question"] for i in range(20)
    ]
    prompt = PromptSource(TaskPrompts(task, seed=0, shuffle=False)).next_nowait()
    answer = prompt.answer["answer"]
    assert (
        task.score(prompt, answer)
        == task.score(prompt, f"I <answer>{answer}</answer>")
        == 1.0
    )
    assert task.score(prompt, f"It is {answer}") == len(answer) / len(f"It is {answer}")


@pytest.mark.extras
def test_unknown_gym_settings_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="task.reasoning_gym=chain_sums .* not registered"
    ):
        gym("chain_sums")
    with pytest.raises(ConfigError, match="task.args={'min_term': 2}: .* unexpected"):
        gym(args={"min_term": 2})


# letters

LETTERS = Letters(size=1000, seed=0)


def test_only_the_right_letters_score_1() -> None:
    feed = PromptSource(TaskPrompts(LETTERS, seed=0, shuffle=False))
    for prompt in (feed.next_nowait() for _ in range(len(LETTERS))):
        letter, count = prompt.messages[-1]["content"].split(" ")
        right = letter * int(count)
        assert LETTERS.score(prompt, right) == 1.0
        for wrong in ("", right + letter, right[1:], right[1:] + "9", right + " "):
            assert 0.0 <= LETTERS.score(prompt, wrong) < 1.0


def test_held_out_letters_are_never_trained_on() -> None:
    def pairs(seed: int, *, held_out: bool) -> set[str]:
        task = Letters(size=1000, seed=seed, max_count=12, held_out=held_out)
        return {task.prompt(index).content for index in range(len(task))}

    held_out = pairs(2, held_out=True)
    assert not pairs(0, held_out=False) & held_out
    assert "b 7" in held_out, "the example of the pages"


# math

CASES = [
    ("42", "The answer is 42.", 1.0),
    ("42", "The answer is 41.", 0.0),
    ("42", "I do not know", 0.0),
    ("\\frac{1}{2}", "0.5", 1.0),
    ("x^2+2x+1", "$(x+1)^2$", 1.0),
    ("5 + 3 = <<5+3=8>>8 apples and 10 more.\n#### 18", "Therefore 18", 1.0),
    ("The answer is 42", "42", 1.0),
    ("\\sin x", "$\\sin(x)$", 1.0),
]


@pytest.mark.parametrize(("answer", "completion", "reward"), CASES)
def test_same_mathematics_is_right(
    answer: object, completion: str, reward: float
) -> None:
    assert math_reward(Prompt("0/0", ()), completion, answer) == reward
