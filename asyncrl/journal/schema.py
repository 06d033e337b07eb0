"""The tables of journal.sqlite, and how the file is made, opened and checked.

Times are seconds since 1970, only for people to read. The order of events is that of ids and rows, so a clock
may jump.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

from asyncrl.errors import JournalError
from asyncrl.files import sync

APPLICATION_ID = 0x6172_6C6A  # "arlj"
SCHEMA_VERSION = 5
BUSY_S = 10.0
"""Time that a write waits for another program that holds the file, before it is an error."""
DISK_ERRORS = (sqlite3.Error, OSError, UnicodeDecodeError)
"""What reading and writing raise: the last one if a flipped byte in a name makes SQLite's message no text."""
MOVE_ASIDE = (
    "copy journal.sqlite back (with its -wal file) from where it is whole; or move journal.sqlite* out of "
    "the run directory and resume: the run then goes on from its newest whole checkpoint alone."
)

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

-- messages: of the prompt; NULL once the tokens of the group are deleted. num_rollouts .. reward_sum: of its
-- finished rollouts. lost_tokens: sampled tokens that are in no trajectory. requeued: with this
-- num_handed_back the prompt of a group that has ended is sampled again; NULL: it is not.
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL, num_handed_back INTEGER NOT NULL,
    start_version INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'ready', 'taken', 'failed', 'filtered', 'handed_back')),
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


def cannot_use(path: Path, error: Exception) -> JournalError:
    """SQLite or the system refuses."""
    name = getattr(error, "sqlite_errorname", "")
    if isinstance(error, UnicodeDecodeError) or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return damaged(path, str(error))
    way_out = "check its disk and its permissions"
    if name in ("SQLITE_FULL", "SQLITE_IOERR_WRITE"):
        way_out = "free space on the disk of the run directory"
    elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        way_out = "end the program that holds the file open"
    return JournalError(
        f"{path} cannot be used: {error}{name and f' ({name})'}",
        rule="nothing is done that is not written down first",
        way_out=f"{way_out}, then resume: all that was written before is whole.",
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
            rule=f"{path.name} and its -wal file are one journal",
            way_out=f"put {path.name} back; or, if it was moved elsewhere, move {log} there too.",
        )
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)
        with closing(sqlite3.connect(beside, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.executescript(
                f"BEGIN IMMEDIATE; {TABLES}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
            connection.execute("INSERT INTO meta VALUES ('run_id', ?)", (run_id,))
            connection.execute("PRAGMA journal_mode = WAL")
        sync(beside)
        beside.rename(path)
        sync(path.parent)
    except DISK_ERRORS as error:
        beside.unlink(missing_ok=True)
        raise cannot_use(path, error) from error


def connect(path: Path, *, is_read_only: bool) -> sqlite3.Connection:
    """A connection to a journal that exists, which any one thread at a time may use. Raises DISK_ERRORS, and
    JournalError if the file is empty, another program's, or another asyncrl's.

    Nothing but SQLite opens the file: a process that closes it, by whatever descriptor, loses all its locks
    on it, SQLite's too (https://www.sqlite.org/howtocorrupt.html section 2.2), and another program that then
    opens the journal of a living run removes its log.
    """
    if path.stat().st_size == 0:
        raise damaged(path, "it is empty")  # SQLite would take it for new, and delete the log beside it
    uri = f"{path.resolve().as_uri()}?mode={'ro' if is_read_only else 'rw'}"
    is_ended = not path.with_name(f"{path.name}-wal").exists()
    if is_read_only and is_ended and not os.access(path.parent, os.W_OK, effective_ids=True):
        uri += "&immutable=1"  # a reader has to make files beside a journal that is written
    connection = sqlite3.connect(uri, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True)
    try:
        application_id, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if application_id != APPLICATION_ID:
            raise _foreign(path, f"is a SQLite database of another program ({application_id=:#x})")
        if version != SCHEMA_VERSION:
            raise JournalError(
                f"{path} has schema version {version}, this asyncrl reads {SCHEMA_VERSION}",
                way_out="resume with the asyncrl that wrote it.",
            )
        if not is_read_only:
            connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
    except BaseException:
        connection.close()
        raise
    return connection


def open_to_write(path: Path, run_id: str) -> sqlite3.Connection:
    """A connection to the journal of this run, which was found whole, or made. Raises JournalError, with the
    file and its log as they were.
    """
    if not path.exists():
        create(path, run_id)
    log = path.with_name(f"{path.name}-wal")
    try:
        commits = _commits_in(log)
        with closing(connect(path, is_read_only=True)) as connection:  # closed last: a refused log stays
            # quick_check would not see an index that hides a row
            rows = connection.execute("PRAGMA integrity_check(3)").fetchall()
            if wrong := [row[0] for row in rows if row[0] != "ok"]:
                raise damaged(path, "; ".join(wrong).replace("\n", " "))
            owner = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
            if owner != (run_id,):
                raise _foreign(path, f"is the journal of run {owner and owner[0]}, this is run {run_id}")
            writing = connect(path, is_read_only=False)
            num_whole = max(0, writing.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])
            lost = [number for number in commits if number > num_whole]
            if len(lost) > 1:  # one a power cut tears, in the making: no caller had an answer for it yet
                writing.close()
                raise damaged(
                    log, f"after {num_whole} whole frames there are {len(lost)} commits that do not read"
                )
            return writing
    except DISK_ERRORS as error:
        raise cannot_use(path, error) from error


def _foreign(path: Path, why: str) -> JournalError:
    return JournalError(
        f"{path} {why}",
        rule="a journal belongs to one run",
        way_out="move it elsewhere, or give this run another --run-dir.",
    )


# ---- its write-ahead log: SQLite takes the whole part of a damaged one, and drops the rest in silence
# (layout: https://www.sqlite.org/fileformat2.html#the_write_ahead_log)

_HEADER = struct.Struct(">8I")
"""Magic, format, page size, checkpoint number, two salts, two checksums."""
_FRAME = struct.Struct(">6I")
"""Page, pages of the database after a commit (else 0), two salts, two checksums."""


def _commits_in(log: Path) -> list[int]:
    """Numbers, from 1, of the frames that end a commit, whole or not, by what they say of themselves."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return []
        _, _, page_size, _, *salts, _, _ = _HEADER.unpack(header)
        if not _is_whole(header):  # SQLite will read nothing of the log, and what was in it is not known
            return [1, 2] if file.read(1) else []
        frames = []
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            frames.append(_FRAME.unpack(frame))
            file.seek(page_size, 1)
    return [number for number, frame in enumerate(frames, 1) if frame[1] and list(frame[2:4]) == salts]


def _is_whole(header: bytes) -> bool:
    """The header's own checksum."""
    words = struct.unpack(">6I" if header[3] & 1 else "<6I", header[:24])
    one = two = 0
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) % 2**32
        two = (two + second + one) % 2**32
    return (one, two) == struct.unpack(">2I", header[24:])
