"""Runs in which trainer and engines take turns compute what runs side by side compute, whoever dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import NUM_STEPS
from crash_fuzz import PATIENCE_S, Crashes, differences, new_seed
from job_runs import (
    all_gone,
    children_of,
    read_lines,
    run,
    staging_of,
    start,
    variant,
    wait_for_steps,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TURNS = {"rollout": "trainer"}


def test_a_colocated_run_equals_the_run_apart_bit_for_bit(
    on_policy: Path, whole: Path, tmp_path: Path
) -> None:
    config = variant(
        on_policy, tmp_path, placement=TURNS, rollout={"num_engines": 2}, weight_sync={"chunk_bytes": 2**16}
    )
    answer = run(config, tmp_path / "run")
    assert answer.returncode == 0, answer.stderr
    assert differences(whole, tmp_path / "run") == []
    assert (tmp_path / "run" / "trained.jsonl").read_bytes() == (whole / "trained.jsonl").read_bytes()
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == NUM_STEPS
    assert all(step["perf/to_trainer_s"] > 0 and step["perf/handover_bytes"] > 0 for step in steps)
    assert all(step["perf/to_engines_s"] > 0 for step in steps[:-1])
    assert steps[-1]["perf/to_engines_s"] == 0, "after the last step the trainer keeps the devices"
    assert "taking turns" in answer.stdout
    assert "the run goes on without evaluation" not in answer.stdout
    assert {0, NUM_STEPS} <= {line["policy_version"] for line in read_lines(tmp_path / "run" / "eval.jsonl")}


def test_a_colocated_run_ends_the_same_whatever_is_killed(
    on_policy: Path, whole: Path, tmp_path: Path
) -> None:
    victims = ["engine", "trainer", "tree", "stop"]
    config = variant(on_policy, tmp_path, placement=TURNS)
    crashes = Crashes(config, tmp_path / "run", seed=new_seed(), victims=victims)
    assert crashes.live(), "the faster the machine, the fewer: a run that is done is not killed"
    assert differences(whole, tmp_path / "run") == []


def test_merged_adapters_of_two_trainer_processes_travel_in_chunks_and_a_killed_rank_ends_the_run_by_name(
    tmp_path: Path,
) -> None:
    trainer = {"lora": {"rank": 4, "alpha": 8}, "world_size": 2, "num_steps": 100_000}
    config = write_config(tmp_path, placement=TURNS, trainer=trainer, supervision={"max_restarts": 0})
    process = start(config, tmp_path / "run")
    wait_for_steps(tmp_path / "run", 3, process)
    children = children_of(process)
    (second,) = children_of(process, "trainer-1")
    second.kill()
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"trainer-1: process {second.pid} was killed by SIGKILL" in stderr
    assert "INFO asyncrl.trainer: serving" in stderr, "the end of its log"
    assert "Way out:" in stderr
    assert all_gone(children)
    assert staging_of(process.pid) == []
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert max(step["policy/logprob_gap_max"] for step in steps) <= 1e-4
