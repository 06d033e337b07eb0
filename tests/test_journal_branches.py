"""Rollouts of several branches in the journal, whole or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_cases import (
    admit,
    make_group,
    make_rollout,
    open_journal,
    same_group,
    same_trajectory,
)

from asyncrl.errors import JournalError
from asyncrl.journal.read import read_resume
from asyncrl.journal.story import batch_story, group_story, totals
from asyncrl.messages.records import Batch, Group, GroupId, Rollout


def same_rollout(one: Rollout, other: Rollout) -> bool:
    return len(one) == len(other) and all(same_trajectory(a, b) for a, b in zip(one, other, strict=True))


def group_of(group_id: int, *rollouts: Rollout) -> Group:
    return Group(
        GroupId(group_id),
        make_group(group_id).prompt,
        tuple(branch for rollout in rollouts for branch in rollout),
    )


def test_a_rollout_is_counted_once_however_many_branches_it_has_before_compaction_and_after(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.sqlite"
    rollouts = (
        make_rollout(0, 0, num_branches=3, has_credits=True),
        make_rollout(0, 1, num_branches=1),
        make_rollout(0, 3),
    )

    async def story() -> None:
        journal = open_journal(path)
        admit(journal, 0)
        for rollout in rollouts:
            journal.rollout_finished_nowait(GroupId(0), rollout)
        journal.rollout_failed_nowait(GroupId(0), 2, 1, "timed out")
        journal.group_ended_nowait(GroupId(0), "ready", "")
        ((_, ready),) = (await journal.read_resume(0)).ready
        assert same_group(ready, group_of(0, *rollouts))
        await journal.batch_taken(Batch(0, (group_of(0, *rollouts),), 0))
        (batch,) = (await journal.read_resume(0)).batches()
        assert same_group(batch.groups[0], group_of(0, *rollouts))
        whole = group_story(path, 0)
        assert whole is not None
        assert (whole.line.num_rollouts, whole.line.num_failed, whole.line.num_sampled) == (3, 1, 60)
        assert whole.line.reward_mean == pytest.approx((0.25 + 1.25 + 3.25) / 3), (
            "of rollouts, not of branches"
        )
        assert list(whole.rollouts) == [0, 1, 3]
        assert all(same_rollout(whole.rollouts[rollout[0].sample_index], rollout) for rollout in rollouts)
        found = batch_story(path, 0)
        assert found is not None
        assert found.tokens_by_version == {0: 60}
        assert totals(path).sampled_tokens == {"taken": 60}
        assert (await journal.compact(1)).num_groups == 1
        small = group_story(path, 0)
        assert small is not None
        assert small.line == whole.line
        await journal.aclose()

    asyncio.run(story())


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        make_rollout(0, 0)[1:],
        (make_rollout(0, 0)[0], make_rollout(0, 1)[1]),
    ],
)
def test_what_are_not_the_branches_of_one_rollout_is_refused_and_nothing_of_it_is_written(
    tmp_path: Path, wrong: Rollout
) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        admit(journal, 0)
        journal.rollout_finished_nowait(GroupId(0), wrong)
        with pytest.raises(
            JournalError, match=r"a rollout of group 0 has branches \(sample_index, branch\) \["
        ):
            await journal.flush()
        with pytest.raises(JournalError):
            await journal.aclose()

    asyncio.run(story())
    (record,) = read_resume(tmp_path / "journal.sqlite", 0).running
    assert record.rollouts == {}


def test_a_branch_that_is_missing_in_the_file_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        admit(journal, 0)
        journal.rollout_finished_nowait(GroupId(0), make_rollout(0, 0, num_branches=3))
        await journal.aclose()

    asyncio.run(story())
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM trajectories WHERE branch = 1")
    connection.close()
    with pytest.raises(JournalError, match="g0/r0 has branch 2 after 1 others"):
        read_resume(path, 0)


kinds = st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans())


@settings(max_examples=25, deadline=None)
@given(st.lists(kinds, max_size=6, unique_by=lambda kind: kind[0]))
def test_any_rollouts_come_back_with_all_their_branches(
    tmp_path_factory: pytest.TempPathFactory, told: list[tuple[int, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    rollouts = {
        index: make_rollout(0, index, num_branches=count, has_credits=has_credits)
        for index, count, has_credits in told
    }

    async def story() -> None:
        journal = open_journal(path)
        admit(journal, 0)
        for rollout in rollouts.values():
            journal.rollout_finished_nowait(GroupId(0), rollout)
        await journal.flush()
        (record,) = read_resume(path, 0).running
        assert list(record.rollouts) == sorted(rollouts)
        assert all(same_rollout(record.rollouts[index], rollout) for index, rollout in rollouts.items())
        await journal.aclose()

    asyncio.run(story())
