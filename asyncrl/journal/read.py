"""Reads from the journal what a resumed run needs. It never writes, so it works beside a running writer.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import JournalError
from asyncrl.journal.schema import DISK_ERRORS, MOVE_ASIDE, cannot_use, connect, damaged
from asyncrl.journal.tokens import decode_partial, decode_trajectory
from asyncrl.messages.records import (
    Batch,
    Group,
    GroupId,
    PartialCompletion,
    Prompt,
    Rollout,
    Ticket,
    UnfinishedGroup,
)

_COUNTED = {
    "tokens/generated": "total(num_sampled + lost_tokens) + (SELECT total(num_tokens) FROM segments)",
    "rollout/failed": "total(num_failed)",
    "rollout/failed_groups": "total(state = 'failed')",
    "rollout/filtered": "total(state = 'filtered')",
    "rollout/filtered_tokens": "total(iif(state = 'filtered', num_sampled, 0))",
    "rollout/dropped": "total(state = 'handed_back' AND reason IN ('dropped', 'all_masked'))",
    "rollout/given_up": "total(state IN ('handed_back', 'failed') AND requeued IS NULL)",
}
"""Counters of the whole run, by the names of observe/metrics.py. Dropped are those that the staleness rule
handed back while the run went on, for one of its two reasons: what a resume hands back has others."""


@dataclass(frozen=True, slots=True, eq=False)
class ResumeState:
    """Where a run stands that goes on from weights `checkpoint_version`.

    Batches checkpoint_version .. next_version - 1 are trained again as they are; `ready` and `running` go on,
    oldest first; `requeued` prompts come again (id -> num_handed_back) and were not admitted yet, in their
    old order, those of them in `returning` only after version next_version, at which their groups failed;
    `num_drawn` different prompts were ever admitted, those of a run included whose journal was lost, so that
    this one begins with a checkpoint. Prompts have neither answer nor info: the task makes them again.
    """

    path: Path
    checkpoint_version: int
    next_version: int
    ready: tuple[tuple[Ticket, Group], ...]
    running: tuple[UnfinishedGroup, ...]
    requeued: Mapping[str, int]
    returning: frozenset[str]
    num_drawn: int
    next_group_id: GroupId
    order: Mapping[str, Any] | None
    """What the order of the prompts followed from; None if it was never written."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """What a run that goes on begins its counters with: _COUNTED, of all groups up to now."""

    def load_batch(self, version: int) -> Batch:
        """One of the batches. Blocks. Raises JournalError if it is not there, or its tokens were deleted."""
        with reading(self.path) as connection:
            return read_batch(connection, self.path, version)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A snapshot of the journal, read only; what SQLite raises inside comes out as JournalError."""
    try:
        with closing(connect(path, is_read_only=True)) as connection:
            connection.execute("BEGIN")
            yield connection
    except DISK_ERRORS as error:
        raise cannot_use(path, error) from error
    except (ValueError, TypeError) as error:  # a value that a flipped bit made something else
        raise damaged(path, str(error)) from error


def read_resume(path: Path, checkpoint_version: int) -> ResumeState:
    """All but the batches, which are loaded one by one. Raises JournalError."""
    with reading(path) as connection:
        notes = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('began_at', 'order')"))
        began_at = json.loads(
            notes.get("began_at", '{"version": 0, "num_drawn": 0, "out": {}, "next_group_id": 0}')
        )
        next_version = _next_version(connection, path, checkpoint_version, began_at["version"])
        prompt_ids = {row[0] for row in connection.execute("SELECT DISTINCT prompt_id FROM groups")}
        (num_issued,) = connection.execute("SELECT coalesce(max(group_id) + 1, 0) FROM groups").fetchone()
        counted = connection.execute(f"SELECT {', '.join(_COUNTED.values())} FROM groups").fetchone()
        requeued = _requeued(connection)
        ready, running = _alive(connection, path)
        return ResumeState(
            path=path,
            checkpoint_version=checkpoint_version,
            next_version=next_version,
            ready=ready,
            running=running,
            requeued={name: count for name, count in began_at["out"].items() if name not in prompt_ids}
            | {name: count for name, (count, _) in requeued.items()},
            returning=frozenset(name for name, (_, at) in requeued.items() if at == next_version),
            num_drawn=began_at["num_drawn"] + len(prompt_ids.difference(began_at["out"])),
            next_group_id=GroupId(max(began_at["next_group_id"], num_issued)),
            order=json.loads(notes["order"]) if "order" in notes else None,
            counted=dict(zip(_COUNTED, map(int, counted), strict=True)),
        )


def read_batch(connection: sqlite3.Connection, path: Path, version: int) -> Batch:
    """A batch as it was taken. Raises JournalError if it is not there, or its tokens were deleted."""
    row = connection.execute(
        "SELECT min_version, mask_older, num_groups FROM batches WHERE version = ?", (version,)
    ).fetchone()
    rows = connection.execute(
        "SELECT g.group_id, prompt_id, num_handed_back, messages FROM batch_groups b"
        " JOIN groups g USING (group_id) WHERE b.version = ? ORDER BY b.position",
        (version,),
    ).fetchall()
    if row is None or len(rows) != row[2]:
        raise damaged(path, f"batch {version} is not in it as a whole")
    if any(messages is None for *_, messages in rows):
        raise _deleted(path, version)
    groups = [_group(connection, path, row) for row in rows]
    return Batch(version, tuple(groups), row[0], mask_older=bool(row[1]))


def rollouts_of(connection: sqlite3.Connection, group_id: int, path: Path) -> dict[int, Rollout]:
    """The finished rollouts of a group by sample_index."""
    found: dict[int, Rollout] = {}
    for index, branch, blob in connection.execute(
        "SELECT sample_index, branch, blob FROM trajectories WHERE group_id = ?"
        " ORDER BY sample_index, branch",
        (group_id,),
    ):
        found[index] = (*found.get(index, ()), decode_trajectory(blob, group_id, index, branch, path))
        if len(found[index]) != branch + 1:
            raise damaged(
                path, f"g{group_id}/r{index} has branch {branch} after {len(found[index]) - 1} others"
            )
    return found


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


def prompt_of(prompt_id: str, num_handed_back: int, messages: str) -> Prompt:
    """What the journal keeps of a prompt. Raises ValueError."""
    return Prompt(prompt_id, tuple(json.loads(messages)), num_handed_back=num_handed_back)


def _next_version(connection: sqlite3.Connection, path: Path, checkpoint_version: int, began_at: int) -> int:
    """Version after the newest batch. Raises JournalError if a batch since the checkpoint cannot be trained
    again: that would end a resume in its middle.
    """
    if checkpoint_version < began_at:
        raise JournalError(
            f"{path} begins at version {began_at}, the newest whole checkpoint is of {checkpoint_version}",
            rule="a run goes on from a checkpoint with every batch since",
            way_out=MOVE_ASIDE,
        )
    newest, num_taken, num_given, num_found = connection.execute(
        "SELECT (SELECT max(version) FROM batches), (SELECT count(*) FROM groups WHERE state = 'taken'),"
        " (SELECT coalesce(sum(num_groups), 0) FROM batches), (SELECT count(*) FROM batch_groups)"
    ).fetchone()
    if not num_taken == num_given == num_found:  # no check of pages would see a bit that lies about it
        raise damaged(
            path, f"{num_taken} groups are taken, by batches of {num_given}, which have {num_found}"
        )
    if newest is None:
        return checkpoint_version  # nothing was trained, or the journal was begun anew from a checkpoint
    if newest + 1 < checkpoint_version:
        raise damaged(
            path, f"its newest batch is {newest}, and a checkpoint is of version {checkpoint_version}"
        )
    (first_deleted,) = connection.execute(
        "SELECT min(version) FROM batch_groups JOIN groups USING (group_id)"
        " WHERE version >= ? AND messages IS NULL",
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
        "journal.sqlite* out of the run directory: the run then goes on from its newest whole checkpoint.",
    )


def _alive(
    connection: sqlite3.Connection, path: Path
) -> tuple[tuple[tuple[Ticket, Group], ...], tuple[UnfinishedGroup, ...]]:
    """Groups that are ready and groups that run, oldest first."""
    ready, running = list[tuple[Ticket, Group]](), list[UnfinishedGroup]()
    for state, start_version, *row in connection.execute(
        "SELECT state, start_version, group_id, prompt_id, num_handed_back, messages FROM groups"
        " WHERE state IN ('running', 'ready') ORDER BY group_id"
    ).fetchall():
        ticket = Ticket(GroupId(row[0]), start_version)
        if state == "ready":
            ready.append((ticket, _group(connection, path, row)))
            continue
        partials = partials_of(connection, ticket.group_id, path)
        running.append(
            UnfinishedGroup(
                ticket,
                prompt_of(*row[1:]),
                rollouts_of(connection, ticket.group_id, path),
                failures_of(connection, ticket.group_id),
                {index: (attempt, partial) for index, (attempt, _, partial) in partials.items()},
            )
        )
    return tuple(ready), tuple(running)


def _group(connection: sqlite3.Connection, path: Path, row: Any) -> Group:
    group_id, prompt_id, num_handed_back, messages = row
    rollouts = rollouts_of(connection, group_id, path)
    if not rollouts:
        raise damaged(path, f"group {group_id} is ready or taken, and has no trajectory")
    branches = tuple(branch for rollout in rollouts.values() for branch in rollout)
    return Group(GroupId(group_id), prompt_of(prompt_id, num_handed_back, messages), branches)


def _requeued(connection: sqlite3.Connection) -> dict[str, tuple[int, int | None]]:
    """By prompt id (num_handed_back, version at which its group failed, if it did), in the order of first
    admission: as they were drawn.
    """
    rows = connection.execute(
        "SELECT h.prompt_id, h.requeued, CASE h.state WHEN 'failed' THEN h.start_version END,"
        " (SELECT min(group_id) FROM groups f WHERE f.prompt_id = h.prompt_id) AS first FROM groups h"
        " WHERE h.requeued IS NOT NULL AND NOT EXISTS"
        " (SELECT 1 FROM groups later WHERE later.prompt_id = h.prompt_id AND later.group_id > h.group_id)"
        " ORDER BY first"
    )
    return {prompt_id: (requeued, failed_at) for prompt_id, requeued, failed_at, _ in rows}
