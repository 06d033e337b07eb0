"""Finds a damaged write-ahead log: SQLite takes its whole part and drops the rest in silence.

Layout: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path

_HEADER = struct.Struct(">8I")
"""Magic, format, page size, checkpoint number, two salts, two checksums."""
_FRAME = struct.Struct(">6I")
"""Page, pages of the database after a commit (else 0), two salts, two checksums."""


def commits_in(wal: Path) -> list[int]:
    """Numbers, from 1, of the frames that end a commit, whole or not, by what they say of themselves."""
    if not wal.exists():
        return []
    with wal.open("rb") as file:
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


def lost_commits(connection: sqlite3.Connection, commits: list[int]) -> str:
    """A sentence on the commits of the log that SQLite did not take, out of the `commits_in` it before the
    file was opened; '' if it took all.

    The last commit may be missing: a power cut tears the one that was being written. No caller had an answer
    for it yet, and no check can tell such a tear from later damage.
    """
    num_whole = max(0, connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])
    lost = [number for number in commits if number > num_whole]
    return (
        f"after {num_whole} whole frames there are {len(lost)} commits that do not read" if lost[1:] else ""
    )
