"""Runs in which trainer and engines take turns compute what runs side by side compute, whoever dies."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import NUM_STEPS
from crash_fuzz import CHILDREN, PATIENCE_S, differences, kill_tree, new_seed, promise_of
from job_runs import (
    all_gone,
    children_of,
    read_lines,
    run,
    staging_of,
    start,
    variant,
    wait_for_more_steps,
    wait_for_steps,
    write_config,
)
from resume_checker import read_evidence, violations
from turn_kills import FROZEN, standing_in

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


@dataclass
class Life:
    """A run in turns. An engine and a trainer are killed in a state of the lease, then all is killed, then it
    is interrupted; at last it ends.
    """

    run_dir: Path
    interrupted: tuple[int, int, str]
    """Its exit code, the number of steps then, and standard error."""
    ended: tuple[int, str]
    staging: list[Path]


@pytest.fixture(scope="module")
def life(on_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder, chance = tmp_path_factory.mktemp("life"), random.Random(new_seed())
    config, run_dir = variant(on_policy, folder, placement=TURNS), folder / "run"

    process = start(config, run_dir)
    for victim in chance.sample(["engine", "trainer"], 2):
        with standing_in(chance.choice(list(FROZEN)), process, run_dir, chance):
            for child in children_of(process, CHILDREN[victim]):
                child.kill()
        wait_for_more_steps(run_dir, 2, process)
    with standing_in(chance.choice(list(FROZEN)), process, run_dir, chance):
        kill_tree(process, chance)
    assert violations(read_evidence(run_dir), promise_of(config)) == []

    process = start(config, run_dir)
    with standing_in(chance.choice(list(FROZEN)), process, run_dir, chance):
        process.send_signal(2)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    interrupted = process.returncode, len(read_lines(run_dir / "metrics.jsonl")), stderr
    made = list((run_dir / "checkpoints").glob("step_*"))
    assert run_dir / "checkpoints" / f"step_{interrupted[1]}" in made, (interrupted, made)

    process = start(config, run_dir)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    return Life(run_dir, interrupted, (process.returncode, stderr), staging_of(process.pid))


def test_whoever_is_killed_in_whatever_state_of_the_lease_the_run_is_one_never_killed(
    whole: Path, life: Life
) -> None:
    assert life.ended[0] == 0, life.ended
    found = violations(
        read_evidence(life.run_dir), promise_of(life.run_dir / "config.yaml"), num_steps=NUM_STEPS
    )
    assert found == []
    assert differences(whole, life.run_dir) == []
    assert life.staging == []


def test_an_interrupt_in_any_state_ends_with_130_and_without_a_traceback(life: Life) -> None:
    code, _, stderr = life.interrupted
    assert code == 130, stderr
    assert "Traceback" not in stderr


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
