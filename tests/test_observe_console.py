from __future__ import annotations

import io
import logging
import os
import queue
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console as RichConsole

from asyncrl.base import progress
from asyncrl.base.progress import told_if_long
from asyncrl.observe.console import Console, Kind, RunLog, outliving, plain_line
from asyncrl.observe.run_numbers import Steps

METRICS = {
    "step": 12,
    "reward/mean": 0.413,
    "sample/staleness_mean": 1.2,
    "sample/staleness_max": 3,
    "perf/step_s": 0.41,
    "perf/train_s": 0.29,
    "perf/wait_generation_s": 0.07,
    "perf/wait_stragglers_s": 0.02,
    "perf/wait_publishing_s": 0.01,
}
LINE = (
    "step  12/300  reward 0.413  staleness 1.2 (max 3 of 4)  0.41 s/step"
    "  train 71% wait 24%  1 min 58 s left"
)


PANEL = """12/300 1 min 05 s, 1 min 58 s left
reward 0.716
first step 0.083, last step 0.413
1.2 (max 3 of 4)
training 71%, waiting for generation 17%
(last 12 steps)
health 12 steps are broken."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(renderable: object, width: int = 60) -> str:
    out = io.StringIO()
    RichConsole(file=out, width=width).print(renderable)
    assert max(map(len, out.getvalue().splitlines())) <= width
    return " ".join(out.getvalue().replace("│", " ").split())


def test_a_plain_line_shows_reward_staleness_and_time() -> None:
    def line_of(*lines: Mapping[str, float], num: int = 1) -> str:
        return plain_line(Steps(lines), num, 300, 4)

    assert (line_of(METRICS), line_of({"step": 1})) == (LINE, "step   1/300")
    odd = {"tokens/sampled": 100, "tokens/trained": 98, "trainer/skipped_steps": 3}
    assert "4), 2.0% masked  3 updates skipped: not finite  " in line_of(METRICS | odd)
    before = METRICS | {
        "step": 11,
        "reward/mean": 0.113,
        "sample/staleness_max": 4,
        "perf/step_s": 0.81,
    }
    line = line_of(METRICS | {"step": 10, "reward/mean": 9.0}, before, METRICS, num=2)
    assert (
        "reward 0.263  staleness 1.2 (max 4 of 4)  0.61 s/step  train 48% wait 16%"
        in line
    )


def console_to(file: TextIO, kind: Kind = "plain") -> Console:
    return Console(
        kind,
        run_name="quick [start]",
        num_steps=300,
        max_staleness=4,
        health_of=lambda steps: [f"{len(steps)} steps are broken."],
        file=file,
    )


@pytest.mark.parametrize("kind", ["plain", "none"])
def test_plain_prints_lines_and_none_prints_nothing(kind: Kind) -> None:
    out = io.StringIO()
    console = console_to(out, kind)
    console.say("saved to [runs/x]")
    console.show_step(METRICS)
    assert out.getvalue().splitlines() == (
        [] if kind == "none" else ["saved to [runs/x]", LINE]
    )


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_stages_are_lines_with_their_seconds_in_a_pipe(kind: Kind) -> None:
    out = io.StringIO()
    console = console_to(out, kind)
    log = RunLog(console.say, console.show_activity)
    for stage in ("loading the model", "training"):
        log.activity(stage)
    said = out.getvalue()
    assert (kind == "live") == (said == "")
    assert kind == "live" or re.fullmatch(
        r"after \d\.\d s: loading the model \.\.\.\n", said
    )
    assert "now training" in drawn(console.panel())


def test_only_long_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = queue.SimpleQueue[str]()
    monkeypatch.setattr("builtins.print", lambda line, **_: told.put(line))
    with told_if_long("short work"):
        pass
    assert told.empty()
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    with told_if_long("long work", 8) as work:
        assert re.fullmatch(r"long work: 0 of 8 \.\.\. \d+ s", told.get(timeout=60))
        work.count()
    assert work.line(1.0) == "long work: 1 of 8 ... 1 s, about 7 s left"


def test_auto_is_live_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert console_to(io.StringIO(), "auto").kind == "plain"
    out = Terminal()
    console = console_to(out, "auto")
    console.start()
    console.show_step(METRICS)
    console.close()
    assert all(words in out.getvalue() for words in ("quick [start]", "12/300"))


def test_plain_lines_are_seconds_apart_and_cover_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, out = [0.0], io.StringIO()
    monkeypatch.setattr("asyncrl.observe.console.time.monotonic", lambda: now_s[0])
    console = console_to(out)
    console.start()
    for step in range(1, 300):  # half a second each
        now_s[0] += 0.5
        console.show_step(METRICS | {"step": step})
    console.close()
    shown = [
        int(line.split()[1].partition("/")[0]) for line in out.getvalue().splitlines()
    ]
    assert shown == [*range(1, 292, 10), 299], "5 s apart"
    console.show_step(METRICS | {"step": 300})
    assert "step 300/300" in out.getvalue().splitlines()[-1], "the last one at once"


def test_lines_tell_how_full_the_first_batch_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, out = [0.0], io.StringIO()
    monkeypatch.setattr("asyncrl.observe.console.time.monotonic", lambda: now_s[0])
    console = console_to(out)
    for now_s[0] in range(40):
        console.show_filling(f"rollouts {now_s[0]} of 64 for step 1")
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["15", "30"]


def test_the_panel_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("asyncrl.observe.console.time.monotonic", lambda: now_s[0])
    console = console_to(io.StringIO(), "live")
    console.resume_from(
        Steps(
            [
                METRICS | {"step": step, "reward/mean": step / 12}
                for step in range(1, 12)
            ]
        )
    )
    console.training_starts()
    console.show_step(METRICS)
    now_s[0] = 165.0
    picture = drawn(console.panel())
    for words in PANEL.splitlines():
        assert words in picture


def test_failing_output_ends_no_run_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Path("/dev/full").open("w") as file:  # closing raises nothing either
        console = console_to(file)
        console.say("saved")
        console.show_step(METRICS)
        console.close()
    assert caplog.text.count("no more output is shown") == 1


def test_unread_output_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file, caplog.at_level(logging.WARNING):
        shown = outliving(file)
        for number in range(5000):
            shown.write(
                f"step {number} and what else a line of a step has to say, of some length\n"
            )
        lines = os.read(reading, 1 << 20).decode().splitlines()
        shown.write("step 5000\n")
        assert os.read(reading, 1 << 20) == b"step 5000\n"
    assert [int(line.split()[1]) for line in lines] == list(range(len(lines))), (
        "whole and in order"
    )
    assert 500 < len(lines) < 5000
    assert caplog.text.count("standard output is not read") == 1
    os.close(reading)
