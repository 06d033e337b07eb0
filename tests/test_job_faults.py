"""Real runs survive losses they can repair, and name the process that ends them."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest
from crash_fuzz import fuzz_config, promise_of
from job_runs import (
    RUN,
    children_of,
    ended,
    engine_events,
    environment,
    events,
    is_fork_server,
    popen,
    read_lines,
    run,
    staging_of,
    start,
    wait_for_more_steps,
    wait_for_steps,
    wait_until,
    write_config,
)
from process_ends import all_gone
from resume_checker import read_evidence, violations

from asyncrl.observe.show import render_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG = "trainer.num_steps=100000"
PATIENCE_S = 240.0


def test_run_survives_scaling_and_losses_until_restarts_are_used_up(
    tmp_path: Path,
) -> None:
    """One after the other: engine-1 comes, leaves and comes again, the eval engine is
    killed, the trainer is killed, engine-1 is frozen, and killed once it is back.
    """
    config = fuzz_config(
        tmp_path,
        task={"size": 500},
        eval={
            "task": {"python": "asyncrl.tasks.toy:Letters"},
            "every": 3,
            "num_prompts": 4,
            "slots": 4,
        },
        rollout={"num_engines": {"min": 1, "max": 2}, "max_tokens": 100},
        buffer={"max_staleness": 2, "look_ahead": 2, "on_overdue": "drop"},
        trainer={"num_groups": 2},
        observe={"heartbeat_s": 16},
        supervision={"backoff_s": 0.1, "max_restarts": 1},
    )
    run_dir = tmp_path / "run"
    process = start(config, run_dir, LONG)
    wait_for_steps(run_dir, 2, process)
    expected = list[tuple[str, str]]()
    for num, event in (
        (2, "engine unparked"),
        (1, "engine parked"),
        (2, "engine unparked"),
    ):
        asked = ended(popen(run_dir, f"engines={num}", command=[*RUN[:-1], "scale"]))
        assert asked.returncode == 0, asked.stderr
        expected.append((event, "engine-1"))
        wait_until(lambda: engine_events(run_dir) == expected, process)
        wait_for_more_steps(run_dir, 2, process)
    (evaluation,) = children_of(process, "engine-eval")
    evaluation.kill()
    wait_for_more_steps(run_dir, 2, process)
    (trainer,) = children_of(process, "asyncrl.trainer.ranks.rank_process")
    trainer.kill()
    wait_for_more_steps(run_dir, 3, process)
    (frozen,) = children_of(process, "specs/engine-1.json")
    frozen.suspend()
    wait_until(lambda: ("engine up", "engine-1") in engine_events(run_dir), process)
    assert all_gone([frozen])
    wait_for_more_steps(run_dir, 2, process)
    (second,) = children_of(process, "specs/engine-1.json")
    with (run_dir / "logs" / "engine-1.log").open("a") as log:
        log.write("the last words of engine-1\n")
    children = children_of(process)
    second.kill()
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, stderr
    assert (
        stdout.count("WARNING: the run continues without evaluation: engine-eval") == 1
    )
    assert f"trainer-0: process {trainer.pid} was killed by SIGKILL" in stdout
    assert "restarting trainer, 1 of 1" in stdout
    assert f"engine-1: process {frozen.pid} does not answer" in stdout
    assert "restarting engine-1, 1 of 1" in stdout
    for words in (
        f"engine-1: process {second.pid} was killed by SIGKILL",
        "the last words of engine-1",
    ):
        assert words in stderr
    assert "supervision.max_restarts=1 is used up" in stderr, stderr
    assert "Way out:" in stderr
    assert engine_events(run_dir)[3:5] == [
        ("engine lost", "engine-1"),
        ("engine up", "engine-1"),
    ]
    steps = read_lines(run_dir / "metrics.jsonl")
    assert {step["engine/up"] for step in steps} == {1, 2}
    assert steps[-1]["engine/restarts"] == 1
    assert violations(read_evidence(run_dir), promise_of(config)) == []
    assert all_gone(children)
    assert staging_of(process.pid) == []


def test_processes_killed_while_a_run_starts_are_restarted(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(
        tmp_path, checkpoint={"every": 1}, supervision={"backoff_s": 0.1}
    )
    for _ in ("first start", "resumed start"):
        process = start(config, run_dir, LONG)
        for name in ("specs/engine-0.json", "specs/trainer-0.json"):
            wait_until(partial(children_of, process, name), process)
            children_of(process, name)[0].kill()
        wait_for_more_steps(run_dir, 2, process)
        process.terminate()
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 143, stderr
        for name in ("engine-0", "trainer-0"):
            assert f"restarting {name}, 1 of 3" in stdout


def test_early_sigterm_leaves_no_process(tmp_path: Path) -> None:
    command = [
        *RUN[:2],
        "asyncrl",
        "run",
        str(write_config(tmp_path)),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(command, env=environment())
    children = psutil.Process(process.pid).children
    wait_until(lambda: any(map(is_fork_server, children())), process)
    found = children()
    process.terminate()
    assert process.wait(PATIENCE_S) == 143
    assert all_gone(found)


def test_frozen_trainer_ends_the_run_with_stacks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(
        tmp_path,
        observe={"heartbeat_s": 300},  # nothing but the watchdog may notice
        supervision={"watchdog_s": 15, "on_stuck": "fail"},
        buffer={"max_staleness": 2},
    )
    process = start(config, run_dir, LONG)
    wait_for_steps(run_dir, 2, process)
    children = children_of(process)
    (trainer,) = children_of(process, "asyncrl.trainer.ranks.rank_process")
    trainer.suspend()
    # It may freeze in an export: then the train loop waits for the publisher.
    waits = (
        r"(train loop|step \d+) waits in (TrainerClient\.step|PushLoop\.wait_exported)"
    )
    wait_until(
        lambda: re.search(waits, plain(render_status(run_dir, is_verbose=True))),
        process,
    )
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, stderr
    assert "watchdog: nothing has moved for" in stderr
    assert (
        f"trainer-0: process {trainer.pid} is stopped; trainer-0 gave no answer to /health"
        in stderr
    )
    assert "supervision.watchdog_s=15" in stderr
    assert f"--run-dir {run_dir} --resume must" in stderr
    assert re.search(waits, stdout)
    log = (run_dir / "logs" / "controller.log").read_text()
    assert re.search(r"> TrainerClient\.(step|begin_export|export) \(", log)
    assert "thread 0x" in log
    assert (
        "most recent call first" in (run_dir / "logs" / "engine-0.log").read_text()
    ), "faulthandler's own words"
    (seen,) = [detail for what, detail in events(run_dir) if what == "stuck"]
    assert seen["on_stuck"] == "fail"
    assert all_gone(children)


def plain(text: str) -> str:
    """The words of a panel, on one line."""
    return " ".join(text.replace("│", " ").split())


def test_full_disk_is_reported_with_the_way_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    # the trainer's record, in the middle of the run
    (run_dir / "trained.jsonl").symlink_to("/dev/full")
    # and the summary after that failure
    (run_dir / ".summary.json.new").symlink_to("/dev/full")
    answer = run(write_config(tmp_path), run_dir)
    assert answer.returncode == 1
    for words in (
        "trainer",
        "No space left on device",
        "free space on the disk",
        "Way out:",
    ):
        assert words in answer.stderr
    assert "Traceback" not in answer.stderr.replace("the traceback", "")
