"""A group is consumed exactly once: what the journal refuses, and what it takes as told before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from journal_cases import admit, make_batch, make_prompt, make_trajectory, open_journal, tell_ready

from asyncrl.errors import JournalError
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import GroupId, Ticket
from asyncrl.testing.memory_journal import MemoryJournal


def with_journal(tmp_path: Path, story: Callable[[Journal], Awaitable[None]]) -> None:
    async def play() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        try:
            await story(journal)
        finally:
            await journal.aclose()

    asyncio.run(play())


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_the_same_batch_again_is_a_replay_and_another_of_that_version_is_refused(
    tmp_path: Path, kind: str
) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite") if kind == "sqlite" else MemoryJournal()
        tell_ready(journal, 0, 1, 2, 3)  # type: ignore[arg-type]
        assert await journal.batch_taken(make_batch(0, 0, 1)) == "taken"
        assert await journal.batch_taken(make_batch(0, 0, 1)) == "replayed"
        for version, *groups in ((0, 2, 3), (0, 0), (0, 1, 0), (1, 1, 2), (1, 4), (1, 0)):
            with pytest.raises(JournalError, match=f"batch {version} cannot be taken"):
                await journal.batch_taken(make_batch(version, *groups))
        journal.trained_nowait(0, {"policy/loss": 1.0})
        journal.published_nowait(1, "d")
        journal.published_nowait(1, "d")
        assert await journal.batch_taken(make_batch(1, 2, 3)) == "taken"
        await journal.aclose()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("version", "groups", "why"),
    [
        (2, (4,), "the newest batch is 0"),
        (1, (), "it has no groups"),
        (1, (4, 4), "a group is in it twice"),
        (1, (0, 4), "group 0 is in batch 0"),
        (1, (4, 5), "group 5 is running"),
        (1, (6,), "group 6 is failed"),
        (1, (7,), "group 7 was never admitted"),
    ],
)
def test_a_refused_batch_leaves_everything_as_it_was(
    tmp_path: Path, version: int, groups: tuple[int, ...], why: str
) -> None:
    async def story(journal: Journal) -> None:
        tell_ready(journal, 0, 4)
        admit(journal, 5)
        admit(journal, 6)
        journal.group_ended_nowait(GroupId(6), "failed", "no luck")
        await journal.batch_taken(make_batch(0, 0))
        with pytest.raises(JournalError, match=why):
            await journal.batch_taken(make_batch(version, *groups))
        state = await journal.read_resume(0)
        assert (state.next_version, [ticket.group_id for ticket, _ in state.ready]) == (1, [4])
        assert await journal.batch_taken(make_batch(1, 4)) == "taken"

    with_journal(tmp_path, story)


@pytest.mark.parametrize(
    ("tell", "why"),
    [
        (
            lambda journal: journal.rollout_finished_nowait(GroupId(9), (make_trajectory(9, 0),)),
            "group 9 was never admitted",
        ),
        (
            lambda journal: journal.rollout_failed_nowait(GroupId(1), 0, 1, "late"),
            "rollout g1/r0 has ended already",
        ),
        (
            lambda journal: journal.group_ended_nowait(GroupId(0), "failed", ""),
            "group 0 cannot become failed: it is ready",
        ),
        (
            lambda journal: journal.admitted_nowait(Ticket(GroupId(9), 0), make_prompt(0)),
            "group 0 is ready, with prompt 0/0",
        ),
        (lambda journal: journal.trained_nowait(3, {}), "a step of batch 3, which was never taken"),
        (lambda journal: journal.group_ended_nowait(GroupId(1), "eaten", ""), "CHECK constraint failed"),
        (lambda journal: journal.trained_nowait(0, {"policy/loss": "nonsense"}), "ValueError"),
    ],
)
def test_nonsense_that_nobody_waits_for_ends_the_writing_and_all_before_it_is_kept(
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
        with pytest.raises(JournalError, match=why):
            await watching
        with pytest.raises(JournalError, match=why):
            await journal.batch_taken(make_batch(0, 0))
        with pytest.raises(JournalError, match=why):
            journal.event_nowait("more", {})
        with pytest.raises(JournalError, match=why):
            await journal.aclose()
        journal = open_journal(tmp_path / "journal.sqlite")
        state = await journal.read_resume(0)
        assert (
            [ticket.group_id for ticket, _ in state.ready],
            [record.ticket.group_id for record in state.running],
        ) == ([0], [1])
        await journal.aclose()

    asyncio.run(story())
