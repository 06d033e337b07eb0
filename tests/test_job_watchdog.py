"""A real run that stops moving says why, and ends or goes on as it was told."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
from pathlib import Path

import psutil
import pytest
from job_runs import all_gone, children_of, read_lines, start, wait_for_steps, write_config

from asyncrl.observe.status import render_status
from asyncrl.run.watch import catches

pytestmark = pytest.mark.slow
PATIENT = {"heartbeat_s": 300, "console": "plain"}  # nobody but the watchdog may notice


def plain(text: str) -> str:
    """The words of a panel, on one line."""
    return " ".join(text.replace("│", " ").split())


def events(run_dir: Path) -> list[tuple[str, dict[str, object]]]:
    with sqlite3.connect(f"file:{run_dir / 'journal.sqlite'}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT what, detail FROM events ORDER BY id").fetchall()
    connection.close()
    return [(what, json.loads(detail)) for what, detail in rows]


def test_a_frozen_trainer_is_named_by_status_and_ends_the_run_with_stacks_in_the_logs(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(
        tmp_path,
        observe=PATIENT,
        supervision={"watchdog_s": 8, "on_stuck": "fail"},
        buffer={"max_staleness": 2},
    )
    process = start(config, run_dir, "trainer.num_steps=100000")
    wait_for_steps(run_dir, 2, process)
    children = children_of(process)
    (trainer,) = children_of(process, "asyncrl.trainer.rank_process")
    assert all(catches(child.pid, signal.SIGUSR1) for child in children)
    trainer.suspend()
    # An export may have been what it froze in: then the train loop waits for the publisher, which waits for
    # the trainer.
    while not re.search(
        r"train loop waits in (TrainerClient\.train|Publisher\.wait_exported)", plain(render_status(run_dir))
    ):
        assert process.poll() is None, render_status(run_dir)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 1, stderr
    assert "watchdog: nothing has moved for" in stderr
    assert f"trainer-0: process {trainer.pid} is stopped; trainer-0 gave no answer to /health" in stderr
    assert "supervision.watchdog_s=8" in stderr
    assert f"--run-dir {run_dir} --resume must" in stderr
    assert re.search(
        r"train loop waits in (TrainerClient\.train for the optimizer step of "
        r"batch|Publisher\.wait_exported_or_busy for)",
        stdout,
    )
    log = (run_dir / "logs" / "controller.log").read_text()
    assert re.search(r"> TrainerClient\.(train|export) \(trainer_client\.py:", log)
    assert "thread MainThread:" in log
    assert (
        "most recent call first" in (run_dir / "logs" / "engine-0.log").read_text()
    )  # faulthandler's own words, in the child
    (seen,) = [detail for what, detail in events(run_dir) if what == "stuck"]
    assert seen["on_stuck"] == "fail"
    assert all_gone(children)


def test_a_frozen_engine_is_started_again_by_the_watchdog_and_the_run_ends_well(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(
        tmp_path, observe=PATIENT, supervision={"watchdog_s": 8, "on_stuck": "restart", "backoff_s": 0}
    )
    process = start(config, run_dir, "trainer.num_steps=40")
    wait_for_steps(run_dir, 2, process)
    (engine,) = children_of(process, "asyncrl_servers.embedded")
    engine.suspend()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert f"engine-0: process {engine.pid} is stopped" in stdout
    # A publish may have been what it froze in: then nobody waits for a completion, and the publisher waits
    # for it.
    assert re.search(r"waits? in (EnginePool\._segment|ToAll\._on\.one) for [^\n]*engine-0", stdout), stdout
    assert [what for what, _ in events(run_dir)][:2] == ["stuck", "engine lost"]
    assert len(read_lines(run_dir / "metrics.jsonl")) == 40
    assert not psutil.pid_exists(engine.pid)
