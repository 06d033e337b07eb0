"""Tables and file of journal.sqlite, and the exact conversion of token records to its
blobs.

A blob is a zlib-compressed frame (messages/codec.py). Its arrays are in byte planes,
which compress better.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import zlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import astuple, replace
from datetime import date
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.base.errors import JournalError
from asyncrl.base.files import sync
from asyncrl.config.load import refused_version, writer_of
from asyncrl.messages.codec import read_frame, write_frame
from asyncrl.messages.records import (
    CallSpan,
    Completion,
    Credit,
    PolicyCall,
    RewardPart,
    Trajectory,
)
from asyncrl.messages.tokens import COLUMNS, Tokens, dtype_of, in_journal

FILE_NAME = "journal.sqlite"
"""File in the run directory."""
# A new column or another blob needs another number: there is no migration, and an old
# run resumes only with the asyncrl that wrote it.
SCHEMA_VERSION = 13
EPOCH = "epoch/"
"""Prefix of keys in the table meta."""
COSTS = "costs"
"""Key in the table meta: what the run has spent until the newest commit, by metric."""
REWARD = "reward/"
"""Prefix of keys in the table meta: posted rewards by the digest of their keys, or `why`
a rollout needs none.
"""
# Seconds that SQLite waits for another program's lock, such as a backup or a browser of
# the file.
BUSY_S = 10.0
DISK_ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)
"""UnicodeDecodeError occurs if a flipped byte corrupts SQLite's message."""
WITHOUT_IT = (
    "move journal.sqlite* away and resume from a checkpoint, if one is whole; or start a new run in another "
    "--run-dir."
)
MOVE_ASIDE = (
    f"restore journal.sqlite, and its -wal file if the copy has one; or {WITHOUT_IT}"
)


# The tables refuse what must never happen, even if a caller is wrong:
# a_prompt_lives_once refuses a second active group of a prompt (ids contain the epoch),
# and batch_groups refuses a group in two batches.
TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- messages: of the prompt; NULL once the tokens of the group are deleted. num_rollouts .. reward_sum: of its
-- finished rollouts. lost_tokens: sampled tokens that are in no trajectory. requeued: with this
-- num_requeued the prompt of a group that has ended is sampled again; NULL: it is not.
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL, num_requeued INTEGER NOT NULL,
    start_version INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'ready', 'taken', 'failed', 'filtered', 'requeued')),
    reason TEXT NOT NULL DEFAULT '', admitted_s REAL NOT NULL, ended_s REAL, messages TEXT,
    num_rollouts INTEGER NOT NULL DEFAULT 0, num_failed INTEGER NOT NULL DEFAULT 0,
    num_sampled INTEGER NOT NULL DEFAULT 0, oldest_version INTEGER, reward_sum REAL NOT NULL DEFAULT 0,
    lost_tokens INTEGER NOT NULL DEFAULT 0, requeued INTEGER
);
CREATE UNIQUE INDEX a_prompt_lives_once ON groups (prompt_id) WHERE state IN ('running', 'ready', 'taken');
CREATE INDEX groups_of_prompt ON groups (prompt_id);
CREATE INDEX groups_alive ON groups (state) WHERE state IN ('running', 'ready');
CREATE INDEX groups_with_tokens ON groups (group_id) WHERE messages IS NOT NULL;
CREATE INDEX groups_requeued ON groups (group_id) WHERE requeued IS NOT NULL;

CREATE TABLE trajectories (
    group_id INTEGER NOT NULL REFERENCES groups, sample_index INTEGER NOT NULL, branch INTEGER NOT NULL,
    blob BLOB NOT NULL, PRIMARY KEY (group_id, sample_index, branch)
);
CREATE TABLE failures (
    group_id INTEGER NOT NULL REFERENCES groups, sample_index INTEGER NOT NULL, attempts INTEGER NOT NULL,
    why TEXT NOT NULL, PRIMARY KEY (group_id, sample_index)
);
CREATE TABLE segments (
    group_id INTEGER NOT NULL REFERENCES groups, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, blob BLOB NOT NULL, PRIMARY KEY (group_id, sample_index)
);

CREATE TABLE batches (
    version INTEGER PRIMARY KEY, min_version INTEGER NOT NULL, mask_older INTEGER NOT NULL,
    num_groups INTEGER NOT NULL, part_groups INTEGER NOT NULL, next_part_groups INTEGER NOT NULL,
    taken_s REAL NOT NULL, trained_s REAL, loss REAL
);
CREATE TABLE batch_groups (
    version INTEGER NOT NULL REFERENCES batches, position INTEGER NOT NULL,
    group_id INTEGER NOT NULL UNIQUE REFERENCES groups, PRIMARY KEY (version, position)
) WITHOUT ROWID;
CREATE TABLE publishes (version INTEGER PRIMARY KEY, digest TEXT NOT NULL, served_s REAL NOT NULL);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, s REAL NOT NULL, what TEXT NOT NULL, detail TEXT NOT NULL
);
"""


def damaged(where: object, why: str) -> JournalError:
    return JournalError(
        f"{where} is damaged: {why}",
        rule="a run needs a whole journal",
        way_out=MOVE_ASIDE,
    )


def cannot_use(path: Path, error: Exception) -> JournalError:
    name = getattr(error, "sqlite_errorname", "")
    if isinstance(error, UnicodeDecodeError) or name.startswith(
        ("SQLITE_CORRUPT", "SQLITE_NOTADB")
    ):
        return damaged(path, str(error))
    return JournalError(
        f"{path} cannot be used: {error}{name and f' ({name})'}",
        rule="each decision is journaled before it takes effect",
        way_out="free space on its disk, check its permissions, end other programs that hold it open, then "
        "resume; earlier entries are whole.",
    )


def create(path: Path, run_id: str) -> None:
    """Create an empty journal atomically. Raises DISK_ERRORS; JournalError for another
    journal's log, which SQLite would replay.
    """
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        raise JournalError(
            f"{log} exists without its journal",
            rule=f"{path.name} and its -wal file are one journal",
            way_out=f"restore {path.name}, or move {log} to where the journal is.",
        )
    # A process that dies here leaves only this hidden file, which the next start
    # replaces. A half-made journal.sqlite would look like a damaged one.
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with closing(sqlite3.connect(beside, isolation_level=None)) as connection:
        connection.executescript(
            f"BEGIN; {TABLES}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
        values = (run_id, date.today().isoformat())
        connection.execute(
            "INSERT INTO meta VALUES ('run_id', ?), ('start_date', ?)", values
        )
        # Write-ahead logging is stored in the file. Readers then never block the
        # writer.
        connection.execute("PRAGMA journal_mode = WAL")
    sync(beside)
    beside.rename(path)
    sync(path.parent)


def connect(path: Path, *, is_read_only: bool) -> sqlite3.Connection:
    """Open an existing journal, for one thread at a time. Raises DISK_ERRORS;
    JournalError for another format.

    Only SQLite may open the file: closing any descriptor of it loses all locks of the
    process (https://www.sqlite.org/howtocorrupt.html section 2.2).
    """
    if path.stat().st_size == 0:
        # SQLite would treat it as new and delete its log
        raise damaged(path, "it is empty")
    # Without mode=rw SQLite would create a file that was removed after the stat above.
    uri = f"{path.resolve().as_uri()}?mode={'ro' if is_read_only else 'rw'}"
    is_ended = not path.with_name(f"{path.name}-wal").exists()
    if (
        is_read_only
        and is_ended
        and not os.access(path.parent, os.W_OK, effective_ids=True)
    ):
        # readers of an active journal must create files next to it
        uri += "&immutable=1"
    connection = sqlite3.connect(
        uri, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True
    )
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            config = path.with_name("config.yaml")
            writer = writer_of(config) if config.exists() else None
            what = f"it has schema version {version}, and {SCHEMA_VERSION} is read"
            error = refused_version(path, writer or "another version", what)
            raise JournalError(error.what, rule=error.rule, way_out=error.way_out)
        if not is_read_only:
            connection.execute("PRAGMA synchronous = FULL")  # durable on return
            connection.execute("PRAGMA foreign_keys = ON")
            # Else the log keeps its largest size: after a checkpoint SQLite overwrites
            # it, and does not truncate it.
            connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
    except BaseException:
        connection.close()
        raise
    return connection


def open_to_write(path: Path, run_id: str) -> sqlite3.Connection:
    """Open this run's journal, verified or new. Raises JournalError and leaves the
    files unchanged.
    """
    log = path.with_name(f"{path.name}-wal")
    try:
        if not path.exists():
            create(path, run_id)
        # Counted before a connection that writes can restart the log.
        commits = _commits_in(log)
        # closed last, to keep a refused log
        with closing(connect(path, is_read_only=True)) as connection:
            # quick_check misses an index that hides a row
            rows = connection.execute("PRAGMA integrity_check(3)").fetchall()
            if wrong := [row[0] for row in rows if row[0] != "ok"]:
                raise damaged(path, "; ".join(wrong).replace("\n", " "))
            owner = connection.execute(
                "SELECT value FROM meta WHERE key = 'run_id'"
            ).fetchone()
            if owner != (run_id,):
                raise JournalError(
                    f"{path} is the journal of run {owner and owner[0]}, this is run {run_id}",
                    rule="a journal belongs to one run",
                    way_out="move it elsewhere, or give this run another --run-dir.",
                )
            writing = connect(path, is_read_only=False)
            # The number of the log's frames that SQLite can read.
            num_whole = max(
                0, writing.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
            )
            # Every commit is synced before its caller is answered (synchronous = FULL),
            # so only the last one can be torn. Of two or more, one was answered: it was
            # whole on the disk, and was damaged later.
            lost = [number for number in commits if number > num_whole]
            if len(lost) > 1:  # a power cut tears at most one unanswered commit
                writing.close()
                raise damaged(
                    log,
                    f"{len(lost)} commits after {num_whole} whole frames cannot be read",
                )
            return writing
    except DISK_ERRORS as error:
        raise cannot_use(path, error) from error


# write-ahead log: SQLite silently drops the rest of a damaged one
# (https://www.sqlite.org/fileformat2.html#the_write_ahead_log)

_HEADER = struct.Struct(">8I")
"""Magic, format, page size, checkpoint number, two salts, two checksums."""
_FRAME = struct.Struct(">6I")
"""Page, pages of the database after a commit (else 0), two salts, two checksums."""


def _commits_in(log: Path) -> list[int]:
    """Return numbers, from 1, of frames that claim to end a commit."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return []
        # Each restart of the log gets new salts. Frames with other salts are leftovers
        # of an earlier round.
        _, _, page_size, _, *salts, _, _ = _HEADER.unpack(header)
        # SQLite reads nothing behind a broken header. How many commits are lost is
        # unknown: report two, which the caller refuses.
        if not _is_whole(header):
            return [1, 2] if file.read(1) else []
        frames = []
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            frames.append(_FRAME.unpack(frame))
            file.seek(page_size, 1)
    return [
        number
        for number, frame in enumerate(frames, 1)
        if frame[1] and list(frame[2:4]) == salts
    ]


def _is_whole(header: bytes) -> bool:
    # Bit 0 of the magic number says in which byte order the checksums are computed.
    words = struct.unpack(">6I" if header[3] & 1 else "<6I", header[:24])
    one = two = 0
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) % 2**32
        two = (two + second + one) % 2**32
    return (one, two) == struct.unpack(">2I", header[24:])


_LEVEL = 1  # higher levels save 1 to 3 % at twice the time
_SHORT = 1024
"""Blobs up to this size in bytes are stored uncompressed, since zlib's setup dominates.
"""
_STORED = b"\x78\x01\x01"
"""Head of a zlib stream of one stored block, its last (RFC 1950 and 1951)."""


def encode_trajectory(group_id: int, trajectory: Trajectory) -> bytes:
    head = {
        "reward": float(trajectory.reward),
        "is_truncated": bool(trajectory.is_truncated),
        "num_interruptions": int(trajectory.num_interruptions),
        "metrics": {
            str(name): float(value) for name, value in trajectory.metrics.items()
        },
        "credits": [_row(credit) for credit in trajectory.credits],
        "calls": [_row(call) for call in trajectory.calls],
        "unscored": trajectory.unscored,
        "awaits": trajectory.awaits,
        "untrained": trajectory.untrained,
        "role": trajectory.role,
        "parts": trajectory.parts,
    }
    place = (group_id, trajectory.sample_index, trajectory.branch)
    return _encode(place, trajectory.tokens, head)


def _row(record: Credit | PolicyCall) -> list[object]:
    """Return the values of the fields, in order."""
    # astuple() copies each value, which was a fifth of the journal's time.
    return [getattr(record, name) for name in record.__slots__]


def _parts(rows: Mapping[str, Any]) -> dict[str, RewardPart]:
    return {name: RewardPart(*row) for name, row in rows.items()}


def decode_trajectory(
    blob: bytes, group_id: int, sample_index: int, branch: int
) -> Trajectory:
    """Decode a trajectory. Raises ValueError for a damaged blob or another branch's."""
    tokens, head = _decode(blob, (group_id, sample_index, branch))
    credits = list[Credit]()
    for start, end, reward, unit, state, given in head.pop("credits"):
        credits.append(Credit(start, end, reward, unit, state, _parts(given)))
    calls = list[PolicyCall]()
    for row in head.pop("calls"):
        call = PolicyCall(*row)
        calls.append(
            replace(call, tools=tuple((name, tool) for name, tool in call.tools))
        )
    untrained = tuple((name, agent) for name, agent in head.pop("untrained"))
    parts = _parts(head.pop("parts"))
    return Trajectory(
        sample_index=sample_index,
        tokens=tokens,
        branch=branch,
        credits=tuple(credits),
        calls=tuple(calls),
        untrained=untrained,
        parts=parts,
        **head,
    )


def encode_partial(group_id: int, sample_index: int, partial: Completion) -> bytes:
    tokens, num_prompt = partial.tokens, partial.num_prompt
    if not any(COLUMNS[name].covers == "all" for name in tokens.columns):
        tokens, num_prompt = partial.sampled, 0  # a resume encodes the prompt again
    head = {"num_prompt": num_prompt, "num_interruptions": partial.num_interruptions}
    return _encode((group_id, sample_index, 0), tokens, head)


def decode_partial(blob: bytes, group_id: int, sample_index: int) -> Completion:
    """Decode an unfinished completion. Raises ValueError for a damaged blob or another
    rollout's.
    """
    tokens, head = _decode(blob, (group_id, sample_index, 0))
    return Completion(tokens, **head)


def _encode(
    place: tuple[int, int, int], tokens: Tokens, head: Mapping[str, object]
) -> bytes:
    arrays = tokens.kept(in_journal).arrays()
    is_short = sum(array.nbytes for array in arrays.values()) <= _SHORT
    for name, array in arrays.items():
        assert array.dtype == dtype_of(name), f"{name} of {array.dtype}"
        if not is_short:
            # The high bytes of neighbours are alike, so bytes of one rank compress
            # better together. int32 ids 5, 7: 05 00 00 00 07 00 00 00 -> 05 07 00 00 00
            # 00 00 00.
            planes = array.view(np.uint8).reshape(-1, array.itemsize).T
            arrays[name] = planes.reshape(-1)
    spans = [astuple(span) for span in tokens.calls]
    text = {"place": [*map(int, place)], "spans": spans}
    assert not text.keys() & head.keys(), "a name of `head` would replace another value"
    whole = write_frame("tokens", arrays, {**text, **head})
    if len(whole) > _SHORT:
        return zlib.compress(whole, _LEVEL)
    # The bytes of compress(whole, 0), which takes 50 us for its 268 KB of state.
    size = struct.pack("<HH", len(whole), 0xFFFF - len(whole))
    return b"".join((_STORED, size, whole, struct.pack(">I", zlib.adler32(whole))))


def _decode(blob: bytes, place: tuple[int, int, int]) -> tuple[Tokens, dict[str, Any]]:
    try:
        frame = read_frame(zlib.decompress(blob))
        head: dict[str, Any] = frame.text
        # SQLite's page checks do not find a blob that was stored in another row.
        if head.pop("place") != [*place]:
            raise ValueError("they are of another rollout")
        arrays = dict(frame.arrays)
        for name, array in frame.arrays.items():
            dtype = dtype_of(name)
            if array.dtype == np.uint8:
                planes = array.reshape(dtype.itemsize, -1)
                arrays[name] = planes.T.copy().view(dtype).reshape(-1)
        spans = starmap(CallSpan, head.pop("spans"))
        return Tokens.from_arrays(arrays, spans), head
    except (zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the tokens of g{place[0]}/r{place[1]} do not unpack ({error})"
        ) from error
