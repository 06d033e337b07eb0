"""Real runs that evaluate on their rollout engines train bit for bit the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import NUM_STEPS
from crash_fuzz import Crashes, differences, new_seed
from job_runs import read_lines, run, variant

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
    """The directory of a run with separate devices that evaluates every version."""
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
    assert crashes.live()
    assert differences(whole, tmp_path / "run") == []
    rewards, expected = rewards_of(tmp_path / "run"), rewards_of(apart)
    assert rewards == {version: expected[version] for version in rewards}
    assert NUM_STEPS in rewards
