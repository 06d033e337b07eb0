"""The staleness rule, a pure state machine over versions and counts."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from asyncrl.base.errors import WouldWait
from asyncrl.config.rollout_buffer import OnOverdue
from asyncrl.messages.records import GroupId, Ticket

WaitCause = Literal["generation", "stragglers", "publishing"]
"""generation: too few ready groups. stragglers: taking the ready groups would have made a running group too
old (on_overdue=wait). publishing: admission waits for a newer version to be served.
"""
WAIT_CAUSES: tuple[WaitCause, ...] = get_args(WaitCause)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Groups in order of admission, and groups that no later batch can use."""

    version: int
    group_ids: tuple[GroupId, ...]
    requeued: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class OverduePolicy:
    """The fate of a group that the next batch would make too old.

    `waits`: the batch waits for it. `masks`: it is trained on, without tokens older than the batch's
    min_version. Neither: it is generated again.
    """

    waits: bool = False
    masks: bool = False

    @property
    def reason(self) -> Literal["dropped", "all_masked"]:
        return "all_masked" if self.masks else "dropped"

    def last_use(self, deadline: int, newest_deadline: int | None) -> int | None:
        """Return the last batch that can use a group whose oldest token has `deadline`; None: any.

        `newest_deadline`: of its newest token, None while it samples.
        """
        return newest_deadline if self.masks else deadline


POLICIES: dict[OnOverdue, OverduePolicy] = {
    "wait": OverduePolicy(waits=True),
    "mask": OverduePolicy(masks=True),
    "drop": OverduePolicy(),
}


class StalenessRule:
    """Decide which groups may start, which form the next batch, and which are too old.

    A deadline is the last batch that may take a group whole: the version of its start (later: of its oldest
    token) + max_staleness.

    Invariants: (1) admitted = consumed + running + ready <= min((served + look_ahead + 1) * num_groups, all
    of the run) at each admission. (2) `wait`: sorted by deadline, item j in flight has its turn in batch
    next_batch + j // num_groups, no later than its deadline. admit_nowait cannot break it, because of (1) and
    look_ahead <= max_staleness; take_nowait checks all remaining groups. (3) no group in flight has its last
    use (OverduePolicy) before next_batch.

    Cost: O(log n) an event and O(max_staleness) a decision, because deadlines are counted.
    """

    def __init__(
        self, *, num_groups: int, num_batches: int, max_staleness: int, on_overdue: OnOverdue, look_ahead: int
    ) -> None:
        self.num_groups, self.num_batches, self.max_staleness = num_groups, num_batches, max_staleness
        self.overdue: OverduePolicy = POLICIES[on_overdue]
        self.next_batch = 0
        self.served = 0
        self.set_look_ahead(look_ahead)
        self.num_issued = 0
        self._running: dict[GroupId, int] = {}  # deadline, in order of admission
        self._ready: dict[GroupId, int] = {}  # -> deadline
        self._ready_order: list[tuple[int, GroupId]] = []  # heap; entries no longer in _ready are skipped
        self._running_due: Counter[int] = Counter()
        self._ready_due: Counter[int] = Counter()
        self._useless_after: dict[int, set[GroupId]] = {}  # last batch that can use them -> groups
        self._last_use: dict[GroupId, int] = {}  # the same by group

    # ---- queries

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def admitted(self) -> int:
        return self.next_batch * self.num_groups + self.num_running + self.num_ready

    @property
    def num_open(self) -> int:
        limit = min(self.served + self.look_ahead + 1, self.num_batches) * self.num_groups
        return max(0, limit - self.admitted)

    @property
    def waits_for(self) -> WaitCause | None:
        """Return the cause of the wait for the next batch, if any."""
        if self.num_ready >= self.num_groups:
            return "stragglers" if self.overdue.waits and self._is_in_danger() else None
        if self.num_ready + self.num_running < self.num_groups and self.num_open == 0:
            return "publishing"
        return "generation"

    @property
    def lacks_groups(self) -> bool:
        """Return whether a larger look-ahead would help the next batch."""
        return self.num_open == 0 and self.waits_for in ("generation", "publishing")

    def _is_in_danger(self) -> bool:
        """Return whether taking the next batch could break a deadline: all remaining groups with deadline <=
        D must fit into the batches next_batch + 1 .. D.
        """
        num_due = num_taken = 0
        for deadline in sorted(self._running_due.keys() | self._ready_due.keys()):
            num_due += self._running_due[deadline] + self._ready_due[deadline]
            num_taken = min(self.num_groups, num_taken + self._ready_due[deadline])
            if num_due - num_taken > (deadline - self.next_batch) * self.num_groups:
                return True
        return False

    # ---- what happens

    def restore_nowait(
        self,
        version: int,
        next_group_id: int,
        running: Mapping[GroupId, int],
        ready: Mapping[GroupId, tuple[int, int]],
    ) -> tuple[GroupId, ...]:
        """Restore the state of a killed run; batch `version` is next.

        `running`: id -> start version, `ready`: id -> (oldest, newest). Returns and forgets the groups that
        no batch can use under changed settings.
        """
        self.next_batch = self.served = version
        self.num_issued = next_group_id
        deadlines = {group_id: start + self.max_staleness for group_id, start in running.items()}
        deadlines |= {group_id: oldest + self.max_staleness for group_id, (oldest, _) in ready.items()}
        late = self._late(deadlines, ready)
        for group_id in sorted(deadlines.keys() - late):
            self._add_running(group_id, deadlines[group_id])
        for group_id in ready.keys() - late:
            oldest, newest = ready[group_id]
            self.finish_nowait(group_id, oldest=oldest, newest=newest)
        return tuple(sorted(late))

    def set_look_ahead(self, look_ahead: int) -> None:
        """Started groups stay."""
        assert 0 <= look_ahead <= self.max_staleness, f"look_ahead {look_ahead} is beyond max_staleness"
        self.look_ahead = look_ahead

    def set_served_nowait(self, version: int) -> None:
        assert self.served <= version <= self.next_batch, (
            f"version {version} is served after {self.served}, with {self.next_batch} batches taken"
        )
        self.served = version

    def admit_nowait(self) -> Ticket:
        if self.num_open == 0:
            raise WouldWait(f"{self.admitted} groups are admitted at version {self.served}")
        group_id = GroupId(self.num_issued)
        self.num_issued += 1
        self._add_running(group_id, self.served + self.max_staleness)
        return Ticket(group_id, start_version=self.served)

    def sampled_nowait(self, group_id: GroupId) -> None:
        """Mark a running group as fully sampled. With `mask`, a batch too late for version next_batch then
        drops it.
        """
        newest_deadline = self.next_batch + self.max_staleness
        self._note_last_use(group_id, self.overdue.last_use(self._running[group_id], newest_deadline))

    def samples_again_nowait(self, group_id: GroupId) -> None:
        self._note_last_use(group_id, self.overdue.last_use(self._running[group_id], None))

    def finish_nowait(self, group_id: GroupId, *, oldest: int, newest: int) -> bool:
        """Mark a running group as ready; `oldest` and `newest` are the versions of its tokens.

        Returns True, and forgets it, if no batch can use it any more.
        """
        deadline = oldest + self.max_staleness
        assert self._running[group_id] <= deadline, f"group {group_id} has a token older than its ticket"
        assert newest <= self.next_batch, f"group {group_id} has a token of version {newest}, not made yet"
        self.fail_nowait(group_id)
        last_use = self.overdue.last_use(deadline, newest + self.max_staleness)
        if last_use is not None and last_use < self.next_batch:
            return True
        self._ready[group_id] = deadline
        self._ready_due[deadline] += 1
        heapq.heappush(self._ready_order, (deadline, group_id))
        self._note_last_use(group_id, last_use)
        return False

    def fail_nowait(self, group_id: GroupId) -> None:
        deadline = self._running.pop(group_id)
        _count_down(self._running_due, deadline)
        self._note_last_use(group_id, None)

    def take_nowait(self) -> BatchChoice:
        """Take the num_groups ready groups of earliest deadline, then lowest id. Raises WouldWait if
        `waits_for` has a cause.
        """
        assert self.next_batch < self.num_batches, f"all {self.num_batches} batches were taken"
        if cause := self.waits_for:
            raise WouldWait(f"batch {self.next_batch} waits for {cause}")
        version = self.next_batch
        group_ids = tuple(sorted(self._pop_earliest() for _ in range(self.num_groups)))
        self.next_batch += 1
        return BatchChoice(version, group_ids, tuple(self._requeue(version)))

    # ---- how

    def _late(
        self, deadlines: Mapping[GroupId, int], ready: Mapping[GroupId, tuple[int, int]]
    ) -> set[GroupId]:
        """Return the fewest groups to drop so that invariants (2) and (3) hold."""
        late: set[GroupId] = set()
        num_kept = 0
        for deadline, is_running, group_id in sorted((deadlines[i], i not in ready, i) for i in deadlines):
            newest_deadline = None if is_running else ready[group_id][1] + self.max_staleness
            last_use = self.overdue.last_use(deadline, newest_deadline)
            num_batches_before = num_kept // self.num_groups if self.overdue.waits else 0
            if last_use is not None and self.next_batch + num_batches_before > last_use:
                late.add(group_id)
            else:
                num_kept += 1
        return late

    def _add_running(self, group_id: GroupId, deadline: int) -> None:
        self._running[group_id] = deadline
        self._running_due[deadline] += 1
        self._note_last_use(group_id, self.overdue.last_use(deadline, None))

    def _note_last_use(self, group_id: GroupId, last_use: int | None) -> None:
        before = self._last_use.pop(group_id, None)
        if before is not None:
            self._useless_after[before].discard(group_id)
        if last_use is not None:
            self._last_use[group_id] = last_use
            self._useless_after.setdefault(last_use, set()).add(group_id)

    def _pop_earliest(self) -> GroupId:
        while True:
            _, group_id = heapq.heappop(self._ready_order)
            if group_id in self._ready:
                _count_down(self._ready_due, self._ready.pop(group_id))
                self._note_last_use(group_id, None)
                return group_id

    def _requeue(self, version: int) -> list[GroupId]:
        requeued = []
        for group_id in sorted(self._useless_after.pop(version, ())):
            if group_id in self._ready:
                _count_down(self._ready_due, self._ready.pop(group_id))
            else:
                _count_down(self._running_due, self._running.pop(group_id))
            del self._last_use[group_id]
            requeued.append(group_id)
        return requeued


def _count_down(counts: Counter[int], deadline: int) -> None:
    counts[deadline] -= 1
    if not counts[deadline]:
        del counts[deadline]
