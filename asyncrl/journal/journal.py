"""Journal of a run: records events before they take effect. Imports no torch.

Each decision changes the tables in the writer's thread and transaction. A refused
decision (JournalError, sqlite3.IntegrityError) ends the journal. Late decisions about a
requeued group change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import date
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from asyncrl.base.errors import JournalError
from asyncrl.base.waits import waiting
from asyncrl.journal.read import (
    ResumeState,
    costs_of,
    read_note,
    read_resume,
    rollouts_of,
)
from asyncrl.journal.schema import (
    COSTS,
    DISK_ERRORS,
    EPOCH,
    cannot_use,
    encode_partial,
    encode_trajectory,
    open_to_write,
)
from asyncrl.messages.records import (
    Batch,
    Completion,
    GroupId,
    Prompt,
    Rollout,
    Ticket,
    num_sampled,
    versions_of,
)

Args = ParamSpec("Args")
T = TypeVar("T")
Ended = Literal["ready", "failed", "filtered", "requeued"]

GATHER_S = 0.05
"""Seconds to gather decisions for one commit, which takes 0.2 ms of CPU time."""
# Bounds how long one step of compact() holds the writer's thread and its transaction,
# so that decisions of running rollouts are committed between two steps.
_GROUPS_A_STEP = 200
_HAS_ENDED = (
    "EXISTS (SELECT 1 FROM trajectories WHERE group_id = :group AND sample_index = :sample)"
    " OR EXISTS (SELECT 1 FROM failures WHERE group_id = :group AND sample_index = :sample)"
)
# Set by the writer's thread before each decision. Decisions record when they were made,
# not when they were written, which is later.
_decided_s: ContextVar[float] = ContextVar("decided_s")


class _Job(NamedTuple):
    """A queued decision. `answer` None: nobody waits. `about`: its subject, most
    often a group. `rollout`: of that group, which has ended.
    """

    decide: Callable[[sqlite3.Connection], object]
    answer: Future[Any] | None
    decided_s: float
    about: Any = None
    rollout: Rollout | None = None


# Each decision is a module function that takes the connection, so that it cannot touch
# a journal's queue or thread. `_later` makes it a method: calling
# `journal.add_admission_nowait(ticket, prompt)` only queues `_add_admission(connection, ticket,
# prompt)`.
def _later(
    decide: Callable[Concatenate[sqlite3.Connection, Args], None],
) -> Callable[Concatenate[Journal, Args], None]:
    def put(journal: Journal, /, *args: Args.args, **options: Args.kwargs) -> None:
        journal._put(
            lambda connection: decide(connection, *args, **options), about=args[0]
        )

    return put


def _decide_all(connection: sqlite3.Connection, jobs: Sequence[_Job]) -> list[object]:
    """Apply decisions in order. Rollouts of a group are written together, before the
    next decision about it.
    """
    outcomes = list[object]()
    ended = dict[Any, list[Rollout]]()
    for job in jobs:
        _decided_s.set(job.decided_s)
        if job.rollout is not None:
            ended.setdefault(job.about, []).append(job.rollout)
        elif job.about in ended:
            _add_rollouts(connection, job.about, ended.pop(job.about))
        outcomes.append(job.decide(connection))
    for group_id, rollouts in ended.items():
        _add_rollouts(connection, group_id, rollouts)
    return outcomes


def _nothing(connection: sqlite3.Connection) -> None:
    pass


def _text(given: object) -> str:
    """Escape lone surrogates, which SQLite cannot hold."""
    return str(given).encode("utf-8", "backslashreplace").decode("utf-8")


def _add_admission(
    connection: sqlite3.Connection, ticket: Ticket, prompt: Prompt
) -> None:
    connection.execute(
        "INSERT INTO groups"
        " (group_id, prompt_id, start_version, num_requeued, messages, state, admitted_s)"
        " VALUES (?, ?, ?, ?, ?, 'running', ?)",
        (
            ticket.group_id,
            _text(prompt.prompt_id),
            ticket.start_version,
            prompt.num_requeued,
            json.dumps([*map(dict, prompt.messages)]),
            _decided_s.get(),
        ),
    )


def _note(connection: sqlite3.Connection, key: str, value: object) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value))
    )


def _add_epoch(
    connection: sqlite3.Connection, task: str, number: int, prompts: str
) -> None:
    """Record an epoch of a task sampled by difficulty. Repeatable."""
    _note(connection, f"{EPOCH}{number}/{task}", prompts)


def _add_segment(
    connection: sqlite3.Connection,
    group_id: GroupId,
    sample_index: int,
    attempt: int,
    partial: Completion,
) -> None:
    # Late segments change nothing: a task that samples for a requeued group notices its
    # cancellation only at its next wait.
    if _rollout(connection, group_id, sample_index) == ("running", False):
        blob = encode_partial(group_id, sample_index, partial)
        # `partial` is the whole completion so far, so the newest row replaces the older
        # ones. Tokens that a new attempt discards are counted by _add_lost_tokens.
        connection.execute(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?)",
            (group_id, sample_index, attempt, partial.tokens.num_sampled, blob),
        )


def _add_rollouts(
    connection: sqlite3.Connection, group_id: GroupId, rollouts: Sequence[Rollout]
) -> None:
    """Record rollouts that have ended. One statement for all takes half as long as one
    for each.
    """
    branches = [branch for rollout in rollouts for branch in rollout]
    # SQLite's min() with a NULL is NULL, and a rollout may have no sampled token.
    is_running = connection.execute(
        "UPDATE groups SET num_rollouts = num_rollouts + :num_rollouts,"
        " num_sampled = num_sampled + :num_sampled, reward_sum = reward_sum + :reward,"
        " oldest_version = min(coalesce(oldest_version, :oldest), coalesce(:oldest, oldest_version))"
        " WHERE group_id = :group AND state = 'running'",
        {
            "num_rollouts": len(rollouts),
            "num_sampled": num_sampled(branches),
            "reward": sum(float(rollout[0].reward) for rollout in rollouts),
            "oldest": _oldest_version(rollouts),
            "group": group_id,
        },
    ).rowcount
    if not is_running:
        _is_running(connection, group_id, branches[0].sample_index)  # may refuse
        return
    # The table refuses a second trajectory.
    connection.executemany(
        "INSERT INTO trajectories VALUES (?, ?, ?, ?)",
        [
            (
                group_id,
                branch.sample_index,
                branch.branch,
                encode_trajectory(group_id, branch),
            )
            for branch in branches
        ],
    )
    # Not _lose(): the tokens of the partial completion are in the trajectory now, and
    # would be counted twice.
    connection.execute(
        "DELETE FROM segments WHERE group_id = :group AND sample_index IN"
        " (SELECT sample_index FROM trajectories WHERE group_id = :group)",
        {"group": group_id},
    )
    failed = connection.execute(
        "SELECT sample_index FROM failures JOIN trajectories USING (group_id, sample_index)"
        " WHERE group_id = ?",
        (group_id,),
    ).fetchone()
    if failed is not None:
        raise JournalError(f"rollout g{group_id}/r{failed[0]} has ended already")


def _oldest_version(rollouts: Iterable[Rollout]) -> int | None:
    return min(versions_of(itertools.chain(*rollouts)), default=None)


def _add_failure(
    connection: sqlite3.Connection,
    group_id: GroupId,
    sample_index: int,
    num_attempts: int,
    why: str,
) -> None:
    if not _is_running(connection, group_id, sample_index):
        return
    connection.execute(
        "INSERT INTO failures VALUES (?, ?, ?, ?)",
        (group_id, sample_index, num_attempts, _text(why)),
    )
    connection.execute(
        "UPDATE groups SET num_failed = num_failed + 1 WHERE group_id = ?", (group_id,)
    )
    _lose(connection, group_id, sample_index)


def _add_scores(
    connection: sqlite3.Connection,
    group_id: GroupId,
    rollouts: Sequence[Rollout],
    failures: Mapping[int, str],
    earned: float,
) -> None:
    """Replace finished rollouts, and record by sample_index why others have failed.
    `earned`: by how much the sum of rewards changes. In one transaction, so that a group
    is scored, or annotated, whole or not at all.
    """
    # Any sample index gives the group's state.
    if _rollout(connection, group_id, 0)[0] != "running":
        return
    for rollout in rollouts:
        connection.executemany(
            "UPDATE trajectories SET blob = ? WHERE (group_id, sample_index, branch) = (?, ?, ?)",
            [
                (
                    encode_trajectory(group_id, branch),
                    group_id,
                    branch.sample_index,
                    branch.branch,
                )
                for branch in rollout
            ],
        )
    connection.execute(
        "UPDATE groups SET reward_sum = reward_sum + ? WHERE group_id = ?",
        (float(earned), group_id),
    )
    # Only for failures: it decodes all tokens of the group.
    kept = rollouts_of(connection, group_id) if failures else {}
    for sample_index, why in failures.items():
        num_lost = num_sampled(kept.pop(sample_index))
        connection.execute(
            "DELETE FROM trajectories WHERE group_id = ? AND sample_index = ?",
            (group_id, sample_index),
        )
        connection.execute(
            "UPDATE groups SET num_rollouts = num_rollouts - 1, num_sampled = num_sampled - :num,"
            " lost_tokens = lost_tokens + :num, oldest_version = :oldest WHERE group_id = :group",
            {
                "num": num_lost,
                "oldest": _oldest_version(kept.values()),
                "group": group_id,
            },
        )
        _add_failure(connection, group_id, sample_index, 1, why)


def _add_lost_tokens(
    connection: sqlite3.Connection,
    group_id: GroupId,
    num_tokens: int,
    sample_index: int | None = None,
) -> None:
    """Count sampled tokens outside any trajectory. With `sample_index`, drop the
    unfinished completion.
    """
    connection.execute(
        "UPDATE groups SET lost_tokens = lost_tokens + ? WHERE group_id = ?",
        (num_tokens, group_id),
    )
    if sample_index is not None:
        _lose(connection, group_id, sample_index)


def _end_group(
    connection: sqlite3.Connection,
    group_id: GroupId,
    state: Ended,
    reason: str,
    *,
    requeued: int | None = None,
) -> None:
    # Any sample index gives the group's state.
    found, _ = _rollout(connection, group_id, 0)
    # A group in the buffer can still become too old. A taken group never changes: its
    # batch is trained again unchanged by every resume.
    if found != "running" and (found, state) != ("ready", "requeued"):
        raise JournalError(f"group {group_id} cannot become {state}: it is {found}")
    connection.execute(
        "UPDATE groups SET state = ?, reason = ?, requeued = ?, ended_s = ? WHERE group_id = ?",
        (state, _text(reason), requeued, _decided_s.get(), group_id),
    )
    _lose(connection, group_id)


def _add_batch(connection: sqlite3.Connection, batch: Batch) -> None:
    version = batch.version
    group_ids = [group.group_id for group in batch.groups]
    # Read before the INSERT below, which makes `version` the newest.
    (newest,) = connection.execute("SELECT max(version) FROM batches").fetchone()
    connection.execute(
        "INSERT INTO batches (version, min_version, mask_older, num_groups, part_groups, next_part_groups,"
        " taken_s) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            version,
            batch.min_version,
            int(batch.mask_older),
            len(group_ids),
            batch.part_groups,
            batch.next_part_groups,
            _decided_s.get(),
        ),
    )
    connection.executemany(
        "INSERT INTO batch_groups VALUES (?, ?, ?)",
        [(version, position, group_id) for position, group_id in enumerate(group_ids)],
    )
    # The condition on the state counts the groups that really were ready. A group that
    # is listed twice is refused by the UNIQUE column of batch_groups.
    num_ready = connection.executemany(
        "UPDATE groups SET state = 'taken' WHERE group_id = ? AND state = 'ready'",
        [(group_id,) for group_id in group_ids],
    ).rowcount
    # The rows above may be written before this check: the error rolls the transaction
    # back. None: the first batch of this journal. Its version is above 0 if an older
    # journal was moved away.
    if num_ready != len(group_ids) or newest not in (None, version - 1):
        raise JournalError(
            f"batch {version} cannot be taken after batch {newest}: of {group_ids}, {num_ready} are ready",
            rule="batches are consecutive, and each ready group is trained exactly once",
            way_out="resume; the journal is whole, and its batches are trained again unchanged.",
        )


def _add_training(
    connection: sqlite3.Connection, version: int, metrics: Mapping[str, float]
) -> None:
    """Record that the batch became policy_version version + 1. Repeatable."""
    # A resume trains batches again, and overwrites the time and the loss of the first
    # try.
    changed = connection.execute(
        "UPDATE batches SET trained_s = ?, loss = ? WHERE version = ?",
        (_decided_s.get(), metrics.get("policy/loss"), version),
    ).rowcount
    assert changed, f"a step of batch {version}, which was never taken"


def _add_push(connection: sqlite3.Connection, version: int, digest: str) -> None:
    # A resumed run may publish a version again.
    connection.execute(
        "INSERT OR REPLACE INTO publishes VALUES (?, ?, ?)",
        (version, digest, _decided_s.get()),
    )


def _add_event(
    connection: sqlite3.Connection, what: str, detail: Mapping[str, object]
) -> None:
    """Record an event for `inspect`."""
    connection.execute(
        "INSERT INTO events (s, what, detail) VALUES (?, ?, ?)",
        (_decided_s.get(), _text(what), json.dumps(detail, default=str)),
    )


def _compact_some(connection: sqlite3.Connection, before_version: int) -> int:
    """Delete messages and tokens that no resume needs. Return the number of groups, 0
    when done.
    """
    # The partial index skips groups that were compacted before, so that a step costs
    # the same late in a long run. Without INDEXED BY, SQLite may scan the whole table.
    found = connection.execute(
        "SELECT g.group_id FROM groups g INDEXED BY groups_with_tokens LEFT JOIN batch_groups b"
        " USING (group_id) WHERE g.messages IS NOT NULL AND (b.version < :version"
        " OR g.state IN ('failed', 'filtered', 'requeued')"
        " AND g.group_id <= (SELECT max(group_id) FROM batch_groups WHERE version = :version - 1))"
        " ORDER BY g.group_id LIMIT :most",
        {"version": before_version, "most": _GROUPS_A_STEP},
    ).fetchall()
    for table in ("trajectories", "failures", "segments"):
        connection.executemany(f"DELETE FROM {table} WHERE group_id = ?", found)
    connection.executemany(
        "UPDATE groups SET messages = NULL WHERE group_id = ?", found
    )
    return len(found)


def _lose(
    connection: sqlite3.Connection, group_id: GroupId, sample_index: int | None = None
) -> None:
    """Count a group's unfinished completions, or a single one, as lost."""
    # coalesce(NULL, sample_index) is true for every row: the whole group.
    them = "segments WHERE group_id = :group AND sample_index = coalesce(:sample, sample_index)"
    values = {"group": group_id, "sample": sample_index}
    num_tokens = f"(SELECT coalesce(sum(num_tokens), 0) FROM {them})"
    connection.execute(
        f"UPDATE groups SET lost_tokens = lost_tokens + {num_tokens} WHERE group_id = :group",
        values,
    )
    connection.execute(f"DELETE FROM {them}", values)


def _rollout(
    connection: sqlite3.Connection, group_id: GroupId, sample_index: int
) -> tuple[str, bool]:
    """Return the group's state and whether the rollout has ended, in one statement for
    speed.
    """
    row = connection.execute(
        f"SELECT state, {_HAS_ENDED} FROM groups WHERE group_id = :group",
        {"group": group_id, "sample": sample_index},
    ).fetchone()
    if row is None:
        raise JournalError(f"group {group_id} was never admitted")
    return row[0], bool(row[1])


def _is_running(
    connection: sqlite3.Connection, group_id: GroupId, sample_index: int
) -> bool:
    state, has_ended = _rollout(connection, group_id, sample_index)
    if state == "running" and has_ended:
        raise JournalError(f"rollout g{group_id}/r{sample_index} has ended already")
    return state == "running"


class Journal:
    """Record of a run in journal.sqlite. `_nowait` methods queue their decision for up
    to GATHER_S; awaited methods return when it is durable.

    Life: of a group: admitted -> rollouts finished or failed -> ready -> taken by one
    batch; or failed, filtered, requeued.
    Waits: add_batch, flush, compact and read_resume wait for the commit; wait_failed
        for a failure.
    Invariant: a group has one state and at most one batch. Decisions become durable in
    order. Only the process with the run lock writes. The first error is final.
    """

    name = "journal"

    def __init__(self, path: Path, *, run_id: str) -> None:
        """Open or create a journal. Blocks. Raises JournalError for a damaged or
        foreign file.
        """
        connection = open_to_write(path, run_id)
        self.path = path
        (start_date,) = connection.execute(
            "SELECT value FROM meta WHERE key = 'start_date'"
        ).fetchone()
        self.start_date = date.fromisoformat(start_date)
        """Chat templates write it, so that a resumed run renders the same prompts."""
        self._connection = connection
        # Not asyncio's Future: the writer's thread sets it.
        self._failed: Future[JournalError] = Future()
        self._error: JournalError | None = None
        """The same, for _put(): a Future takes a lock for each question."""
        self._is_closed = False
        self.costs: Callable[[], Mapping[str, float]] = dict
        """Counts of this process that cost money or time, such as a judge's tokens. The
        journal's thread calls it at each commit, so that a journaled rollout's cost is
        durable too. It must only read numbers of parts that stay the same.
        """
        self._earlier_costs = costs_of(connection)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        # Ends the gathering early: a caller waits for the commit.
        self._is_awaited = threading.Event()
        # daemon: a crashing run must not hang on it
        self._thread = threading.Thread(
            target=self._write_all, name="journal", daemon=True
        )
        self._thread.start()

    add_admission_nowait = _later(_add_admission)
    add_segment_nowait = _later(_add_segment)
    add_failure_nowait = _later(_add_failure)
    add_scores_nowait = _later(_add_scores)
    add_lost_tokens_nowait = _later(_add_lost_tokens)
    end_group_nowait = _later(_end_group)
    add_training_nowait = _later(_add_training)
    add_push_nowait = _later(_add_push)
    note_nowait = _later(_note)
    add_epoch_nowait = _later(_add_epoch)
    add_event_nowait = _later(_add_event)

    def add_rollout_nowait(self, group_id: GroupId, rollout: Rollout) -> None:
        self._put(_nothing, about=group_id, rollout=rollout)

    async def add_batch(self, batch: Batch) -> None:
        """Assign the groups to this batch for good; its step counts after this returns.

        Raises JournalError for groups that are not ready, or a version that is not
        next.
        """
        await self._durable(
            partial(_add_batch, batch=batch),
            f"the batch of step {batch.version + 1} to be durable in the journal",
        )

    async def flush(self) -> None:
        """Wait until everything queued is durable. Raises JournalError."""
        await self._durable(_nothing, "the journal to be durable")

    async def wait_failed(self) -> None:
        """Raise the first error of the writer's thread; else wait forever. Decisions
        that nobody awaits would fail silently without a task that waits here.
        """
        # Cancelling this task must not cancel the shared future: wrap_future passes a
        # cancellation on, and then no later error could be set.
        raise await asyncio.shield(asyncio.wrap_future(self._failed))

    async def read_resume(self, checkpoint_version: int) -> ResumeState:
        """Return the state for a resume from this checkpoint (0: the initial weights)."""
        await self.flush()
        with waiting("the state to resume from", on="the journal's file"):
            # In its own connection and snapshot, so that the writer can
            # commit during the read.
            return await asyncio.to_thread(read_resume, self.path, checkpoint_version)

    async def read_note(self, key: str) -> Any:
        """Return the durable value of a note, or None."""
        return await asyncio.to_thread(read_note, self.path, key)

    async def compact(self, before_version: int) -> None:
        """Delete tokens before the oldest kept checkpoint, and of older untrained
        groups, in small steps.
        """
        some = partial(_compact_some, before_version=before_version)
        while await self._durable(some, "old tokens to be deleted from the journal"):
            pass

    async def aclose(self) -> None:
        """Write the queue, close the file, and wait for both. A second call waits
        too. Raises the JournalError that ended the journal.
        """
        if not self._is_closed:
            self._is_closed = True
            # The end mark is queued behind all decisions, so that none is dropped.
            self._queue.put(None)
            self._is_awaited.set()
        # Also at a second call: it must not return before the file is closed.
        await asyncio.to_thread(self._thread.join)
        if self._error is not None:
            raise self._error

    def _put(
        self,
        decide: Callable[[sqlite3.Connection], object],
        answer: Future[Any] | None = None,
        *,
        about: Any = None,
        rollout: Rollout | None = None,
    ) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise JournalError(f"{self.path} is closed")
        self._queue.put(_Job(decide, answer, time.time(), about, rollout))
        if answer is not None:
            self._is_awaited.set()

    async def _durable(self, decide: Callable[[sqlite3.Connection], T], what: str) -> T:
        # A cancelled caller only stops waiting. Its decision stays queued and takes
        # effect in its order.
        answer: Future[T] = Future()
        self._put(decide, answer)
        with waiting(what, on="the journal's thread"):
            return await asyncio.wrap_future(answer)

    def _write_all(self) -> None:
        """Thread: apply decisions in order, commit once, answer; end at None."""
        job = self._queue.get()
        while job is not None:
            # Gather: one commit, and one fsync, for all decisions of these GATHER_S
            # seconds. The event is cleared before the queue is emptied. So a caller
            # that queues its decision in between is either in this commit, or finds the
            # event set for the next one.
            self._is_awaited.wait(GATHER_S)
            self._is_awaited.clear()
            jobs = [job]
            # Only this thread takes from the queue, so a queue that is not empty cannot
            # block get().
            while not self._queue.empty() and (job := self._queue.get()) is not None:
                jobs.append(job)
            for written, outcome in zip(jobs, self._write(jobs), strict=True):
                answer = written.answer
                # Answers are given after the COMMIT. set_running_or_notify_cancel is
                # False if the caller was cancelled, and prevents a cancellation between
                # here and set_result, which would raise in this thread.
                if answer is None or not answer.set_running_or_notify_cancel():
                    continue
                if isinstance(outcome, JournalError):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)
            if job is not None:
                job = self._queue.get()
        self._connection.close()

    def _write(self, jobs: list[_Job]) -> list[object]:
        if self._error is not None:
            return [self._error] * len(jobs)
        try:
            # IMMEDIATE takes the write lock now. A deferred transaction that has read
            # first fails at its first write, without waiting, if another connection
            # wrote in between.
            self._connection.execute("BEGIN IMMEDIATE")
            # One refused decision rolls back all of this commit. None has been answered
            # yet.
            outcomes = _decide_all(self._connection, jobs)
            if costs := self.costs():
                earlier = self._earlier_costs
                totals = {name: earlier.get(name, 0) + costs[name] for name in costs}
                _note(self._connection, COSTS, earlier | totals)
            self._connection.execute("COMMIT")
        except Exception as error:  # a thread cannot raise; the waiters must
            # If the disk is gone, the rollback fails too; nothing was written.
            with contextlib.suppress(sqlite3.Error):
                self._connection.rollback()
            self._error = self._refusal(error)
            self._failed.set_result(self._error)
            return [self._error] * len(jobs)
        return outcomes

    def _refusal(self, error: Exception) -> JournalError:
        if isinstance(error, JournalError):
            return error
        # A violated constraint is a fault of this program, not of the disk: freeing
        # space would not help.
        if isinstance(error, DISK_ERRORS) and not isinstance(
            error, sqlite3.IntegrityError
        ):
            return cannot_use(self.path, error)
        refusal = JournalError(
            f"{self.path} refused an entry: {type(error).__name__}: {error}"
        )
        refusal.__cause__ = error  # The log shows its traceback.
        return refusal
