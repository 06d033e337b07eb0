"""The order of prompts: seeded, another one each epoch, handed-back ones first, and a cursor that can be
saved.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbers_task import Numbers

from asyncrl.errors import ConfigError, TaskError
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Feed, Item


def make_feed(size: int = 5, *, seed: int = 0, shuffle: bool = True) -> Feed:
    return Feed(Numbers(size), seed=seed, shuffle=shuffle)


def ids(feed: Feed, number: int) -> list[str]:
    return [feed.next_nowait().prompt_id for _ in range(number)]


def test_every_epoch_holds_each_prompt_once_in_another_order_or_in_that_of_the_file() -> None:
    drawn = ids(make_feed(20), 60)
    epochs = [drawn[start : start + 20] for start in (0, 20, 40)]
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == sorted(f"{number}/{index}" for index in range(20))
    orders = {tuple(prompt_id.split("/")[1] for prompt_id in epoch) for epoch in epochs}
    assert len(orders) == 3
    assert ids(make_feed(3, shuffle=False), 5) == ["0/0", "0/1", "0/2", "1/0", "1/1"]


def test_a_position_of_another_task_or_seed_is_refused() -> None:
    state = make_feed(5).state()
    for other in (make_feed(6), make_feed(5, seed=1), make_feed(5, shuffle=False)):
        with pytest.raises(TaskError, match=r"the saved position has (.|\n)*Way out"):
            other.load_state(state)
    for prompt_id in ("0/4", "1/0", "0/9", "seven"):
        with pytest.raises(TaskError, match="is not among the first 3 draws"):
            make_feed(5, shuffle=False).restore_nowait(3, {prompt_id: 1})


TWO_MESSAGES = Item([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
AT = r"prompt 0 of .*Numbers.*: making it raised KeyError: 0 .test_tasks_feed.py line \d+"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (lambda _: TWO_MESSAGES, "begins with a system message of its own"),
        (lambda index: {}[index], AT),
        (lambda _: 5, "prompt 0 of .*Numbers.* is no prompt: 5"),
    ],
)
def test_a_task_that_raises_or_gives_nonsense_is_named_with_the_index(prompt: Any, said: str) -> None:
    task = Numbers(1)
    task.prompt = prompt  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=said):
        Feed(task, seed=0, shuffle=False, system_prompt="be short").next_nowait()


def test_a_task_without_prompts_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"Numbers.* has no prompts(.|\n)*Way out"):
        make_feed(0)


@given(st.integers(1, 6), st.booleans(), st.lists(st.integers(-3, 3), max_size=40), st.data())
def test_a_restored_feed_goes_on_as_the_killed(size: int, shuffle: bool, moves: list[int], data: Any) -> None:
    """Prompts that were handed back come first, with how often, and with another seed each time."""
    feed, out, seen = make_feed(size, shuffle=shuffle), list[Prompt](), list[str]()
    counts, seed_ids = Counter[str](), list[str]()
    for move in moves:
        for _ in range(move):
            prompt = feed.next_nowait()
            out.append(prompt)
            seed_ids.append(prompt.seed_id)
            assert prompt.num_handed_back == counts[prompt.prompt_id]
            if prompt.num_handed_back == 0:
                seen.append(prompt.prompt_id)
        for _ in range(min(-move, len(out))):
            prompt = out.pop(data.draw(st.integers(0, len(out) - 1)))
            feed.hand_back_nowait(replace(prompt, num_handed_back=prompt.num_handed_back + 1))
            counts[prompt.prompt_id] += 1
    assert len(set(seed_ids)) == len(seed_ids)
    back = feed.prompts_back()
    waiting = set(seen) - {prompt.prompt_id for prompt in out}
    assert list(back) == [prompt_id for prompt_id in seen if prompt_id in waiting], "in their old order"
    assert feed.num_drawn == len(seen) == len(set(seen))
    restored, loaded = make_feed(size, shuffle=shuffle), make_feed(size, shuffle=shuffle)
    restored.restore_nowait(len(seen), dict(reversed(back.items())))
    loaded.load_state(json.loads(json.dumps(feed.state())))
    num = len(back) + 12
    expected = [feed.next_nowait() for _ in range(num)]
    assert [prompt.prompt_id for prompt in expected[: len(back)]] == list(back)
    for other in (restored, loaded):
        assert [other.next_nowait() for _ in range(num)] == expected
