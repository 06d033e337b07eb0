"""Random histories of groups, with crashes: what the journal says always is what a dict would say."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from journal_cases import (
    load_batches,
    make_batch,
    make_group,
    make_partial,
    make_prompt,
    make_trajectory,
    open_journal,
    same_group,
)

from asyncrl.errors import JournalError
from asyncrl.messages.records import Group, GroupId, Ticket

INDEX_AND_LENGTH = st.tuples(st.integers(0, 1), st.integers(1, 9))


class Histories(RuleBasedStateMachine):
    """`states` group -> state, `prompts` group -> prompt, `batches` in order, `partials` and `ended` of
    running rollouts.
    """

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
        self.compacted = 0
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
        """Prompts that come again, and how often they have come back."""
        newest = {prompt: group for group, prompt in self.prompts.items()}
        again = self.comes_again
        return [(prompt, again[group]) for prompt, group in sorted(newest.items()) if group in again]

    def pick(self, data: st.DataObject, state: str) -> int:
        return data.draw(st.sampled_from(self.of(state)))

    @rule(again=st.booleans())
    def admit(self, again: bool) -> None:
        group, waiting = len(self.states), self.requeued()
        prompt = waiting[0][0] if again and waiting else len(set(self.prompts.values()))
        self.journal.admitted_nowait(Ticket(GroupId(group), 0), make_prompt(prompt))
        self.states[group], self.prompts[group], self.finished[group] = "running", prompt, set()

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        group, index, num_tokens = self.pick(data, "running"), *data.draw(INDEX_AND_LENGTH)
        self.journal.segment_nowait(GroupId(group), index, 0, 0, make_partial(num_tokens))
        if index not in self.finished[group]:
            self.partials[group, index] = num_tokens

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data(), state=st.sampled_from([*["ready"] * 3, "failed", "filtered", "handed_back"]))
    def end(self, data: st.DataObject, state: str) -> None:
        group = self.pick(data, "running")
        if state == "ready":
            for index in {0, 1} - self.finished[group]:
                self.journal.rollout_finished_nowait(GroupId(group), (make_trajectory(group, index),))
        requeued = data.draw(st.sampled_from([None, 0, 1, 3])) if state in ("failed", "handed_back") else None
        self.journal.group_ended_nowait(GroupId(group), state, "", requeued=requeued)  # type: ignore[arg-type]
        self.states[group] = state
        if requeued is not None:
            self.comes_again[group] = requeued
        self.partials = {key: value for key, value in self.partials.items() if key[0] != group}

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def finish_one(self, data: st.DataObject) -> None:
        group = self.pick(data, "running")
        for index in sorted({0, 1} - self.finished[group])[:1]:
            self.journal.rollout_finished_nowait(GroupId(group), (make_trajectory(group, index),))
            self.finished[group].add(index)
            self.partials.pop((group, index), None)

    @precondition(lambda self: self.of("ready"))
    @rule(data=st.data())
    def drop_ready(self, data: st.DataObject) -> None:
        group = self.pick(data, "ready")
        self.journal.group_ended_nowait(GroupId(group), "handed_back", "dropped", requeued=2)
        self.states[group], self.comes_again[group] = "handed_back", 2

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        groups = data.draw(st.lists(st.sampled_from([*self.states, 1000]), min_size=1, max_size=3))
        version = max(0, len(self.batches) - data.draw(st.sampled_from([0, 0, 1])))
        is_replay = version < len(self.batches) and self.batches[version] == tuple(groups)
        is_next = version == len(self.batches) and len({*groups}) == len(groups)
        may = is_replay or (is_next and all(self.states.get(group) == "ready" for group in groups))
        batch = replace(make_batch(version), groups=tuple(map(self.group, groups)))
        with contextlib.nullcontext() if may else pytest.raises(JournalError):
            answer = self.runner.run(self.journal.batch_taken(batch))
            assert answer == ("replayed" if is_replay else "taken")
        if may and not is_replay:
            self.batches.append(tuple(groups))
            self.states.update(dict.fromkeys(groups, "taken"))

    @precondition(lambda self: self.batches)
    @rule(back=st.integers(0, 2))
    def compact(self, back: int) -> None:
        self.compacted = max(self.compacted, len(self.batches) - back)
        self.runner.run(self.journal.compact(len(self.batches) - back))

    @rule()
    def crash(self) -> None:
        """The files as they lie there, in another place: what a killed process leaves."""
        self.runner.run(self.journal.flush())
        after = self.root / str(int(self.path.parent.name) + 1)
        shutil.copytree(self.path.parent, after)
        self.runner.run(self.journal.aclose())
        self.path = after / "journal.sqlite"
        self.journal = open_journal(self.path)

    @invariant()
    def a_resume_would_find_what_the_model_says(self) -> None:
        state = self.runner.run(self.journal.read_resume(self.compacted))
        assert state.next_version == len(self.batches)
        assert [ticket.group_id for ticket, _ in state.ready] == self.of("ready")
        assert [record.ticket.group_id for record in state.running] == self.of("running")
        again = [(f"0/{prompt}", count) for prompt, count in self.requeued()]
        assert list(state.requeued.items()) == again
        assert (state.num_drawn, state.next_group_id) == (len(set(self.prompts.values())), len(self.states))
        partials = {}
        for record in state.running:
            group_id = record.ticket.group_id
            assert set(record.rollouts) == self.finished[group_id]
            for index, (_, partial) in record.partials.items():
                partials[group_id, index] = len(partial.token_ids)
        assert partials == self.partials
        for batch, groups in zip(load_batches(state), self.batches[self.compacted :], strict=True):
            assert tuple(group.group_id for group in batch.groups) == groups
            assert all(same_group(group, self.group(group.group_id)) for group in batch.groups)

    def group(self, group_id: int) -> Group:
        return replace(make_group(group_id), prompt=make_prompt(self.prompts.get(group_id, group_id)))


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
