"""Queries for people: the history of a group, the batch of a step, wasted tokens, events of the run.

Everything here blocks, works beside a run that writes, and raises JournalError.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.journal.read import failures_of, partials_of, prompt_of, reading, rollouts_of
from asyncrl.messages.records import PartialCompletion, Prompt, Rollout

MAX_EVENTS = 1000
_LINE = (
    "group_id, prompt_id, state, num_rollouts, num_failed, num_sampled, oldest_version,"
    " iif(num_rollouts, reward_sum / num_rollouts, NULL), lost_tokens"
)


@dataclass(frozen=True, slots=True)
class GroupLine:
    """A group in one line. `num_sampled` tokens of its `num_rollouts` finished rollouts; `lost_tokens` of
    attempts that came to nothing.
    """

    group_id: int
    prompt_id: str
    state: str
    num_rollouts: int
    num_failed: int
    num_sampled: int
    oldest_version: int | None
    reward_mean: float | None
    lost_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupStory:
    """A group's whole life. After compaction `prompt` is None, and rollouts and failures are gone.

    By sample_index: `rollouts` that are finished, `failures` (attempts, why), and `partials` (attempt, turn,
    all of the completion so far). `siblings`: other groups of the same prompt, which was handed back.
    """

    line: GroupLine
    prompt: Prompt | None
    rollouts: Mapping[int, Rollout]
    failures: Mapping[int, tuple[int, str]]
    partials: Mapping[int, tuple[int, int, PartialCompletion]]
    siblings: tuple[int, ...]
    start_version: int
    reason: str
    admitted_s: float
    ended_s: float | None
    batch: int | None


@dataclass(frozen=True, slots=True)
class BatchStory:
    """The batch of one step. `tokens_by_version` counts sampled tokens; None once they are deleted.
    `published_s`: its version served.
    """

    version: int
    groups: tuple[GroupLine, ...]
    tokens_by_version: Mapping[int, int] | None
    mask_older: bool
    min_version: int
    taken_s: float
    trained_s: float | None
    loss: float | None
    published_s: float | None

    @property
    def masked_tokens(self) -> int | None:
        """Tokens too old to carry loss."""
        if self.tokens_by_version is None:
            return None
        return sum(count for version, count in self.tokens_by_version.items() if version < self.min_version)


@dataclass(frozen=True, slots=True)
class JournalTotals:
    """A run in numbers. `groups` and `sampled_tokens` by state; `lost_tokens` are those of failed, retried
    and dropped attempts; `checkpoints`: (version, path, whole or removed); tokens of batches before
    `compacted_before` are deleted.
    """

    run_id: str
    groups: Mapping[str, int]
    sampled_tokens: Mapping[str, int]
    lost_tokens: int
    failed_rollouts: int
    checkpoints: tuple[tuple[int, str, str], ...]
    num_batches: int
    num_trained: int
    newest_published: int | None
    compacted_before: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the run itself."""

    at_s: float
    what: str
    detail: Mapping[str, Any]


def group_story(path: Path, group_id: int) -> GroupStory | None:
    """All about a group; None if it was never admitted."""
    with reading(path) as connection:
        row = connection.execute(
            "SELECT messages, num_handed_back, start_version, reason, admitted_s, ended_s, b.version,"
            f" {_LINE} FROM groups g LEFT JOIN batch_groups b USING (group_id) WHERE g.group_id = ?",
            (group_id,),
        ).fetchone()
        if row is None:
            return None
        line, messages = GroupLine(*row[7:]), row[0]
        siblings = connection.execute(
            "SELECT group_id FROM groups WHERE prompt_id = ? AND group_id <> ?", (line.prompt_id, group_id)
        ).fetchall()
        return GroupStory(
            line,
            None if messages is None else prompt_of(line.prompt_id, row[1], messages),
            rollouts_of(connection, group_id, path),
            failures_of(connection, group_id),
            partials_of(connection, group_id, path),
            tuple(sibling for (sibling,) in siblings),
            *row[2:7],
        )


def batch_story(path: Path, version: int) -> BatchStory | None:
    """All about the batch of a step; None if it was never taken."""
    with reading(path) as connection:
        row = connection.execute(
            "SELECT mask_older, min_version, taken_s, trained_s, loss,"
            " (SELECT served_s FROM publishes p WHERE p.version = b.version + 1)"
            " FROM batches b WHERE version = ?",
            (version,),
        ).fetchone()
        if row is None:
            return None
        found = connection.execute(
            f"SELECT messages IS NULL, {_LINE}"
            " FROM batch_groups b JOIN groups g USING (group_id) WHERE b.version = ? ORDER BY b.position",
            (version,),
        ).fetchall()
        lines = tuple(GroupLine(*line) for _, *line in found)
        counts = Counter[int]()
        for line in lines:
            for rollout in rollouts_of(connection, line.group_id, path).values():
                for span in (span for branch in rollout for span in branch.version_spans):
                    counts[span.version] += span.end - span.start
        is_deleted = any(line[0] for line in found)
        tokens = None if is_deleted else dict(sorted(counts.items()))
        return BatchStory(version, lines, tokens, bool(row[0]), *row[1:])


def totals(path: Path) -> JournalTotals:
    """The run in numbers."""
    with reading(path) as connection:
        states = connection.execute(
            "SELECT state, count(*), sum(num_sampled), sum(lost_tokens), sum(num_failed) FROM groups"
            " GROUP BY state"
        ).fetchall()
        numbers = connection.execute(
            "SELECT (SELECT count(*) FROM batches), (SELECT count(trained_s) FROM batches),"
            " (SELECT max(version) FROM publishes), (SELECT coalesce(max(version) + 1, 0)"
            " FROM batch_groups JOIN groups USING (group_id) WHERE messages IS NULL)"
        ).fetchone()
        checkpoints = connection.execute("SELECT version, path, state FROM checkpoints ORDER BY version")
        return JournalTotals(
            connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()[0],
            {state: count for state, count, *_ in states},
            {state: sampled for state, _, sampled, *_ in states},
            sum(row[3] for row in states),
            sum(row[4] for row in states),
            tuple(checkpoints.fetchall()),
            *numbers,
        )


def events(path: Path, *, newest: int = MAX_EVENTS) -> tuple[Event, ...]:
    """Restarts, resumes and the like, in the order in which they happened; only the newest ones, this
    many.
    """
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT s, what, detail FROM events ORDER BY id DESC LIMIT ?", (newest,)
        ).fetchall()
        return tuple(Event(at_s, what, json.loads(detail)) for at_s, what, detail in reversed(rows))
