"""The bound, checked from what the trainer recorded of its own batches, not from the gate's counters."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_runs import read_lines, run, write_config

pytestmark = pytest.mark.slow

CASES = [(1, "wait"), (2, "wait"), (4, "wait"), (4, "mask"), (4, "drop")]


@pytest.mark.parametrize(("max_staleness", "on_overdue"), CASES)
def test_no_token_that_was_trained_on_is_older_than_the_bound(
    tmp_path: Path, max_staleness: int, on_overdue: str
) -> None:
    config = write_config(
        tmp_path,
        buffer={"max_staleness": max_staleness, "on_overdue": on_overdue, "look_ahead": max_staleness},
        trainer={"num_steps": 30, "num_groups": 2},
        rollout={
            "max_tokens": 100
        },  # with random weights the longest of 16 rollouts takes longer than a step
    )
    answer = run(config, tmp_path / "run")
    assert answer.returncode == 0, answer.stderr
    steps = read_lines(tmp_path / "run" / "trained.jsonl")
    assert len(steps) == 30
    ages = [
        step["version"] - version
        for step in steps
        for trajectory in step["trajectories"]
        for _, _, version in trajectory["spans"]
    ]
    assert max(ages) <= max_staleness
    assert max(ages) > 0, "the run was not asynchronous at all"
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert max(step["rollout/interrupted"] for step in metrics) > 0, "no rollout was interrupted by a publish"
    groups = [
        (trajectory["group_id"], trajectory["sample_index"])
        for step in steps
        for trajectory in step["trajectories"]
    ]
    assert len(groups) == len(set(groups)), "a rollout was trained on twice"
