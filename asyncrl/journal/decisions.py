"""What each thing that is told does to the tables. Runs in the writer's thread, inside its transaction; knows
no loop.

Each function is one decision: it is refused (JournalError, sqlite3.IntegrityError) as a whole, or done as a
whole. What comes late for a group that was handed back meanwhile means nothing any more, and changes nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from asyncrl.journal.refusals import (
    admitted_twice,
    batch_differs,
    batch_unknown,
    cannot_end,
    group_unknown,
    not_consumable,
    not_one_rollout,
    told_twice,
)
from asyncrl.journal.tokens import encode_partial, encode_prompt, encode_trajectory
from asyncrl.messages.records import Batch, GroupId, PartialCompletion, Prompt, Rollout, Ticket

Taken = Literal["taken", "replayed"]
"""What batch_taken says: the batch is new, or it was taken before and is the same."""


def text(given: object) -> str:
    """A text that SQLite can hold: a lone surrogate, which a model may well write, is spelled out."""
    return str(given).encode("utf-8", "backslashreplace").decode("utf-8")


def admitted(connection: sqlite3.Connection, ticket: Ticket, prompt: Prompt, now_s: float) -> None:
    """The group runs. A resumed run may tell it again of a group that runs already."""
    prompt_id = text(prompt.prompt_id)
    row = connection.execute(
        "SELECT prompt_id, start_version, state FROM groups WHERE group_id = ?", (ticket.group_id,)
    ).fetchone()
    if row is not None:
        if row == (prompt_id, ticket.start_version, "running"):
            return
        raise admitted_twice(
            ticket.group_id, prompt_id, f"group {ticket.group_id} is {row[2]}, with prompt {row[0]}"
        )
    other = connection.execute(
        "SELECT group_id, state FROM groups WHERE prompt_id = ? AND state IN ('running', 'ready', 'taken')",
        (prompt_id,),
    ).fetchone()
    if other is not None:
        raise admitted_twice(
            ticket.group_id, prompt_id, f"group {other[0]} has this prompt and is {other[1]}"
        )
    connection.execute(
        "INSERT INTO groups (group_id, prompt_id, start_version, state, admitted_s) VALUES (?, ?, ?, "
        "'running', ?)",
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
    if _state(connection, group_id, "a segment") != "running" or _has_ended(
        connection, group_id, sample_index
    ):
        return
    _lose(connection, "group_id = ? AND sample_index = ? AND attempt < ?", group_id, sample_index, attempt)
    connection.execute(
        "INSERT OR REPLACE INTO segments (group_id, sample_index, attempt, turn, num_tokens, blob) VALUES "
        "(?, ?, ?, ?, ?, ?)",
        (
            group_id,
            sample_index,
            attempt,
            turn,
            len(partial.token_ids),
            encode_partial(group_id, sample_index, partial),
        ),
    )


def rollout_finished(connection: sqlite3.Connection, group_id: GroupId, rollout: Rollout) -> None:
    """The rollout's tokens, all its branches; its segments go."""
    if _state(connection, group_id, "a rollout") != "running":
        return
    if [branch.branch for branch in rollout] != list(range(len(rollout))) or len(
        {branch.sample_index for branch in rollout}
    ) != 1:
        raise not_one_rollout(group_id, [(branch.sample_index, branch.branch) for branch in rollout])
    sample_index = rollout[0].sample_index
    if _has_ended(connection, group_id, sample_index):
        raise told_twice(group_id, sample_index)
    connection.executemany(
        "INSERT INTO trajectories (group_id, sample_index, branch, reward, num_tokens, num_sampled, "
        "oldest_version, blob)"
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
    if _state(connection, group_id, "a rollout") != "running":
        return
    if _has_ended(connection, group_id, sample_index):
        raise told_twice(group_id, sample_index)
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
    found = _state(connection, group_id, "the end")
    if found != "running" and (found, state) != ("ready", "handed_back"):
        raise cannot_end(group_id, state, found)
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
        taken = [
            row[0]
            for row in connection.execute(
                "SELECT group_id FROM batch_groups WHERE version = ? ORDER BY position", (version,)
            )
        ]
        if (taken, *row) != (group_ids, batch.min_version, int(batch.mask_older)):
            found = f"it was taken with groups {taken}, min_version {row[0]}, mask_older {bool(row[1])}; this one has groups {group_ids}, "
            raise batch_differs(
                version, f"{found}min_version {batch.min_version}, mask_older {batch.mask_older}"
            )
        return "replayed"
    newest = connection.execute("SELECT max(version) FROM batches").fetchone()[0]
    if newest is not None and version != newest + 1:
        raise batch_differs(version, f"the newest batch is {newest}")
    if not group_ids:
        raise batch_differs(version, "it has no groups")
    _refuse_unready(connection, batch)
    connection.execute(
        "INSERT INTO batches (version, min_version, mask_older, num_groups, taken_s) VALUES (?, ?, ?, ?, ?)",
        (version, batch.min_version, int(batch.mask_older), len(group_ids), now_s),
    )
    connection.executemany(
        "INSERT INTO batch_groups VALUES (?, ?, ?)",
        [(version, place, found) for place, found in enumerate(group_ids)],
    )
    connection.executemany(
        "UPDATE groups SET state = 'taken' WHERE group_id = ?", [(group_id,) for group_id in group_ids]
    )
    return "taken"


def trained(
    connection: sqlite3.Connection,
    version: int,
    metrics: Mapping[str, Any],
    weights_digest: str | None,
    now_s: float,
) -> None:
    """The batch has become a step; the newest telling counts, for a resumed run trains it again."""
    loss = metrics.get("policy/loss")
    changed = connection.execute(
        "UPDATE batches SET trained_s = ?, loss = ?, weights_digest = ? WHERE version = ?",
        (now_s, None if loss is None else float(loss), weights_digest, version),
    ).rowcount
    if not changed:
        raise batch_unknown(version, "a step")


def published(connection: sqlite3.Connection, version: int, digest: str, now_s: float) -> None:
    """Every engine serves it; told again after a resume."""
    connection.execute("INSERT OR REPLACE INTO publishes VALUES (?, ?, ?)", (version, digest, now_s))


def checkpointed(
    connection: sqlite3.Connection, version: int, path: str, beside: Sequence[int], now_s: float
) -> None:
    """It is whole on disk, and of the others those in `beside` are still there."""
    connection.execute(
        "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, 'whole')", (version, text(path), now_s)
    )
    kept = json.dumps([version, *beside])
    connection.execute(
        "UPDATE checkpoints SET state = 'removed' WHERE version NOT IN (SELECT value FROM json_each(?))",
        (kept,),
    )


def event(
    connection: sqlite3.Connection, what: str, detail: Mapping[str, Any], keep: int | None, now_s: float
) -> None:
    """Something worth telling later: a restart, a resume, what a watchdog saw. `keep`: the newest so many of
    that name stay.
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


def _refuse_unready(connection: sqlite3.Connection, batch: Batch) -> None:
    wrong = []
    for group in batch.groups:
        row = connection.execute(
            "SELECT state, (SELECT version FROM batch_groups b WHERE b.group_id = g.group_id),"
            " (SELECT count(*) FROM trajectories t WHERE t.group_id = g.group_id),"
            " (SELECT total(num_tokens) FROM trajectories t WHERE t.group_id = g.group_id) FROM groups g "
            "WHERE group_id = ?",
            (group.group_id,),
        ).fetchone()
        if row is None:
            wrong.append(f"group {group.group_id} was never admitted")
            continue
        state, version, *written = row
        given = [len(group.trajectories), sum(len(trajectory.token_ids) for trajectory in group.trajectories)]
        if version is not None:
            wrong.append(f"group {group.group_id} is in batch {version}")
        elif state != "ready":
            wrong.append(f"group {group.group_id} is {state}")
        elif written != given:
            wrong.append(
                f"group {group.group_id} has {given[0]} trajectories of {given[1]} tokens, {written[0]} of "
                f"{written[1]:.0f} were told"
            )
    if len({group.group_id for group in batch.groups}) < len(batch.groups):
        wrong.append("a group is in it twice")
    if wrong:
        raise not_consumable(batch.version, wrong)


def _state(connection: sqlite3.Connection, group_id: GroupId, what: str) -> str:
    row = connection.execute("SELECT state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
    if row is None:
        raise group_unknown(group_id, what)
    return str(row[0])


def _has_ended(connection: sqlite3.Connection, group_id: GroupId, sample_index: int) -> bool:
    row = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM trajectories WHERE group_id = ?1 AND sample_index = ?2)"
        " OR EXISTS (SELECT 1 FROM failures WHERE group_id = ?1 AND sample_index = ?2)",
        (group_id, sample_index),
    ).fetchone()
    return bool(row[0])
