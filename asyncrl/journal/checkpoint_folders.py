"""RUN_DIR/checkpoints. A manifest with sizes and digests identifies whole checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from asyncrl.base.errors import CheckpointDamaged, CheckpointError
from asyncrl.base.files import replace_folder, settle_folder, sha256_of, sync, sync_tree
from asyncrl.config.checkpoint_config import CheckpointConfig

CONTROLLER = "controller.json"
TRAINER = "trainer"
MANIFEST = "manifest.json"
RECORDS = ("trained.jsonl", "metrics.jsonl", "eval.jsonl", "samples.jsonl")
"""Records before the checkpoint, which a resumed run does not write again."""


def sync_records(run_dir: Path) -> None:
    for name in RECORDS:
        with contextlib.suppress(FileNotFoundError):
            sync(run_dir / name)
    sync(run_dir)


class Manifest(BaseModel, frozen=True):
    """Digests of files (sha256) by relative path. `version`: number of trained batches."""

    format: Literal[2] = 2
    version: int
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`controller`: argument of finish()."""

    version: int
    folder: Path
    controller: Mapping[str, Any]

    @property
    def trainer_dir(self) -> Path:
        return self.folder / TRAINER


def set_aside(damaged: Iterable[CheckpointDamaged]) -> list[str]:
    """Rename damaged checkpoints; return a sentence about each. Raises OSError."""
    sentences = []
    for folder in (found.folder for found in damaged):
        # Renamed, not deleted: somebody may still repair it. Under its old name it
        # would count for keep_last, and the next checkpoint would prune the last whole
        # one.
        aside = folder.with_name(f"damaged_{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        sentences.append(f"checkpoint {folder} is damaged; renamed to {aside.name}.")
    return sentences


class Checkpoints:
    """Checkpoints of one run directory. All methods block.

    Life: begin() -> the trainer writes -> finish() syncs, writes the manifest and
        renames; or abandon().
    Waits: hold `in_use` around finish() and while using newest_valid(); never while a
        trainer writes.
    Invariant: a folder was whole when it was named step_N.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        self.root = run_dir / "checkpoints"
        self.config = config
        # finish() prunes checkpoints, and compaction then deletes journaled batches. A
        # trainer that recovers needs both until it has caught up.
        self.in_use = asyncio.Lock()
        self._rewards: dict[int, float] = {}

    def on_evaluation(self, version: int, reward_mean: float) -> None:
        self._rewards[version] = reward_mean

    def versions(self) -> list[int]:
        return _versions_in(self.root.glob("step_*"))

    def begin(self) -> Path:
        """Create an empty folder; the trainer creates TRAINER in it. Raises
        CheckpointError.
        """
        folder = self.root / f".step_unfinished.{os.getpid()}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise self._cannot_write(error) from error
        return folder

    def finish(
        self, pending: Path, version: int, controller: Mapping[str, object]
    ) -> Path:
        """Complete the checkpoint, then prune older ones. Raises CheckpointError."""
        final = self.root / f"step_{version}"
        try:
            text = json.dumps(controller, indent=1) + "\n"
            (pending / CONTROLLER).write_text(text, encoding="utf-8")
            # In this order: files and manifest are on disk, then the records, then the
            # name. At any moment of a power cut a folder named step_N is whole.
            write_manifest(pending, version)
            sync_records(self.root.parent)
            replace_folder(pending, final)
        except OSError as error:
            self.abandon(pending)
            raise self._cannot_write(error) from error
        self._prune()
        return final

    def abandon(self, pending: Path) -> None:
        shutil.rmtree(pending, ignore_errors=True)

    def newest_valid(
        self, *, keep_unfinished: bool = False
    ) -> tuple[Checkpoint | None, list[CheckpointDamaged]]:
        """Return the newest whole checkpoint and newer damaged ones. Raises OSError for
        unreadable files.
        """
        passed_over: list[CheckpointDamaged] = []
        if not self.root.exists():
            return None, passed_over
        # At a start of the run: leftovers of a killed one. While it runs, the
        # unfinished folder may be the one that the trainer is writing.
        for left in () if keep_unfinished else [*self.root.glob(".step_*")]:
            settle_folder(self.root / left.name.split(".")[1])
        for version in reversed(_versions_in(self.root.iterdir())):
            try:
                return read_checkpoint(
                    self.root / f"step_{version}", version
                ), passed_over
            except CheckpointDamaged as error:
                passed_over.append(error)
        return None, passed_over

    def oldest_version(self) -> int:
        """Return the oldest version from which resumes may need the journal."""
        versions = self.versions()
        return (
            # Not the oldest folder: checkpoints that keep_every and keep_best hold are
            # for export. A resume starts from one of the keep_last newest. With fewer
            # of them, the initial weights (0) are the fallback.
            versions[-self.config.keep_last]
            if len(versions) >= self.config.keep_last
            else 0
        )

    def _prune(self) -> None:
        versions = self.versions()
        stay = set(versions[-self.config.keep_last :])
        if self.config.keep_every is not None:
            stay |= {
                version for version in versions if version % self.config.keep_every == 0
            }
        # The best of all evaluated versions may have no checkpoint.
        evaluated = [version for version in versions if version in self._rewards]
        if self.config.keep_best and evaluated:
            stay.add(
                max(evaluated, key=lambda version: (self._rewards[version], version))
            )
        for folder in (
            self.root / f"step_{version}" for version in versions if version not in stay
        ):
            with contextlib.suppress(OSError):
                # a partly removed checkpoint must not look whole
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _cannot_write(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"no checkpoint can be written to {self.root}: {error.strerror or error}",
            rule="the last whole checkpoint stays and the run continues",
            way_out="free space on the disk of the run directory before the next checkpoint is due.",
        )


def _versions_in(folders: Iterable[Path]) -> list[int]:
    kinds = (path.name.partition("_") for path in folders)
    return sorted(
        int(number) for kind, _, number in kinds if kind == "step" and number.isdigit()
    )


def write_manifest(folder: Path, version: int) -> None:
    """Sync every file, then write the manifest. Raises OSError."""
    sync_tree(folder)
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    )
    # The manifest is written last. Without it, or with a torn one, the folder is not
    # whole.
    manifest = Manifest(version=version, files=_digests(folder, names))
    path = folder / MANIFEST
    path.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sync(path)
    sync(folder)


def read_checkpoint(folder: Path, version: int) -> Checkpoint:
    """Compare every file with the manifest. Raises CheckpointDamaged; OSError for
    unreadable files.
    """
    try:
        manifest = Manifest.model_validate_json(
            (folder / MANIFEST).read_text(encoding="utf-8")
        )
        digests = _digests(folder, manifest.files)
        controller = json.loads((folder / CONTROLLER).read_text(encoding="utf-8"))
    except (
        # These say that the content is wrong. Other OSErrors, such as too many open
        # files or missing rights, do not: a good checkpoint must not be renamed because
        # of them.
        FileNotFoundError,
        NotADirectoryError,
        IsADirectoryError,
        ValueError,
    ) as error:
        raise _damaged(folder, str(error)) from error
    if wrong := [
        name for name, digest in manifest.files.items() if digests[name] != digest
    ]:
        raise _damaged(folder, f"{', '.join(wrong)} differ from {MANIFEST}")
    if manifest.version != version:
        raise _damaged(folder, f"{MANIFEST} has version {manifest.version}")
    return Checkpoint(version, folder, controller)


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    with ThreadPoolExecutor(thread_name_prefix="sha256") as hashing:
        return dict(
            zip(names, hashing.map(sha256_of, map(folder.joinpath, names)), strict=True)
        )


def _damaged(folder: Path, why: str) -> CheckpointDamaged:
    error = CheckpointDamaged(
        f"checkpoint {folder} is damaged: {why}",
        rule="every file must match the manifest",
        way_out="the run uses an older checkpoint; without one, restore the folder or start a new run.",
    )
    error.folder = folder
    return error
