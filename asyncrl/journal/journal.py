"""The journal of a run: writes down what happens before it has consequences. Imports no torch."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec

from asyncrl.journal import decisions
from asyncrl.journal.read import ResumeState, read_resume
from asyncrl.journal.schema import open_to_write
from asyncrl.journal.writer import Writer
from asyncrl.messages.records import Batch
from asyncrl.waits import waiting

Args = ParamSpec("Args")


def _later(
    decide: Callable[Concatenate[sqlite3.Connection, Args], None],
) -> Callable[Concatenate[Journal, Args], None]:
    """The method of a decision that no caller waits for."""

    def put(journal: Journal, /, *args: Args.args, **options: Args.kwargs) -> None:
        journal._writer.put(lambda connection: decide(connection, *args, **options))

    return put


class Journal:
    """A run's life in journal.sqlite. All `_nowait` methods queue their decision and return at once; the
    awaited ones return when it is durable.

    Group:      admitted -> segments, rollouts finished or failed -> ready -> taken by one batch; or failed,
                filtered, handed back. A ready one may still be handed back. The prompt of one that failed or
                was handed back may be requeued.
    Waits: batch_taken, flush, compact and read_resume sleep until the writer has committed; wait_failed until
        it fails.
    Invariant: a group is in one state, and in one batch at most; a prompt has one group that runs, is ready
        or taken. Unique keys of the tables guarantee both, and batch_taken is one transaction. What is queued
        first is durable first. One process has the run's lock (RunLock), and writes.
    Errors: the first one ends the writing for good: wait_failed raises it, and so does every later call.
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

    admitted_nowait = _later(decisions.admitted)
    segment_nowait = _later(decisions.segment)
    rollout_finished_nowait = _later(decisions.rollout_finished)
    rollout_failed_nowait = _later(decisions.rollout_failed)
    group_ended_nowait = _later(decisions.group_ended)
    trained_nowait = _later(decisions.trained)
    published_nowait = _later(decisions.published)
    checkpointed_nowait = _later(decisions.checkpointed)
    restored_nowait = _later(decisions.restored)
    began_at_nowait = _later(decisions.began_at)
    order_nowait = _later(decisions.order)
    event_nowait = _later(decisions.event)

    async def batch_taken(self, batch: Batch) -> Literal["taken", "replayed"]:
        """The groups are this batch's for ever. Train on it after this returns, and not before.

        "replayed": the same batch was taken before, by a run that was resumed. Raises JournalError if a group
        is not ready or in another batch, the version has other groups, or is not the next one. If it is
        cancelled the batch may be taken all the same.
        """
        taking = self._writer.ask(partial(decisions.batch_taken, batch=batch))
        with waiting(f"batch {batch.version} to be durable in the journal", on="the journal's thread"):
            return await asyncio.wrap_future(taking)

    async def flush(self) -> None:
        """Return when all that was queued is durable. Raises JournalError if it cannot be."""
        with waiting("the journal to be durable", on="the journal's thread"):
            await asyncio.wrap_future(self._writer.ask(lambda connection: None))

    async def wait_failed(self) -> None:
        """Sleep until the journal cannot be written any more, and raise that JournalError."""
        raise await asyncio.shield(asyncio.wrap_future(self._writer.failed))

    async def read_resume(self, checkpoint_version: int) -> ResumeState:
        """What a run needs to resume from the checkpoint of that version (0: the initial weights)."""
        await self.flush()
        with waiting("what the journal says of the run", on="the journal's file"):
            return await asyncio.to_thread(read_resume, self.path, checkpoint_version)

    async def compact(self, before_version: int) -> None:
        """Delete the tokens of batches before `before_version`, the oldest kept checkpoint, and of older
        groups that were never trained on. What a group was, and where it went, stays.

        Goes in small steps, so that other decisions wait for one step at most.
        """
        some = partial(decisions.compact_some, before_version=before_version)
        with waiting("old tokens to be deleted from the journal", on="the journal's thread"):
            while await asyncio.wrap_future(self._writer.ask(some)):
                pass

    async def aclose(self) -> None:
        """Write what waits and close; idempotent. Raises JournalError if something was never written."""
        await asyncio.to_thread(self._writer.stop)
