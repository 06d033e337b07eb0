"""Deletes what no resume can need: the tokens of batches before every checkpoint. Runs in the writer's thread; knows no loop.

What stays of a group is one short row, its place in its batch, and five numbers: about 100 bytes.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

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
        " WHERE b.version >= (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'compacted_before') AND b.version < ?"
        " AND g.num_rollouts IS NULL ORDER BY b.version, b.position LIMIT ?",
        (before_version, _GROUPS_A_STEP),
    ).fetchall()
    newest = connection.execute("SELECT max(group_id) FROM batch_groups WHERE version = ?", (before_version - 1,)).fetchone()[0]
    wasted = connection.execute(
        "SELECT group_id FROM groups WHERE state IN ('failed', 'filtered', 'handed_back') AND num_rollouts IS NULL AND group_id <= ?"
        " ORDER BY group_id LIMIT ?",
        (-1 if newest is None else newest, _GROUPS_A_STEP),
    ).fetchall()
    for (group_id,) in taken + wasted:
        _shrink(connection, group_id)
    if len(taken) < _GROUPS_A_STEP:
        connection.execute(
            "UPDATE meta SET value = ?1 WHERE key = 'compacted_before' AND CAST(value AS INTEGER) < CAST(?1 AS INTEGER)",
            (str(before_version),),
        )
    return len(taken) + len(wasted)


def vacuum_some(connection: sqlite3.Connection) -> int:
    """Give some free pages back to the disk; returns how many, 0 when there are none."""
    num_pages = min(int(connection.execute("PRAGMA freelist_count").fetchone()[0]), _PAGES_A_STEP)
    for _ in range(num_pages):  # sqlite3 takes one step of a statement without columns, and a step frees one page, whatever N is
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
