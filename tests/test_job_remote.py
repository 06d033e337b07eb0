"""Runs whose rollouts are run by workers that somebody else starts: what they say, and what survives."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from job_runs import environment, read_lines, start, write_config

from asyncrl.messages.work import WORKER_KEY_ENV

pytestmark = pytest.mark.slow


def start_worker(
    gateway: dict[str, Any], name: str, log: Path, *, agent: str = "harnesses_for_test:two_turns", **args: Any
) -> subprocess.Popen[bytes]:
    """`asyncrl work`, as a process of its own beside the run; `args` are the agent's."""
    command = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "work",
        gateway["url"],
        "--python",
        agent,
        "--name",
        name,
        "--args",
        json.dumps(args),
    ]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(**{WORKER_KEY_ENV: gateway["worker_key"]})
        )


def wait_until(condition: Any, process: subprocess.Popen[str], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, f"the run ended with {process.returncode}: {process.communicate()}"
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


def test_a_second_worker_takes_over_from_one_that_is_killed(tmp_path: Path) -> None:
    """The first one plays two steps' rollouts, then holds all that it leases: it is killed with a lease,
    however fast the run is.
    """
    config = write_config(
        tmp_path,
        generator={"remote": True},
        gateway={"lease_timeout_s": 3.0},
        rollout={"max_tokens": 8, "max_prompt_tokens": 64, "retries": 8},
        trainer={"num_steps": 8, "num_groups": 2},
        observe={"console": "plain", "tensorboard": False, "heartbeat_s": 5.0},
    )
    run_dir = tmp_path / "run"
    process = start(config, run_dir)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        wait_until((run_dir / "gateway.json").exists, process)
        assert (run_dir / "gateway.json").stat().st_mode & 0o077 == 0, "the worker key is the owner's alone"
        gateway = json.loads((run_dir / "gateway.json").read_text())
        mark = tmp_path / "held"
        holds = {
            "agent": "agents_for_test:plays_then_holds",
            "num_played": 2 * 2 * 4,
            "mark": str(mark),
        }  # steps, groups, rollouts
        workers.append(start_worker(gateway, "first", tmp_path / "first.log", **holds))
        wait_until(mark.exists, process)
        workers[0].kill()
        workers.append(start_worker(gateway, "second", tmp_path / "second.log"))
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    finally:
        for each in (process, *workers):
            each.kill()
            each.wait()
    assert f"{WORKER_KEY_ENV}={gateway['worker_key']} asyncrl work {gateway['url']}" in stdout + stderr, (
        "it says what to start"
    )
    holders = [
        path.name
        for path in run_dir.rglob("*")
        if path.is_file() and gateway["worker_key"].encode() in path.read_bytes()
    ]
    assert holders == ["gateway.json"], "the key is printed, and in no log"
    metrics = read_lines(run_dir / "metrics.jsonl")
    assert len(metrics) == 8
    assert metrics[-1]["harness/lost"] > 0, "what the first one held when it was killed was lost"
    assert metrics[-1]["task/turns"] == 2


def test_a_run_without_a_worker_says_who_is_missing_and_ends_when_asked(tmp_path: Path) -> None:
    config = write_config(tmp_path, generator={"remote": True}, supervision={"watchdog_s": 2.0})
    process = start(config, tmp_path / "run")
    said: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if "asyncrl work" in line and "http://" in line:
            break
    else:
        raise AssertionError(f"the run ended without a word of workers: {''.join(said)}")
    log = tmp_path / "run" / "logs" / "controller.log"
    wait_until(lambda: log.exists() and "wait for a worker, 0 run on 0 workers" in log.read_text(), process)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
