"""The file: made whole, brought up to date, and refused with a clear word and a way out when it is damaged or
not ours.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from journal_cases import admit, make_batch, make_group, make_partial, open_journal, same_group, tell_ready

from asyncrl.errors import JournalError
from asyncrl.journal.read import ResumeState
from asyncrl.journal.story import batch_story, events, group_story, totals
from asyncrl.messages.records import GroupId

NUM_GROUPS = 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed journal: three batches of four groups, ready ones, running ones. Read only."""
    path = tmp_path_factory.mktemp("whole") / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        tell_ready(journal, *range(NUM_GROUPS), num_tokens=300)
        for version in range(3):
            await journal.batch_taken(
                make_batch(version, *range(4 * version, 4 * version + 4), num_tokens=300)
            )
        for group_id in range(NUM_GROUPS, NUM_GROUPS + 4):
            admit(journal, group_id)
            journal.segment_nowait(GroupId(group_id), 0, 0, 0, make_partial(100))
        await journal.aclose()

    asyncio.run(story())
    return path


def read_all(path: Path) -> ResumeState:
    async def story() -> ResumeState:
        journal = open_journal(path)
        try:
            state = await journal.read_resume(0)
            for batch in state.batches():
                assert all(
                    same_group(group, make_group(group.group_id, num_tokens=300)) for group in batch.groups
                )
            assert all(
                same_group(group, make_group(group.group_id, num_tokens=300)) for _, group in state.ready
            )
            assert all(record.partials[0] == (0, 0, make_partial(100)) for record in state.running)
            return state
        finally:
            await journal.aclose()

    return asyncio.run(story())


def test_a_closed_journal_is_one_file_that_can_be_copied(whole: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in whole.parent.iterdir()) == ["journal.sqlite", "run.lock"]
    shutil.copy(whole, tmp_path)
    state = read_all(tmp_path / "journal.sqlite")
    assert (state.next_version, len(state.ready), len(state.running)) == (3, NUM_GROUPS - 12, 4)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("page", "is damaged: "),
        ("unread page", "is damaged: "),
        ("half", "is damaged: "),
        ("empty", "is damaged: it is empty"),
        ("text", "is damaged: file is not a database"),
        ("folder", "cannot be opened"),
    ],
)
def test_a_damaged_file_is_found_when_it_is_opened(
    whole: Path, tmp_path: Path, damage: str, why: str
) -> None:
    path = tmp_path / "journal.sqlite"
    content = bytearray(whole.read_bytes())
    if damage == "page":
        for page in range(1, len(content) // 4096):
            content[4096 * page : 4096 * page + 12] = b"\xff" * 12
    elif damage == "unread page":  # of a table that no resume reads: the check alone can find it
        with sqlite3.connect(whole) as connection:
            (page,) = connection.execute(
                "SELECT rootpage FROM sqlite_schema WHERE name = 'checkpoints'"
            ).fetchone()
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
    with pytest.raises(JournalError) as caught:
        open_journal(path)
    assert why in str(caught.value)
    assert "Way out:" in str(caught.value)
    if damage != "folder":
        assert "move journal.sqlite* out of the run directory" in caught.value.way_out
        for file in tmp_path.glob("journal.sqlite*"):  # the way out, taken
            file.unlink()
        asyncio.run(open_journal(path).aclose())


def test_flipped_bytes_anywhere_are_an_error_or_change_nothing_that_a_run_goes_on_from(
    whole: Path, tmp_path: Path
) -> None:
    content, draw = whole.read_bytes(), random.Random(0)
    found = harmless = 0
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
            harmless += 1
            assert [ticket.group_id for ticket, _ in state.ready] == list(range(12, NUM_GROUPS))
            assert [record.ticket.group_id for record in state.running] == list(
                range(NUM_GROUPS, NUM_GROUPS + 4)
            )
            assert (state.next_version, state.requeued, state.num_drawn) == (3, {}, NUM_GROUPS + 4)
        shutil.rmtree(path.parent)
    assert found >= 20, f"{found} found, {harmless} harmless"


def killed_copies(tmp_path: Path, *names: str) -> None:
    """Folders with what a process leaves that is killed after three commits, each of a ready group."""

    async def live() -> None:
        journal = open_journal(tmp_path / "a" / "journal.sqlite")
        for group_id in range(3):
            tell_ready(journal, group_id)
            await journal.flush()
        for name in names:
            shutil.copytree(tmp_path / "a", tmp_path / name)
        await journal.aclose()

    (tmp_path / "a").mkdir()
    asyncio.run(live())


@pytest.mark.parametrize("at", [2, 9, 17, 30, 32 + 5, 32 + 9, 32 + 24 + 100])
def test_a_damaged_write_ahead_log_is_found_though_sqlite_would_drop_it_in_silence(
    tmp_path: Path, at: int
) -> None:
    killed_copies(tmp_path, "b", "c")
    asyncio.run(open_journal(tmp_path / "b" / "journal.sqlite").aclose())
    log = tmp_path / "c" / "journal.sqlite-wal"
    content = bytearray(log.read_bytes())
    content[at] ^= 0x10
    log.write_bytes(content)
    for _ in range(2):  # refused at the second start too
        with pytest.raises(
            JournalError, match=r"sqlite-wal of .* is damaged: after 0 whole frames there are \d commits"
        ) as caught:
            open_journal(tmp_path / "c" / "journal.sqlite")
        assert log.read_bytes() == content, "what is left of the log stays where it is"
    assert "with its -wal file" in caught.value.way_out


def test_a_commit_that_a_power_cut_tore_is_no_damage(tmp_path: Path) -> None:
    killed_copies(tmp_path, "b")

    async def live() -> None:
        log = tmp_path / "b" / "journal.sqlite-wal"
        log.write_bytes(log.read_bytes()[:-3000])
        journal = open_journal(tmp_path / "b" / "journal.sqlite")
        assert [ticket.group_id for ticket, _ in (await journal.read_resume(0)).ready] == [0, 1]
        await journal.aclose()

    asyncio.run(live())


def locks_on(path: Path) -> list[str]:
    """How this process has locked the file (READ, WRITE); other descriptors of it than SQLite's would be the
    end of them.
    """
    found = path.stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return [
        mode
        for _, kind, _, mode, pid, where, *_ in lines
        if (kind, pid, where) == ("POSIX", str(os.getpid()), place)
    ]


def test_nothing_that_reads_beside_the_writer_takes_its_lock_from_it(tmp_path: Path) -> None:
    """What closes the file by its own descriptor takes all locks of the process, and a stranger's look then
    removes the log.
    """
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        tell_ready(journal, 0, 1)
        await journal.batch_taken(make_batch(0, 0, 1))
        assert locks_on(path) == ["READ"]
        state = await journal.read_resume(0)
        assert locks_on(path) == ["READ"]
        for look in (
            state.load_batch,
            lambda _: totals(path),
            lambda _: events(path),
            lambda _: group_story(path, 0),
        ):
            look(0)
            assert locks_on(path) == ["READ"]
        batch_story(path, 0)
        await journal.compact(0)
        with pytest.raises(JournalError, match="writes into"):
            open_journal(path)
        assert locks_on(path) == ["READ"]
        await journal.aclose()

    asyncio.run(story())
    assert locks_on(path) == []


def test_an_empty_file_is_not_looked_at_by_sqlite_which_would_delete_the_log(tmp_path: Path) -> None:
    path, log = tmp_path / "journal.sqlite", tmp_path / "journal.sqlite-wal"
    path.touch()
    log.write_bytes(b"the newest groups")
    for look in (totals, open_journal):
        with pytest.raises(JournalError, match="is damaged: it is empty"):
            look(path)
    assert log.read_bytes() == b"the newest groups"


def test_a_new_journal_is_not_made_beside_the_log_of_an_old_one(whole: Path, tmp_path: Path) -> None:
    """SQLite would replay it: who moved journal.sqlite alone away had the old groups back, or damage."""
    path, log = tmp_path / "journal.sqlite", tmp_path / "journal.sqlite-wal"
    log.write_bytes(b"the newest groups")
    with pytest.raises(
        JournalError, match=r"journal\.sqlite-wal without the journal that it belongs to"
    ) as caught:
        open_journal(path)
    assert f"move {log} there too" in caught.value.way_out
    assert (path.exists(), log.read_bytes()) == (False, b"the newest groups")
    log.rename(tmp_path / "elsewhere")  # the way out, taken
    asyncio.run(open_journal(path).aclose())


@contextmanager
def somebody_else() -> Iterator[None]:
    """Rights do not bind the superuser, whom tests may run as."""
    is_superuser = os.geteuid() == 0
    if is_superuser:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_superuser:
            os.seteuid(0)


def test_the_journal_of_an_ended_run_can_be_read_where_nothing_may_be_written(whole: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal.sqlite"
        shutil.copyfile(whole, path)
        path.parent.chmod(0o555)
        with somebody_else():
            found = totals(path)
            with pytest.raises(PermissionError):
                (path.parent / "anything").touch()
        path.parent.chmod(0o755)
        assert [entry.name for entry in path.parent.iterdir()] == ["journal.sqlite"]
    assert found == totals(whole)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("PRAGMA application_id = 7", "is a SQLite database of another program"),
        ("PRAGMA user_version = 1", "has schema version 1, this asyncrl reads 3"),
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
    for _ in range(2):  # and the lock was given back
        with pytest.raises(JournalError, match=why):
            open_journal(path)
    assert path.read_bytes() == before
