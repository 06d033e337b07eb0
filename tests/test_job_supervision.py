"""Engine servers of a real run that die or freeze: the run goes on, and loses nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from job_runs import (
    all_gone,
    children_of,
    interrupt,
    read_lines,
    run,
    staging_of,
    start,
    wait_for_steps,
    write_config,
)

pytestmark = pytest.mark.slow
ENGINE = "asyncrl_servers.embedded"


def engines(process: subprocess.Popen[str], index: int) -> list[psutil.Process]:
    """The process of engine-`index`, none while it is down: one that has just died is gone between two
    looks.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return children_of(process, f"specs/engine-{index}.json")
    return []


def wait_for_engine(
    process: subprocess.Popen[str],
    index: int,
    is_it: Callable[[psutil.Process], bool],
    timeout_s: float = 120,
) -> psutil.Process:
    """The process of engine-`index` that is as asked for."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        for child in engines(process, index):
            if is_it(child):
                return child
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no such engine-{index} within {timeout_s} s: {process.communicate()}")


def wait_for_more_steps(run_dir: Path, more: int, process: subprocess.Popen[str]) -> None:
    wait_for_steps(run_dir, len(read_lines(run_dir / "metrics.jsonl")) + more, process)


def events(run_dir: Path) -> list[tuple[str, str]]:
    """(what, name of the engine) of each event in the journal."""
    with sqlite3.connect(f"file:{run_dir / 'journal.sqlite'}?mode=ro", uri=True) as database:
        rows = database.execute("select what, detail from events order by id").fetchall()
    return [(what, json.loads(detail)["name"]) for what, detail in rows if what.startswith("engine")]


def test_kill_9_of_the_only_engine_changes_nothing_of_what_is_trained_on(tmp_path: Path) -> None:
    config = write_config(tmp_path, supervision={"backoff_s": 0.1})
    whole = run(config, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr

    process = start(config, tmp_path / "run")
    wait_for_steps(tmp_path / "run", 3, process)
    (engine,) = children_of(process, ENGINE)
    engine.kill()
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert f"engine-0: process {engine.pid} was killed by SIGKILL" in stdout
    assert "starting it again, 1 of 3" in stdout
    assert (tmp_path / "run" / "trained.jsonl").read_bytes() == (
        tmp_path / "whole" / "trained.jsonl"
    ).read_bytes()
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["engine/restarts"] == 1
    assert events(tmp_path / "run") == [("engine lost", "engine-0"), ("engine up", "engine-0")]
    assert staging_of(process.pid) == []


def test_a_run_goes_on_beside_a_frozen_engine_which_is_killed_and_used_again(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        rollout={"num_engines": 2},
        buffer={"max_staleness": 2},
        observe={"heartbeat_s": 12},
        supervision={"backoff_s": 25},
    )
    run_dir = tmp_path / "run"
    process = start(config, run_dir, "trainer.num_steps=100000")
    wait_for_steps(run_dir, 2, process)
    frozen = wait_for_engine(process, 1, lambda child: True)
    frozen.suspend()
    wait_for_engine(process, 1, lambda child: child.pid != frozen.pid)
    assert all_gone([frozen])
    wait_for_more_steps(run_dir, 2, process)
    while ("engine up", "engine-1") not in events(run_dir):
        wait_for_more_steps(run_dir, 1, process)

    other = wait_for_engine(process, 0, lambda child: True)
    other.kill()
    wait_for_more_steps(
        run_dir, 3, process
    )  # all of it by the engine that was frozen: the other one is not even started
    assert engines(process, 0) in ([], [other])
    children = children_of(process)
    stdout, stderr = interrupt(process)
    assert process.returncode == 130, stderr
    assert f"engine-1: process {frozen.pid} does not answer" in stdout
    assert all(line["sample/staleness_max"] <= 2 for line in read_lines(run_dir / "metrics.jsonl"))
    assert all_gone(children)
    assert staging_of(process.pid) == []


def test_an_engine_that_dies_too_often_ends_the_run_with_its_name_and_its_log(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]  # a given one, which the second process takes again
    supervision = {"backoff_s": 0.1, "max_restarts": 1}
    config = write_config(
        tmp_path, buffer={"max_staleness": 2}, rollout={"ports": [port]}, supervision=supervision
    )
    run_dir = tmp_path / "run"
    process = start(config, run_dir, "trainer.num_steps=100000")
    wait_for_steps(run_dir, 2, process)
    (first,) = children_of(process, ENGINE)
    first.kill()
    second = wait_for_engine(process, 0, lambda child: child.pid != first.pid)
    while ("engine up", "engine-0") not in events(run_dir):
        wait_for_more_steps(run_dir, 1, process)
    with (run_dir / "logs" / "engine-0.log").open("a") as log:
        log.write("the last words of engine-0\n")
    children = children_of(process)
    second.kill()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert f"engine-0: process {second.pid} was killed by SIGKILL" in stderr
    assert "the last words of engine-0" in stderr
    assert "supervision.max_restarts=1 is used up" in stderr
    assert "Way out:" in stderr
    assert all_gone(children)
    assert staging_of(process.pid) == []
