"""The staleness rule, a pure state machine over versions and counts."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal, get_args

from asyncrl.base.errors import WouldWait
from asyncrl.config.buffer_config import OnOverdue
from asyncrl.messages.records import GroupId, Ticket

WaitCause = Literal["generation", "rewards", "teaching", "stragglers", "publishing"]
"""generation: too few ready groups. rewards: the groups that only wait for their
rewards would fill the batch. teaching: the groups with rewards that only wait to be
read by another model would fill it. stragglers: taking the ready groups would have made
a running group too old (on_overdue=wait). publishing: admission waits for a newer
version to be served.
"""
WAIT_CAUSES: tuple[WaitCause, ...] = get_args(WaitCause)


class StalenessRule:
    """Decide which groups may start, which form the next batch, and which are too old.

    A deadline is the last batch that may take a group whole: the version of its start
    (later: of its oldest token) + max_staleness. A group that the next batch would make
    too old is waited for, or trained on without its old tokens (masks), or else
    generated again, by on_overdue.

    Invariants: (1) admitted = consumed + running + ready <= min((served + look_ahead +
    1) * num_groups, all of the run) at each admission. (2) `wait`: sorted by deadline,
    item j in flight is due in batch next_batch + j // num_groups, no later than
    its deadline. admit_nowait cannot break it, because of (1) and look_ahead <=
    max_staleness; take_nowait checks all remaining groups. (3) no group in flight has
    its last use before next_batch.

    Cost: O(1) an event and O(max_staleness) a decision, because deadlines are counted;
    O(n) a batch, and `may_form_early`, which is asked while a trainer wants a batch.

    Example: batches of two groups, and no token older than one version.
        >>> rule = StalenessRule(
        ...     num_groups=2, num_batches=9, max_staleness=1, on_overdue="mask", look_ahead=1
        ... )
        >>> [rule.admit_nowait().group_id for _ in range(4)]  # two batches: (served + look_ahead + 1) * 2
        [0, 1, 2, 3]
        >>> rule.num_open  # group 4 would be consumed by batch 2, too old
        0
        >>> [rule.finish_nowait(group_id, oldest=0, newest=0) for group_id in (2, 0)]
        [False, False]
        >>> rule.take_nowait()  # batch 0 in order of admission, and the groups that are too old now
        ((0, 2), ())
        >>> rule.set_served_nowait(1)  # the engines have the weights of batch 0
        >>> rule.admit_nowait()
        Ticket(group_id=4, start_version=1)
    """

    def __init__(
        self,
        *,
        num_groups: int,
        num_batches: int,
        max_staleness: int,
        on_overdue: OnOverdue,
        look_ahead: int,
    ) -> None:
        self.num_groups = num_groups
        self.num_batches = num_batches
        self.max_staleness = max_staleness
        self.waits = on_overdue == "wait"
        self.masks = on_overdue == "mask"
        self.next_batch = 0
        self.newest = 0
        """Newest version that tokens can have: made by the steps that have begun."""
        self.served = 0
        self.set_look_ahead(look_ahead)
        self.num_issued = 0
        self._running: dict[GroupId, int] = {}  # -> deadline
        self._ready: dict[GroupId, int] = {}  # -> deadline
        self._due = Counter[tuple[int, bool]]()
        """Number of groups by deadline, and whether they are ready."""
        # `wait` and `drop` count a running group's age from its start, because its
        # oldest token decides. `mask` lets it run on, because it may still sample fresh
        # tokens.
        # Last batch that can use a group in flight; inf while `mask` lets it sample.
        self._last_use: dict[GroupId, float] = {}
        self._sampled: dict[GroupId, bool] = {}
        """Running groups that only wait for rewards, or with True for teaching."""

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
        # From the served version, not from next_batch: a group that starts now samples
        # under the served version, so its deadline counts from there. This is what
        # makes a ticket safe, however late the engines get new weights.
        limit = (
            min(self.served + self.look_ahead + 1, self.num_batches) * self.num_groups
        )
        return max(0, limit - self.admitted)

    @property
    def waits_for(self) -> WaitCause | None:
        """Return the cause of the wait for the next batch, if any."""
        if self.num_ready >= self.num_groups:
            return "stragglers" if self.waits and self._is_in_danger() else None
        # Even if every running group finishes, the batch is not full, and none may
        # start before the engines serve a newer version.
        if self.num_ready + self.num_running < self.num_groups and self.num_open == 0:
            return "publishing"
        if self.num_ready + sum(self._sampled.values()) >= self.num_groups:
            return "teaching"
        if self.num_ready + len(self._sampled) >= self.num_groups:
            return "rewards"
        return "generation"

    def is_settled(self, first: int, stop: int) -> bool:
        """Return whether no group with an id from `first` to `stop` runs or may start."""
        is_open = any(first <= group_id < stop for group_id in self._running)
        return self.num_issued >= stop and not is_open

    @property
    def may_form_early(self) -> bool:
        """Return whether the next batch loses nothing if it is formed before the trainer
        needs it: no group outside of it has its last use in it.

        Example: max_staleness 1, on_overdue=drop. Groups 4 and 5 are ready and fill
        batch 3. Group 2 runs since version 2, so batch 3 is its last. It may still end
        before the trainer needs the batch, and then it is in it.
        """
        last = {i for i, use in self._last_use.items() if use == self.next_batch}
        return last <= {*self._earliest()}

    @property
    def lacks_groups(self) -> bool:
        """Return whether a larger look-ahead would help the next batch."""
        return self.num_open == 0 and self.waits_for not in (None, "stragglers")

    def _is_in_danger(self) -> bool:
        """Return whether taking the next batch could break a deadline: all remaining
        groups with deadline <= D must fit into the batches next_batch + 1 .. D.

        Example: two groups a batch, batch 3 is next, max_staleness 1. Group 5 runs
        since version 2, so its deadline is batch 3. Groups 6 and 7 are ready, with
        deadline 4. Up to deadline 3, one group is due, it is not ready, and no batch
        after batch 3 can take it: 1 - 0 > 0. So batch 3 waits until group 5 is ready.
        """
        # This wait cannot be a deadlock. Before the take, everything due by D fits into
        # next_batch .. D. If it no longer does after the take, fewer than num_groups of
        # the groups due by D are ready, so at least one still runs. Its end, good or
        # bad, ends the wait.
        num_due = num_taken = 0
        for deadline in sorted({deadline for deadline, _ in self._due}):
            num_ready = self._due[deadline, True]
            num_due += num_ready + self._due[deadline, False]
            # The batch takes earliest deadlines first, as take_nowait does.
            num_taken = min(self.num_groups, num_taken + num_ready)
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

        `running`: id -> start version, `ready`: id -> (oldest, newest). Returns and
        forgets the groups that no batch can use under changed settings.
        """
        # The journaled batches are trained again, and the engines get the result before
        # any group starts, so the newest version is the served one. A ticket keeps its
        # old start version: tokens sampled before the kill count with their own age.
        self.next_batch = self.newest = self.served = version
        self.num_issued = next_group_id
        versions: dict[GroupId, tuple[int, float]] = {
            i: (start, math.inf) for i, start in running.items()
        }
        versions.update(ready)
        late = list[GroupId]()
        num_kept = 0
        # By deadline, and ready groups before running ones: with a smaller
        # max_staleness or num_groups not all can keep their turn, and a ready group is
        # paid for already.
        for oldest, is_running, group_id in sorted(
            (versions[i][0], i in running, i) for i in versions
        ):
            last_use = self._use_until(*versions[group_id])
            # Only `wait` promises each group a turn. The others sort it out at each
            # batch.
            num_batches_before = num_kept // self.num_groups if self.waits else 0
            if version + num_batches_before > last_use:
                late.append(group_id)
                continue
            num_kept += 1
            groups = self._running if is_running else self._ready
            self._add(groups, group_id, oldest, last_use)
        return tuple(sorted(late))

    def set_look_ahead(self, look_ahead: int) -> None:
        """Change how many batches generation may run ahead.

        Started groups stay, also beyond a lower limit: num_open is 0 until enough are
        consumed.
        """
        assert 0 <= look_ahead <= self.max_staleness, (
            f"look_ahead {look_ahead} is beyond max_staleness"
        )
        self.look_ahead = look_ahead

    def begin_step_nowait(self, version: int) -> None:
        """Note that the trainer may train on batch `version` from here on."""
        assert version < self.next_batch, f"batch {version} is not formed"
        self.newest = version + 1

    def set_served_nowait(self, version: int) -> None:
        assert self.served <= version <= self.newest, (
            f"version {version} is served after {self.served}, with {self.newest} steps begun"
        )
        self.served = version

    def admit_nowait(self) -> Ticket:
        if self.num_open == 0:
            raise WouldWait(
                f"{self.admitted} groups are admitted at version {self.served}"
            )
        group_id = GroupId(self.num_issued)
        self.num_issued += 1
        last_use = self._use_until(self.served, math.inf)
        self._add(self._running, group_id, self.served, last_use)
        return Ticket(group_id, start_version=self.served)

    def sampled_nowait(
        self,
        group_id: GroupId,
        newest: int | None = None,
        *,
        has_rewards: bool = False,
    ) -> bool:
        """Mark a running group as fully sampled: it only waits for rewards, or if it
        has them, for teaching. `newest`: the version of its newest token, if all its
        tokens are known. With `mask`, a batch too late for that version drops it.

        Returns True, and forgets it, if no batch can use it any more.
        """
        self._sampled[group_id] = has_rewards
        if not self.masks:
            return False
        # Without this, a group that waits a long time for its rewards would hold its
        # admission although no token of it can be trained on any more.
        newest = self.newest if newest is None else newest
        # A later call must not extend the last use.
        last_use = min(self._last_use[group_id], newest + self.max_staleness)
        self._last_use[group_id] = last_use
        if last_use >= self.next_batch:
            return False
        self.fail_nowait(group_id)
        return True

    def samples_again_nowait(self, group_id: GroupId) -> None:
        self._sampled.pop(group_id, None)
        # A retry samples with the weights of now, so the group has fresh tokens again.
        if self.masks:
            self._last_use[group_id] = math.inf

    def finish_nowait(self, group_id: GroupId, *, oldest: int, newest: int) -> bool:
        """Mark a running group as ready; `oldest` and `newest` are the versions of its
        tokens.

        Returns True, and forgets it, if no batch can use it any more.
        """
        # Both checks come before any change, so a refused group leaves the rule as it
        # was. The first compares deadlines, because the start version is not kept: both
        # sides contain the max_staleness of today, also after a resume that changed it.
        is_as_new = self._running[group_id] <= oldest + self.max_staleness
        assert is_as_new, f"group {group_id} has a token older than its ticket"
        assert newest <= self.newest, (
            f"group {group_id} has a token of version {newest}, not made yet"
        )
        self.fail_nowait(group_id)
        # From here the tokens count, not the ticket. They may be younger, since engines
        # may serve a version before it is announced.
        last_use = self._use_until(oldest, newest)
        if last_use < self.next_batch:
            return True
        self._add(self._ready, group_id, oldest, last_use)
        return False

    def fail_nowait(self, group_id: GroupId) -> None:
        self._forget(self._running, group_id)

    def take_nowait(
        self, *, is_early: bool = False
    ) -> tuple[tuple[GroupId, ...], tuple[GroupId, ...]]:
        """Take the num_groups ready groups of earliest deadline, then lowest id. Raises
        WouldWait if `waits_for` has a cause. `is_early`: the step before still runs, and
        begin_step_nowait() follows.

        Returns them in order of admission, and groups that no later batch can use.
        """
        assert self.next_batch < self.num_batches, (
            f"all {self.num_batches} batches were taken"
        )
        if cause := self.waits_for:
            raise WouldWait(f"batch {self.next_batch} waits for {cause}")
        group_ids = self._earliest()
        for group_id in group_ids:
            self._forget(self._ready, group_id)
        self.next_batch += 1
        if not is_early:
            self.newest = self.next_batch
        # next_batch has moved on, so these groups had their last chance. `wait` finds
        # none: it would not have come here.
        requeued = tuple(
            sorted(
                i
                for i, last_use in self._last_use.items()
                if last_use < self.next_batch
            )
        )
        for group_id in requeued:
            if group_id in self._ready:
                self._forget(self._ready, group_id)
            else:
                self.fail_nowait(group_id)
        return group_ids, requeued

    # ---- how

    def _earliest(self) -> tuple[GroupId, ...]:
        """Return the groups of the next batch, in order of admission."""
        # Earliest deadline first is the order that (2) counts on. By id among equals,
        # so that it does not matter which of them ended first.
        earliest = heapq.nsmallest(
            self.num_groups, ((due, i) for i, due in self._ready.items())
        )
        return tuple(sorted(group_id for _, group_id in earliest))

    def _use_until(self, oldest: int, newest: float) -> float:
        """Return the last batch that can use a group with tokens of these versions;
        `newest` is inf while it samples.
        """
        return (newest if self.masks else oldest) + self.max_staleness

    def _add(
        self,
        groups: dict[GroupId, int],
        group_id: GroupId,
        oldest: int,
        last_use: float,
    ) -> None:
        groups[group_id] = deadline = oldest + self.max_staleness
        self._due[deadline, groups is self._ready] += 1
        self._last_use[group_id] = last_use

    def _forget(self, groups: dict[GroupId, int], group_id: GroupId) -> None:
        del self._last_use[group_id]
        self._sampled.pop(group_id, None)
        due = groups.pop(group_id), groups is self._ready
        self._due[due] -= 1
        if not self._due[due]:
            # Otherwise past deadlines would stay as keys and slow every decision.
            del self._due[due]
