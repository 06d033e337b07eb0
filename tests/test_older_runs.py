"""Run directories of older versions: older_runs/VERSION.tar.xz is a finished run of three
steps, made by that version. Each released version has one.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import tarfile
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from asyncrl import __version__
from asyncrl.base.errors import AsyncrlError
from asyncrl.cli import app

FOLDER = Path(__file__).with_name("older_runs")
ROOT = FOLDER.parents[1]
VERSIONS = [path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz")]


def unpacked(version: str, folder: Path) -> Path:
    with tarfile.open(FOLDER / f"{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def of_a_stranger(folder: Path) -> Path:
    """Return a run of a version with other sections, keys, values and tables."""
    run_dir = unpacked("0.1.0", folder)
    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["warp"] = {"speed": 9}
    config["trainer"]["hyper"] = True
    config["task"]["depth"] = {"of": ["seas", 20_000]}
    config["buffer"] |= {"on_overdue": "beam up"}
    del config["rollout"]["group_size"]
    path.write_text(f"# asyncrl 9.1\n{yaml.safe_dump(config)}")
    with sqlite3.connect(run_dir / "journal.sqlite") as journal:
        journal.execute("ALTER TABLE groups RENAME TO squads")
        journal.execute("PRAGMA user_version = 99")
    journal.close()
    return run_dir


def said(*arguments: str | Path) -> str:
    answer = CliRunner().invoke(app, [*map(str, arguments)])
    assert answer.exception is None, (answer.output, answer.exception)
    return answer.output


def test_every_released_version_has_a_run() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changes, flags=re.MULTILINE)
    assert sorted(VERSIONS) == sorted(released)


@pytest.mark.parametrize("version", [*VERSIONS, "9.1"])
def test_run_of_another_version_is_read_and_not_resumed(
    version: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    is_strange = version == "9.1"
    run_dir = of_a_stranger(folder) if is_strange else unpacked(version, folder)
    assert "3 of 3" in said("status", run_dir)
    assert '"num_steps": 3' in said("inspect", run_dir, "--json")
    assert "report.html" in said("report", run_dir)
    final = load_file(run_dir / "final" / "model.safetensors")
    for step in ("last", "3"):
        out = tmp_path / step
        said("export", run_dir, out, "--step", step)
        exported = load_file(out / "model.safetensors")
        assert {name: one.tobytes() for name, one in exported.items()} == {
            name: one.tobytes() for name, one in final.items()
        }
        AutoModelForCausalLM.from_pretrained(out)
        assert AutoTokenizer.from_pretrained(out).chat_template
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=step == "3")
        if step == "last":
            assert not (run_dir / "checkpoints").exists()
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    config = run_dir / "config.yaml"
    plain = tmp_path / "plain.yaml"
    values = {"model": {"path": "m"}, "task": {"python": "asyncrl.tasks.toy:Letters"}}
    plain.write_text(json.dumps(values))
    for given in (config, plain):
        answer = CliRunner().invoke(app, ["run", str(given), "--run-dir", str(run_dir)])
        assert isinstance(answer.exception, AsyncrlError)
        text = str(answer.exception)
        assert f"was written by asyncrl {version}, and this is {__version__}" in text
    assert {path: path.read_bytes() for path in before} == before
