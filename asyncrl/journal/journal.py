"""Journal of a run: records events before they take effect. Imports no torch."""

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

from asyncrl.base.errors import JournalError
from asyncrl.base.waits import waiting
from asyncrl.journal import decisions
from asyncrl.journal.read import ResumeState, read_resume
from asyncrl.journal.schema import DISK_ERRORS, cannot_use, open_to_write
from asyncrl.messages.records import Batch

Args = ParamSpec("Args")
T = TypeVar("T")


GATHER_S = 0.02
"""Seconds to gather decisions for one commit."""


class _Job(NamedTuple):
    """A queued decision. `answer` None: nobody waits, so a refusal ends the journal."""

    decide: Callable[[sqlite3.Connection], Any]
    answer: Future[Any] | None
    decided_s: float


def _later(
    decide: Callable[Concatenate[sqlite3.Connection, Args], None],
) -> Callable[Concatenate[Journal, Args], None]:

    def put(journal: Journal, /, *args: Args.args, **options: Args.kwargs) -> None:
        journal._put(lambda connection: decide(connection, *args, **options))

    return put


class Journal:
    """Record of a run in journal.sqlite. `_nowait` methods queue their decision for up to GATHER_S; awaited
    methods return when it is durable.

    Life: of a group: admitted -> rollouts finished or failed -> ready -> taken by one batch; or failed,
    filtered, requeued.
    Waits: batch_taken, flush, compact and read_resume wait for the commit; wait_failed for a failure.
    Invariant: a group has one state and at most one batch. Decisions become durable in order. Only the
    process with the RunLock writes. The first error is final.
    """

    name = "journal"

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection
        self.num_commits, self.longest_commit_s, self.busy_s = 0, 0.0, 0.0
        self._failed: Future[JournalError] = Future()
        self._is_closed = False
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_awaited = threading.Event()
        # daemon: a crashing run must not hang on it
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path, *, run_id: str) -> Journal:
        """Open or create a journal. Blocks. Raises JournalError for a damaged or foreign file."""
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
        """Assign the groups to this batch for good; train only after this returns.

        "replayed": a resumed run has taken the same batch before. Raises JournalError for groups that are
        not ready, other groups, or a version that is not next.
        """
        decide = partial(decisions.batch_taken, batch=batch)
        return await self._durable(
            decide, f"the batch of step {batch.version + 1} to be durable in the journal"
        )

    async def flush(self) -> None:
        """Wait until everything queued is durable. Raises JournalError."""
        await self._durable(lambda connection: None, "the journal to be durable")

    async def wait_failed(self) -> None:
        raise await asyncio.shield(asyncio.wrap_future(self._failed))

    async def read_resume(self, checkpoint_version: int) -> ResumeState:
        """Return the state for a resume from this checkpoint (0: the initial weights)."""
        await self.flush()
        with waiting("what the journal says of the run", on="the journal's file"):
            return await asyncio.to_thread(read_resume, self.path, checkpoint_version)

    async def compact(self, before_version: int) -> None:
        """Delete tokens before the oldest kept checkpoint, and of older untrained groups, in small steps."""
        some = partial(decisions.compact_some, before_version=before_version)
        while await self._durable(some, "old tokens to be deleted from the journal"):
            pass

    async def aclose(self) -> None:
        """Write the queue and close. Idempotent. Raises JournalError."""
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
        answer: Future[T] = Future()
        self._put(decide, answer)
        with waiting(what, on="the journal's thread"):
            return await asyncio.wrap_future(answer)

    def _write_all(self) -> None:
        """Thread: apply decisions in order, commit once, answer; end at None."""
        job = self._queue.get()
        while job is not None:
            self._is_awaited.wait(GATHER_S)
            self._is_awaited.clear()
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
        if self._failed.done():
            return [self._failed.result()] * len(jobs)
        started_s = time.monotonic()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [self._apply(job) for job in jobs]
            self._connection.execute("COMMIT")
        except Exception as error:  # a thread cannot raise; the waiters must
            with contextlib.suppress(sqlite3.Error):  # if the disk is gone, nothing was written
                self._connection.rollback()
            self._failed.set_result(self._refusal(error))
            return [self._failed.result()] * len(jobs)
        commit_s = time.monotonic() - started_s
        self.num_commits, self.busy_s = self.num_commits + 1, self.busy_s + commit_s
        self.longest_commit_s = max(self.longest_commit_s, commit_s)
        return outcomes

    def _apply(self, job: _Job) -> Any:
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
        return JournalError(f"{self.path} refused an entry: {type(error).__name__}: {error}")
