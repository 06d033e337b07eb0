"""The order of prompts, of one task or several, is seeded and can be saved."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scorer_cases import Numbers

from asyncrl.base.errors import ConfigError, TaskError
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Item, PromptSource, TaskPrompts
from asyncrl.tasks.prompt_source import FLOOR, Epochs, make_rota


def make_source(size: int = 5, *, seed: int = 0, shuffle: bool = True) -> PromptSource:
    return PromptSource(TaskPrompts(Numbers(size), seed=seed, shuffle=shuffle))


def ids(source: PromptSource, number: int) -> list[str]:
    return [source.next_nowait().prompt_id for _ in range(number)]


def test_every_epoch_holds_each_prompt_once() -> None:
    drawn = ids(make_source(20), 40)
    assert sorted(drawn) == sorted(
        f"{number}/{index}" for number in range(2) for index in range(20)
    )
    assert [name.split("/")[1] for name in drawn[:20]] != [
        name.split("/")[1] for name in drawn[20:]
    ]
    assert ids(make_source(3, shuffle=False), 5) == ["0/0", "0/1", "0/2", "1/0", "1/1"]


TWO_MESSAGES = Item(
    [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
)
AT = r"prompt 0 of .*Numbers.*: making it raised KeyError: 0 .test_tasks_prompt_source.py line \d+"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (lambda _: TWO_MESSAGES, "already begins with a system message"),
        (lambda index: {}[index], AT),
        (lambda _: 5, "prompt 0 of .*Numbers.* is not a valid prompt: 5"),
    ],
)
def test_task_that_raises_is_named_with_the_index(prompt: Any, said: str) -> None:
    task = Numbers(1)
    task.prompt = prompt  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=said):
        TaskPrompts(task, seed=0, shuffle=False, system_prompt="be short").make(0, 0)


# ---- several tasks

SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=9).map(
    lambda found: {f"t{number}": share for number, share in enumerate(found)}
)


@given(SHARES)
def test_task_stays_within_one_draw_of_its_share(shares: dict[str, int]) -> None:
    drawn = Counter[str]()
    rota = make_rota(shares)
    for draw, (name, number) in enumerate(rota, 1):
        assert number == drawn[name]
        drawn[name] += 1
        assert all(
            abs(drawn[task] - share * draw / len(rota)) < 1
            for task, share in shares.items()
        )
    assert drawn == shares
    assert rota == make_rota(dict(reversed(shares.items()))), (
        "the order of the tasks does not matter"
    )


def difficult(size: int) -> Epochs:
    return Epochs(size, 3, shuffle=True, by_difficulty=True)


def make_mixed_source(sizes: dict[str, int], by_difficulty: set[str]) -> PromptSource:
    tasks = [
        TaskPrompts(
            Numbers(size),
            seed=3,
            shuffle=True,
            label=name,
            by_difficulty=name in by_difficulty,
        )
        for name, size in sizes.items()
    ]
    shares = {name: number + 1 for number, name in enumerate(sizes)}
    return PromptSource(*tasks, shares=shares)


CASES = st.one_of(
    st.tuples(st.just({"": 5}), st.sets(st.just(""))),
    st.tuples(
        st.dictionaries(st.sampled_from("abc"), st.integers(1, 6), min_size=2),
        st.sets(st.sampled_from("abc")),
    ),
)


@given(CASES, st.lists(st.integers(-3, 4), max_size=25), st.data())
def test_order_of_all_tasks_is_restored_exactly(
    case: tuple[dict[str, int], set[str]], moves: list[int], data: Any
) -> None:
    """The journal leads to the same prompts; requeued ones get new seeds."""
    observed: list[tuple[str, float, int]] = []
    seed_ids: list[str] = []
    source, out, seen = make_mixed_source(*case), list[Prompt](), list[str]()
    for version, move in enumerate(moves):
        for _ in range(move):
            out.append(source.next_nowait(version))
            seed_ids.append(out[-1].seed_id)
            seen += [out[-1].prompt_id] if out[-1].num_requeued == 0 else []
        for _ in range(min(-move, len(out))):
            prompt = out.pop(data.draw(st.integers(0, len(out) - 1)))
            if data.draw(st.booleans()):
                source.requeue_nowait(
                    replace(prompt, num_requeued=prompt.num_requeued + 1)
                )
            else:
                observed.append(
                    (
                        prompt.prompt_id,
                        data.draw(st.sampled_from([0.0, 0.3, 1.0])),
                        version,
                    )
                )
                source.observe_nowait(*observed[-1])
    assert len(seed_ids) == len(set(seed_ids))
    assert len(seen) == len(set(seen)) == source.num_drawn
    version, back = len(moves), dict(source.requeued)
    restored = make_mixed_source(*case)
    restored.check_order(json.loads(json.dumps(source.order)))
    shuffled = data.draw(st.permutations(observed))
    restored.restore_nowait(
        len(seen), dict(reversed(back.items())), source.epochs(), shuffled
    )
    assert [restored.make_again(prompt_id, 0).prompt_id for prompt_id in seen] == seen
    expected = [source.next_nowait(version) for _ in range(30)]
    assert {prompt.prompt_id for prompt in expected[: len(back)]} <= back.keys()
    assert [restored.next_nowait(version) for _ in range(30)] == expected


def epochs_of(order: Epochs, rewards: Any, num: int) -> list[list[int]]:
    """Return the prompts of each epoch while each prompt earns its fixed reward."""
    found, draw = [list[int]() for _ in range(num)], 0
    while True:
        order.reach_nowait(draw, None)
        epoch, index = order.place(draw)
        if epoch == num:
            return found
        found[epoch].append(index)
        order.observe_nowait(index, rewards[index], epoch)
        draw += 1


def test_useless_prompts_are_in_one_epoch_of_ten() -> None:
    rewards = [0.0] * 100 + [0.5] * 100 + [1.0] * 100
    epochs = epochs_of(difficult(300), rewards, 80)
    assert sorted(epochs[0]) == list(range(300)), (
        "the first one has all: nothing was observed"
    )
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs), (
        "once an epoch at most"
    )
    counts = Counter(index for epoch in epochs[1:] for index in epoch)
    assert {counts[index] for index in range(100, 200)} == {79}
    useless = [counts[index] for index in (*range(100), *range(200, 300))]
    assert 0.8 * FLOOR < np.mean(useless) / 79 < 1.2 * FLOOR
    assert min(useless) > 0


def test_rewards_of_the_same_version_do_not_count_yet() -> None:
    early, late, none = (difficult(40) for _ in range(3))
    for order in (early, late, none):
        for draw in range(40):
            order.reach_nowait(draw, 0)
    for index in range(40):
        early.observe_nowait(index, 1.0, 0)
        late.observe_nowait(index, 1.0, 1)
    for order in (early, late, none):
        order.reach_nowait(40, 1)
    ends = [order.texts[1] for order in (early, late, none)]
    assert ends[0] != ends[1] == ends[2]


def test_position_in_other_tasks_is_refused() -> None:
    sizes = {"a": 4, "b": 5}
    order = make_mixed_source(sizes, {"a"}).order
    others = [
        ({"b": 5, "a": 4}, {"a"}),
        ({"a": 4, "b": 6}, {"a"}),
        (sizes, set[str]()),
        ({"": 4}, set[str]()),
    ]
    for other in others:
        with pytest.raises(
            TaskError, match=r"the saved order of the prompts is (.|\n)*Way out"
        ):
            make_mixed_source(*other).check_order(order)
