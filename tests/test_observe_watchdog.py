"""The watchdog reports and acts if a run stops moving, and not if it is slow."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from late_cases import WATCHDOG_S, watched

from asyncrl.base.errors import ComponentError
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.observe.watchdog import Reported, Watchdog


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "controller.log"


def test_a_report_names_waits_rollouts_and_children(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "asyncrl.watchdog"):
        told, notes = watched(log_path, 70)
    ((at, text),) = told
    assert at == 1
    for line in (
        "nothing has moved for 60 s",
        "rollouts waits in hang for optimizer step 4, to be woken by trainer-0, since 60 s",
        "rollout g7/r1 runs for 62 s, in hang on trainer-0",
        "trainer-0: process 7 is stopped; no answer",
        "at: steps 3",
    ):
        assert line in text, text
    (logged,) = (
        record.getMessage()
        for record in caplog.records
        if record.name == "asyncrl.watchdog"
    )
    assert logged.startswith(text)
    assert "task rollout g7/r1: hang (late_cases.py:" in logged, (
        "and the stacks of all tasks"
    )
    assert "thread 0x" in log_path.read_text()
    assert [(what, details["on_stuck"]) for what, details in notes] == [
        ("stuck", "warn")
    ]


@pytest.mark.parametrize(
    ("on_stuck", "times"), [("warn", [1, 2, 4, 8]), ("restart", [*range(1, 11)])]
)
def test_reports_repeat_after_doubled_times_or_restarts(
    log_path: Path, on_stuck: str, times: list[int]
) -> None:
    told, notes = watched(log_path, 10.5 * WATCHDOG_S, on_stuck=on_stuck)
    assert [round(at) for at, _ in told] == times
    assert [what for what, _ in notes].count("restart") == (
        0 if on_stuck == "warn" else len(times)
    )


@pytest.mark.parametrize("moves", ["marks", "start"])
def test_only_progress_or_a_starting_process_gets_time(
    log_path: Path, moves: str
) -> None:
    def report(now_s: float) -> Reported:
        end_s = 5 * WATCHDOG_S
        mark = min(now_s, end_s) if moves == "marks" else 0.0
        return Reported(
            {"steps": mark}, is_starting=moves == "start" and now_s <= end_s
        )

    told, _ = watched(log_path, 6.5 * WATCHDOG_S, on_stuck="restart", report=report)
    assert [round(at) for at, _ in told] == [6]


def test_fail_ends_the_run_naming_who_is_stuck(log_path: Path) -> None:
    with pytest.raises(
        ComponentError,
        match="nothing has moved for 60 s: trainer-0: process 7 is stopped; no",
    ):
        watched(log_path, 300, on_stuck="fail", is_well=False)


def test_a_blocked_loop_is_named_and_its_stacks_logged(log_path: Path) -> None:
    told = list[str]()

    def block() -> None:
        deadline_s = time.monotonic() + 30
        while (
            not ("in block" in log_path.read_text() and told)
            and time.monotonic() < deadline_s
        ):
            # faulthandler writes without a lock, line by line
            threading.Event().wait(0.01)

    async def story() -> None:
        calls: Any = {
            "tell": told.append,
            "ask_children": None,
            "restart": None,
            "note": None,
        }
        settings = SupervisionConfig(watchdog_s=0.5)
        watchdog = Watchdog(
            settings, lambda: Reported({}), log_path=log_path, way_out="", **calls
        )
        running = asyncio.create_task(watchdog.run(), name="watchdog")
        await asyncio.sleep(0)  # it runs up to its own sleep
        block()
        running.cancel()

    asyncio.run(story())
    assert "in block" in log_path.read_text()
    assert re.match(
        r"the run has stood still for 0.5 s in\n.*test_observe_watchdog.py., line \d+, in block",
        told[0],
    )
