"""What a run that goes on has to know, out of the journal. Reads alone, so that it works beside a writer too.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import JournalError
from asyncrl.journal.schema import (
    MOVE_ASIDE,
    SQLITE_ERRORS,
    cannot_open,
    check_file,
    check_schema,
    connect,
    damaged,
)
from asyncrl.journal.tokens import decode_partial, decode_prompt, decode_trajectory
from asyncrl.messages.records import (
    Batch,
    Group,
    GroupId,
    PartialCompletion,
    Prompt,
    Rollout,
    Ticket,
)

_SUMS = """
SELECT total(sampled + lost_tokens), total(failed),
    total(state = 'filtered'), total(iif(state = 'filtered', sampled, 0)),
    total(state = 'handed_back' AND reason IN ('dropped', 'all_masked')), total(state = 'failed'),
    total(state IN ('handed_back', 'failed') AND requeued IS NULL)
FROM (SELECT state, reason, requeued, lost_tokens,
    coalesce(num_sampled, (SELECT sum(num_sampled) FROM trajectories t WHERE t.group_id = g.group_id), 0)
        + coalesce((SELECT sum(num_tokens) FROM segments s WHERE s.group_id = g.group_id), 0) AS sampled,
    coalesce(num_failed, (SELECT count(*) FROM failures f WHERE f.group_id = g.group_id)) AS failed
    FROM groups g WHERE group_id > ? AND group_id <= ?)
"""
_ALL = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Counted:
    """What a run has generated and given up; counters of a run that goes on begin with it.

    `generated`: tokens in the journal; `failed`: rollouts; `filtered`, with their tokens,
    and the rest: groups.

    `dropped`: handed back by the staleness rule while the run went on, for one of its two reasons; what a
    resume hands back has others. `given_up`: those of `dropped` and `failed_groups` whose prompt does not
    come again.
    """

    generated: int = 0
    failed: int = 0
    filtered: int = 0
    filtered_tokens: int = 0
    dropped: int = 0
    failed_groups: int = 0
    given_up: int = 0


def read_counted(connection: sqlite3.Connection, start: int, stop: int) -> tuple[Counted, ...]:
    """After each of the batches start .. stop - 1, and last of all the groups there are. Raises
    sqlite3.Error.

    After a batch: of the groups up to the newest that any batch so far has taken. On-policy that is exact,
    for no later group had begun.
    """
    newest = dict(
        connection.execute(
            "SELECT version, max(max(group_id)) OVER (ORDER BY version) FROM batch_groups WHERE version < ? "
            "GROUP BY version",
            (stop,),
        )
    )
    found, sums, below = list[Counted](), [0] * 7, -1
    for last in (*(newest[version] for version in range(start, stop)), _ALL):
        row = connection.execute(_SUMS, (below, last)).fetchone()
        sums, below = [before + int(value) for before, value in zip(sums, row, strict=True)], last
        found.append(Counted(*sums))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class RunningRecord:
    """A group that ran when the run ended.

    By sample_index: `rollouts` that are finished, `failures` (attempts, why), and `partials` (attempt, turn,
    all of the completion so far). A sample in none of them had not got a token. Not `prompt_is_whole`: its
    answer or info is of a kind that cannot be written down, so the task has to make the prompt again.
    """

    ticket: Ticket
    prompt: Prompt
    rollouts: Mapping[int, Rollout]
    failures: Mapping[int, tuple[int, str]]
    partials: Mapping[int, tuple[int, int, PartialCompletion]]
    prompt_is_whole: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ResumeState:
    """Where a run stands that goes on from weights `checkpoint_version`.

    Batches checkpoint_version .. next_version - 1 are trained again as they are; `ready` and `running` go on,
    oldest first; `requeued` prompts come again (id -> num_handed_back) and were not admitted yet, in their
    old order, those of them in `returning` only after version next_version, at which their groups failed;
    `num_drawn` different prompts were ever admitted, those of a run included whose journal was lost, so that
    this one begins with a checkpoint.
    """

    path: Path
    checkpoint_version: int
    next_version: int
    ready: tuple[tuple[Ticket, Group], ...]
    running: tuple[RunningRecord, ...]
    requeued: Mapping[str, int]
    returning: frozenset[str]
    num_drawn: int
    next_group_id: GroupId
    order: Mapping[str, Any] | None
    """What the order of the prompts followed from; None if it was never written."""
    counted: tuple[Counted, ...] = (Counted(),)
    """After each batch that is trained again, and last of all now."""

    def batches(self) -> Iterator[Batch]:
        """The batches to train again, one at a time from the file. Blocks at each. Raises JournalError."""
        for version in range(self.checkpoint_version, self.next_version):
            yield self.load_batch(version)

    def load_batch(self, version: int) -> Batch:
        """One of them. Raises JournalError if it is not there, or its tokens were deleted."""
        with reading(self.path) as connection:
            return read_batch(connection, self.path, version)


class reading:  # noqa: N801  used as `with reading(path) as connection`
    """A snapshot of the journal, read only; what SQLite raises inside comes out as JournalError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> sqlite3.Connection:
        check_file(self.path)
        try:
            self._connection = connect(self.path, is_read_only=True)
            check_schema(self._connection, self.path)
            self._connection.execute("BEGIN")
        except SQLITE_ERRORS as error:
            raise cannot_open(self.path, error) from error
        return self._connection

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._connection.close()
        # ValueError, TypeError: a number that a flipped bit made something else
        if isinstance(error, sqlite3.Error | ValueError | TypeError):
            raise cannot_open(self.path, error) from error


def read_resume(path: Path, checkpoint_version: int) -> ResumeState:
    """All but the batches, which are loaded one by one. Raises JournalError."""
    with reading(path) as connection:
        before = _meta(connection, "began_at") or {
            "version": 0,
            "num_drawn": 0,
            "out": {},
            "next_group_id": 0,
        }
        next_version = _next_version(connection, path, checkpoint_version, before["version"])
        _check_states(connection, path)
        prompt_ids = {row[0] for row in connection.execute("SELECT DISTINCT prompt_id FROM groups")}
        (num_issued,) = connection.execute("SELECT coalesce(max(group_id) + 1, 0) FROM groups").fetchone()
        requeued = _requeued(connection)
        ready, running = _alive(connection, path)
        return ResumeState(
            path=path,
            checkpoint_version=checkpoint_version,
            next_version=next_version,
            ready=ready,
            running=running,
            requeued={name: count for name, count in before["out"].items() if name not in prompt_ids}
            | {name: count for name, (count, _) in requeued.items()},
            returning=frozenset(name for name, (_, at) in requeued.items() if at == next_version),
            num_drawn=before["num_drawn"] + len(prompt_ids.difference(before["out"])),
            next_group_id=GroupId(max(before["next_group_id"], num_issued)),
            order=_meta(connection, "order"),
            counted=read_counted(connection, checkpoint_version, next_version),
        )


def read_batch(connection: sqlite3.Connection, path: Path, version: int) -> Batch:
    """A batch as it was taken. Raises JournalError if it is not there, or its tokens were deleted."""
    row = connection.execute(
        "SELECT min_version, mask_older, num_groups FROM batches WHERE version = ?", (version,)
    ).fetchone()
    if row is None:
        raise damaged(path, f"batch {version} is not in it")
    min_version, mask_older, num_groups = row
    found = connection.execute(
        "SELECT g.group_id, g.start_version, g.prompt_id, p.blob FROM batch_groups b"
        " JOIN groups g USING (group_id) LEFT JOIN prompts p USING (group_id)"
        " WHERE b.version = ? ORDER BY b.position",
        (version,),
    ).fetchall()
    if len(found) != num_groups:
        raise damaged(path, f"batch {version} has {len(found)} groups of {num_groups}")
    groups = []
    for group_id, start_version, prompt_id, blob in found:
        if blob is None:
            raise _deleted(path, version)
        prompt, _ = decode_prompt(blob, Ticket(group_id, start_version), prompt_id, path)
        groups.append(_group(path, group_id, prompt, rollouts_of(connection, group_id, path)))
    return Batch(version, tuple(groups), min_version, mask_older=bool(mask_older))


def rollouts_of(connection: sqlite3.Connection, group_id: int, path: Path) -> dict[int, Rollout]:
    """The finished rollouts of a group by sample_index."""
    rows = connection.execute(
        "SELECT group_id, sample_index, branch, blob FROM trajectories WHERE group_id = ?"
        " ORDER BY sample_index, branch",
        (group_id,),
    )
    return _rollouts(rows, path).get(group_id, {})


def failures_of(connection: sqlite3.Connection, group_id: int) -> dict[int, tuple[int, str]]:
    """(attempts, why) of the failed rollouts of a group by sample_index."""
    rows = connection.execute(
        "SELECT sample_index, attempts, why FROM failures WHERE group_id = ? ORDER BY sample_index",
        (group_id,),
    )
    return {index: (attempts, why) for index, attempts, why in rows}


def partials_of(
    connection: sqlite3.Connection, group_id: int, path: Path
) -> dict[int, tuple[int, int, PartialCompletion]]:
    """(attempt, turn, the completion so far) of the unfinished rollouts of a group by sample_index."""
    rows = connection.execute(
        "SELECT sample_index, attempt, turn, blob FROM segments WHERE group_id = ? ORDER BY sample_index",
        (group_id,),
    )
    return {
        index: (attempt, turn, decode_partial(blob, group_id, index, path))
        for index, attempt, turn, blob in rows
    }


def _meta(connection: sqlite3.Connection, key: str) -> dict[str, Any] | None:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else json.loads(row[0])


def _next_version(connection: sqlite3.Connection, path: Path, checkpoint_version: int, began_at: int) -> int:
    """Version after the newest batch. Raises JournalError if a batch since the checkpoint cannot be trained
    again: that would end a resume in its middle.
    """
    if checkpoint_version < began_at:
        raise JournalError(
            f"{path} begins at version {began_at}, and the newest whole checkpoint is of version "
            f"{checkpoint_version}",
            rule="a run goes on from a checkpoint with every batch since, and the batches in between were in "
            "a journal that is gone",
            way_out=MOVE_ASIDE,
        )
    (newest,) = connection.execute("SELECT max(version) FROM batches").fetchone()
    if newest is None:
        return checkpoint_version  # nothing was trained, or the journal was begun anew from a checkpoint
    if newest + 1 < checkpoint_version:
        raise damaged(
            path, f"its newest batch is {newest}, but there is a checkpoint at version {checkpoint_version}"
        )
    (first_deleted,) = connection.execute(
        "SELECT min(version) FROM batch_groups LEFT JOIN prompts p USING (group_id)"
        " WHERE version >= ? AND p.blob IS NULL",
        (checkpoint_version,),
    ).fetchone()
    if first_deleted is not None:
        raise _deleted(path, first_deleted)
    return int(newest) + 1


def _deleted(path: Path, version: int) -> JournalError:
    return JournalError(
        f"the tokens of batch {version} were deleted from {path}",
        rule="with journal.keep=checkpoint they stay as long as a checkpoint before them",
        way_out="put a whole copy of a newer checkpoint back (damaged_step_N as step_N), or move "
        "journal.sqlite* out of the run directory: the run then goes on from its newest whole checkpoint "
        "alone.",
    )


def _check_states(connection: sqlite3.Connection, path: Path) -> None:
    """A group is taken if, and only if, it is in a batch; batches have no gap. No page check would see a bit
    that lies about it.
    """
    taken, given, found = connection.execute(
        "SELECT (SELECT count(*) FROM groups WHERE state = 'taken'),"
        " (SELECT coalesce(sum(num_groups), 0) FROM batches),"
        " (SELECT count(*) FROM batch_groups b JOIN groups g USING (group_id) JOIN batches USING (version)"
        " WHERE g.state = 'taken')"
    ).fetchone()
    if not taken == given == found:
        raise damaged(
            path, f"{taken} groups are taken, {found} of them are in batches, which were made of {given}"
        )
    first, last, count = connection.execute(
        "SELECT min(version), max(version), count(*) FROM batches"
    ).fetchone()
    if count and last - first + 1 != count:
        raise damaged(path, f"it has {count} batches with versions {first} to {last}")


def _alive(
    connection: sqlite3.Connection, path: Path
) -> tuple[tuple[tuple[Ticket, Group], ...], tuple[RunningRecord, ...]]:
    """Groups that are ready and groups that run, oldest first."""
    branches = connection.execute(
        "SELECT t.group_id, t.sample_index, t.branch, t.blob FROM groups g"
        " JOIN trajectories t USING (group_id) WHERE g.state IN ('running', 'ready')"
        " ORDER BY t.group_id, t.sample_index, t.branch"
    )
    rollouts = _rollouts(branches, path)
    rows = connection.execute(
        "SELECT group_id, start_version, state, prompt_id, blob FROM groups"
        " LEFT JOIN prompts USING (group_id) WHERE state IN ('running', 'ready') ORDER BY group_id"
    ).fetchall()
    ready, running = list[tuple[Ticket, Group]](), list[RunningRecord]()
    for group_id, start_version, state, prompt_id, blob in rows:
        ticket, finished = Ticket(GroupId(group_id), start_version), rollouts.get(group_id, {})
        prompt, is_whole = decode_prompt(blob, ticket, prompt_id, path)
        if state == "ready":
            ready.append((ticket, _group(path, group_id, prompt, finished)))
            continue
        failures, partials = failures_of(connection, group_id), partials_of(connection, group_id, path)
        running.append(RunningRecord(ticket, prompt, finished, failures, partials, is_whole))
    return tuple(ready), tuple(running)


def _rollouts(rows: Iterable[tuple[int, int, int, bytes]], path: Path) -> dict[int, dict[int, Rollout]]:
    """By group and sample_index, from rows in that order. Raises JournalError if a branch is missing."""
    found: dict[int, dict[int, Rollout]] = {}
    for group_id, index, branch, blob in rows:
        group = found.setdefault(group_id, {})
        before = group.get(index, ())
        if branch != len(before):
            raise damaged(path, f"g{group_id}/r{index} has branch {branch} after {len(before)} others")
        group[index] = (*before, decode_trajectory(blob, group_id, index, branch, path))
    return found


def _group(path: Path, group_id: int, prompt: Prompt, rollouts: Mapping[int, Rollout]) -> Group:
    if not rollouts:
        raise damaged(path, f"group {group_id} is ready or taken, and has no trajectory")
    branches = tuple(branch for rollout in rollouts.values() for branch in rollout)
    return Group(GroupId(group_id), prompt, branches)


def _requeued(connection: sqlite3.Connection) -> dict[str, tuple[int, int | None]]:
    """By prompt id (num_handed_back, version at which its group failed, if it did), in the order of first
    admission: as they were drawn.
    """
    rows = connection.execute(
        "SELECT h.prompt_id, h.requeued, CASE h.state WHEN 'failed' THEN h.start_version END,"
        " (SELECT min(group_id) FROM groups f WHERE f.prompt_id = h.prompt_id) AS first FROM groups h"
        " WHERE h.requeued IS NOT NULL AND NOT EXISTS"
        " (SELECT 1 FROM groups later WHERE later.prompt_id = h.prompt_id AND later.group_id > h.group_id) "
        "ORDER BY first"
    )
    return {prompt_id: (requeued, failed_at) for prompt_id, requeued, failed_at, _ in rows}
