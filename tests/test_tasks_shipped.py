"""The tasks and rewards that come with the package: reasoning-gym by name, letters, and
math.
"""

from __future__ import annotations

import tomllib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from costly_cases import every_third_is_quick
from fakes import FakeTokenizer
from token_cases import completion_of

from asyncrl.base.errors import ConfigError, RewardFailure
from asyncrl.base.failures import FailureKind
from asyncrl.config import TaskConfig
from asyncrl.messages.records import Completion, Prompt, Rollout
from asyncrl.rollouts.rollout import make_trajectory, score_completion
from asyncrl.tasks import PromptSource, TaskPrompts, TaskScorer, build_task
from asyncrl.tasks.rewards import math_reward
from asyncrl.tasks.task import RowTask
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


async def scored(config: TaskConfig, prompt: Prompt, *texts: str) -> list[Any]:
    """Return reward and `unreadable` of a rollout with each answer."""
    task = build_task(config, seed=1)
    scorer = TaskScorer(task, config, cast(Any, FakeTokenizer()), seed=1)
    attempt: Any = SimpleNamespace(prompt=prompt)
    found = []
    for text in texts:
        said = completion_of([*map(ord, text)], [-0.5] * len(text), prompt=[1, 2])

        def rollout(reward: float, said: Completion = said) -> Rollout:
            return (make_trajectory(0, said, reward),)

        (branch,) = await score_completion(scorer, attempt, said, rollout)
        found.append((branch.reward, branch.metrics["unreadable"]))
    await scorer.aclose()
    return found


@pytest.mark.extras
@pytest.mark.parametrize(
    ("name", "text"),
    [("prime_factorization", "abc"), ("boxnet", "null"), ("game_of_life", "{}")],
)
@pytest.mark.asyncio
async def test_an_answer_that_makes_a_library_raise_earns_0_and_is_counted(
    name: str, text: str
) -> None:
    config = TaskConfig(reasoning_gym=name, size=1)
    item: Any = build_task(config, seed=1).prompt(0)
    prompt = Prompt("0/0", ({"role": "user", "content": item.content},), item.answer)
    raising, other = await scored(config, prompt, text, "")
    assert (raising, other[1]) == ((0, 1), 0)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_answer_that_math_verify_never_finishes_fails_its_rollout(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "answer": "7"}')
    files = [str(tmp_path / "rows.jsonl")]
    config = TaskConfig(
        files=files, reward="math", reward_timeout_s=3.0, reward_workers=1
    )
    prompt = Prompt("0/0", (), "7")
    with pytest.raises(RewardFailure) as failed:
        await scored(config, prompt, "\\boxed{9^{9^{9^9}}}")
    assert failed.value.kind == FailureKind.REWARD_TIMEOUT
    assert await scored(config, prompt, "7", "8") == [(1, 0), (0, 0)]


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

REFERENCES = tomllib.loads(Path(__file__).with_name("math_references.toml").read_text())


@pytest.mark.parametrize(
    "reference", every_third_is_quick(zip(REFERENCES["read"], strict=True))
)
def test_each_reference_pays_only_right_answers(reference: str) -> None:
    right, wrong = REFERENCES["read"][reference]
    rewards = {
        answer: math_reward(Prompt("0/0", ()), f"So $\\boxed{{{answer}}}$.", reference)
        for answer in [*right, *wrong, "I do not know"]
    }
    assert [answer for answer in rewards if rewards[answer] == 1] == right


@pytest.mark.parametrize("reference", list(chain(*REFERENCES["refused"].values())))
def test_a_reference_that_is_not_one_value_is_refused_at_the_start(
    reference: str,
) -> None:
    rows = [{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": reference}]
    task = TaskConfig(files=["x"], reward="math")
    with pytest.raises(
        ConfigError, match=r"^row 1 .*not one value for math-verify; write"
    ):
        RowTask(rows, "row {}".format, lambda *_: 0.0, task)
