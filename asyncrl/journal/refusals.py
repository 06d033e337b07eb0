"""The sentences of every error that the journal raises about its file or about what it is told, each in one
place.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from asyncrl.errors import JournalError

_ASIDE = (
    "copy journal.sqlite back (with its -wal file) from where it is whole; or move journal.sqlite* out of "
    "the run directory and "
    "resume: the newest checkpoint is enough to go on, and what was generated after it is generated again."
)
_FULL = ("SQLITE_FULL", "SQLITE_IOERR_WRITE")
_BUG = "this is a bug in the room that told it."


SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What the sqlite3 module raises: if a flipped byte in a name makes SQLite's own message no text, then not an
Error of its own.
"""


def damaged(where: object, why: str) -> JournalError:
    """The file is not what was written."""
    return JournalError(
        f"{where} is damaged: {why}", rule="a run goes on from a whole journal alone", way_out=_ASIDE
    )


def log_left(log: Path) -> JournalError:
    """The journal was moved away, and its log was not."""
    journal = log.name.removesuffix("-wal")
    return JournalError(
        f"there is {log} without the journal that it belongs to",
        rule=f"{journal} and its -wal file are one journal: the log holds what was written last, and would "
        f"be replayed onto a new one",
        way_out=f"put {journal} back; or, if it was moved elsewhere, move {log} there too.",
    )


def begins_later(path: Path, version: int, checkpoint_version: int) -> JournalError:
    """The journal of a run that has lost its first one, with an older checkpoint than the one it went on
    from.
    """
    return JournalError(
        f"{path} begins at version {version}, and the newest whole checkpoint is of version "
        f"{checkpoint_version}",
        rule="a run goes on from a checkpoint with every batch since, and the batches in between were in a "
        "journal that is gone",
        way_out=_ASIDE,
    )


def deleted(path: Path, version: int) -> JournalError:
    """A batch that is to be trained again is older than what is kept."""
    return JournalError(
        f"the tokens of batch {version} were deleted from {path}",
        rule="with journal.keep=checkpoint they stay as long as a checkpoint before them",
        way_out="put a whole copy of a newer checkpoint back (damaged_step_N as step_N), or move "
        "journal.sqlite* out of the run "
        "directory: the run then goes on from its newest whole checkpoint alone.",
    )


def foreign(path: Path, why: str) -> JournalError:
    """The file is whole, but it is none of this run's."""
    return JournalError(
        f"{path} {why}",
        rule="a journal belongs to one run",
        way_out="move it elsewhere, or give this run another --run-dir.",
    )


def too_new(path: Path, version: int, known: int) -> JournalError:
    """Written by a later asyncrl."""
    return JournalError(
        f"{path} has schema version {version}, this asyncrl knows {known}",
        rule="older journals are brought up to date, newer ones cannot be read",
        way_out="resume with the asyncrl that wrote it, or a newer one.",
    )


def cannot_open(path: Path, error: Exception) -> JournalError:
    """SQLite or the system refuses."""
    if not isinstance(error, OSError | sqlite3.OperationalError):
        return damaged(path, str(error))
    is_full = getattr(error, "sqlite_errorname", "") in _FULL
    return JournalError(
        f"{path} cannot be opened: {error}",
        rule="a run writes its journal first",
        way_out="free space on its disk."
        if is_full
        else "see to its disk, its rights, and to other programs that hold it open.",
    )


def cannot_write(path: Path, error: Exception) -> JournalError:
    """What was decided cannot be made durable."""
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if isinstance(error, UnicodeDecodeError) or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return damaged(path, str(error))
    if name in _FULL:
        way_out = (
            "free space on the disk of the run directory, then resume: all that was written before is whole."
        )
    elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        way_out = "end the program that holds the file open for writing, then resume."
    else:
        way_out = "see to the disk of the run directory, then resume: all that was written before is whole."
    return JournalError(
        f"{path} cannot be written: {error} ({name})",
        rule="nothing is done that is not written down first, so the run ends",
        way_out=way_out,
    )


def broken(path: Path, error: Exception) -> JournalError:
    """Something that no check foresaw."""
    return JournalError(
        f"what is to go into {path} cannot be written: {type(error).__name__}: {error}",
        rule="nothing is dropped in silence, so the run ends",
        way_out=_BUG,
    )


def closed(path: Path) -> JournalError:
    """Told too late."""
    return JournalError(
        f"{path} is closed", rule="the journal is closed after everything that writes to it", way_out=_BUG
    )


def group_unknown(group_id: int, what: str) -> JournalError:
    """Never admitted."""
    return JournalError(
        f"{what} of group {group_id}, which was never admitted",
        rule="a group's life begins with its admission",
        way_out=_BUG,
    )


def admitted_twice(group_id: int, prompt_id: str, found: str) -> JournalError:
    """A number, or a prompt, is used again."""
    return JournalError(
        f"group {group_id} (prompt {prompt_id}) cannot be admitted: {found}",
        rule="a group_id is never used again, and a prompt has one group at a time",
        way_out=_BUG,
    )


def told_twice(group_id: int, sample_index: int) -> JournalError:
    """A rollout ended twice."""
    return JournalError(
        f"rollout g{group_id}/r{sample_index} has ended already",
        rule="a rollout ends once, finished or failed",
        way_out=_BUG,
    )


def not_one_rollout(group_id: int, places: list[tuple[int, int]]) -> JournalError:
    """No branch, a missing one, or those of several rollouts."""
    return JournalError(
        f"a rollout of group {group_id} has branches (sample_index, branch) {places}",
        rule="its branches are numbered from 0, and there is at least one",
        way_out=_BUG,
    )


def cannot_end(group_id: int, state: str, found: str) -> JournalError:
    """A group that does not run, or is not ready, ends."""
    return JournalError(
        f"group {group_id} cannot become {state}: it is {found}",
        rule="a running group becomes ready, failed, filtered or handed_back, and a ready one handed_back at "
        "most",
        way_out=_BUG,
    )


def not_consumable(version: int, found: list[str]) -> JournalError:
    """A batch with a group that is no longer, or not yet, to be had."""
    return JournalError(
        f"batch {version} cannot be taken: {'; '.join(found)}",
        rule="a group is trained on exactly once, and only when it is ready",
        way_out="do not train on this batch. Resume: the journal is whole, and knows which groups are ready.",
    )


def batch_differs(version: int, found: str) -> JournalError:
    """A version is made from one batch."""
    return JournalError(
        f"batch {version} cannot be taken: {found}",
        rule="a version is made from one batch, batches follow each other, and only the same one may be "
        "taken again",
        way_out="do not train on this batch. Resume: batches of the journal are trained again as they are.",
    )


def batch_unknown(version: int, what: str) -> JournalError:
    """Something is told of a batch that was never taken."""
    return JournalError(
        f"{what} of batch {version}, which was never taken",
        rule="a batch is taken, then trained on",
        way_out=_BUG,
    )
