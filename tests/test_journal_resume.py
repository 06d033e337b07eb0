"""What a resumed run finds in its journal, before and after compaction."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journal_cases import (
    admit,
    asked,
    load_batches,
    make_batch,
    make_group,
    make_partial,
    make_prompt,
    make_rollout,
    make_trajectory,
    open_journal,
    same_group,
    tell_a_run,
    tell_ready,
    with_journal,
)

from asyncrl.base.errors import JournalError
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import batch_story, group_story, read_resume, run_story
from asyncrl.messages.records import GroupId, Ticket


def test_resume_finds_batches_groups_and_prompts(tmp_path: Path) -> None:
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
        journal.group_ended_nowait(GroupId(7), "requeued", "dropped", requeued=1)
        journal.rollout_finished_nowait(GroupId(7), (make_trajectory(7, 1),))  # late as well
        journal.group_ended_nowait(GroupId(8), "failed", "too few usable rollouts")

    path = with_journal(tmp_path / "journal.sqlite", first_life)
    state = read_resume(path, 1)
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
    with pytest.raises(JournalError, match="the newest batch is 1, but a checkpoint has version 3"):
        read_resume(path, 3)  # the journal has lost something


def test_epochs_and_observations_are_found_again(tmp_path: Path) -> None:
    async def story(journal: Journal) -> None:
        prompts = {number: replace(make_prompt(number), prompt_id=f"sums/0/{number}") for number in range(4)}
        for number, prompt in prompts.items():
            journal.admitted_nowait(Ticket(GroupId(number), number // 2), prompt)
        for number in (0, 1, 2):
            for rollout in (make_rollout(number, 0), make_rollout(number, 1)):
                journal.rollout_finished_nowait(GroupId(number), rollout)
        journal.group_ended_nowait(GroupId(0), "filtered", "")
        journal.group_ended_nowait(GroupId(1), "ready", "")
        journal.rollout_failed_nowait(GroupId(3), 0, 1, "no")
        assert (await journal.read_resume(0)).observed == (), "no task asks for it"
        for epoch in (0, 1, 10, 2):
            journal.epoch_nowait("sums", epoch, f"text {epoch}")
        journal.epoch_nowait("words", 0, "text")
        before = {"version": 0, "num_drawn": 0, "out": {}, "next_group_id": 0}
        journal.note_nowait("began_at", before | {"memory": {"sums": {"epochs": []}}})
        state = await journal.read_resume(0)
        numbers = [("sums", epoch, f"text {epoch}") for epoch in (0, 1, 2, 10)]
        assert state.epochs == (*numbers, ("words", 0, "text"))
        assert state.observed == (("sums/0/0", 0.75, 0), ("sums/0/1", 0.75, 0))
        assert state.memory == {"sums": {"epochs": []}}
        counted = {name: num for name, num in state.counted.items() if name.endswith("/sums")}
        assert counted == {"rollout/failed/sums": 1, "rollout/filtered/sums": 1}

    with_journal(tmp_path / "journal.sqlite", story)


def test_failed_prompt_and_its_hand_backs_are_known(tmp_path: Path) -> None:
    async def story(journal: Journal) -> None:
        for group_id in (0, 1):
            admit(journal, group_id)
        journal.group_ended_nowait(GroupId(0), "failed", "the judge is down", requeued=1)
        journal.group_ended_nowait(GroupId(1), "requeued", "dropped", requeued=1)
        assert (await journal.read_resume(0)).returning == {"0/0"}
        assert (await journal.read_resume(1)).returning == set(), "and that is an older one"
        journal.admitted_nowait(Ticket(GroupId(2), 1), replace(make_prompt(0), num_requeued=1))
        state = await journal.read_resume(0)
        assert ([*state.requeued], state.returning) == (["0/1"], set())
        assert [group.prompt.num_requeued for group in state.running] == [1]

    with_journal(tmp_path / "journal.sqlite", story)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (("rollout_finished", GroupId(9), make_rollout(9, 0)), "was never admitted"),
        (("rollout_finished", GroupId(1), make_rollout(1, 1)[1:]), "branches"),
        (("group_ended", GroupId(0), "failed", ""), "cannot become failed: it is re"),
        (("admitted", Ticket(GroupId(9), 0), make_prompt(0)), "UNIQUE constraint failed: groups.prompt_id"),
        (("trained", 0, {"policy/loss": "nonsense"}), "ValueError"),
    ],
)
def test_nonsense_ends_the_writing_and_keeps_the_rest(
    tmp_path: Path, told: tuple[Any, ...], why: str
) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        watching = asyncio.create_task(journal.wait_failed())
        tell_ready(journal, 0)
        admit(journal, 1)
        journal.rollout_finished_nowait(GroupId(1), (make_trajectory(1, 0),))
        await journal.flush()
        getattr(journal, f"{told[0]}_nowait")(*told[1:])
        for refused in (watching, journal.batch_taken(make_batch(0, 0)), journal.aclose()):
            with pytest.raises(JournalError, match=why):
                await refused
        with pytest.raises(JournalError, match=why):
            journal.event_nowait("more", {})

    asyncio.run(story())
    state = read_resume(tmp_path / "journal.sqlite", 0)
    assert [ticket.group_id for ticket, _ in state.ready] == [0]
    assert [list(group.rollouts) for group in state.running] == [[0]]


def test_compaction_leaves_what_a_resume_needs(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story(journal: Journal) -> None:
        await tell_a_run(journal)
        before, whole = await journal.read_resume(1), asked(path, run_story)
        masked = asked(path, batch_story, 1)
        assert (whole["wasted_tokens"]["retried"], whole["newest_published"]) == (15, 1)
        assert (masked["min_version"], masked["masked_tokens"]) == (1, 40)
        assert (asked(path, group_story, 99), asked(path, batch_story, 7)) == (None, None)
        lost = 7 + 5 + 3  # by group 4 and 5, whose attempts came to nothing
        generated = 80 + 10 + 4 + lost
        once = dict.fromkeys(["failed", "dropped", "failed_groups", "given_up"], 1)
        counted = once | {"filtered": 0, "filtered_tokens": 0}
        of_rollouts = {f"rollout/{name}": number for name, number in counted.items()}
        assert before.counted == of_rollouts | {"tokens/generated": generated}
        await journal.compact(1)
        after = await journal.read_resume(1)
        assert [batch.version for batch in load_batches(after)] == [1]
        assert after.counted == before.counted
        assert asked(path, run_story) == whole | {"tokens_deleted_before": 1}
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

    with_journal(path, story)


def test_compacted_journal_of_a_long_run_stops_growing(tmp_path: Path) -> None:
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


def test_checkpoints_outlive_their_tokens(tmp_path: Path) -> None:
    """keep_every and keep_best hold checkpoints older than all tokens of the journal."""

    async def story(journal: Journal) -> None:
        journal.checkpointed_nowait(10, "step_10")
        journal.checkpointed_nowait(20, "step_20", [10])
        journal.checkpointed_nowait(30, "step_30", [10, 30])
        await journal.compact(30)
        journal.event_nowait("engine lost", {})
        for step in range(50):
            journal.event_nowait("handover", {"step": step}, keep=2)
        journal.event_nowait("stuck", {})

    path = with_journal(tmp_path / "journal.sqlite", story)
    told = asked(path, run_story)
    states = [(entry["version"], entry["state"]) for entry in told["checkpoints"]]
    assert states == [(10, "whole"), (20, "removed"), (30, "whole")]
    found = [(event["what"], event["detail"].get("step")) for event in told["events"]]
    assert found == [("engine lost", None), ("handover", 48), ("handover", 49), ("stuck", None)]
