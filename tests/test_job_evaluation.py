"""Real runs that evaluate with their rollout engines: the training is that of a run without, bit for bit, and
each evaluation has the weights of one version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import NUM_STEPS
from crash_fuzz import Crashes, differences, kill_tree, new_seed
from job_runs import read_lines, run, start, variant, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ON_ROLLOUT = {"engine": "rollout"}
EVERY_VERSION = ON_ROLLOUT | {"every": 1}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "apart": {},
    "turns": {"rollout": "trainer"},
    "moving": {"rollout": "trainer", "share": "none"},
}


def rewards_of(run_dir: Path) -> dict[int, float]:
    """Of each version that was evaluated; each was evaluated once."""
    lines = read_lines(run_dir / "eval.jsonl")
    assert [line["policy_version"] for line in lines] == sorted({line["policy_version"] for line in lines})
    return {line["policy_version"]: line["eval/reward_mean"] for line in lines}


@pytest.fixture(scope="module")
def apart(on_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with devices of their own that evaluates every version."""
    return evaluated(on_policy, tmp_path_factory.mktemp("apart"), "apart")


def evaluated(on_policy: Path, folder: Path, placement: str) -> Path:
    config = variant(
        on_policy, folder, placement=PLACEMENTS[placement], rollout={"num_engines": 2}, eval=EVERY_VERSION
    )
    answer = run(config, folder / "run")
    assert answer.returncode == 0, answer.stderr
    lines = read_lines(folder / "run" / "eval.jsonl")
    assert {line["eval/failed"] + line["eval/skipped"] + line["eval/abandoned"] for line in lines} == {0}
    assert not (folder / "run" / "logs" / "engine-eval.log").exists()
    return folder / "run"


def test_evaluation_on_rollout_engines_changes_no_bit(whole: Path, apart: Path) -> None:
    assert differences(whole, apart) == []
    rewards, of_whole = rewards_of(apart), rewards_of(whole)
    assert list(rewards) == [*range(NUM_STEPS + 1)]
    assert {version: rewards[version] for version in of_whole} == of_whole


@pytest.mark.parametrize("placement", ["turns", "moving"])
def test_colocated_evaluation_changes_no_bit(
    on_policy: Path, whole: Path, apart: Path, tmp_path: Path, placement: str
) -> None:
    run_dir = evaluated(on_policy, tmp_path, placement)
    assert differences(whole, run_dir) == []
    assert rewards_of(run_dir) == rewards_of(apart)


@pytest.mark.parametrize("placement", ["apart", "moving"])
def test_kills_leave_each_evaluation_its_rewards(
    on_policy: Path, whole: Path, apart: Path, tmp_path: Path, placement: str
) -> None:
    config = variant(on_policy, tmp_path, placement=PLACEMENTS[placement], eval=EVERY_VERSION)
    crashes = Crashes(
        config, tmp_path / "run", seed=new_seed(), victims=["engine", "trainer", "tree", "stop"]
    )
    assert crashes.live(), "the faster the machine, the fewer: a run that is done is not killed"
    assert differences(whole, tmp_path / "run") == []
    rewards, expected = rewards_of(tmp_path / "run"), rewards_of(apart)
    assert rewards == {version: expected[version] for version in rewards}
    assert NUM_STEPS in rewards


def gated(on_policy: Path, folder: Path, placement: str) -> tuple[Path, Path]:
    """A config whose evaluations do not end while the second path is missing."""
    gate = folder / "gate"
    task = {"python": "rewards_for_test:Gated", "size": 50, "args": {"gate": str(gate)}}
    where, held_out = PLACEMENTS[placement], ON_ROLLOUT | {"task": task}
    return variant(on_policy, folder, placement=where, eval=held_out), gate


def state_of(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def is_evaluating(run_dir: Path, num_steps: int) -> bool:
    """And so many steps are all that can be taken meanwhile."""
    status, steps = state_of(run_dir), read_lines(run_dir / "metrics.jsonl")
    return (status.get("evaluation") or {}).get("state") == "sampling" and len(steps) >= num_steps


@pytest.mark.parametrize(("placement", "num_steps"), [("apart", 1), ("turns", 0)])
def test_kill_in_an_evaluation_changes_no_step(
    on_policy: Path, whole: Path, tmp_path: Path, placement: str, num_steps: int
) -> None:
    config, gate = gated(on_policy, tmp_path, placement)
    run_dir = tmp_path / "run"
    process = start(config, run_dir)
    wait_until(lambda: is_evaluating(run_dir, num_steps), process)
    assert state_of(run_dir)["weight_sync"]["version"] == 0, "it is not replaced"
    kill_tree(process)
    assert len(read_lines(run_dir / "metrics.jsonl")) == num_steps
    gate.touch()
    answer = run(config, run_dir)
    assert answer.returncode == 0, answer.stderr
    assert differences(whole, run_dir) == []
    first, *rest = rewards_of(run_dir)
    assert first in (0, 1), "1 where the batch of version 0 was taken before the kill"
    assert rest == [*range(6, NUM_STEPS + 1, 6)]
