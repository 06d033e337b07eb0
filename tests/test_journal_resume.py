"""What a run that goes on finds in its journal, and what the journal refuses: a group is consumed once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from journal_cases import (
    admit,
    load_batches,
    make_batch,
    make_group,
    make_partial,
    make_prompt,
    make_rollout,
    make_trajectory,
    open_journal,
    same_group,
    tell_ready,
)

from asyncrl.errors import JournalError
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import read_resume
from asyncrl.messages.records import GroupId, Prompt, Ticket
from asyncrl.testing.memory_journal import MemoryJournal


def with_journal(tmp_path: Path, story: Callable[[Journal], Awaitable[None]]) -> Path:
    async def play() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        try:
            await story(journal)
        finally:
            await journal.aclose()

    asyncio.run(play())
    return tmp_path / "journal.sqlite"


def test_a_run_finds_its_batches_ready_groups_running_groups_and_prompts_again(tmp_path: Path) -> None:
    async def first_life(journal: Journal) -> None:
        tell_ready(journal, 0, 1, 2, 3, 4)
        assert await journal.batch_taken(make_batch(0, 0, 2)) == "taken"
        assert await journal.batch_taken(make_batch(1, 1, 3)) == "taken"
        for group_id in (5, 6, 7, 8):
            admit(journal, group_id, start_version=1)
        journal.rollout_finished_nowait(GroupId(5), (make_trajectory(5, 1),))
        journal.rollout_failed_nowait(GroupId(5), 0, 3, "it timed out \ud800")
        journal.segment_nowait(GroupId(6), 0, 0, 0, make_partial(3))
        journal.segment_nowait(GroupId(6), 0, 1, 0, make_partial(5))
        journal.segment_nowait(GroupId(5), 1, 0, 0, make_partial(9))  # late: it means nothing any more
        journal.group_ended_nowait(GroupId(7), "handed_back", "dropped", requeued=1)
        journal.rollout_finished_nowait(GroupId(7), (make_trajectory(7, 1),))  # late as well
        journal.group_ended_nowait(GroupId(8), "failed", "too few usable rollouts")

    state = read_resume(with_journal(tmp_path, first_life), 1)
    assert (state.next_version, state.num_drawn, state.next_group_id, state.requeued) == (2, 9, 9, {"0/7": 1})
    (batch,), expected = load_batches(state), make_batch(1, 1, 3)
    assert (batch.version, batch.min_version, batch.mask_older) == (1, expected.min_version, False)
    assert all(same_group(one, other) for one, other in zip(batch.groups, expected.groups, strict=True))
    ((ticket, group),) = state.ready
    assert (ticket, same_group(group, make_group(4))) == (Ticket(GroupId(4), 0), True)
    five, six = state.running
    assert (five.ticket, five.prompt) == (Ticket(GroupId(5), 1), make_prompt(5))
    assert (list(five.rollouts), five.failures) == ([1], {0: (3, "it timed out \\ud800")})
    assert (five.partials, six.partials) == ({}, {0: (1, make_partial(5))})


def test_a_prompt_comes_again_with_the_newest_count_and_in_the_order_in_which_it_was_drawn(
    tmp_path: Path,
) -> None:
    async def story(journal: Journal) -> None:
        for group_id in (0, 1, 2):
            admit(journal, group_id)
        journal.group_ended_nowait(GroupId(2), "handed_back", "dropped", requeued=1)
        journal.group_ended_nowait(GroupId(0), "failed", "the judge is down", requeued=1)
        journal.group_ended_nowait(GroupId(1), "failed", "the judge is down", requeued=None)
        state = await journal.read_resume(0)
        assert list(state.requeued.items()) == [("0/0", 1), ("0/2", 1)], "prompt 1 was given up"
        assert state.returning == {"0/0"}, "it failed at the version that goes on"
        assert (await journal.read_resume(1)).returning == set(), "and that is an older one"
        journal.admitted_nowait(Ticket(GroupId(3), 1), replace(make_prompt(0), num_handed_back=1))
        state = await journal.read_resume(0)
        assert ([*state.requeued], state.num_drawn) == (["0/2"], 3)
        assert [group.prompt.num_handed_back for group in state.running] == [1]
        journal.group_ended_nowait(GroupId(3), "handed_back", "dropped", requeued=2)
        await journal.compact(99)
        state = await journal.read_resume(1)
        assert (state.requeued, state.returning) == ({"0/0": 2, "0/2": 1}, set())

    with_journal(tmp_path, story)


def test_a_checkpoint_that_is_newer_than_the_journal_means_that_the_journal_lost_something(
    tmp_path: Path,
) -> None:
    async def story(journal: Journal) -> None:
        tell_ready(journal, 0)
        await journal.batch_taken(make_batch(0, 0))
        assert (await journal.read_resume(1)).next_version == 1
        with pytest.raises(JournalError, match="its newest batch is 0, and a checkpoint is of version 2"):
            await journal.read_resume(2)

    with_journal(tmp_path, story)


def test_a_journal_that_is_begun_anew_knows_what_was_before_it(tmp_path: Path) -> None:
    async def second_life(journal: Journal) -> None:
        journal.began_at_nowait(4, 11, {"0/9": 0, "0/10": 2}, 15)
        for group_id, prompt in ((15, 9), (16, 11)):
            journal.admitted_nowait(Ticket(GroupId(group_id), 4), Prompt(f"0/{prompt}", ()))

    path = with_journal(tmp_path, second_life)
    state = read_resume(path, 4)
    assert (state.next_version, state.num_drawn, state.next_group_id) == (4, 12, 17)
    assert state.requeued == {"0/10": 2}
    with pytest.raises(JournalError, match="begins at version 4, the newest whole checkpoint is of 3"):
        read_resume(path, 3)


# ---- what is refused


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_the_same_batch_again_is_a_replay_and_what_is_refused_leaves_everything_as_it_was(
    tmp_path: Path, kind: str
) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite") if kind == "sqlite" else MemoryJournal()
        tell_ready(journal, 0, 1, 2, 3)  # type: ignore[arg-type]
        assert await journal.batch_taken(make_batch(0, 0, 1)) == "taken"
        assert await journal.batch_taken(make_batch(0, 0, 1)) == "replayed"
        for version, *groups in ((0, 2, 3), (0, 0), (0, 1, 0), (1, 1, 2), (1, 4), (1, 0)):
            with pytest.raises(JournalError):
                await journal.batch_taken(make_batch(version, *groups))
        journal.trained_nowait(0, {"policy/loss": 1.0})
        assert await journal.batch_taken(make_batch(1, 2, 3)) == "taken"
        await journal.aclose()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("tell", "why"),
    [
        (
            lambda journal: journal.rollout_finished_nowait(GroupId(9), make_rollout(9, 0)),
            "was never admitted",
        ),
        (lambda journal: journal.rollout_finished_nowait(GroupId(1), make_rollout(1, 1)[1:]), "branches"),
        (lambda journal: journal.rollout_failed_nowait(GroupId(1), 0, 1, "late"), "g1/r0 has ended already"),
        (
            lambda journal: journal.group_ended_nowait(GroupId(0), "failed", ""),
            "cannot become failed: it is re",
        ),
        (
            lambda journal: journal.admitted_nowait(Ticket(GroupId(9), 0), make_prompt(0)),
            "group 0 with prompt 0/0 is ready",
        ),
        (lambda journal: journal.trained_nowait(3, {}), "a step of batch 3, which was never taken"),
        (lambda journal: journal.group_ended_nowait(GroupId(1), "eaten", ""), "CHECK constraint failed"),
        (lambda journal: journal.trained_nowait(0, {"policy/loss": "nonsense"}), "ValueError"),
    ],
)
def test_nonsense_that_no_caller_waits_for_ends_the_writing_and_all_before_it_is_kept(
    tmp_path: Path, tell: Callable[[Journal], None], why: str
) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        watching = asyncio.create_task(journal.wait_failed())
        tell_ready(journal, 0)
        admit(journal, 1)
        journal.rollout_finished_nowait(GroupId(1), (make_trajectory(1, 0),))
        await journal.flush()
        tell(journal)
        for refused in (lambda: watching, lambda: journal.batch_taken(make_batch(0, 0)), journal.aclose):
            with pytest.raises(JournalError, match=why):
                await refused()
        with pytest.raises(JournalError, match=why):
            journal.event_nowait("more", {})

    asyncio.run(story())
    state = read_resume(tmp_path / "journal.sqlite", 0)
    assert [ticket.group_id for ticket, _ in state.ready] == [0]
    assert [list(group.rollouts) for group in state.running] == [[0]]
