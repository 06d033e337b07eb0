"""PROVISIONAL by the lead, for integration only: to be replaced as a whole by the buffer room's own file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.buffer.rule import StalenessRule
from asyncrl.buffer.waiting import WaitMeter
from asyncrl.config import BufferConfig
from asyncrl.errors import WouldWait
from asyncrl.types import Batch, Group, GroupId, Ticket, WaitReport


@dataclass(frozen=True)
class BufferStats:
    ready: int
    running: int
    look_ahead: int
    served: int


class Buffer:
    def __init__(self, config: BufferConfig, *, num_groups: int, num_batches: int, on_handed_back: Callable[[GroupId, Group | None, str], None]) -> None:
        d = min(2, config.max_staleness) if config.look_ahead == "auto" else config.look_ahead
        self.config = config
        self.rule = StalenessRule(num_groups=num_groups, num_batches=num_batches, max_staleness=config.max_staleness, on_overdue=config.on_overdue, look_ahead=d)
        self.groups: dict[GroupId, Group] = {}
        self.on = on_handed_back
        self.last_wait = WaitReport()
        self.event = asyncio.Event()
        self.meter: WaitMeter | None = None

    def _change(self) -> None:
        if self.meter:
            self.meter.change(asyncio.get_running_loop().time(), self.rule.waits_for)
        self.event.set()
        self.event = asyncio.Event()

    async def wait_admit(self) -> Ticket:
        while True:
            try:
                t = self.rule.admit_nowait()
                self._change()
                return t
            except WouldWait:
                await self.event.wait()

    def finish_nowait(self, group: Group) -> bool:
        if self.rule.was_stopped(group.group_id):
            return False
        versions = [s.version for t in group.trajectories for s in t.version_spans]
        back = self.rule.finish_nowait(group.group_id, oldest=min(versions), newest=max(versions))
        if back:
            self.on(group.group_id, group, back.reason)
        else:
            self.groups[group.group_id] = group
        self._change()
        return True

    def fail_nowait(self, group_id: GroupId, reason: str) -> bool:
        if self.rule.was_stopped(group_id):
            return False
        self.rule.fail_nowait(group_id)
        self._change()
        return True

    def set_served_nowait(self, version: int) -> None:
        self.rule.set_served_nowait(version)
        self._change()

    async def wait_batch(self) -> Batch:
        clock = asyncio.get_running_loop().time
        self.meter = WaitMeter(clock(), self.rule.waits_for)
        while True:
            try:
                choice = self.rule.take_nowait()
                break
            except WouldWait:
                await self.event.wait()
        self.meter.change(clock(), None)
        self.last_wait = self.meter.report()
        self.meter = None
        groups = tuple(self.groups.pop(g) for g in choice.group_ids)
        for back in choice.handed_back:
            self.on(back.group_id, self.groups.pop(back.group_id, None), back.reason)
        self._change()
        return Batch(choice.version, groups, max(0, choice.version - self.config.max_staleness), self.config.on_overdue == "mask")

    def stats(self) -> BufferStats:
        return BufferStats(self.rule.num_ready, self.rule.num_running, self.rule.look_ahead, self.rule.served)
