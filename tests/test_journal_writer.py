"""The writing thread: in order, all at once, never in the loop's way, loud when it cannot write; and
processes that are killed while they write.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
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
)
from journal_victim import NUM_BRANCHES

from asyncrl.errors import JournalError
from asyncrl.files import RunLock
from asyncrl.journal import schema
from asyncrl.journal.read import ResumeState, read_resume
from asyncrl.journal.story import totals
from asyncrl.messages.records import GroupId

TESTS = Path(__file__).parent


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


def test_a_decision_that_is_refused_halfway_has_changed_nothing_and_commits_are_on_the_disk(
    tmp_path: Path,
) -> None:
    def half(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO publishes VALUES (9, 'd', 0.0)")
        raise JournalError("enough")

    async def story() -> None:
        journal = open_journal(tmp_path / "journal.sqlite")
        with pytest.raises(JournalError, match="enough"):
            await asyncio.wrap_future(journal._writer.ask(half))
        journal.published_nowait(1, "d")
        pragma = journal._writer.ask(lambda connection: connection.execute("PRAGMA synchronous").fetchone())
        assert await asyncio.wrap_future(pragma) == (2,), "FULL: a commit is on the disk when it returns"
        await journal.aclose()

    asyncio.run(story())
    assert totals(tmp_path / "journal.sqlite").newest_published == 1


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
        for refused in (lambda: watching, journal.flush, journal.aclose):
            with pytest.raises(JournalError, match=why):
                await refused()

    asyncio.run(story())
    assert len(read_resume(path, 0).ready) == 1


# ---- other processes


@contextlib.contextmanager
def victim(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The writing process; killed at the end if it still runs."""
    command = [sys.executable, str(TESTS / "journal_victim.py"), str(path), *arguments]
    env = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def check(path: Path, answers: list[str]) -> ResumeState:
    """Open, read, compare with what the dead process was told."""
    asyncio.run(open_journal(path).aclose())  # which checks the file
    state = read_resume(path, 0)
    groups = [group for _, group in state.ready]
    batches = load_batches(state)
    for group in (*groups, *(group for batch in batches for group in batch.groups)):
        assert same_group(group, make_group(group.group_id, branches=NUM_BRANCHES))
    told = [answer.split() for answer in answers]
    assert state.next_version > max((int(what[1]) for what in told if what[0] == "taken"), default=-1)
    assert state.next_group_id > max((int(what[1]) for what in told if what[0] == "flushed"), default=-1)
    taken = [group.group_id for batch in batches for group in batch.groups]
    assert taken == sorted(set(taken)), "each once, in the order of their admission"
    assert not {*taken} & {group.group_id for group in groups}
    return state


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_all_that_was_durable(tmp_path: Path) -> None:
    path, draw, next_version = tmp_path / "journal.sqlite", random.Random(0), 0
    for _ in range(10):
        with victim(path) as process:
            assert process.stdout is not None
            answers = [process.stdout.readline() for _ in range(draw.randrange(1, 60))]
            process.send_signal(signal.SIGKILL)  # while it writes on: it never waits for us
            lines = process.stdout.read().splitlines(keepends=True)
            answers += [line for line in lines if line.endswith("\n")]
        state = check(path, answers)
        assert state.next_version >= next_version
        next_version = state.next_version
    assert next_version > 20


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_told_and_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with victim(path, "2000000") as process:
        output, _ = process.communicate(timeout=100)
    *answers, _, way_out = output.splitlines()
    assert "SQLITE_" in output
    assert "then resume: all that was written before is whole" in way_out
    assert check(path, [line for line in answers if line.startswith(("taken", "flushed"))]).next_version > 10


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run.lock").acquire()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as child:
        lock.release()
        RunLock(tmp_path / "run.lock").acquire().release()
        child.communicate(b"\n")
