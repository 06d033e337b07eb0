"""The journal's file: damage is refused with a way out, token records survive bit for
bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from journal_cases import (
    admit,
    asked,
    load_batches,
    make_batch,
    make_group,
    make_partial,
    open_journal,
    same_group,
    same_partial,
    same_trajectory,
    tell_ready,
    with_journal,
)

from asyncrl.base.errors import JournalError
from asyncrl.journal import schema
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import (
    ResumeState,
    batch_story,
    group_story,
    read_resume,
    run_story,
)
from asyncrl.journal.schema import decode_trajectory, encode_trajectory
from asyncrl.messages.records import (
    CallSpan,
    Credit,
    GroupId,
    PolicyCall,
    Trajectory,
    VersionSpan,
)
from asyncrl.messages.tokens import BEHAVIOUR, TEACHER, Tokens
from asyncrl.rollouts.tokenizer import HFChatTokenizer

NUM_GROUPS = 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed journal: three batches of four groups, ready ones, running ones. Read
    only.
    """
    path = tmp_path_factory.mktemp("whole") / "journal.sqlite"

    async def story(journal: Journal) -> None:
        tell_ready(journal, *range(NUM_GROUPS), num_tokens=300)
        for version in range(3):
            groups = range(4 * version, 4 * version + 4)
            await journal.add_batch(make_batch(version, *groups, num_tokens=300))
        for group_id in range(NUM_GROUPS, NUM_GROUPS + 4):
            admit(journal, group_id)
            journal.add_segment_nowait(GroupId(group_id), 0, 0, make_partial(100))
        journal.add_push_nowait(1, "digest-7")

    return with_journal(path, story)


def check(path: Path) -> None:
    asyncio.run(open_journal(path).aclose())


def query(path: Path, statement: str) -> Any:
    """Run a statement in a second connection and return its first row."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement).fetchone()


def read_all(path: Path) -> ResumeState:
    """Read what a resume finds and compare all its tokens."""
    check(path)
    state = read_resume(path, 0)
    groups = [group for batch in load_batches(state) for group in batch.groups]
    for group in (*groups, *(group for _, group in state.ready)):
        assert same_group(group, make_group(group.group_id, num_tokens=300))
    for group in state.running:
        attempt, partial = group.partials[0]
        assert attempt == 0
        assert same_partial(partial, make_partial(100))
    return state


def unread_page(content: bytes) -> bytes:
    """Damage a table that no resume reads: only the check finds it."""
    at = content.index(b"digest-7") // 4096 * 4096
    return content[:at] + b"\x07" * 4096 + content[at + 4096 :]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (unread_page, "is damaged: "),
        (lambda content: content[: len(content) // 2], "is damaged: "),
        (lambda _: b"", "is damaged: it is empty"),
        (
            lambda _: b"Dear reader, this is no database",
            "is damaged: file is not a database",
        ),
        ("PRAGMA user_version = 4", "it has schema version 4, and 13 is read"),
        (
            "UPDATE meta SET value = 'another' WHERE key = 'run_id'",
            "is the journal of run another, this is",
        ),
    ],
)
def test_damaged_or_foreign_file_is_refused_and_kept(
    whole: Path, tmp_path: Path, damage: Callable[[bytes], bytes] | str, why: str
) -> None:
    path, log = tmp_path / "journal.sqlite", tmp_path / "journal.sqlite-wal"
    shutil.copy(whole, path)
    if isinstance(damage, str):
        query(path, damage)
    else:
        path.write_bytes(damage(whole.read_bytes()))
    content = path.read_bytes()
    if not content:  # SQLite would take the journal for new, and delete the log
        log.write_bytes(b"the newest groups")
    with pytest.raises(JournalError, match=why):
        open_journal(path)
    assert path.read_bytes() == content
    assert content or log.read_bytes() == b"the newest groups"


def test_flipped_bytes_are_an_error_or_change_nothing(
    whole: Path, tmp_path: Path
) -> None:
    content, draw, found = whole.read_bytes(), random.Random(0), 0
    for number in range(40):
        path = tmp_path / str(number) / "journal.sqlite"
        path.parent.mkdir()
        at = draw.randrange(len(content))
        path.write_bytes(
            content[:at]
            + bytes([content[at] ^ draw.randrange(1, 256)])
            + content[at + 1 :]
        )
        try:
            state = read_all(path)  # asserts that all tokens are the right ones
        except JournalError:
            found += 1
        else:
            assert [ticket.group_id for ticket, _ in state.ready] == list(
                range(12, NUM_GROUPS)
            )
            assert len(state.running) == 4
            assert (state.next_version, state.requeued, state.num_drawn) == (
                3,
                {},
                NUM_GROUPS + 4,
            )
    assert found >= 15


def locks_on(path: Path) -> list[str]:
    """Return the locks of this process on the file: READ, WRITE."""
    found = path.stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    mine = ["POSIX", str(os.getpid()), place]
    return [line[3] for line in lines if [line[1], *line[4:6]] == mine]


def test_no_reader_takes_the_lock_of_the_writer(tmp_path: Path) -> None:
    """Closing another descriptor of the file would end all locks of the process."""
    path = tmp_path / "journal.sqlite"

    async def story(journal: Journal) -> None:
        tell_ready(journal, 0, 1)
        await journal.add_batch(make_batch(0, 0, 1))
        (await journal.read_resume(0)).load_batch(0)
        assert None not in (
            asked(path, group_story, 0),
            asked(path, batch_story, 0),
            asked(path, run_story),
        )
        assert locks_on(path) == ["READ"]
        assert query(path, "SELECT count(*) FROM groups") == (2,), (
            "by another program, opened for writing"
        )
        assert path.with_name("journal.sqlite-wal").exists()

    with_journal(path, story)
    assert locks_on(path) == []


@pytest.mark.parametrize("at", [2, 17, 32 + 5, 32 + 24 + 100])
def test_damaged_log_is_refused_and_a_torn_one_accepted(
    tmp_path: Path, at: int
) -> None:
    path = tmp_path / "a" / "journal.sqlite"
    copy = tmp_path / "killed" / "journal.sqlite"

    async def story(journal: Journal) -> None:
        for group_id in range(3):
            tell_ready(journal, group_id)
            await journal.flush()
        shutil.copytree(path.parent, copy.parent)

    path.parent.mkdir()
    with_journal(path, story)
    log = copy.with_name("journal.sqlite-wal")
    whole = log.read_bytes()
    damaged = bytearray(whole)
    damaged[at] ^= 0x10
    log.write_bytes(damaged)
    for _ in range(2):  # at the second start too
        with pytest.raises(
            JournalError, match=r"wal is damaged: \d commits after 0 whole frames"
        ):
            open_journal(copy)
        assert log.read_bytes() == damaged, "the log stays unchanged"
    log.write_bytes(whole[:-3000])
    check(copy)
    assert [ticket.group_id for ticket, _ in read_resume(copy, 0).ready] == [0, 1]


def test_new_journal_is_not_made_beside_an_old_log(tmp_path: Path) -> None:
    """SQLite would replay the log and bring the old groups back."""
    path, log = tmp_path / "journal.sqlite", tmp_path / "journal.sqlite-wal"
    log.write_bytes(b"the newest groups")
    with pytest.raises(
        JournalError, match=r"-wal exists without its journal"
    ) as caught:
        open_journal(path)
    assert f"move {log} to where the journal is" in caught.value.way_out
    assert (path.exists(), log.read_bytes()) == (False, b"the newest groups")
    log.rename(tmp_path / "elsewhere")  # the way out, taken
    check(path)


def test_ended_journal_can_be_read_where_nothing_is_written(whole: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal.sqlite"
        shutil.copyfile(whole, path)
        path.parent.chmod(0o555)
        os.seteuid(os.getuid() or 65534)  # rights do not bind a superuser
        try:
            found = asked(path, run_story)
        finally:
            os.seteuid(os.getuid())
            path.parent.chmod(0o755)
        assert [entry.name for entry in path.parent.iterdir()] == ["journal.sqlite"]
    assert found == asked(whole, run_story)


# ---- records of tokens

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
SPANS = st.lists(
    st.builds(VersionSpan, *[st.integers(0, 2**31 - 1)] * 3, st.integers(-1, 99)),
    max_size=4,
)
NUMBERS = st.floats(-2, 2)
CALLS = st.builds(
    CallSpan,
    st.integers(0, 50),
    st.integers(0, 50),
    st.text(),
)
CREDITS = st.builds(
    Credit,
    st.integers(0, 50),
    st.integers(0, 50),
    NUMBERS,
    st.integers(0, 9),
    st.text(),
)
POLICY_CALLS = st.builds(
    PolicyCall,
    st.integers(0, 50),
    st.integers(0, 50),
    st.text(),
    NUMBERS,
    NUMBERS,
    st.text(),
    st.lists(st.tuples(st.text(), st.text()), max_size=2).map(tuple),
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    num_tokens = draw(st.integers(0, 50))
    # every NaN too
    any_floats = hnp.arrays(np.uint32, num_tokens).map(
        lambda bits: bits.view(np.float32)
    )
    columns = {BEHAVIOUR: draw(any_floats)}
    if draw(st.booleans()):
        columns[TEACHER] = draw(any_floats)
    tokens = Tokens(
        draw(hnp.arrays(np.int32, num_tokens)),
        tuple(draw(SPANS)),
        columns,
        tuple(draw(st.lists(CALLS, max_size=3))),
    )
    return Trajectory(
        draw(st.integers(0, 100)),
        tokens,
        draw(NUMBERS),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
        draw(st.dictionaries(st.text(), NUMBERS, max_size=3)),
        draw(st.integers(0, 3)),
        tuple(draw(st.lists(CREDITS, max_size=3))),
        awaits=draw(st.none() | st.text()),
        calls=tuple(draw(st.lists(POLICY_CALLS, max_size=3))),
        untrained=tuple(draw(st.lists(st.tuples(st.text(), st.text()), max_size=2))),
    )


@given(trajectories(), st.integers(0, 2**50))
def test_trajectory_comes_back_with_every_bit(
    trajectory: Trajectory, group_id: int
) -> None:
    blob = encode_trajectory(group_id, trajectory)
    found = decode_trajectory(
        blob, group_id, trajectory.sample_index, trajectory.branch
    )
    assert same_trajectory(found, trajectory)


class AnotherDay(date):
    @classmethod
    def today(cls) -> AnotherDay:
        return cls(2031, 1, 2)


def test_resume_on_another_day_renders_the_same_prompt(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "llama.jinja"
    template.write_text(
        "Today Date: {{ strftime_now('%d %b %Y') }}\n{{ messages[0].content }}"
    )
    chat = [{"role": "user", "content": "What day is it?"}]

    async def prompt(path: Path) -> tuple[int, ...]:
        journal = open_journal(path)
        await journal.aclose()
        tokenizer = HFChatTokenizer(
            tiny_model_dir, chat_template=template, now=journal.start_date
        )
        return tokenizer.encode_chat(chat)

    started = asyncio.run(prompt(tmp_path / "journal.sqlite"))
    monkeypatch.setattr(schema, "date", AnotherDay)
    assert asyncio.run(prompt(tmp_path / "journal.sqlite")) == started
    new_run = asyncio.run(prompt(tmp_path / "new.sqlite"))
    assert new_run != started
