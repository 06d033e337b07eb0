"""What a run that goes on finds in its journal: everything, in order, to the last bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from journal_cases import (
    admit,
    make_batch,
    make_group,
    make_partial,
    make_prompt,
    make_trajectory,
    open_journal,
    same_group,
    tell_ready,
)

from asyncrl.errors import JournalError
from asyncrl.journal.read import ResumeState
from asyncrl.messages.records import GroupId, Prompt, Ticket


def resume(path: Path, checkpoint_version: int = 0) -> ResumeState:
    async def read() -> ResumeState:
        journal = open_journal(path)
        try:
            return await journal.read_resume(checkpoint_version)
        finally:
            await journal.aclose()

    return asyncio.run(read())


def test_a_run_finds_its_batches_ready_groups_running_groups_and_prompts_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def first_life() -> None:
        journal = open_journal(path)
        tell_ready(journal, 0, 1, 2, 3, 4)
        assert await journal.batch_taken(make_batch(0, 0, 2)) == "taken"
        assert await journal.batch_taken(make_batch(1, 1, 3)) == "taken"
        journal.trained_nowait(0, {"policy/loss": 0.5})
        journal.published_nowait(1, "d1")
        journal.checkpointed_nowait(1, tmp_path / "step_1")
        for group_id in (5, 6, 7, 8):
            admit(journal, group_id, start_version=1)
        journal.rollout_finished_nowait(GroupId(5), (make_trajectory(5, 1),))
        journal.rollout_failed_nowait(GroupId(5), 0, 3, "it timed out")
        journal.segment_nowait(GroupId(6), 0, 0, 0, make_partial(3))
        journal.segment_nowait(GroupId(6), 0, 1, 0, make_partial(5))
        journal.group_ended_nowait(GroupId(7), "handed_back", "dropped", requeued=1)
        journal.group_ended_nowait(GroupId(8), "failed", "too few usable rollouts")
        await journal.aclose()

    asyncio.run(first_life())
    state = resume(path, checkpoint_version=1)
    assert (state.next_version, state.num_drawn, state.next_group_id, state.requeued) == (2, 9, 9, {"0/7": 1})
    (batch,) = state.batches()
    expected = make_batch(1, 1, 3)
    assert (batch.version, batch.min_version, batch.mask_older) == (1, expected.min_version, False)
    assert all(same_group(one, other) for one, other in zip(batch.groups, expected.groups, strict=True))
    ((ticket, group),) = state.ready
    assert ticket == Ticket(GroupId(4), 0)
    assert same_group(group, make_group(4))
    five, six = state.running
    assert (five.ticket, five.prompt, five.failures) == (
        Ticket(GroupId(5), 1),
        make_prompt(5),
        {0: (3, "it timed out")},
    )
    assert list(five.rollouts) == [1]
    assert six.partials == {0: (1, 0, make_partial(5))}
    assert six.prompt_is_whole


def test_a_finished_rollout_leaves_no_segments(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        admit(journal, 0)
        for index in (0, 1, 2):
            journal.segment_nowait(GroupId(0), index, 0, 0, make_partial(3))
        journal.rollout_finished_nowait(GroupId(0), (make_trajectory(0, 0),))
        journal.rollout_failed_nowait(GroupId(0), 1, 1, "\ud800 is no text")
        journal.segment_nowait(GroupId(0), 0, 0, 0, make_partial(9))  # late: it means nothing any more
        (record,) = (await journal.read_resume(0)).running
        assert list(record.partials) == [2]
        assert record.failures == {1: (1, "\\ud800 is no text")}
        journal.group_ended_nowait(GroupId(0), "handed_back", "dropped", requeued=1)
        journal.rollout_finished_nowait(GroupId(0), (make_trajectory(0, 2),))  # late as well
        state = await journal.read_resume(0)
        assert (state.running, state.requeued) == ((), {"0/0": 1})
        await journal.aclose()

    asyncio.run(story())


def test_prompts_that_were_handed_back_come_in_the_order_in_which_they_were_drawn(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        for group_id in (0, 1, 2):
            admit(journal, group_id)
        for group_id in (2, 0, 1):
            journal.group_ended_nowait(GroupId(group_id), "handed_back", "dropped", requeued=1)
        journal.admitted_nowait(Ticket(GroupId(3), 1), make_prompt(0))
        state = await journal.read_resume(0)
        assert (list(state.requeued), state.num_drawn) == (["0/1", "0/2"], 3)
        journal.group_ended_nowait(GroupId(3), "handed_back", "dropped", requeued=1)
        assert list((await journal.read_resume(0)).requeued) == ["0/0", "0/1", "0/2"]
        await journal.aclose()

    asyncio.run(story())


def test_a_checkpoint_that_is_newer_than_the_journal_means_that_the_journal_lost_something(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        tell_ready(journal, 0)
        await journal.batch_taken(make_batch(0, 0))
        assert (await journal.read_resume(1)).next_version == 1
        with pytest.raises(
            JournalError, match="its newest batch is 0, but there is a checkpoint at version 2"
        ):
            await journal.read_resume(2)
        await journal.aclose()

    asyncio.run(story())


def test_a_journal_that_is_begun_anew_knows_what_was_before_it_when_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def second_life() -> None:
        journal = open_journal(path)
        journal.began_at_nowait(4, 11, {"0/9": 0, "0/10": 2}, 15)
        for group_id, prompt in ((15, 9), (16, 11)):
            journal.admitted_nowait(Ticket(GroupId(group_id), 4), Prompt(f"0/{prompt}", ()))
        await journal.aclose()

    asyncio.run(second_life())
    state = resume(path, checkpoint_version=4)
    assert (state.next_version, state.num_drawn, state.next_group_id, state.requeued) == (
        4,
        12,
        17,
        {"0/10": 2},
    )
    with pytest.raises(
        JournalError,
        match="begins at version 4, and the newest whole checkpoint is of version 3.*every batch since",
    ):
        resume(path, checkpoint_version=3)


def test_a_prompt_comes_again_as_often_as_its_groups_were_requeued_and_with_the_newest_count(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        for group_id in (0, 1, 2):
            admit(journal, group_id)
        journal.group_ended_nowait(GroupId(0), "failed", "the judge is down", requeued=1)
        journal.group_ended_nowait(GroupId(1), "failed", "the judge is down", requeued=None)
        state = await journal.read_resume(0)
        assert state.requeued == {"0/0": 1}, "prompt 1 was given up"
        assert state.returning == {"0/0"}, "it failed at the version that goes on"
        assert (await journal.read_resume(1)).returning == set(), "and that is an older one"
        again = replace(make_prompt(0), num_handed_back=1)
        journal.admitted_nowait(Ticket(GroupId(3), 1), again)
        state = await journal.read_resume(0)
        assert (state.requeued, state.num_drawn) == ({}, 3)
        assert {record.prompt.prompt_id: record.prompt.num_handed_back for record in state.running} == {
            "0/2": 0,
            "0/0": 1,
        }
        journal.group_ended_nowait(GroupId(3), "handed_back", "dropped", requeued=2)
        await journal.compact(99)
        state = await journal.read_resume(1)
        assert (state.requeued, state.returning) == ({"0/0": 2}, set()), "what is too old comes again at once"
        await journal.aclose()

    asyncio.run(story())
