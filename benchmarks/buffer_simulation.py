"""Plays a whole run in virtual time: engines that decode, rollouts with turns, tools and rewards, a trainer,
weight pushes, and between them the staleness rule and the look-ahead that runs use. No asyncio, no model.

An event heap moves the time. When groups start, and which prompt comes again, is as in the product: a test
plays both. What a rollout takes follows from the workload's seed, its prompt, how often that was handed back,
and its number, so two rules see the same prompts, and the same rule the same run again.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean

from buffer_workload import EngineClock, RolloutPlan, SimulatedMachine, SimulationResult, Workload

from asyncrl.buffer.look_ahead import LookAhead
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.messages.records import GroupId


@dataclass(slots=True, eq=False)
class _Rollout:
    plan: RolloutPlan
    group_id: GroupId
    turn: int = 0
    version: int = -1
    """That was served when it had its slot; from its first request on, when that came."""
    has_slot: bool = False
    engine: _Engine | None = None
    """That decodes it, and nothing else."""
    num_tokens: float = 0.0
    """That it has, or will have after this turn."""
    read_version: int = 0
    """That was served when its last turn ended: a swap while it runs has its tokens read again."""
    sampled: list[tuple[_Engine, float, float]] = field(default_factory=list)
    """(engine, its clock at the start, tokens) of each turn."""


@dataclass(slots=True, eq=False)
class _Group:
    prompt: int
    num_requeued: int
    rollouts: list[_Rollout]
    num_sampling: int
    num_unfinished: int
    newest: int = 0
    engine: int = -1

    @property
    def oldest(self) -> int:
        return min(rollout.version for rollout in self.rollouts)


class _Engine(EngineClock):
    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__(machine)
        self.ends: list[tuple[float, int, _Rollout]] = []  # heap; what was dropped is skipped
        self.timer = 0


class Simulation:
    """One run. `run()` plays it to its end; raises RuntimeError if nothing can happen any more (a deadlock of
    the rule).
    """

    def __init__(
        self,
        rule: StalenessRule,
        workload: Workload,
        machine: SimulatedMachine,
        *,
        auto: LookAhead | None = None,
        max_requeues: int = 3,
        num_first: int = 0,
        num_last: int = 0,
    ) -> None:
        """`auto` finds the look-ahead. The prompt of a dropped group comes again before any new one,
        `max_requeues` times at most. `num_first` batches are played and not counted; the `num_last` of the
        run, beside which no group starts any more, are not played.
        """
        self.rule, self.workload, self.machine, self.auto = rule, workload, machine, auto
        self.max_requeues, self.num_first = max_requeues, num_first
        self._end = rule.num_batches - num_last
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # heap; numbered in the order of calls
        self._numbers = count()
        self._engines = [_Engine(machine) for _ in range(machine.num_engines)]
        self._groups: dict[GroupId, _Group] = {}
        self._queue: deque[_Rollout] = deque()
        self._free_slots = machine.slots * machine.num_engines
        self._num_drawn = 0
        self._back: list[tuple[int, int]] = []  # heap: (prompt, its num_requeued)
        self._num_trained = 0
        self._is_publishing = self._is_training = False
        self._train_left_s: float | None = None
        """Seconds of work in the step that is under way."""
        self._train_at_s, self._train_pace, self._train_timer = 0.0, 1.0, 0
        self._waited_s, self._waits_since_s = 0.0, 0.0
        self._before = (0.0, 0.0, 0.0)
        """(time, seconds that engines were busy, seconds that the trainer waited) when counting began."""
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
        """Play until the last batch that is played has been trained."""
        self._settle()
        while self.rule.next_batch < self._end or self._is_training:
            if not self._events:
                waits_for = self.rule.waits_for
                raise RuntimeError(f"deadlock: batch {self.rule.next_batch} waits for {waits_for}")
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self._settle()
        return self._result()

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        if delay_s <= 0.0:
            event()
        else:
            heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), event))

    def _settle(self) -> None:
        """Do all that can be done now: start in free slots, take a batch."""
        self._fill()
        self._take_if_formed()
        self._fill()
        if self.auto is not None:
            lacks = not self._is_training and self.rule.lacks_groups
            self.auto.note(self.now_s, self.rule.num_running, lacks=lacks)

    # ---- rollouts

    def _fill(self) -> None:
        """A free slot goes to a rollout that waits for one, then to a new group."""
        while self._free_slots and (self._queue or self.rule.num_open):
            if not self._queue:
                self._admit()
                continue
            rollout = self._queue.popleft()
            if rollout.group_id in self._groups:  # else it was dropped while it waited
                rollout.has_slot, rollout.version = True, self.rule.served
                self._free_slots -= 1
                self._go_on(rollout)

    def _admit(self) -> None:
        ticket = self.rule.admit_nowait()
        prompt, num_requeued = heapq.heappop(self._back) if self._back else (self._num_drawn, 0)
        self._num_drawn += num_requeued == 0
        progress = ticket.start_version / self.rule.num_batches
        plans = self.workload.group(prompt, num_requeued, progress)
        rollouts = [_Rollout(plan, ticket.group_id) for plan in plans]
        self._groups[ticket.group_id] = _Group(prompt, num_requeued, rollouts, len(plans), len(plans))
        self._queue.extend(rollouts)

    def _go_on(self, rollout: _Rollout) -> None:
        """Its next turn; after the last one it gives its slot back."""
        if rollout.turn == len(rollout.plan.turns):
            self._after(rollout.plan.held_s, partial(self._stopped, rollout))
        else:
            wait_s = rollout.plan.turns[rollout.turn].wait_s + self.machine.request_s
            self._after(wait_s, partial(self._decode, rollout))

    def _decode(self, rollout: _Rollout) -> None:
        if (group := self._groups.get(rollout.group_id)) is None:
            return
        if group.engine < 0 or self._engines[group.engine].num_running >= self.machine.slots:
            group.engine = min(range(len(self._engines)), key=lambda index: self._engines[index].num_running)
        engine = rollout.engine = self._engines[group.engine]
        _, num_read, tokens = rollout.plan.turns[rollout.turn]
        engine.advance(self.now_s)
        if not rollout.turn:
            rollout.version = self.rule.served
        rollout.num_tokens += num_read
        is_stale = self.machine.reads_again and rollout.turn > 0 and rollout.read_version < self.rule.served
        engine.enter(rollout.num_tokens, rollout.num_tokens if is_stale else num_read)
        rollout.num_tokens += tokens
        rollout.sampled.append((engine, engine.clock, tokens))
        heapq.heappush(engine.ends, (engine.clock + tokens, next(self._numbers), rollout))
        self._changed(engine, was_busy=engine.num_running > 1)

    def _leave(self, rollout: _Rollout, engine: _Engine) -> None:
        engine.advance(self.now_s)
        _, clock, tokens = rollout.sampled[-1]
        engine.leave(clock - (rollout.num_tokens - tokens))
        rollout.engine, rollout.read_version = None, self.rule.served

    def _changed(self, engine: _Engine, *, was_busy: bool) -> None:
        """Set its timer for the next end: what runs there, or how fast, is another."""
        while engine.ends and engine.ends[0][2].engine is not engine:
            heapq.heappop(engine.ends)
        engine.timer += 1
        if engine.ends:
            self._at(engine.ends_s(engine.ends[0][0]), partial(self._ended, engine, engine.timer))
        if self.machine.decode_drag and was_busy != (engine.num_running > 0):
            self._pace_training()

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), event))

    def _ended(self, engine: _Engine, timer: int) -> None:
        if timer != engine.timer:
            return
        clock, _, rollout = heapq.heappop(engine.ends)
        self._leave(rollout, engine)
        engine.clock = clock
        self._changed(engine, was_busy=True)
        rollout.turn += 1
        self._go_on(rollout)

    def _stopped(self, rollout: _Rollout) -> None:
        group = self._groups.get(rollout.group_id)
        if group is None:
            return  # dropped meanwhile: its slots were freed then
        rollout.has_slot = False
        self._free_slots += 1
        group.num_sampling -= 1
        group.newest = self.rule.served
        if not group.num_sampling:
            self.rule.sampled_nowait(rollout.group_id)
        self._after(rollout.plan.reward_s, partial(self._rollout_done, rollout.group_id))

    def _rollout_done(self, group_id: GroupId) -> None:
        group = self._groups.get(group_id)
        if group is None:
            return
        group.num_unfinished -= 1
        oldest, newest = group.oldest, group.newest
        if group.num_unfinished:
            return
        self._counts["ended"] += 1
        if self.rule.finish_nowait(group_id, oldest=oldest, newest=newest):
            self._requeue(group_id)

    def _requeue(self, group_id: GroupId) -> None:
        group = self._groups.pop(group_id)
        self._counts["requeued"] += 1
        self._counts["ended"] += group.num_unfinished > 0
        if group.num_requeued < self.max_requeues:
            heapq.heappush(self._back, (group.prompt, group.num_requeued + 1))
        else:
            self._counts["given_up"] += 1
        for rollout in group.rollouts:
            self._free_slots += rollout.has_slot
            if (engine := rollout.engine) is not None:
                self._leave(rollout, engine)
                self._changed(engine, was_busy=True)

    # ---- trainer

    def _take_if_formed(self) -> None:
        rule = self.rule
        if self._is_training or rule.next_batch == self._end or rule.waits_for is not None:
            return
        self._waited_s += self.now_s - self._waits_since_s
        self.look_aheads.append(rule.look_ahead)
        choice = rule.take_nowait()
        taken = [(group_id, self._groups.pop(group_id)) for group_id in choice.group_ids]
        tokens = sum(self._weigh(choice.version, group) for _, group in taken)
        self.taken_s.append(self.now_s)
        self.batches.append((choice.version, tuple((group_id, group.oldest) for group_id, group in taken)))
        for group_id in choice.requeued:
            self._requeue(group_id)
        if self.auto is not None:
            rule.set_look_ahead(self.auto.batch_taken(self.now_s, rule.num_groups, rule.num_ready))
        self._is_training = True
        work_s = self.machine.train_s + tokens * self.machine.train_token_s
        self._after(self.machine.overhead_s / 2, partial(self._train, work_s))

    def _train(self, work_s: float) -> None:
        self._train_left_s, self._train_at_s, self._train_pace = work_s, self.now_s, 1.0
        self._drag(1.0 / (1.0 - self.machine.train_drag))
        self._pace_training()

    def _begin_to_count(self) -> None:
        for engine in self._engines:
            engine.advance(self.now_s)
        self._before = (self.now_s, sum(engine.busy_s for engine in self._engines), self._waited_s)
        self._tokens, self._masked, self._ages = 0.0, 0.0, []
        for name in ("late", "ended"):
            self._counts[name] = 0
        self._counts["requeued_before"] = self._counts["requeued"]

    def _drag(self, drag: float) -> None:
        """From now on engines take so much longer for a step."""
        if self.machine.train_drag:
            for engine in self._engines:
                engine.advance(self.now_s)
                engine.drag = drag
                self._changed(engine, was_busy=engine.num_running > 0)

    def _pace_training(self) -> None:
        """Set the timer of the step that is under way: it begins, or engines beside it begin or end."""
        if self._train_left_s is None:
            return
        self._train_left_s -= (self.now_s - self._train_at_s) / self._train_pace
        busy = sum(engine.num_running > 0 for engine in self._engines) / len(self._engines)
        self._train_at_s, self._train_pace = self.now_s, 1.0 / (1.0 - self.machine.decode_drag * busy)
        self._train_timer += 1
        ends_s = self.now_s + self._train_left_s * self._train_pace
        self._at(ends_s, partial(self._train_done, self._train_timer))

    def _weigh(self, version: int, group: _Group) -> float:
        """Count ages and masked tokens of a group in batch `version`. Returns tokens that are computed."""
        masks, max_staleness = self.rule.overdue.masks, self.rule.max_staleness
        min_version, computed = version - max_staleness, 0.0
        for rollout in group.rollouts:
            num = sum(num for _, _, num in rollout.sampled)
            self._tokens += num
            computed += num * rollout.plan.trained
            oldest = rollout.version
            if masks and oldest < min_version:
                lost = (
                    min(num, max(0.0, one.served_at[min_version] - at)) for one, at, num in rollout.sampled
                )
                masked, oldest = sum(lost), min_version
                self._masked += masked
                if masked >= num:
                    continue
            self._counts["late"] += version - oldest > max_staleness
            self._ages.append(version - oldest)
        return computed

    def _train_done(self, timer: int) -> None:
        if timer != self._train_timer:
            return
        self._train_left_s = None
        self._num_trained += 1
        self._drag(1.0)
        self._publish()
        self._after(self.machine.overhead_s / 2, self._ready)

    def _ready(self) -> None:
        self._is_training, self._waits_since_s = False, self.now_s
        if self.rule.next_batch == self.num_first:
            self._begin_to_count()
        self._take_if_formed()  # the trainer asks at once, before any admission

    def _publish(self) -> None:
        if not self._is_publishing and self._num_trained > self.rule.served:
            self._is_publishing = True
            self._after(self.machine.publish_s, partial(self._published, self._num_trained))

    def _published(self, version: int) -> None:
        self._is_publishing = False
        for engine in self._engines:
            engine.advance(self.now_s)
            engine.swap(version)
            self._changed(engine, was_busy=engine.num_running > 0)
        self.rule.set_served_nowait(version)
        self._publish()

    def _result(self) -> SimulationResult:
        began_s, busy_s, waited_s = self._before
        wall_s, counts = self.now_s - began_s, self._counts
        num_batches = self._end - self.num_first
        busy_s = sum(engine.busy_s for engine in self._engines) - busy_s
        num_again = counts["requeued"] - counts["requeued_before"]
        return SimulationResult(
            batches_per_s=num_batches / wall_s,
            trainer_idle=(self._waited_s - waited_s) / wall_s,
            engines_idle=max(0.0, 1 - busy_s / wall_s / len(self._engines)),
            age_mean=fmean(self._ages or [0.0]),
            age_max=max(self._ages, default=0),
            late_fraction=counts["late"] / max(1, len(self._ages)),
            masked_fraction=self._masked / self._tokens if self._tokens else 0.0,
            again_fraction=num_again / max(1, counts["ended"]),
            num_requeued=counts["requeued"],
            num_given_up=counts["given_up"],
            look_ahead_mean=fmean(self.look_aheads[self.num_first :]),
        )
