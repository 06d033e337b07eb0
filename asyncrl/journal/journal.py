"""The journal of a run: writes down what happens before it has consequences. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from asyncrl.errors import JournalError
from asyncrl.journal import decisions
from asyncrl.journal.read import ResumeState, read_resume
from asyncrl.journal.schema import DISK_ERRORS, cannot_use, open_to_write
from asyncrl.messages.records import Batch
from asyncrl.waits import waiting

Args = ParamSpec("Args")
T = TypeVar("T")


GATHER_S = 0.02
"""Seconds for which decisions that no caller waits for are gathered: one commit, and one change of threads,
for all of them.
"""


class _Job(NamedTuple):
    """A decision that waits. `answer` None: no caller waits for it, so its refusal ends the writing."""

    decide: Callable[[sqlite3.Connection], Any]
    answer: Future[Any] | None
    decided_s: float


def _later(
    decide: Callable[Concatenate[sqlite3.Connection, Args], None],
) -> Callable[Concatenate[Journal, Args], None]:
    """The method of a decision that no caller waits for."""

    def put(journal: Journal, /, *args: Args.args, **options: Args.kwargs) -> None:
        journal._put(lambda connection: decide(connection, *args, **options))

    return put


class Journal:
    """A run's life in journal.sqlite. All `_nowait` methods queue their decision, which waits GATHER_S for
    others to be written with it, and return at once; the awaited ones return when it is durable.

    Group:      admitted -> segments, rollouts finished or failed -> ready -> taken by one batch; or failed,
                filtered, handed back. A ready one may still be handed back. The prompt of one that failed or
                was handed back may be requeued.
    Waits: batch_taken, flush, compact and read_resume sleep until the thread has committed; wait_failed until
        it fails. The thread sleeps in the queue, which the staleness rule bounds: the run awaits each batch.
    Invariant: a group is in one state, and in one batch at most; a prompt has one group that runs, is ready
        or taken. Unique keys of the tables guarantee both, and batch_taken is one transaction. What is queued
        first is durable first, and answered after the commit. One process has the run's lock (RunLock), and
        writes.
    Errors: the first one ends the writing for good: wait_failed raises it, and so does every call that waits
        and every later one.
    """

    name = "journal"

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Journal.open makes one."""
        self.path, self._connection = path, connection
        self.num_commits, self.longest_commit_s, self.busy_s = 0, 0.0, 0.0
        self._failed: Future[JournalError] = Future()
        self._is_closed = False
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_awaited = threading.Event()
        # a daemon: a run that crashes must not hang on it
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path, *, run_id: str) -> Journal:
        """Open the journal of a run, or make it. Blocks while the file is checked: call it in a thread.
        Raises JournalError for a damaged or foreign file, and one of another run.
        """
        return cls(path, open_to_write(path, run_id))

    admitted_nowait = _later(decisions.admitted)
    segment_nowait = _later(decisions.segment)
    rollout_finished_nowait = _later(decisions.rollout_finished)
    rollout_failed_nowait = _later(decisions.rollout_failed)
    tokens_lost_nowait = _later(decisions.tokens_lost)
    group_ended_nowait = _later(decisions.group_ended)
    trained_nowait = _later(decisions.trained)
    published_nowait = _later(decisions.published)
    checkpointed_nowait = _later(decisions.checkpointed)
    restored_nowait = _later(decisions.restored)
    began_at_nowait = _later(decisions.began_at)
    order_nowait = _later(decisions.order)
    epoch_nowait = _later(decisions.epoch)
    event_nowait = _later(decisions.event)

    async def batch_taken(self, batch: Batch) -> Literal["taken", "replayed"]:
        """The groups are this batch's for ever. Train on it after this returns, and not before.

        "replayed": the same batch was taken before, by a run that was resumed. Raises JournalError if a group
        is not ready or in another batch, the version has other groups, or is not the next one. If it is
        cancelled the batch may be taken all the same.
        """
        decide = partial(decisions.batch_taken, batch=batch)
        return await self._durable(
            decide, f"the batch of step {batch.version + 1} to be durable in the journal"
        )

    async def flush(self) -> None:
        """Return when all that was queued is durable. Raises JournalError if it cannot be."""
        await self._durable(lambda connection: None, "the journal to be durable")

    async def wait_failed(self) -> None:
        """Sleep until the journal cannot be written any more, and raise that JournalError."""
        raise await asyncio.shield(asyncio.wrap_future(self._failed))

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
        while await self._durable(some, "old tokens to be deleted from the journal"):
            pass

    async def aclose(self) -> None:
        """Write what waits and close; idempotent. Raises JournalError if something was never written."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
            self._is_awaited.set()
        await asyncio.to_thread(self._thread.join)
        if self._failed.done():
            raise self._failed.result()

    def _put(self, decide: Callable[[sqlite3.Connection], Any], answer: Future[Any] | None = None) -> None:
        if self._failed.done():
            raise self._failed.result()
        if self._is_closed:
            raise JournalError(f"{self.path} is closed")
        self._queue.put(_Job(decide, answer, time.time()))
        if answer is not None:
            self._is_awaited.set()

    async def _durable(self, decide: Callable[[sqlite3.Connection], T], what: str) -> T:
        """What the decision returns, once it is on the disk. Raises JournalError if it is refused."""
        answer: Future[T] = Future()
        self._put(decide, answer)
        with waiting(what, on="the journal's thread"):
            return await asyncio.wrap_future(answer)

    def _write_all(self) -> None:
        """The thread: takes all that waits, applies it in order, commits once, answers; until the None."""
        job = self._queue.get()
        while job is not None:
            self._is_awaited.wait(GATHER_S)
            self._is_awaited.clear()  # what is awaited lies in the queue by now
            jobs = [job]
            while not self._queue.empty() and (job := self._queue.get()) is not None:
                jobs.append(job)
            for (_, answer, _), outcome in zip(jobs, self._write(jobs), strict=True):
                if answer is None or not answer.set_running_or_notify_cancel():
                    continue
                if isinstance(outcome, JournalError):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)
            if job is not None:
                job = self._queue.get()
        self._connection.close()

    def _write(self, jobs: list[_Job]) -> list[Any]:
        """What each decision returned, or the error that refused it: one for all if nothing was written."""
        if self._failed.done():
            return [self._failed.result()] * len(jobs)
        started_s = time.monotonic()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [self._apply(job) for job in jobs]
            self._connection.execute("COMMIT")
        except Exception as error:  # a thread has no caller to hear of a bug: the waiters must
            with contextlib.suppress(sqlite3.Error):  # if the disk is gone, nothing of it is in the file
                self._connection.rollback()
            self._failed.set_result(self._refusal(error))
            return [self._failed.result()] * len(jobs)
        commit_s = time.monotonic() - started_s
        self.num_commits, self.busy_s = self.num_commits + 1, self.busy_s + commit_s
        self.longest_commit_s = max(self.longest_commit_s, commit_s)
        return outcomes

    def _apply(self, job: _Job) -> Any:
        """What the decision returns; one that is asked for and refused has changed nothing."""
        decisions.decided_s.set(job.decided_s)
        if job.answer is None:
            return job.decide(self._connection)
        self._connection.execute("SAVEPOINT decision")
        try:
            return job.decide(self._connection)
        except (JournalError, sqlite3.IntegrityError) as error:
            self._connection.execute("ROLLBACK TO decision")
            return self._refusal(error)
        finally:
            if self._connection.in_transaction:
                self._connection.execute("RELEASE decision")

    def _refusal(self, error: Exception) -> JournalError:
        if isinstance(error, JournalError):
            return error
        if isinstance(error, DISK_ERRORS) and not isinstance(error, sqlite3.IntegrityError):
            return cannot_use(self.path, error)
        return JournalError(f"what is to go into {self.path} is refused: {type(error).__name__}: {error}")
