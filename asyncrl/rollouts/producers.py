"""Admit groups, run their rollouts, and pass finished groups to the buffer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import ClassVar, Literal

from asyncrl.base.errors import RewardFailure, RolloutFailure, TaskError, WouldWait
from asyncrl.base.waits import clock
from asyncrl.buffer.buffer import Buffer
from asyncrl.config.rollout_config import RolloutConfig
from asyncrl.engines.role_client import Annotate
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import (
    Group,
    GroupId,
    Outcome,
    Prompt,
    Rollout,
    Ticket,
    UnfinishedGroup,
    by_task,
)
from asyncrl.rollouts.late_rewards import LateRewards, awaited_of
from asyncrl.rollouts.rollout import (
    FailedRollout,
    Phase,
    RolloutAttempt,
    RolloutRunner,
    Scored,
    Slots,
    annotate_group,
    how_failed,
    score_group,
    with_outcome,
)
from asyncrl.tasks.prompt_source import PromptSource
from asyncrl.tasks.scorer import Scorers

log = logging.getLogger(__name__)

NUM_OLDEST = 8
ROLLOUTS_A_TURN = 128
"""Rollouts to start before other tasks run: some 10 ms."""

Spawn = Callable[..., asyncio.Task[None]]
OnFailed = Callable[[GroupId, Prompt, FailedRollout], None]


@dataclass(slots=True, eq=False)
class RunningGroup:
    """An admitted group: new, or of a killed run.

    `failures`: (number of attempts, reason) by sample_index, with 0 attempts for a
    prompt that can never be sampled.
    """

    ticket: Ticket
    prompt: Prompt
    size: int
    rollouts: dict[int, Rollout]
    failures: dict[int, tuple[int, str]]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    phases: dict[int, Phase] = field(init=False)
    """By index of the rollouts that have not ended."""

    def __post_init__(self) -> None:
        to_run = {*range(self.size)} - self.rollouts.keys() - self.failures.keys()
        self.phases = dict.fromkeys(sorted(to_run), "sampling")

    @property
    def group_id(self) -> GroupId:
        return self.ticket.group_id

    def rollout_id(self, index: int) -> str:
        return f"g{self.group_id}/r{index}"

    @property
    def is_usable(self) -> bool:
        # One rollout has no sibling to compare its reward with. Groups of one are the
        # user's choice.
        return len(self.rollouts) >= min(2, self.size) and not self.odd_parts

    @property
    def odd_parts(self) -> str:
        """Say which parts of a reward are not in all rollouts, or return "". A rollout
        that a limit cut has no parts, and earns 0.
        """
        firsts = [rollout[0] for rollout in self.rollouts.values()]
        names = [{*one.parts} for one in firsts if one.parts or one.reward]
        odd = set().union(*names).difference(*(names and [set.intersection(*names)]))
        return ", ".join(sorted(odd))

    @property
    def is_unscored(self) -> bool:
        """Whether a reward is not known yet."""
        return any(not rollout[0].is_scored for rollout in self.rollouts.values())

    def lacks(self, columns: frozenset[str]) -> bool:
        """Return whether a rollout has no values of one of these token columns."""
        return any(
            columns - rollout[0].tokens.columns.keys()
            for rollout in self.rollouts.values()
        )

    def group(self) -> Group | None:
        """Return None if fewer than two rollouts are usable."""
        if not self.is_usable:
            return None
        # By sample_index: the batch must not depend on which rollout ended first.
        branches = tuple(
            branch for _, rollout in sorted(self.rollouts.items()) for branch in rollout
        )
        return Group(self.group_id, self.prompt, branches)

    def why_failed(self) -> str:
        name = f"g{self.group_id} (prompt {self.prompt.prompt_id})"
        if odd := self.odd_parts:
            return (
                f"{name} has rollouts without the parts of the reward {odd}, which others have; None is for "
                "one that does not apply\n  Way out: name the same parts for all rollouts."
            )
        index, (num_attempts, why) = list(self.failures.items())[-1]
        return (
            f"{name} has {len(self.rollouts)} usable rollouts of {self.size}; "
            f"r{index} {how_failed(num_attempts)}: {why}"
        )

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


@dataclass(eq=False, kw_only=True)
class Producers:
    """Run groups from admission to the buffer.

    Life: admitted -> rollouts run -> scored, if the task scores whole groups ->
    annotated, if `annotations` need whole groups -> finish_nowait, or fail_nowait if
    fewer than two are usable; or the buffer revokes it.

    A revoked prompt returns at once. A failed prompt returns after another group has
    succeeded (if all fail, prompts are not the cause) and a later version is served (so
    that at max_staleness 0 batches do not depend on timing), at most max_requeues
    times.

    Waits: run sleeps for a free slot, then for the buffer's permission; only then it
    takes a ticket, which carries the served version.

    Invariant: every ticket is answered once: finished, failed or revoked.
    """

    name: ClassVar[str] = "producers"

    sink: Buffer
    source: PromptSource
    runner: RolloutRunner
    spawn: Spawn
    scorers: Scorers
    config: RolloutConfig
    capacity: InitVar[int]
    journal: Journal
    late: LateRewards
    on_failed: OnFailed
    on_finished: Callable[[Group], None]
    annotations: Sequence[Annotate] = ()
    """Of whole groups."""
    columns: frozenset[str] = frozenset()
    """Token columns that a group has after them."""
    last_failure: str = field(default="", init=False)
    _groups: dict[GroupId, RunningGroup] = field(default_factory=dict, init=False)
    _failed_in_a_row: int = field(default=0, init=False)
    _set_aside: list[tuple[int, Prompt]] = field(default_factory=list, init=False)
    """Recent consecutive failures: (start version, prompt)."""
    _returning: list[tuple[int, Prompt]] = field(default_factory=list, init=False)
    """Earlier failures, for the first ticket of a later version."""
    _counts: Counter[str] = field(default_factory=Counter, init=False)
    _failed: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self, capacity: int) -> None:
        self.slots = Slots(capacity)
        self.sink.requeue_to(self.on_requeued)

    def gauges(self) -> dict[str, float]:
        counted = ("finished", "dropped", "failed_groups", "given_up")
        return {
            "rollout/inflight": len(self.runner.started_s),
            "rollout/retried": self.runner.num_retried,
            **{f"rollout/{name}": self._counts[name] for name in counted},
            **by_task("rollout/failed", self._failed),
            **self.runner.failures.gauges(),
        }

    def filling(self) -> str:
        """Describe the next batch: the ready groups, then the running groups with most
        ended rollouts.

        Example: a batch has 2 groups of 8 rollouts. One group is ready, and two run
        with 5 and 3 ended rollouts: 13 of 16.
        """
        rule = self.sink.rule
        size = self.config.group_size
        ended = [size - len(group.phases) for group in self._groups.values()] + [
            size
        ] * rule.num_ready
        num = sum(sorted(ended)[-rule.num_groups :])
        text = (
            f"rollouts {num} of {rule.num_groups * size} for step {rule.next_batch + 1}"
        )
        num_awaited = self.late.num_awaited
        return f"{text}, {num_awaited} wait for rewards" if num_awaited else text

    def oldest(self) -> list[tuple[str, float]]:
        now_s = clock()
        oldest = islice(self.runner.started_s.items(), NUM_OLDEST)
        return [(name, now_s - start_s) for name, start_s in oldest]

    def prompts_out(self) -> list[Prompt]:
        set_aside = [prompt for _, prompt in (*self._set_aside, *self._returning)]
        return [group.prompt for group in self._groups.values()] + set_aside

    async def run(self) -> None:
        num_started = 0
        while True:
            await self.slots.wait_spare()
            try:
                ticket = self.sink.admit_nowait()
            except WouldWait:
                # A ticket ages from its admission, so it is asked for only with a slot
                # at hand. During this wait a retried rollout may take the slot: begin
                # again.
                await self.sink.wait_open()
                continue
            # Which ticket a failed prompt gets must not depend on the moment of its
            # failure. With tickets of the same version it would.
            for start_version, prompt in self._returning:
                if start_version < ticket.start_version:
                    self.source.requeue_nowait(prompt)
            self._returning = [
                entry for entry in self._returning if entry[0] >= ticket.start_version
            ]
            prompt = self.source.next_nowait(ticket.start_version)
            self.journal.add_admission_nowait(
                ticket, prompt
            )  # before any token is sampled
            self.resume_nowait(UnfinishedGroup(ticket, prompt))
            # A new version may admit thousands. Requests of one turn leave as one frame,
            # and an engine that gets a batch at once needs fewer decode steps for it.
            num_started += self.config.group_size
            if num_started >= ROLLOUTS_A_TURN:
                num_started = 0
                await asyncio.sleep(0)

    def resume_nowait(self, unfinished: UnfinishedGroup) -> None:
        """Start the rollouts that an admitted group lacks: all of a new group, the rest
        of a killed run's group.
        """
        ticket = unfinished.ticket
        group_id = ticket.group_id
        group = RunningGroup(
            ticket,
            unfinished.prompt,
            self.config.group_size,
            dict(unfinished.rollouts),
            dict(unfinished.failures),
        )
        self._groups[group_id] = group
        for index in group.phases:
            name = group.rollout_id(index)
            # The oldest group goes first: its deadline is the earliest, and its
            # siblings have begun to age.
            order = (ticket.start_version, group_id, index)
            # before the task's first step: charged at once
            self.slots.ask_nowait(name, order)
            # The number of the killed attempt, because it is a part of the seed.
            number, partial = unfinished.partials.get(index, (0, None))
            attempt = RolloutAttempt(
                name,
                group_id,
                group.prompt,
                index,
                number,
                partial,
                self.journal,
                on_phase=functools.partial(self._on_phase, group, index),
            )
            task = self.spawn(
                self._run_rollout(group, attempt, order), name=f"rollout {name}"
            )
            # even if the task never began
            task.add_done_callback(functools.partial(self._give_back, name))
            group.tasks.append(task)
        for index, digest in awaited_of(group.rollouts).items():
            self._await_nowait(group, index, digest)
        if not group.phases:  # killed before its end was journaled
            self._sampled(group)

    def returns_nowait(self, start_version: int, prompt: Prompt) -> None:
        """Repeat a prompt of a killed run in a ticket above `start_version`."""
        self._returning.append((start_version, prompt))

    async def aclose(self) -> None:
        """Cancel running rollouts. Idempotent."""
        for group in self._groups.values():
            group.cancel()
        self._groups.clear()

    def on_requeued(self, group_id: GroupId, group: Group | None, reason: str) -> None:
        """`group` is None while it runs. The prompt is repeated up to max_requeues
        times.
        """
        unused = group or self._groups.pop(group_id)
        if isinstance(unused, RunningGroup):
            unused.cancel()
            self._withdraw(unused, f"its group was requeued ({reason})")
        self._counts["dropped"] += 1
        again = self._end_unused(
            group_id, "requeued", unused.prompt, reason, may_succeed=True
        )
        if again is not None:
            self.source.requeue_nowait(again)

    def _give_back(self, name: str, task: asyncio.Task[None]) -> None:
        self.slots.give_back_nowait(name)
        if task.cancelled():
            # A task keeps its CancelledError, whose frames hold the task; reading it
            # releases it.
            with contextlib.suppress(asyncio.CancelledError):
                task.result()

    def _on_phase(self, group: RunningGroup, index: int, phase: Phase) -> None:
        group.phases[index] = phase
        if phase != "sampling":
            self._note_sampled(group)
        elif self._is_running(group):
            self.sink.samples_again_nowait(group.group_id)

    def _is_running(self, group: RunningGroup) -> bool:
        """Return False once the buffer has revoked the group, or it has failed."""
        return self._groups.get(group.group_id) is group

    def _note_sampled(self, group: RunningGroup) -> None:
        """Notify the buffer if a group only waits for rewards or teaching.

        With `mask` the buffer then gives up a group whose tokens are all too old. To
        wait for its rewards first would hold an admission for nothing.
        """
        phases = {*group.phases.values()}
        if self._is_running(group) and "sampling" not in phases:
            has_rewards = phases == {"teaching"} and not group.is_unscored
            self.sink.sampled_nowait(group.group_id, has_rewards=has_rewards)

    async def _run_rollout(
        self, group: RunningGroup, attempt: RolloutAttempt, order: tuple[int, ...]
    ) -> None:
        group_id = attempt.group_id
        index = attempt.sample_index
        outcome = await self.runner.run(attempt, slots=self.slots, order=order)
        # The buffer has revoked the group, and its prompt is in use again: this outcome
        # must not count.
        if not self._is_running(group):
            return
        del group.phases[index]
        if isinstance(outcome, FailedRollout):
            self._fail(group, outcome)
            self.journal.add_failure_nowait(
                group_id, index, outcome.num_attempts, self.last_failure
            )
        else:
            digest = outcome[0].awaits
            early = None if digest is None else self.late.early_nowait(digest)
            if early is not None:
                weights = self.scorers.of(group.prompt).weights
                outcome = with_outcome(outcome, early, weights)
                self.runner.failures.note_end_nowait(None, group.prompt.prompt_id)
            self._counts["finished"] += outcome[0].is_scored
            group.rollouts[index] = outcome
            self.journal.add_rollout_nowait(group_id, outcome)
            if digest is not None and early is None:
                self._await_nowait(group, index, digest)
        if not group.phases:
            self._sampled(group)
        elif isinstance(outcome, FailedRollout):
            # The failed rollout may have been the last of its group that sampled.
            self._note_sampled(group)

    def _fail(self, group: RunningGroup, failed: FailedRollout) -> None:
        self._failed[group.prompt.task] += 1
        name = group.rollout_id(failed.sample_index)
        self.late.withdraw_nowait(name, f"it has failed: {failed.failure.what}")
        self.last_failure = f"[{failed.failure.kind}] {failed.failure}"
        group.failures[failed.sample_index] = (failed.num_attempts, self.last_failure)
        self.on_failed(group.group_id, group.prompt, failed)
        self.runner.failures.check(failed.failure, self.name)

    def _sampled(self, group: RunningGroup) -> None:
        """Complete a group whose rollouts have all ended, after the rewards that it
        lacks (of whole groups, or posted later) and its annotations.
        """
        is_open = group.is_unscored or group.lacks(self.columns)
        if not (is_open and group.is_usable):
            self._complete(group)
            return
        group_id = group.group_id
        # With its tokens: a resume must not renew the time in which a batch can use it.
        self.sink.sampled_nowait(
            group_id, group.group(), has_rewards=not group.is_unscored
        )
        # The buffer may have revoked it just now.
        if self._is_running(group) and not awaited_of(group.rollouts):
            task = self.spawn(self._score(group), name=f"reward g{group_id}")
            group.tasks.append(task)

    def _await_nowait(self, group: RunningGroup, index: int, digest: str) -> None:
        name = group.rollout_id(index)
        weights = self.scorers.of(group.prompt).weights
        paid = functools.partial(with_outcome, group.rollouts[index], weights=weights)
        self.late.await_nowait(name, digest, paid)
        waiting = self._await_reward(group, index, digest, paid)
        task = self.spawn(waiting, name=f"reward {name}")
        group.tasks.append(task)

    async def _await_reward(
        self,
        group: RunningGroup,
        index: int,
        digest: str,
        paid: Callable[[Outcome], Rollout],
    ) -> None:
        """Complete a rollout once its reward is posted, or fail it at the limit. `paid`
        returns it with the reward.
        """
        # The journal holds the rollout without its reward, so a run that is killed here
        # awaits it again.
        try:
            name = group.rollout_id(index)
            outcome = await self.late.wait(name, digest)
        except RewardFailure as failure:
            if not self._is_running(group):
                return
            self._rewarded(group, {index: failure})
        else:
            self._rewarded(group, {index: paid(outcome)})
            await self.late.settle(digest)
        # The reward of a sibling may have completed the group while this one was
        # written.
        if self._is_running(group) and not group.phases:
            self._sampled(group)

    async def _score(self, group: RunningGroup) -> None:
        # The journal holds the rollouts without rewards. A run that is killed here
        # scores the group again; once group_scored is written, no more. The same holds
        # for annotations.
        prompt = group.prompt
        if group.is_unscored:
            scored = await score_group(
                self.scorers.of(prompt), prompt, group.rollouts, group.size
            )
            if not self._is_running(group):  # as in _run_rollout
                return
            self._rewarded(group, scored)
        if group.is_usable and group.lacks(self.columns):
            self.sink.sampled_nowait(group.group_id, has_rewards=True)
            annotated = await annotate_group(self.annotations, prompt, group.rollouts)
            if not self._is_running(group):
                return
            self._rewarded(group, annotated)
        self._complete(group)

    def _rewarded(self, group: RunningGroup, ended: Scored) -> None:
        """Count and journal what ended rollouts earn or get besides, and why others have
        failed.
        """
        rollouts = group.rollouts
        prompt_id = group.prompt.prompt_id
        earned = -sum(rollouts[index][0].reward for index in ended)
        failed = dict[int, RolloutFailure]()
        scored = list[Rollout]()
        for index, outcome in ended.items():
            if isinstance(outcome, RolloutFailure):
                failed[index] = outcome
                continue
            if not rollouts[index][0].is_scored:
                self._counts["finished"] += 1
                self.runner.failures.note_end_nowait(None, prompt_id)
            rollouts[index] = outcome
            scored.append(outcome)
        earned += sum(rollout[0].reward for rollout in scored)
        # One call scored the group, so it has failed once.
        for failure in [*failed.values()][:1]:
            self.runner.failures.note_end_nowait(failure, prompt_id)
        for index, failure in failed.items():
            seen = functools.partial(tuple, rollouts.pop(index))
            self._fail(group, FailedRollout(index, 1, failure, seen))
        whys = {index: group.failures[index][1] for index in failed}
        self.journal.add_scores_nowait(group.group_id, scored, whys, earned)

    def _complete(self, running: RunningGroup) -> None:
        group_id = running.group_id
        start_version = running.ticket.start_version
        prompt = running.prompt
        del self._groups[group_id]  # first: the buffer may revoke the group now
        self._withdraw(running, "too few rollouts of its group have rewards")
        group = running.group()
        if group is not None:
            # Another prompt succeeds, so the model and the reward work: the prompts
            # that failed may be tried again.
            self._failed_in_a_row = 0
            self._returning += self._set_aside
            self._set_aside.clear()
            self.on_finished(group)
            state = self.sink.finish_nowait(group)
            if state != "requeued":  # on_requeued() journals revoked groups
                self.journal.end_group_nowait(group_id, state, "")
                rewards = {
                    branch.sample_index: branch.reward for branch in group.trajectories
                }.values()
                self.source.observe_nowait(
                    prompt.prompt_id, fmean(rewards), start_version
                )
            return
        self._counts["failed_groups"] += 1
        if not prompt.num_requeued:  # a requeued prompt may itself be the cause
            self._failed_in_a_row += 1
        reason = running.why_failed()
        # After 0 attempts no later try can succeed either.
        may_succeed = all(num_attempts for num_attempts, _ in running.failures.values())
        again = self._end_unused(
            group_id, "failed", prompt, reason, may_succeed=may_succeed
        )
        if again is not None:
            self._set_aside.append((start_version, again))
        if self._failed_in_a_row >= self.config.max_failed_groups:
            what, _, way_out = reason.partition("\n  Way out: ")
            raise TaskError(
                self.name,
                f"{self._failed_in_a_row} groups in a row had too few usable rollouts, the last: {what}",
                rule=f"rollout.max_failed_groups={self.config.max_failed_groups} in a row end the run",
                way_out=way_out or "correct what it names, then start again.",
            )
        self.sink.fail_nowait(group_id)

    def _withdraw(self, group: RunningGroup, why: str) -> None:
        for index in {*range(group.size), *group.rollouts}:
            self.late.withdraw_nowait(group.rollout_id(index), why)

    def _end_unused(
        self,
        group_id: GroupId,
        state: Literal["failed", "requeued"],
        prompt: Prompt,
        reason: str,
        *,
        may_succeed: bool,
    ) -> Prompt | None:
        """Journal the end of a group that no batch uses. Return its prompt to repeat,
        or None if it is given up.
        """
        again = None
        num_requeued = None
        if may_succeed and prompt.num_requeued < self.config.max_requeues:
            # A part of every seed (Prompt.seed_id): the same tokens would fail, or be
            # late, again.
            num_requeued = prompt.num_requeued + 1
            again = replace(prompt, num_requeued=num_requeued)
        else:
            self._counts["given_up"] += 1
            log.warning("prompt %s is given up: %s", prompt.prompt_id, reason)
        self.journal.end_group_nowait(group_id, state, reason, requeued=num_requeued)
        return again
