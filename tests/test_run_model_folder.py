"""A run goes on from the model that it began with, known by the content of its files."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from job_runs import write_config

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.run import model_folder as model_pin
from asyncrl.run.model_folder import ModelPin, make_model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


def begin(run_dir: Path, model: Path, given: str = "base") -> None:
    run_dir.mkdir(exist_ok=True)
    pin = ModelPin(run_dir, given)
    pin.read(model)
    pin.write()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.safetensors", b"MODEL.SAFETENSORS" * 1000, "model.safetensors is changed"),
        ("config.json", None, "config.json is missing"),
        ("chat_template.jinja", b"{{ messages }}", "chat_template.jinja is new"),
    ],
)
def test_a_run_does_not_go_on_from_another_base_model(
    tmp_path: Path, model: Path, name: str, content: bytes | None, why: str
) -> None:
    begin(tmp_path / "run", model)
    before = (tmp_path / "run" / "model.json").read_bytes()
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"is not the one that this run began with: {why};") as caught:
        ModelPin(tmp_path / "run", "base").read(model)
    assert "--allow-change model.path" in caught.value.way_out
    assert (tmp_path / "run" / "model.json").read_bytes() == before


def test_a_pin_that_cannot_be_read_is_told_and_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"given": ')
    with pytest.raises(ConfigError, match=r"model\.json cannot be read") as caught:
        ModelPin(tmp_path, "base")
    assert "--allow-change model.path" in caught.value.way_out


def test_the_weights_are_read_once_and_again_only_where_a_file_was_touched(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    class Counts:
        def __init__(self) -> None:
            read.append(0)

        def update(self, data: memoryview) -> None:
            read[-1] += len(data)

        def hexdigest(self) -> str:
            return str(read[-1])

    monkeypatch.setattr(model_pin.xxhash, "xxh3_128", Counts)
    begin(tmp_path / "run", model)
    assert len(read) == 3
    begin(tmp_path / "run", model)
    assert len(read) == 3
    moved = Path(
        shutil.copytree(model, tmp_path / "elsewhere")
    )  # with its times; another path is another place of the same model
    os.utime(moved / "model.safetensors", (1, 1))
    begin(tmp_path / "run", moved, given="elsewhere")
    assert len(read) == 4
    begin(tmp_path / "run", moved, given="elsewhere")
    assert len(read) == 4, "its new time was noted"


def test_a_model_of_the_hub_is_fetched_again_at_the_commit_that_the_run_began_with(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def snapshot_download(hub_id: str, *, revision: str | None = None, **_: Any) -> str:
        asked.append(revision)
        folder = tmp_path / "hub" / "snapshots" / (revision or f"commit{len(asked)}")
        if not folder.exists():
            shutil.copytree(model, folder)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    config = load_config(write_config(tmp_path, model={"path": "some/model", "scratch": None}))
    for _ in range(2):
        pin = ModelPin(tmp_path, "some/model")
        folder = asyncio.run(make_model_folder(config, tmp_path, revision=pin.revision))
        pin.read(folder)
        pin.write()
    assert asked == [None, "commit1"]
    assert ModelPin(tmp_path, "some/other").revision is None


def test_a_model_that_was_accepted_becomes_the_runs_only_when_the_run_goes_on_with_it(
    tmp_path: Path, model: Path
) -> None:
    begin(tmp_path / "run", model)
    before = (tmp_path / "run" / "model.json").read_bytes()
    (model / "model.safetensors").write_bytes(b"other weights")
    pin = ModelPin(tmp_path / "run", "base", is_free=True)
    pin.read(model)
    assert (tmp_path / "run" / "model.json").read_bytes() == before, "the start may still be refused"
    with pytest.raises(ConfigError, match="is changed"):
        ModelPin(tmp_path / "run", "base").read(model)
    pin.write()
    ModelPin(tmp_path / "run", "base").read(model)


def test_a_model_that_is_made_from_scratch_is_made_again(tmp_path: Path, model: Path) -> None:
    tmp_path.joinpath("run").mkdir()
    pin = ModelPin(tmp_path / "run", None)
    pin.read(model)
    pin.write()
    (model / "config.json").unlink()
    with pytest.raises(ConfigError) as caught:
        ModelPin(tmp_path / "run", None).read(model)
    assert caught.value.way_out.startswith(f"remove {model}: it is made again from the seed")
