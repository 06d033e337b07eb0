"""The staleness rule, case by case."""

from __future__ import annotations

import pytest

from asyncrl.buffer.overdue import OnOverdue
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.errors import RoomError, WouldWait
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
    assert rule.first_in_danger() == 1
    with pytest.raises(WouldWait):
        rule.take_nowait()
    finish(rule, 3, oldest=0)
    assert rule.take_nowait().group_ids == (2, 3)


def test_the_look_goes_further_than_what_is_due_now() -> None:
    """Three groups are due in the batch after this one, which has room for two: one of the three must come in
    time for this one.
    """
    rule = make_rule(num_groups=2, max_staleness=2)
    admit_all(rule)  # 0..5, deadline 2
    finish(rule, 0)
    rule.fail_nowait(GroupId(1))
    assert admit_all(rule) == [6]
    finish(rule, 6)
    rule.take_nowait()  # batch 0; 2..5 still run, deadline 2: batches 1 and 2 are theirs
    rule.set_served_nowait(1)
    finish(rule, *admit_all(rule), oldest=1)  # 7, 8, deadline 3
    assert rule.next_batch == 1
    assert rule.waits_for == "stragglers", "nothing is due in batch 1, but batch 2 has no room for four"
    finish(rule, 2)
    assert rule.waits_for == "stragglers"
    finish(rule, 3)
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


def test_drop_hands_back_ready_groups_for_which_their_last_batch_had_no_room() -> None:
    rule = make_rule(num_groups=1, max_staleness=2, on_overdue="drop")
    admit_all(rule)  # 0, 1, 2 at version 0, last use in batch 2
    finish(rule, 0)
    rule.take_nowait()
    rule.set_served_nowait(1)
    finish(rule, *admit_all(rule), oldest=1)
    assert rule.take_nowait().group_ids == (3,)
    finish(rule, 2, 1)
    choice = rule.take_nowait()
    assert choice.group_ids == (1,)
    assert [(back.group_id, back.reason, back.was_ready) for back in choice.handed_back] == [
        (2, "dropped", True)
    ]


def mask_rule_with_two_stragglers() -> StalenessRule:
    """Batches of one group, max_staleness 2: batches 0, 1, 2 are taken, groups 1 and 2 of version 0 still
    run.
    """
    rule = make_rule(num_groups=1, max_staleness=2, on_overdue="mask")
    admit_all(rule)  # 0, 1, 2
    finish(rule, 0)
    rule.take_nowait()
    for version in (1, 2):
        rule.set_served_nowait(version)
        finish(rule, *admit_all(rule), oldest=version)
        rule.take_nowait()
    assert sorted(rule._running) == [1, 2]
    return rule


def test_mask_waits_for_no_straggler_and_takes_it_late_if_a_token_is_young_enough() -> None:
    rule = mask_rule_with_two_stragglers()
    finish(rule, 1, oldest=0, newest=1)
    assert rule.waits_for is None
    assert rule.take_nowait().group_ids == (1,)


def test_mask_hands_back_a_ready_group_that_the_last_batch_with_a_use_for_it_leaves_behind() -> None:
    rule = mask_rule_with_two_stragglers()
    finish(rule, 1, 2, oldest=0, newest=1)
    choice = rule.take_nowait()
    assert choice.group_ids == (1,)
    assert [(back.group_id, back.reason, back.was_ready) for back in choice.handed_back] == [
        (2, "all_masked", True)
    ]
    assert rule.num_ready == 0


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (lambda rule: finish(rule, 99), "group 99 is not running"),
        (lambda rule: finish(rule, 0), "group 0 is not running"),
        (lambda rule: rule.fail_nowait(GroupId(2)), "group 2 is not running"),
        (lambda rule: finish(rule, 4, oldest=0), "group 4 has a token of version 0, its ticket says 1"),
        (
            lambda rule: finish(rule, 4, oldest=1, newest=2),
            "group 4 has a token of version 2, but 1 batches have been taken",
        ),
        (lambda rule: rule.set_served_nowait(0), "served version 0 was reported after 1"),
        (lambda rule: rule.set_served_nowait(2), "served version 2, but 1 batches have been taken"),
        (lambda rule: rule.set_look_ahead(3), "look_ahead=3 with max_staleness=1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_values_and_changes_nothing(event: object, words: str) -> None:
    rule = make_rule(max_staleness=1)
    admit_all(rule)
    finish(rule, 0, 1, 2)
    rule.take_nowait()
    rule.set_served_nowait(1)
    admit_all(rule)
    before = (rule.num_running, rule.num_ready, rule.served, rule.look_ahead, rule.num_open)
    with pytest.raises(RoomError) as caught:
        event(rule)  # type: ignore[operator]
    assert words in str(caught.value)
    assert caught.value.room == "buffer"
    assert before == (rule.num_running, rule.num_ready, rule.served, rule.look_ahead, rule.num_open)
