"""Proves from only journal.sqlite and trained.jsonl that a run lost nothing, did
nothing twice, and kept its bound. On-policy, the order of prompts is judged by
comparing with a run that was never killed.

Independent of what it judges: its own SQL, its own parser, its own order of prompts; it
imports nothing of asyncrl.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Promise:
    """The settings of the run that matter here."""

    seed: int
    num_prompts: int
    num_groups: int
    max_staleness: int
    max_requeues: int = 3


@dataclass(frozen=True)
class JournalGroup:
    """A row of `groups`, with its place in a batch and its stored rest: (sample,
    branch) -> (reward, tokens, oldest, digest).

    `requeued`: how often its prompt has come back, if it comes again.
    """

    group_id: int
    prompt_id: str
    start_version: int
    state: str
    requeued: int | None
    version: int | None
    position: int | None
    branches: dict[tuple[int, int], tuple[float, int, int, str]]


@dataclass(frozen=True)
class Evidence:
    """`record`: trained.jsonl line by line."""

    groups: tuple[JournalGroup, ...]
    batches: dict[int, tuple[int, bool, int]]
    """version -> (min_version, mask_older, number of groups)."""
    record: tuple[dict[str, Any], ...]
    faults: tuple[str, ...] = ()

    @property
    def taken(self) -> dict[int, list[JournalGroup]]:
        """version -> its groups by position."""
        found: dict[int, list[JournalGroup]] = {version: [] for version in self.batches}
        for group in sorted(
            self.groups, key=lambda group: (group.version or 0, group.position or 0)
        ):
            if group.version is not None:
                found.setdefault(group.version, []).append(group)
        return found


@dataclass
class Record:
    """trained.jsonl as it counts: version -> line. `superseded` are the lines that were
    trained again.
    """

    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    superseded: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_evidence(run_dir: Path) -> Evidence:
    """Read both files, the journal from a copy, so that looking changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("journal.sqlite", "journal.sqlite-wal"):
            if (run_dir / name).exists():
                shutil.copy(run_dir / name, folder)
        connection = sqlite3.connect(Path(folder) / "journal.sqlite")
        try:
            answers = connection.execute("PRAGMA integrity_check")
            faults = [f"journal: {answer}" for (answer,) in answers if answer != "ok"]
            groups = _read_groups(connection)
            rows = connection.execute(
                "SELECT version, min_version, mask_older, num_groups FROM batches"
            )
            batches = {
                version: (oldest, bool(masks), count)
                for version, oldest, masks, count in rows
            }
        finally:
            connection.close()
    return Evidence(
        groups, batches, _read_record(run_dir / "trained.jsonl"), tuple(faults)
    )


def _read_groups(connection: sqlite3.Connection) -> tuple[JournalGroup, ...]:
    branches: dict[int, dict[tuple[int, int], tuple[float, int, int, str]]] = {}
    query = "SELECT group_id, sample_index, branch, blob FROM trajectories"
    for group_id, index, branch, blob in connection.execute(query):
        branches.setdefault(group_id, {})[index, branch] = _read_branch(blob)
    rows = connection.execute(
        "SELECT groups.group_id, prompt_id, start_version, state, requeued, batch_groups.version, position "
        "FROM groups"
        " LEFT JOIN batch_groups ON batch_groups.group_id = groups.group_id ORDER BY groups.group_id"
    )
    return tuple(JournalGroup(*row, branches.get(row[0], {})) for row in rows)


def _read_branch(blob: bytes) -> tuple[float, int, int, str]:
    """Reward, number of tokens, oldest version, and a digest of the int32 token ids.
    Behind the head are the arrays, of bytes if they are in planes; `spans` has four
    numbers a span: start, end, version, engine.
    """
    body = zlib.decompress(blob)
    start = 4 + struct.unpack_from("<I", body)[0]
    _, layout, head = json.loads(body[4:start])
    arrays = {}
    for name, dtype, count in layout:
        array = np.frombuffer(body, dtype, count, start)
        start += array.nbytes
        if dtype == "|u1" and name in ("ids", "spans"):
            array = array.reshape(4, -1).T.copy().view("<i4").reshape(-1)
        arrays[name] = array
    ids, spans = arrays["ids"], arrays["spans"]
    digest = hashlib.sha256(ids.tobytes()).hexdigest()[:16]
    return head["reward"], len(ids), int(spans.reshape(-1, 4)[:, 2].min()), digest


def _read_record(path: Path) -> tuple[dict[str, Any], ...]:
    """Whole lines; one at the end that a kill has torn is no line."""
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return tuple(json.loads(line) for line in lines if line.endswith("\n"))


def violations(
    evidence: Evidence, promise: Promise, *, num_steps: int | None = None
) -> list[str]:
    """Every way in which the evidence breaks a promise. `num_steps`: the run says that
    it is done, after so many.
    """
    record = effective(evidence.record)
    found = [*evidence.faults, *record.faults]
    found += [*_lost_prompts(evidence, promise), *_batches(evidence, promise)]
    found += [*_replays(record), *_trained_once(record), *_staleness(record, promise)]
    found += _both_agree(evidence, record, promise.max_staleness)
    if num_steps is not None:
        for name, versions in (
            ("journal", sorted(evidence.batches)),
            ("record", sorted(record.lines)),
        ):
            if versions != list(range(num_steps)):
                found.append(
                    f"the {name} has batches {versions} after {num_steps} steps"
                )
    return found


def effective(lines: Sequence[dict[str, Any]]) -> Record:
    """{"restored": v} takes back the steps from version v on; nothing else may."""
    record, newest = Record(), -1
    for number, line in enumerate(lines, 1):
        if "restored" in line:
            if (back := line["restored"]) > newest + 1:
                record.faults.append(
                    f"line {number} goes on from version {back}, which was never reached"
                )
            for version in [version for version in record.lines if version >= back]:
                record.superseded.append(record.lines.pop(version))
            newest = back - 1
        else:
            if line["version"] != newest + 1:
                record.faults.append(
                    f"line {number} is of batch {line['version']}, after batch {newest}"
                )
            newest = line["version"]
            record.lines[newest] = line
    return record


def draw_of(prompt_id: str, promise: Promise) -> int:
    """Number of the prompt in the seeded order, from 0, epochs one after the other."""
    epoch, index = (int(part) for part in prompt_id.split("/"))
    order = (
        np.random.default_rng([promise.seed, epoch])
        .permutation(promise.num_prompts)
        .tolist()
    )
    return epoch * promise.num_prompts + order.index(index)


def _lost_prompts(evidence: Evidence, promise: Promise) -> Iterator[str]:
    """Draws are consecutive, in order, and each prompt lives once: a second group of it
    only after the first one's prompt came back.
    """
    newest, lives, num_back = -1, dict[str, JournalGroup](), Counter[str]()
    for group in evidence.groups:
        name, earlier = f"group {group.group_id}", lives.get(group.prompt_id)
        before = num_back[group.prompt_id]
        has_ended = group.state in ("failed", "requeued")
        if earlier is None:
            draw = draw_of(group.prompt_id, promise)
            if draw != newest + 1:
                yield f"{name} has draw {draw}, the one before was {newest}: some are lost, or repeated"
            newest = max(newest, draw)
        elif earlier.requeued is None:
            yield f"{name} was made though group {earlier.group_id} is {earlier.state}: {group.prompt_id}"
        if group.requeued is not None:
            num_back[group.prompt_id] = group.requeued
        elif has_ended and before < promise.max_requeues:
            yield f"prompt {group.prompt_id} is lost: {name} is {group.state}"
        lives[group.prompt_id] = group
        if (group.state == "taken") != (group.version is not None):
            yield f"{name} is {group.state}, and in batch {group.version}"


def _batches(evidence: Evidence, promise: Promise) -> Iterator[str]:
    if sorted(evidence.batches) != list(range(len(evidence.batches))):
        yield f"the journal's batches are {sorted(evidence.batches)}"
    for version, groups in evidence.taken.items():
        oldest, masks, count = evidence.batches.get(version, (0, False, 0))
        if not len(groups) == count == promise.num_groups:
            yield f"batch {version} has {len(groups)} groups, {count} and {promise.num_groups} are expected"
        if oldest != max(0, version - promise.max_staleness):
            yield f"batch {version} has min_version {oldest}"
        for group in groups:
            found = [sampled for _, _, sampled, _ in group.branches.values()]
            if min(found, default=oldest) < oldest and not masks:
                yield f"batch {version}: group {group.group_id} has tokens of version {min(found)}"


def _replays(record: Record) -> Iterator[str]:
    """Trained again means: the same tokens, rewards and versions, and because the
    weights were the same too, the same loss.
    """
    for before in record.superseded:
        after = record.lines.get(before["version"], before)
        for key in sorted(before):
            if before[key] != after[key]:
                yield f"batch {before['version']} had another {key} when it was trained again"


def _trained_once(record: Record) -> Iterator[str]:
    seen, groups = dict[tuple[int, int, int], int](), dict[str, int]()
    for version, line in record.lines.items():
        for entry in line["trajectories"]:
            key = (entry["group_id"], entry["sample_index"], entry.get("branch", 0))
            if key in seen:
                yield f"batch {version}: g{key[0]}/r{key[1]} was trained on in batch {seen[key]} already"
            seen[key] = version
            if (
                groups.setdefault(entry["prompt_id"], entry["group_id"])
                != entry["group_id"]
            ):
                yield f"batch {version}: prompt {entry['prompt_id']} was trained on in two groups"


def _staleness(record: Record, promise: Promise) -> Iterator[str]:
    """Check every token with a loss, and that the counts add up."""
    for version, line in record.lines.items():
        for entry in line["trajectories"]:
            name = f"batch {version}: g{entry['group_id']}/r{entry['sample_index']}"
            num = 0
            for start, end, sampled in entry["spans"]:
                num += end - start
                if not version - promise.max_staleness <= sampled <= version:
                    yield f"{name} has loss on tokens {start}..{end - 1} of version {sampled}"
            if num != entry["num_loss_tokens"]:
                yield f"{name} has {entry['num_loss_tokens']} loss tokens, its spans {num}"


def _both_agree(
    evidence: Evidence, record: Record, max_staleness: int
) -> Iterator[str]:
    """Check that the journal's batches were trained: groups, order, tokens, rewards. The
    newest batch may not be trained yet, and off policy the batch that was sent ahead; in
    a replay that was killed, more.
    """
    num_behind = len(evidence.batches) - len(record.lines)
    most_behind = 1 if max_staleness == 0 else 2
    if num_behind < 0 or num_behind > most_behind and not record.superseded:
        yield f"{len(evidence.batches)} batches were taken, {len(record.lines)} trained"
    for version, line in record.lines.items():
        trained: dict[
            tuple[int, str], dict[tuple[int, int], tuple[float, int, str]]
        ] = {}
        for entry in line["trajectories"]:
            place = entry["sample_index"], entry.get("branch", 0)
            data = entry["reward"], entry["num_tokens"], entry["tokens_sha"]
            trained.setdefault((entry["group_id"], entry["prompt_id"]), {})[place] = (
                data
            )
        groups = {
            (group.group_id, group.prompt_id): group
            for group in evidence.taken.get(version, [])
        }
        if list(groups) != list(trained):
            yield f"batch {version}: the journal has {list(groups)}, trained were {list(trained)}"
            continue
        for key, group in groups.items():
            held = {
                place: (reward, count, sha)
                for place, (reward, count, _, sha) in group.branches.items()
            }
            if held and trained[key] != held:
                yield f"batch {version}: group {group.group_id} was trained on other tokens or rewards"


def changes(before: Evidence, after: Evidence) -> Iterator[str]:
    """Return what a later look must not show: a lost group or batch, a state that
    cannot follow the earlier one, a changed line of the record.
    """
    later = {group.group_id: group for group in after.groups}
    for group in before.groups:
        now, name = later.get(group.group_id), f"group {group.group_id}"
        if now is None:
            yield f"{name} (prompt {group.prompt_id}, {group.state}) is gone"
            continue
        same = (now.prompt_id, now.start_version) == (
            group.prompt_id,
            group.start_version,
        )
        if not same or now.state != group.state not in ("running", "ready"):
            yield f"{name} was {group.state} with prompt {group.prompt_id}, and is {now.state}"
        elif group.version is not None and (now.version, now.position) != (
            group.version,
            group.position,
        ):
            yield f"{name} has moved from batch {group.version} to {now.version}"
        elif now.branches and not group.branches.items() <= now.branches.items():
            yield f"rollouts of {name} have changed"
    if not before.batches.items() <= after.batches.items():
        yield "a batch has changed"
    if after.record[: len(before.record)] != before.record:
        yield "lines of the trained record have changed"
