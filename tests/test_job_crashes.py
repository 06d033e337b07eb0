"""Crash fuzz: real runs, killed with SIGKILL at seeded moments until they are done. `make fuzz` does hundreds
of kills.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_fuzz import Crashes, differences, fuzz_config, never_killed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run at max_staleness 0, beside its own directory `whole`."""
    config = fuzz_config(tmp_path_factory.mktemp("on_policy"))
    never_killed(config, config.parent / "whole")
    return config


@pytest.mark.parametrize(("num_engines", "num_kills", "seed"), [(1, 5, 30), (2, 4, 37)])
def test_an_on_policy_run_ends_the_same_however_often_it_is_killed(
    on_policy: Path, tmp_path: Path, num_engines: int, num_kills: int, seed: int
) -> None:
    config = fuzz_config(tmp_path, rollout={"num_engines": num_engines})
    crashes = Crashes(config, tmp_path / "run", seed=seed, num_kills=num_kills)
    assert crashes.live(), "the faster the machine, the fewer: a run that is done is not killed"
    assert differences(on_policy.parent / "whole", tmp_path / "run") == []


def test_an_asynchronous_run_loses_nothing_and_keeps_its_bound_however_often_it_is_killed(
    tmp_path: Path,
) -> None:
    config = fuzz_config(
        tmp_path, buffer={"max_staleness": 3}, rollout={"num_engines": 2}, journal={"keep": "checkpoint"}
    )
    crashes = Crashes(config, tmp_path / "run", seed=8, num_kills=5)
    assert crashes.live()
