"""Admit groups, run their rollouts, and pass finished groups to the buffer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any, Literal

from asyncrl.base.errors import EngineError, TaskError, WouldWait
from asyncrl.buffer.buffer import Buffer
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Group, GroupId, Prompt, Rollout, Ticket, UnfinishedGroup, by_task
from asyncrl.rollouts.rollout import (
    FailedRollout,
    Phase,
    RolloutAttempt,
    RolloutRunner,
    Slots,
    how_failed,
)
from asyncrl.tasks.prompt_source import PromptSource

log = logging.getLogger(__name__)

NUM_OLDEST = 8

Spawn = Callable[..., asyncio.Task[None]]
OnFailed = Callable[[GroupId, Prompt, FailedRollout], None]


class RunningGroup:
    """An admitted group.

    Life: made from its ticket or a killed run -> one add() per rollout -> group(), or cancel() if the buffer
    revokes it.
    """

    def __init__(self, earlier: UnfinishedGroup, group_size: int) -> None:
        self.ticket = earlier.ticket
        self.prompt = earlier.prompt
        self.partials = earlier.partials
        self.group_size = group_size
        self.tasks: list[asyncio.Task[Any]] = []
        self.sampled: set[int] = set()
        self._rollouts = dict(earlier.rollouts)
        self._failures = dict(earlier.failures)

    @property
    def to_run(self) -> list[int]:
        done = self._rollouts.keys() | self._failures.keys()
        return [index for index in range(self.group_size) if index not in done]

    def add(self, outcome: Rollout | FailedRollout) -> None:
        if isinstance(outcome, FailedRollout):
            self._failures[outcome.sample_index] = (outcome.num_attempts, str(outcome.failure))
        else:
            self._rollouts[outcome[0].sample_index] = outcome

    def group(self) -> Group | None:
        """Return None if fewer than two rollouts are usable."""
        if len(self._rollouts) < min(2, self.group_size):
            return None
        by_index = sorted(self._rollouts.items())
        branches = tuple(branch for _, rollout in by_index for branch in rollout)
        return Group(self.ticket.group_id, self.prompt, branches)

    def why_failed(self) -> tuple[str, bool]:
        """Return the failure, and whether another attempt may succeed."""
        index, (num_attempts, why) = list(self._failures.items())[-1]
        what = (
            f"g{self.ticket.group_id} (prompt {self.prompt.prompt_id}) has {len(self._rollouts)} usable "
            f"rollouts of {self.group_size}; r{index} {how_failed(num_attempts)}: {why}"
        )
        return what, all(attempts for attempts, _ in self._failures.values())

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


class Producers:
    """Run groups from admission to the buffer.

    Life: admitted -> rollouts run -> finish_nowait, or fail_nowait if fewer than two are usable; or the
    buffer revokes it.

    A revoked prompt returns at once. A failed prompt returns after another group has succeeded (if all fail,
    prompts are not the cause) and a later version is served (so that at max_staleness 0 batches do not depend
    on timing), at most max_requeues times.

    Waits: run sleeps for a free slot, then for the buffer's permission; only then it takes a ticket, which
    carries the served version.

    Invariant: every ticket is answered once: finished, failed or revoked.
    """

    name = "producers"

    def __init__(
        self,
        sink: Buffer,
        source: PromptSource,
        runner: RolloutRunner,
        *,
        spawn: Spawn,
        group_size: int,
        capacity: int,
        max_failed_groups: int,
        max_requeues: int,
        journal: Journal,
        on_failed: OnFailed = lambda *_: None,
    ) -> None:
        self._on_failed = on_failed
        self._sink = sink
        self._source = source
        self._runner = runner
        self._spawn = spawn
        self._journal = journal
        self.group_size = group_size
        self.max_failed_groups = max_failed_groups
        self.max_requeues = max_requeues
        self._groups: dict[GroupId, RunningGroup] = {}
        self._slots = Slots(capacity)
        self._failed_in_a_row = 0
        # recent consecutive failures: (start version, prompt)
        self._set_aside: list[tuple[int, Prompt]] = []
        # earlier failures, for the first ticket of a later version
        self._returning: list[tuple[int, Prompt]] = []
        self._counts = Counter[str]()
        self._failed = Counter[str]()
        self.last_failure = ""

    def gauges(self) -> dict[str, float]:
        counted = ("finished", "dropped", "failed_groups", "given_up")
        return {
            "rollout/inflight": len(self._runner.started_s),
            "rollout/retried": self._runner.num_retried,
            **{f"rollout/{name}": self._counts[name] for name in counted},
            **by_task("rollout/failed", self._failed),
        }

    @property
    def num_sampling(self) -> int:
        return self._slots.num_held

    def resize_nowait(self, capacity: int) -> None:
        self._slots.resize_nowait(capacity)

    def oldest(self) -> list[tuple[str, float]]:
        started = list(islice(self._runner.started_s.items(), NUM_OLDEST))
        return [(name, asyncio.get_running_loop().time() - start_s) for name, start_s in started]

    def prompts_out(self) -> list[Prompt]:
        set_aside = [prompt for _, prompt in (*self._set_aside, *self._returning)]
        return [group.prompt for group in self._groups.values()] + set_aside

    async def run(self) -> None:
        while True:
            await self._slots.wait_spare()
            try:
                ticket = self._sink.admit_nowait()
            except WouldWait:
                await self._sink.wait_open()
                continue
            for start_version, prompt in self._returning:
                if start_version < ticket.start_version:
                    self._source.requeue_nowait(prompt)
            self._returning = [entry for entry in self._returning if entry[0] >= ticket.start_version]
            prompt = self._source.next_nowait(ticket.start_version)
            self._journal.admitted_nowait(ticket, prompt)  # before any token is sampled
            self.resume_nowait(UnfinishedGroup(ticket, prompt))
            await asyncio.sleep(0)  # a new version may admit thousands

    def resume_nowait(self, unfinished: UnfinishedGroup) -> None:
        group = RunningGroup(unfinished, self.group_size)
        group_id = unfinished.ticket.group_id
        self._groups[group_id] = group
        for index in group.to_run:
            name = f"g{group_id}/r{index}"
            order = (unfinished.ticket.start_version, group_id, index)
            self._slots.ask_nowait(name, order)  # before the task's first step: charged at once
            task = self._spawn(self._run_rollout(group, index, order), name=f"rollout {name}")
            # even if the task never began
            task.add_done_callback(functools.partial(self._give_back, name))
            group.tasks.append(task)
        if not group.to_run:  # killed before its end was journaled
            self._complete(group)

    def returns_nowait(self, start_version: int, prompt: Prompt) -> None:
        self._returning.append((start_version, prompt))

    async def aclose(self) -> None:
        """Cancel running rollouts. Idempotent."""
        for group in self._groups.values():
            group.cancel()
        self._groups.clear()

    def requeued(self, group_id: GroupId, group: Group | None, reason: str) -> None:
        """`group` is None while it runs. The prompt is repeated up to max_requeues times."""
        unused = group or self._groups.pop(group_id)
        if isinstance(unused, RunningGroup):
            unused.cancel()
        self._counts["dropped"] += 1
        again = self._end_unused(group_id, "requeued", unused.prompt, reason, may_succeed=True)
        if again is not None:
            self._source.requeue_nowait(again)

    def _give_back(self, name: str, task: asyncio.Task[None]) -> None:
        self._slots.give_back_nowait(name)
        if task.cancelled():
            # A task keeps its CancelledError, whose frames hold the task; reading it releases it.
            with contextlib.suppress(asyncio.CancelledError):
                task.result()

    def _on_phase(self, group: RunningGroup, index: int, phase: Phase) -> None:
        group_id = group.ticket.group_id
        is_running = self._groups.get(group_id) is group
        if phase == "sampling":
            group.sampled.discard(index)
            if is_running:
                self._sink.samples_again_nowait(group_id)
            return
        group.sampled.add(index)
        if is_running and group.sampled.issuperset(group.to_run):
            self._sink.sampled_nowait(group_id)

    async def _run_rollout(self, group: RunningGroup, index: int, order: tuple[int, ...]) -> None:
        group_id = group.ticket.group_id
        number, partial = group.partials.get(index, (0, None))
        name = f"g{group_id}/r{index}"
        attempt = RolloutAttempt(name, group_id, group.prompt, index, number, partial, self._journal)
        on_phase = functools.partial(self._on_phase, group, index)
        outcome = await self._runner.run(attempt, slots=self._slots, order=order, on_phase=on_phase)
        if self._groups.get(group_id) is not group:
            return
        if isinstance(outcome, FailedRollout):
            self._failed[group.prompt.task] += 1
            self.last_failure = str(outcome.failure)
            self._journal.rollout_failed_nowait(group_id, index, outcome.num_attempts, self.last_failure)
            self._on_failed(group_id, group.prompt, outcome)
        else:
            self._check_versions(group.ticket, outcome)
            self._counts["finished"] += 1
            self._journal.rollout_finished_nowait(group_id, outcome)
        group.add(outcome)
        if not group.to_run:
            self._complete(group)
        elif isinstance(outcome, FailedRollout):
            self._on_phase(group, index, "scoring")

    def _check_versions(self, ticket: Ticket, rollout: Rollout) -> None:
        oldest = min(branch.oldest_version for branch in rollout)
        if oldest < ticket.start_version:
            what = f"g{ticket.group_id}/r{rollout[0].sample_index} has tokens of version {oldest}"
            rule = f"every engine served version {ticket.start_version} when its group was admitted"
            way_out = "read the engines' logs: one went back to older weights. Then start again."
            raise EngineError(self.name, what, rule=rule, way_out=way_out)

    def _complete(self, running: RunningGroup) -> None:
        group_id = running.ticket.group_id
        start_version = running.ticket.start_version
        prompt = running.prompt
        del self._groups[group_id]  # first: the buffer may revoke the group now
        group = running.group()
        if group is not None:
            self._failed_in_a_row = 0
            self._returning += self._set_aside
            self._set_aside.clear()
            state = self._sink.finish_nowait(group)
            if state != "requeued":  # requeued() journals revoked groups
                self._journal.group_ended_nowait(group_id, state, "")
                rewards = {branch.sample_index: branch.reward for branch in group.trajectories}.values()
                self._source.observed_nowait(prompt.prompt_id, fmean(rewards), start_version)
            return
        self._counts["failed_groups"] += 1
        self._failed_in_a_row += not prompt.num_requeued  # a requeued prompt may itself be the cause
        reason, may_succeed = running.why_failed()
        again = self._end_unused(group_id, "failed", prompt, reason, may_succeed=may_succeed)
        if again is not None:
            self._set_aside.append((start_version, again))
        if self._failed_in_a_row >= self.max_failed_groups:
            what = f"{self._failed_in_a_row} groups in a row had too few usable rollouts, the last: {reason}"
            rule = f"rollout.max_failed_groups={self.max_failed_groups} in a row end the run"
            way_out = "correct what the last failure names, then start again."
            raise TaskError(self.name, what, rule=rule, way_out=way_out)
        self._sink.fail_nowait(group_id)

    def _end_unused(
        self,
        group_id: GroupId,
        state: Literal["failed", "requeued"],
        prompt: Prompt,
        reason: str,
        *,
        may_succeed: bool,
    ) -> Prompt | None:
        """Return the prompt, or None if it is given up."""
        again = None
        num_requeued = None
        if may_succeed and prompt.num_requeued < self.max_requeues:
            num_requeued = prompt.num_requeued + 1
            again = replace(prompt, num_requeued=num_requeued)
        else:
            self._counts["given_up"] += 1
            log.warning("prompt %s is given up: %s", prompt.prompt_id, reason)
        self._journal.group_ended_nowait(group_id, state, reason, requeued=num_requeued)
        return again
