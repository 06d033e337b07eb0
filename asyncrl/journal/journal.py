"""The journal of a run: writes down what happens before it has consequences. Knows groups and versions; knows
no torch, no HTTP, no staleness rule.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from asyncrl.journal import decisions
from asyncrl.journal.decisions import Taken
from asyncrl.journal.read import ResumeState, read_resume
from asyncrl.journal.schema import open_to_write
from asyncrl.journal.writer import Writer
from asyncrl.messages.records import Batch, GroupId, PartialCompletion, Prompt, Rollout, Ticket
from asyncrl.waits import waiting

Ended = Literal["ready", "failed", "filtered", "handed_back"]


class Journal:
    """A run's life in journal.sqlite. All `_nowait` methods queue and return at once; the awaited ones return
    when it is durable.

    Group:      admitted -> segments, rollouts finished or failed -> ready -> taken by one batch; or failed,
                filtered, handed back. A ready one may still be handed back. The prompt of one that failed or
                was handed back may be requeued.
    Waits:      batch_taken, flush, compact and read_resume sleep until the writer has committed; wait_failed
                until it fails.
    Invariant:  a group is in one state, and in one batch at most; a prompt has one group that runs, is ready
                or taken. Unique keys of the tables guarantee both, and batch_taken is one transaction. What
                is queued first is durable first. One process has the run's lock (RunLock), and writes.
    Errors:     the first one ends the writing for good: wait_failed raises it, and so does every later call.
    """

    name = "journal"

    def __init__(self, path: Path, writer: Writer) -> None:
        """Journal.open makes one."""
        self.path, self._writer = path, writer

    @classmethod
    def open(cls, path: Path, *, run_id: str) -> Journal:
        """Open the journal of a run, or make it. Blocks while the file is checked: call it in a thread.
        Raises JournalError for a damaged or foreign file, and one of another run.
        """
        return cls(path, Writer(open_to_write(path, run_id), path))

    # ---- producers (RolloutJournal)

    def admitted_nowait(self, ticket: Ticket, prompt: Prompt) -> None:
        """The group starts. For a group that runs already, after a resume, it changes nothing."""
        self._writer.put(decisions.admitted, ticket, prompt, time.time())

    def segment_nowait(
        self, group_id: GroupId, sample_index: int, attempt: int, turn: int, partial: PartialCompletion
    ) -> None:
        """The completion so far; replaces what was there of the same rollout."""
        self._writer.put(decisions.segment, group_id, sample_index, attempt, turn, partial)

    def rollout_finished_nowait(self, group_id: GroupId, rollout: Rollout) -> None:
        """One rollout of the group ended well: all its branches, or none of them."""
        self._writer.put(decisions.rollout_finished, group_id, rollout)

    def rollout_failed_nowait(
        self, group_id: GroupId, sample_index: int, num_attempts: int, why: str
    ) -> None:
        """One rollout of the group failed at each of its attempts."""
        self._writer.put(decisions.rollout_failed, group_id, sample_index, num_attempts, why)

    def group_ended_nowait(
        self, group_id: GroupId, state: Ended, reason: str, *, requeued: int | None = None
    ) -> None:
        """The group runs no more, or (handed_back) is ready no more. `requeued`: its prompt comes again, with
        that num_handed_back.
        """
        self._writer.put(decisions.group_ended, group_id, state, reason, requeued, time.time())

    # ---- trainer, weight sync, checkpoints

    async def batch_taken(self, batch: Batch) -> Taken:
        """The groups are this batch's for ever. Train on it after this returns, and not before.

        "replayed": the same batch was taken before, by a run that was resumed. Raises JournalError if a group
        is not ready or in another batch, the version has other groups, or is not the next one. If it is
        cancelled the batch may be taken all the same.
        """
        with waiting(f"batch {batch.version} to be durable in the journal", on="the journal's thread"):
            taken: Taken = await asyncio.wrap_future(
                self._writer.ask(decisions.batch_taken, batch, time.time())
            )
        return taken

    def trained_nowait(self, version: int, metrics: Mapping[str, float]) -> None:
        """The batch `version` was trained on (policy_version is version + 1 now). Replaces what was said
        before a resume.
        """
        self._writer.put(decisions.trained, version, dict(metrics), time.time())

    def published_nowait(self, version: int, digest: str) -> None:
        """Every engine serves policy_version `version`. Replaces what was said before a resume."""
        self._writer.put(decisions.published, version, digest, time.time())

    def checkpointed_nowait(self, version: int, path: Path | str, beside: Collection[int] = ()) -> None:
        """The checkpoint at policy_version `version` is whole on disk. Of those before it the ones in
        `beside` are still there.
        """
        self._writer.put(decisions.checkpointed, version, str(path), tuple(beside), time.time())

    def restored_nowait(self, version: int) -> None:
        """The run goes on from weights `version`; the batches from there on are trained again."""
        self.event_nowait("restored", {"version": version})

    def began_at_nowait(
        self, version: int, num_drawn: int, out: Mapping[str, int], next_group_id: int
    ) -> None:
        """A new journal of an old run, which goes on from a checkpoint alone. To be called before any
        group is admitted.

        `num_drawn` prompts were drawn by then; those in `out` are to come again, with that num_handed_back,
        all others are consumed.
        """
        before = {
            "version": version,
            "num_drawn": num_drawn,
            "out": dict(out),
            "next_group_id": next_group_id,
        }
        self._writer.put(decisions.noted, "began_at", before)

    def order_nowait(self, what: Mapping[str, Any]) -> None:
        """What the order of the run's prompts follows from, at its first start: a resumed run must have the
        same.
        """
        self._writer.put(decisions.noted, "order", dict(what))

    def event_nowait(self, what: str, detail: Mapping[str, Any], *, keep: int | None = None) -> None:
        """Something that `inspect` should tell: a restart, a resume, what the watchdog saw.

        `keep`: of what happens in every step, only the newest so many of that name stay.
        """
        self._writer.put(decisions.event, what, dict(detail), keep, time.time())

    # ---- what is awaited

    async def flush(self) -> None:
        """Return when all that was queued is durable. Raises JournalError if it cannot be."""
        with waiting("the journal to be durable", on="the journal's thread"):
            await asyncio.wrap_future(self._writer.ask(lambda connection: None))

    async def wait_failed(self) -> None:
        """Sleep until the journal cannot be written any more, and raise that JournalError."""
        raise await asyncio.shield(asyncio.wrap_future(self._writer.failed))

    async def read_resume(self, checkpoint_version: int) -> ResumeState:
        """What a run has to know that goes on from a checkpoint at that version (0: the initial weights)."""
        await self.flush()
        with waiting("what the journal says of the run", on="the journal's file"):
            return await asyncio.to_thread(read_resume, self.path, checkpoint_version)

    async def compact(self, before_version: int) -> None:
        """Delete the tokens of batches before `before_version`, the oldest kept checkpoint, and of older
        groups that were never trained on. What a group was, and where it went, stays.

        Goes in small steps, so that other decisions wait for one step at most.
        """
        with waiting("old tokens to be deleted from the journal", on="the journal's thread"):
            while await asyncio.wrap_future(self._writer.ask(decisions.compact_some, before_version)):
                pass

    async def aclose(self) -> None:
        """Write what waits and close; idempotent. Raises JournalError if something was never written."""
        await asyncio.to_thread(self._writer.stop)
