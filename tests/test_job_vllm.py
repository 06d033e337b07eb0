"""Whole runs on real vLLM servers: what is published, sampled and trained on, and what befalls a run when one
dies or hangs.
"""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from job_runs import (
    all_gone,
    children_of,
    environment,
    interrupt,
    read_lines,
    run,
    staging_of,
    start,
    wait_for_steps,
)
from test_job_supervision import events, wait_for_engine, wait_for_more_steps
from vllm_process import vllm_python

from asyncrl.placement.fork_server import KEY_ENV

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]
CONFIG = Path(__file__).parent.parent / "configs" / "quickstart-vllm.yaml"
ENGINE = "asyncrl_servers.vllm"
LONG = "trainer.num_steps=100000"
START_S = 240.0


def small(*overrides: str) -> list[str]:
    """The quickstart with small batches."""
    return [
        f"rollout.vllm_python={vllm_python()}",
        "rollout.threads=1",
        "trainer.threads=1",
        "rollout.slots=16",
        "rollout.group_size=4",
        "trainer.num_groups=4",
        "rollout.max_tokens=24",
        "observe.console=plain",
        "observe.tensorboard=false",
        "supervision.backoff_s=0.1",
        *overrides,
    ]


def on_policy(*overrides: str) -> list[str]:
    return small("buffer.max_staleness=0", "trainer.num_steps=6", *overrides)


def finish(run_dir: Path, *overrides: str, config: Path = CONFIG) -> subprocess.CompletedProcess[str]:
    answer = run(config, run_dir, *overrides, timeout_s=600)
    assert answer.returncode == 0, answer.stderr
    return answer


def trained(run_dir: Path) -> bytes:
    """Tokens, rewards, losses and weights' versions of every step."""
    return (run_dir / "trained.jsonl").read_bytes()


def group_of(child: psutil.Process) -> list[psutil.Process]:
    """An engine's process and all that it started."""
    return [child, *child.children(recursive=True)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an on-policy run that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finish(run_dir, *on_policy())
    return run_dir


def test_two_runs_of_one_seed_on_one_vllm_train_on_the_same_tokens_rewards_and_losses(
    whole: Path, tmp_path: Path
) -> None:
    finish(tmp_path / "run", *on_policy())
    assert trained(tmp_path / "run") == trained(whole)
    assert len(read_lines(whole / "trained.jsonl")) == 6
    finish(tmp_path / "other", *on_policy("seed=1", "trainer.num_steps=1"))
    assert trained(tmp_path / "other") != trained(whole).splitlines(keepends=True)[0], (
        "the comparison can fail"
    )


def test_kill_9_of_the_only_vllm_changes_nothing_of_what_is_trained_on(whole: Path, tmp_path: Path) -> None:
    process = start(CONFIG, tmp_path / "run", *on_policy())
    wait_for_steps(tmp_path / "run", 2, process, START_S)
    (engine,) = children_of(process, ENGINE)
    family = group_of(engine)
    engine.kill()
    stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr
    assert f"engine-0: process {engine.pid} was killed by SIGKILL" in stdout
    assert "starting it again, 1 of 3" in stdout
    assert trained(tmp_path / "run") == trained(whole)
    assert events(tmp_path / "run") == [("engine lost", "engine-0"), ("engine up", "engine-0")]
    assert all_gone(family), "its workers go with it"
    assert staging_of(process.pid) == []


def test_a_vllm_takes_weights_while_it_samples_and_the_trainer_sees_what_it_sampled(tmp_path: Path) -> None:
    evaluation = "eval={task: {python: 'asyncrl.tasks.letters:Letters'}, every: 10, num_prompts: 8, slots: 8}"
    finish(
        tmp_path / "run",
        *small(
            "trainer.num_steps=40",
            "rollout.slots=64",
            "rollout.group_size=8",
            "trainer.num_groups=8",
            evaluation,
        ),
    )
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.05, rewards
    assert lines[-1]["rollout/interrupted"] > 0, "publishes came while rollouts ran"
    assert max(line.get("policy/logprob_gap_max/engine-0", 0.0) for line in lines) <= 1e-4
    assert any("policy/logprob_gap_max" in line for line in lines)
    assert max(line["sample/staleness_max"] for line in lines) in range(1, 5)
    assert [line["policy_version"] for line in read_lines(tmp_path / "run" / "eval.jsonl")][::4] == [0, 40]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_supervision_the_loss_of_the_only_vllm_ends_the_run_within_seconds_with_its_name(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = start(
        CONFIG, tmp_path / "run", *small(LONG, "supervision.max_restarts=0", "observe.heartbeat_s=20")
    )
    wait_for_steps(tmp_path / "run", 2, process, START_S)
    children = [child for engine in children_of(process) for child in group_of(engine)]
    (engine,) = children_of(process, ENGINE)
    for child in (
        [engine] if number == signal.SIGKILL else engine.children(recursive=True)
    ):  # frozen: its HTTP server still answers
        child.send_signal(number)
    since_s = time.monotonic()
    _, stderr = process.communicate(timeout=120)
    assert time.monotonic() - since_s < 110
    assert process.returncode == 1, stderr
    what = f"process {engine.pid} was killed by SIGKILL" if number == signal.SIGKILL else "heartbeat_s=20"
    assert "engine-0" in stderr
    assert what in stderr
    assert "Way out:" in stderr
    assert all_gone(children)
    assert staging_of(process.pid) == []


def test_a_run_with_two_vllms_goes_on_beside_a_frozen_one_and_a_killed_one_and_uses_both_again(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    overrides = small(
        LONG,
        "rollout.num_engines=2",
        "buffer.max_staleness=2",
        "publisher.rolling=true",
        "observe.heartbeat_s=20",
    )
    process = start(CONFIG, run_dir, *overrides)
    wait_for_steps(run_dir, 3, process, START_S)
    frozen = wait_for_engine(process, 1, lambda child: True)
    family = group_of(frozen)
    for child in family:
        child.suspend()
    wait_for_engine(process, 1, lambda child: child.pid != frozen.pid)
    assert all_gone(family)
    wait_for_more_steps(run_dir, 2, process)  # by the other one, for a vLLM takes long to start
    wait_for_event(run_dir, process, ("engine up", "engine-1"))
    killed = wait_for_engine(process, 0, lambda child: True)
    killed.kill()
    wait_for_more_steps(run_dir, 2, process)
    wait_for_event(run_dir, process, ("engine up", "engine-0"))
    wait_for_more_steps(run_dir, 2, process)
    children = children_of(process)
    stdout, stderr = interrupt(process)
    assert process.returncode == 130, stderr
    assert f"engine-1: process {frozen.pid} does not answer" in stdout
    assert f"engine-0: process {killed.pid} was killed by SIGKILL" in stdout
    lines = read_lines(run_dir / "metrics.jsonl")
    assert all(line["sample/staleness_max"] <= 2 for line in lines)
    assert max(line["engine/policy_version/engine-1"] for line in lines) > 1
    assert all_gone(children)
    assert staging_of(process.pid) == []


def wait_for_event(
    run_dir: Path, process: subprocess.Popen[str], event: tuple[str, str], timeout_s: float = 240.0
) -> None:
    deadline = time.monotonic() + timeout_s
    while event not in events(run_dir):
        assert time.monotonic() < deadline, f"no {event}"
        wait_for_more_steps(run_dir, 1, process)


def test_an_argument_that_vllm_does_not_know_ends_the_start_with_the_names_it_may_mean(
    tmp_path: Path,
) -> None:
    answer = run(CONFIG, tmp_path / "run", *small("rollout.vllm={max-num-batched-token: 512}"), timeout_s=200)
    assert answer.returncode == 1
    assert (
        "engine-0: rollout.vllm has max_num_batched_token, and vLLM has no argument of that name"
        in answer.stderr
    )
    assert "max_num_batched_tokens" in answer.stderr
    assert "Traceback" not in answer.stderr


# ---- servers of somebody else


@pytest.fixture(scope="module")
def served(
    whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, psutil.Process]]:
    """URL, key and process of a server that `asyncrl serve engine` keeps."""
    folder = tmp_path_factory.mktemp("served")
    overrides = small("model.scratch=none", f"model.path={whole / 'model'}")
    command = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "serve",
        "engine",
        str(CONFIG),
        *overrides,
        "--run-dir",
        str(folder / "run"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"ENGINE_URL=(\S+) ENGINE_KEY=(\S+)", line):
                (engine,) = children_of(process, ENGINE)  # type: ignore[arg-type]
                yield match[1], match[2], engine
                break
        else:
            raise AssertionError(f"it ended with {process.wait()}")
    finally:
        children = children_of(process) if process.poll() is None else []  # type: ignore[arg-type]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert all_gone(children)


def published(run_dir: Path) -> list[int]:
    with sqlite3.connect(f"file:{run_dir / 'journal.sqlite'}?mode=ro", uri=True) as database:
        return [version for (version,) in database.execute("select version from publishes order by version")]


def test_a_server_of_somebody_else_gets_the_runs_weights_first_and_outlives_it(
    whole: Path, served: tuple[str, str, psutil.Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, key, engine = served
    monkeypatch.setenv(KEY_ENV, key)
    foreign = ["model.scratch=none", f"model.path={whole / 'model'}", f"rollout.urls=['{url}']"]
    disk = ["publisher.transport=disk", f"publisher.disk_dir={tmp_path / 'disk'}"]
    finish(tmp_path / "run", *on_policy(*foreign, *disk))
    assert published(tmp_path / "run") == list(range(6)), "version 0 too"
    assert trained(tmp_path / "run") == trained(whole), "as if it were the run's own"
    assert engine.is_running()
    assert list((tmp_path / "disk").iterdir()) == []

    monkeypatch.setenv(KEY_ENV, "another key")
    answer = run(CONFIG, tmp_path / "refused", *on_policy(*foreign), timeout_s=120)
    assert answer.returncode == 2
    assert "engine-0: the vLLM server there does not take the key" in answer.stderr
    assert KEY_ENV in answer.stderr


def test_a_run_waits_for_a_server_of_somebody_else_that_hangs_and_goes_on_with_it(
    whole: Path, served: tuple[str, str, psutil.Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, key, engine = served
    monkeypatch.setenv(KEY_ENV, key)
    foreign = [
        "model.scratch=none",
        f"model.path={whole / 'model'}",
        f"rollout.urls=['{url}']",
        "observe.heartbeat_s=20",
    ]
    process = start(CONFIG, tmp_path / "run", *on_policy(*foreign))
    wait_for_steps(tmp_path / "run", 2, process, START_S)
    family = group_of(engine)
    for child in family:
        child.suspend()
    deadline = time.monotonic() + 120
    while ("engine lost", "engine-0") not in events(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in family:
        child.resume()
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert events(tmp_path / "run") == [("engine lost", "engine-0"), ("engine up", "engine-0")]
    assert trained(tmp_path / "run") == trained(whole)
