"""The script behind learning.md in docs/results/, on numbers that are known."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import learning_curves as script
import pytest
import yaml

from asyncrl.config import load_config


def write_run(folder: Path, seed: int, *, num_steps: int = 4) -> None:
    """Evaluated before the first step, after two, and after the last."""
    folder.mkdir(parents=True)
    steps = [
        {
            "step": step,
            "time_s": 10.0 * step,
            "reward/mean": 0.1 * step,
            "rollout/filtered": 2 * (step + 1),
            "tokens/generated": 100 * (step + 1),
            "task/found": 0.5 + 0.1 * step,
        }
        for step in range(num_steps)
    ]
    versions = [0, 2, num_steps]
    evaluations = [
        {"policy_version": version, "time_s": 5.0 + version, "eval/reward_mean": (version + seed) / 10}
        for version in versions
    ]
    for name, rows in (("metrics.jsonl", steps), ("eval.jsonl", evaluations)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"state": "done"}))
    settings = {"rollout": {"group_size": 8}, "trainer": {"num_groups": 3}}
    settings |= {"model": {"path": "m"}, "task": {"python": "a:B"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))


def test_every_planned_run_has_a_valid_config_an_evaluation_and_a_directory_of_its_own(
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


def test_the_runs_that_are_there_become_table_figures_and_picture(tmp_path: Path) -> None:
    root, out = tmp_path / "runs", tmp_path / "out"
    for case in ("dapo", "search"):
        for seed in (0, 1):
            write_run(root / f"{case}-seed{seed}", seed)
    arguments = [str(root), "--only", "dapo", "search", "--seeds", "0", "1", "2", "--draw", "--out", str(out)]
    assert script.main(arguments) == 0
    page = (out / "learning.md").read_text()
    assert "| DAPO | `configs/dapo.yaml` | 4 | 0.050 | 0.400, 0.500 | 0.450 ± 0.071 | 160 | 400 | 9 |" in page
    assert "--seeds 0 1\n" in page, "the seeds that were run"
    assert len(list(csv.DictReader((out / "learning.csv").read_text().splitlines()))) == 2 * 2 * 3
    assert (out / "learning.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="holds no run that is done"):
        script.main([str(tmp_path / "none"), "--draw"])
