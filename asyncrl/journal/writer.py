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
from asyncrl.journal.schema import SQLITE_ERRORS, damaged

Decision = Callable[..., Any]
"""(connection, *args): one thing that is done as a whole or refused as a whole."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A decision that waits. `answer` None: no caller waits for it, so its refusal ends the writer."""

    decide: Decision
    args: tuple[Any, ...]
    answer: Future[Any] | None


class Writer:
    """Decisions on their way to the disk, first come first written.

    Life:       made (the thread starts) -> put / ask -> stop(), which writes what waits first.
    Waits:      put and ask never wait; the thread sleeps in the queue. The staleness rule bounds the queue:
                the run awaits the answer for each batch.
    Invariant:  an answer is given after the commit that holds its decision, and all decisions before it.
                After the first error nothing more is written: every later put raises it, every ask that
                waits is answered with it, and `failed` has it.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self.num_put = self.num_written = self.num_commits = 0
        self.longest_commit_s = self.busy_s = 0.0
        self.failed: Future[JournalError] = Future()
        """Its result is the error, once there is one."""
        self._failure: JournalError | None = None
        self._is_stopped = False
        self._connection = connection
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        # a daemon: a run that crashes must not hang on it
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, decide: Decision, *args: object) -> None:
        """Have it written. Raises JournalError if the writer has failed or was stopped."""
        self._check()
        self.num_put += 1
        self._queue.put(_Job(decide, args, None))

    def ask(self, decide: Decision, *args: object) -> Future[Any]:
        """Have it written; the future has what it returns once it is durable, or JournalError."""
        self._check()
        self.num_put += 1
        answer: Future[Any] = Future()
        self._queue.put(_Job(decide, args, answer))
        return answer

    def stop(self) -> None:
        """Write what waits, end the thread and close the connection; idempotent. Blocks. Raises the error
        that ended the writing.
        """
        if not self._is_stopped:
            self._is_stopped = True
            self._queue.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_stopped:
            raise JournalError(f"{self.path} is closed")

    def _run(self) -> None:
        is_last = False
        while not is_last:
            jobs, is_last = self._take()
            if self._failure is None:
                self._write(jobs)
            else:
                self._answer([(job, self._failure) for job in jobs])
        self._connection.close()

    def _take(self) -> tuple[list[_Job], bool]:
        """(all that waits, at least one; whether the stop is among it)."""
        jobs: list[_Job] = []
        job = self._queue.get()
        while job is not None:
            jobs.append(job)
            try:
                job = self._queue.get_nowait()
            except Empty:
                return jobs, False
        return jobs, True

    def _write(self, jobs: list[_Job]) -> None:
        started_s = time.monotonic()
        outcomes: list[tuple[_Job, Any]] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                outcomes.append((job, self._apply(job)))
                if job.answer is None and isinstance(outcomes[-1][1], JournalError):
                    break
            self._connection.execute("COMMIT")
        except (*SQLITE_ERRORS, OSError) as error:
            self._fail(_cannot_write(self.path, error), jobs)
            return
        except Exception as error:  # a thread has no caller to hear of a bug: the waiters must
            self._fail(_broken(self.path, error), jobs)
            return
        self.num_commits += 1
        self.num_written += len(outcomes)
        commit_s = time.monotonic() - started_s
        self.longest_commit_s = max(self.longest_commit_s, commit_s)
        self.busy_s += commit_s
        self._answer(outcomes)
        last_job, last = outcomes[-1] if outcomes else (None, None)
        if last_job is not None and last_job.answer is None and isinstance(last, JournalError):
            self.num_written -= 1
            self._fail(last, jobs[len(outcomes) :])

    def _apply(self, job: _Job) -> Any:
        """What the decision returns, or the JournalError that refuses it: then it has changed nothing."""
        self._connection.execute("SAVEPOINT decision")
        try:
            result = job.decide(self._connection, *job.args)
        except (JournalError, sqlite3.IntegrityError) as error:
            self._connection.execute("ROLLBACK TO decision")
            self._connection.execute("RELEASE decision")
            return error if isinstance(error, JournalError) else _broken(self.path, error)
        self._connection.execute("RELEASE decision")
        return result

    def _fail(self, failure: JournalError, jobs: list[_Job]) -> None:
        if self._connection.in_transaction:
            with contextlib.suppress(
                sqlite3.Error
            ):  # if the disk is gone, nothing of it is in the file anyway
                self._connection.execute("ROLLBACK")
        self._failure = failure
        self._answer([(job, failure) for job in jobs])
        self.failed.set_result(failure)

    def _answer(self, outcomes: list[tuple[_Job, Any]]) -> None:
        for job, outcome in outcomes:
            if job.answer is None or not job.answer.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, JournalError):
                job.answer.set_exception(outcome)
            else:
                job.answer.set_result(outcome)


def _broken(path: Path, error: Exception) -> JournalError:
    return JournalError(f"what is to go into {path} cannot be written: {type(error).__name__}: {error}")


def _cannot_write(path: Path, error: Exception) -> JournalError:
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if isinstance(error, UnicodeDecodeError) or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return damaged(path, str(error))
    way_out = "see to the disk of the run directory"
    if name in ("SQLITE_FULL", "SQLITE_IOERR_WRITE"):
        way_out = "free space on the disk of the run directory"
    elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        way_out = "end the program that holds the file open for writing"
    return JournalError(
        f"{path} cannot be written: {error} ({name})",
        rule="nothing is done that is not written down first, so the run ends",
        way_out=f"{way_out}, then resume: all that was written before is whole.",
    )
