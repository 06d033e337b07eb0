"""The script behind docs/results/learning_curves.png, on curves that are made up so that the answer is
known.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "learning_curves.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learning_curves", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["learning_curves"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_run(root: Path, name: str, rewards: list[float], *, step_s: float = 1.0) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    lines = [
        {"step": n, "time_s": n * step_s, "reward/mean": reward} for n, reward in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_script_writes_a_picture_and_a_table_of_mean_and_extent(
    tmp_path: Path, script: ModuleType
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    write_run(runs, "max_staleness_4-seed0", [0.0, 0.2, 0.4])
    write_run(runs, "max_staleness_4-seed1", [0.2, 0.6, 0.8, 0.9], step_s=2.0)
    write_run(runs, "sync_reference-seed7", [0.1, 0.1, 0.1])
    (runs / "notes-seed").mkdir()
    assert script.main([str(runs), "--out", str(out)]) == 0
    assert (out / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((out / "learning_curves.csv").read_text().splitlines()))
    assert [row["variant"] for row in rows] == ["sync_reference"] * 3 + ["max_staleness_4"] * 3
    assert list(rows[4].values()) == ["max_staleness_4", "2", "2", "3", "0.4", "0.2", "0.6"]


def test_over_time_the_line_ends_with_the_first_seed_that_ends(tmp_path: Path, script: ModuleType) -> None:
    write_run(tmp_path, "a-seed0", [0.0, 0.5, 1.0], step_s=1.0)
    write_run(tmp_path, "a-seed1", [0.0, 0.5, 1.0], step_s=2.0)
    curves = list(script.read_runs(tmp_path)["a"].values())
    band = script.band_over_time(curves, window=1, num_points=3)
    assert band.places.tolist() == [2.0, 2.5, 3.0]
    assert band.high.tolist() == pytest.approx([0.5, 0.75, 1.0])
    assert band.low.tolist() == pytest.approx([0.0, 0.125, 0.25])
    assert band.mean.tolist() == pytest.approx([0.25, 0.4375, 0.625])


def test_half_a_last_line_is_left_out_and_any_other_bad_line_is_refused(
    tmp_path: Path, script: ModuleType
) -> None:
    write_run(tmp_path, "a-seed0", [0.1, 0.2])
    path = tmp_path / "a-seed0" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "ti')
    assert script.read_curve(path).rewards.tolist() == [0.1, 0.2]
    path.write_text("{bad\n" + path.read_text())
    with pytest.raises(SystemExit, match="line 1 is no JSON"):
        script.read_curve(path)


def test_no_runs_and_a_run_without_steps_are_told_with_the_way_out(
    tmp_path: Path, script: ModuleType
) -> None:
    with pytest.raises(SystemExit, match="name run directories like"):
        script.read_runs(tmp_path)
    (tmp_path / "a-seed0").mkdir()
    with pytest.raises(SystemExit, match="holds no steps"):
        script.read_runs(tmp_path)
