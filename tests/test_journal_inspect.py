"""What a person can ask of a journal, before compaction and after it, and that compaction bounds the file."""

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
    same_trajectory,
    tell_ready,
)

from asyncrl.errors import JournalError
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import Counted
from asyncrl.journal.story import batch_story, events, group_story, totals
from asyncrl.messages.records import Batch, GroupId, Ticket


async def tell_a_run(path: Path) -> Journal:
    """Groups 0 and 1 make batch 0, 2 and 3 batch 1; 4 failed, 5 was dropped and its prompt runs again as
    6.
    """
    journal = open_journal(path)
    tell_ready(journal, 0, 1, 2, 3)
    admit(journal, 4)
    journal.segment_nowait(GroupId(4), 0, 0, 0, make_partial(7))
    journal.segment_nowait(GroupId(4), 0, 1, 0, make_partial(5))
    journal.rollout_failed_nowait(GroupId(4), 0, 2, "timed out")
    journal.group_ended_nowait(GroupId(4), "failed", "too few usable rollouts")
    admit(journal, 5)
    journal.segment_nowait(GroupId(5), 0, 0, 0, make_partial(3))
    journal.rollout_finished_nowait(GroupId(5), (make_trajectory(5, 1),))
    journal.group_ended_nowait(GroupId(5), "handed_back", "dropped", requeued=1)
    await journal.batch_taken(make_batch(0, 0, 1))
    journal.trained_nowait(0, {"policy/loss": 0.25})
    journal.published_nowait(1, "digest")
    journal.checkpointed_nowait(1, "checkpoints/step_1")
    await journal.batch_taken(replace(make_batch(1, 2, 3), min_version=1, mask_older=True))
    journal.admitted_nowait(Ticket(GroupId(6), 1), make_prompt(5))
    journal.segment_nowait(GroupId(6), 1, 0, 2, make_partial(4))
    journal.restored_nowait(1)
    journal.event_nowait("engine_restarted", {"name": "engine-0", "after_s": 1.5})
    await journal.flush()
    return journal


def test_the_story_of_a_group_a_batch_and_the_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = await tell_a_run(path)
        zero = group_story(path, 0)
        assert zero is not None
        assert (zero.line.state, zero.batch, zero.prompt, zero.siblings) == ("taken", 0, make_prompt(0), ())
        assert all(same_trajectory(*zero.rollouts[index], make_trajectory(0, index)) for index in (0, 1))
        failed, dropped, again = group_story(path, 4), group_story(path, 5), group_story(path, 6)
        assert failed is not None
        assert dropped is not None
        assert again is not None
        assert (failed.reason, failed.failures, failed.line.lost_tokens) == (
            "too few usable rollouts",
            {0: (2, "timed out")},
            12,
        )
        assert (dropped.line.lost_tokens, dropped.siblings, again.siblings) == (3, (6,), (5,))
        assert again.partials == {1: (0, 2, make_partial(4))}
        assert group_story(path, 99) is None

        one = batch_story(path, 1)
        assert one is not None
        assert (one.min_version, one.mask_older, one.trained_s, one.tokens_by_version, one.masked_tokens) == (
            1,
            True,
            None,
            {0: 40},
            40,
        )
        zeroth = batch_story(path, 0)
        assert zeroth is not None
        assert (zeroth.loss, zeroth.masked_tokens) == (0.25, 0)
        assert zeroth.published_s is not None
        assert [(line.group_id, line.num_rollouts, line.num_sampled) for line in zeroth.groups] == [
            (0, 2, 20),
            (1, 2, 20),
        ]
        assert batch_story(path, 7) is None

        whole = totals(path)
        assert whole.groups == {"taken": 4, "failed": 1, "handed_back": 1, "running": 1}
        assert whole.sampled_tokens == {"taken": 80, "failed": 0, "handed_back": 10, "running": 0}
        assert (whole.lost_tokens, whole.failed_rollouts, whole.num_batches, whole.num_trained) == (
            15,
            1,
            2,
            1,
        )
        assert (whole.newest_published, whole.checkpoints) == (1, ((1, "checkpoints/step_1", "whole"),))
        assert [(event.what, event.detail) for event in events(path)] == [
            ("restored", {"version": 1}),
            ("engine_restarted", {"name": "engine-0", "after_s": 1.5}),
        ]

        report = await journal.compact(2)
        assert report.num_groups == 4, "what never was trained is younger than the batches, and stays"
        small = totals(path)
        assert (small.groups, small.sampled_tokens, small.failed_rollouts) == (
            whole.groups,
            whole.sampled_tokens,
            1,
        )
        assert (small.compacted_before, small.checkpoints) == (2, ((1, "checkpoints/step_1", "whole"),))
        gone, batch = group_story(path, 0), batch_story(path, 0)
        assert gone is not None
        assert batch is not None
        assert (gone.line, gone.prompt, gone.rollouts) == (zero.line, None, {})
        assert (batch.groups, batch.tokens_by_version, batch.masked_tokens) == (zeroth.groups, None, None)
        await journal.aclose()

    asyncio.run(story())


def test_what_was_counted_by_each_batch_and_by_now_is_in_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = await tell_a_run(path)
        by_batch_0, by_batch_1, now = (await journal.read_resume(0)).counted
        assert (by_batch_0, by_batch_1) == (Counted(generated=40), Counted(generated=80))
        lost = 7 + 5 + 3  # by group 4 and 5, whose attempts came to nothing
        assert now == Counted(generated=80 + 10 + 4 + lost, failed=1, dropped=1, failed_groups=1, given_up=1)
        assert (await journal.read_resume(2)).counted == (now,)
        admit(journal, 7)
        journal.rollout_finished_nowait(GroupId(7), (make_trajectory(7, 0),))
        journal.group_ended_nowait(GroupId(7), "filtered", "")
        (later,) = (await journal.read_resume(2)).counted
        assert (later.filtered, later.filtered_tokens, later.generated) == (1, 10, now.generated + 10)
        await journal.aclose()

    asyncio.run(story())


def test_compaction_leaves_all_that_a_resume_can_need(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = await tell_a_run(path)
        before = await journal.read_resume(1)
        assert (await journal.compact(1)).num_groups == 2
        assert (await journal.compact(1)).num_groups == 0
        after = await journal.read_resume(1)
        assert [batch.version for batch in after.batches()] == [1]
        assert after.counted == before.counted, "what was counted is the same, compacted or not"
        assert (after.next_version, after.num_drawn, after.next_group_id, after.requeued) == (2, 6, 7, {})
        assert [record.ticket for record in after.running] == [record.ticket for record in before.running]
        with pytest.raises(JournalError, match=r"the tokens of batch 0 were deleted"):
            after.load_batch(0)
        assert await journal.batch_taken(make_batch(0, 0, 1)) == "replayed"
        with pytest.raises(JournalError, match="group 0 is in batch 0"):
            await journal.batch_taken(make_batch(2, 0))
        await journal.aclose()

    asyncio.run(story())


def test_a_long_run_that_is_compacted_stops_growing_but_for_a_line_a_group(tmp_path: Path) -> None:
    batch_size, num_batches, kept = 8, 240, 5
    sizes: list[int] = []

    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        for version in range(num_batches):
            groups = tuple(
                make_group(group_id, num_tokens=300)
                for group_id in range(batch_size * version, batch_size * (version + 1))
            )
            for group in groups:
                admit(journal, group.group_id)
                for trajectory in group.trajectories:
                    journal.rollout_finished_nowait(group.group_id, (trajectory,))
                journal.group_ended_nowait(group.group_id, "ready", "")
            await journal.batch_taken(Batch(version, groups, version))
            if version % 20 == 19:
                await journal.compact(version - kept)
                sizes.append((tmp_path / "journal.sqlite").stat().st_size)
        state = await journal.read_resume(num_batches - kept)
        assert len(list(state.batches())) == kept
        assert state.num_drawn == batch_size * num_batches
        await journal.aclose()

    asyncio.run(story())
    groups_later = batch_size * 20 * (len(sizes) - 6)
    growth = (sizes[-1] - sizes[5]) / groups_later
    assert growth < 300, f"{growth:.0f} bytes a group, its tokens are about 3,000; {sizes}"
    assert (tmp_path / "journal.sqlite").stat().st_size < 2 * 2**20


def test_checkpoints_are_removed_when_they_are_and_not_when_the_journal_forgets(tmp_path: Path) -> None:
    """keep_every and keep_best hold on to some that are older than all that the journal has tokens of."""
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        journal.checkpointed_nowait(10, "step_10")
        journal.checkpointed_nowait(20, "step_20", [10])
        journal.checkpointed_nowait(30, "step_30", [10, 30])
        await journal.compact(30)
        await journal.aclose()

    asyncio.run(story())
    assert totals(path).checkpoints == (
        (10, "step_10", "whole"),
        (20, "step_20", "removed"),
        (30, "step_30", "whole"),
    )


def test_of_events_that_come_with_every_step_the_newest_stay_and_all_others(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        journal.event_nowait("engine lost", {})
        for step in range(50):
            for what in ("handover", "handed over"):
                journal.event_nowait(what, {"step": step}, keep=3)
        journal.event_nowait("stuck", {})
        await journal.flush()
        found = [(event.what, event.detail.get("step")) for event in events(path)]
        turns = [(what, step) for step in (47, 48, 49) for what in ("handover", "handed over")]
        assert found == [("engine lost", None), *turns, ("stuck", None)]
        assert [event.what for event in events(path, newest=2)] == ["handed over", "stuck"]
        await journal.aclose()

    asyncio.run(story())
