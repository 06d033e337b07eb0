"""The tables of journal.sqlite, and how the file is made, opened and checked.

Times are seconds since 1970, for people alone: the order of things is the order of ids and rows, so a clock
may jump.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import time
from pathlib import Path

from asyncrl.errors import JournalError
from asyncrl.files import sync

APPLICATION_ID = 0x6172_6C6A  # "arlj"
SCHEMA_VERSION = 3
BUSY_S = 10.0
"""So long a write waits for another program that holds the file, before it is an error."""
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What the sqlite3 module raises: the second one if a flipped byte in a name makes SQLite's own message no
text.
"""
MOVE_ASIDE = (
    "copy journal.sqlite back (with its -wal file) from where it is whole; or move journal.sqlite* out of "
    "the run directory and resume: the newest checkpoint is enough to go on, and what was generated after it "
    "is generated again."
)

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- lost_tokens: sampled by attempts that failed or were dropped. requeued: with this num_handed_back the
-- prompt of a group that has ended is sampled again; NULL: it is not. num_rollouts .. reward_mean are given
-- once compaction has deleted the tokens.
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL, start_version INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'ready', 'taken', 'failed', 'filtered', 'handed_back')),
    reason TEXT NOT NULL DEFAULT '', admitted_s REAL NOT NULL, ended_s REAL,
    lost_tokens INTEGER NOT NULL DEFAULT 0,
    num_rollouts INTEGER, num_failed INTEGER, num_sampled INTEGER, oldest_version INTEGER, reward_mean REAL,
    requeued INTEGER
);
CREATE UNIQUE INDEX a_prompt_lives_once ON groups (prompt_id) WHERE state IN ('running', 'ready', 'taken');
CREATE INDEX groups_of_prompt ON groups (prompt_id);
CREATE INDEX groups_alive ON groups (state) WHERE state IN ('running', 'ready');
CREATE INDEX groups_wasted ON groups (group_id)
    WHERE state IN ('failed', 'filtered', 'handed_back') AND num_rollouts IS NULL;
CREATE INDEX groups_requeued ON groups (group_id) WHERE requeued IS NOT NULL;

CREATE TABLE prompts (group_id INTEGER PRIMARY KEY REFERENCES groups, blob BLOB NOT NULL);

-- A rollout has a row for each of its branches. The number of its rollouts is that of the rows with branch 0.
CREATE TABLE trajectories (
    group_id INTEGER NOT NULL REFERENCES groups, sample_index INTEGER NOT NULL, branch INTEGER NOT NULL,
    reward REAL, num_tokens INTEGER NOT NULL, num_sampled INTEGER NOT NULL, oldest_version INTEGER,
    blob BLOB NOT NULL, PRIMARY KEY (group_id, sample_index, branch)
);
CREATE TABLE failures (
    group_id INTEGER NOT NULL REFERENCES groups, sample_index INTEGER NOT NULL, attempts INTEGER NOT NULL,
    why TEXT NOT NULL, PRIMARY KEY (group_id, sample_index)
);
CREATE TABLE segments (
    group_id INTEGER NOT NULL REFERENCES groups, sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL,
    turn INTEGER NOT NULL, num_tokens INTEGER NOT NULL, blob BLOB NOT NULL,
    PRIMARY KEY (group_id, sample_index)
);

CREATE TABLE batches (
    version INTEGER PRIMARY KEY, min_version INTEGER NOT NULL, mask_older INTEGER NOT NULL,
    num_groups INTEGER NOT NULL, taken_s REAL NOT NULL, trained_s REAL, loss REAL
);
CREATE TABLE batch_groups (
    version INTEGER NOT NULL REFERENCES batches, position INTEGER NOT NULL,
    group_id INTEGER NOT NULL UNIQUE REFERENCES groups, PRIMARY KEY (version, position)
) WITHOUT ROWID;
CREATE TABLE publishes (version INTEGER PRIMARY KEY, digest TEXT NOT NULL, served_s REAL NOT NULL);
CREATE TABLE checkpoints (
    version INTEGER PRIMARY KEY, path TEXT NOT NULL, done_s REAL NOT NULL, state TEXT NOT NULL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, s REAL NOT NULL, what TEXT NOT NULL, detail TEXT NOT NULL
);
"""


def damaged(where: object, why: str) -> JournalError:
    """The file is not what was written."""
    return JournalError(
        f"{where} is damaged: {why}", rule="a run goes on from a whole journal alone", way_out=MOVE_ASIDE
    )


def cannot_open(path: Path, error: Exception) -> JournalError:
    """SQLite or the system refuses."""
    if not isinstance(error, OSError | sqlite3.OperationalError):
        return damaged(path, str(error))
    return JournalError(
        f"{path} cannot be opened: {error}",
        rule="a run writes its journal first",
        way_out="free space on its disk, or see to its rights and to other programs that hold it open.",
    )


def create(path: Path, run_id: str) -> None:
    """Make an empty journal: written beside, synced, renamed, so that a file of that name is always a whole
    journal.

    Raises JournalError if the disk refuses, or if the log of another journal lies there: SQLite would replay
    it onto this one.
    """
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        raise JournalError(
            f"there is {log} without the journal that it belongs to",
            rule=f"{path.name} and its -wal file are one journal: the log holds what was written last, and "
            "would be replayed onto a new one",
            way_out=f"put {path.name} back; or, if it was moved elsewhere, move {log} there too.",
        )
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)
        connection = sqlite3.connect(beside, isolation_level=None)
        try:
            connection.execute(
                "PRAGMA auto_vacuum = INCREMENTAL"
            )  # before the first table, or without effect
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.executescript(
                f"BEGIN IMMEDIATE; {TABLES}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
            meta = (("run_id", run_id), ("created_s", str(time.time())), ("compacted_before", "0"))
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta)
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()
        sync(beside)
        beside.rename(path)
        sync(path.parent)
    except (*SQLITE_ERRORS, OSError) as error:
        beside.unlink(missing_ok=True)
        raise cannot_open(path, error) from error


def connect(path: Path, *, is_read_only: bool) -> sqlite3.Connection:
    """A connection to a journal that exists; nothing is checked. Raises sqlite3.Error. Any one thread at a
    time may use it.

    A reader has to make files beside the journal, unless it is not written any more: an ended run can be
    read where nothing may be written.
    """
    mode = "ro" if is_read_only else "rw"
    is_ended = not path.with_name(f"{path.name}-wal").exists()
    if is_read_only and is_ended and not os.access(path.parent, os.W_OK, effective_ids=True):
        mode += "&immutable=1"
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    if not is_read_only:
        connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
    return connection


def check_file(path: Path) -> None:
    """Raises JournalError if there is no file, or if it is empty: SQLite would take it for a new database,
    and delete the log beside it.

    It is not opened: when a process closes a file, by whatever descriptor, it loses all its locks on it,
    SQLite's too (https://www.sqlite.org/howtocorrupt.html section 2.2). Another program that then opens the
    journal of a living run removes its log when it closes. So nothing but SQLite ever opens the journal in
    the process that writes it.
    """
    try:
        if path.stat().st_size == 0:
            raise damaged(path, "it is empty")
    except OSError as error:
        raise cannot_open(path, error) from error


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raises JournalError if the file is another program's, or another asyncrl's."""
    if (found := _number(connection, "application_id")) != APPLICATION_ID:
        raise _foreign(path, f"is a SQLite database of another program (application_id {found:#x})")
    if (version := _number(connection, "user_version")) != SCHEMA_VERSION:
        raise JournalError(
            f"{path} has schema version {version}, this asyncrl reads {SCHEMA_VERSION}",
            way_out="resume with the asyncrl that wrote it.",
        )


def check(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    """Raises JournalError as check_schema does, and if the file is damaged or another run's."""
    check_schema(connection, path)
    # Not quick_check: that would not see an index which hides a row. 100,000 groups take half a second,
    # against 0.3 s.
    wrong = [row[0] for row in connection.execute("PRAGMA integrity_check(3)") if row[0] != "ok"]
    if wrong:
        raise damaged(path, "; ".join(wrong).replace("\n", " "))
    owner = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    if owner is None:
        raise damaged(path, "it does not say which run it is of")
    if owner[0] != run_id:
        raise _foreign(path, f"is the journal of run {owner[0]}, this is run {run_id}")


def _foreign(path: Path, why: str) -> JournalError:
    return JournalError(
        f"{path} {why}",
        rule="a journal belongs to one run",
        way_out="move it elsewhere, or give this run another --run-dir.",
    )


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


# Finds a damaged write-ahead log: SQLite takes its whole part and drops the rest in silence.
# Layout: https://www.sqlite.org/fileformat2.html#the_write_ahead_log


_HEADER = struct.Struct(">8I")  # magic, format, page size, checkpoint number, two salts, two checksums
_FRAME = struct.Struct(">6I")  # page, pages of the database after a commit (else 0), two salts, two checksums


def commits_in(wal: Path) -> list[int]:
    """Numbers, from 1, of the frames that end a commit, whole or not, by what they say of themselves."""
    try:
        with wal.open("rb") as file:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return []
            _, _, page_size, _, *salts, _, _ = _HEADER.unpack(header)
            if not _is_whole(header):
                return (
                    [1, 2] if file.read(1) else []
                )  # SQLite will read nothing of the log, and it is not known what was in it
            frames = []
            while len(frame := file.read(_FRAME.size)) == _FRAME.size:
                frames.append(_FRAME.unpack(frame))
                file.seek(page_size, 1)
    except FileNotFoundError:
        return []
    return [number for number, frame in enumerate(frames, 1) if frame[1] and list(frame[2:4]) == salts]


def _is_whole(header: bytes) -> bool:
    """The header's own checksum."""
    words = struct.unpack(">6I" if header[3] & 1 else "<6I", header[:24])
    one = two = 0
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) % 2**32
        two = (two + second + one) % 2**32
    return (one, two) == struct.unpack(">2I", header[24:])


def check_wal(connection: sqlite3.Connection, path: Path, commits: list[int]) -> None:
    """Compare what SQLite took of the log with the commits that were in it (`commits_in`, before the file was
    opened).

    Raises JournalError if more than one is missing. The last one may be: a power cut tears the commit that
    was being written, of which no answer was given yet; no check can tell that from damage to it.
    """
    num_whole = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
    lost = [number for number in commits if number > max(0, num_whole)]
    if len(lost) > 1:
        raise damaged(
            f"{path.name}-wal of {path.parent}",
            f"after {max(0, num_whole)} whole frames there are {len(lost)} commits that do not read",
        )
