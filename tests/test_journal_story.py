"""What a person can ask of a journal, before compaction and after it, and that compaction bounds the file."""

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
    same_trajectory,
    tell_ready,
)

from asyncrl.errors import JournalError
from asyncrl.journal.journal import Journal
from asyncrl.journal.story import batch_story, events, group_story, totals
from asyncrl.messages.records import Batch, GroupId, Ticket


def with_a_run(path: Path, story: Callable[[Journal], Awaitable[None]]) -> None:
    """Groups 0 and 1 make batch 0, 2 and 3 batch 1; 4 failed, 5 was dropped and its prompt runs as 6."""

    async def play() -> None:
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
        await story(journal)
        await journal.aclose()

    asyncio.run(play())


def test_the_story_of_a_group_a_batch_and_the_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story(journal: Journal) -> None:
        zero, failed, dropped, again = (group_story(path, group_id) for group_id in (0, 4, 5, 6))
        assert zero and failed and dropped and again  # noqa: PT018
        assert (zero.line.state, zero.batch, zero.prompt, zero.siblings) == ("taken", 0, make_prompt(0), ())
        assert all(same_trajectory(*zero.rollouts[index], make_trajectory(0, index)) for index in (0, 1))
        assert (failed.reason, failed.failures) == ("too few usable rollouts", {0: (2, "timed out")})
        assert (failed.line.lost_tokens, dropped.line.lost_tokens) == (12, 3)
        assert (dropped.siblings, again.siblings) == ((6,), (5,))
        assert again.partials == {1: (0, 2, make_partial(4))}
        one, zeroth = batch_story(path, 1), batch_story(path, 0)
        assert one and zeroth  # noqa: PT018
        assert (one.min_version, one.mask_older, one.trained_s) == (1, True, None)
        assert (one.tokens_by_version, one.masked_tokens) == ({0: 40}, 40)
        assert (zeroth.loss, zeroth.masked_tokens, zeroth.published_s is None) == (0.25, 0, False)
        lines = [(line.group_id, line.num_rollouts, line.num_sampled) for line in zeroth.groups]
        assert lines == [(0, 2, 20), (1, 2, 20)]
        assert (group_story(path, 99), batch_story(path, 7)) == (None, None)
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

        await journal.compact(2)
        assert totals(path) == replace(whole, compacted_before=2)
        gone, batch = group_story(path, 0), batch_story(path, 0)
        assert gone and batch  # noqa: PT018
        assert (gone.line, gone.prompt, gone.rollouts) == (zero.line, None, {})
        assert (batch.groups, batch.tokens_by_version, batch.masked_tokens) == (zeroth.groups, None, None)

    with_a_run(path, story)


def test_compaction_leaves_all_that_a_resume_can_need_and_all_that_was_counted(tmp_path: Path) -> None:
    async def story(journal: Journal) -> None:
        before = await journal.read_resume(1)
        lost = 7 + 5 + 3  # by group 4 and 5, whose attempts came to nothing
        generated = 80 + 10 + 4 + lost
        counted = {"failed": 1, "dropped": 1, "failed_groups": 1, "given_up": 1, "filtered": 0}
        assert before.counted == {
            "tokens/generated": generated,
            "rollout/filtered_tokens": 0,
            **{f"rollout/{name}": number for name, number in counted.items()},
        }
        await journal.compact(1)
        after = await journal.read_resume(1)
        assert [batch.version for batch in load_batches(after)] == [1]
        assert after.counted == before.counted
        assert (after.next_version, after.num_drawn, after.next_group_id, after.requeued) == (2, 6, 7, {})
        assert [group.ticket for group in after.running] == [group.ticket for group in before.running]
        with pytest.raises(JournalError, match="the tokens of batch 0 were deleted"):
            after.load_batch(0)
        assert await journal.batch_taken(make_batch(0, 0, 1)) == "replayed"
        admit(journal, 7)
        journal.rollout_finished_nowait(GroupId(7), (make_trajectory(7, 0),))
        journal.group_ended_nowait(GroupId(7), "filtered", "")
        later = (await journal.read_resume(2)).counted
        assert (later["rollout/filtered"], later["rollout/filtered_tokens"]) == (1, 10)
        assert later["tokens/generated"] == generated + 10

    with_a_run(tmp_path / "journal.sqlite", story)


def test_a_rollout_is_counted_once_however_many_branches_it_has(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        admit(journal, 0)
        for index, num_branches in ((0, 3), (1, 1), (3, 2)):
            rollout = make_rollout(0, index, num_branches=num_branches, has_credits=num_branches == 3)
            journal.rollout_finished_nowait(GroupId(0), rollout)
        journal.group_ended_nowait(GroupId(0), "ready", "")
        await journal.batch_taken(Batch(0, (make_group(0),), 0))
        await journal.aclose()

    asyncio.run(story())
    found, batch = group_story(path, 0), batch_story(path, 0)
    assert found and batch  # noqa: PT018
    assert {index: len(rollout) for index, rollout in found.rollouts.items()} == {0: 3, 1: 1, 3: 2}
    assert (found.line.num_rollouts, found.line.num_sampled) == (3, 60)
    assert found.line.reward_mean == pytest.approx((0.25 + 1.25 + 3.25) / 3), "of rollouts, not of branches"
    assert batch.tokens_by_version == {0: 60}


def test_a_long_run_that_is_compacted_stops_growing_but_for_a_line_a_group(tmp_path: Path) -> None:
    batch_size, num_batches, kept = 8, 240, 5
    path, sizes = tmp_path / "journal.sqlite", list[int]()

    async def story() -> None:
        journal = open_journal(path)
        for version in range(num_batches):
            group_ids = range(batch_size * version, batch_size * (version + 1))
            tell_ready(journal, *group_ids, num_tokens=300)
            await journal.batch_taken(make_batch(version, *group_ids, num_tokens=300))
            if version % 20 == 19:
                await journal.compact(version - kept)
                sizes.append(path.stat().st_size)
        state = await journal.read_resume(num_batches - kept)
        assert (len(load_batches(state)), state.num_drawn) == (kept, batch_size * num_batches)
        await journal.aclose()

    asyncio.run(story())
    growth = (sizes[-1] - sizes[5]) / (batch_size * 20 * (len(sizes) - 6))
    assert growth < 300, f"{growth:.0f} bytes a group, its tokens are about 3,000; {sizes}"
    assert path.stat().st_size < 2 * 2**20


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
    states = [(version, state) for version, _, state in totals(path).checkpoints]
    assert states == [(10, "whole"), (20, "removed"), (30, "whole")]


def test_of_events_that_come_with_every_step_the_newest_stay_and_all_others(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        journal.event_nowait("engine lost", {})
        for step in range(50):
            journal.event_nowait("handover", {"step": step}, keep=2)
        journal.event_nowait("stuck", {})
        await journal.aclose()

    asyncio.run(story())
    found = [(event.what, event.detail.get("step")) for event in events(path)]
    assert found == [("engine lost", None), ("handover", 48), ("handover", 49), ("stuck", None)]
    assert [event.what for event in events(path, newest=2)] == ["handover", "stuck"]
