"""Real runs, killed at random moments until they are done. `make fuzz` does hundreds of kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import NUM_STEPS
from crash_fuzz import Crashes, differences, fuzz_config, new_seed
from job_runs import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_an_on_policy_run_ends_the_same_whatever_is_killed(
    on_policy: Path, whole: Path, tmp_path: Path
) -> None:
    victims = ["tree", "controller", "trainer", "engine", "stop"]
    crashes = Crashes(on_policy, tmp_path / "run", seed=new_seed(), victims=victims)
    assert crashes.live(), "the faster the machine, the fewer: a run that is done is not killed"
    assert differences(whole, tmp_path / "run") == []
    versions = [line["policy_version"] for line in read_lines(tmp_path / "run" / "eval.jsonl")]
    assert versions == sorted(set(versions)), "each version is evaluated once"
    assert (versions[0], versions[-1]) == (0, NUM_STEPS)


def test_an_asynchronous_run_with_a_filter_loses_nothing_and_keeps_its_bound(tmp_path: Path) -> None:
    config = fuzz_config(
        tmp_path,
        task={"python": "rewards_for_test:BeginsWithALetter"},
        buffer={"max_staleness": 3, "look_ahead": 3, "filter": "equal_rewards"},
        rollout={"num_engines": 2, "max_tokens": 100},
        trainer={"num_steps": 24, "num_groups": 2},
        journal={"keep": "checkpoint"},
    )
    crashes = Crashes(config, tmp_path / "run", seed=new_seed(), num_kills=3)
    assert crashes.live()
    trained = [line for line in read_lines(tmp_path / "run" / "trained.jsonl") if "version" in line]
    groups = [{(entry["group_id"], entry["reward"]) for entry in line["trajectories"]} for line in trained]
    assert all(len({group for group, _ in rewards}) < len(rewards) for rewards in groups), (
        "every batch teaches"
    )
    last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["rollout/filtered"] > 0, "nothing was filtered: the test shows nothing"
    ages = {
        line["version"] - version
        for line in trained
        for entry in line["trajectories"]
        for _, _, version in entry["spans"]
    }
    assert max(ages) > 0, "the run was not asynchronous at all"
    assert max(ages) <= 3
