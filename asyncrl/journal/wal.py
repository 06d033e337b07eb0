"""Finds a damaged write-ahead log. SQLite takes its whole part and drops the rest in silence; knows nothing of what is in it.

Layout: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path

from asyncrl.journal.refusals import damaged

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
                return [1, 2] if file.read(1) else []  # SQLite will read nothing of the log, and it is not known what was in it
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
    """Compare what SQLite took of the log with the commits that were in it (`commits_in`, before the file was opened).

    Raises JournalError if more than one is missing. The last one may be: a power cut tears the commit that was being written,
    which nobody had an answer of yet; no check can tell that from damage to it.
    """
    num_whole = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
    lost = [number for number in commits if number > max(0, num_whole)]
    if len(lost) > 1:
        raise damaged(
            f"{path.name}-wal of {path.parent}", f"after {max(0, num_whole)} whole frames there are {len(lost)} commits that do not read"
        )
