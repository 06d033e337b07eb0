"""Checkpoints on disk: whole or not there, damaged ones named and passed over, the
right ones kept.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from asyncrl.base.errors import CheckpointError
from asyncrl.config.checkpoint_config import CheckpointConfig
from asyncrl.journal.checkpoint_folders import RECORDS, Checkpoints, set_aside


def make(run_dir: Path, *versions: int, **config: object) -> Checkpoints:
    checkpoints = Checkpoints(run_dir, CheckpointConfig(**{"every": 1, **config}))
    for version in versions:
        write(checkpoints, version)
    return checkpoints


def write(checkpoints: Checkpoints, version: int) -> Path:
    pending = checkpoints.begin()
    (pending / "trainer" / "deep").mkdir(parents=True)
    (pending / "trainer" / "weights").write_bytes(os.urandom(1000))
    (pending / "trainer" / "deep" / "rng").write_bytes(bytes([version]))
    return checkpoints.finish(pending, version, {"num_drawn": 8 * version})


def newest(checkpoints: Checkpoints) -> tuple[int | None, list[str]]:
    """The version that is taken, and why others were passed over."""
    whole, passed_over = checkpoints.newest_valid()
    return whole and whole.version, [found.what for found in passed_over]


@pytest.mark.parametrize(
    "damage", ["", "flip", "remove", "manifest", "no_manifest", "rename"]
)
def test_damaged_checkpoint_is_named_and_the_newest_whole_one_loads(
    tmp_path: Path, damage: str
) -> None:
    checkpoints = make(tmp_path, 10, 20)
    folder = checkpoints.root / "step_20"
    weights, manifest = folder / "trainer" / "weights", folder / "manifest.json"
    content = weights.read_bytes()
    damages: dict[str, Callable[[], Any]] = {
        "": lambda: None,
        "flip": lambda: weights.write_bytes(
            content[:500] + bytes([content[500] ^ 1]) + content[501:]
        ),
        "remove": weights.unlink,
        "manifest": lambda: manifest.write_text('{"format": 1, "ver'),
        "no_manifest": manifest.unlink,
        "rename": lambda: folder.rename(checkpoints.root / "step_25"),
    }
    damages[damage]()
    whole, _ = checkpoints.newest_valid()
    assert whole is not None
    version = 10 if damage else 20
    assert (whole.version, whole.controller) == (version, {"num_drawn": 8 * version})
    assert (whole.trainer_dir / "deep" / "rng").read_bytes() == bytes([version])
    assert ["step_2" in why for why in newest(checkpoints)[1]] == [True] * bool(damage)


def test_a_damaged_checkpoint_is_set_aside_and_counts_no_more(tmp_path: Path) -> None:
    """Else the next one would prune the last that is whole, and the journal forget the
    batches since.
    """
    checkpoints = make(tmp_path, 10, 20, keep_last=2)
    (checkpoints.root / "step_20" / "trainer" / "weights").write_bytes(bytes(1000))
    _, passed_over = checkpoints.newest_valid()
    assert checkpoints.versions() == [10, 20], (
        "a start that is refused after that has changed nothing"
    )
    (told,) = set_aside(passed_over)
    assert "renamed to damaged_step_20" in told
    assert (checkpoints.versions(), checkpoints.oldest_version()) == ([10], 0)
    write(checkpoints, 20)
    assert (checkpoints.versions(), checkpoints.oldest_version()) == ([10, 20], 10)


def test_unreadable_checkpoint_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = make(tmp_path, 10, 20)
    with monkeypatch.context() as broken:
        too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        broken.setattr(
            "asyncrl.journal.checkpoint_folders.sha256_of", Mock(side_effect=too_many)
        )
        with pytest.raises(OSError, match="Too many open files"):
            checkpoints.newest_valid()
    assert newest(checkpoints) == (20, [])


def test_leftovers_of_a_killed_run_are_repaired_or_removed(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 10)
    # was being replaced
    (checkpoints.root / "step_10").rename(checkpoints.root / ".step_10.old")
    half = checkpoints.begin()
    (half / "trainer").mkdir()
    # of checkpoint.callback
    (checkpoints.root / ".step_10.export/model").mkdir(parents=True)
    assert newest(make(tmp_path)) == (10, [])
    assert [path.name for path in checkpoints.root.iterdir()] == ["step_10"]


def test_what_was_done_is_on_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def sync(path: Path) -> None:
        synced.append(path.name)
        assert (tmp_path / "checkpoints" / "step_10").exists() == (
            path.name == "checkpoints"
        )

    monkeypatch.setattr("asyncrl.journal.checkpoint_folders.sync", sync)
    monkeypatch.setattr(
        "asyncrl.base.files.sync",
        lambda path: sync(path) if path.name == "checkpoints" else None,
    )
    make(tmp_path, 10)
    assert synced[0] == "manifest.json", "all files of a checkpoint are on disk"
    assert synced[2:] == [*RECORDS, tmp_path.name, "checkpoints"]


def test_the_newest_multiples_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, keep_last=2, keep_every=4, keep_best=True)
    checkpoints.on_evaluation(
        0, 2.0
    )  # of the initial weights, which have no checkpoint
    for version in range(1, 11):
        write(checkpoints, version)
        checkpoints.on_evaluation(version, 1.0 if version == 2 else version / 100)
    assert checkpoints.versions() == [2, 4, 8, 9, 10]
    assert checkpoints.oldest_version() == 9, (
        "the journal need not reach back to permanent checkpoints"
    )


def test_full_disk_is_an_error_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 10)
    pending = checkpoints.begin()
    (pending / "controller.json").symlink_to("/dev/full")
    with pytest.raises(
        CheckpointError, match="no checkpoint can be written .* No space left"
    ) as caught:
        checkpoints.finish(pending, 20, {"num_drawn": 1})
    assert "free space" in caught.value.way_out
    assert not pending.exists()
    assert newest(checkpoints) == (10, [])
