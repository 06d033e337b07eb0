"""Random histories of groups, with crashes: what the journal says always is what a dict would say."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
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
from asyncrl.messages.records import GroupId, Ticket


class Histories(RuleBasedStateMachine):
    """`states` group -> state, `prompts` group -> prompt, `batches` in order, `partials` and `ended` of
    running rollouts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp())
        self.num_lives = 0
        self.path = self.root / "0" / "journal.sqlite"
        self.path.parent.mkdir()
        self.states: dict[int, str] = {}
        self.comes_again: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.batches: list[tuple[int, ...]] = []
        self.compacted = 0
        self.partials: dict[tuple[int, int], int] = {}
        self.finished: dict[int, set[int]] = {}

    @initialize()
    def begin(self) -> None:
        self.journal = open_journal(self.path)

    def teardown(self) -> None:
        self.runner.run(self.journal.aclose())
        self.runner.close()
        shutil.rmtree(self.root)

    def of(self, state: str) -> list[int]:
        return [group for group, found in self.states.items() if found == state]

    def requeued(self) -> list[int]:
        newest = {prompt: group for group, prompt in self.prompts.items()}
        return sorted(prompt for prompt, group in newest.items() if group in self.comes_again)

    def counts(self) -> dict[str, int]:
        newest = {prompt: group for group, prompt in self.prompts.items()}
        return {f"0/{prompt}": self.comes_again[newest[prompt]] for prompt in self.requeued()}

    @rule(again=st.booleans())
    def admit(self, again: bool) -> None:
        group, waiting = len(self.states), self.requeued()
        prompt = waiting[0] if again and waiting else len(set(self.prompts.values()))
        self.journal.admitted_nowait(Ticket(GroupId(group), 0), make_prompt(prompt))
        self.states[group], self.prompts[group], self.finished[group] = "running", prompt, set()

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        group, index = data.draw(st.sampled_from(self.of("running"))), data.draw(st.integers(0, 1))
        num_tokens = data.draw(st.integers(1, 9))
        self.journal.segment_nowait(GroupId(group), index, 0, 0, make_partial(num_tokens))
        if index not in self.finished[group]:
            self.partials[group, index] = num_tokens

    @precondition(lambda self: self.of("running"))
    @rule(
        data=st.data(),
        state=st.sampled_from(["ready", "ready", "ready", "failed", "filtered", "handed_back"]),
    )
    def end(self, data: st.DataObject, state: str) -> None:
        group = data.draw(st.sampled_from(self.of("running")))
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
        group = data.draw(st.sampled_from(self.of("running")))
        for index in sorted({0, 1} - self.finished[group])[:1]:
            self.journal.rollout_finished_nowait(GroupId(group), (make_trajectory(group, index),))
            self.finished[group].add(index)
            self.partials.pop((group, index), None)

    @precondition(lambda self: self.of("ready"))
    @rule(data=st.data())
    def drop_ready(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.of("ready")))
        self.journal.group_ended_nowait(GroupId(group), "handed_back", "dropped", requeued=2)
        self.states[group], self.comes_again[group] = "handed_back", 2

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        groups = data.draw(st.lists(st.sampled_from([*self.states, 1000]), min_size=1, max_size=3))
        version = data.draw(
            st.sampled_from([len(self.batches), len(self.batches), max(0, len(self.batches) - 1)])
        )
        is_replay = version < len(self.batches) and self.batches[version] == tuple(groups)
        is_next = version == len(self.batches) and len({*groups}) == len(groups)
        may = is_replay or (is_next and all(self.states.get(group) == "ready" for group in groups))
        try:
            answer = self.runner.run(self.journal.batch_taken(self.batch(version, groups)))
        except JournalError:
            assert not may
            return
        assert may
        assert answer == ("replayed" if is_replay else "taken")
        if not is_replay:
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
        self.num_lives += 1
        after = self.root / str(self.num_lives)
        shutil.copytree(self.path.parent, after)
        self.runner.run(self.journal.aclose())
        self.path = after / "journal.sqlite"
        self.journal = open_journal(self.path)

    @invariant()
    def a_resume_would_find_what_the_model_says(self) -> None:
        if not hasattr(self, "journal"):
            return
        state = self.runner.run(self.journal.read_resume(self.compacted))
        assert state.next_version == len(self.batches)
        assert [ticket.group_id for ticket, _ in state.ready] == self.of("ready")
        assert [record.ticket.group_id for record in state.running] == self.of("running")
        assert list(state.requeued.items()) == list(self.counts().items())
        assert (state.num_drawn, state.next_group_id) == (len(set(self.prompts.values())), len(self.states))
        found = {
            (record.ticket.group_id, index): len(item[1].token_ids)
            for record in state.running
            for index, item in record.partials.items()
        }
        assert found == self.partials
        assert {record.ticket.group_id: set(record.rollouts) for record in state.running} == {
            group: self.finished[group] for group in self.of("running")
        }
        for batch, groups in zip(load_batches(state), self.batches[self.compacted :], strict=True):
            assert tuple(group.group_id for group in batch.groups) == groups
            assert all(same_group(group, self.group(group.group_id)) for group in batch.groups)

    def group(self, group_id: int):  # type: ignore[no-untyped-def]
        group = make_group(group_id)
        return type(group)(
            group.group_id, make_prompt(self.prompts.get(group_id, group_id)), group.trajectories
        )

    def batch(self, version: int, groups: list[int]):  # type: ignore[no-untyped-def]
        batch = make_batch(version, *groups)
        return type(batch)(version, tuple(self.group(group) for group in groups), batch.min_version)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
