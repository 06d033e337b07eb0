"""buffer.filter in real runs: the same run twice at max_staleness 0, and the end of one that nothing can be
learnt from.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from job_runs import read_lines, run, write_config

pytestmark = pytest.mark.slow


def test_at_max_staleness_0_two_runs_with_the_filter_are_trained_on_the_same_tokens(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        task={"python": "rewards_for_test:BeginsWithALetter"},
        buffer={"max_staleness": 0, "filter": "equal_rewards"},
        trainer={"num_steps": 5},
    )
    for name in ("first", "second"):
        answer = run(config, tmp_path / name)
        assert answer.returncode == 0, answer.stderr
    first, second = ((tmp_path / name / "trained.jsonl").read_bytes() for name in ("first", "second"))
    assert first == second
    steps = read_lines(tmp_path / "first" / "trained.jsonl")
    for step in steps:
        by_group: dict[int, set[float]] = {}
        for trajectory in step["trajectories"]:
            by_group.setdefault(trajectory["group_id"], set()).add(trajectory["reward"])
        assert len(by_group) == 4
        assert all(len(rewards) > 1 for rewards in by_group.values()), "every group teaches"
    last = read_lines(tmp_path / "first" / "metrics.jsonl")[-1]
    assert last["rollout/filtered"] > 0, "nothing was filtered: the test shows nothing"
    assert last["rollout/filtered_tokens"] > 0
    assert last["rollout/failed"] == 0
    assert "buffer.filter=equal_rewards replaced" in answer.stdout


def test_a_run_whose_rewards_never_differ_ends_with_the_rewards_and_the_way_out(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        task={"python": "rewards_for_test:NeverRight"},
        buffer={"filter": "equal_rewards", "max_filtered_groups": 12},
    )
    answer = run(config, tmp_path / "run")
    assert answer.returncode == 1
    assert "12 groups in a row had the same reward for all their rollouts (0 in 12;" in answer.stderr
    assert "Way out: if that is the lowest reward" in answer.stderr
