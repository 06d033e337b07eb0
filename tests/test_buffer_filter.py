"""buffer.filter: which groups are replaced, what that does to admission and to the pace, and where it
ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from buffer_groups import make_group
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.filter import GroupFilter
from asyncrl.errors import TaskError
from asyncrl.messages.records import Group
from asyncrl.messages.trainer_calls import Credit

FilterKind = Literal["none", "equal_rewards"]


def is_filtered(group: Group, kind: FilterKind = "equal_rewards") -> bool:
    return GroupFilter(kind, max_in_a_row=2).takes_nowait(group)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_a_group_is_filtered_if_all_its_rewards_are_equal_and_only_if_that_is_asked_for(
    rewards: list[float],
) -> None:
    group = make_group(0, *([0] for _ in rewards), rewards=rewards)
    assert is_filtered(group) == all(reward == rewards[0] for reward in rewards)
    assert not is_filtered(group, "none")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([(0.5, 0.5), (0.5, 0.5)], True),
        ([(0.0, 1.0), (0.0, 1.0)], False),  # one turn was better than the other
        ([(0.5, 0.5), (1.0, 1.0)], False),
    ],
)
def test_where_parts_of_a_rollout_earn_rewards_of_their_own_those_are_compared_and_not_its_mean(
    rewards: list[tuple[float, float]], expected: bool
) -> None:
    group = make_group(0, *([0, 0] for _ in rewards), rewards=[sum(pair) / 2 for pair in rewards])
    branches = (
        replace(branch, credits=(Credit(2, 3, first, 0), Credit(3, 4, second, 1)))
        for branch, (first, second) in zip(group.trajectories, rewards, strict=True)
    )
    assert is_filtered(replace(group, trajectories=tuple(branches))) == expected


def test_too_many_filtered_groups_in_a_row_end_the_run_with_their_reward_and_the_way_out() -> None:
    found = GroupFilter("equal_rewards", max_in_a_row=3)
    same, other = ([0.25, 0.25], [0.0, 1.0])
    for rewards in (same, same, other, same, same):  # not in a row
        assert found.takes_nowait(make_group(0, [0], [0], rewards=rewards)) == (rewards is same)
    with pytest.raises(TaskError, match=r"3 groups in a row .*group 5, prompt p5: 0.25(.|\n)*Way out"):
        found.takes_nowait(make_group(5, [0], [0], rewards=same))
