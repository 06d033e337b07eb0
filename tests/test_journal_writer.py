"""The writing thread: in order, all at once, never in the loop's way, and loud when it cannot write."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest
from journal_cases import admit, make_batch, make_partial, open_journal, tell_ready

from asyncrl.errors import JournalError
from asyncrl.journal import schema
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
        (record,) = (await journal.read_resume(0)).running
        assert record.partials[0][1] == 999
        await journal.aclose()

    asyncio.run(story())


def test_a_decision_that_is_refused_halfway_has_changed_nothing(tmp_path: Path) -> None:
    def half(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO publishes VALUES (9, 'd', 0.0)")
        raise JournalError("enough")

    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        with pytest.raises(JournalError, match="enough"):
            await asyncio.wrap_future(journal._writer.ask(half))
        journal.published_nowait(1, "d")
        await journal.aclose()

    asyncio.run(story())
    assert totals(tmp_path / "journal.sqlite").newest_published == 1


def test_each_commit_is_on_the_disk_when_it_returns(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        asked = journal._writer.ask(
            lambda connection: [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]
        )
        assert await asyncio.wrap_future(asked) == [2, "wal", 2]
        await journal.aclose()

    pragmas = ("synchronous", "journal_mode", "auto_vacuum")
    asyncio.run(story())


def test_a_file_that_another_program_holds_is_an_error_that_reaches_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "BUSY_S", 0.05)

    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        tell_ready(journal, 0)
        await journal.flush()
        watching = asyncio.create_task(journal.wait_failed())
        other = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        admit(journal, 1)
        with pytest.raises(JournalError, match=r"database is locked \(SQLITE_BUSY\)") as caught:
            await journal.batch_taken(make_batch(0, 0))
        assert "end the program that holds the file" in caught.value.way_out
        with pytest.raises(JournalError, match="locked"):
            await watching
        other.close()
        with pytest.raises(JournalError, match="locked"):
            await journal.flush()
        with pytest.raises(JournalError, match="locked"):
            await journal.aclose()
        journal = open_journal(tmp_path / "journal.sqlite")
        assert len((await journal.read_resume(0)).ready) == 1
        await journal.aclose()

    asyncio.run(story())


def test_a_page_that_is_damaged_while_the_run_goes_on_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")

        def damage(connection: sqlite3.Connection) -> None:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("UPDATE sqlite_schema SET rootpage = 9999 WHERE name = 'events'")
            connection.execute("PRAGMA writable_schema = RESET")

        journal._writer.put(damage)
        journal.event_nowait("more", {})
        with pytest.raises(JournalError, match="is damaged") as caught:
            await journal.flush()
        assert "move journal.sqlite" in caught.value.way_out
        with pytest.raises(JournalError):
            await journal.aclose()

    asyncio.run(story())


def test_closing_writes_what_waits_and_then_nothing_can_be_told(tmp_path: Path) -> None:
    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        tell_ready(journal, 0)
        await journal.aclose()
        await journal.aclose()
        with pytest.raises(JournalError, match="is closed"):
            admit(journal, 1)
        with pytest.raises(JournalError, match="is closed"):
            await journal.flush()
        journal = open_journal(tmp_path / "journal.sqlite")
        assert len((await journal.read_resume(0)).ready) == 1
        await journal.aclose()

    asyncio.run(story())
