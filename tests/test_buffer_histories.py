"""Histories, waits, cancellation and filters of the buffer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from buffer_groups import (
    HandedBackLog,
    make_buffer,
    make_group,
    oldest_trained_age,
    versions_of,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from rollout_cases import virtual

from asyncrl.base.errors import TaskError, WouldWait
from asyncrl.buffer.buffer import Buffer, rewards_of
from asyncrl.messages.records import Batch, Credit, Group, GroupId, Ticket
from asyncrl.testing.virtual_time import all_blocked

ON_OVERDUE = st.sampled_from(["wait", "mask", "drop"])


class BufferHistory(RuleBasedStateMachine):
    """Admit, finish with any versions the ticket allows, fail, take (also while the step
    before runs, and with max_staleness 0 in parts), publish (late, skipping), change
    look_ahead.
    """

    num_groups: int
    num_batches: int
    max_staleness: int
    on_overdue: str

    @initialize(
        num_groups=st.integers(1, 4),
        num_batches=st.integers(1, 12),
        max_staleness=st.integers(0, 4),
        on_overdue=ON_OVERDUE,
        look_ahead=st.integers(0, 4),
    )
    def start(self, look_ahead: int, part_tokens: int = 0, **settings: Any) -> None:
        self.log = HandedBackLog()
        vars(self).update(settings)
        self.new_buffer = partial(
            make_buffer,
            **settings,
            log=self.log,
            part_tokens=part_tokens,
        )
        self.sent: list[Batch] = []
        self.buffer = self.new_buffer(look_ahead=min(look_ahead, self.max_staleness))
        self.running: dict[int, int] = {}  # group -> version at admission
        # running group that samples no more -> the newest version that it may have
        self.sampled: dict[int, int] = {}
        self.ready: dict[int, Group] = {}
        self.batches: list[Batch] = []
        self.served = self.num_issued = self.num_seen_log = 0
        self.is_early = False

    # ---- events

    @rule(count=st.integers(1, 8))
    def admit(self, count: int) -> None:
        for _ in range(count):
            try:
                ticket = self.buffer.admit_nowait()
            except WouldWait:
                return
            assert ticket.start_version == self.served
            self.running[ticket.group_id] = ticket.start_version
            self.num_issued = ticket.group_id + 1

    @rule(data=st.data(), count=st.integers(1, 6))
    def finish(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.running))):
            group_id = data.draw(st.sampled_from(sorted(self.running)))
            version = st.integers(self.running[group_id], self.newest)
            rollout = st.lists(version, min_size=1, max_size=3).map(sorted)
            self._finish(
                group_id, *data.draw(st.lists(rollout, min_size=1, max_size=2))
            )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        """A group waits only for its rewards, or retries a rollout."""
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        if group_id in self.sampled and data.draw(st.booleans()):
            del self.sampled[group_id]
            self.buffer.samples_again_nowait(group_id)
            return
        newest = self.newest
        group = None
        # Once all have ended, their tokens are known; also after a resume.
        if data.draw(st.booleans()):
            newest = data.draw(st.integers(self.running[group_id], newest))
            group = make_group(group_id, [newest])
        newest = min(newest, self.sampled.get(group_id, newest))
        self.sampled[group_id] = newest
        self.buffer.sampled_nowait(group_id, group)
        self._see_requeued()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        self.buffer.fail_nowait(group_id)
        del self.running[group_id]

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self._publish(data.draw(st.integers(self.served, self.newest)))

    @rule(data=st.data())
    def change_look_ahead(self, data: st.DataObject) -> None:
        self.buffer.rule.set_look_ahead(data.draw(st.integers(0, self.max_staleness)))

    @rule()
    def kill(self) -> None:
        """A buffer that is restored stands where the killed one stood, with its newest
        weights served.
        """
        self.begin_step()
        self._publish(len(self.batches))
        killed, self.buffer = (
            self.buffer.rule,
            self.new_buffer(look_ahead=self.buffer.rule.look_ahead),
        )
        self.sampled.clear()
        self.sent.clear()
        assert self._restore(self.buffer) == ()
        for name in (
            "next_batch",
            "num_issued",
            "_running",
            "_ready",
            "_due",
        ):
            assert getattr(self.buffer.rule, name) == getattr(killed, name), name

    @rule(
        num_groups=st.integers(1, 4),
        max_staleness=st.integers(0, 6),
        on_overdue=ON_OVERDUE,
    )
    def resume_with(self, num_groups: int, max_staleness: int, on_overdue: str) -> None:
        """Under other settings no group is lost, and batches form without a token that
        is too old.
        """
        log = HandedBackLog()
        buffer = make_buffer(
            num_groups, 1000, log, max_staleness=max_staleness, on_overdue=on_overdue
        )
        late, num_trained = self._restore(buffer), 0
        for group_id, start_version in self.running.items():
            if group_id not in late:
                buffer.finish_nowait(
                    make_group(group_id, [start_version, len(self.batches)])
                )
        while buffer.rule.num_ready >= num_groups:
            # raises WouldWait if it waits for what cannot come
            batch = buffer.take_nowait()
            assert oldest_trained_age(batch) <= max_staleness
            num_trained += num_groups
            buffer.set_served_nowait(batch.version + 1)
        num_kept = len(late) + len(log) + num_trained + buffer.rule.num_ready
        assert num_kept == len(self.running) + len(self.ready)

    def _restore(self, buffer: Buffer) -> tuple[int, ...]:
        tickets = [
            Ticket(GroupId(group_id), start) for group_id, start in self.running.items()
        ]
        ready = list(self.ready.values())
        part_groups = self.batches[-1].next_part_groups if self.batches else 0
        return buffer.restore_nowait(
            len(self.batches), self.num_issued, tickets, ready, part_groups
        )

    @property
    def newest(self) -> int:
        """The newest version that a token can have."""
        return len(self.batches) - self.is_early

    @precondition(lambda self: self.batches and len(self.batches) < self.num_batches)
    @rule()
    def take_early(self) -> None:
        """Form a batch while the step before runs: it may cost no group."""
        self.begin_step()
        if not self.buffer.rule.may_form_early:
            return
        num_requeued = len(self.log)
        try:
            batch = self.buffer.take_nowait(is_early=True)
        except WouldWait:
            return
        self.is_early = True
        assert set(batch.groups) <= {*self.ready.values()}
        prompts = {group.prompt.prompt_id for group in batch.groups}
        out = {prompt.prompt_id for prompt in self.buffer.prompts_ready()}
        assert prompts <= out, "no checkpoint forgets it"
        self._check(batch)
        assert len(self.log) == num_requeued

    @rule()
    def begin_step(self) -> None:
        if self.is_early:
            self.is_early = False
            self.buffer.begin_step_nowait(len(self.batches) - 1)

    @invariant()
    def send_parts(self) -> None:
        """Parts leave before the batch is whole, and stay in the buffer."""
        if not hasattr(self, "buffer"):
            return
        while (part := self.buffer.take_part_nowait()) is not None:
            assert part.version == len(self.batches)
            assert set(part.groups) <= {*self.ready.values()}
            self.sent.append(part)

    @precondition(lambda self: len(self.batches) < self.num_batches)
    @rule()
    def take(self) -> None:
        self.begin_step()
        try:
            batch = self.buffer.take_nowait()
        except WouldWait:
            return
        self._check(batch)

    @precondition(lambda self: len(self.batches) < self.num_batches)
    @rule(
        data=st.data(),
        youngest_first=st.booleans(),
        num_left=st.integers(1, 6),
        is_published=st.booleans(),
    )
    def go_on(
        self,
        data: st.DataObject,
        youngest_first: bool,
        num_left: int,
        is_published: bool,
    ) -> None:
        """Admit all, let most finish, take a batch, publish. Youngest first makes
        stragglers.
        """
        self.admit(100)
        order = sorted(self.running, reverse=youngest_first)
        for group_id in order[: max(0, len(order) - num_left)]:
            oldest = data.draw(st.integers(self.running[group_id], self.newest))
            newest = data.draw(st.integers(oldest, self.newest))
            self._finish(group_id, [oldest, newest], [newest])
        self.take()
        if is_published:
            self._publish(self.newest)

    def drain(self) -> None:
        """When all has finished and is published, the next batch can be taken."""
        self.begin_step()
        self._publish(len(self.batches))
        self.admit(1000)
        while self.running:
            group_id, start_version = next(iter(self.running.items()))
            self._finish(group_id, [start_version])
            self.admit(1000)
        self._check(self.buffer.take_nowait())

    def teardown(self) -> None:
        if not hasattr(self, "buffer"):
            return
        while len(self.batches) < self.num_batches:
            self.drain()
        rule = self.buffer.rule
        assert (rule.num_running, rule.num_ready) == (0, 0)

    # ---- what must hold

    @invariant()
    def nothing_is_lost_and_admission_is_conserved(self) -> None:
        if not hasattr(self, "buffer"):
            return
        rule = self.buffer.rule
        assert (rule.num_running, rule.num_ready) == (
            len(self.running),
            len(self.ready),
        )
        consumed = len(self.batches) * self.num_groups
        assert rule.admitted == consumed + len(self.running) + len(self.ready)
        most = (
            min(self.served + self.max_staleness + 1, self.num_batches)
            * self.num_groups
        )
        assert rule.admitted <= most
        if self.on_overdue == "wait":
            assert not self.log, "`wait` hands nothing back"
        if self.on_overdue == "drop":
            starts = [
                *self.running.values(),
                *(group.oldest_version for group in self.ready.values()),
            ]
            assert all(
                start + self.max_staleness >= len(self.batches) for start in starts
            )
        if self.on_overdue == "mask":
            newest = [max(versions_of(group)) for group in self.ready.values()]
            newest += [
                bound
                for group_id, bound in self.sampled.items()
                if group_id in self.running
            ]
            assert all(
                version + self.max_staleness >= len(self.batches) for version in newest
            )

    def _finish(self, group_id: int, *rollouts: list[int]) -> None:
        group = make_group(group_id, *rollouts)
        became = self.buffer.finish_nowait(group)
        del self.running[group_id]
        newest = max(versions_of(group))
        is_useless = self.on_overdue == "mask" and newest + self.max_staleness < len(
            self.batches
        )
        assert became == ("requeued" if is_useless else "ready")
        self.ready[group_id] = group
        self._see_requeued()

    def _publish(self, version: int) -> None:
        self.buffer.set_served_nowait(version)
        self.served = version

    def _check(self, batch: Batch) -> None:
        taken = [group.group_id for group in batch.groups]
        due_first = sorted(
            self.ready.values(),
            key=lambda group: (group.oldest_version, group.group_id),
        )
        assert taken == sorted(group.group_id for group in due_first[: self.num_groups])
        assert batch.version == len(self.batches)
        for group in batch.groups:
            assert self.ready.pop(group.group_id) is group
        assert oldest_trained_age(batch) <= self.max_staleness
        assert batch.min_version == max(0, batch.version - self.max_staleness)
        assert batch.mask_older == (self.on_overdue == "mask")
        self._check_parts(batch)
        self.batches.append(batch)
        self._see_requeued()

    def _check_parts(self, batch: Batch) -> None:
        """Each group is in one part: of those that were sent, or of the others."""
        while (part := self.buffer.take_part_nowait()) is not None:
            assert set(part.groups) <= {*batch.groups}
            self.sent.append(part)
        parts = [*self.sent]
        if not batch.part_groups:
            assert parts == [], "it would be trained twice"
            parts = [batch]
        assert len(parts) > 1 or parts == [batch]
        found = [group for part in parts for group in part.groups]
        assert sorted(found, key=lambda group: group.group_id) == list(batch.groups)
        sizes = {group.group_id // (batch.part_groups or 10**9) for group in found}
        assert len(parts) == len(sizes)
        if self.batches:
            assert batch.part_groups == self.batches[-1].next_part_groups
        self.sent.clear()
        if not self.is_early:
            self.buffer.begin_step_nowait(batch.version)

    def _see_requeued(self) -> None:
        for group_id, was_ready, reason in self.log[self.num_seen_log :]:
            assert reason == {"drop": "dropped", "mask": "all_masked"}[self.on_overdue]
            if was_ready:
                del self.ready[group_id]
            else:
                if self.on_overdue == "mask":
                    assert self.sampled[group_id] + self.max_staleness < len(
                        self.batches
                    ), "it samples"
                del self.running[group_id]
        self.num_seen_log = len(self.log)


class PartsHistory(BufferHistory):
    """The same with batches in parts of one, two or four groups."""

    @initialize(
        num_groups=st.integers(4, 8),
        num_batches=st.integers(2, 6),
        part_tokens=st.sampled_from([4, 8, 16]),
        on_overdue=ON_OVERDUE,
    )
    def start(self, **settings: Any) -> None:  # type: ignore[override]
        super().start(look_ahead=0, max_staleness=0, **settings)


TestPartsHistory = PartsHistory.TestCase
TestPartsHistory.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestBufferHistory = BufferHistory.TestCase
TestBufferHistory.settings = settings(
    max_examples=300, stateful_step_count=30, deadline=None
)
TestBufferHistory = pytest.mark.timeout(240)(TestBufferHistory)


def admit(buffer: Buffer, count: int) -> list[int]:
    return [buffer.admit_nowait().group_id for _ in range(count)]


def finish(buffer: Buffer, *group_ids: int, version: int = 0) -> None:
    for group_id in group_ids:
        buffer.finish_nowait(make_group(group_id, [version]))


@virtual
async def test_a_cancelled_trainer_takes_no_batch_with_it() -> None:
    buffer = make_buffer(max_staleness=0)
    admit(buffer, 2)
    waiting = asyncio.create_task(buffer.wait_batch(), name="trainer")
    await all_blocked()
    finish(buffer, 0, 1)
    waiting.cancel()  # awake already, not run yet
    await all_blocked()
    assert waiting.cancelled()
    assert (await buffer.wait_batch()).version == 0


@pytest.mark.parametrize(("on_overdue", "is_early"), [("drop", False), ("wait", True)])
@virtual
async def test_batch_forms_early_only_if_no_group_loses_its_last_use(
    on_overdue: str, *, is_early: bool
) -> None:
    """With `wait` the straggler, group 2, is in the batch that comes after."""
    buffer = make_buffer(1, max_staleness=2 + is_early, on_overdue=on_overdue)
    admit(buffer, 3)
    for version in range(2):
        finish(buffer, version)
        assert (await buffer.wait_batch()).version == version
        buffer.begin_step_nowait(version)
    buffer.set_served_nowait(1)
    admit(buffer, 1)
    finish(buffer, 3, version=1)
    forming = asyncio.create_task(buffer.wait_batch(), name="next batch")
    await asyncio.sleep(5)  # the trainer works
    assert forming.done() == is_early
    if not is_early:
        finish(buffer, 2)
        await asyncio.sleep(1)
        assert [group.group_id for group in forming.result().groups] == [2]
        assert sum(buffer.last_wait_s.values()) == 0, "the trainer has not waited"
    else:
        buffer.begin_step_nowait(2)
        buffer.idle_nowait()
        forming = asyncio.create_task(buffer.wait_batch(), name="next batch")
        await asyncio.sleep(3)
        finish(buffer, 2)
        assert [group.group_id for group in (await forming).groups] == [2]
        assert sum(buffer.last_wait_s.values()) == 3


@virtual
async def test_wait_is_split_by_its_causes() -> None:
    buffer = make_buffer(max_staleness=1)
    admit(buffer, 4)
    finish(buffer, 0, 1)
    await buffer.wait_batch()
    assert sum(buffer.last_wait_s.values()) == 0
    finish(buffer, 2)

    async def others() -> None:
        await asyncio.sleep(3)  # batch 1 waits for group 3: generation
        buffer.set_served_nowait(1)
        admit(buffer, 2)
        # now two are ready, but group 3 would be late in batch 2
        finish(buffer, 4, version=1)
        await asyncio.sleep(5)
        finish(buffer, 3)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(others(), name="others")
        batch = await buffer.wait_batch()
    assert [group.group_id for group in batch.groups] == [2, 3]
    assert buffer.last_wait_s == {
        "generation": 3,
        "rewards": 0,
        "teaching": 0,
        "stragglers": 5,
        "publishing": 0,
    }


@virtual
async def test_wait_for_sampled_groups_is_for_rewards_or_teachers() -> None:
    buffer = make_buffer(max_staleness=1)
    admit(buffer, 4)

    async def others() -> None:
        await asyncio.sleep(1)
        finish(buffer, 0)
        buffer.sampled_nowait(GroupId(1))  # 1 s of generation until here
        await asyncio.sleep(2)
        buffer.samples_again_nowait(GroupId(1))  # its reward failed, after 2 s
        await asyncio.sleep(4)
        buffer.sampled_nowait(GroupId(1))
        await asyncio.sleep(8)
        buffer.sampled_nowait(GroupId(1), has_rewards=True)
        await asyncio.sleep(16)
        buffer.sampled_nowait(GroupId(1))  # the reward of the whole group
        await asyncio.sleep(32)
        finish(buffer, 1)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(others(), name="others")
        await buffer.wait_batch()
    found = {cause: second for cause, second in buffer.last_wait_s.items() if second}
    assert found == {"generation": 5, "rewards": 42, "teaching": 16}
    assert buffer.gauges()["perf/wait_rewards_s"] == 42


def test_rewards_of_parts_count_not_their_mean() -> None:
    group = make_group(0, [0, 0], [0, 0], rewards=[0.5, 0.5])
    # one turn was better than the other
    credits = (Credit(2, 3, 0.0, 0), Credit(3, 4, 1.0, 1))
    branches = tuple(replace(branch, credits=credits) for branch in group.trajectories)
    assert rewards_of(group) == {"": {0.5}}
    assert rewards_of(replace(group, trajectories=branches)) == {"": {0.0, 1.0}}


def test_equal_rewards_are_equal_within_each_role() -> None:
    buffer = make_buffer(filter="equal_rewards")
    roles = (Credit(2, 3, 0.5, 0, "searcher"), Credit(3, 4, 1.0, 1, "main"))
    cut = (Credit(2, 3, 0.0, 0),)
    for last, expected in ((roles, "filtered"), (cut, "ready")):
        (group_id,) = admit(buffer, 1)
        group = make_group(group_id, [0, 0], [0, 0], rewards=[0.75, 0.75])
        first, second = group.trajectories
        branches = (replace(first, credits=roles), replace(second, credits=last))
        assert buffer.finish_nowait(replace(group, trajectories=branches)) == expected


def test_too_many_filtered_groups_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.buffer.buffer.MAX_FILTERED_GROUPS", 3)
    buffer = make_buffer(max_staleness=3, filter="equal_rewards")
    same, other = ([0.25, 0.25], [0.0, 1.0])
    for rewards in (same, same, other, same, same):  # not in a row
        (group_id,) = admit(buffer, 1)
        became = buffer.finish_nowait(make_group(group_id, [0], [0], rewards=rewards))
        assert became == ("filtered" if rewards is same else "ready")
    gauges = buffer.gauges()
    assert (
        gauges["rollout/filtered"],
        gauges["rollout/filtered_tokens"],
        gauges["buffer/ready"],
    ) == (
        4,
        8,
        1,
    )
    admit(buffer, 1)
    with pytest.raises(
        TaskError, match=r"3 groups in a row .*group 5, prompt p5: 0.25(.|\n)*Way out"
    ):
        buffer.finish_nowait(make_group(5, [0], [0], rewards=same))


@virtual
async def test_parts_come_as_their_groups_end() -> None:
    """Four groups a batch, in parts of two once the first batch has shown their size.
    Group 6 fails: its substitute has an id of a later part.
    """
    buffer = make_buffer(4, max_staleness=0, part_tokens=6)
    admit(buffer, 4)
    finish(buffer, 0, 1, 2, 3)
    parts = asyncio.create_task(buffer.wait_part(), name="parts")
    await all_blocked()
    assert not parts.done(), "nobody knows how large groups are"
    first = await buffer.wait_batch()
    assert (first.part_groups, first.next_part_groups) == (0, 2)
    buffer.begin_step_nowait(0)
    buffer.idle_nowait()
    buffer.set_served_nowait(1)
    admit(buffer, 4)
    finish(buffer, 5, 7, version=1)
    await all_blocked()
    assert not parts.done(), "4 and 6 still run"
    finish(buffer, 4, version=1)
    assert [group.group_id for group in (await parts).groups] == [4, 5]
    parts = asyncio.create_task(buffer.wait_part(), name="parts")
    buffer.fail_nowait(GroupId(6))
    assert [group.group_id for group in (await parts).groups] == [7]
    parts = asyncio.create_task(buffer.wait_part(), name="parts")
    assert admit(buffer, 1) == [8]
    finish(buffer, 8, version=1)
    await all_blocked()
    assert not parts.done(), "group 9 may still come"
    batch = await buffer.wait_batch()
    assert [group.group_id for group in (await parts).groups] == [8]
    assert buffer.take_part_nowait() is None, "each group of the batch is sent"
    assert len(batch.groups) == 4


@virtual
async def test_no_batch_forms_once_the_run_stops() -> None:
    buffer = make_buffer(1)
    forming = asyncio.create_task(buffer.wait_batch(), name="next batch")
    await all_blocked()
    buffer.stop_nowait()
    assert await forming is None
    admit(buffer, 1)
    finish(buffer, 0)
    assert await buffer.wait_batch() is None
    assert buffer.rule.num_ready == 1, "a resume finds it"
