"""The buffer around the staleness rule: holds the groups, lets producers and trainer wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from asyncrl.buffer.filter import GroupFilter
from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.staleness import HandedBack, StalenessRule, WaitCause
from asyncrl.config import BufferConfig
from asyncrl.errors import RoomError, WouldWait
from asyncrl.messages.records import Batch, Finished, Group, GroupId, Prompt, Ticket, WaitReport
from asyncrl.waits import waiting


@dataclass(slots=True)
class BufferStats:
    """Where the groups are, and what on_overdue cost or saved. Counts of the whole run unless the field says
    otherwise.

    Right now:
        admitted = consumed + running + ready (what failed, was filtered or handed back does not count); open:
        groups that may be admitted; next_batch, served, look_ahead: the rule's three numbers;
        oldest_running, oldest_running_start_version: the group that has run longest, None if none runs.
    Left over:
        failed: groups failed, last_failure the newest reason; filtered: groups replaced because they teach
        nothing (buffer.filter), filtered_tokens what they had sampled; dropped: handed back as too old
        (on_overdue=drop); all_masked: handed back because no token was young enough (on_overdue=mask).
    Waited, in seconds, by cause (WaitReport); num_straggler_waits: batches that waited for a straggler.
    What another choice would have changed:
        straggler_s is what `mask` and `drop` would have saved at most (they may be held up by generation a
        moment later). waited_groups, waited_tokens (`wait`): groups that finished while the next batch waited
        for groups of their deadline, and their tokens of the versions that `mask` would have had to mask
        next, had it taken the batch at once. An estimate: waiting for one group shifts all that follows.
        `drop` would have generated these groups again, whole. masked_groups, masked_tokens (`mask`): trained
        on with masked tokens; consumed_tokens: all sampled tokens trained on or masked.
    """

    admitted: int = 0
    consumed: int = 0
    running: int = 0
    ready: int = 0
    open: int = 0
    next_batch: int = 0
    served: int = 0
    look_ahead: int = 0
    oldest_running: GroupId | None = None
    oldest_running_start_version: int | None = None
    failed: int = 0
    last_failure: str = ""
    filtered: int = 0
    filtered_tokens: int = 0
    dropped: int = 0
    all_masked: int = 0
    generation_s: float = 0.0
    straggler_s: float = 0.0
    publishing_s: float = 0.0
    num_straggler_waits: int = 0
    waited_groups: int = 0
    waited_tokens: int = 0
    masked_groups: int = 0
    masked_tokens: int = 0
    consumed_tokens: int = 0


class WaitMeter:
    """Seconds waited so far, by cause. It is given the time and reads no clock.

    Life: opened with the time and the cause at the start of a wait; each change closes a stretch of one
    cause; None is no wait.
    """

    def __init__(self, now_s: float, cause: WaitCause | None) -> None:
        self._since_s, self._cause = now_s, cause
        self._seconds: dict[WaitCause, float] = {"generation": 0.0, "stragglers": 0.0, "publishing": 0.0}

    def change(self, now_s: float, cause: WaitCause | None) -> None:
        """From `now_s` on the wait is for `cause`."""
        if self._cause is not None:
            self._seconds[self._cause] += now_s - self._since_s
        self._since_s, self._cause = now_s, cause

    def report(self) -> WaitReport:
        """The stretches closed so far."""
        return WaitReport(**{f"{cause}_s": seconds for cause, seconds in self._seconds.items()})


OnHandedBack = Callable[[GroupId, Group | None, str], None]
"""(group_id, the group if it was ready, None if it runs and must stop, "dropped" or "all_masked")."""


class Buffer:
    """Groups between admission and training.

    Life:       admitted -> running -> ready -> in a batch; or failed, filtered, or handed back through
                `on_handed_back`, and the place is free.
    Waits:      producers sleep in wait_open, woken when a version is served, look_ahead grows, or a group
                fails, is filtered or handed back; the trainer sleeps in wait_batch, woken by the
                finish_nowait that completes a batch. Both may be cancelled: what is given is given in one
                step without a sleep, so nothing is lost. After the last batch wait_open sleeps until
                cancelled.
    Invariant:  no token with a loss weight in a taken batch is older than max_staleness.
                StalenessRule.take_nowait guarantees it (`mask`: it guarantees the batch's min_version and
                mask_older, which the trainer honours).
    Cost:       O(log n) an event. A waiter of wait_open is woken at each opening, so let few wait: one loop
                that starts groups.
    """

    name = "buffer"

    def __init__(
        self, config: BufferConfig, *, num_groups: int, num_batches: int, on_handed_back: OnHandedBack
    ) -> None:
        self.config, self._on_handed_back = config, on_handed_back
        self._auto: LookAhead | None = None
        if config.look_ahead == "auto":
            self._auto = LookAhead(config.max_staleness)
            look_ahead = self._auto.current
        else:
            look_ahead = config.look_ahead
        self._rule = StalenessRule(
            num_groups=num_groups,
            num_batches=num_batches,
            max_staleness=config.max_staleness,
            on_overdue=config.on_overdue,
            look_ahead=look_ahead,
        )
        self._filter = GroupFilter(config.filter, max_in_a_row=config.max_filtered_groups)
        self._ready: dict[GroupId, Group] = {}
        self._opened, self._formed = asyncio.Event(), asyncio.Event()
        self._meters: list[WaitMeter] = []  # of those in wait_batch
        self.last_wait = WaitReport()
        """How the seconds of the last wait_batch split by cause."""
        self._last_take_s: float | None = None
        self._counts = BufferStats()

    def __repr__(self) -> str:
        rule = self._rule
        return (
            f"<Buffer batch {rule.next_batch}/{rule.num_batches}, v{rule.served} served, {rule.num_running} "
            f"running, {rule.num_ready} ready of {rule.num_groups}, {rule.num_open} open, look_ahead "
            f"{rule.look_ahead}/{rule.max_staleness}>"
        )

    def restore_nowait(
        self, version: int, next_group_id: int, running: Sequence[Ticket], ready: Sequence[Group]
    ) -> tuple[GroupId, ...]:
        """Before anything else: go on where a killed run stood, with batch `version` next and its weights
        served.

        Returns the groups that are not taken back, for the settings have changed and no batch can use them
        any more. `on_handed_back` is not called for them.
        """
        starts = {ticket.group_id: ticket.start_version for ticket in running}
        versions = {group.group_id: _versions(group) for group in ready}
        late = self._rule.restore_nowait(version, next_group_id, starts, versions)
        self._ready.update((group.group_id, group) for group in ready if group.group_id not in late)
        self._changed()
        return late

    # ---- producers

    async def wait_open(self) -> None:
        """Return as soon as admit_nowait gives leave. Sleeps for ever once the run's groups are all out."""
        with waiting(self._what_opens, on="a version served, or a group failed or handed back"):
            while not self._rule.num_open:
                await self._opened.wait()

    def admit_nowait(self) -> Ticket:
        """Leave to start one group. Raises WouldWait while the rule gives none."""
        ticket = self._rule.admit_nowait()
        self._changed()
        return ticket

    def finish_nowait(self, group: Group) -> Finished:
        """The group has all its rollouts: it is ready, or buffer.filter replaces it.

        Raises RoomError if it is not running, has a token older than its ticket allows or newer than any
        weights, or a trajectory without a sampled token; TaskError with the last of
        buffer.max_filtered_groups in a row. If `mask` leaves nothing of it, it goes straight to
        `on_handed_back`; a filtered group does not, for its prompt is not sampled again.
        """
        oldest, newest = _versions(group)
        self._rule.check_tokens(group.group_id, oldest=oldest, newest=newest)
        if self._filter.takes_nowait(group):
            self._rule.fail_nowait(group.group_id)
            self._counts.filtered += 1
            self._counts.filtered_tokens += _num_tokens(group)
            self._changed()
            return "filtered"
        self._note_waited_for(group)
        handed_back = self._rule.finish_nowait(group.group_id, oldest=oldest, newest=newest)
        self._ready[group.group_id] = group
        self._changed()
        if handed_back is not None:
            self._hand_back(handed_back)
            return "handed_back"
        return "ready"

    def fail_nowait(self, group_id: GroupId, reason: str) -> None:
        """The group failed: its admission is handed back. Raises RoomError if it is not running."""
        self._rule.fail_nowait(group_id)
        self._counts.failed += 1
        self._counts.last_failure = reason
        self._changed()

    # ---- weight sync

    def set_served_nowait(self, version: int) -> None:
        """Every engine serves `version` or a newer one from now on. Versions may be skipped; raises RoomError
        if they go back.
        """
        self._rule.set_served_nowait(version)
        self._changed()

    # ---- trainer

    async def wait_batch(self) -> Batch:
        """Return the next batch as soon as the rule allows it; afterwards `last_wait` says what was waited
        for. Raises RoomError after the last batch of the run.
        """
        clock = asyncio.get_running_loop().time
        num_spare = self._rule.num_ready // self._rule.num_groups - 1
        meter = WaitMeter(clock(), self._rule.waits_for)
        self._meters.append(meter)
        try:
            with waiting(self._what_forms, on="the rollout that completes a group", who="train loop"):
                while True:
                    try:
                        batch = self.take_nowait()
                        break
                    except WouldWait:
                        await self._formed.wait()
        finally:
            self._meters.remove(meter)
        self.last_wait = wait = meter.report()
        self._counts.generation_s += wait.generation_s
        self._counts.straggler_s += wait.stragglers_s
        self._counts.publishing_s += wait.publishing_s
        self._counts.num_straggler_waits += wait.stragglers_s > 0
        self._adapt(clock(), num_spare)
        return batch

    def take_nowait(self) -> Batch:
        """The next batch. Raises WouldWait while the rule allows none, and RoomError after the last one."""
        rule = self._rule
        choice = rule.take_nowait()
        batch = Batch(
            choice.version,
            tuple(self._ready.pop(group_id) for group_id in choice.group_ids),
            min_version=max(0, choice.version - rule.max_staleness),
            mask_older=rule.overdue.masks,
        )
        for group in batch.groups:
            masked = _num_tokens(group, before_version=batch.min_version)
            self._counts.masked_tokens += masked
            self._counts.masked_groups += masked > 0
            self._counts.consumed_tokens += _num_tokens(group)
        self._changed()
        for handed_back in choice.handed_back:
            self._hand_back(handed_back)
        return batch

    # ---- what is asked

    @property
    def next_group_id(self) -> int:
        """Number of the group that is admitted next."""
        return self._rule.num_issued

    def prompts_ready(self) -> list[Prompt]:
        """The prompts whose groups are ready."""
        return [group.prompt for group in self._ready.values()]

    def num_open(self) -> int:
        """How many more groups could be admitted right now."""
        return self._rule.num_open

    def stats(self) -> BufferStats:
        """Where the groups are, and what overdue ones cost."""
        rule = self._rule
        oldest_running, start_version = rule.oldest_running or (None, None)
        return replace(
            self._counts,
            admitted=rule.admitted,
            consumed=rule.consumed,
            running=rule.num_running,
            ready=rule.num_ready,
            open=rule.num_open,
            next_batch=rule.next_batch,
            served=rule.served,
            look_ahead=rule.look_ahead,
            oldest_running=oldest_running,
            oldest_running_start_version=start_version,
        )

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py."""
        rule, counts, wait = self._rule, self._counts, self.last_wait
        handed_back = counts.dropped + counts.all_masked
        return {
            "buffer/ready": rule.num_ready,
            "buffer/running": rule.num_running,
            "buffer/look_ahead": rule.look_ahead,
            "buffer/served": rule.served,
            "buffer/next_batch": rule.next_batch,
            "buffer/admitted": rule.admitted + counts.failed + counts.filtered + handed_back,
            "rollout/filtered": counts.filtered,
            "rollout/filtered_tokens": counts.filtered_tokens,
            "perf/wait_s": wait.total_s,
            "perf/wait_generation_s": wait.generation_s,
            "perf/wait_stragglers_s": wait.stragglers_s,
            "perf/wait_publishing_s": wait.publishing_s,
        }

    # ---- how

    def _what_opens(self) -> str:
        rule = self._rule
        return (
            f"leave to start a group ({rule.num_ready} ready, {rule.num_running} run, batch "
            f"{rule.next_batch} "
            f"is next, version {rule.served} is served)"
        )

    def _what_forms(self) -> str:
        """What the next batch waits for, by the causes of WaitReport."""
        rule, cause = self._rule, self._rule.waits_for
        batch = (
            f"batch {rule.next_batch}: {rule.num_ready} of {rule.num_groups} groups are ready, "
            f"{rule.num_running} run"
        )
        if cause == "publishing":
            return f"publishing, for no group may start before a newer version is served ({batch})"
        if rule.oldest_running is not None:
            group_id, start_version = rule.oldest_running
            batch += f"; the oldest is group g{group_id}, start_version {start_version}"
        return (
            f"{'stragglers that would become too old' if cause == 'stragglers' else 'generation'} ({batch})"
        )

    def _changed(self) -> None:
        """The rule's state has changed: note what the trainer waits for, wake the waiters it concerns."""
        cause = self._rule.waits_for
        if self._meters:
            now_s = asyncio.get_running_loop().time()
            for meter in self._meters:
                meter.change(now_s, cause)
        if cause is None:
            self._formed.set()
            self._formed = asyncio.Event()
        if self._rule.num_open:
            self._opened.set()
            self._opened = asyncio.Event()

    def _hand_back(self, handed_back: HandedBack) -> None:
        group = self._ready.pop(handed_back.group_id, None)
        if handed_back.reason == "dropped":
            self._counts.dropped += 1
        else:
            self._counts.all_masked += 1
        self._on_handed_back(handed_back.group_id, group, handed_back.reason)

    def _adapt(self, now_s: float, num_spare: int) -> None:
        if self._auto is not None and self._last_take_s is not None:
            interval_s = now_s - self._last_take_s
            self._rule.set_look_ahead(self._auto.batch_taken(interval_s, self.last_wait, num_spare))
            self._changed()
        self._last_take_s = now_s

    def _note_waited_for(self, group: Group) -> None:
        if self._meters and self._rule.waits_for == "stragglers":
            danger = self._rule.first_in_danger()
            if danger is not None and self._rule.deadline_of(group.group_id) <= danger:
                self._counts.waited_groups += 1
                self._counts.waited_tokens += _num_tokens(
                    group, before_version=danger - self._rule.max_staleness + 1
                )


def _versions(group: Group) -> tuple[int, int]:
    """(oldest, newest) version of any sampled token of the group."""
    for trajectory in group.trajectories:
        if not trajectory.version_spans:
            raise RoomError(
                "buffer",
                f"group {group.group_id}, sample {trajectory.sample_index}, has no sampled token",
                rule="every trajectory carries version_spans over its sampled tokens, at least one",
            )
    versions = [span.version for trajectory in group.trajectories for span in trajectory.version_spans]
    return min(versions), max(versions)


def _num_tokens(group: Group, *, before_version: int | None = None) -> int:
    """Sampled tokens of the group, all of them or those older than a version."""
    return sum(
        span.end - span.start
        for trajectory in group.trajectories
        for span in trajectory.version_spans
        if before_version is None or span.version < before_version
    )
