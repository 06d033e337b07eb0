"""What a run that goes on finds in its journal, what the journal refuses, what a person can ask of it, before
compaction and after it.
"""

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
    same_trajectory,
    tell_ready,
    with_journal,
)

from asyncrl.errors import JournalError
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import read_resume
from asyncrl.journal.story import batch_story, events, group_story, totals
from asyncrl.messages.records import Batch, GroupId, Prompt, Ticket
from asyncrl.testing.memory_journal import MemoryJournal


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

    state = read_resume(with_journal(tmp_path / "journal.sqlite", first_life), 1)
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

    with_journal(tmp_path / "journal.sqlite", story)


def test_a_checkpoint_that_is_newer_than_the_journal_means_that_the_journal_lost_something(
    tmp_path: Path,
) -> None:
    async def story(journal: Journal) -> None:
        tell_ready(journal, 0)
        await journal.batch_taken(make_batch(0, 0))
        assert (await journal.read_resume(1)).next_version == 1
        with pytest.raises(JournalError, match="its newest batch is 0, and a checkpoint is of version 2"):
            await journal.read_resume(2)

    with_journal(tmp_path / "journal.sqlite", story)


def test_a_journal_that_is_begun_anew_knows_what_was_before_it(tmp_path: Path) -> None:
    async def second_life(journal: Journal) -> None:
        journal.began_at_nowait(4, 11, {"0/9": 0, "0/10": 2}, 15)
        for group_id, prompt in ((15, 9), (16, 11)):
            journal.admitted_nowait(Ticket(GroupId(group_id), 4), Prompt(f"0/{prompt}", ()))

    path = with_journal(tmp_path / "journal.sqlite", second_life)
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
    async def story(journal: Journal) -> None:
        tell_ready(journal, 0, 1, 2, 3)
        assert await journal.batch_taken(make_batch(0, 0, 1)) == "taken"
        assert await journal.batch_taken(make_batch(0, 0, 1)) == "replayed"
        for version, *groups in ((0, 2, 3), (0, 0), (0, 1, 0), (1, 1, 2), (1, 4), (1, 0)):
            with pytest.raises(JournalError):
                await journal.batch_taken(make_batch(version, *groups))
        journal.trained_nowait(0, {"policy/loss": 1.0})
        assert await journal.batch_taken(make_batch(1, 2, 3)) == "taken"

    if kind == "sqlite":
        with_journal(tmp_path / "journal.sqlite", story)
    else:
        asyncio.run(story(MemoryJournal()))  # type: ignore[arg-type]


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


def with_a_run(path: Path, story: Callable[[Journal], Awaitable[None]]) -> None:
    """Groups 0 and 1 make batch 0, 2 and 3 batch 1; 4 failed, 5 was dropped and its prompt runs as 6."""

    async def play(journal: Journal) -> None:
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

    with_journal(path, play)


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

    async def story(journal: Journal) -> None:
        admit(journal, 0)
        for index, num_branches in ((0, 3), (1, 1), (3, 2)):
            rollout = make_rollout(0, index, num_branches=num_branches, has_credits=num_branches == 3)
            journal.rollout_finished_nowait(GroupId(0), rollout)
        journal.group_ended_nowait(GroupId(0), "ready", "")
        await journal.batch_taken(Batch(0, (make_group(0),), 0))

    with_journal(path, story)
    found, batch = group_story(path, 0), batch_story(path, 0)
    assert found and batch  # noqa: PT018
    assert {index: len(rollout) for index, rollout in found.rollouts.items()} == {0: 3, 1: 1, 3: 2}
    assert (found.line.num_rollouts, found.line.num_sampled) == (3, 60)
    assert found.line.reward_mean == pytest.approx((0.25 + 1.25 + 3.25) / 3), "of rollouts, not of branches"
    assert batch.tokens_by_version == {0: 60}


def test_a_long_run_that_is_compacted_stops_growing_but_for_a_line_a_group(tmp_path: Path) -> None:
    batch_size, num_batches, kept = 8, 240, 5
    path, sizes = tmp_path / "journal.sqlite", list[int]()

    async def story(journal: Journal) -> None:
        for version in range(num_batches):
            group_ids = range(batch_size * version, batch_size * (version + 1))
            tell_ready(journal, *group_ids, num_tokens=300)
            await journal.batch_taken(make_batch(version, *group_ids, num_tokens=300))
            if version % 20 == 19:
                await journal.compact(version - kept)
                sizes.append(path.stat().st_size)
        state = await journal.read_resume(num_batches - kept)
        assert (len(load_batches(state)), state.num_drawn) == (kept, batch_size * num_batches)

    with_journal(path, story)
    growth = (sizes[-1] - sizes[5]) / (batch_size * 20 * (len(sizes) - 6))
    assert growth < 300, f"{growth:.0f} bytes a group, its tokens are about 3,000; {sizes}"
    assert path.stat().st_size < 2 * 2**20


def test_checkpoints_are_removed_when_they_are_and_not_when_the_journal_forgets(tmp_path: Path) -> None:
    """keep_every and keep_best hold on to some that are older than all that the journal has tokens of."""
    path = tmp_path / "journal.sqlite"

    async def story(journal: Journal) -> None:
        journal.checkpointed_nowait(10, "step_10")
        journal.checkpointed_nowait(20, "step_20", [10])
        journal.checkpointed_nowait(30, "step_30", [10, 30])
        await journal.compact(30)

    with_journal(path, story)
    states = [(version, state) for version, _, state in totals(path).checkpoints]
    assert states == [(10, "whole"), (20, "removed"), (30, "whole")]


def test_of_events_that_come_with_every_step_the_newest_stay_and_all_others(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story(journal: Journal) -> None:
        journal.event_nowait("engine lost", {})
        for step in range(50):
            journal.event_nowait("handover", {"step": step}, keep=2)
        journal.event_nowait("stuck", {})

    with_journal(path, story)
    found = [(event.what, event.detail.get("step")) for event in events(path)]
    assert found == [("engine lost", None), ("handover", 48), ("handover", 49), ("stuck", None)]
    assert [event.what for event in events(path, newest=2)] == ["handover", "stuck"]
