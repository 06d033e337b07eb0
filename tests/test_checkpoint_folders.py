"""Checkpoints on disk: whole or not there, damaged ones named and passed over, the right ones kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asyncrl.checkpoint.checkpoints import Checkpoints
from asyncrl.checkpoint.manifest import check_manifest
from asyncrl.config import CheckpointConfig
from asyncrl.errors import CheckpointError


def make(run_dir: Path, *versions: int, **config: object) -> Checkpoints:
    checkpoints = Checkpoints(run_dir, CheckpointConfig(**{"every": 1, **config}))
    for version in versions:
        write(checkpoints, version)
    return checkpoints


def write(checkpoints: Checkpoints, version: int) -> Path:
    pending = checkpoints.begin()
    (pending.trainer_dir / "deep").mkdir(parents=True)
    (pending.trainer_dir / "weights").write_bytes(os.urandom(1000))
    (pending.trainer_dir / "deep" / "rng").write_bytes(bytes([version]))
    return checkpoints.finish(pending, version, {"num_drawn": 8 * version})


def test_the_newest_whole_checkpoint_comes_back_with_what_it_was_given(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 10, 20, 30)
    whole, told = checkpoints.newest_whole()
    assert whole is not None
    assert (whole.version, whole.controller, told) == (30, {"num_drawn": 240}, [])
    assert (whole.trainer_dir / "deep" / "rng").read_bytes() == bytes([30])


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "no_manifest", "rename"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    checkpoints = make(tmp_path, 10, 20)
    folder = checkpoints.root / "step_20"
    weights = folder / "trainer" / "weights"
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[500] ^= 1
        weights.write_bytes(content)
    elif damage == "cut":
        weights.write_bytes(content[:-1])
    elif damage == "remove":
        weights.unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text('{"format": 1, "ver')
    elif damage == "no_manifest":
        (folder / "manifest.json").unlink()
    else:
        folder.rename(checkpoints.root / "step_25")
    whole, told = checkpoints.newest_whole()
    assert whole is not None
    assert whole.version == 10
    assert len(told) == 1
    assert "step_2" in told[0]


def test_what_a_killed_run_left_half_done_is_removed_and_never_taken(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 10)
    half = checkpoints.begin()
    half.trainer_dir.mkdir()
    whole, told = make(tmp_path).newest_whole()
    assert whole is not None
    assert (whole.version, told) == (10, [])
    assert not half.folder.exists()


def test_without_any_whole_one_there_is_none(tmp_path: Path) -> None:
    assert make(tmp_path).newest_whole() == (None, [])
    assert make(tmp_path).oldest_version() == 0


def test_the_newest_multiples_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, keep_last=2, keep_every=4, keep_best=True)
    checkpoints.evaluated(0, 2.0)  # of the initial weights, which have no checkpoint
    for version in range(1, 11):
        write(checkpoints, version)
        checkpoints.evaluated(version, 1.0 if version == 2 else version / 100)
    assert checkpoints.versions() == [2, 4, 8, 9, 10]
    assert checkpoints.oldest_version() == 9, "the journal need not reach back to those that stay for ever"
    assert make(tmp_path / "other", 5).oldest_version() == 0, "the only one may be damaged: what comes before it is needed still"


def test_a_checkpoint_made_again_replaces_the_old_one(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 10)
    before = (checkpoints.root / "step_10" / "trainer" / "weights").read_bytes()
    write(checkpoints, 10)
    assert (checkpoints.root / "step_10" / "trainer" / "weights").read_bytes() != before
    assert check_manifest(checkpoints.root / "step_10").version == 10


def test_a_disk_that_takes_nothing_is_an_error_that_leaves_the_last_one_whole(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 10)
    pending = checkpoints.begin()
    (pending.folder / "controller.json").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="no checkpoint can be written .* No space left") as caught:
        checkpoints.finish(pending, 20, {"num_drawn": 1})
    assert "free space" in caught.value.way_out
    assert not pending.folder.exists()
    whole, told = checkpoints.newest_whole()
    assert whole is not None
    assert (whole.version, told) == (10, [])


def test_a_manifest_of_another_format_is_not_guessed_at(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 10)
    path = checkpoints.root / "step_10" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match="format 2"):
        check_manifest(checkpoints.root / "step_10")
