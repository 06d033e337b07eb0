"""Proves from journal.sqlite and trained.jsonl alone that a run lost nothing, did nothing twice, and kept its
bound.

Independent of what it judges: its own SQL, its own parser, its own order of prompts; it imports nothing of
asyncrl.
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

ENDS = {
    "running": {"running", "ready", "taken", "failed", "filtered", "handed_back"},
    "ready": {"ready", "taken", "handed_back"},
    **{state: {state} for state in ("taken", "failed", "filtered", "handed_back")},
}
"""State of a group -> states in which it may be found later."""


@dataclass(frozen=True)
class Promise:
    """What the config of the run says."""

    seed: int
    num_prompts: int
    num_groups: int
    group_size: int
    max_staleness: int
    max_hand_backs: int = 3
    num_replayed: int = 0
    """Recorded prompts, which come before those of the task."""


@dataclass(frozen=True)
class JournalGroup:
    """One row of `groups`, with its place in a batch and what is left of it: (sample, branch) -> (reward,
    tokens, oldest, digest).

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
        for group in sorted(self.groups, key=lambda group: (group.version or 0, group.position or 0)):
            if group.version is not None:
                found.setdefault(group.version, []).append(group)
        return found


@dataclass
class Record:
    """trained.jsonl as it counts: version -> line. `superseded` are the lines that were trained again."""

    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    superseded: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_evidence(run_dir: Path) -> Evidence:
    """Both files as they lie there; the journal is read from a copy, so that looking changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("journal.sqlite", "journal.sqlite-wal"):
            if (run_dir / name).exists():
                shutil.copy(run_dir / name, folder)
        connection = sqlite3.connect(Path(folder) / "journal.sqlite")
        try:
            faults = [
                f"journal: {row[0]}" for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok"
            ]
            groups = _read_groups(connection)
            rows = connection.execute("SELECT version, min_version, mask_older, num_groups FROM batches")
            batches = {version: (oldest, bool(masks), count) for version, oldest, masks, count in rows}
        finally:
            connection.close()
    return Evidence(groups, batches, _read_record(run_dir / "trained.jsonl"), tuple(faults))


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
    """Reward, number of tokens, oldest version, and a digest of the int32 token ids, which lie behind the
    head in four planes of bytes.
    """
    body = zlib.decompress(blob)
    start = 4 + struct.unpack_from("<I", body)[0]
    head = json.loads(body[4:start])
    count = head["num_tokens"]
    tokens = np.frombuffer(body, np.uint8, 4 * count, start).reshape(4, count).T.tobytes()
    oldest = min(version for _, _, version, *_ in head["spans"])
    return head["reward"], count, oldest, hashlib.sha256(tokens).hexdigest()[:16]


def _read_record(path: Path) -> tuple[dict[str, Any], ...]:
    """Whole lines; one at the end that a kill has torn is no line."""
    if not path.exists():
        return ()
    return tuple(
        json.loads(line)
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    )


def violations(evidence: Evidence, promise: Promise, *, num_steps: int | None = None) -> list[str]:
    """Every way in which the evidence breaks a promise. `num_steps`: the run says that it is done, after so
    many.
    """
    record = effective(evidence.record)
    found = [*evidence.faults, *record.faults]
    found += _lost_prompts(evidence, promise)
    found += _batches(evidence, promise)
    found += _order(evidence, promise)
    found += _replays(record)
    found += _trained_once(record)
    found += _staleness(record, promise)
    found += _both_agree(evidence, record)
    if num_steps is not None:
        for name, versions in (("journal", sorted(evidence.batches)), ("record", sorted(record.lines))):
            if versions != list(range(num_steps)):
                found.append(f"the {name} has batches {versions} after {num_steps} steps")
    return found


def effective(lines: Sequence[dict[str, Any]]) -> Record:
    """{"restored": v} takes back what was trained from version v on; nothing else may."""
    record, newest = Record(), -1
    for number, line in enumerate(lines, 1):
        if "restored" in line:
            if line["restored"] > newest + 1:
                record.faults.append(
                    f"line {number} goes on from version {line['restored']}, which was never reached"
                )
            for version in [version for version in record.lines if version >= line["restored"]]:
                record.superseded.append(record.lines.pop(version))
            newest = line["restored"] - 1
        else:
            if line["version"] != newest + 1:
                record.faults.append(f"line {number} is of batch {line['version']}, after batch {newest}")
            newest = line["version"]
            record.lines[newest] = line
    return record


def draw_of(prompt_id: str, promise: Promise) -> int:
    """Number of the prompt in the seeded order, from 0, epochs one after the other."""
    if prompt_id.startswith("replay/"):
        return int(prompt_id.removeprefix("replay/"))
    epoch, index = (int(part) for part in prompt_id.split("/"))
    order = np.random.default_rng([promise.seed, epoch]).permutation(promise.num_prompts).tolist()
    return promise.num_replayed + epoch * promise.num_prompts + order.index(index)


def _lost_prompts(evidence: Evidence, promise: Promise) -> Iterator[str]:
    """Draws are consecutive, in order, and each prompt lives once: a second group of it only after the first
    one's prompt came back.
    """
    newest, lives = -1, dict[str, JournalGroup]()
    num_back = Counter[str]()
    for group in evidence.groups:
        earlier = lives.get(group.prompt_id)
        if earlier is not None and earlier.requeued is None:
            yield (
                f"prompt {group.prompt_id}: group {group.group_id} was made though group {earlier.group_id} "
                f"is {earlier.state}"
            )
        if group.requeued is not None:
            before = num_back[group.prompt_id]
            if group.state not in ("failed", "handed_back") or not before <= group.requeued <= min(
                before + 1, promise.max_hand_backs
            ):
                yield (
                    f"prompt {group.prompt_id} came back {group.requeued} times with group {group.group_id}, "
                    f"which is {group.state}"
                )
            num_back[group.prompt_id] = group.requeued
        elif group.state in ("failed", "handed_back") and num_back[group.prompt_id] < promise.max_hand_backs:
            yield f"prompt {group.prompt_id} is lost: group {group.group_id} is {group.state}"
        if earlier is None:
            draw = draw_of(group.prompt_id, promise)
            if draw != newest + 1:
                yield (
                    f"group {group.group_id} has draw {draw}, the one before was {newest}: some are lost, or "
                    f"repeated"
                )
            newest = max(newest, draw)
        lives[group.prompt_id] = group
        if (group.state == "taken") != (group.version is not None):
            yield f"group {group.group_id} is {group.state}, and in batch {group.version}"


def _batches(evidence: Evidence, promise: Promise) -> Iterator[str]:
    if sorted(evidence.batches) != list(range(len(evidence.batches))):
        yield f"the journal's batches are {sorted(evidence.batches)}"
    for version, groups in evidence.taken.items():
        oldest, masks, count = evidence.batches.get(version, (0, False, 0))
        if not len(groups) == count == promise.num_groups:
            yield (
                f"batch {version} has {len(groups)} groups, was made of {count}, and {promise.num_groups} "
                f"are asked for"
            )
        if oldest != max(0, version - promise.max_staleness):
            yield f"batch {version} has min_version {oldest}"
        for group in groups:
            for (index, _), (_, _, version_of_oldest, _) in group.branches.items():
                if version_of_oldest < oldest and not masks:
                    yield (
                        f"batch {version}: g{group.group_id}/r{index} has tokens of version "
                        f"{version_of_oldest}"
                    )
            num_rollouts = len({index for index, _ in group.branches})
            if group.branches and not 2 <= num_rollouts <= promise.group_size:
                yield f"batch {version}: group {group.group_id} has {num_rollouts} rollouts"


def _order(evidence: Evidence, promise: Promise) -> Iterator[str]:
    """In a batch by admission; on-policy, batches are the prompts one after the other as they were drawn, but
    for those that came again.
    """
    for version, groups in evidence.taken.items():
        if (ids := [group.group_id for group in groups]) != sorted(ids):
            yield f"batch {version} has its groups in the order {ids}"
    if promise.max_staleness == 0:
        again = {
            group.prompt_id
            for group in evidence.groups
            if group.state == "failed" and group.requeued is not None
        }
        taken = [group.prompt_id for version in sorted(evidence.taken) for group in evidence.taken[version]]
        yield from _returned(evidence)
        draws = [draw_of(prompt_id, promise) for prompt_id in taken if prompt_id not in again]
        gone = {
            draw_of(group.prompt_id, promise)
            for group in evidence.groups
            if group.state in ("failed", "filtered")
        }
        expected = [draw for draw in range(len(draws) + len(gone)) if draw not in gone][: len(draws)]
        if draws != expected:
            first = next(
                number for number, (is_, due) in enumerate(zip(draws, expected, strict=True)) if is_ != due
            )
            yield f"consumed out of order: number {first} is draw {draws[first]} instead of {expected[first]}"


def _returned(evidence: Evidence) -> Iterator[str]:
    """On-policy, the prompt of a failed group comes again before any new one of the next version, never at
    its own.
    """
    for failed in (
        group for group in evidence.groups if group.state == "failed" and group.requeued is not None
    ):
        later = [group for group in evidence.groups if group.group_id > failed.group_id]
        again = next((group for group in later if group.prompt_id == failed.prompt_id), None)
        seen = {group.prompt_id for group in evidence.groups if group.group_id <= failed.group_id}
        newer = next(
            (
                group
                for group in later
                if group.start_version > failed.start_version and group.prompt_id not in seen
            ),
            None,
        )
        if again is not None and again.start_version <= failed.start_version:
            yield (
                f"prompt {failed.prompt_id} of failed group {failed.group_id} came again at its version, as "
                f"group {again.group_id}"
            )
        if newer is not None and (again is None or again.group_id > newer.group_id):
            yield (
                f"prompt {failed.prompt_id} of failed group {failed.group_id} came again after the new one "
                f"of group {newer.group_id}"
            )


def _replays(record: Record) -> Iterator[str]:
    """Trained again means: the same tokens, rewards and versions, and because the weights were the same too,
    the same loss.
    """
    for before in record.superseded:
        after = record.lines.get(before["version"])
        for key in sorted(before) if after is not None else ():
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
            if groups.setdefault(entry["prompt_id"], entry["group_id"]) != entry["group_id"]:
                yield f"batch {version}: prompt {entry['prompt_id']} was trained on in two groups"


def _staleness(record: Record, promise: Promise) -> Iterator[str]:
    """Of every token with a loss, and the numbers of them add up."""
    for version, line in record.lines.items():
        for entry in line["trajectories"]:
            name = f"batch {version}: g{entry['group_id']}/r{entry['sample_index']}"
            for start, end, sampled in entry["spans"]:
                if not version - promise.max_staleness <= sampled <= version:
                    yield f"{name} has loss on tokens {start}..{end - 1} of version {sampled}"
            if sum(end - start for start, end, _ in entry["spans"]) != entry["num_loss_tokens"]:
                yield f"{name} has {entry['num_loss_tokens']} loss tokens, and spans of another number"
        if sum(entry["num_loss_tokens"] for entry in line["trajectories"]) != line["num_loss_tokens"]:
            yield (
                f"batch {version} has {line['num_loss_tokens']} loss tokens, and trajectories of another "
                f"number"
            )


def _both_agree(evidence: Evidence, record: Record) -> Iterator[str]:
    """What the journal gave out is what was trained on: groups, order, tokens, rewards; at most the newest
    batch is not trained yet.
    """
    is_behind_by = len(evidence.batches) - len(record.lines)
    if (
        is_behind_by < 0 or is_behind_by > 1 and not record.superseded
    ):  # a replay that was killed leaves more, all still to come
        yield f"{len(evidence.batches)} batches were taken, {len(record.lines)} trained"
    for version, line in record.lines.items():
        groups = evidence.taken.get(version, [])
        trained: dict[int, list[dict[str, Any]]] = {}
        for entry in line["trajectories"]:
            trained.setdefault(entry["group_id"], []).append(entry)
        if [(group.group_id, group.prompt_id) for group in groups] != [
            (key, found_[0]["prompt_id"]) for key, found_ in trained.items()
        ]:
            yield (
                f"batch {version}: the journal has groups {[group.group_id for group in groups]}, trained "
                f"were {list(trained)}"
            )
            continue
        for group in groups:
            told = {
                (entry["sample_index"], entry.get("branch", 0)): (
                    entry["reward"],
                    entry["num_tokens"],
                    entry["tokens_sha"],
                )
                for entry in trained[group.group_id]
            }
            held = {place: (reward, count, sha) for place, (reward, count, _, sha) in group.branches.items()}
            if held and told != held:
                yield (
                    f"batch {version}: group {group.group_id} was trained on other tokens or rewards than "
                    f"the journal has"
                )


def changes(before: Evidence, after: Evidence) -> Iterator[str]:
    """What a later look may not show: a group or batch that is gone, or has become what it cannot become; a
    line of the record changed.
    """
    later = {group.group_id: group for group in after.groups}
    for group in before.groups:
        now = later.get(group.group_id)
        if now is None:
            yield f"group {group.group_id} (prompt {group.prompt_id}, {group.state}) is gone"
        elif (
            now.prompt_id != group.prompt_id
            or now.start_version != group.start_version
            or now.state not in ENDS[group.state]
        ):
            yield (
                f"group {group.group_id} was {group.state} with prompt {group.prompt_id}, and is {now.state} "
                f"with {now.prompt_id}"
            )
        elif group.version is not None and (now.version, now.position) != (group.version, group.position):
            yield f"group {group.group_id} has moved from batch {group.version} to {now.version}"
        elif (
            any(now.branches.get(place) != branch for place, branch in group.branches.items())
            and now.branches
        ):
            yield f"rollouts of group {group.group_id} have changed"
    if not before.batches.items() <= after.batches.items():
        yield "a batch has changed"
    if after.record[: len(before.record)] != before.record:
        yield "lines of the trained record have changed"
