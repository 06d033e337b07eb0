"""The staleness rule, case by case."""

from __future__ import annotations

import pytest

from asyncrl.buffer.staleness import OnOverdue, StalenessRule
from asyncrl.errors import WouldWait
from asyncrl.messages.records import GroupId


def make_rule(
    *, num_groups: int = 2, num_batches: int = 10, max_staleness: int = 2, on_overdue: OnOverdue = "wait"
) -> StalenessRule:
    return StalenessRule(
        num_groups=num_groups,
        num_batches=num_batches,
        max_staleness=max_staleness,
        on_overdue=on_overdue,
        look_ahead=max_staleness,
    )


def admit_all(rule: StalenessRule) -> list[int]:
    return [rule.admit_nowait().group_id for _ in range(rule.num_open)]


def finish(rule: StalenessRule, *group_ids: int, oldest: int = 0, newest: int | None = None) -> None:
    for group_id in group_ids:
        rule.finish_nowait(GroupId(group_id), oldest=oldest, newest=oldest if newest is None else newest)


def test_a_batch_is_the_ready_groups_of_earliest_deadline() -> None:
    rule = make_rule(max_staleness=2)
    admit_all(rule)  # 0..5 at version 0
    finish(rule, 0, 1)
    rule.take_nowait()
    rule.set_served_nowait(1)
    assert admit_all(rule) == [6, 7]
    finish(rule, 6, 7, oldest=1)
    finish(rule, 5, 3)
    assert rule.take_nowait().group_ids == (3, 5), "they are due in batch 2, the younger ones in batch 3"


def test_a_batch_waits_for_a_straggler_that_would_be_too_old_for_the_next() -> None:
    rule = make_rule(max_staleness=1)
    admit_all(rule)  # 0..3
    finish(rule, 0, 1)
    rule.take_nowait()
    rule.set_served_nowait(1)
    admit_all(rule)  # 4, 5
    finish(rule, 2, oldest=0)
    finish(rule, 4, 5, oldest=1)
    assert rule.waits_for == "stragglers"
    with pytest.raises(WouldWait):
        rule.take_nowait()
    finish(rule, 3, oldest=0)
    assert rule.take_nowait().group_ids == (2, 3)


def test_a_group_whose_tokens_are_younger_than_its_ticket_gets_a_later_deadline() -> None:
    rule = make_rule(max_staleness=1)
    admit_all(rule)
    finish(rule, 0, 1)
    rule.take_nowait()
    rule.set_served_nowait(1)
    admit_all(rule)
    finish(rule, 4, 5, oldest=1)
    finish(rule, 2, oldest=1)  # it queued in the engine until version 1
    assert rule.waits_for == "stragglers"
    finish(rule, 3, oldest=1)
    assert rule.take_nowait().group_ids == (2, 3), "same deadline: lower id first"


def test_mask_waits_for_no_straggler_and_hands_back_what_the_last_batch_with_a_use_for_it_leaves_behind() -> (
    None
):
    rule = make_rule(num_groups=1, max_staleness=2, on_overdue="mask")
    admit_all(rule)  # 0, 1, 2
    finish(rule, 0)
    rule.take_nowait()
    for version in (1, 2):
        rule.set_served_nowait(version)
        finish(rule, *admit_all(rule), oldest=version)
        rule.take_nowait()
    finish(rule, 1, 2, oldest=0, newest=1)
    assert rule.waits_for is None, "one token of each is young enough for batch 3"
    choice = rule.take_nowait()
    assert choice.group_ids == (1,)
    assert [(back.group_id, back.was_ready) for back in choice.handed_back] == [(2, True)]
    assert rule.num_ready == 0


@pytest.mark.parametrize(
    ("oldest", "newest"), [(0, 1), (1, 2)], ids=["older than its ticket", "not made yet"]
)
def test_tokens_that_cannot_be_are_refused_and_change_nothing(oldest: int, newest: int) -> None:
    rule = make_rule(max_staleness=1)
    admit_all(rule)
    finish(rule, 0, 1, 2)
    rule.take_nowait()
    rule.set_served_nowait(1)
    admit_all(rule)
    with pytest.raises(AssertionError, match="group 4 has a token"):
        finish(rule, 4, oldest=oldest, newest=newest)
    assert (rule.num_running, rule.num_ready) == (3, 1)
