"""Processes that die, or are not alone, or have no disk left: what they were told is durable is there, and
the file is whole.
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
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_cases import make_group, make_prompt, open_journal, same_group
from journal_victim import NUM_BRANCHES

from asyncrl.errors import JournalError
from asyncrl.files import RunLock
from asyncrl.journal.read import ResumeState

TESTS = Path(__file__).parent


@contextlib.contextmanager
def victim(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The writing process; killed at the end if it still runs."""
    command = [sys.executable, str(TESTS / "journal_victim.py"), str(path), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def check(path: Path, answers: list[str]) -> ResumeState:
    """Open, read, compare with what the dead process was told."""

    async def story() -> ResumeState:
        journal = open_journal(path)
        try:
            state = await journal.read_resume(0)
        finally:
            await journal.aclose()
        for batch in state.batches():
            assert all(
                same_group(group, make_group(group.group_id, branches=NUM_BRANCHES)) for group in batch.groups
            )
        return state

    state = asyncio.run(story())
    told = [answer.split() for answer in answers]
    assert state.next_version > max((int(what[1]) for what in told if what[0] == "taken"), default=-1)
    assert state.next_group_id > max((int(what[1]) for what in told if what[0] == "flushed"), default=-1)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        taken = connection.execute("SELECT group_id FROM batch_groups").fetchall()
        assert taken == [*dict.fromkeys(taken)]
        assert (
            sorted(taken)
            == connection.execute("SELECT group_id FROM groups WHERE state = 'taken' ORDER BY 1").fetchall()
        )
        order = connection.execute("SELECT group_id FROM batch_groups ORDER BY version, position").fetchall()
        assert order == sorted(order), "groups were taken in the order of their admission"
    connection.close()
    groups = [ticket.group_id for ticket, _ in state.ready] + [
        record.ticket.group_id for record in state.running
    ]
    assert len({*groups, *(group_id for (group_id,) in taken)}) == len(groups) + len(taken)
    assert all(
        same_group(group, make_group(group.group_id, branches=NUM_BRANCHES)) for _, group in state.ready
    )
    assert all(record.prompt == make_prompt(record.ticket.group_id) for record in state.running)
    return state


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_all_that_was_durable(tmp_path: Path) -> None:
    path, draw, next_version = tmp_path / "journal.sqlite", random.Random(0), 0
    for _ in range(10):
        answers = []
        with victim(path) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(1, 60)):
                answers.append(process.stdout.readline())
            until_s = time.monotonic() + draw.uniform(0, 0.02)
            while time.monotonic() < until_s:  # not at an answer, but anywhere
                pass
            process.send_signal(signal.SIGKILL)
            answers += [
                line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")
            ]
        assert process.returncode == -signal.SIGKILL
        state = check(path, answers)
        assert state.next_version >= next_version
        next_version = state.next_version
    assert next_version > 20


def test_a_stranger_who_looks_into_the_journal_of_a_living_run_takes_nothing_from_it(tmp_path: Path) -> None:
    """Python's sqlite3 and SQLite's own shell open for writing, and who closes last removes the log: the
    run's lock says who is last.
    """
    path, answers = tmp_path / "journal.sqlite", []
    with victim(path) as process:
        assert process.stdout is not None
        answers += [process.stdout.readline() for _ in range(5)]
        connection = sqlite3.connect(path)
        assert connection.execute("SELECT count(*) FROM groups").fetchone() > (0,)
        connection.close()
        assert path.with_name("journal.sqlite-wal").exists()
        answers += [process.stdout.readline() for _ in range(10)]
        process.send_signal(signal.SIGKILL)
    check(path, answers)


@pytest.mark.slow
def test_a_second_process_is_refused_with_the_pid_of_the_first_until_that_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with victim(path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open 0\n"
        with pytest.raises(JournalError, match=f"process {process.pid} writes into") as caught:
            open_journal(path)
        assert f"kill {process.pid}" in caught.value.way_out
        with pytest.raises(JournalError, match=f"process {process.pid} writes into"):
            RunLock(tmp_path / "run.lock").acquire()
        process.kill()
        process.wait()
        asyncio.run(open_journal(path).aclose())


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_told_and_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with victim(path, "2000000") as process:
        output, _ = process.communicate(timeout=100)
    *answers, _, way_out = output.splitlines()
    assert "cannot be written" in output
    assert "SQLITE_" in output
    assert "then resume: all that was written before is whole" in way_out
    assert check(path, [line for line in answers if line.startswith(("taken", "flushed"))]).next_version > 10


@contextlib.contextmanager
def open_lock(folder: Path) -> Iterator[RunLock]:
    lock = RunLock(folder / "run.lock").acquire()
    yield lock
    lock.release()


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run.lock").acquire()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as child:
        lock.release()
        with open_lock(tmp_path):
            pass
        child.communicate(b"\n")
