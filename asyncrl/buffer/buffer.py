"""The buffer: waits of producers and trainer on the staleness rule."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from asyncrl.base.errors import TaskError
from asyncrl.base.waits import Signal, clock, note_span, waiting
from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.staleness import WAIT_CAUSES, StalenessRule, WaitCause
from asyncrl.config import BufferConfig
from asyncrl.messages.records import (
    Batch,
    Credit,
    Finished,
    Group,
    GroupId,
    Prompt,
    Ticket,
    Trajectory,
    by_task,
    num_sampled,
    part_of,
    versions_of,
)

MAX_FILTERED_GROUPS = 256
"""Consecutive filtered groups that end a run, which would otherwise sample forever
without a step.
"""


OnRequeued = Callable[[GroupId, Group | None, str], None]
"""(group_id, the ready group or None if it still runs, reason)."""


class Buffer:
    """Groups between admission and training.

    Life: admitted -> running -> ready -> in a batch; or failed, filtered, or returned
        to the owner that requeue_to() names.

    Waits: producers in wait_open, the trainer in wait_batch. Cancelling either loses
    nothing: a group or batch is delivered without a sleep.

    Invariant: no token with a loss weight in a taken batch is older than max_staleness.
    With `mask`, the trainer enforces it from the batch's min_version and mask_older.
    """

    name = "buffer"
    _on_requeued: OnRequeued

    def __init__(
        self,
        config: BufferConfig,
        *,
        num_groups: int,
        num_batches: int,
        part_tokens: int = 0,
        compares_parts: bool = False,
    ) -> None:
        """`part_tokens`: the fewest tokens of a part of a batch (0: batches are whole).
        `compares_parts`: the trainer compares each part of a reward, not their sum.
        """
        self._compares_parts = compares_parts
        self.config = config
        self.part_tokens = part_tokens
        self.part_groups = 0
        """Of the batch that forms."""
        self._sent_parts = set[int]()
        self._last_parts: list[Batch] = []
        """Of a taken batch, those that were not whole before."""
        self._auto: LookAhead | None = None
        look_ahead = config.look_ahead
        if look_ahead == "auto":
            self._auto = LookAhead(config.max_staleness)
            look_ahead = self._auto.current
        self.rule = StalenessRule(
            num_groups=num_groups,
            num_batches=num_batches,
            max_staleness=config.max_staleness,
            on_overdue=config.on_overdue,
            look_ahead=look_ahead,
        )
        self._ready: dict[GroupId, Group] = {}
        self._opened, self._formed, self._part_formed = Signal(), Signal(), Signal()
        self._causes: list[tuple[float, WaitCause | None]] | None = None
        """During wait_batch: times at which the cause of the trainer's wait changed, and
        causes.
        """
        self._is_asked = False
        """A producer has a free slot and may not admit a group."""
        self._is_idle = True
        self._is_stopped = False
        self._formed_early: Batch | None = None
        self.last_wait_s = dict.fromkeys(WAIT_CAUSES, 0.0)
        self._num_filtered, self._filtered_tokens = Counter[str](), 0
        self._filtered_in_a_row = 0

    def requeue_to(self, owner: OnRequeued) -> None:
        """Pass requeued groups to `owner`, which admits groups."""
        self._on_requeued = owner

    def restore_nowait(
        self,
        version: int,
        next_group_id: int,
        running: Sequence[Ticket],
        ready: Sequence[Group],
        part_groups: int = 0,
    ) -> tuple[GroupId, ...]:
        """Restore the state of a killed run, before any other call; batch `version` is
        next. Returns the groups that no batch can use under changed settings.
        """
        self.part_groups = part_groups if self.part_tokens else 0
        starts = {ticket.group_id: ticket.start_version for ticket in running}
        versions = {group.group_id: _versions(group) for group in ready}
        late = self.rule.restore_nowait(version, next_group_id, starts, versions)
        self._ready.update(
            (group.group_id, group) for group in ready if group.group_id not in late
        )
        self._changed()
        return late

    # ---- producers

    async def wait_open(self) -> None:
        """Wait until admit_nowait succeeds. Sleeps until cancelled once all groups are
        admitted.
        """
        self._is_asked = True
        self._note_load()
        with waiting(
            self._what_opens, on="a version served, or a group failed or requeued"
        ):
            await self._opened.wait_for(lambda: self.rule.num_open > 0)

    def admit_nowait(self) -> Ticket:
        """Admit one group. Raises WouldWait if the staleness bound leaves no slot."""
        ticket = self.rule.admit_nowait()
        self._is_asked = False
        self._changed()
        return ticket

    def sampled_nowait(
        self,
        group_id: GroupId,
        group: Group | None = None,
        *,
        has_rewards: bool = False,
    ) -> None:
        """Note that a group only waits for rewards, or if it has them, for teaching.
        `group`: its rollouts, once all are known. It is requeued at once if no batch can
        use them any more.
        """
        newest = None if group is None else _versions(group)[1]
        is_useless = self.rule.sampled_nowait(group_id, newest, has_rewards=has_rewards)
        self._changed()
        if is_useless:
            self._requeue(group_id)

    def samples_again_nowait(self, group_id: GroupId) -> None:
        self.rule.samples_again_nowait(group_id)
        self._changed()

    def finish_nowait(self, group: Group) -> Finished:
        """Mark a group as ready, or drop it by buffer.filter.

        Raises TaskError with the last of MAX_FILTERED_GROUPS in a row. A filtered group
        is not requeued.
        """
        # Before the rule hears of it: a filtered group leaves like a failed one and
        # frees its admission for another prompt.
        if self.config.filter != "none":
            rewards = self._compared(group)
            if all(len(of_role) == 1 for of_role in rewards.values()):
                self._filter(group, rewards)
                return "filtered"
        self._filtered_in_a_row = 0
        oldest, newest = _versions(group)
        is_useless = self.rule.finish_nowait(
            group.group_id, oldest=oldest, newest=newest
        )
        # Even a useless group, for a moment: _requeue passes it on. Without it, the
        # owner would take the group for a running one and look for its tasks.
        self._ready[group.group_id] = group
        self._changed()
        if is_useless:
            self._requeue(group.group_id)
            return "requeued"
        return "ready"

    def _compared(self, group: Group) -> Mapping[str, set[float]]:
        """Return the values by which buffer.filter judges a group. Raises TaskError if
        it has no such part.
        """
        part = self.config.filter_part
        parts = parts_of(group)
        if part is None:
            return rewards_of(group) | (parts if self._compares_parts else {})
        if part not in parts and any(one.reward for one in group.trajectories):
            raise TaskError(
                self.name,
                f"the rewards of prompt {group.prompt.prompt_id} have no part {part}, but {[*parts]}",
                rule=f"buffer.filter={{part: {part}}} compares it in each group",
                way_out="name one of the parts, or return it from the reward.",
            )
        return {part: parts.get(part, {0.0})}

    def _filter(self, group: Group, rewards: Mapping[str, set[float]]) -> None:
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= MAX_FILTERED_GROUPS:
            shown = ", ".join(f"{min(of_role):g}" for of_role in rewards.values())
            raise TaskError(
                self.name,
                f"{self._filtered_in_a_row} groups in a row had one reward for all their rollouts, as has "
                f"group {group.group_id}, prompt {group.prompt.prompt_id}: {shown}",
                rule="buffer.filter replaces them; MAX_FILTERED_GROUPS of them in a row end the run",
                way_out="give easier prompts (harder ones at the highest reward), or set buffer.filter=none.",
            )
        self.rule.fail_nowait(group.group_id)
        self._num_filtered[group.prompt.task] += 1
        # They were sampled for nothing; the metric shows the price of the filter.
        self._filtered_tokens += sum(
            trajectory.num_sampled for trajectory in group.trajectories
        )
        self._changed()

    def fail_nowait(self, group_id: GroupId) -> None:
        self.rule.fail_nowait(group_id)
        self._changed()

    # ---- weight sync

    def set_served_nowait(self, version: int) -> None:
        self.rule.set_served_nowait(version)
        self._changed()

    # ---- trainer

    def begin_step_nowait(self, version: int) -> None:
        """Note that the trainer has batch `version`, and no longer waits."""
        self.rule.begin_step_nowait(version)
        self._formed_early = None
        self._sent_parts.clear()
        self._last_parts.clear()
        self._is_idle = False
        self._changed()

    def idle_nowait(self) -> None:
        """Note that the trainer has no batch."""
        self._is_idle = True
        self._changed()

    def stop_nowait(self) -> None:
        """Form no batch from here on."""
        self._is_stopped = True
        self._formed.notify()

    async def wait_batch(self) -> Batch | None:
        """Return the next batch once the rule allows it, and set `last_wait_s`: only the
        time without a step counts. While a step runs, a batch forms only if it loses
        nothing by that. None: the run stops.
        """
        self._causes = causes = [(clock(), self._waited_for)]
        self._note_load()
        try:
            with waiting(
                self._what_forms,
                on="the rollout that completes a group",
                who="train loop",
            ):
                # No wait between take_nowait and return: a cancelled call has either
                # returned its batch, or left it in the buffer.
                while self._is_stopped or not self._may_take:
                    if self._is_stopped:
                        return None
                    await self._formed.wait()
                batch = self.take_nowait(is_early=not self._is_idle)
        finally:
            # None means that no one waits, also after a cancellation.
            self._causes = None
        self.last_wait_s = dict.fromkeys(WAIT_CAUSES, 0.0)
        # Each entry lasts until the next one. A wait has several causes in turn: at
        # first too few groups are ready, then a straggler blocks.
        for (start_s, cause), (end_s, _) in pairwise([*causes, (clock(), None)]):
            if cause is not None and end_s > start_s:
                self.last_wait_s[cause] += end_s - start_s
                note_span("trainer", f"wait for {cause}", start_s, end_s, batch.version)
        if self._auto is not None:
            # Only here, once a batch: the measurements are averages of whole batches. A
            # raise opens admission, and _changed wakes the producers.
            look_ahead = self._auto.batch_taken(
                clock(), self.rule.num_groups, self.rule.num_ready
            )
            self.rule.set_look_ahead(look_ahead)
            self._changed()
        return batch

    async def wait_part(self) -> Batch:
        """Return a part of the next batch, each part once: once all its groups are ready,
        or else once the batch is taken. Sleeps until cancelled if batches have no parts.
        """
        # Not declared as a wait of the run: groups and the batch have theirs, and the
        # oldest wait that a user sees would be this one, of batches without parts.
        while (part := self.take_part_nowait()) is None:
            await self._part_formed.wait()
        return part

    def take_part_nowait(self) -> Batch | None:
        if self._last_parts:
            return self._last_parts.pop()
        size = self.part_groups
        if not size:
            return None
        numbers = {part_of(group_id, size) for group_id in self._ready}
        for number in sorted(numbers - self._sent_parts):
            if self.rule.is_settled(number * size, (number + 1) * size):
                self._sent_parts.add(number)
                groups = sorted(self._ready)
                return self._batch(groups, self.rule.next_batch).parts()[number]
        return None

    def take_nowait(self, *, is_early: bool = False) -> Batch:
        version = self.rule.next_batch
        group_ids, requeued = self.rule.take_nowait(is_early=is_early)
        batch = self._batch(group_ids, version)
        for group_id in group_ids:
            del self._ready[group_id]
        self._last_parts = [
            part
            for number, part in batch.parts().items()
            if batch.part_groups and number not in self._sent_parts
        ]
        self.part_groups = batch.next_part_groups
        self._changed()
        for group_id in requeued:
            self._requeue(group_id)
        self._formed_early = batch if is_early else None
        return batch

    def _batch(self, group_ids: Sequence[GroupId], version: int) -> Batch:
        groups = tuple(self._ready[group_id] for group_id in group_ids)
        return Batch(
            version,
            groups,
            # The trainer checks this bound again, by the version of each token.
            max(0, version - self.rule.max_staleness),
            mask_older=self.rule.masks,
            part_groups=self.part_groups,
            next_part_groups=groups_of_part(groups, self.part_tokens),
        )

    # ---- queries

    def prompts_ready(self) -> list[Prompt]:
        """Return the prompts of groups that no step has."""
        formed = () if self._formed_early is None else self._formed_early.groups
        return [group.prompt for group in (*self._ready.values(), *formed)]

    def gauges(self) -> dict[str, float]:
        rule = self.rule
        return {
            "buffer/ready": rule.num_ready,
            "buffer/running": rule.num_running,
            "buffer/look_ahead": rule.look_ahead,
            "buffer/served": rule.served,
            "buffer/next_batch": rule.next_batch,
            "buffer/admitted": rule.num_issued,
            **by_task("rollout/filtered", self._num_filtered),
            "rollout/filtered_tokens": self._filtered_tokens,
            **self.wait_gauges(),
        }

    def wait_gauges(self) -> dict[str, float]:
        """Return how long the trainer waited for the last batch, by cause."""
        by_cause = {
            f"perf/wait_{cause}_s": seconds
            for cause, seconds in self.last_wait_s.items()
        }
        return {"perf/wait_s": sum(self.last_wait_s.values()), **by_cause}

    # ---- how

    def _what_opens(self) -> str:
        return f"admission of a group ({self._counts()}, version {self.rule.served} is served)"

    def _what_forms(self) -> str:
        return f"{self.rule.waits_for or 'generation'} ({self._counts()})"

    def _counts(self) -> str:
        rule = self.rule
        ready = f"{rule.num_ready} of {rule.num_groups} groups are ready"
        return f"step {rule.next_batch + 1}: {ready}, {rule.num_running} run"

    def _changed(self) -> None:
        # Every change of the rule that can end a wait comes through here. A forgotten
        # call is a hang, which only the watchdog would report.
        cause = self._waited_for
        if self._causes is not None and self._causes[-1][1] != cause:
            self._causes.append((clock(), cause))
        self._note_load()
        self._part_formed.notify()
        # Nobody else waits for a batch, and the rule looks at all groups.
        if self._causes is not None and self._may_take:
            self._formed.notify()
        if self.rule.num_open:
            self._opened.notify()

    @property
    def _may_take(self) -> bool:
        rule = self.rule
        return rule.waits_for is None and (self._is_idle or rule.may_form_early)

    @property
    def _waited_for(self) -> WaitCause | None:
        """Return what the trainer waits for, if it has no step."""
        return self.rule.waits_for if self._is_idle else None

    def _note_load(self) -> None:
        if self._auto is not None:
            # The trainer lacks groups only while it waits, and only if a larger
            # look-ahead could have helped. Stragglers, or groups that find no free
            # slot, are no reason to admit more.
            is_waiting = self._causes is not None and self._is_idle
            lacks = is_waiting and self._is_asked and self.rule.lacks_groups
            self._auto.note(clock(), self.rule.num_running, lacks=lacks)

    def _requeue(self, group_id: GroupId) -> None:
        reason = "all_masked" if self.rule.masks else "dropped"
        self._on_requeued(group_id, self._ready.pop(group_id, None), reason)


def groups_of_part(groups: Sequence[Group], part_tokens: int) -> int:
    """Return the groups of a part, a power of two, so that parts like `groups` have
    `part_tokens`; 0 if that would be most of a batch.

    Example: 32 groups of 1,000 tokens and part_tokens 3,072: parts have 4 groups.
    """
    if not part_tokens:
        return 0
    num_tokens = sum(map(_num_tokens, groups))
    part_groups = 1
    while part_groups * num_tokens < part_tokens * len(groups):
        part_groups *= 2
    return part_groups if 2 * part_groups <= len(groups) else 0


def _num_tokens(group: Group) -> int:
    """Return about the tokens that the trainer computes: its rollouts share a prompt."""
    shared = max(len(one.tokens) - one.num_sampled for one in group.trajectories)
    return shared + num_sampled(group.trajectories)


def _versions(group: Group) -> tuple[int, int]:
    versions = versions_of(group.trajectories)
    return min(versions), max(versions)


def parts_of(group: Group) -> dict[str, set[float]]:
    """Return the values of each part of the reward: of the rollouts, or of credits if
    these have parts. 0 for a rollout without parts, which a limit cut; a part that
    applies to no rollout has one value.
    """
    found = dict[str, set[float]]()
    paid = list[Trajectory | Credit]()
    for trajectory in group.trajectories:
        by_turn = any(credit.parts for credit in trajectory.credits)
        paid += trajectory.credits if by_turn else [trajectory]
    for name in {name: 0 for one in paid for name in one.parts}:
        values = [one.parts[name].value if one.parts else 0.0 for one in paid]
        found[name] = {value for value in values if value is not None} or {0.0}
    return found


def rewards_of(group: Group) -> dict[str, set[float]]:
    """Return the rewards that are compared with each other: of a group's rollouts or
    credits, by role if all have one, as by_role() of trainer/loss/objective.py does.

    Equal rewards give no gradient. Dynamic sampling replaces such groups (DAPO,
    https://arxiv.org/abs/2503.14476, section 3.2).
    """
    rewards = defaultdict[str, set[float]](set)
    for trajectory in group.trajectories:
        for credit in trajectory.credits:
            rewards[credit.state].add(credit.reward)
        if not trajectory.credits:
            rewards[""].add(trajectory.reward)
    return {"": set().union(*rewards.values())} if "" in rewards else rewards
