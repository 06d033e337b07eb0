"""A buffer that is restored goes on exactly as the one that was killed would have."""

from __future__ import annotations

import random

import pytest
from buffer_groups import make_group

from asyncrl.buffer.buffer import Buffer
from asyncrl.config import BufferConfig
from asyncrl.errors import WouldWait
from asyncrl.types import Group, GroupId, Ticket


class Story:
    """A buffer and what its producers know of it; every event is drawn by `seed`, so that two stories can have the same one."""

    def __init__(self, max_staleness: int, on_overdue: str) -> None:
        self.config = BufferConfig(max_staleness=max_staleness, on_overdue=on_overdue, look_ahead=max_staleness)
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
        self.buffer.restore_nowait(self.version, self.num_issued, list(self.tickets.values()), list(self.ready.values()))

    def event(self, draw: random.Random) -> None:
        match draw.choice(["admit", "finish", "finish", "fail", "take"]):
            case "admit":
                if self.buffer.num_open():
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
                self.log.append((self.buffer.fail_nowait(group_id, "planted"), group_id))
            case "take":
                try:
                    batch = self.buffer.take_nowait()
                except WouldWait:
                    return
                self.log.append((batch.version, [group.group_id for group in batch.groups], batch.min_version))
                for group in batch.groups:
                    del self.ready[group.group_id]
                self.version = self.served = batch.version + 1
                self.buffer.set_served_nowait(self.served)


@pytest.mark.parametrize("on_overdue", ["wait", "mask", "drop"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_restored_buffer_decides_what_the_killed_one_would_have(max_staleness: int, on_overdue: str) -> None:
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
