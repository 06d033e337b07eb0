from __future__ import annotations

import errno
import io
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest
from rich.console import Console as RichConsole

from asyncrl.observe import console as console_module
from asyncrl.observe.console import Console, Kind, PanelState, live_panel, outliving, plain_line
from asyncrl.observe.run_numbers import TimeShares, duration, sparkline
from asyncrl.observe.verdict import Verdict, summary_panel

METRICS = {
    "step": 11,
    "reward/mean": 0.413,
    "sample/staleness_mean": 1.2,
    "sample/staleness_max": 3,
    "perf/step_s": 0.41,
    "perf/train_s": 0.29,
    "perf/wait_generation_s": 0.07,
    "perf/wait_stragglers_s": 0.02,
    "perf/wait_publishing_s": 0.01,
    "tokens/trained": 900,
    "sample/length_mean": 14.0,
    "rollout/inflight": 61,
    "rollout/failed": 1,
    "rollout/retried": 2,
    "rollout/interrupted": 33,
    "rollout/dropped": 0,
    "rollout/filtered": 5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(renderable: object, width: int = 80) -> str:
    out = io.StringIO()
    RichConsole(file=out, width=width).print(renderable)
    return out.getvalue()


def line_of(**more: float) -> str:
    metrics = METRICS | {name.replace("__", "/"): value for name, value in more.items()}
    return plain_line(metrics, num_steps=300, max_staleness=4)


def test_a_plain_line_says_step_reward_staleness_and_where_the_time_went() -> None:
    words = "reward 0.413  staleness 1.2 (max 3 of 4)  0.41 s/step  train 71% wait 24% (gen)"
    assert line_of() == f"step  12/300  {words}"
    assert plain_line({"step": 0}, num_steps=9, max_staleness=1) == "step 1/9"
    assert "masked 2.0%" in line_of(sample__masked_fraction=0.02)


def test_a_step_that_was_skipped_says_so_with_its_batch_on_the_line_and_in_the_panel_for_good() -> None:
    words = "skipped: not finite (batch 11, counted from 0)"
    assert f"  step {words}  " in line_of(trainer__skipped_steps=1.0)
    assert f"3 steps {words}" in line_of(trainer__skipped_steps=3)
    assert "skipped" not in line_of(trainer__skipped_steps=0.0)
    state = PanelState(run_name="r", num_steps=300, max_staleness=4, started_s=0.0)
    for step, num_skipped in ((3, 2.0), (11, 1.0), (12, 0.0)):
        state.add_step(METRICS | {"step": step, "trainer/skipped_steps": num_skipped})
    assert f"step {words}, 3 in all" in drawn(live_panel(state, now_s=1.0))


def console_to(file: TextIO, kind: Kind = "plain") -> Console:
    return Console(kind, run_name="quick [start]", num_steps=300, max_staleness=4, file=file, width=80)


def test_auto_is_plain_without_a_terminal_and_live_on_one() -> None:
    assert [console_to(file, "auto").kind for file in (io.StringIO(), Terminal())] == ["plain", "live"]


@pytest.mark.parametrize("kind", ["plain", "none"])
def test_plain_prints_a_line_a_step_and_what_is_said_and_none_prints_nothing(kind: Kind) -> None:
    out = io.StringIO()
    console = console_to(out, kind)
    console.start()
    console.say("saved to [runs/x]")
    console.show_activity("not shown")
    console.show_step(METRICS)
    console.show("a table")
    lines = out.getvalue().splitlines()
    assert lines == ([] if kind == "none" else ["saved to [runs/x]", line_of(), "a table"])


def test_live_leaves_the_last_picture_and_its_thread_ends() -> None:
    out = Terminal()
    console = console_to(out, "live")
    console.start()
    console.show_step(METRICS)
    console.close()
    console.close()
    assert "quick [start]" in out.getvalue()
    assert "12/300" in out.getvalue()


def unread_pipe() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full_disk() -> TextIO:
    return open("/dev/full", "w")  # noqa: PTH123  the test closes it


@pytest.mark.parametrize("make", [unread_pipe, full_disk])
def test_nobody_who_reads_any_more_ends_no_run_and_is_logged_once(
    make: Callable[[], TextIO], caplog: pytest.LogCaptureFixture
) -> None:
    with make() as file, caplog.at_level(logging.WARNING):  # closing it at the end raises nothing either
        console = console_to(file)
        console.say("saved")
        console.show_step(METRICS)
        console.show("a table")
        console.close()
    assert caplog.text.count("nothing is shown from here on") == 1


class ClosedTerminal(Terminal):
    is_closed = False

    def write(self, text: str) -> int:
        if self.is_closed:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


def test_the_live_panel_of_a_closed_terminal_repaints_into_nothing() -> None:
    out = ClosedTerminal()
    console = console_to(out, "live")
    console.start()
    assert console._live is not None
    out.is_closed = True
    console._live.refresh()  # as the thread that repaints does
    console.say("saved")
    console.show_step(METRICS)
    console.close()
    console.show("a table")
    assert "saved" not in out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_panel_fits_its_width_and_shows_everything_by_name(width: int) -> None:
    state = PanelState(run_name="quickstart", num_steps=300, max_staleness=4, started_s=100.0)
    before = drawn(live_panel(state, now_s=100.5), width)
    assert "starting" in before
    for step in range(1, 13):
        state.add_step(METRICS | {"step": step - 1, "reward/mean": step / 12})
    picture = drawn(live_panel(state, now_s=165.0), width)
    assert max(map(len, picture.splitlines())) <= width
    flat = " ".join(picture.replace("│", " ").split())
    assert "12/300 1 min 05 s, 1 min 58 s to go" in flat
    assert "1.2 on average, 3 at most of 4 allowed" in flat
    assert "train 71%, wait gen 17%, wait stragglers 5%" in flat
    assert "61 in flight, 33 interrupted, 2 retried, 1 failed" in flat


def test_the_summary_shows_the_verdict_in_80_columns() -> None:
    shares = TimeShares(training=0.5, generation=0.3, stragglers=0.1, publishing=0.05, other=0.05)
    verdict = Verdict(
        50, 125.0, 0.1, 0.8, shares, "generation", ("Generation held the run back.", "Knob: more engines.")
    )
    picture = drawn(summary_panel(verdict, title="quickstart"))
    assert "50 in 2 min 05 s, 2.50 s each" in picture
    assert "0.100 at first, 0.800 at last" in picture
    assert "waiting for stragglers  10%" in picture
    assert "Knob: more engines." in picture
    assert max(map(len, picture.splitlines())) <= 80
    assert Verdict.from_dict(verdict.as_dict()) == verdict


def test_a_sparkline_averages_what_does_not_fit() -> None:
    assert sparkline([0.0, 1.0], width=8) == "▁█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"
    assert sparkline([0.5] * 3, width=8) == "▁▁▁"
    assert sparkline(deque(), width=8) == ""
    assert len(sparkline(list(range(1000)), width=32)) == 32


def test_durations_read_like_a_person_says_them() -> None:
    found = " | ".join(map(duration, (8.26, 245, 59.99, 7800)))
    assert found == "8.3 s | 4 min 05 s | 60.0 s | 2 h 10 min"


def test_the_rewards_of_a_long_run_stay_few_and_evenly_spread() -> None:
    state = PanelState(run_name="r", num_steps=10_000, max_staleness=4, started_s=0.0)
    for step in range(10_000):
        state.add_step({"step": step, "reward/mean": float(step)})
    assert state.rewards() == [float(step) for step in range(0, 10_000, 10)]


# ---- standard output that is not read


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    monkeypatch.setattr(console_module, "PATIENCE_S", 0.01)
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

    monkeypatch.setattr(console_module, "_poll", lambda _: Poll())
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

    monkeypatch.setattr(console_module, "_poll", lambda _: Poll())
    with os.fdopen(writing, "w") as file:
        shown = outliving(file)
        for room in (True, False, False, False, True, False, False):
            has_room = room
            shown.write("a line of a step\n")
    assert waited_ms == [10, 10, 0, 0, 0, 10, 0]
