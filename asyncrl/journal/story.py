"""What a person asks of a journal: a group's story, a step's batch, what was wasted, what went wrong.

Everything here blocks, works beside a run that writes, and raises JournalError.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.journal.read import failures_of, partials_of, reading, rollouts_of
from asyncrl.journal.tokens import decode_prompt, decode_trajectory
from asyncrl.messages.records import GroupId, PartialCompletion, Prompt, Rollout, Ticket

MAX_EVENTS = 1000
_GROUP_NUMBERS = (
    " coalesce(g.num_rollouts, (SELECT count(*) FROM trajectories t WHERE t.group_id = g.group_id AND branch "
    "= 0)),"
    " coalesce(g.num_failed, (SELECT count(*) FROM failures f WHERE f.group_id = g.group_id)),"
    " coalesce(g.num_sampled, (SELECT total(num_sampled) FROM trajectories t WHERE t.group_id = g.group_id)),"
    " coalesce(g.oldest_version, (SELECT min(oldest_version) FROM trajectories t WHERE t.group_id = "
    "g.group_id)),"
    " coalesce(g.reward_mean, (SELECT avg(reward) FROM trajectories t WHERE t.group_id = g.group_id AND "
    "branch = 0)), g.lost_tokens"
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

    Rollouts, failures and partials by sample_index, as in RunningRecord.
    """

    line: GroupLine
    start_version: int
    reason: str
    admitted_s: float
    ended_s: float | None
    batch: int | None
    prompt: Prompt | None
    rollouts: Mapping[int, Rollout]
    failures: Mapping[int, tuple[int, str]]
    partials: Mapping[int, tuple[int, int, PartialCompletion]]
    siblings: tuple[int, ...]
    """Other groups of the same prompt: it was handed back and admitted again."""


@dataclass(frozen=True, slots=True)
class BatchStory:
    """The batch of one step. `tokens_by_version` counts sampled tokens; None once they are deleted.
    `published_s`: its version served.
    """

    version: int
    min_version: int
    mask_older: bool
    taken_s: float
    trained_s: float | None
    loss: float | None
    published_s: float | None
    groups: tuple[GroupLine, ...]
    tokens_by_version: Mapping[int, int] | None

    @property
    def masked_tokens(self) -> int | None:
        """Tokens too old to carry loss."""
        if self.tokens_by_version is None:
            return None
        return sum(count for version, count in self.tokens_by_version.items() if version < self.min_version)


@dataclass(frozen=True, slots=True)
class Totals:
    """A run in numbers. `groups` and `sampled_tokens` by state; `lost_tokens` are those of failed, retried
    and dropped attempts.
    """

    run_id: str
    groups: Mapping[str, int]
    sampled_tokens: Mapping[str, int]
    lost_tokens: int
    failed_rollouts: int
    num_batches: int
    num_trained: int
    newest_published: int | None
    checkpoints: tuple[tuple[int, str, str], ...]
    """(version, path, whole or removed)."""
    compacted_before: int
    """Tokens of batches before this one are deleted."""


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
            "SELECT start_version, reason, admitted_s, ended_s, p.blob, prompt_id, state,"
            f" (SELECT version FROM batch_groups b WHERE b.group_id = g.group_id),{_GROUP_NUMBERS}"
            " FROM groups g LEFT JOIN prompts p USING (group_id) WHERE group_id = ?",
            (group_id,),
        ).fetchone()
        if row is None:
            return None
        start_version, reason, admitted_s, ended_s, prompt, prompt_id, state, batch, *numbers = row
        ticket = Ticket(GroupId(group_id), start_version)

        siblings = connection.execute(
            "SELECT group_id FROM groups WHERE prompt_id = ? AND group_id <> ?", (prompt_id, group_id)
        ).fetchall()
        return GroupStory(
            _line((group_id, prompt_id, state, *numbers)),
            start_version,
            reason,
            admitted_s,
            ended_s,
            batch,
            None if prompt is None else decode_prompt(prompt, ticket, prompt_id, path)[0],
            rollouts_of(connection, group_id, path),
            failures_of(connection, group_id),
            partials_of(connection, group_id, path),
            tuple(sibling for (sibling,) in siblings),
        )


def batch_story(path: Path, version: int) -> BatchStory | None:
    """All about the batch of a step; None if it was never taken."""
    with reading(path) as connection:
        row = connection.execute(
            "SELECT min_version, mask_older, taken_s, trained_s, loss,"
            " (SELECT served_s FROM publishes p WHERE p.version = b.version + 1)"
            " FROM batches b WHERE version = ?",
            (version,),
        ).fetchone()
        if row is None:
            return None
        found = connection.execute(
            f"SELECT g.group_id, g.prompt_id, g.state,{_GROUP_NUMBERS}, g.num_rollouts IS NOT NULL"
            " FROM batch_groups b JOIN groups g USING (group_id) WHERE b.version = ? ORDER BY b.position",
            (version,),
        ).fetchall()
        lines = tuple(_line(line[:-1]) for line in found)
        counts: Counter[int] | None = None
        if not any(line[-1] for line in found):
            counts = Counter()
            for group_id, index, branch, blob in connection.execute(
                "SELECT t.group_id, t.sample_index, t.branch, t.blob"
                " FROM batch_groups b JOIN trajectories t USING (group_id) WHERE b.version = ?",
                (version,),
            ):
                for span in decode_trajectory(blob, group_id, index, branch, path).version_spans:
                    counts[span.version] += span.end - span.start
        min_version, mask_older, taken_s, trained_s, loss, published_s = row
        tokens_by_version = None if counts is None else dict(sorted(counts.items()))
        times = (taken_s, trained_s, loss, published_s)
        return BatchStory(version, min_version, bool(mask_older), *times, lines, tokens_by_version)


def totals(path: Path) -> Totals:
    """The run in numbers."""
    with reading(path) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        states = connection.execute(
            "SELECT state, count(*), total(num_sampled), total(lost_tokens) FROM groups GROUP BY state"
        ).fetchall()
        live = dict(
            connection.execute(
                "SELECT g.state, total(t.num_sampled) FROM trajectories t JOIN groups g USING (group_id) "
                "GROUP BY g.state"
            ).fetchall()
        )
        num_batches, num_trained = connection.execute(
            "SELECT count(*), count(trained_s) FROM batches"
        ).fetchone()
        return Totals(
            run_id=meta["run_id"],
            groups={state: count for state, count, *_ in states},
            sampled_tokens={state: int(sampled + live.get(state, 0)) for state, _, sampled, _ in states},
            lost_tokens=int(sum(row[3] for row in states)),
            failed_rollouts=int(
                connection.execute(
                    "SELECT (SELECT count(*) FROM failures) + (SELECT total(num_failed) FROM groups)"
                ).fetchone()[0]
            ),
            num_batches=num_batches,
            num_trained=num_trained,
            newest_published=connection.execute("SELECT max(version) FROM publishes").fetchone()[0],
            checkpoints=tuple(
                connection.execute("SELECT version, path, state FROM checkpoints ORDER BY version").fetchall()
            ),
            compacted_before=int(meta["compacted_before"]),
        )


def events(path: Path, *, newest: int = MAX_EVENTS) -> tuple[Event, ...]:
    """Restarts, resumes and the like, in the order in which they happened: the newest so many."""
    with reading(path) as connection:
        rows = connection.execute(
            "SELECT s, what, detail FROM events ORDER BY id DESC LIMIT ?", (newest,)
        ).fetchall()
        return tuple(Event(at_s, what, json.loads(detail)) for at_s, what, detail in reversed(rows))


def _line(row: Sequence[Any]) -> GroupLine:
    """From id, prompt, state and _GROUP_NUMBERS."""
    group_id, prompt_id, state, num_rollouts, num_failed, num_sampled, *rest = row
    return GroupLine(group_id, prompt_id, state, num_rollouts, num_failed, int(num_sampled), *rest)
