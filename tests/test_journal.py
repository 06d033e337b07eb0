"""The writing thread keeps order and survives crashes; a resumed run finds all in its
journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import resource
import shutil
import sqlite3
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
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
from asyncrl.journal import schema
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import (
    BEGINNING,
    batch_story,
    group_story,
    read_resume,
    run_story,
)
from asyncrl.messages.records import Group, GroupId, Ticket


def test_loop_continues_while_the_disk_is_slow(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        tell_ready(journal, 0)
        admit(journal, 1)
        await journal.flush()
        is_slow, may_go = threading.Event(), threading.Event()

        def slow_disk(_: sqlite3.Connection) -> None:
            is_slow.set()
            may_go.wait()

        journal._put(slow_disk)
        await asyncio.to_thread(is_slow.wait)
        taking = asyncio.create_task(journal.add_batch(make_batch(0, 0)))
        for turn in range(1000):
            journal.add_segment_nowait(GroupId(1), 0, 0, make_partial(turn % 7))
            await asyncio.sleep(0)
        assert not taking.done()
        may_go.set()
        await taking
        await journal.aclose()
        with pytest.raises(JournalError, match="is closed"):
            admit(journal, 2)

    asyncio.run(story())
    (group,) = read_resume(tmp_path / "journal.sqlite", 0).running
    assert len(group.partials[0][1].token_ids) == 999 % 7


def test_commits_are_durable_when_they_return(tmp_path: Path) -> None:
    async def story(journal: Journal) -> None:
        pragma = await journal._durable(
            lambda it: it.execute("PRAGMA synchronous").fetchone(), "a test"
        )
        assert pragma == (2,), "FULL"

    with_journal(tmp_path / "journal.sqlite", story)


@pytest.mark.parametrize(
    "why", [r"database is locked \(SQLITE_BUSY\)", "cannot become failed: it is ready"]
)
def test_first_error_is_final_for_every_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(schema, "BUSY_S", 0.05)
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        tell_ready(journal, 0)
        await journal.flush()
        watching = asyncio.create_task(journal.wait_failed())
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            if "locked" in why:
                other.execute("BEGIN IMMEDIATE")
            journal.end_group_nowait(GroupId(0), "failed", "")
            refused = (
                journal.add_batch(make_batch(0, 0)),
                watching,
                journal.flush(),
                journal.aclose(),
            )
            for call in refused:
                with pytest.raises(JournalError, match=why):
                    await call
        with pytest.raises(JournalError, match=why):
            journal.add_event_nowait("more", {})

    asyncio.run(story())
    assert len(read_resume(path, 0).ready) == 1


def test_full_disk_leaves_the_written_whole(tmp_path: Path) -> None:
    path, (soft, hard) = (
        tmp_path / "journal.sqlite",
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    taken: list[int] = []

    async def fill(journal: Journal) -> None:
        for version in itertools.count():
            tell_ready(journal, version, num_tokens=300)
            await journal.add_batch(make_batch(version, version, num_tokens=300))
            taken.append(version)

    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        with pytest.raises(JournalError, match="SQLITE_") as caught:
            with_journal(path, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "earlier entries are whole" in caught.value.way_out
    batches = load_batches(read_resume(path, 0))
    assert len(batches) == len(taken) > 10
    for version, batch in enumerate(batches):
        assert same_group(batch.groups[0], make_group(version, num_tokens=300))


# ---- random histories

INDEX_AND_LENGTH = st.tuples(st.integers(0, 1), st.integers(1, 9))


class Histories(RuleBasedStateMachine):
    """The model: state and prompt of each group, batches in order, running rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp())
        self.path = self.root / "0" / "journal.sqlite"
        self.path.parent.mkdir()
        self.states: dict[int, str] = {}
        self.comes_again: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.batches: list[tuple[int, ...]] = []
        self.partials: dict[tuple[int, int], int] = {}
        self.finished: dict[int, set[int]] = {}
        self.journal = open_journal(self.path)

    def teardown(self) -> None:
        self.runner.run(self.journal.aclose())
        self.runner.close()
        shutil.rmtree(self.root)

    def of(self, state: str) -> list[int]:
        return [group for group, found in self.states.items() if found == state]

    def requeued(self) -> list[tuple[int, int]]:
        """Return the prompts that return, and how often each was requeued."""
        newest = {prompt: group for group, prompt in self.prompts.items()}
        again = self.comes_again
        return [
            (prompt, again[group])
            for prompt, group in sorted(newest.items())
            if group in again
        ]

    def pick(self, data: st.DataObject, state: str) -> int:
        return data.draw(st.sampled_from(self.of(state)))

    @rule(again=st.booleans())
    def admit(self, again: bool) -> None:
        group, waiting = len(self.states), self.requeued()
        prompt = waiting[0][0] if again and waiting else len(set(self.prompts.values()))
        self.journal.add_admission_nowait(
            Ticket(GroupId(group), 0), make_prompt(prompt)
        )
        self.states[group], self.prompts[group], self.finished[group] = (
            "running",
            prompt,
            set(),
        )

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        group, index, num_tokens = (
            self.pick(data, "running"),
            *data.draw(INDEX_AND_LENGTH),
        )
        self.journal.add_segment_nowait(
            GroupId(group), index, 0, make_partial(num_tokens)
        )
        if index not in self.finished[group]:
            self.partials[group, index] = num_tokens

    @rule(
        data=st.data(),
        state=st.sampled_from([*["ready"] * 3, "failed", "filtered", "requeued"]),
    )
    def end(self, data: st.DataObject, state: str) -> None:
        before = "ready" if state == "requeued" and self.of("ready") else "running"
        if not self.of(before):
            return
        group = self.pick(data, before)
        if state == "ready":
            for index in {0, 1} - self.finished[group]:
                self.journal.add_rollout_nowait(
                    GroupId(group), (make_trajectory(group, index),)
                )
        requeued = (
            data.draw(st.sampled_from([None, 0, 1, 3]))
            if state in ("failed", "requeued")
            else None
        )
        self.journal.end_group_nowait(GroupId(group), state, "", requeued=requeued)  # type: ignore[arg-type]
        self.states[group] = state
        if requeued is not None:
            self.comes_again[group] = requeued
        self.partials = {
            key: value for key, value in self.partials.items() if key[0] != group
        }

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def finish_one(self, data: st.DataObject) -> None:
        group = self.pick(data, "running")
        for index in sorted({0, 1} - self.finished[group])[:1]:
            self.journal.add_rollout_nowait(
                GroupId(group), (make_trajectory(group, index),)
            )
            self.finished[group].add(index)
            self.partials.pop((group, index), None)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        groups = data.draw(
            st.lists(st.sampled_from([*self.states, 1000]), min_size=1, max_size=3)
        )
        version = max(0, len(self.batches) - data.draw(st.sampled_from([0, 0, 1])))
        is_next = version == len(self.batches) and len({*groups}) == len(groups)
        batch = replace(make_batch(version), groups=tuple(map(self.group, groups)))
        self.runner.run(self.journal.flush())
        if is_next and all(self.states.get(group) == "ready" for group in groups):
            self.runner.run(self.journal.add_batch(batch))
            self.batches.append(tuple(groups))
            self.states.update(dict.fromkeys(groups, "taken"))
            return
        for refused in (self.journal.add_batch(batch), self.journal.aclose()):
            with pytest.raises(JournalError):
                self.runner.run(refused)
        self.journal = open_journal(self.path)

    @rule()
    def crash(self) -> None:
        """Copy the files as a killed process leaves them."""
        self.runner.run(self.journal.flush())
        after = self.root / str(int(self.path.parent.name) + 1)
        shutil.copytree(self.path.parent, after)
        self.runner.run(self.journal.aclose())
        self.path = after / "journal.sqlite"
        self.journal = open_journal(self.path)

    @invariant()
    def a_resume_would_find_what_the_model_says(self) -> None:
        state = self.runner.run(self.journal.read_resume(0))
        assert state.next_version == len(self.batches)
        assert state.part_groups == (2 ** len(self.batches) if self.batches else 0)
        assert [ticket.group_id for ticket, _ in state.ready] == self.of("ready")
        assert [record.ticket.group_id for record in state.running] == self.of(
            "running"
        )
        again = [(f"0/{prompt}", count) for prompt, count in self.requeued()]
        assert sorted(state.requeued.items()) == sorted(again)
        assert (state.num_drawn, state.next_group_id) == (
            len(set(self.prompts.values())),
            len(self.states),
        )
        partials = {}
        for record in state.running:
            group_id = record.ticket.group_id
            assert set(record.rollouts) == self.finished[group_id]
            for index, (_, partial) in record.partials.items():
                partials[group_id, index] = len(partial.token_ids)
        assert partials == self.partials
        for batch, groups in zip(load_batches(state), self.batches, strict=True):
            assert tuple(group.group_id for group in batch.groups) == groups
            part_groups = 2**batch.version
            found = batch.part_groups, batch.next_part_groups
            assert found == (part_groups, 2 * part_groups)
            assert all(
                same_group(group, self.group(group.group_id)) for group in batch.groups
            )

    def group(self, group_id: int) -> Group:
        return replace(
            make_group(group_id),
            prompt=make_prompt(self.prompts.get(group_id, group_id)),
        )


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None
)


def test_epochs_and_observations_are_found_again(tmp_path: Path) -> None:
    async def story(journal: Journal) -> None:
        prompts = {
            number: replace(make_prompt(number), prompt_id=f"sums/0/{number}")
            for number in range(4)
        }
        for number, prompt in prompts.items():
            journal.add_admission_nowait(Ticket(GroupId(number), number // 2), prompt)
        for number in (0, 1, 2):
            for rollout in (make_rollout(number, 0), make_rollout(number, 1)):
                journal.add_rollout_nowait(GroupId(number), rollout)
        journal.end_group_nowait(GroupId(0), "filtered", "")
        journal.end_group_nowait(GroupId(1), "ready", "")
        journal.add_failure_nowait(GroupId(3), 0, 1, "no")
        for epoch in (1, 10, 2):
            journal.add_epoch_nowait("sums", epoch, f"text {epoch}")
        journal.note_nowait("began_at", BEGINNING | {"epochs": [["sums", 0, "text 0"]]})
        state = await journal.read_resume(0)
        assert state.epochs == tuple(
            ("sums", epoch, f"text {epoch}") for epoch in (0, 1, 2, 10)
        )
        assert state.observed == (("sums/0/0", 0.75, 0), ("sums/0/1", 0.75, 0))
        counted = {
            name: num for name, num in state.counted.items() if name.endswith("/sums")
        }
        assert counted == {"rollout/failed/sums": 1, "rollout/filtered/sums": 1}

    with_journal(tmp_path / "journal.sqlite", story)


def test_costs_are_durable_with_the_rollouts_that_caused_them(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    spent = {"judge/tokens": 0}

    async def life(journal: Journal, *, group: int, tokens: int) -> None:
        spent["judge/tokens"] = 0  # each process counts from 0
        journal.costs = lambda: dict(spent)
        admit(journal, group)
        await journal.flush()
        spent["judge/tokens"] = tokens
        journal.add_rollout_nowait(GroupId(group), make_rollout(group, 0))

    for group, tokens in enumerate((40, 7)):
        with_journal(path, functools.partial(life, group=group, tokens=tokens))
    assert read_resume(path, 0).counted["judge/tokens"] == 47


def test_rollout_without_tokens_leaves_the_oldest_version(tmp_path: Path) -> None:
    async def story(journal: Journal) -> None:
        admit(journal, 0)
        sampled = make_trajectory(0, 1, version=3)
        for index in (0, 2):
            tokens = replace(sampled.tokens, spans=())
            empty = replace(sampled, sample_index=index, tokens=tokens)
            journal.add_rollout_nowait(GroupId(0), (empty,))
            if index == 0:
                journal.add_rollout_nowait(GroupId(0), (sampled,))

    path = with_journal(tmp_path / "journal.sqlite", story)
    assert asked(path, group_story, 0)["oldest_version"] == 3


def test_compaction_changes_no_number(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story(journal: Journal) -> None:
        await tell_a_run(journal)
        before, whole = await journal.read_resume(1), asked(path, run_story)
        assert (whole["wasted_tokens"]["retried"], whole["newest_published"]) == (15, 1)
        assert asked(path, batch_story, 1)["min_version"] == 1
        assert (asked(path, group_story, 99), asked(path, batch_story, 7)) == (
            None,
            None,
        )
        once = dict.fromkeys(["failed", "dropped", "failed_groups", "given_up"], 1)
        counted = once | {"filtered": 0, "filtered_tokens": 0}
        of_rollouts = {f"rollout/{name}": number for name, number in counted.items()}
        lost = 7 + 5 + 3  # by group 4 and 5, whose attempts came to nothing
        assert before.counted == of_rollouts | {"tokens/generated": 80 + 10 + 4 + lost}
        await journal.compact(1)
        after = await journal.read_resume(1)
        assert (after.counted, asked(path, run_story)) == (before.counted, whole)
        with pytest.raises(JournalError, match="the tokens of batch 0 were deleted"):
            after.load_batch(0)

    with_journal(path, story)
