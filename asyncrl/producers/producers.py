"""The room that keeps the engines busy: admits groups, runs their rollouts, hands over what they became."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from asyncrl.errors import EngineError, TaskError
from asyncrl.producers.group import RunningGroup
from asyncrl.producers.rollout import FailedRollout, RolloutRunner
from asyncrl.types import Group, GroupId, GroupSink, PromptSource, Rollout, RolloutJournal, Ticket, UnfinishedGroup

NUM_OLDEST = 8
"""So many of the oldest rollouts are named by stats()."""


class Spawn(Protocol):
    """Starts a task in the run's one TaskGroup."""

    def __call__(self, coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """The started task."""
        ...


@dataclass(frozen=True, slots=True)
class ProducersStats:
    """`inflight` rollouts now, of which `sampling` hold an engine slot; the rest are totals so far.

    `failed`: rollouts whose every attempt failed; `retried`: attempts after a failed one; `timeouts`: attempts
    past rollout.timeout_s; `interrupted`: interruptions that finished rollouts survived, all branches together; `truncated`:
    finished rollouts with a branch that was cut; `dropped`: groups taken
    back by the buffer; `oldest`: (rollout, seconds since its start), oldest first, at most NUM_OLDEST.
    """

    inflight: int
    sampling: int
    groups: int
    finished: int
    failed: int
    failed_groups: int
    retried: int
    timeouts: int
    interrupted: int
    truncated: int
    dropped: int
    oldest: tuple[tuple[str, float], ...]
    last_failure: str


class Producers:
    """Groups from admission to the buffer. Knows rollouts and prompts; knows no server, no weights, no staleness rule.

    Life:       a group is admitted -> its rollouts run -> finish_nowait to the buffer, or fail_nowait when fewer
                than two are usable (its prompt is not tried again); or the buffer hands it back first: its rollouts
                are cancelled and its prompt goes to the front of the source. A finished group that the buffer filters
                is no failure: its admission comes again as a ticket, for the next prompt.
    Waits:      run sleeps for free slots, woken by a rollout that stops sampling; then for leave of the buffer. Slots
                come first: a ticket is stamped with the version served when its tokens can start at once.
    Invariant:  every ticket is answered once: finished, failed or handed back. No more than `capacity` rollouts
                sample when a group starts, its own included, except that one group always may run.
    """

    name = "producers"

    def __init__(
        self,
        sink: GroupSink,
        source: PromptSource,
        runner: RolloutRunner,
        *,
        spawn: Spawn,
        group_size: int,
        capacity: int,
        max_failed_groups: int,
        journal: RolloutJournal,
    ) -> None:
        self._sink, self._source, self._runner, self._spawn, self._journal = sink, source, runner, spawn, journal
        self.group_size, self.capacity, self.max_failed_groups = group_size, capacity, max_failed_groups
        self._groups: dict[GroupId, RunningGroup] = {}
        self._started_s: dict[str, float] = {}  # rollout id -> start, oldest first
        self._sampling: set[str] = set()
        self._changed = asyncio.Event()
        self._failed_in_a_row = 0
        self._finished = self._failed = self._failed_groups = self._interrupted = self._truncated = self._dropped = 0
        self._last_failure = ""

    def __repr__(self) -> str:
        return f"<Producers {len(self._groups)} groups, {len(self._sampling)}/{self.capacity} sampling, {self._failed} failed>"

    def stats(self) -> ProducersStats:
        """Counts so far, and the rollouts that have run longest."""
        now = asyncio.get_running_loop().time() if self._started_s else 0.0
        oldest = tuple((rollout, now - start) for rollout, start in islice(self._started_s.items(), NUM_OLDEST))
        return ProducersStats(
            inflight=len(self._started_s),
            sampling=len(self._sampling),
            groups=len(self._groups),
            finished=self._finished,
            failed=self._failed,
            failed_groups=self._failed_groups,
            retried=self._runner.num_retried,
            timeouts=self._runner.num_timeouts,
            interrupted=self._interrupted,
            truncated=self._truncated,
            dropped=self._dropped,
            oldest=oldest,
            last_failure=self._last_failure,
        )

    def prompts_out(self) -> list[str]:
        """Ids of the prompts whose groups run."""
        return [group.prompt.prompt_id for group in self._groups.values()]

    def start_version(self, group_id: GroupId) -> int | None:
        """Oldest policy_version that a token of this group may carry; None if it does not run any more."""
        group = self._groups.get(group_id)
        return None if group is None else group.ticket.start_version

    async def run(self) -> None:
        """Start group after group until cancelled."""
        while True:
            await self.wait_free_slots()
            ticket = await self._sink.wait_admit()
            prompt = self._source.next_nowait()
            self._journal.admitted_nowait(ticket, prompt)  # no token is sampled before: the rollouts start below
            self._start(RunningGroup(ticket, prompt, self.group_size))

    def resume_nowait(self, unfinished: UnfinishedGroup) -> None:
        """Go on with a group that ran when the run was killed; its admission and its journal are as they were."""
        group = RunningGroup(unfinished.ticket, unfinished.prompt, self.group_size, unfinished)
        self._start(group)
        if group.is_complete:  # killed between its last rollout's end and its own
            self._complete(group)

    async def aclose(self) -> None:
        """Cancel what still runs; idempotent."""
        for group in self._groups.values():
            group.cancel()
        self._groups.clear()

    async def wait_free_slots(self) -> None:
        """Return when a whole group may start sampling."""
        while self._sampling and len(self._sampling) + self.group_size > self.capacity:
            await self._changed.wait()

    def handed_back(self, group_id: GroupId, group: Group | None, reason: str) -> None:
        """The buffer's callback: it took this admission back. `group` is None if the group still runs.

        The rollouts that run are cancelled, and the prompt is generated again, first of all. Raises KeyError
        for a group that is neither given nor running.
        """
        if group is None:
            running = self._groups.pop(group_id)
            running.cancel()
            prompt = running.prompt
        else:
            prompt = group.prompt
        self._dropped += 1
        self._journal.group_ended_nowait(group_id, "handed_back", reason)
        self._source.hand_back_nowait(prompt)

    def _start(self, group: RunningGroup) -> None:
        group_id = group.ticket.group_id
        self._groups[group_id] = group
        for index in group.to_run:
            rollout_id = f"g{group_id}/r{index}"
            self._sampling.add(rollout_id)  # before the task's first step, so that the slots are charged at once
            task = self._spawn(self._run_rollout(group, index, rollout_id), name=f"rollout {rollout_id}")
            task.add_done_callback(functools.partial(self._stopped_sampling, rollout_id))  # even if it never began
            group.tasks.append(task)

    async def _run_rollout(self, group: RunningGroup, index: int, rollout_id: str) -> None:
        self._started_s[rollout_id] = asyncio.get_running_loop().time()
        try:
            outcome = await self._runner.run(
                group.ticket.group_id,
                group.prompt,
                index,
                started_sampling=functools.partial(self._sampling.add, rollout_id),
                stopped_sampling=functools.partial(self._stopped_sampling, rollout_id),
                journal=self._journal,
                resumed=group.resumed(index),
            )
        finally:
            del self._started_s[rollout_id]
        if self._groups.get(group.ticket.group_id) is not group:
            return  # handed back while the outcome was on its way
        self._count(group.ticket, outcome)
        if isinstance(outcome, FailedRollout):
            self._journal.rollout_failed_nowait(group.ticket.group_id, index, outcome.num_attempts, str(outcome.failure))
        else:
            self._journal.rollout_finished_nowait(group.ticket.group_id, outcome)
        group.add(outcome)
        if group.is_complete:
            self._complete(group)

    def _complete(self, running: RunningGroup) -> None:
        group_id = running.ticket.group_id
        del self._groups[group_id]  # first: the buffer may hand the group back while it is being finished
        group = running.group()
        if group is not None:
            self._failed_in_a_row = 0
            found = self._sink.finish_nowait(group)
            if found in ("ready", "filtered"):  # what was handed back is journaled by handed_back()
                self._journal.group_ended_nowait(group_id, found, "")
            return
        self._failed_groups += 1
        self._failed_in_a_row += 1
        reason = running.why_failed()
        if self._failed_in_a_row >= self.max_failed_groups:
            raise TaskError(
                self.name,
                f"{self._failed_in_a_row} groups in a row had too few usable rollouts, the last: {reason}",
                rule=f"rollout.max_failed_groups={self.max_failed_groups} in a row end the run",
                way_out="mend what the last failure names (the reward function, the prompts, rollout.timeout_s), then start again.",
            )
        self._journal.group_ended_nowait(group_id, "failed", reason)
        self._sink.fail_nowait(group_id, reason)

    def _count(self, ticket: Ticket, outcome: Rollout | FailedRollout) -> None:
        if isinstance(outcome, FailedRollout):
            self._failed += 1
            self._last_failure = str(outcome.failure)
            return
        oldest = min(branch.oldest_version for branch in outcome)
        if oldest < ticket.start_version:
            raise EngineError(
                self.name,
                f"g{ticket.group_id}/r{outcome[0].sample_index} has tokens of version {oldest}",
                rule=f"its group was admitted when every engine served version {ticket.start_version} or newer",
                way_out="an engine server went back to older weights: read the engines' logs, then start the run again.",
            )
        self._finished += 1
        self._interrupted += sum(branch.num_interruptions for branch in outcome)
        self._truncated += any(branch.is_truncated for branch in outcome)

    def _stopped_sampling(self, rollout_id: str, _: object = None) -> None:
        if rollout_id in self._sampling:
            self._sampling.remove(rollout_id)
            self._changed.set()
            self._changed = asyncio.Event()
