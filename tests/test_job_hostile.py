"""A real run whose agent misbehaves in every other rollout, and its judge once: each costs a rollout at most,
the run its verdict never.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_agents_for_test import BODIES, WAYS
from job_runs import read_lines, run, write_config

pytestmark = pytest.mark.slow


def test_an_agent_that_misbehaves_in_every_way_costs_its_rollouts_and_not_the_run(tmp_path: Path) -> None:
    log, run_dir = tmp_path / "log", tmp_path / "run"
    config = write_config(
        tmp_path,
        task={"python": "rewards_for_test:JudgeThatNeverGivesUp"},
        generator={"python": "hostile_agents_for_test:misbehaves", "args": {"log": str(log)}},
        gateway={"max_calls": 8},
        rollout={"timeout_s": 4, "retries": 4, "max_tokens": 8, "max_prompt_tokens": 40},
        trainer={"num_steps": 6},
    )
    ended = run(config, run_dir, timeout_s=200)
    assert ended.returncode == 0, ended.stderr

    metrics = read_lines(run_dir / "metrics.jsonl")
    assert len(metrics) == 6
    said: dict[str, set[int]] = {}
    for way, status in read_lines(log):  # type: ignore[misc]
        said.setdefault(way, set()).add(status)
    assert set(said) == set(WAYS)
    assert all(said[way] == {413 if way == "too large a body" else 400} for way in BODIES), said
    assert said["floods"] == said["calls after its end"] == {410}
    assert metrics[-1]["rollout/retried"] > 0, "what failed was tried again; what ran out of time was not"
    assert metrics[-1]["harness/restarts"] == 0
    assert metrics[-1]["rollout/abandoned"] == 1, (
        "a call of the judge, which the end of the run has not waited for either"
    )
    assert "rewards_for_test:JudgeThatNeverGivesUp did not end within" in ended.stdout + ended.stderr

    inspect = [sys.executable, "-m", "asyncrl.cli", "inspect", str(run_dir), "--json"]
    inspected = subprocess.run(inspect, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(inspected.stdout)["bound_kept"] is True
