"""Runs in which trainer and engines take turns: what they compute, and what is left of them when somebody
dies.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from crash_fuzz import PATIENCE_S, fuzz_config, never_killed, promise_of
from crash_fuzz import differences as differences_of_all
from job_runs import read_lines, run, staging_of, start, wait_for_steps, write_config
from resume_checker import read_evidence, violations
from test_job_equals_reference import NUM_STEPS, differences, reference  # noqa: F401  a fixture
from turn_kills import FROZEN, kill, standing_in

pytestmark = pytest.mark.slow
TURNS = {"rollout": "trainer"}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the same run side by side."""
    folder = tmp_path_factory.mktemp("apart")
    answer = run(write_config(folder), folder / "run")
    assert answer.returncode == 0, answer.stderr
    return folder / "run"


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_colocated_run_equals_the_run_apart_and_the_plain_loop_bit_for_bit(
    reference: Path,  # noqa: F811
    apart: Path,
    tmp_path: Path,
    num_engines: int,
) -> None:
    config = write_config(
        tmp_path, placement=TURNS, rollout={"num_engines": num_engines}, publisher={"chunk_bytes": 2**16}
    )
    answer = run(config, tmp_path / "run")
    assert answer.returncode == 0, answer.stderr
    assert differences(reference, tmp_path / "run") == []
    assert differences_of_all(apart, tmp_path / "run") == []
    assert (tmp_path / "run" / "trained.jsonl").read_bytes() == (apart / "trained.jsonl").read_bytes()
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == NUM_STEPS
    assert all(step["perf/to_trainer_s"] > 0 and step["perf/handover_bytes"] > 0 for step in steps)
    assert all(step["perf/to_engines_s"] > 0 for step in steps[:-1])
    assert steps[-1]["perf/to_engines_s"] == 0, "after the last step the trainer keeps the devices"
    assert "taking turns" in answer.stdout


def test_two_trainer_processes_take_turns_as_they_train_apart(tmp_path: Path) -> None:
    trainer = {"world_size": 2, "num_steps": 5}
    answers = [
        run(write_config(tmp_path, placement=placement, trainer=trainer), tmp_path / name)
        for name, placement in (("apart", {}), ("turns", TURNS))
    ]
    assert [answer.returncode for answer in answers] == [0, 0], answers[0].stderr + answers[1].stderr
    assert differences_of_all(tmp_path / "apart", tmp_path / "turns") == []


def test_merged_adapters_travel_in_chunks_and_adapters_alone_are_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    trainer = {"lora": {"rank": 4, "alpha": 8}, "num_steps": 4}
    refused = run(
        write_config(tmp_path, placement=TURNS, trainer=trainer, publisher={"transport": "lora"}),
        tmp_path / "refused",
    )
    assert refused.returncode == 2
    assert "an engine that sleeps has given its weights away" in refused.stderr
    assert not (tmp_path / "refused").exists()
    answer = run(write_config(tmp_path, placement=TURNS, trainer=trainer), tmp_path / "run")
    assert answer.returncode == 0, answer.stderr
    assert (
        max(step["policy/logprob_gap_max"] for step in read_lines(tmp_path / "run" / "metrics.jsonl")) <= 1e-4
    )


def test_an_evaluation_gets_whole_weights_at_its_versions_and_leaves_the_run_as_it_was(
    apart: Path, tmp_path: Path
) -> None:
    task = {"python": "asyncrl.tasks.letters:Letters", "size": 8}
    config = write_config(tmp_path, placement=TURNS, eval={"task": task, "every": 5, "num_prompts": 4})
    process = start(config, tmp_path / "run")
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    lines = read_lines(tmp_path / "run" / "eval.jsonl")
    assert {line["policy_version"] for line in lines} >= {0, 12}
    assert "the run goes on without evaluation" not in stdout
    assert differences_of_all(apart, tmp_path / "run") == []
    assert staging_of(process.pid) == []


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run in turns with a training of some length, beside the directory `whole` of the same
    run apart, never killed.
    """
    folder = tmp_path_factory.mktemp("turns")
    trainer = {"micro_batch_tokens": 32, "num_steps": 24}
    never_killed(fuzz_config(folder, trainer=trainer), folder / "whole")
    return fuzz_config(folder, trainer=trainer, placement=TURNS)


@pytest.mark.parametrize("victim", ["controller", "trainer", "engine"])
def test_whoever_is_killed_in_whatever_state_of_the_lease_the_run_is_one_never_killed(
    never: Path, tmp_path: Path, victim: str
) -> None:
    run_dir = tmp_path / "run"
    process = start(never, run_dir)
    for number, state in enumerate(FROZEN):
        with standing_in(state, process, run_dir, seed=number):
            kill(victim, process)
        if victim == "controller":
            assert violations(read_evidence(run_dir), promise_of(never)) == [], state
            process = start(never, run_dir)
        else:
            wait_for_steps(run_dir, len(read_lines(run_dir / "metrics.jsonl")) + 2, process)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert (
        violations(
            read_evidence(run_dir), promise_of(never), num_steps=len(read_lines(run_dir / "metrics.jsonl"))
        )
        == []
    )
    assert differences_of_all(never.parent / "whole", run_dir) == []
    assert staging_of(process.pid) == []


@pytest.mark.parametrize("state", ["generating", "handover to trainer", "training", "handover to engines"])
def test_an_interrupt_in_any_state_ends_with_a_checkpoint_of_the_newest_version(
    never: Path, tmp_path: Path, state: str
) -> None:
    process = start(never, tmp_path / "run")
    wait_for_steps(tmp_path / "run", 1, process)
    with standing_in(state, process, tmp_path / "run", seed=2):
        process.send_signal(2)
        time.sleep(0.2)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    num_steps = len(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert (tmp_path / "run" / "checkpoints" / f"step_{num_steps}" / "manifest.json").exists(), stdout
