"""Effects of each decision on the tables, in the writer's thread and transaction.

A decision is refused (JournalError, sqlite3.IntegrityError) or done as a whole. Late decisions about a
requeued group change nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from asyncrl.base.errors import JournalError
from asyncrl.journal.tokens import encode_partial, encode_trajectory
from asyncrl.messages.records import Batch, Completion, GroupId, Prompt, Rollout, Ticket

Ended = Literal["ready", "failed", "filtered", "requeued"]
_GROUPS_A_STEP = 200
EPOCH = "epoch/"


decided_s: ContextVar[float] = ContextVar("decided_s")


def text(given: object) -> str:
    """Escape lone surrogates, which SQLite cannot hold."""
    return str(given).encode("utf-8", "backslashreplace").decode("utf-8")


def admitted(connection: sqlite3.Connection, ticket: Ticket, prompt: Prompt) -> None:
    """Record that the group runs. Repeatable."""
    key = (ticket.group_id, text(prompt.prompt_id), ticket.start_version)
    same = "group_id = ? AND prompt_id = ? AND start_version = ? AND state = 'running'"
    if connection.execute(f"SELECT 1 FROM groups WHERE {same}", key).fetchone():
        return
    connection.execute(
        "INSERT INTO groups"
        " (group_id, prompt_id, start_version, state, num_requeued, messages, admitted_s)"
        " VALUES (?, ?, ?, 'running', ?, ?, ?)",
        (*key, prompt.num_requeued, json.dumps([*map(dict, prompt.messages)]), decided_s.get()),
    )


def began_at(
    connection: sqlite3.Connection,
    version: int,
    num_drawn: int,
    out: Mapping[str, int],
    next_group_id: int,
    memory: Mapping[str, Any],
) -> None:
    """Begin a new journal for a run that resumes from a checkpoint without its old one.

    `num_drawn` prompts had been drawn; those in `out` are sampled again, with that num_requeued.
    """
    before = {"version": version, "num_drawn": num_drawn, "out": out, "next_group_id": next_group_id}
    before["memory"] = memory
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('began_at', ?)", (json.dumps(before),))


def order(connection: sqlite3.Connection, what: Mapping[str, Any]) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('order', ?)", (json.dumps(what),))


def epoch(connection: sqlite3.Connection, task: str, number: int, what: str) -> None:
    """Record an epoch of a task sampled by difficulty; `what`: its prompts. Repeatable."""
    key = f"{EPOCH}{number}/{task}"
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(what)))


def segment(
    connection: sqlite3.Connection,
    group_id: GroupId,
    sample_index: int,
    attempt: int,
    turn: int,
    partial: Completion,
) -> None:
    state, has_ended, before = _rollout(connection, group_id, sample_index)
    if state != "running" or has_ended:
        return
    if before is not None and before < attempt:
        _lose(connection, "group_id = ? AND sample_index = ?", group_id, sample_index)
    blob = encode_partial(group_id, sample_index, partial)
    connection.execute(
        "INSERT OR REPLACE INTO segments (group_id, sample_index, attempt, turn, num_tokens, blob)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (group_id, sample_index, attempt, turn, len(partial.token_ids), blob),
    )


def rollout_finished(connection: sqlite3.Connection, group_id: GroupId, rollout: Rollout) -> None:
    sample_index = rollout[0].sample_index
    state, has_ended, attempt = _rollout(connection, group_id, sample_index)
    if state != "running":
        return
    places = [(branch.sample_index, branch.branch) for branch in rollout]
    assert places == [(sample_index, number) for number in range(len(rollout))], f"branches {places}"
    _refuse_ended(has_ended, group_id, sample_index)
    connection.executemany(
        "INSERT INTO trajectories VALUES (?, ?, ?, ?)",
        [(group_id, sample_index, branch.branch, encode_trajectory(group_id, branch)) for branch in rollout],
    )
    oldest = min((span.version for branch in rollout for span in branch.version_spans), default=None)
    connection.execute(
        "UPDATE groups SET num_rollouts = num_rollouts + 1, num_sampled = num_sampled + ?,"
        " reward_sum = reward_sum + ?, oldest_version = min(coalesce(oldest_version, ?), ?)"
        " WHERE group_id = ?",
        (sum(branch.num_sampled for branch in rollout), float(rollout[0].reward), oldest, oldest, group_id),
    )
    if attempt is not None:
        connection.execute(
            "DELETE FROM segments WHERE group_id = ? AND sample_index = ?", (group_id, sample_index)
        )


def rollout_failed(
    connection: sqlite3.Connection, group_id: GroupId, sample_index: int, num_attempts: int, why: str
) -> None:
    state, has_ended, _ = _rollout(connection, group_id, sample_index)
    if state != "running":
        return
    _refuse_ended(has_ended, group_id, sample_index)
    connection.execute(
        "INSERT INTO failures VALUES (?, ?, ?, ?)", (group_id, sample_index, num_attempts, text(why))
    )
    connection.execute("UPDATE groups SET num_failed = num_failed + 1 WHERE group_id = ?", (group_id,))
    _lose(connection, "group_id = ? AND sample_index = ?", group_id, sample_index)


def tokens_lost(
    connection: sqlite3.Connection, group_id: GroupId, num_tokens: int, sample_index: int | None = None
) -> None:
    """Count sampled tokens outside any trajectory. With `sample_index`, drop the unfinished completion."""
    more = "UPDATE groups SET lost_tokens = lost_tokens + ? WHERE group_id = ?"
    connection.execute(more, (num_tokens, group_id))
    if sample_index is not None:
        _lose(connection, "group_id = ? AND sample_index = ?", group_id, sample_index)


def group_ended(
    connection: sqlite3.Connection,
    group_id: GroupId,
    state: Ended,
    reason: str,
    *,
    requeued: int | None = None,
) -> None:
    found = _state(connection, group_id)
    if found != "running" and (found, state) != ("ready", "requeued"):
        raise JournalError(f"group {group_id} cannot become {state}: it is {found}")
    connection.execute(
        "UPDATE groups SET state = ?, reason = ?, requeued = ?, ended_s = ? WHERE group_id = ?",
        (state, text(reason), requeued, decided_s.get(), group_id),
    )
    _lose(connection, "group_id = ?", group_id)


def batch_taken(connection: sqlite3.Connection, batch: Batch) -> Literal["taken", "replayed"]:
    version, group_ids = batch.version, [group.group_id for group in batch.groups]
    found = connection.execute(
        "SELECT min_version, mask_older, json_group_array(group_id) FROM"
        " (SELECT * FROM batches JOIN batch_groups USING (version) WHERE version = ? ORDER BY position)"
        " GROUP BY version",
        (version,),
    ).fetchone()
    this = (batch.min_version, int(batch.mask_older), json.dumps(group_ids, separators=(",", ":")))
    if found == this:
        return "replayed"
    if found is not None:
        raise _not_this_batch(version, f"it was recorded as {found}; this one is {this}")
    newest = connection.execute("SELECT max(version) FROM batches").fetchone()[0]
    if newest is not None and version != newest + 1:
        raise _not_this_batch(version, f"the newest batch is {newest}")
    among = "SELECT group_id, state FROM groups WHERE group_id IN (SELECT value FROM json_each(?))"
    states = dict(connection.execute(among, (this[2],)))
    for group_id in group_ids:
        if (state := states.get(group_id, "unknown")) != "ready":
            raise _not_this_batch(version, f"group {group_id} is {state}")
    connection.execute(
        "INSERT INTO batches (version, min_version, mask_older, num_groups, taken_s) VALUES (?, ?, ?, ?, ?)",
        (version, *this[:2], len(group_ids), decided_s.get()),
    )
    places = [(version, position, group_id) for position, group_id in enumerate(group_ids)]
    connection.executemany("INSERT INTO batch_groups VALUES (?, ?, ?)", places)
    taken = ((group_id,) for group_id in group_ids)
    connection.executemany("UPDATE groups SET state = 'taken' WHERE group_id = ?", taken)
    return "taken"


def trained(connection: sqlite3.Connection, version: int, metrics: Mapping[str, float]) -> None:
    """Record that the batch became policy_version version + 1. Repeatable."""
    loss = metrics.get("policy/loss")
    changed = connection.execute(
        "UPDATE batches SET trained_s = ?, loss = ? WHERE version = ?",
        (decided_s.get(), None if loss is None else float(loss), version),
    ).rowcount
    assert changed, f"a step of batch {version}, which was never taken"


def published(connection: sqlite3.Connection, version: int, digest: str) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO publishes VALUES (?, ?, ?)", (version, digest, decided_s.get())
    )


def checkpointed(
    connection: sqlite3.Connection, version: int, path: Path | str, beside: Sequence[int] = ()
) -> None:
    """Record a whole checkpoint; other checkpoints are gone, except these versions."""
    connection.execute(
        "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, 'whole')", (version, text(path), decided_s.get())
    )
    connection.execute(
        "UPDATE checkpoints SET state = 'removed' WHERE version NOT IN (SELECT value FROM json_each(?))",
        (json.dumps([version, *beside]),),
    )


def restored(connection: sqlite3.Connection, version: int) -> None:
    event(connection, "restored", {"version": version})


def event(
    connection: sqlite3.Connection, what: str, detail: Mapping[str, Any], *, keep: int | None = None
) -> None:
    """Record an event for `inspect`. `keep`: retain the newest events of its kind."""
    connection.execute(
        "INSERT INTO events (s, what, detail) VALUES (?, ?, ?)",
        (decided_s.get(), text(what), json.dumps(detail, default=str)),
    )
    if keep is not None:
        older = "SELECT id FROM events WHERE what = ? ORDER BY id DESC LIMIT -1 OFFSET ?"
        connection.execute(f"DELETE FROM events WHERE id IN ({older})", (text(what), keep))


def compact_some(connection: sqlite3.Connection, before_version: int) -> int:
    """Delete messages and tokens that no resume needs. Return the number of groups, 0 when done."""
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
    connection.executemany("UPDATE groups SET messages = NULL WHERE group_id = ?", found)
    return len(found)


def _lose(connection: sqlite3.Connection, where: str, group_id: GroupId, *rest: int) -> None:
    query = f"SELECT sum(num_tokens) FROM segments WHERE {where}"
    (num_tokens,) = connection.execute(query, (group_id, *rest)).fetchone()
    if num_tokens is not None:
        more = "UPDATE groups SET lost_tokens = lost_tokens + ? WHERE group_id = ?"
        connection.execute(more, (num_tokens, group_id))
        connection.execute(f"DELETE FROM segments WHERE {where}", (group_id, *rest))


def _not_this_batch(version: int, found: str) -> JournalError:
    return JournalError(
        f"batch {version} cannot be taken: {found}",
        rule="batches are consecutive, and each ready group is trained exactly once",
        way_out="resume; the journal is whole, and its batches are trained again unchanged.",
    )


def _state(connection: sqlite3.Connection, group_id: GroupId) -> str:
    row = connection.execute("SELECT state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
    if row is None:
        raise _never_admitted(group_id)
    return str(row[0])


def _rollout(
    connection: sqlite3.Connection, group_id: GroupId, sample_index: int
) -> tuple[str, bool, int | None]:
    """Return group state, whether the rollout has ended, and segment attempt, in one statement for speed."""
    row = connection.execute(_ROLLOUT, {"group": group_id, "sample": sample_index}).fetchone()
    if row is None:
        raise _never_admitted(group_id)
    return row[0], bool(row[1]), row[2]


_OF_IT = "WHERE group_id = :group AND sample_index = :sample"
_ROLLOUT = (
    f"SELECT state, EXISTS (SELECT 1 FROM trajectories {_OF_IT}) OR EXISTS (SELECT 1 FROM failures {_OF_IT}),"
    f" (SELECT attempt FROM segments {_OF_IT}) FROM groups WHERE group_id = :group"
)


def _never_admitted(group_id: GroupId) -> JournalError:
    return JournalError(f"group {group_id} was never admitted")


def _refuse_ended(has_ended: bool, group_id: GroupId, sample_index: int) -> None:
    if has_ended:
        raise JournalError(f"rollout g{group_id}/r{sample_index} has ended already")
