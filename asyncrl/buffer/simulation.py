"""Plays a whole run in virtual time: rollouts of random length, a trainer, weight pushes, and the staleness
rule between them; and compares devices that take turns with devices that are split. No asyncio, no model.

An event heap moves the time; the rule is the one that runs use. When groups start, and which prompt comes
again, is as in the product: a test plays both. A rollout's length follows from the workload's seed, its
prompt, how often that was handed back, and its number, so two rules see the same prompts, and the same rule
the same run again.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import fmean

from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.config import RunConfig
from asyncrl.config.generation import OnOverdue
from asyncrl.messages.records import GroupId


@dataclass(frozen=True, slots=True)
class Workload:
    """What is simulated. A rollout's length is lognormal with mean `rollout_s` and shape `sigma`, and is
    proportional to its time.

    `prompt_share` of the variance of its logarithm is the prompt's own: long for all rollouts of it, and as
    long when it comes again. `num_slots` rollouts run at once, others wait in order of admission, and a group
    is admitted when a slot is free and no rollout waits. With `tool_s` > 0 a rollout that has sampled waits
    for a tool, without a slot: lognormal with mean `tool_s` and shape `tool_sigma`. A group is done when its
    `group_size` rollouts are.
    A batch trains for `train_s`; its version is served `publish_s` later, and while a publish is under way
    newer versions wait and are skipped over. The prompt of a dropped group comes again before any new one,
    drawn anew, `max_hand_backs` times at most.
    """

    num_slots: int
    sigma: float
    rollout_s: float = 1.0
    prompt_share: float = 0.0
    tool_s: float = 0.0
    tool_sigma: float = 1.0
    group_size: int = 1
    train_s: float = 1.0
    publish_s: float = 0.0
    max_hand_backs: int = 3
    seed: int = 0

    def length_s(self, prompt: int, num_handed_back: int, sample_index: int) -> float:
        """Of one rollout."""
        of_prompt = random.Random(f"{self.seed}/{prompt}").gauss(0.0, 1.0) if self.prompt_share else 0.0
        of_sample = random.Random(f"{self.seed}/{prompt}/{num_handed_back}/{sample_index}").gauss(0.0, 1.0)
        normal = math.sqrt(self.prompt_share) * of_prompt + math.sqrt(1 - self.prompt_share) * of_sample
        return self.rollout_s * math.exp(self.sigma * normal - self.sigma**2 / 2)

    def wait_s(self, prompt: int, num_handed_back: int, sample_index: int) -> float:
        """For the tool of one rollout."""
        if not self.tool_s:
            return 0.0
        draw = random.Random(f"tool {self.seed}/{prompt}/{num_handed_back}/{sample_index}").gauss(0.0, 1.0)
        return self.tool_s * math.exp(self.tool_sigma * draw - self.tool_sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Ages are in versions: batch index - oldest version of a token with a loss weight, one value a group."""

    batches_per_s: float
    idle_fraction: float
    age_mean: float
    age_max: int
    late_fraction: float
    masked_fraction: float
    num_handed_back: int
    num_given_up: int
    look_ahead_mean: float


@dataclass(slots=True)
class _Rollout:
    length_s: float
    tool_s: float
    started_s: float = math.inf
    version: int = 0


@dataclass(slots=True)
class _Group:
    prompt: int
    num_handed_back: int
    rollouts: list[_Rollout]
    num_sampling: int
    num_unfinished: int
    newest: int = 0

    @property
    def oldest(self) -> int:
        return min(rollout.version for rollout in self.rollouts)


class Simulation:
    """One run. `run()` plays it to its end; raises RuntimeError if nothing can happen any more (a deadlock of
    the rule).
    """

    def __init__(self, rule: StalenessRule, workload: Workload, *, auto: LookAhead | None = None) -> None:
        self.rule, self.workload, self.auto = rule, workload, auto
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # heap; numbered in the order of calls
        self._event_numbers = count()
        self._groups: dict[GroupId, _Group] = {}
        self._queue: deque[tuple[GroupId, int]] = deque()
        self._free_slots = workload.num_slots
        self._num_drawn = 0
        self._back: list[tuple[int, int]] = []  # heap: (prompt, its num_handed_back)
        self._num_trained = 0
        self._is_publishing = self._is_training = False
        self._served_at_s = [0.0]
        self._counts = Counter[str]()
        self._tokens = self._masked = 0.0
        self._ages: list[int] = []
        self.look_aheads: list[int] = []
        """In force when each batch was taken."""
        self.batches: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        """(index, (group id, oldest version) of each group) of every batch, for tests."""
        self.taken_s: list[float] = []
        """When each batch was taken."""

    def run(self) -> SimulationResult:
        """Play until the last batch has been trained."""
        self._settle()
        while self.rule.next_batch < self.rule.num_batches or self._is_training:
            if not self._events:
                waits_for = self.rule.waits_for
                raise RuntimeError(f"deadlock: batch {self.rule.next_batch} waits for {waits_for}")
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self._settle()
        return self._result()

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._event_numbers), event))

    def _settle(self) -> None:
        """Do all that can be done now: start in free slots, take a batch."""
        self._fill()
        self._take_if_formed()
        self._fill()
        if self.auto is not None:
            lacks = not self._is_training and self.rule.lacks_groups
            self.auto.note(self.now_s, self.rule.num_running, lacks=lacks)

    def _fill(self) -> None:
        """A free slot goes to a rollout that waits for one, then to a new group."""
        while self._free_slots and (self._queue or self.rule.num_open):
            if not self._queue:
                self._admit()
                continue
            group_id, index = self._queue.popleft()
            if group_id in self._groups:  # else it was dropped while it waited
                rollout = self._groups[group_id].rollouts[index]
                rollout.started_s, rollout.version = self.now_s, self.rule.served
                self._free_slots -= 1
                self._after(rollout.length_s, partial(self._sampled, group_id, rollout.tool_s))

    def _admit(self) -> None:
        ticket = self.rule.admit_nowait()
        prompt, num_handed_back = heapq.heappop(self._back) if self._back else (self._num_drawn, 0)
        self._num_drawn += num_handed_back == 0
        size, load = self.workload.group_size, self.workload
        of_each = ((prompt, num_handed_back, index) for index in range(size))
        rollouts = [_Rollout(load.length_s(*which), load.wait_s(*which)) for which in of_each]
        self._groups[ticket.group_id] = _Group(prompt, num_handed_back, rollouts, size, size)
        self._queue.extend((ticket.group_id, index) for index in range(size))

    def _sampled(self, group_id: GroupId, tool_s: float) -> None:
        group = self._groups.get(group_id)
        if group is None:
            return  # dropped meanwhile: its slots were freed then
        self._free_slots += 1
        group.num_sampling -= 1
        group.newest = self.rule.served
        if not group.num_sampling:
            self.rule.sampled_nowait(group_id)
        if tool_s:
            self._after(tool_s, partial(self._rollout_done, group_id))
        else:
            self._rollout_done(group_id)

    def _rollout_done(self, group_id: GroupId) -> None:
        group = self._groups.get(group_id)
        if group is None:
            return
        group.num_unfinished -= 1
        oldest, newest = group.oldest, group.newest
        if not group.num_unfinished and self.rule.finish_nowait(group_id, oldest=oldest, newest=newest):
            self._hand_back(group_id)

    def _hand_back(self, group_id: GroupId) -> None:
        group = self._groups.pop(group_id)
        self._counts["handed_back"] += 1
        if group.num_handed_back < self.workload.max_hand_backs:
            heapq.heappush(self._back, (group.prompt, group.num_handed_back + 1))
        else:
            self._counts["given_up"] += 1
        ends = (rollout.started_s + rollout.length_s for rollout in group.rollouts)
        self._free_slots += sum(self.now_s < end_s < math.inf for end_s in ends)

    def _take_if_formed(self) -> None:
        rule = self.rule
        if self._is_training or rule.next_batch == rule.num_batches:
            return
        if rule.waits_for is not None:
            return
        self.look_aheads.append(rule.look_ahead)
        choice = rule.take_nowait()
        taken = [(group_id, self._groups.pop(group_id)) for group_id in choice.group_ids]
        for _, group in taken:
            self._weigh(choice.version, group)
        self.taken_s.append(self.now_s)
        self.batches.append((choice.version, tuple((group_id, group.oldest) for group_id, group in taken)))
        for group_id in choice.handed_back:
            self._hand_back(group_id)
        if self.auto is not None:
            rule.set_look_ahead(self.auto.batch_taken(self.now_s, rule.num_groups, rule.num_ready))
        self._is_training = True
        self._after(self.workload.train_s, self._train_done)

    def _weigh(self, version: int, group: _Group) -> None:
        """Count ages and masked tokens of a group in batch `version`."""
        masks, max_staleness = self.rule.overdue.masks, self.rule.max_staleness
        age, min_version = version - group.oldest, version - max_staleness
        self._counts["late"] += age > max_staleness and not masks
        self._ages.append(min(age, max_staleness) if masks else age)
        for rollout in group.rollouts:
            self._tokens += rollout.length_s
            if masks and rollout.version < min_version:
                self._masked += min(rollout.length_s, self._served_at_s[min_version] - rollout.started_s)

    def _train_done(self) -> None:
        self._num_trained += 1
        self._is_training = False
        self._publish()
        self._take_if_formed()  # the trainer asks at once, before any admission

    def _publish(self) -> None:
        if not self._is_publishing and self._num_trained > self.rule.served:
            self._is_publishing = True
            published = partial(self._published, self._num_trained)
            if self.workload.publish_s:
                self._after(self.workload.publish_s, published)
            else:
                published()

    def _published(self, version: int) -> None:
        self._is_publishing = False
        self._served_at_s += [self.now_s] * (version - self.rule.served)
        self.rule.set_served_nowait(version)
        self._publish()

    def _result(self) -> SimulationResult:
        counts, num_batches = self._counts, self.rule.num_batches
        return SimulationResult(
            batches_per_s=num_batches / self.now_s,
            idle_fraction=1 - num_batches * self.workload.train_s / self.now_s,
            age_mean=fmean(self._ages),
            age_max=max(self._ages),
            late_fraction=counts["late"] / len(self._ages),
            masked_fraction=self._masked / self._tokens,
            num_handed_back=counts["handed_back"],
            num_given_up=counts["given_up"],
            look_ahead_mean=fmean(self.look_aheads),
        )


# Turns against splits: which makes more batches, and from which bound on. It is assumed that a slot decodes
# at the same speed however many are busy, that training on k devices takes 1 / k of the time, and that
# lengths are lognormal.

BOUNDS = (0, 1, 2, 4)
"""max_staleness of the rows."""


@dataclass(frozen=True, slots=True)
class Case:
    """Trainer and engines that take turns on all of `num_devices`, or have split them. Its unit of time is a
    rollout's mean, 1 s.

    `ratio`: device-seconds of generating a batch over those of training on it, with every slot busy. `sigma`:
    shape of the lognormal lengths (0 = all the same). `handover_s`: both handovers of a turn, the push
    included. `slots`: of a device that generates.
    """

    num_devices: int
    num_groups: int
    group_size: int
    slots: int
    ratio: float
    sigma: float
    handover_s: float
    on_overdue: OnOverdue
    num_batches: int = 200

    def play(self, max_staleness: int = 0, num_trainer: int | None = None) -> SimulationResult:
        """`num_trainer` devices train and the others generate, at the same time as far as the bound allows.
        None: every device generates, then every device trains, and each turn pays its handovers.
        """
        num_training = self.num_devices if num_trainer is None else num_trainer
        num_generating = self.num_devices - (num_trainer or 0)
        rule = StalenessRule(
            num_groups=self.num_groups,
            num_batches=self.num_batches,
            max_staleness=max_staleness,
            on_overdue=self.on_overdue,
            look_ahead=max_staleness,
        )
        workload = Workload(
            num_slots=self.slots * num_generating,
            sigma=self.sigma,
            group_size=self.group_size,
            train_s=self.num_groups * self.group_size / self.slots / self.ratio / num_training,
            publish_s=self.handover_s if num_trainer is None else 0.0,
        )
        return Simulation(rule, workload).run()


@dataclass(frozen=True, slots=True)
class Split:
    """The fastest split at one bound. `gain`: its batches a second over those of turns. `break_even_s`: with
    handovers of this length turns are as fast; below 0 the split wins even against handovers that take no
    time.
    """

    max_staleness: int
    num_trainer: int
    outcome: SimulationResult
    gain: float
    break_even_s: float


def break_even(case: Case, bounds: Sequence[int] = BOUNDS) -> tuple[SimulationResult, list[Split]]:
    """Turns, and at each bound the split with most batches a second."""
    turns, splits = case.play(), []
    for max_staleness in bounds:
        played = ((num, case.play(max_staleness, num)) for num in range(1, case.num_devices))
        num_trainer, best = max(played, key=lambda one: one[1].batches_per_s)
        gain = best.batches_per_s / turns.batches_per_s
        break_even_s = 1 / best.batches_per_s - 1 / turns.batches_per_s + case.handover_s
        splits.append(Split(max_staleness, num_trainer, best, gain, break_even_s))
    return turns, splits


def case_of(
    config: RunConfig, num_devices: int, ratio: float, sigma: float, handover_s: float, num_batches: int = 200
) -> Case:
    """With the groups, slots and on_overdue of the config."""
    rollout, on_overdue = config.rollout, config.buffer.on_overdue
    sizes = (num_devices, config.trainer.num_groups, rollout.group_size, rollout.slots)
    return Case(*sizes, ratio, sigma, handover_s, on_overdue, num_batches)


def case_text(case: Case) -> str:
    """One case as a table."""
    turns, splits = break_even(case)
    rollouts, slots = case.num_groups * case.group_size, case.slots * case.num_devices
    lines = [
        f"{case.num_devices} devices of {case.slots} slots, {case.num_groups} groups of {case.group_size} a "
        f"batch ({rollouts} rollouts for {slots} slots); seconds are mean rollouts",
        f"generation : training = {case.ratio:g}, lengths sigma {case.sigma:g}, on_overdue "
        f"{case.on_overdue}, {case.num_batches} batches",
        "",
        f"{'':<28} {'batches/s':>9} {'of turns':>8} {'trainer idle':>12} {'data age':>8}  even at",
        _line(f"in turns, handover {case.handover_s:g} s", turns, 1.0, ""),
    ]
    for split in splits:
        parts = f"{split.num_trainer}+{case.num_devices - split.num_trainer}"
        name = f"max_staleness {split.max_staleness}, split {parts}"
        even = f"{split.break_even_s:.2f} s" if split.break_even_s > 0 else "none: wins anyway"
        lines.append(_line(name, split.outcome, split.gain, even))
    return "\n".join(lines)


def _line(name: str, outcome: SimulationResult, gain: float, even: str) -> str:
    numbers = f"{outcome.batches_per_s:>9.3f} {gain:>8.2f} {outcome.idle_fraction:>12.0%}"
    return f"{name:<28} {numbers} {outcome.age_mean:>8.2f}  {even}".rstrip()
