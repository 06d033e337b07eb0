"""The room that keeps the engines busy: admits groups, runs their rollouts, hands over what they became."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from asyncrl.errors import EngineError, TaskError, WouldWait
from asyncrl.messages.protocols import GroupSink, PromptSource, RolloutJournal
from asyncrl.messages.records import Group, GroupId, Prompt, Rollout, Ticket, UnfinishedGroup
from asyncrl.rollouts.rollout import FailedRollout, RolloutRunner, RunningGroup, Slots

log = logging.getLogger(__name__)

NUM_OLDEST = 8
"""So many of the oldest rollouts are named by stats()."""


class Spawn(Protocol):
    """Starts a task in the run's one TaskGroup."""

    def __call__(self, coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """The started task."""
        ...


@dataclass(frozen=True, slots=True)
class ProducersStats:
    """`inflight` rollouts have begun, of which `sampling` hold an engine slot; `waiting` wait for one; the
    rest are totals so far.

    `failed`: rollouts whose every attempt failed; `failed_groups`: with too few usable ones; `retried`:
    attempts after a failed one; `timeouts`: rollouts past rollout.timeout_s; `interrupted`: interruptions
    that finished rollouts survived, all branches together; `truncated`: finished rollouts with a branch that
    was cut; `dropped`: groups taken back by the buffer; `given_up`: prompts whose groups failed or were taken
    back once too often, or that can never be sampled; `oldest`: (rollout, seconds since it had its first
    slot), oldest first, at most NUM_OLDEST.
    """

    inflight: int
    sampling: int
    waiting: int
    groups: int
    finished: int
    failed: int
    failed_groups: int
    retried: int
    timeouts: int
    interrupted: int
    truncated: int
    dropped: int
    given_up: int
    oldest: tuple[tuple[str, float], ...]
    last_failure: str


class Producers:
    """Groups from admission to the buffer. Knows rollouts and prompts; knows no server, no weights, no
    staleness rule.

    Life:       a group is admitted -> its rollouts run -> finish_nowait to the buffer, or fail_nowait when
    fewer than two are usable;
                or the buffer hands it back first and its rollouts are cancelled. A prompt whose group was
                handed back goes to the front of the source at once, one whose group failed when another group
                has not failed (while all fail it is no fault of the prompts, and trying them again would use
                up their tries) and a later version is served (so that at max_staleness 0 the prompts of a
                batch do not depend on when a group fails); max_hand_backs times, then it is given up, as one
                that can never be sampled is at once. A finished group that the buffer filters is no failure:
                its admission comes again as a ticket, for the next prompt.
    Waits:      run sleeps for a free slot, woken by a rollout that stops sampling, then for leave of the
    buffer; a ticket is asked for
                when both are there, so that it is stamped with the version served when its first tokens can
                start. A rollout sleeps for a slot before each attempt. Free slots go to the rollouts of
                admitted groups, earliest deadline first, before they let a new group in.
    Invariant:  every ticket is answered once: finished, failed or handed back. No more than `capacity`
    rollouts sample, ever:
                Slots guarantees it.
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
        max_hand_backs: int,
        journal: RolloutJournal,
    ) -> None:
        self._sink, self._source, self._runner, self._spawn, self._journal = (
            sink,
            source,
            runner,
            spawn,
            journal,
        )
        self.group_size, self.capacity = group_size, capacity
        self.max_failed_groups, self.max_hand_backs = max_failed_groups, max_hand_backs
        self._groups: dict[GroupId, RunningGroup] = {}
        self._started_s: dict[str, float] = {}  # rollout id -> when it first had a slot, oldest first
        self._slots = Slots(capacity)
        self._failed_in_a_row = 0
        self._set_aside: list[
            tuple[int, Prompt]
        ] = []  # of groups that failed in this row: (start version, as it will come again)
        self._returning: list[
            tuple[int, Prompt]
        ] = []  # of those before: each comes again with the first ticket of a later version
        self._known_to_fail: set[str] = set()  # ids of prompts that came again: failed while others did not
        self._finished = self._failed = self._failed_groups = self._interrupted = self._truncated = 0
        self._dropped = self._given_up = 0
        self._last_failure = ""

    def __repr__(self) -> str:
        return f"<Producers {len(self._groups)} groups, {self._slots.num_held}/{self.capacity} sampling, {self._failed} failed>"

    def stats(self) -> ProducersStats:
        """Counts so far, and the rollouts that have run longest."""
        now = asyncio.get_running_loop().time() if self._started_s else 0.0
        oldest = tuple(
            (rollout, now - start) for rollout, start in islice(self._started_s.items(), NUM_OLDEST)
        )
        return ProducersStats(
            inflight=len(self._started_s),
            sampling=self._slots.num_held,
            waiting=self._slots.num_waiting,
            groups=len(self._groups),
            finished=self._finished,
            failed=self._failed,
            failed_groups=self._failed_groups,
            retried=self._runner.num_retried,
            timeouts=self._runner.num_timeouts,
            interrupted=self._interrupted,
            truncated=self._truncated,
            dropped=self._dropped,
            given_up=self._given_up,
            oldest=oldest,
            last_failure=self._last_failure,
        )

    def gauges(self) -> dict[str, float]:
        """Its numbers, by the names of observe/gauges.py."""
        return {
            "rollout/inflight": len(self._started_s),
            "rollout/finished": self._finished,
            "rollout/failed": self._failed,
            "rollout/retried": self._runner.num_retried,
            "rollout/dropped": self._dropped,
            "rollout/failed_groups": self._failed_groups,
            "rollout/given_up": self._given_up,
        }

    def prompts_out(self) -> list[Prompt]:
        """The prompts whose groups run, and those of failed groups that are yet to come again."""
        return [
            *(group.prompt for group in self._groups.values()),
            *(prompt for _, prompt in (*self._set_aside, *self._returning)),
        ]

    def start_version(self, group_id: GroupId) -> int | None:
        """Oldest policy_version that a token of this group may carry; None if it does not run any more."""
        group = self._groups.get(group_id)
        return None if group is None else group.ticket.start_version

    async def run(self) -> None:
        """Start group after group until cancelled."""
        while True:
            await self._slots.wait_spare()
            try:
                ticket = self._sink.admit_nowait()
            except WouldWait:
                await self._sink.wait_open()
                continue  # meanwhile a rollout that is tried again may have taken the slot
            self._hand_back_older(ticket.start_version)
            prompt = self._source.next_nowait()
            self._journal.admitted_nowait(
                ticket, prompt
            )  # no token is sampled before: the rollouts start below
            self._start(RunningGroup(ticket, prompt, self.group_size))

    def resume_nowait(self, unfinished: UnfinishedGroup) -> None:
        """Go on with a group that ran when the run was killed; its admission and its journal are as they
        were.
        """
        group = RunningGroup(unfinished.ticket, unfinished.prompt, self.group_size, unfinished)
        self._start(group)
        if group.is_complete:  # killed between its last rollout's end and its own
            self._complete(group)

    def returns_nowait(self, start_version: int, prompt: Prompt) -> None:
        """A group of that version had failed when the run was killed: its prompt comes again once a later one
        is served.
        """
        self._returning.append((start_version, prompt))

    async def aclose(self) -> None:
        """Cancel what still runs; idempotent."""
        for group in self._groups.values():
            group.cancel()
        self._groups.clear()

    def handed_back(self, group_id: GroupId, group: Group | None, reason: str) -> None:
        """The buffer's callback: it took this admission back. `group` is None if the group still runs.

        The rollouts that run are cancelled, and the prompt is generated again, first of all, unless that was
        max_hand_backs times. Raises KeyError for a group that is neither given nor running.
        """
        if group is None:
            running = self._groups.pop(group_id)
            running.cancel()
            prompt = running.prompt
        else:
            prompt = group.prompt
        self._dropped += 1
        again = self._again(prompt, reason)
        self._journal.group_ended_nowait(
            group_id, "handed_back", reason, requeued=None if again is None else again.num_handed_back
        )
        if again is not None:
            self._source.hand_back_nowait(again)

    def _start(self, group: RunningGroup) -> None:
        group_id = group.ticket.group_id
        self._groups[group_id] = group
        for index in group.to_run:
            rollout_id, order = f"g{group_id}/r{index}", (group.ticket.start_version, group_id, index)
            self._slots.ask_nowait(
                rollout_id, order
            )  # before the task's first step, so that the slot is charged at once
            task = self._spawn(
                self._run_rollout(group, index, rollout_id, order), name=f"rollout {rollout_id}"
            )
            task.add_done_callback(
                functools.partial(self._stopped_sampling, rollout_id)
            )  # even if it never began
            group.tasks.append(task)

    async def _run_rollout(
        self, group: RunningGroup, index: int, rollout_id: str, order: tuple[int, ...]
    ) -> None:
        try:
            outcome = await self._runner.run(
                group.ticket.group_id,
                group.prompt,
                index,
                wait_slot=functools.partial(self._wait_slot, rollout_id, order),
                stopped_sampling=functools.partial(self._stopped_sampling, rollout_id),
                journal=self._journal,
                resumed=group.resumed(index),
            )
        finally:
            self._started_s.pop(rollout_id, None)
        if self._groups.get(group.ticket.group_id) is not group:
            return  # handed back while the outcome was on its way
        self._count(group.ticket, outcome)
        if isinstance(outcome, FailedRollout):
            self._journal.rollout_failed_nowait(
                group.ticket.group_id, index, outcome.num_attempts, str(outcome.failure)
            )
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
            self._end_row_of_failures(group.prompt.prompt_id)
            found = self._sink.finish_nowait(group)
            if found in ("ready", "filtered"):  # what was handed back is journaled by handed_back()
                self._journal.group_ended_nowait(group_id, found, "")
            return
        self._failed_groups += 1
        self._failed_in_a_row += running.prompt.prompt_id not in self._known_to_fail
        reason = running.why_failed()
        again = self._again(running.prompt, reason, can_be_tried=running.can_be_tried_again)
        self._journal.group_ended_nowait(
            group_id, "failed", reason, requeued=None if again is None else again.num_handed_back
        )
        if again is not None:
            self._set_aside.append((running.ticket.start_version, again))
        if self._failed_in_a_row >= self.max_failed_groups:
            raise TaskError(
                self.name,
                f"{self._failed_in_a_row} groups in a row had too few usable rollouts, the last: {reason}",
                rule=f"rollout.max_failed_groups={self.max_failed_groups} in a row end the run",
                way_out="mend what the last failure names (the reward function, the prompts, "
                "rollout.timeout_s), then start again.",
            )
        self._sink.fail_nowait(group_id, reason)

    def _end_row_of_failures(self, prompt_id: str) -> None:
        self._failed_in_a_row = 0
        self._known_to_fail.discard(prompt_id)
        self._known_to_fail.update(prompt.prompt_id for _, prompt in self._set_aside)
        self._returning += self._set_aside
        self._set_aside.clear()

    def _hand_back_older(self, version: int) -> None:
        due = [prompt for start_version, prompt in self._returning if start_version < version]
        self._returning = [
            (start_version, prompt) for start_version, prompt in self._returning if start_version >= version
        ]
        for prompt in due:
            self._source.hand_back_nowait(prompt)

    def _again(self, prompt: Prompt, reason: str, *, can_be_tried: bool = True) -> Prompt | None:
        """The prompt with one hand-back more; None if it has had them all, or can never be sampled, and is
        given up.
        """
        if prompt.num_handed_back >= self.max_hand_backs or not can_be_tried:
            self._given_up += 1
            self._known_to_fail.discard(prompt.prompt_id)
            log.warning(
                "prompt %s is given up with group number %d of it: %s",
                prompt.prompt_id,
                prompt.num_handed_back + 1,
                reason,
            )
            return None
        return replace(prompt, num_handed_back=prompt.num_handed_back + 1)

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
                rule=f"its group was admitted when every engine served version {ticket.start_version} or "
                f"newer",
                way_out="an engine server went back to older weights: read the engines' logs, then start the "
                "run again.",
            )
        self._finished += 1
        self._interrupted += sum(branch.num_interruptions for branch in outcome)
        self._truncated += any(branch.is_truncated for branch in outcome)

    async def _wait_slot(self, rollout_id: str, order: tuple[int, ...]) -> None:
        self._slots.ask_nowait(rollout_id, order)
        await self._slots.wait(rollout_id)
        self._started_s.setdefault(rollout_id, asyncio.get_running_loop().time())

    def _stopped_sampling(self, rollout_id: str, _: object = None) -> None:
        self._slots.give_back_nowait(rollout_id)
