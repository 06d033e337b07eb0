"""The script behind learning.md in docs/results/, on numbers that are known."""

from __future__ import annotations

from pathlib import Path

import learning_curves as script

from asyncrl.config import load_config


def test_planned_runs_have_valid_configs_evaluations_and_unique_directories(
    tmp_path: Path,
) -> None:
    planned = script.plan(script.CASES, [0, 1], tmp_path)
    assert len({run.name for run in planned}) == len(planned) == 1 + 2 * len(script.CASES)
    assert planned[0].name == "quickstart-seed0", "the teacher is made first"
    for run in planned[1:]:
        config = load_config(run.config, run.settings)
        assert config.eval is not None
        assert config.seed == run.seed
        assert (config.teacher is not None) == (run.variant in script.NEEDS_TEACHER)
    assert [run.variant for run in script.plan(["dapo"], [0], tmp_path)] == ["dapo"], "without a teacher"
    drawn = [name for names in script.PANELS.values() for name in names]
    assert sorted(drawn) == sorted(script.CASES)
