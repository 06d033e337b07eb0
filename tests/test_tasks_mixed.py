"""Several tasks in one order by their shares, and prompts by what was observed of them: pure state, seeded,
and restored exactly.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbers_task import Numbers

from asyncrl.errors import TaskError
from asyncrl.messages.records import Prompt
from asyncrl.tasks.epochs import FLOOR, ByDifficulty
from asyncrl.tasks.feed import Feed, MixedFeed, Rota

SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(
    lambda found: {f"t{number}": share for number, share in enumerate(found)}
)


@given(SHARES)
def test_a_task_is_never_a_whole_draw_before_or_behind_its_share_and_a_draw_is_found_by_its_number(
    shares: dict[str, int],
) -> None:
    rota, whole, drawn = Rota(shares), sum(shares.values()), Counter[str]()
    for draw in range(2 * whole):
        name, number = rota.turn(draw)
        assert number == drawn[name]
        assert rota.draw_of(name, number) == draw
        drawn[name] += 1
        for task, share in shares.items():
            assert abs(drawn[task] * whole - share * (draw + 1)) < whole, "one draw, in parts of `whole`"
    assert drawn == {name: 2 * share for name, share in shares.items()}


def test_equal_shares_take_turns_and_seven_to_three_are_seven_and_three_of_any_ten() -> None:
    turns = [Rota({"a": 1, "b": 1, "c": 1}).turn(draw)[0] for draw in range(6)]
    assert sorted(turns[:3]) == sorted(turns[3:]) == ["a", "b", "c"]
    of_two = "".join(Rota({"a": 7, "b": 3}).turn(draw)[0] for draw in range(40))
    assert {of_two[start : start + 10].count("b") for start in range(30)} == {3}
    assert "bb" not in of_two


def difficult(size: int, *, told: list[tuple[str, int, str]] | None = None, name: str = "") -> ByDifficulty:
    tell = (lambda epoch, text: None) if told is None else (lambda *what: told.append((name, *what)))
    return ByDifficulty(size, seed=3, shuffle=True, on_epoch=tell)


def make_feed(
    sizes: dict[str, int], by_difficulty: set[str], told: list[tuple[str, int, str]] | None = None
) -> Feed:
    feeds = {
        name: Feed(
            Numbers(size),
            seed=3,
            shuffle=True,
            label=name,
            epochs=difficult(size, told=told, name=name) if name in by_difficulty else None,
        )
        for name, size in sizes.items()
    }
    shares = {name: number + 1 for number, name in enumerate(sizes)}
    return MixedFeed(feeds, shares) if len(feeds) > 1 else feeds[""]


CASES = st.one_of(
    st.tuples(st.just({"": 5}), st.just({""})),
    st.tuples(
        st.dictionaries(st.sampled_from("abc"), st.integers(1, 6), min_size=2),
        st.sets(st.sampled_from("abc")),
    ),
)


@given(CASES, st.lists(st.integers(-3, 4), max_size=25), st.data())
def test_what_was_told_and_observed_restores_the_order_of_all_tasks_exactly(
    case: tuple[dict[str, int], set[str]], moves: list[int], data: Any
) -> None:
    """As a run at max_staleness 0 does: groups of a version end before those of the next are drawn. The state
    of a checkpoint and the journal lead to the same prompts.
    """
    told: list[tuple[str, int, str]] = []
    observed: list[tuple[str, float, int]] = []
    feed, out, seen = make_feed(*case, told), list[Prompt](), list[str]()
    for version, move in enumerate(moves):
        for _ in range(move):
            out.append(feed.next_nowait(version))
            seen += [out[-1].prompt_id] if out[-1].num_handed_back == 0 else []
        for _ in range(min(-move, len(out))):
            prompt = out.pop(data.draw(st.integers(0, len(out) - 1)))
            if data.draw(st.booleans()):
                feed.hand_back_nowait(replace(prompt, num_handed_back=prompt.num_handed_back + 1))
            else:
                observed.append((prompt.prompt_id, data.draw(st.sampled_from([0.0, 0.3, 1.0])), version))
                feed.observed_nowait(*observed[-1])
    assert len(seen) == len(set(seen)) == feed.num_drawn
    version, back = len(moves), feed.prompts_back()
    loaded, journaled = make_feed(*case), make_feed(*case)
    loaded.load_state(json.loads(json.dumps(feed.state())))
    journaled.check_order(json.loads(json.dumps(feed.order)))
    shuffled = data.draw(st.permutations(observed))
    journaled.remember_nowait({}, sorted(told), shuffled)
    journaled.restore_nowait(len(seen), dict(reversed(back.items())))
    again = [journaled.make_again(prompt_id, 0).prompt_id for prompt_id in seen]
    assert again == seen
    expected = [feed.next_nowait(version) for _ in range(30)]
    assert list(back) == [prompt.prompt_id for prompt in expected[: len(back)]]
    for other in (loaded, journaled):
        assert [other.next_nowait(version) for _ in range(30)] == expected


def epochs_of(order: ByDifficulty, rewards: Any, num: int) -> list[list[int]]:
    """Which prompts each epoch has, while each prompt earns its reward each time."""
    found, draw = [list[int]() for _ in range(num)], 0
    while True:
        order.reach_nowait(draw, None)
        epoch, index = order.place(draw)
        if epoch == num:
            return found
        found[epoch].append(index)
        order.observe_nowait(index, rewards[index], epoch)
        draw += 1


def test_prompts_that_are_always_right_or_wrong_are_in_one_epoch_of_ten_and_none_is_left_out_for_ever() -> (
    None
):
    rewards = [0.0] * 100 + [0.5] * 100 + [1.0] * 100
    epochs = epochs_of(difficult(300), rewards, 80)
    assert sorted(epochs[0]) == list(range(300)), "the first one has all: nothing was observed"
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs), "once an epoch at most"
    counts = Counter(index for epoch in epochs[1:] for index in epoch)
    assert {counts[index] for index in range(100, 200)} == {79}
    useless = [counts[index] for index in (*range(100), *range(200, 300))]
    assert 0.8 * FLOOR < np.mean(useless) / 79 < 1.2 * FLOOR
    assert min(useless) > 0


@pytest.mark.parametrize(
    ("rewards", "low", "high"), [([-1.0, 1.0, 0.0], -1.0, 1.0), ([2.0, 9.0, 5.5], 2.0, 9.0)]
)
def test_what_is_right_and_wrong_is_said_by_the_reward_range(
    rewards: list[float], low: float, high: float
) -> None:
    order = ByDifficulty(3, seed=0, shuffle=False, reward_range=(low, high))
    counts = Counter(index for epoch in epochs_of(order, rewards, 200)[1:] for index in epoch)
    assert counts[2] == 199
    assert max(counts[0], counts[1]) < 60


def test_rewards_of_groups_that_started_at_the_same_version_as_the_first_of_an_epoch_do_not_count_yet() -> (
    None
):
    """Whether they have ended by then is a matter of time."""
    early, late, none = (difficult(40) for _ in range(3))
    for order in (early, late, none):
        for draw in range(40):
            order.reach_nowait(draw, 0)
    for index in range(40):
        early.observe_nowait(index, 1.0, 0)
        late.observe_nowait(index, 1.0, 1)
    for order in (early, late, none):
        order.reach_nowait(40, 1)
    ends = [order.memory()["epochs"][1] for order in (early, late, none)]
    assert ends[0] != ends[1] == ends[2]


def test_a_position_of_other_tasks_shares_or_sampling_is_refused() -> None:
    sizes = {"a": 4, "b": 5}
    state = make_feed(sizes, {"a"}).state()
    others = [make_feed({"b": 5, "a": 4}, {"a"}), make_feed({"a": 4, "b": 6}, {"a"}), make_feed(sizes, set())]
    for other in (*others, make_feed({"": 4}, set())):
        with pytest.raises(TaskError, match=r"the saved position has (.|\n)*Way out"):
            other.load_state(state)
    for prompt_id in ("a/7/0", "c/0/0", "0/0", "a/0/9"):
        with pytest.raises(TaskError, match="is not among the first 3 draws of the tasks"):
            make_feed(sizes, {"a"}).restore_nowait(3, {prompt_id: 1})
    with pytest.raises(TaskError, match="does not fit"):
        make_feed(sizes, {"a"}).remember_nowait({}, [("a", 1, "x")], [])


def test_the_cost_of_an_epoch_grows_with_its_prompts_alone_and_a_draw_is_a_look_up() -> None:
    """Counted, not timed: numpy works on all prompts once an epoch."""
    order, chosen = difficult(20_000), list[int]()
    choose = order._choose
    order._choose = lambda epoch: (chosen.append(epoch), choose(epoch))[1]  # type: ignore[method-assign]
    for draw in range(30_000):
        order.reach_nowait(draw, draw)
        order.observe_nowait(order.place(draw)[1], 1.0, draw)
    assert chosen == list(range(max(chosen) + 1))
    assert len(chosen) <= 8
