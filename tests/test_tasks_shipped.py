"""The tasks and rewards that come with the package: reasoning-gym by name, letters, and math."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.config import TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks import PromptSource, TaskPrompts, build_task
from asyncrl.tasks.sources import math_reward
from asyncrl.tasks.toy import Letters

# reasoning-gym

TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(name: str = "chain_sum", *, seed: int = 1, **settings: Any) -> Any:
    values = {"size": 20, "args": TWO_DIGITS, **settings}
    return build_task(TaskConfig(reasoning_gym=name, **values), seed=seed)


@pytest.mark.extras
def test_gym_prompts_follow_the_library_and_the_seed() -> None:
    import reasoning_gym

    theirs = reasoning_gym.create_dataset("chain_sum", size=20, seed=1, **TWO_DIGITS)
    ours = [gym().prompt(i).content for i in range(20)]
    assert ours == [theirs[i]["question"] for i in range(20)]
    assert ours != [gym(seed=2).prompt(i).content for i in range(20)]


@pytest.mark.extras
@pytest.mark.parametrize("name", ["chain_sum", "countdown"])
def test_reference_answers_score_1(name: str) -> None:
    task = gym(name, args=TWO_DIGITS if name == "chain_sum" else {}, size=2)
    prompt = PromptSource(TaskPrompts(task, seed=0, shuffle=False)).next_nowait()
    assert 0.0 <= task.score(prompt, "I do not know") < 1.0
    if (answer := prompt.answer["answer"]) is not None:
        assert task.score(prompt, f"{answer}") == task.score(prompt, f"I <answer>{answer}</answer>") == 1.0
        if name == "chain_sum":
            assert task.score(prompt, f"It is {answer}") == len(answer) / len(f"It is {answer}")


@pytest.mark.extras
@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("chain_sums", {}, "task.reasoning_gym=chain_sums .* not registered"),
        ("chain_sum", {"min_term": 2}, "task.args={'min_term': 2}: .* unexpected"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
    ],
)
def test_unknown_gym_settings_are_refused(name: str, args: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gym(name, args=args)


# letters

LETTERS = Letters(size=1000, seed=0)


def test_right_letters_alone_score_1() -> None:
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

    trained, held_out = pairs(0, held_out=False) | pairs(1, held_out=False), pairs(2, held_out=True)
    assert not trained & held_out
    assert "b 7" in held_out, "the example of the pages"
    assert len(trained | held_out) > 60, "most of 6 * 12 pairs are asked for"
    item = LETTERS.prompt(0)
    assert LETTERS.score(Prompt("0/0", ({"role": "user", "content": item.content},)), item.answer) == 1.0


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
def test_same_mathematics_is_right(answer: object, completion: str, reward: float) -> None:
    assert math_reward(Prompt("0/0", ()), completion, answer) == reward
