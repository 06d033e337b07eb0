"""The file: made whole, and refused with a clear word and a way out when it is damaged or not ours."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from journal_cases import (
    admit,
    load_batches,
    make_batch,
    make_group,
    make_partial,
    open_journal,
    same_group,
    tell_ready,
    with_journal,
)

from asyncrl.errors import JournalError
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import ResumeState
from asyncrl.journal.story import batch_story, events, group_story, totals
from asyncrl.messages.records import Group, GroupId

NUM_GROUPS = 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed journal: three batches of four groups, ready ones, running ones. Read only."""
    path = tmp_path_factory.mktemp("whole") / "journal.sqlite"

    async def story(journal: Journal) -> None:
        tell_ready(journal, *range(NUM_GROUPS), num_tokens=300)
        for version in range(3):
            groups = range(4 * version, 4 * version + 4)
            await journal.batch_taken(make_batch(version, *groups, num_tokens=300))
        for group_id in range(NUM_GROUPS, NUM_GROUPS + 4):
            admit(journal, group_id)
            journal.segment_nowait(GroupId(group_id), 0, 0, 0, make_partial(100))

    with_journal(path, story)
    return path


def read_all(path: Path) -> ResumeState:
    """What a resume finds, all its tokens compared with those that were told."""

    def is_right(group: Group) -> bool:
        return same_group(group, make_group(group.group_id, num_tokens=300))

    async def story() -> ResumeState:
        journal = open_journal(path)
        try:
            state = await journal.read_resume(0)
            assert all(is_right(group) for batch in load_batches(state) for group in batch.groups)
            assert all(is_right(group) for _, group in state.ready)
            assert all(group.partials[0] == (0, make_partial(100)) for group in state.running)
            return state
        finally:
            await journal.aclose()

    return asyncio.run(story())


def test_a_closed_journal_is_one_file_that_can_be_copied(whole: Path, tmp_path: Path) -> None:
    assert [path.name for path in whole.parent.iterdir()] == ["journal.sqlite"]
    shutil.copy(whole, tmp_path)
    state = read_all(tmp_path / "journal.sqlite")
    assert (state.next_version, len(state.ready), len(state.running)) == (3, NUM_GROUPS - 12, 4)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("unread page", "is damaged: "),
        ("half", "is damaged: "),
        ("empty", "is damaged: it is empty"),
        ("text", "is damaged: file is not a database"),
        ("folder", "cannot be used"),
    ],
)
def test_a_damaged_file_is_found_when_it_is_opened(
    whole: Path, tmp_path: Path, damage: str, why: str
) -> None:
    path, log = tmp_path / "journal.sqlite", tmp_path / "journal.sqlite-wal"
    content = bytearray(whole.read_bytes())
    if damage == "unread page":  # of a table that no resume reads: the check alone can find it
        connection = sqlite3.connect(whole)
        query = "SELECT rootpage FROM sqlite_schema WHERE name = 'checkpoints'"
        (page,) = connection.execute(query).fetchone()
        connection.close()
        content[4096 * (page - 1) : 4096 * page] = b"\x07" * 4096
    elif damage == "half":
        content = content[: len(content) // 2]
    elif damage == "empty":
        content = bytearray()
    elif damage == "text":
        content = bytearray(b"Dear reader, this is no database")
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(content)
    if damage == "empty":  # SQLite would take the journal for new, and delete the log
        log.write_bytes(b"the newest groups")
    with pytest.raises(JournalError) as caught:
        open_journal(path)
    assert why in str(caught.value)
    assert "Way out:" in str(caught.value)
    if damage == "folder":
        return
    assert path.read_bytes() == content
    assert damage != "empty" or log.read_bytes() == b"the newest groups"
    assert "move journal.sqlite* out of the run directory" in caught.value.way_out
    for file in tmp_path.glob("journal.sqlite*"):  # the way out, taken
        file.unlink()
    asyncio.run(open_journal(path).aclose())


def test_flipped_bytes_anywhere_are_an_error_or_change_nothing_that_a_run_goes_on_from(
    whole: Path, tmp_path: Path
) -> None:
    content, draw, found = whole.read_bytes(), random.Random(0), 0
    for number in range(40):
        path = tmp_path / str(number) / "journal.sqlite"
        path.parent.mkdir()
        at = draw.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ draw.randrange(1, 256)]) + content[at + 1 :])
        try:
            state = read_all(path)  # asserts that all tokens are the right ones
        except JournalError:
            found += 1
        else:
            assert [ticket.group_id for ticket, _ in state.ready] == list(range(12, NUM_GROUPS))
            assert len(state.running) == 4
            assert (state.next_version, state.requeued, state.num_drawn) == (3, {}, NUM_GROUPS + 4)
    assert found >= 15


def locks_on(path: Path) -> list[str]:
    """How this process has locked the file (READ, WRITE); closing another descriptor of it would end them."""
    found = path.stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return [
        mode
        for _, kind, _, mode, pid, where, *_ in lines
        if (kind, pid, where) == ("POSIX", str(os.getpid()), place)
    ]


def test_nothing_that_reads_beside_the_writer_takes_its_lock_from_it(tmp_path: Path) -> None:
    """What closes the file by its own descriptor takes all locks of the process, and another program's look
    then removes the log.
    """
    path = tmp_path / "journal.sqlite"

    async def story(journal: Journal) -> None:
        tell_ready(journal, 0, 1)
        await journal.batch_taken(make_batch(0, 0, 1))
        state = await journal.read_resume(0)
        for look in (state.load_batch, *(lambda _, f=f: f(path) for f in (totals, events))):  # type: ignore[misc]
            look(0)
            assert locks_on(path) == ["READ"]
        assert (group_story(path, 0), batch_story(path, 0)) != (None, None)
        assert locks_on(path) == ["READ"]
        other = sqlite3.connect(path)  # as Python's sqlite3 and SQLite's own shell do, for writing
        assert other.execute("SELECT count(*) FROM groups").fetchone() == (2,)
        other.close()
        assert path.with_name("journal.sqlite-wal").exists()

    with_journal(path, story)
    assert locks_on(path) == []


def test_a_new_journal_is_not_made_beside_the_log_of_an_old_one(tmp_path: Path) -> None:
    """SQLite would replay it: where journal.sqlite alone was moved away, the old groups would come back."""
    path, log = tmp_path / "journal.sqlite", tmp_path / "journal.sqlite-wal"
    log.write_bytes(b"the newest groups")
    with pytest.raises(JournalError, match=r"-wal without the journal that it belongs to") as caught:
        open_journal(path)
    assert f"move {log} there too" in caught.value.way_out
    assert (path.exists(), log.read_bytes()) == (False, b"the newest groups")
    log.rename(tmp_path / "elsewhere")  # the way out, taken
    asyncio.run(open_journal(path).aclose())


def test_the_journal_of_an_ended_run_can_be_read_where_nothing_may_be_written(whole: Path) -> None:
    is_superuser = os.geteuid() == 0  # whom rights do not bind
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal.sqlite"
        shutil.copyfile(whole, path)
        path.parent.chmod(0o555)
        if is_superuser:
            os.seteuid(65534)
        try:
            found = totals(path)
        finally:
            if is_superuser:
                os.seteuid(0)
            path.parent.chmod(0o755)
        assert [entry.name for entry in path.parent.iterdir()] == ["journal.sqlite"]
    assert found == totals(whole)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("PRAGMA application_id = 7", "is a SQLite database of another program"),
        ("PRAGMA user_version = 3", "has schema version 3, this asyncrl reads 4"),
        ("UPDATE meta SET value = 'another' WHERE key = 'run_id'", "is the journal of run another, this is"),
    ],
)
def test_a_file_of_another_program_schema_or_run_is_refused_and_left_alone(
    whole: Path, tmp_path: Path, change: str, why: str
) -> None:
    path = tmp_path / "journal.sqlite"
    shutil.copy(whole, path)
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    connection.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match=why):
        open_journal(path)
    assert path.read_bytes() == before


def test_a_branch_that_is_missing_in_the_file_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def story(journal: Journal) -> None:
        tell_ready(journal, 0, branches=3)

    with_journal(path, story)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM trajectories WHERE branch = 1")
    connection.close()
    with pytest.raises(JournalError, match="g0/r1 has branch 2 after 1 others"):
        read_all(path)
