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
from asyncrl.trainer import model_folder
from asyncrl.trainer.model_folder import ModelPin, make_model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


def begin(run_dir: Path, model: Path, given: str | None = "base", *, is_free: bool = False) -> ModelPin:
    pin = ModelPin(run_dir, given, is_free=is_free)
    pin.read(model)
    return pin


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.safetensors", b"MODEL.SAFETENSORS" * 1000, "model.safetensors is changed"),
        ("config.json", None, "config.json is missing"),
        ("chat_template.jinja", b"{{ messages }}", "chat_template.jinja is new"),
    ],
)
def test_a_run_does_not_go_on_from_another_model_unless_it_is_accepted_and_the_run_goes_on(
    tmp_path: Path, model: Path, name: str, content: bytes | None, why: str
) -> None:
    begin(tmp_path, model).write()
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    accepted = begin(tmp_path, model, is_free=True)
    with pytest.raises(ConfigError, match=f"is not the one that this run began with: {why};") as caught:
        begin(tmp_path, model)  # the start that accepts it may still be refused
    assert "--allow-change model.path" in caught.value.way_out
    accepted.write()
    begin(tmp_path, model)


def test_a_pin_that_cannot_be_read_is_told_and_one_of_a_model_from_scratch_says_how_it_is_made_again(
    tmp_path: Path, model: Path
) -> None:
    begin(tmp_path, model, None).write()
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=f"remove {model}: it is made again from the seed"):
        begin(tmp_path, model, None)
    (tmp_path / "model.json").write_text('{"given": ')
    with pytest.raises(ConfigError, match=r"model\.json.* cannot be read.*[^$]*--allow-change model.path"):
        ModelPin(tmp_path, "base")


def test_the_weights_are_read_once_and_again_only_where_a_file_was_touched(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = list[int](), model_folder.xxhash.xxh3_128
    monkeypatch.setattr(model_folder.xxhash, "xxh3_128", lambda: read.append(1) or real())
    for _ in range(2):
        begin(tmp_path, model).write()
        assert len(read) == 3
    moved = Path(shutil.copytree(model, tmp_path / "elsewhere"))  # with its times: the same model
    os.utime(moved / "model.safetensors", (1, 1))
    for _ in range(2):
        begin(tmp_path, moved, "elsewhere").write()
        assert len(read) == 4, "its new time is noted"


def test_a_model_of_the_hub_is_fetched_again_at_the_commit_that_the_run_began_with(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def snapshot_download(hub_id: str, *, revision: str | None = None, **_: Any) -> str:
        asked.append(revision)
        folder = tmp_path / "hub" / "snapshots" / (revision or f"commit{len(asked)}")
        return str(shutil.copytree(model, folder, dirs_exist_ok=True))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    config = load_config(write_config(tmp_path, model={"path": "some/model", "scratch": None}))
    for _ in range(2):
        pin = ModelPin(tmp_path, "some/model")
        pin.read(asyncio.run(make_model_folder(config, tmp_path, revision=pin.revision)))
        pin.write()
    assert asked == [None, "commit1"]
    assert ModelPin(tmp_path, "some/other").revision is None
