"""The thread that owns the connection: takes all that waits, applies it in order, commits once."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from asyncrl.errors import JournalError
from asyncrl.journal.schema import DISK_ERRORS, cannot_use

Decision = Callable[[sqlite3.Connection], Any]
"""One thing that is done as a whole or refused as a whole."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A decision that waits. `answer` None: no caller waits for it, so its refusal ends the writer."""

    decide: Decision
    answer: Future[Any] | None


class Writer:
    """Decisions on their way to the disk, first come first written.

    Life: made (the thread starts) -> put / ask -> stop(), which writes what waits first.
    Waits: put and ask never wait; the thread sleeps in the queue. The staleness rule bounds the queue: the
        run awaits the answer for each batch.
    Invariant: an answer is given after the commit that holds its decision, and all decisions before it. After
        the first error nothing more is written: every later put raises it, every ask that waits is answered
        with it, and `failed` has it.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self.num_commits = 0
        self.longest_commit_s = self.busy_s = 0.0
        self.failed: Future[JournalError] = Future()
        """Its result is the error, once there is one."""
        self._is_stopped = False
        self._connection = connection
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        # a daemon: a run that crashes must not hang on it
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, decide: Decision) -> None:
        """Have it written. Raises JournalError if the writer has failed or was stopped."""
        self._check()
        self._queue.put(_Job(decide, None))

    def ask(self, decide: Decision) -> Future[Any]:
        """Have it written; the future has what it returns once it is durable, or JournalError."""
        self._check()
        answer: Future[Any] = Future()
        self._queue.put(_Job(decide, answer))
        return answer

    def stop(self) -> None:
        """Write what waits, end the thread and close the connection; idempotent. Blocks. Raises the error
        that ended the writing.
        """
        if not self._is_stopped:
            self._is_stopped = True
            self._queue.put(None)
        self._thread.join()
        if self.failed.done():
            raise self.failed.result()

    def _check(self) -> None:
        if self.failed.done():
            raise self.failed.result()
        if self._is_stopped:
            raise JournalError(f"{self.path} is closed")

    def _run(self) -> None:
        is_last = False
        while not is_last:
            jobs, is_last = self._take()
            outcomes = self._write(jobs) if jobs and not self.failed.done() else []
            outcomes += [self.failed.result() for _ in jobs[len(outcomes) :]]
            for job, outcome in zip(jobs, outcomes, strict=True):
                if job.answer is None or not job.answer.set_running_or_notify_cancel():
                    continue
                if isinstance(outcome, JournalError):
                    job.answer.set_exception(outcome)
                else:
                    job.answer.set_result(outcome)
        self._connection.close()

    def _take(self) -> tuple[list[_Job], bool]:
        """(all queued decisions, at least one; whether the stop is among them)."""
        jobs: list[_Job] = []
        job = self._queue.get()
        while job is not None:
            jobs.append(job)
            try:
                job = self._queue.get_nowait()
            except Empty:
                return jobs, False
        return jobs, True

    def _write(self, jobs: list[_Job]) -> list[Any]:
        """What each decision returned, or the error that refused it; [] if none was written: then `failed`
        says why.
        """
        started_s = time.monotonic()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [self._apply(job) for job in jobs]
            self._connection.execute("COMMIT")
        except Exception as error:  # a thread has no caller to hear of a bug: the waiters must
            with contextlib.suppress(sqlite3.Error):  # if the disk is gone, nothing of it is in the file
                self._connection.rollback()
            self.failed.set_result(_as_journal_error(self.path, error))
            return []
        commit_s = time.monotonic() - started_s
        self.num_commits += 1
        self.longest_commit_s = max(self.longest_commit_s, commit_s)
        self.busy_s += commit_s
        return outcomes

    def _apply(self, job: _Job) -> Any:
        """What the decision returns; one that is asked for and refused has changed nothing."""
        if job.answer is None:
            return job.decide(self._connection)
        self._connection.execute("SAVEPOINT decision")
        try:
            return job.decide(self._connection)
        except (JournalError, sqlite3.IntegrityError) as error:
            self._connection.execute("ROLLBACK TO decision")
            return _as_journal_error(self.path, error)
        finally:
            if self._connection.in_transaction:
                self._connection.execute("RELEASE decision")


def _as_journal_error(path: Path, error: Exception) -> JournalError:
    if isinstance(error, JournalError):
        return error
    if isinstance(error, DISK_ERRORS) and not isinstance(error, sqlite3.IntegrityError):
        return cannot_use(path, error)
    return JournalError(f"what is to go into {path} is refused: {type(error).__name__}: {error}")
