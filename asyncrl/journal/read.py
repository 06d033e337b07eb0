"""All read-only queries of a journal. Everything here blocks."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from asyncrl.base.errors import JournalError
from asyncrl.journal.schema import (
    COSTS,
    DISK_ERRORS,
    EPOCH,
    MOVE_ASIDE,
    REWARD,
    WITHOUT_IT,
    cannot_use,
    connect,
    damaged,
    decode_partial,
    decode_trajectory,
)
from asyncrl.messages.records import (
    Batch,
    Completion,
    Group,
    GroupId,
    Prompt,
    Rollout,
    Ticket,
    UnfinishedGroup,
    task_of,
)

Snapshot: TypeAlias = sqlite3.Connection
"""What reading() yields."""
MAX_EVENTS = 1000
BEGINNING: dict[str, Any] = {
    "version": 0,
    "order": None,
    "num_drawn": 0,
    "out": {},
    "next_group_id": 0,
    "part_groups": 0,
    "epochs": (),
}
"""State before the journal's first entry, from a checkpoint or of a new run."""
_BY_TASK = ("rollout/failed", "rollout/filtered")
_COUNTED = {
    "tokens/generated": "total(num_sampled + lost_tokens)",
    "rollout/failed": "total(num_failed)",
    "rollout/failed_groups": "total(state = 'failed')",
    "rollout/filtered": "total(state = 'filtered')",
    "rollout/filtered_tokens": "total(iif(state = 'filtered', num_sampled, 0))",
    "rollout/dropped": "total(state = 'requeued' AND reason IN ('dropped', 'all_masked'))",
    # No requeued value: the prompt does not come back.
    "rollout/given_up": "total(state IN ('requeued', 'failed') AND requeued IS NULL)",
}
"""Run-wide counters, by the names of observe/metrics.py."""


def is_counted(name: str) -> bool:
    """Return whether rows of the journal give this counter, which may be of a task."""
    return name == "reward/posted" or "/".join(name.split("/")[:2]) in _COUNTED


@dataclass(frozen=True, slots=True, eq=False)
class ResumeState:
    """State of a run that resumes from weights `checkpoint_version`.

    Batches checkpoint_version .. next_version - 1 are trained again unchanged. `ready`
    and `running` groups continue. `requeued` prompts (id -> num_requeued) are repeated,
    those in `returning` only after the version at which their groups failed.
    `num_drawn`: prompts ever admitted.
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
    part_groups: int
    """Of the next batch."""
    order: Mapping[str, Any] | None
    """Settings of the prompt order, if written."""
    counted: Mapping[str, float]
    """Initial counters."""
    epochs: Sequence[tuple[str, int, str]] = ()
    """(task, number, prompts) of each epoch by difficulty."""
    observed: Sequence[tuple[str, float, int]] = ()
    """(prompt_id, mean reward, start version) of finished groups."""

    def load_batch(self, version: int) -> Batch:
        """Load a batch. Blocks. Raises JournalError."""
        with reading(self.path) as connection:
            return read_batch(connection, version)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only snapshot. Raises JournalError for damage."""
    try:
        with closing(connect(path, is_read_only=True)) as connection:
            connection.create_function("local_time", 1, _local_time)
            # All queries of the block see one state, although the writer commits
            # during it. A resume would otherwise see a group that is ready in one query
            # and taken in the next.
            connection.execute("BEGIN")
            yield connection
    except DISK_ERRORS as error:
        raise cannot_use(path, error) from error
    except (ValueError, TypeError) as error:  # a flipped bit changed a value's type
        raise damaged(path, str(error)) from error


def read_resume(path: Path, checkpoint_version: int) -> ResumeState:
    """Return everything that a resume needs except its batches, which are loaded one by
    one: together they may not fit into memory. Raises JournalError.
    """
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT key, value FROM meta WHERE key IN ('began_at', 'order')"
        )
        notes = {key: json.loads(value) for key, value in rows}
        began_at = notes.get("began_at", BEGINNING)
        next_version = _next_version(
            connection, checkpoint_version, began_at["version"]
        )
        # Prompts, not groups: a requeued prompt has several groups, and was drawn once
        # from the data.
        prompt_ids = {
            row[0]
            for row in connection.execute("SELECT DISTINCT prompt_id FROM groups")
        }
        (num_issued,) = connection.execute(
            "SELECT coalesce(max(group_id) + 1, 0) FROM groups"
        ).fetchone()
        newest = connection.execute(
            "SELECT next_part_groups FROM batches ORDER BY version DESC LIMIT 1"
        ).fetchone()
        # `began_at` is written when the old journal was moved away: then the
        # checkpoint's position in the data is the beginning of this journal.
        epochs = (*map(tuple, began_at["epochs"]), *_epochs(connection))
        requeued = _requeued(connection)
        ready, running = _alive(connection)
        return ResumeState(
            path=path,
            checkpoint_version=checkpoint_version,
            next_version=next_version,
            ready=ready,
            running=running,
            # Prompts that were outstanding in the checkpoint return, unless this
            # journal has admitted them since. The journal's own entries are newer.
            requeued={
                name: count
                for name, count in began_at["out"].items()
                if name not in prompt_ids
            }
            | {name: count for name, (count, _) in requeued.items()},
            # Engines serve next_version after a resume, so that prompts which failed at
            # an earlier version need not wait.
            returning=frozenset(
                name for name, (_, at) in requeued.items() if at == next_version
            ),
            # Prompts that the checkpoint counts as outstanding were drawn before this
            # journal began.
            num_drawn=began_at["num_drawn"]
            + len(prompt_ids.difference(began_at["out"])),
            next_group_id=GroupId(max(began_at["next_group_id"], num_issued)),
            part_groups=began_at["part_groups"] if newest is None else newest[0],
            order=notes.get("order", began_at["order"]),
            counted=_counted(connection),
            epochs=epochs,
            observed=_observed(connection) if epochs else (),
        )


def read_note(path: Path, key: str) -> Any:
    """Return the value of a note, or None. Raises JournalError."""
    with reading(path) as connection:
        return _note(connection, key)


def _note(connection: sqlite3.Connection, key: str) -> Any:
    query = "SELECT value FROM meta WHERE key = ?"
    row = connection.execute(query, (key,)).fetchone()
    return None if row is None else json.loads(row[0])


def read_batch(connection: sqlite3.Connection, version: int) -> Batch:
    """Return a batch. Raises TypeError if it is missing, JournalError if its tokens
    were deleted.
    """
    row = connection.execute(
        "SELECT min_version, mask_older, part_groups, next_part_groups FROM batches WHERE version = ?",
        (version,),
    ).fetchone()
    rows = connection.execute(
        "SELECT g.group_id, prompt_id, num_requeued, messages FROM batch_groups b"
        " JOIN groups g USING (group_id) WHERE b.version = ? ORDER BY b.position",
        (version,),
    ).fetchall()
    # compact() sets the messages to NULL when it deletes the tokens of a group.
    if any(messages is None for *_, messages in rows):
        raise _deleted(version)
    return Batch(
        version,
        tuple(_group(connection, *row) for row in rows),
        row[0],
        mask_older=bool(row[1]),
        part_groups=row[2],
        next_part_groups=row[3],
    )


def rollouts_of(connection: Snapshot, group_id: int) -> dict[int, Rollout]:
    query = (
        "SELECT sample_index, branch, blob FROM trajectories WHERE group_id = ?"
        " ORDER BY sample_index, branch"
    )
    found: dict[int, Rollout] = {}
    for index, branch, blob in connection.execute(query, (group_id,)):
        found[index] = (
            *found.get(index, ()),
            decode_trajectory(blob, group_id, index, branch),
        )
    return found


def failures_of(connection: Snapshot, group_id: int) -> dict[int, tuple[int, str]]:
    query = "SELECT sample_index, attempts, why FROM failures WHERE group_id = ? ORDER BY sample_index"
    return {
        index: (attempts, why)
        for index, attempts, why in connection.execute(query, (group_id,))
    }


def partials_of(
    connection: Snapshot, group_id: int
) -> dict[int, tuple[int, Completion]]:
    query = "SELECT sample_index, attempt, blob FROM segments WHERE group_id = ? ORDER BY sample_index"
    return {
        index: (attempt, decode_partial(blob, group_id, index))
        for index, attempt, blob in connection.execute(query, (group_id,))
    }


def costs_of(connection: sqlite3.Connection) -> dict[str, float]:
    return _note(connection, COSTS) or {}


def _counted(connection: sqlite3.Connection) -> dict[str, float]:
    (num_partial,) = connection.execute(
        "SELECT total(num_tokens) FROM segments"
    ).fetchone()
    # Tokens of unfinished completions are in no group's row yet.
    counted = Counter[str](
        dict.fromkeys(_COUNTED, 0) | {"tokens/generated": int(num_partial)}
    )
    num_noted, num_posted = connection.execute(
        "SELECT count(*), total(json_extract(value, '$.why') IS NULL) FROM meta WHERE key GLOB ?",
        (f"{REWARD}*",),
    ).fetchone()
    if num_noted:
        counted["reward/posted"] = int(num_posted)
    connection.create_function("task_of", 1, task_of, deterministic=True)
    query = f"SELECT task_of(prompt_id), {', '.join(_COUNTED.values())} FROM groups GROUP BY 1"
    for task, *counts in connection.execute(query):
        for name, num in zip(_COUNTED, map(int, counts), strict=True):
            counted[name] += num
            if task and num and name in _BY_TASK:
                counted[f"{name}/{task}"] = num
    return {**counted, **costs_of(connection)}


def _epochs(connection: sqlite3.Connection) -> tuple[tuple[str, int, str], ...]:
    rows = connection.execute(
        "SELECT key, value FROM meta WHERE key GLOB ?", (f"{EPOCH}*",)
    )
    keys = (
        (key.removeprefix(EPOCH).partition("/"), json.loads(value))
        for key, value in rows
    )
    return tuple(sorted((task, int(number), what) for (number, _, task), what in keys))


def _observed(connection: sqlite3.Connection) -> tuple[tuple[str, float, int], ...]:
    return tuple(
        connection.execute(
            "SELECT prompt_id, reward_sum / num_rollouts, start_version FROM groups"
            " WHERE state IN ('ready', 'taken', 'filtered') AND num_rollouts ORDER BY group_id"
        )
    )


def _next_version(
    connection: sqlite3.Connection, checkpoint_version: int, began_at: int
) -> int:
    """Return the version after the newest batch. Raises for a batch that cannot be
    trained again.

    Example: a checkpoint of version 40, batches 0 to 43 in the journal. The result is
    44; batches 40 to 43 are trained again, and their tokens must still be stored.
    """
    if checkpoint_version < began_at:
        raise JournalError(
            f"the journal begins at version {began_at}, after the newest checkpoint, {checkpoint_version}",
            rule="a resume needs a checkpoint and every batch since",
            way_out=MOVE_ASIDE,
        )
    newest, num_taken, num_given, num_found = connection.execute(
        "SELECT (SELECT max(version) FROM batches), (SELECT count(*) FROM groups WHERE state = 'taken'),"
        " (SELECT coalesce(sum(num_groups), 0) FROM batches), (SELECT count(*) FROM batch_groups)"
    ).fetchone()
    if not num_taken == num_given == num_found:  # page checks do not detect this
        raise ValueError(
            f"{num_taken} groups are taken, batches count {num_given} and list {num_found}"
        )
    if newest is None:
        return checkpoint_version
    # A checkpoint of version v contains batches 0 to v - 1, and each was journaled
    # before it was trained.
    if newest + 1 < checkpoint_version:
        raise ValueError(
            f"the newest batch is {newest}, but a checkpoint has version {checkpoint_version}"
        )
    (first_deleted,) = connection.execute(
        "SELECT min(version) FROM batch_groups JOIN groups USING (group_id)"
        " WHERE version >= ? AND messages IS NULL",
        (checkpoint_version,),
    ).fetchone()
    if first_deleted is not None:
        raise _deleted(first_deleted)
    return int(newest) + 1


def _deleted(version: int) -> JournalError:
    return JournalError(
        f"the tokens of batch {version} were deleted",
        rule="journal.keep=checkpoint keeps tokens back to the oldest of the kept checkpoints",
        way_out=f"restore a newer checkpoint from a copy; or {WITHOUT_IT}",
    )


def _alive(
    connection: sqlite3.Connection,
) -> tuple[tuple[tuple[Ticket, Group], ...], tuple[UnfinishedGroup, ...]]:
    ready, running = list[tuple[Ticket, Group]](), list[UnfinishedGroup]()
    for state, start_version, group_id, *prompt in connection.execute(
        "SELECT state, start_version, group_id, prompt_id, num_requeued, messages FROM groups"
        " WHERE state IN ('running', 'ready') ORDER BY group_id"
    ).fetchall():
        ticket = Ticket(GroupId(group_id), start_version)
        if state == "ready":
            ready.append((ticket, _group(connection, group_id, *prompt)))
            continue
        running.append(
            UnfinishedGroup(
                ticket,
                _prompt(*prompt),
                rollouts_of(connection, group_id),
                failures_of(connection, group_id),
                partials_of(connection, group_id),
            )
        )
    return tuple(ready), tuple(running)


def _group(
    connection: sqlite3.Connection, group_id: int, *prompt: *tuple[str, int, str]
) -> Group:
    rollouts = rollouts_of(connection, group_id)
    if not rollouts:
        raise ValueError(f"group {group_id} is ready or taken but has no trajectory")
    branches = tuple(branch for rollout in rollouts.values() for branch in rollout)
    return Group(GroupId(group_id), _prompt(*prompt), branches)


def _prompt(prompt_id: str, num_requeued: int, messages: str) -> Prompt:
    return Prompt(prompt_id, tuple(json.loads(messages)), num_requeued=num_requeued)


def _requeued(connection: sqlite3.Connection) -> dict[str, tuple[int, int | None]]:
    """Return (num_requeued, version of the failure if any) by prompt id."""
    # Only the newest group of a prompt decides. An older one that was requeued has been
    # admitted again since.
    rows = connection.execute(
        "SELECT h.prompt_id, h.requeued, CASE h.state WHEN 'failed' THEN h.start_version END FROM groups h"
        " WHERE h.requeued IS NOT NULL AND NOT EXISTS"
        " (SELECT 1 FROM groups later WHERE later.prompt_id = h.prompt_id AND later.group_id > h.group_id)"
    )
    return {prompt_id: (requeued, failed_at) for prompt_id, requeued, failed_at in rows}


def has_groups(connection: Snapshot) -> bool:
    """Return whether a group was ever admitted."""
    return connection.execute("SELECT 1 FROM groups LIMIT 1").fetchone() is not None


def count_trained(connection: Snapshot) -> int:
    # A journal that was begun after a checkpoint has no batches before that version.
    query = "SELECT count(trained_s) + coalesce(min(version), 0) FROM batches"
    (num,) = connection.execute(query).fetchone()
    return int(num)


# ---- for exports


class FinishedGroup(NamedTuple):
    """`messages`: of the prompt; None: the tokens are deleted. `min_version`: older
    tokens had no loss.
    """

    group_id: GroupId
    prompt_id: str
    messages: list[dict[str, str]] | None
    min_version: int
    rollouts: Mapping[int, Rollout]


def finished_groups(path: Path) -> Iterator[FinishedGroup]:
    """Yield the groups that have all their rewards. Raises JournalError."""
    query = (
        "SELECT group_id, prompt_id, coalesce(messages, 'null'),"
        " coalesce(iif(mask_older, min_version, 0), 0)"
        " FROM groups LEFT JOIN batch_groups USING (group_id) LEFT JOIN batches USING (version)"
        " WHERE state IN ('ready', 'taken', 'filtered') ORDER BY 1"
    )
    with reading(path) as connection:
        for group_id, prompt_id, messages, min_version in connection.execute(query):
            rollouts = rollouts_of(connection, group_id)
            prompt = json.loads(messages)
            yield FinishedGroup(
                GroupId(group_id), prompt_id, prompt, min_version, rollouts
            )


# ---- for reports, and as plain values for `asyncrl inspect --json`


def failure_counts(connection: Snapshot) -> list[tuple[str, int]]:
    """Return the reasons of failed rollouts, and how many have each."""
    query = "SELECT why, count(*) FROM failures GROUP BY why"
    return connection.execute(query).fetchall()


def dated_events(connection: Snapshot) -> list[tuple[int, str, dict[str, Any]]]:
    """Return the events, each after the number of batches that were taken before it."""
    query = (
        "SELECT (SELECT coalesce(max(version) + 1, 0) FROM batches WHERE taken_s <= s), what, detail"
        " FROM events ORDER BY id"
    )
    rows = connection.execute(query)
    return [(num_taken, what, json.loads(detail)) for num_taken, what, detail in rows]


_GROUP = (
    "group_id, prompt_id, state, num_rollouts, num_failed, num_sampled, oldest_version,"
    " iif(num_rollouts, reward_sum / num_rollouts, NULL) AS reward_mean, lost_tokens AS retried_tokens"
)


def run_story(connection: sqlite3.Connection) -> dict[str, Any]:
    (numbers,) = _rows(
        connection,
        "SELECT (SELECT value FROM meta WHERE key = 'run_id') AS run_id,"
        " (SELECT count(*) FROM batches) AS num_batches,"
        " (SELECT count(trained_s) FROM batches) AS num_trained,"
        " (SELECT max(version) FROM publishes) AS newest_published,"
        " coalesce(sum(num_failed), 0) AS failed_rollouts, coalesce(sum(lost_tokens), 0) AS retried,"
        " coalesce(sum(num_sampled + lost_tokens), 0) AS sampled_tokens FROM groups",
    )
    wasted = {"retried": numbers.pop("retried")} | dict.fromkeys(
        ("failed", "filtered", "requeued"), 0
    )
    groups = dict[str, int]()
    for state, num, num_sampled in connection.execute(
        "SELECT state, count(*), sum(num_sampled) FROM groups GROUP BY state"
    ):
        groups[state] = num
        if state in wasted:
            wasted[state] = num_sampled
    events = _rows(
        connection,
        "SELECT local_time(s) AS at, what, detail FROM events ORDER BY id DESC LIMIT ?",
        MAX_EVENTS,
    )
    return {
        **numbers,
        "groups": groups,
        "wasted_tokens": wasted,
        "events": [
            event | {"detail": json.loads(event["detail"])}
            for event in reversed(events)
        ],
    }


def batch_story(connection: sqlite3.Connection, version: int) -> dict[str, Any] | None:
    """Return the batch of one step, or None."""
    found = _rows(
        connection,
        "SELECT version, min_version, local_time(taken_s) AS taken_at, local_time(trained_s) AS trained_at,"
        " (SELECT local_time(served_s) FROM publishes p WHERE p.version = b.version + 1) AS published_at,"
        " loss FROM batches b WHERE version = ?",
        version,
    )
    query = f"SELECT {_GROUP} FROM batch_groups JOIN groups USING (group_id) WHERE version = ?"
    return (
        {**found[0], "groups": _rows(connection, f"{query} ORDER BY position", version)}
        if found
        else None
    )


def group_story(connection: sqlite3.Connection, group_id: int) -> dict[str, Any] | None:
    """Return a group without its rollouts, or None. `same_prompt`: other groups of its
    prompt.
    """
    found = _rows(
        connection,
        f"SELECT {_GROUP}, reason, start_version, local_time(admitted_s) AS admitted_at,"
        " local_time(ended_s) AS ended_at, version AS batch, local_time(trained_s) AS trained_at,"
        " (SELECT json_group_array(o.group_id) FROM groups o"
        " WHERE o.prompt_id = g.prompt_id AND o.group_id <> g.group_id) AS same_prompt,"
        " messages IS NOT NULL AS has_tokens, coalesce(messages, '[]') AS messages"
        " FROM groups g LEFT JOIN batch_groups USING (group_id) LEFT JOIN batches USING (version)"
        " WHERE group_id = ?",
        group_id,
    )
    if not found:
        return None
    (story,) = found
    plain = {name: json.loads(story[name]) for name in ("same_prompt", "messages")}
    return story | plain | {"has_tokens": bool(story["has_tokens"])}


def _rows(
    connection: sqlite3.Connection, query: str, *values: int
) -> list[dict[str, Any]]:
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    return [dict(row) for row in cursor.execute(query, values)]


def _local_time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return (
        datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")
    )
