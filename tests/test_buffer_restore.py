"""A buffer that is restored goes on exactly as the one that was killed would have; under other settings it
gives up what is too old.
"""

from __future__ import annotations

import random

import pytest
from buffer_groups import make_group, oldest_trained_age

from asyncrl.buffer.buffer import Buffer
from asyncrl.config import BufferConfig
from asyncrl.errors import WouldWait
from asyncrl.messages.records import Group, GroupId, Ticket


class Story:
    """A buffer and what its producers know of it; every event is drawn by `seed`, so that two stories can
    have the same one.
    """

    def __init__(self, max_staleness: int, on_overdue: str) -> None:
        self.config = BufferConfig(
            max_staleness=max_staleness, on_overdue=on_overdue, look_ahead=max_staleness
        )
        self.tickets: dict[GroupId, Ticket] = {}
        self.ready: dict[GroupId, Group] = {}
        self.num_issued = self.version = self.served = 0
        self.log: list[object] = []
        self.buffer = self.new_buffer()

    def new_buffer(self) -> Buffer:
        return Buffer(self.config, num_groups=2, num_batches=1000, on_handed_back=self.handed_back)

    def handed_back(self, group_id: GroupId, group: Group | None, reason: str) -> None:
        self.tickets.pop(group_id, None)
        self.ready.pop(group_id, None)
        self.log.append(("handed back", group_id, group is None, reason))

    def kill_and_restore(self) -> None:
        self.buffer = self.new_buffer()
        late = self.buffer.restore_nowait(
            self.version, self.num_issued, list(self.tickets.values()), list(self.ready.values())
        )
        assert late == (), "under the settings of the killed run everything is of use"

    def event(self, draw: random.Random) -> None:
        match draw.choice(["admit", "finish", "finish", "fail", "take"]):
            case "admit":
                if self.buffer.rule.num_open:
                    ticket = self.buffer.admit_nowait()
                    self.tickets[ticket.group_id] = ticket
                    self.num_issued = ticket.group_id + 1
                    self.log.append(ticket)
            case "finish" if self.tickets:
                group_id = draw.choice(sorted(self.tickets))
                group = make_group(group_id, [self.tickets[group_id].start_version, self.served])
                self.ready[group_id] = group
                self.log.append((self.buffer.finish_nowait(group), group_id))
                self.tickets.pop(group_id, None)
            case "fail" if self.tickets and draw.random() < 0.2:
                group_id = draw.choice(sorted(self.tickets))
                del self.tickets[group_id]
                self.log.append((self.buffer.fail_nowait(group_id), group_id))
            case "take":
                try:
                    batch = self.buffer.take_nowait()
                except WouldWait:
                    return
                self.log.append(
                    (batch.version, [group.group_id for group in batch.groups], batch.min_version)
                )
                for group in batch.groups:
                    del self.ready[group.group_id]
                self.version = self.served = batch.version + 1
                self.buffer.set_served_nowait(self.served)


@pytest.mark.parametrize("on_overdue", ["wait", "mask", "drop"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_restored_buffer_decides_what_the_killed_one_would_have(
    max_staleness: int, on_overdue: str
) -> None:
    for seed in range(20):
        whole, killed = Story(max_staleness, on_overdue), Story(max_staleness, on_overdue)
        kills = random.Random(seed + 1000)
        for story in (whole, killed):
            draw = random.Random(seed)
            for _ in range(300):
                story.event(draw)
                if story is killed and kills.random() < 0.1:
                    story.kill_and_restore()
        assert killed.log == whole.log
        assert whole.version > 10


def resume(
    story: Story, *, max_staleness: int, num_groups: int, on_overdue: str
) -> tuple[set[GroupId], set[GroupId], set[GroupId]]:
    """Restore it under these settings and let all that ran finish, with no new group: (given up at once,
    handed back later, trained on).

    Fails if the buffer stands still while it has groups for a batch, or lets a token have weight that is too
    old.
    """
    handed_back: set[GroupId] = set()
    buffer = Buffer(
        BufferConfig(max_staleness=max_staleness, on_overdue=on_overdue, look_ahead=max_staleness),
        num_groups=num_groups,
        num_batches=1000,
        on_handed_back=lambda group_id, *_: handed_back.add(group_id),
    )
    late = set(
        buffer.restore_nowait(
            story.version, story.num_issued, list(story.tickets.values()), list(story.ready.values())
        )
    )
    for group_id, ticket in story.tickets.items():
        if group_id not in late:
            buffer.finish_nowait(make_group(group_id, [ticket.start_version, story.version]))
    trained: set[GroupId] = set()
    while buffer.rule.num_ready >= num_groups:
        assert buffer.rule.num_running == 0
        batch = buffer.take_nowait()  # raises WouldWait if it waits for what cannot come
        assert batch.min_version == max(0, batch.version - max_staleness)
        assert oldest_trained_age(batch) <= max_staleness
        trained |= {group.group_id for group in batch.groups}
        buffer.set_served_nowait(batch.version + 1)
    assert len(late) + len(handed_back) + len(trained) + buffer.rule.num_ready == len(story.tickets) + len(
        story.ready
    )
    assert len(late | handed_back | trained) == len(late) + len(handed_back) + len(trained)
    return late, handed_back, trained


@pytest.mark.parametrize("on_overdue", ["wait", "mask", "drop"])
@pytest.mark.parametrize("before", ["wait", "mask", "drop"])
def test_whatever_was_changed_batches_form_with_no_token_that_is_too_old_and_no_group_is_lost(
    before: str, on_overdue: str
) -> None:
    num_late = 0
    for seed in range(60):
        draw = random.Random(seed)
        story = Story(draw.choice([0, 1, 4]), before)
        for _ in range(draw.randrange(50, 150)):
            story.event(draw)
        late, _, _ = resume(
            story,
            max_staleness=draw.choice([0, 1, 2, 6]),
            num_groups=draw.choice([1, 2, 3]),
            on_overdue=on_overdue,
        )
        num_late += len(late)
    assert num_late > 0
