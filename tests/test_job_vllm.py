"""Real runs on vLLM servers train on the same tokens through failures."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from job_runs import (
    ROOT,
    children_of,
    engine_events,
    environment,
    read_lines,
    run,
    staging_of,
    start,
    wait_for_steps,
    wait_until,
)
from process_ends import all_gone
from vllm_process import vllm_python

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]
CONFIG = ROOT / "configs" / "quickstart-vllm.yaml"
ENGINE = "asyncrl_servers.vllm"
PATIENCE_S = 600.0


def small(*overrides: str) -> list[str]:
    """The quickstart with small batches, on-policy."""
    sizes = "rollout.threads=1 rollout.slots=16 rollout.group_size=4 rollout.max_tokens=24 trainer.threads=1"
    steps = "trainer.num_groups=4 trainer.num_steps=6 buffer.max_staleness=0 supervision.backoff_s=0.1"
    shown = "observe.console=plain observe.trackers=[]"
    return [
        f"rollout.vllm_python={vllm_python()}",
        *f"{sizes} {steps} {shown}".split(),
        *overrides,
    ]


def trained(run_dir: Path) -> bytes:
    """Tokens, rewards, losses and weights' versions of every step."""
    return (run_dir / "trained.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of an undisturbed run by files."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    answer = run(CONFIG, run_dir, *small(), timeout_s=PATIENCE_S)
    assert answer.returncode == 0, answer.stderr
    return run_dir


def test_a_run_samples_with_the_weights_that_it_trained(whole: Path) -> None:
    steps = read_lines(whole / "metrics.jsonl")
    assert len(steps) == 6
    assert max(step["policy/logprob_gap_max"] for step in steps) <= 1e-4
    assert len({line["loss"] for line in read_lines(whole / "trained.jsonl")}) == 6, (
        "they differ by step"
    )


def test_a_run_trains_over_the_supports_of_vllm(tmp_path: Path) -> None:
    cut = ["rollout.top_p=0.8", "rollout.min_p=0.02", "rollout.temperature=1.2"]
    limit = "trainer.logprob_gap_limit=1e-4"
    answer = run(CONFIG, tmp_path / "run", *small(*cut, limit), timeout_s=PATIENCE_S)
    assert answer.returncode == 0, answer.stderr
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 6
    assert max(step["policy/logprob_gap_max"] for step in steps) <= 1e-4


def test_slots_follow_a_small_kv_cache_and_a_run_trains_the_same(
    whole: Path, tmp_path: Path
) -> None:
    # 2 layers with keys and values of 2 heads of 32 float32 take 1 KiB a token.
    memory = f"rollout.vllm.kv-cache-memory-bytes={10 * 32 * 1024}"
    cache = ["rollout.slots=auto", "rollout.vllm.block-size=32", memory]
    run_dir = tmp_path / "run"
    answer = run(CONFIG, run_dir, *small(*cache), timeout_s=PATIENCE_S)
    assert answer.returncode == 0, answer.stderr
    steps = read_lines(run_dir / "metrics.jsonl")
    # vLLM keeps one block for itself. The other nine hold 288 tokens, and a rollout may
    # take 128, as blocks are counted before vLLM has started.
    assert steps[0]["rollout/slots"] == 2
    assert {step["engine/preempted"] for step in steps} == {0}
    assert trained(run_dir) == trained(whole)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_run_without_files_trains_the_same_after_a_vllm_kill(
    whole: Path, tmp_path: Path, transport: str
) -> None:
    evaluation = "eval={task: {python: 'asyncrl.tasks.toy:Letters'}, every: 3, num_prompts: 8, slots: 8}"
    run_dir = tmp_path / "run"
    process = start(
        CONFIG, run_dir, *small(f"weight_sync.transport={transport}", evaluation)
    )
    wait_for_steps(run_dir, 2, process, PATIENCE_S)
    (engine,) = children_of(process, "specs/engine-0.json")
    family = [engine, *engine.children(recursive=True)]
    engine.kill()
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert f"engine-0: process {engine.pid} was killed by SIGKILL" in stdout
    assert "restarting engine-0, 1 of 3" in stdout
    assert trained(run_dir) == trained(whole)
    assert engine_events(run_dir) == [
        ("engine lost", "engine-0"),
        ("engine up", "engine-0"),
    ]
    versions = {line["policy_version"] for line in read_lines(run_dir / "eval.jsonl")}
    assert {0, 6} <= versions <= {0, 3, 6}, "an evaluation has its file"
    assert all_gone(family), "its workers go with it"
    assert staging_of(process.pid) == []


@pytest.fixture(scope="module")
def served(
    whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, psutil.Process]]:
    """URL, key and process of a server that `asyncrl serve engine` keeps."""
    folder = tmp_path_factory.mktemp("served")
    overrides = small(
        "model.scratch=none", f"model.path={whole / 'model'}", "observe.heartbeat_s=300"
    )
    command = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "serve",
        "engine",
        str(CONFIG),
        *overrides,
    ]
    command += ["--run-dir", str(folder / "run")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"ENGINE_URL=(\S+) ENGINE_KEY=(\S+)", line):
                (engine,) = children_of(process, ENGINE)
                yield match[1], match[2], engine
                break
        else:
            raise AssertionError(f"it ended with {process.wait()}")
    finally:
        children = children_of(process) if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert all_gone(children)


def test_foreign_server_gets_weights_first_and_outlives_the_run(
    whole: Path,
    served: tuple[str, str, psutil.Process],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, key, engine = served
    foreign = [
        "model.scratch=none",
        f"model.path={whole / 'model'}",
        f"rollout.urls=['{url}']",
    ]
    disk = ["weight_sync.transport=disk", f"weight_sync.disk_dir={tmp_path / 'disk'}"]
    monkeypatch.setenv("ASYNCRL_VLLM_KEY", "another key")
    refused = run(CONFIG, tmp_path / "refused", *small(*foreign), timeout_s=PATIENCE_S)
    assert refused.returncode == 2
    assert "engine-0: the vLLM server there refuses /health" in refused.stderr
    assert "ASYNCRL_VLLM_KEY" in refused.stderr

    monkeypatch.setenv("ASYNCRL_VLLM_KEY", key)
    run_dir = tmp_path / "run"
    process = start(CONFIG, run_dir, *small(*foreign, *disk, "observe.heartbeat_s=30"))
    wait_for_steps(run_dir, 2, process, PATIENCE_S)
    family = [engine, *engine.children(recursive=True)]
    for child in family:
        child.suspend()
    try:
        wait_until(lambda: engine_events(run_dir), process)
    finally:
        for child in family:
            child.resume()
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert engine_events(run_dir) == [
        ("engine lost", "engine-0"),
        ("engine up", "engine-0"),
    ]
    assert trained(run_dir) == trained(whole), "as if it were the run's own"
    with sqlite3.connect(
        f"file:{run_dir / 'journal.sqlite'}?mode=ro", uri=True
    ) as database:
        published = database.execute(
            "select version from publishes order by version"
        ).fetchall()
    database.close()
    assert [version for (version,) in published] == list(range(6)), "version 0 too"
    assert engine.is_running()
    assert list((tmp_path / "disk").iterdir()) == []
