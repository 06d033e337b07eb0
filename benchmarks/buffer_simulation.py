"""A whole run in virtual time: rollouts, rewards, a trainer and weight pushes around
the real staleness rule. No asyncio, no model.

Every sequence samples one token per second. Groups start, and prompts are requeued, as
in the product: a test plays both. Lengths follow from the workload's seed, the prompt
and how often it was requeued, so two rules see the same prompts.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.messages.records import GroupId


@dataclass(frozen=True)
class Lognormal:
    """Rollouts of lognormal length with mean `tokens` and shape `sigma`.

    `prompt_share` of the variance of the logarithm belongs to the prompt: long for all
    its rollouts, and again when it is requeued. With `tool_s` > 0 the reward waits for
    a tool, lognormal with mean `tool_s` and shape `tool_sigma`.
    """

    sigma: float
    tokens: float = 1.0
    prompt_share: float = 0.0
    tool_s: float = 0.0
    tool_sigma: float = 1.0
    group_size: int = 1
    seed: int = 0

    def length(self, prompt: int, num_requeued: int, sample_index: int) -> float:
        """Return the tokens of one rollout."""
        of_prompt = (
            random.Random(f"{self.seed}/{prompt}").gauss() if self.prompt_share else 0.0
        )
        of_sample = random.Random(
            f"{self.seed}/{prompt}/{num_requeued}/{sample_index}"
        ).gauss()
        normal = (
            math.sqrt(self.prompt_share) * of_prompt
            + math.sqrt(1 - self.prompt_share) * of_sample
        )
        return self.tokens * math.exp(self.sigma * normal - self.sigma**2 / 2)

    def wait_s(self, prompt: int, num_requeued: int, sample_index: int) -> float:
        """Return the seconds of one rollout's tool."""
        if not self.tool_s:
            return 0.0
        draw = random.Random(
            f"tool {self.seed}/{prompt}/{num_requeued}/{sample_index}"
        ).gauss()
        return self.tool_s * math.exp(self.tool_sigma * draw - self.tool_sigma**2 / 2)


@dataclass(slots=True, eq=False)
class _Rollout:
    group_id: GroupId
    tokens: float
    reward_s: float
    version: int = -1
    """The version served when it began to sample."""
    started_s: float = 0.0
    has_slot: bool = False


@dataclass(slots=True, eq=False)
class _Group:
    prompt: int
    num_requeued: int
    rollouts: list[_Rollout]
    num_sampling: int
    num_unfinished: int
    newest: int = 0

    @property
    def oldest(self) -> int:
        return min(rollout.version for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Shares are 0..1."""

    batches_per_s: float
    trainer_idle: float
    masked_fraction: float
    num_requeued: int
    num_given_up: int


class Simulation:
    def __init__(
        self,
        rule: StalenessRule,
        workload: Lognormal,
        *,
        slots: int,
        train_s: float,
        publish_s: float = 0.0,
        max_requeues: int = 3,
        auto: LookAhead | None = None,
    ) -> None:
        """A batch trains for `train_s`, and its version is served `publish_s` later;
        versions that come during a push are skipped. A requeued prompt starts before
        any new one, `max_requeues` times at most. `auto` sets the look-ahead.
        """
        self.rule = rule
        self.workload = workload
        self.train_s = train_s
        self.publish_s = publish_s
        self.max_requeues = max_requeues
        self.auto = auto
        self.now_s = 0.0
        self.batches: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        """(index, (group id, oldest version) of each group) of every batch."""
        self.taken_s: list[float] = []
        """When each batch was taken."""
        self.look_aheads: list[int] = []
        """In force when each batch was taken."""
        # heap; numbered in the order of calls
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._groups: dict[GroupId, _Group] = {}
        self._queue: deque[_Rollout] = deque()
        self._free_slots = slots
        self._num_drawn = 0
        self._requeued: list[tuple[int, int]] = []  # heap: (prompt, its num_requeued)
        self._num_requeued = 0
        self._num_given_up = 0
        self._num_trained = 0
        self._is_publishing = False
        self._is_training = False
        self._waits_since_s = 0.0
        self._waited_s = 0.0
        self._tokens = 0.0
        self._masked = 0.0
        self._served_at_s = [0.0]

    def run(self) -> SimulationResult:
        """Play until the last batch has been trained."""
        self._settle()
        while self.rule.next_batch < self.rule.num_batches or self._is_training:
            if not self._events:
                waits_for = self.rule.waits_for
                raise RuntimeError(
                    f"deadlock: batch {self.rule.next_batch} waits for {waits_for}"
                )
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self._settle()
        return SimulationResult(
            batches_per_s=self.rule.num_batches / self.now_s,
            trainer_idle=self._waited_s / self.now_s,
            masked_fraction=self._masked / self._tokens if self._tokens else 0.0,
            num_requeued=self._num_requeued,
            num_given_up=self._num_given_up,
        )

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        if delay_s <= 0.0:
            event()
        else:
            heapq.heappush(
                self._events, (self.now_s + delay_s, next(self._numbers), event)
            )

    def _settle(self) -> None:
        """Do all that can be done at this time: fill free slots, take a batch."""
        self._fill()
        self._take_if_formed()
        self._fill()
        if self.auto is not None:
            may_start = self._free_slots > 0 and not self._is_training
            lacks = may_start and self.rule.lacks_groups
            self.auto.note(self.now_s, self.rule.num_running, lacks=lacks)

    def _fill(self) -> None:
        """Give free slots to waiting rollouts, then to new groups."""
        while self._free_slots and (self._queue or self.rule.num_open):
            if not self._queue:
                self._admit()
                continue
            rollout = self._queue.popleft()
            if rollout.group_id in self._groups:  # else it was dropped while it waited
                rollout.has_slot = True
                rollout.version = self.rule.served
                rollout.started_s = self.now_s
                self._free_slots -= 1
                self._after(rollout.tokens, partial(self._sampled, rollout))

    def _admit(self) -> None:
        ticket = self.rule.admit_nowait()
        prompt, num_requeued = (
            heapq.heappop(self._requeued) if self._requeued else (self._num_drawn, 0)
        )
        self._num_drawn += num_requeued == 0
        size = self.workload.group_size
        rollouts = [
            _Rollout(
                ticket.group_id,
                self.workload.length(prompt, num_requeued, index),
                self.workload.wait_s(prompt, num_requeued, index),
            )
            for index in range(size)
        ]
        self._groups[ticket.group_id] = _Group(
            prompt, num_requeued, rollouts, size, size
        )
        self._queue.extend(rollouts)

    def _sampled(self, rollout: _Rollout) -> None:
        group = self._groups.get(rollout.group_id)
        if group is None:
            return  # requeued, which freed its slots
        rollout.has_slot = False
        self._free_slots += 1
        group.num_sampling -= 1
        group.newest = self.rule.served
        if not group.num_sampling:
            self.rule.sampled_nowait(rollout.group_id)
        self._after(rollout.reward_s, partial(self._rewarded, rollout.group_id))

    def _rewarded(self, group_id: GroupId) -> None:
        group = self._groups.get(group_id)
        if group is None:
            return
        group.num_unfinished -= 1
        if not group.num_unfinished and self.rule.finish_nowait(
            group_id, oldest=group.oldest, newest=group.newest
        ):
            self._requeue(group_id)

    def _requeue(self, group_id: GroupId) -> None:
        group = self._groups.pop(group_id)
        self._num_requeued += 1
        if group.num_requeued < self.max_requeues:
            heapq.heappush(self._requeued, (group.prompt, group.num_requeued + 1))
        else:
            self._num_given_up += 1
        self._free_slots += sum(rollout.has_slot for rollout in group.rollouts)

    def _take_if_formed(self) -> None:
        rule = self.rule
        if (
            self._is_training
            or rule.next_batch == rule.num_batches
            or rule.waits_for is not None
        ):
            return
        self._waited_s += self.now_s - self._waits_since_s
        self.look_aheads.append(rule.look_ahead)
        self.taken_s.append(self.now_s)
        version = rule.next_batch
        group_ids, requeued = rule.take_nowait()
        taken = [(group_id, self._groups.pop(group_id)) for group_id in group_ids]
        for _, group in taken:
            self._count_tokens(version, group)
        self.batches.append(
            (version, tuple((group_id, group.oldest) for group_id, group in taken))
        )
        for group_id in requeued:
            self._requeue(group_id)
        if self.auto is not None:
            rule.set_look_ahead(
                self.auto.batch_taken(self.now_s, rule.num_groups, rule.num_ready)
            )
        self._is_training = True
        self._after(self.train_s, self._trained)

    def _count_tokens(self, version: int, group: _Group) -> None:
        min_version = version - self.rule.max_staleness
        for rollout in group.rollouts:
            self._tokens += rollout.tokens
            if self.rule.masks and rollout.version < min_version:
                late_s = self._served_at_s[min_version] - rollout.started_s
                self._masked += min(rollout.tokens, max(0.0, late_s))

    def _trained(self) -> None:
        self._num_trained += 1
        self._publish()
        self._is_training = False
        self._waits_since_s = self.now_s
        self._take_if_formed()  # the trainer asks at once, before any admission

    def _publish(self) -> None:
        if not self._is_publishing and self._num_trained > self.rule.served:
            self._is_publishing = True
            self._after(self.publish_s, partial(self._published, self._num_trained))

    def _published(self, version: int) -> None:
        self._is_publishing = False
        self._served_at_s += [self.now_s] * (version + 1 - len(self._served_at_s))
        self.rule.set_served_nowait(version)
        self._publish()
