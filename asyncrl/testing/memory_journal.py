"""A journal in memory, with the journal's methods and its rules about groups and batches; runs no thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from asyncrl.errors import JournalError
from asyncrl.messages.records import Batch, GroupId, PartialCompletion, Prompt, Rollout, Ticket


class MemoryJournal:
    """Keeps every call: `events` in order as (method without _nowait, its arguments ...), and `states` of
    groups.
    """

    name = "journal"

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.states: dict[GroupId, str] = {}
        self.batches: dict[int, Batch] = {}

    def __getattr__(self, method: str) -> Callable[..., None]:
        """The methods that have no rule of their own."""
        if not method.endswith("_nowait"):
            raise AttributeError(method)
        return partial(self._note, method.removesuffix("_nowait"))

    def named(self, *methods: str) -> list[tuple[Any, ...]]:
        """The events of these methods, in order."""
        return [event for event in self.events if event[0] in methods]

    def admitted_nowait(self, ticket: Ticket, prompt: Prompt) -> None:
        self._refuse_unless(self.states.get(ticket.group_id, "running") == "running", ticket.group_id)
        self.states[ticket.group_id] = "running"
        self._note("admitted", ticket, prompt)

    def segment_nowait(
        self, group_id: GroupId, sample_index: int, attempt: int, turn: int, partial: PartialCompletion
    ) -> None:
        self._refuse_unless(group_id in self.states, group_id)
        self._note("segment", group_id, sample_index, attempt, turn, partial)

    def rollout_finished_nowait(self, group_id: GroupId, rollout: Rollout) -> None:
        self._refuse_unless(group_id in self.states, group_id)
        self._note("rollout_finished", group_id, rollout)

    def rollout_failed_nowait(
        self, group_id: GroupId, sample_index: int, num_attempts: int, why: str
    ) -> None:
        self._refuse_unless(group_id in self.states, group_id)
        self._note("rollout_failed", group_id, sample_index, num_attempts, why)

    def group_ended_nowait(
        self,
        group_id: GroupId,
        state: Literal["ready", "failed", "filtered", "handed_back"],
        reason: str,
        *,
        requeued: int | None = None,
    ) -> None:
        found = self.states.get(group_id)
        self._refuse_unless(found == "running" or (found, state) == ("ready", "handed_back"), group_id)
        self._note("group_ended", group_id, state, reason, requeued)
        self.states[group_id] = state

    async def batch_taken(self, batch: Batch) -> Literal["taken", "replayed"]:
        """The groups are taken, or were by the same batch."""
        await asyncio.sleep(0)
        group_ids = [group.group_id for group in batch.groups]
        self._note("batch_taken", batch)
        if (earlier := self.batches.get(batch.version)) is not None:
            if [group.group_id for group in earlier.groups] == group_ids:
                return "replayed"
        elif all(self.states.get(group_id) == "ready" for group_id in group_ids):
            self.batches[batch.version] = batch
            self.states.update(dict.fromkeys(group_ids, "taken"))
            return "taken"
        raise JournalError(f"batch {batch.version} cannot be taken with groups {group_ids}")

    async def flush(self) -> None:
        """All is kept."""

    async def wait_failed(self) -> None:
        """Writing never fails."""
        await asyncio.Event().wait()

    async def compact(self, before_version: int) -> None:
        self._note("compact", before_version)

    async def aclose(self) -> None:
        """Nothing is held."""

    def _refuse_unless(self, fits: bool, group_id: GroupId) -> None:
        if not fits:
            raise JournalError(f"group {group_id} is {self.states.get(group_id, 'unknown')}")

    def _note(self, *event: Any, **keywords: Any) -> None:
        self.events.append((*event, *keywords.values()))
