"""Standard output that nobody reads: a pipe that fills up, is read on, is closed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator

import pytest

from asyncrl.observe import console as unread
from asyncrl.observe.console import outliving


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    monkeypatch.setattr(unread, "PATIENCE_S", 0.01)
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def read_all(descriptor: int) -> str:
    os.set_blocking(descriptor, False)
    text = b""
    while True:
        try:
            text += os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return text.decode()


def test_lines_that_find_no_room_are_left_out_and_the_reader_is_told_how_many(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = pipe
    with os.fdopen(writing, "w") as file, caplog.at_level(logging.WARNING):
        shown = outliving(file)
        for number in range(5000):
            shown.write(f"step {number} and what else a line of a step has to say, of some length\n")
        before = read_all(reading)
        shown.write("step 5000\n")
        shown.write("step 5001\n")
        after = read_all(reading)
    lines = before.splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(len(lines))), (
        "those that found room are whole and in order"
    )
    assert 500 < len(lines) < 5000
    assert after.split("\n") == [
        "",
        f"[{5000 - len(lines)} pieces of output are left out here: nobody read them]",
        "step 5000",
        "step 5001",
        "",
    ]
    assert len([record for record in caplog.records if "standard output is not read" in record.message]) == 1


def test_a_reader_that_is_slow_for_a_moment_misses_nothing(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = pipe
    got, waited_ms = [], list[float]()

    class Poll:
        """Room is made by the very wait for it."""

        def poll(self, timeout_ms: float) -> list[int]:
            waited_ms.append(timeout_ms)
            got.append(read_all(reading))
            return [writing]

    monkeypatch.setattr(unread, "_poll", lambda _: Poll())
    with os.fdopen(writing, "w") as file:
        shown = outliving(file)
        for number in range(20):
            shown.write(f"{number} " * 3000)
        got.append(read_all(reading))
    assert re.findall(r"\d+", "".join(got)) == [str(number) for number in range(20) for _ in range(3000)]
    assert set(waited_ms) == {10.0}


def test_a_full_pipe_is_waited_for_once_and_not_line_by_line(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, writing = pipe
    has_room, waited_ms = False, list[float]()

    class Poll:
        def poll(self, timeout_ms: float) -> list[int]:
            waited_ms.append(timeout_ms)
            return [writing] if has_room else []

    monkeypatch.setattr(unread, "_poll", lambda _: Poll())
    with os.fdopen(writing, "w") as file:
        shown = outliving(file)
        for room in (True, False, False, False, True, False, False):
            has_room = room
            shown.write("a line of a step\n")
    assert waited_ms == [10, 10, 0, 0, 0, 10, 0]


def test_a_reader_that_is_gone_ends_nothing(pipe: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = pipe
    os.dup2(os.open(os.devnull, os.O_RDONLY), reading)  # the pipe has no reader any more
    with os.fdopen(writing, "w") as file, caplog.at_level(logging.WARNING):
        shown = outliving(file)
        for _ in range(3):
            assert shown.write("a line\n") == 7
        shown.flush()
        assert not shown.isatty()
    assert [record.message.split(",")[0] for record in caplog.records] == ["nothing is shown from here on"]
