"""The writing thread: in order, all at once, never in the loop's way, loud when it cannot write."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import sqlite3
import subprocess
import sys
import threading
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
from asyncrl.files import RunLock
from asyncrl.journal import schema
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import read_resume
from asyncrl.journal.story import totals
from asyncrl.messages.records import GroupId


def test_the_loop_goes_on_while_the_disk_is_slow_and_the_batch_alone_waits(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        tell_ready(journal, 0)
        admit(journal, 1)
        await journal.flush()
        is_slow, may_go = threading.Event(), threading.Event()

        def slow_disk(_: sqlite3.Connection) -> None:
            is_slow.set()
            may_go.wait()

        journal._writer.put(slow_disk)
        await asyncio.to_thread(is_slow.wait)
        taking = asyncio.create_task(journal.batch_taken(make_batch(0, 0)))
        for turn in range(1000):
            journal.segment_nowait(GroupId(1), 0, 0, turn, make_partial(turn % 7))
            await asyncio.sleep(0)
        assert not taking.done()
        num_commits = journal._writer.num_commits
        may_go.set()
        assert await taking == "taken"
        await journal.flush()
        assert journal._writer.num_commits - num_commits <= 3, "one commit takes all that waits"
        await journal.aclose()
        with pytest.raises(JournalError, match="is closed"):
            admit(journal, 2)

    asyncio.run(story())
    (group,) = read_resume(tmp_path / "journal.sqlite", 0).running
    assert len(group.partials[0][1].token_ids) == 999 % 7


def test_a_decision_refused_halfway_has_changed_nothing_and_commits_are_on_the_disk(tmp_path: Path) -> None:
    def half(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO publishes VALUES (9, 'd', 0.0)")
        raise JournalError("enough")

    async def story(journal: Journal) -> None:
        with pytest.raises(JournalError, match="enough"):
            await asyncio.wrap_future(journal._writer.ask(half))
        journal.published_nowait(1, "d")
        pragma = journal._writer.ask(lambda connection: connection.execute("PRAGMA synchronous").fetchone())
        assert await asyncio.wrap_future(pragma) == (2,), "FULL: a commit is on the disk when it returns"

    assert totals(with_journal(tmp_path / "journal.sqlite", story)).newest_published == 1


def hold(path: Path) -> sqlite3.Connection:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other


def damage(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_schema SET rootpage = 9999 WHERE name = 'events'")
    connection.execute("PRAGMA writable_schema = RESET")


@pytest.mark.parametrize(
    ("fault", "why", "way_out"),
    [
        ("held", r"database is locked \(SQLITE_BUSY\)", "end the program that holds the file"),
        ("damaged", "is damaged", "move journal.sqlite"),
    ],
)
def test_a_file_that_cannot_be_written_is_an_error_that_reaches_every_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, why: str, way_out: str
) -> None:
    monkeypatch.setattr(schema, "BUSY_S", 0.05)
    path = tmp_path / "journal.sqlite"

    async def story() -> None:
        journal = open_journal(path)
        tell_ready(journal, 0)
        await journal.flush()
        watching = asyncio.create_task(journal.wait_failed())
        with contextlib.closing(hold(path)) if fault == "held" else contextlib.nullcontext():
            if fault == "damaged":
                journal._writer.put(damage)
            journal.event_nowait("more", {})
            with pytest.raises(JournalError, match=why) as caught:
                await journal.batch_taken(make_batch(0, 0))
        assert way_out in caught.value.way_out
        for refused in (watching, journal.flush(), journal.aclose()):
            with pytest.raises(JournalError, match=why):
                await refused

    asyncio.run(story())
    assert len(read_resume(path, 0).ready) == 1


def test_a_full_disk_is_told_and_what_was_written_stays_whole(tmp_path: Path) -> None:
    path, (soft, hard) = tmp_path / "journal.sqlite", resource.getrlimit(resource.RLIMIT_FSIZE)
    taken: list[int] = []

    async def fill(journal: Journal) -> None:
        for version in itertools.count():
            tell_ready(journal, version, num_tokens=300)
            await journal.batch_taken(make_batch(version, version, num_tokens=300))
            taken.append(version)

    async def story() -> None:
        journal = open_journal(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
        try:
            with pytest.raises(JournalError, match="SQLITE_") as caught:
                await fill(journal)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "then resume: all that was written before is whole" in caught.value.way_out
        with pytest.raises(JournalError):
            await journal.aclose()

    asyncio.run(story())
    batches = load_batches(read_resume(path, 0))
    assert len(batches) == len(taken) > 10
    for version, batch in enumerate(batches):
        assert same_group(batch.groups[0], make_group(version, num_tokens=300))


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run.lock").acquire()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as child:
        lock.release()
        RunLock(tmp_path / "run.lock").acquire().release()
        child.communicate(b"\n")
