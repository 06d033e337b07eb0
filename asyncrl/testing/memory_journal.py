"""A journal in memory, with the journal's methods and its rules about groups and batches. For tests of other
rooms; runs no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Literal

from asyncrl.errors import JournalError
from asyncrl.messages.records import Batch, GroupId, PartialCompletion, Prompt, Rollout, Ticket


class MemoryJournal:
    """Keeps what it is told: `events` in order as (method without _nowait, its arguments ...), and `states`
    of groups.

    `hold()` makes batch_taken wait until `go()`, like a slow disk; `fail(error)` makes every later call raise
    it, like a full one.
    """

    name = "journal"

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.states: dict[GroupId, str] = {}
        self.partials: dict[tuple[GroupId, int], PartialCompletion] = {}
        self.batches: dict[int, Batch] = {}
        self.is_closed = False
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._has_failed = asyncio.Event()
        self._failure: JournalError | None = None

    def __repr__(self) -> str:
        return f"<MemoryJournal {len(self.events)} events, {len(self.batches)} batches>"

    def named(self, *methods: str) -> list[tuple[Any, ...]]:
        """The events of these methods, in order."""
        return [event for event in self.events if event[0] in methods]

    def hold(self) -> None:
        """Nothing becomes durable any more."""
        self._may_write.clear()

    def go(self) -> None:
        """All that waits is durable."""
        self._may_write.set()

    def fail(self, error: JournalError) -> None:
        """Nothing can be written any more."""
        self._failure = error
        self._has_failed.set()
        self._may_write.set()

    def admitted_nowait(self, ticket: Ticket, prompt: Prompt) -> None:
        """The group runs."""
        if self.states.get(ticket.group_id, "running") != "running":
            raise JournalError(
                f"group {ticket.group_id} cannot be admitted: it is {self.states[ticket.group_id]}"
            )
        self._note("admitted", ticket, prompt)
        self.states[ticket.group_id] = "running"

    def segment_nowait(
        self, group_id: GroupId, sample_index: int, attempt: int, turn: int, partial: PartialCompletion
    ) -> None:
        """Kept in `partials` too."""
        self._known(group_id)
        self._note("segment", group_id, sample_index, attempt, turn, partial)
        self.partials[group_id, sample_index] = partial

    def rollout_finished_nowait(self, group_id: GroupId, rollout: Rollout) -> None:
        """Noted."""
        self._known(group_id)
        self._note("rollout_finished", group_id, rollout)

    def rollout_failed_nowait(
        self, group_id: GroupId, sample_index: int, num_attempts: int, why: str
    ) -> None:
        """Noted."""
        self._known(group_id)
        self._note("rollout_failed", group_id, sample_index, num_attempts, why)

    def group_ended_nowait(
        self,
        group_id: GroupId,
        state: Literal["ready", "failed", "filtered", "handed_back"],
        reason: str,
        *,
        requeued: int | None = None,
    ) -> None:
        """The group's new state."""
        found = self._known(group_id)
        if found != "running" and (found, state) != ("ready", "handed_back"):
            raise JournalError(f"group {group_id} cannot become {state}: it is {found}")
        self._note("group_ended", group_id, state, reason, requeued)
        self.states[group_id] = state

    async def batch_taken(self, batch: Batch) -> Literal["taken", "replayed"]:
        """The groups are taken, or were by the same batch."""
        await self._may_write.wait()
        group_ids = [group.group_id for group in batch.groups]
        earlier = self.batches.get(batch.version)
        if earlier is not None:
            if [group.group_id for group in earlier.groups] != group_ids:
                raise JournalError(f"batch {batch.version} cannot be taken: it was taken with other groups")
            self._note("batch_taken", batch)
            return "replayed"
        for group_id in group_ids:
            if self.states.get(group_id) != "ready":
                raise JournalError(
                    f"batch {batch.version} cannot be taken: group {group_id} is "
                    f"{self.states.get(group_id, 'unknown')}"
                )
        self._note("batch_taken", batch)
        self.batches[batch.version] = batch
        self.states.update(dict.fromkeys(group_ids, "taken"))
        return "taken"

    def trained_nowait(self, version: int, metrics: Mapping[str, float]) -> None:
        """Noted."""
        if version not in self.batches:
            raise JournalError(f"a step of batch {version}, which was never taken")
        self._note("trained", version, dict(metrics))

    def published_nowait(self, version: int, digest: str) -> None:
        """Noted."""
        self._note("published", version, digest)

    def checkpointed_nowait(self, version: int, path: object, beside: Collection[int] = ()) -> None:
        """Noted."""
        self._note("checkpointed", version, str(path))

    def restored_nowait(self, version: int) -> None:
        """Noted, as an event."""
        self.event_nowait("restored", {"version": version})

    def order_nowait(self, what: Mapping[str, Any]) -> None:
        """What the order of prompts follows from."""
        self._note("order", dict(what))

    def event_nowait(self, what: str, detail: Mapping[str, Any], *, keep: int | None = None) -> None:
        """Noted."""
        self._note("event", what, dict(detail))

    async def flush(self) -> None:
        """Wait until writing goes on."""
        await self._may_write.wait()
        self._check()

    async def compact(self, before_version: int) -> None:
        """Noted."""
        self._note("compact", before_version)

    async def wait_failed(self) -> None:
        """Sleep until fail(), then raise its error."""
        await self._has_failed.wait()
        self._check()

    async def aclose(self) -> None:
        """Nothing more may be told."""
        self.is_closed = True

    def _known(self, group_id: GroupId) -> str:
        if group_id not in self.states:
            raise JournalError(f"group {group_id} was never admitted")
        return self.states[group_id]

    def _note(self, *event: Any) -> None:
        self._check()
        self.events.append(event)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.is_closed:
            raise JournalError("the journal is closed")
