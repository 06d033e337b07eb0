"""What each decision does to the tables. Runs in the writer's thread, inside its transaction.

Each function is one decision: it is refused (JournalError, sqlite3.IntegrityError) as a whole, or done as a
whole. What comes late for a group that was handed back meanwhile means nothing any more, and changes nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from asyncrl.errors import JournalError
from asyncrl.journal.tokens import encode_partial, encode_prompt, encode_trajectory
from asyncrl.messages.records import Batch, GroupId, PartialCompletion, Prompt, Rollout, Ticket

Taken = Literal["taken", "replayed"]
"""Of a batch: it is new, or it was taken before and is the same."""


def text(given: object) -> str:
    """A text that SQLite can hold: a lone surrogate, which a model may well write, is spelled out."""
    return str(given).encode("utf-8", "backslashreplace").decode("utf-8")


def admitted(connection: sqlite3.Connection, ticket: Ticket, prompt: Prompt, now_s: float) -> None:
    """The group runs. A resumed run may repeat it for a group that runs already."""
    prompt_id = text(prompt.prompt_id)
    rows = connection.execute(
        "SELECT group_id, prompt_id, start_version, state FROM groups"
        " WHERE group_id = ?1 OR prompt_id = ?2 AND state IN ('running', 'ready', 'taken')",
        (ticket.group_id, prompt_id),
    ).fetchall()
    if (ticket.group_id, prompt_id, ticket.start_version, "running") in rows:
        return
    if rows:
        group_id, found_id, _, state = rows[0]
        raise JournalError(
            f"group {ticket.group_id} (prompt {prompt_id}) cannot be admitted: group {group_id} is {state}, "
            f"with prompt {found_id}"
        )
    connection.execute(
        "INSERT INTO groups (group_id, prompt_id, start_version, state, admitted_s)"
        " VALUES (?, ?, ?, 'running', ?)",
        (ticket.group_id, prompt_id, ticket.start_version, now_s),
    )
    blob = encode_prompt(ticket, replace(prompt, prompt_id=prompt_id))
    connection.execute("INSERT INTO prompts VALUES (?, ?)", (ticket.group_id, blob))


def began_at(
    connection: sqlite3.Connection, version: int, num_drawn: int, out: Mapping[str, int], next_group_id: int
) -> None:
    """What was before this journal, whose run goes on from a checkpoint without the one that it had."""
    counts = {text(prompt_id): num_handed_back for prompt_id, num_handed_back in out.items()}
    before = {"version": version, "num_drawn": num_drawn, "out": counts, "next_group_id": next_group_id}
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('began_at', ?)", (json.dumps(before),))


def order(connection: sqlite3.Connection, what: Mapping[str, Any]) -> None:
    """What the order of the run's prompts follows from."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('order', ?)", (json.dumps(dict(what)),))


def segment(
    connection: sqlite3.Connection,
    group_id: GroupId,
    sample_index: int,
    attempt: int,
    turn: int,
    partial: PartialCompletion,
) -> None:
    """The whole of an unfinished completion, in place of what was there."""
    if _state(connection, group_id) != "running" or _has_ended(connection, group_id, sample_index):
        return
    _lose(connection, "group_id = ? AND sample_index = ? AND attempt < ?", group_id, sample_index, attempt)
    blob = encode_partial(group_id, sample_index, partial)
    connection.execute(
        "INSERT OR REPLACE INTO segments (group_id, sample_index, attempt, turn, num_tokens, blob)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (group_id, sample_index, attempt, turn, len(partial.token_ids), blob),
    )


def rollout_finished(connection: sqlite3.Connection, group_id: GroupId, rollout: Rollout) -> None:
    """The rollout's tokens, all its branches; its segments go."""
    if _state(connection, group_id) != "running":
        return
    places = [(branch.sample_index, branch.branch) for branch in rollout]
    if not rollout or places != [(places[0][0], number) for number in range(len(rollout))]:
        raise JournalError(f"a rollout of group {group_id} has branches (sample_index, branch) {places}")
    sample_index = rollout[0].sample_index
    _refuse_ended(connection, group_id, sample_index)
    connection.executemany(
        "INSERT INTO trajectories"
        " (group_id, sample_index, branch, reward, num_tokens, num_sampled, oldest_version, blob)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                group_id,
                sample_index,
                branch.branch,
                float(branch.reward),
                len(branch.token_ids),
                branch.num_sampled,
                branch.oldest_version if branch.version_spans else None,
                encode_trajectory(group_id, branch),
            )
            for branch in rollout
        ],
    )
    connection.execute(
        "DELETE FROM segments WHERE group_id = ? AND sample_index = ?", (group_id, sample_index)
    )


def rollout_failed(
    connection: sqlite3.Connection, group_id: GroupId, sample_index: int, num_attempts: int, why: str
) -> None:
    """Why the rollout has no trajectory; its segments go."""
    if _state(connection, group_id) != "running":
        return
    _refuse_ended(connection, group_id, sample_index)
    connection.execute(
        "INSERT INTO failures VALUES (?, ?, ?, ?)", (group_id, sample_index, num_attempts, text(why))
    )
    _lose(connection, "group_id = ? AND sample_index = ?", group_id, sample_index)


def group_ended(
    connection: sqlite3.Connection,
    group_id: GroupId,
    state: str,
    reason: str,
    requeued: int | None,
    now_s: float,
) -> None:
    """From running to any end, or from ready to handed_back."""
    found = _state(connection, group_id)
    if found != "running" and (found, state) != ("ready", "handed_back"):
        raise JournalError(f"group {group_id} cannot become {state}: it is {found}")
    connection.execute(
        "UPDATE groups SET state = ?, reason = ?, requeued = ?, ended_s = ? WHERE group_id = ?",
        (state, text(reason), requeued, now_s, group_id),
    )
    _lose(connection, "group_id = ?", group_id)


def batch_taken(connection: sqlite3.Connection, batch: Batch, now_s: float) -> Taken:
    """The batch, its groups in order, and the groups' new state: together or not at all."""
    version, group_ids = batch.version, [group.group_id for group in batch.groups]
    row = connection.execute(
        "SELECT min_version, mask_older FROM batches WHERE version = ?", (version,)
    ).fetchone()
    if row is not None:
        found = connection.execute(
            "SELECT group_id FROM batch_groups WHERE version = ? ORDER BY position", (version,)
        )
        taken = [group_id for (group_id,) in found]
        if (taken, *row) != (group_ids, batch.min_version, int(batch.mask_older)):
            raise _not_this_batch(
                version,
                f"it was taken with groups {taken}, min_version {row[0]}, mask_older {bool(row[1])}; this "
                f"one has groups {group_ids}, min_version {batch.min_version}, mask_older {batch.mask_older}",
            )
        return "replayed"
    newest = connection.execute("SELECT max(version) FROM batches").fetchone()[0]
    if newest is not None and version != newest + 1:
        raise _not_this_batch(version, f"the newest batch is {newest}")
    if wrong := _unready(connection, batch):
        raise _not_this_batch(version, "; ".join(wrong))
    connection.execute(
        "INSERT INTO batches (version, min_version, mask_older, num_groups, taken_s) VALUES (?, ?, ?, ?, ?)",
        (version, batch.min_version, int(batch.mask_older), len(group_ids), now_s),
    )
    connection.executemany(
        "INSERT INTO batch_groups VALUES (?, ?, ?)",
        [(version, position, group_id) for position, group_id in enumerate(group_ids)],
    )
    connection.executemany(
        "UPDATE groups SET state = 'taken' WHERE group_id = ?", [(group_id,) for group_id in group_ids]
    )
    return "taken"


def trained(connection: sqlite3.Connection, version: int, metrics: Mapping[str, Any], now_s: float) -> None:
    """The batch has become a step; a resumed run that trains it again replaces what was said."""
    loss = metrics.get("policy/loss")
    changed = connection.execute(
        "UPDATE batches SET trained_s = ?, loss = ? WHERE version = ?",
        (now_s, None if loss is None else float(loss), version),
    ).rowcount
    if not changed:
        raise JournalError(f"a step of batch {version}, which was never taken")


def published(connection: sqlite3.Connection, version: int, digest: str, now_s: float) -> None:
    """Every engine serves it; said again after a resume."""
    connection.execute("INSERT OR REPLACE INTO publishes VALUES (?, ?, ?)", (version, digest, now_s))


def checkpointed(
    connection: sqlite3.Connection, version: int, path: str, beside: Sequence[int], now_s: float
) -> None:
    """It is whole on disk, and of the others those in `beside` are still there."""
    connection.execute(
        "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, 'whole')", (version, text(path), now_s)
    )
    connection.execute(
        "UPDATE checkpoints SET state = 'removed' WHERE version NOT IN (SELECT value FROM json_each(?))",
        (json.dumps([version, *beside]),),
    )


def event(
    connection: sqlite3.Connection, what: str, detail: Mapping[str, Any], keep: int | None, now_s: float
) -> None:
    """Something that `inspect` should show: a restart, a resume, what a watchdog saw. `keep`: the newest so
    many of that name stay.
    """
    connection.execute(
        "INSERT INTO events (s, what, detail) VALUES (?, ?, ?)",
        (now_s, text(what), json.dumps(detail, default=str)),
    )
    if keep is not None:
        older = "SELECT id FROM events WHERE what = ? ORDER BY id DESC LIMIT -1 OFFSET ?"
        connection.execute(f"DELETE FROM events WHERE id IN ({older})", (text(what), keep))


def _lose(connection: sqlite3.Connection, where: str, group_id: GroupId, *rest: int) -> None:
    """Delete segments that nothing will come of, and count their tokens."""
    lost = connection.execute(
        f"SELECT sum(num_tokens) FROM segments WHERE {where}", (group_id, *rest)
    ).fetchone()[0]
    if lost is not None:
        connection.execute(f"DELETE FROM segments WHERE {where}", (group_id, *rest))
        connection.execute(
            "UPDATE groups SET lost_tokens = lost_tokens + ? WHERE group_id = ?", (lost, group_id)
        )


def _unready(connection: sqlite3.Connection, batch: Batch) -> list[str]:
    """Why the batch cannot be taken, by group."""
    wrong = [] if batch.groups else ["it has no groups"]
    for group in batch.groups:
        name = f"group {group.group_id}"
        row = connection.execute(
            "SELECT state, (SELECT version FROM batch_groups b WHERE b.group_id = g.group_id),"
            " (SELECT count(*) FROM trajectories t WHERE t.group_id = g.group_id),"
            " (SELECT total(num_tokens) FROM trajectories t WHERE t.group_id = g.group_id)"
            " FROM groups g WHERE group_id = ?",
            (group.group_id,),
        ).fetchone()
        if row is None:
            wrong.append(f"{name} was never admitted")
            continue
        state, version, *written = row
        given = [len(group.trajectories), sum(len(trajectory.token_ids) for trajectory in group.trajectories)]
        if version is not None:
            wrong.append(f"{name} is in batch {version}")
        elif state != "ready":
            wrong.append(f"{name} is {state}")
        elif written != given:
            wrong.append(
                f"{name} has {given[0]} trajectories of {given[1]} tokens, the journal {written[0]} of "
                f"{written[1]:.0f}"
            )
    if len({group.group_id for group in batch.groups}) < len(batch.groups):
        wrong.append("a group is in it twice")
    return wrong


def _not_this_batch(version: int, found: str) -> JournalError:
    return JournalError(
        f"batch {version} cannot be taken: {found}",
        rule="a version is made from one batch, batches follow each other, and a group is trained on exactly "
        "once, when it is ready",
        way_out="resume: the journal is whole, and its batches are trained again as they are.",
    )


def _state(connection: sqlite3.Connection, group_id: GroupId) -> str:
    row = connection.execute("SELECT state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
    if row is None:
        raise JournalError(f"group {group_id} was never admitted")
    return str(row[0])


def _has_ended(connection: sqlite3.Connection, group_id: GroupId, sample_index: int) -> bool:
    row = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM trajectories WHERE group_id = ?1 AND sample_index = ?2)"
        " OR EXISTS (SELECT 1 FROM failures WHERE group_id = ?1 AND sample_index = ?2)",
        (group_id, sample_index),
    ).fetchone()
    return bool(row[0])


def _refuse_ended(connection: sqlite3.Connection, group_id: GroupId, sample_index: int) -> None:
    if _has_ended(connection, group_id, sample_index):
        raise JournalError(f"rollout g{group_id}/r{sample_index} has ended already")


# Compaction: deletes what no resume can need, the tokens of batches before every checkpoint. What stays of a
# group is one short row, its place in its batch, and five numbers: about 100 bytes.

_GROUPS_A_STEP = 200
_PAGES_A_STEP = 500


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Groups whose tokens were deleted, and pages of the file that were given back to the disk."""

    num_groups: int
    num_pages: int


def compact_some(connection: sqlite3.Connection, before_version: int) -> int:
    """Delete the prompts and tokens of some groups; returns of how many, 0 when none is left."""
    taken = connection.execute(
        "SELECT g.group_id FROM batch_groups b JOIN groups g USING (group_id)"
        " WHERE b.version >= (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'compacted_before')"
        " AND b.version < ? AND g.num_rollouts IS NULL ORDER BY b.version, b.position LIMIT ?",
        (before_version, _GROUPS_A_STEP),
    ).fetchall()
    newest = connection.execute(
        "SELECT max(group_id) FROM batch_groups WHERE version = ?", (before_version - 1,)
    ).fetchone()[0]
    wasted = connection.execute(
        "SELECT group_id FROM groups WHERE state IN ('failed', 'filtered', 'handed_back')"
        " AND num_rollouts IS NULL AND group_id <= ? ORDER BY group_id LIMIT ?",
        (-1 if newest is None else newest, _GROUPS_A_STEP),
    ).fetchall()
    for (group_id,) in taken + wasted:
        _shrink(connection, group_id)
    if len(taken) < _GROUPS_A_STEP:
        connection.execute(
            "UPDATE meta SET value = ?1 WHERE key = 'compacted_before'"
            " AND CAST(value AS INTEGER) < CAST(?1 AS INTEGER)",
            (str(before_version),),
        )
    return len(taken) + len(wasted)


def vacuum_some(connection: sqlite3.Connection) -> int:
    """Give some free pages back to the disk; returns how many, 0 when there are none."""
    num_pages = min(int(connection.execute("PRAGMA freelist_count").fetchone()[0]), _PAGES_A_STEP)
    for _ in range(num_pages):  # sqlite3 steps a statement without columns once, which frees one page
        connection.execute("PRAGMA incremental_vacuum(1)")
    return num_pages


def _shrink(connection: sqlite3.Connection, group_id: int) -> None:
    connection.execute(
        "UPDATE groups SET num_failed = (SELECT count(*) FROM failures f WHERE f.group_id = groups.group_id),"
        " (num_rollouts, num_sampled, oldest_version, reward_mean) ="
        " (SELECT count(CASE WHEN branch = 0 THEN 1 END), total(num_sampled), min(oldest_version),"
        " avg(CASE WHEN branch = 0 THEN reward END) FROM trajectories t WHERE t.group_id = groups.group_id)"
        " WHERE group_id = ?",
        (group_id,),
    )
    for table in ("prompts", "trajectories", "failures", "segments"):
        connection.execute(f"DELETE FROM {table} WHERE group_id = ?", (group_id,))
