"""RUN_DIR/checkpoints: which are whole, which stay. The trainer writes into a folder that it is given.

The manifest of a checkpoint has the size and sha256 of every file, so that half a checkpoint is never taken
for a whole one.
"""

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
from typing import Any

from pydantic import BaseModel

from asyncrl.base.errors import CheckpointDamaged, CheckpointError
from asyncrl.base.files import replace_folder, settle_folder, sha256_of, sync, sync_tree
from asyncrl.config import CheckpointConfig

CONTROLLER, TRAINER, MANIFEST = "controller.json", "trainer", "manifest.json"
FORMAT = 1
RECORDS = ("trained.jsonl", "metrics.jsonl", "eval.jsonl", "samples.jsonl")
"""Files of the run directory that say what was done before the checkpoint: nothing after a resume writes that
again.
"""
CHECK_DISK = "check its disk, its permissions and the limit of open files, then start again."


def sync_records(run_dir: Path) -> None:
    """Sync these files: a machine that stops would lose lines of steps that are not repeated. Raises
    OSError.
    """
    for name in RECORDS:
        with contextlib.suppress(FileNotFoundError):
            sync(run_dir / name)
    sync(run_dir)


class ControllerState(BaseModel, frozen=True):
    """What a checkpoint says of the run beside the trainer's state: enough to go on without the journal. It
    is read only where the journal is gone: a resume that has the journal knows more, and takes it from there.

    Written as controller.json. `feed`: PromptSource.state(). `out`: prompts that were drawn and are in no
    batch yet, by id, with how often they were requeued.
    """

    feed: dict[str, Any]
    out: dict[str, int]
    next_group_id: int


class FileEntry(BaseModel, frozen=True, extra="forbid"):
    """One file of a checkpoint."""

    size: int
    sha256: str


class Manifest(BaseModel, frozen=True):
    """What a whole checkpoint consists of. `version`: batches trained when it was made; `files` by relative
    path.
    """

    format: int = FORMAT
    version: int
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True)
class Pending:
    """A checkpoint in the making: the trainer writes into `trainer_dir`, which it makes itself."""

    folder: Path

    @property
    def trainer_dir(self) -> Path:
        """Where the trainer's state goes."""
        return self.folder / TRAINER


@dataclass(frozen=True, slots=True)
class Whole:
    """A checkpoint whose every file was compared with its manifest. `controller`: what finish() was given."""

    version: int
    folder: Path
    controller: Mapping[str, Any]

    @property
    def trainer_dir(self) -> Path:
        """What the trainer loads."""
        return self.folder / TRAINER


@dataclass(frozen=True, slots=True)
class Damaged:
    """A checkpoint that is passed over: `why` in words."""

    folder: Path
    why: str


def set_aside(passed_over: Iterable[Damaged]) -> list[str]:
    """Rename them to damaged_step_N: they no longer count as checkpoints, and are made again. Returns a
    sentence on each.

    Call it once the run has resumed from an older one, so that a start that is refused changes nothing.
    """
    told = []
    for found in passed_over:
        aside = found.folder.with_name(f"damaged_{found.folder.name}")
        became = f"it lies in {aside.name} now"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            found.folder.rename(aside)
        except OSError as error:
            became = f"it cannot be renamed: {error.strerror}"
        told.append(f"checkpoint {found.folder} was passed over: {became}.")
    return told


class Checkpoints:
    """The checkpoints of one run directory. All methods block on the disk: call them in a thread.

    Life of one: begin() -> the trainer writes -> finish() (records and files synced, manifest, renamed: whole
        from then on), or abandon().
    Waits: `in_use` is held around finish(), which removes older ones, and from newest_whole() until what it
        returned, and the journal's batches since, are not needed any more. Never while waiting for a trainer
        to write: it may have to go back first.
    Invariant: a folder named step_N was whole when it got its name; newest_whole() looks again all the same,
        and set_aside() takes the name from one that is not.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        self.root, self.config = run_dir / "checkpoints", config
        self.in_use = asyncio.Lock()
        self._rewards: dict[int, float] = {}

    def evaluated(self, version: int, reward_mean: float) -> None:
        """With keep_best, the best of the checkpoints whose version was evaluated stays."""
        self._rewards[version] = reward_mean

    def versions(self) -> list[int]:
        """Versions that have a folder, oldest first; nothing is checked."""
        return _versions_in(self.root.glob("step_*"))

    def begin(self) -> Pending:
        """A folder to write into. Raises CheckpointError if it cannot be made."""
        folder = self.root / f".step_unfinished.{os.getpid()}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise self._cannot_write(error) from error
        return Pending(folder)

    def finish(self, pending: Pending, version: int, controller: Mapping[str, Any]) -> Path:
        """Make it whole, then drop those that need not stay. Raises CheckpointError; older ones are as they
        were then.
        """
        final = self.root / f"step_{version}"
        try:
            text = json.dumps(controller, indent=1) + "\n"
            (pending.folder / CONTROLLER).write_text(text, encoding="utf-8")
            write_manifest(pending.folder, version)
            sync_records(self.root.parent)
            # it may be there: made by a run that was killed, and is replayed now
            replace_folder(pending.folder, final)
        except OSError as error:
            self.abandon(pending)
            raise self._cannot_write(error) from error
        self._prune()
        return final

    def abandon(self, pending: Pending) -> None:
        """Remove what was begun; idempotent."""
        shutil.rmtree(pending.folder, ignore_errors=True)

    def newest_whole(self, *, keep_unfinished: bool = False) -> tuple[Whole | None, list[Damaged]]:
        """(the newest checkpoint that is whole, newer ones that are damaged). Removes what a killed run left
        half done.

        `keep_unfinished`: one may be in the making right now. Raises CheckpointError if one cannot be read:
        it may be whole.
        """
        passed_over: list[Damaged] = []
        for version in reversed(self._settled(keep_unfinished)):
            folder = self.root / f"step_{version}"
            try:
                return read_whole(folder, version), passed_over
            except CheckpointDamaged as error:
                passed_over.append(Damaged(folder, str(error)))
        return None, passed_over

    def _settled(self, keep_unfinished: bool) -> list[int]:
        """Versions, after unfinished work was removed. Unlike a glob it raises for a folder that cannot be
        read.
        """
        try:
            for left in () if keep_unfinished else [*self.root.glob(".step_*")]:
                settle_folder(self.root / left.name.split(".")[1])
            return _versions_in(self.root.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            what = f"{self.root} cannot be read: {error.strerror or error}"
            raise CheckpointError(what, way_out=CHECK_DISK) from error

    def oldest_version(self) -> int:
        """Oldest of the keep_last newest, 0 until there are so many: from there on the journal is needed, for
        newer ones may be damaged.
        """
        versions = self.versions()
        return versions[-self.config.keep_last] if len(versions) >= self.config.keep_last else 0

    def _prune(self) -> None:
        versions = self.versions()
        stay = set(versions[-self.config.keep_last :])
        if self.config.keep_every is not None:
            stay |= {version for version in versions if version % self.config.keep_every == 0}
        evaluated = [version for version in versions if version in self._rewards]
        if self.config.keep_best and evaluated:
            stay.add(max(evaluated, key=lambda version: (self._rewards[version], version)))
        for folder in (self.root / f"step_{version}" for version in versions if version not in stay):
            with contextlib.suppress(OSError):  # what cannot be removed stays, and is whole
                # first: what is half removed must not look whole
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)

    def _cannot_write(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"no checkpoint can be written to {self.root}: {error.strerror or error}",
            rule="the last whole checkpoint stays, and the run goes on",
            way_out="free space on the disk of the run directory; the next one is tried when it is due.",
        )


def _versions_in(folders: Iterable[Path]) -> list[int]:
    kinds = (path.name.partition("_") for path in folders)
    return sorted(int(number) for kind, _, number in kinds if kind == "step" and number.isdigit())


def write_manifest(folder: Path, version: int) -> None:
    """Sync every file of `folder` to disk and write the manifest over them, last of all. Raises OSError."""
    sync_tree(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(thread_name_prefix="sha256") as hashing:  # a rank writes a file
        read = list(hashing.map(_size_and_digest, paths))
    files = {
        path.relative_to(folder).as_posix(): FileEntry(size=size, sha256=digest)
        for path, (size, digest) in zip(paths, read, strict=True)
    }
    path = folder / MANIFEST
    path.write_text(Manifest(version=version, files=files).model_dump_json(indent=1) + "\n", encoding="utf-8")
    sync(path)
    sync(folder)


def read_whole(folder: Path, version: int) -> Whole:
    """Read every file of a checkpoint and compare it with the manifest.

    Raises CheckpointDamaged that names what is wrong or missing, and CheckpointError if it cannot be told: a
    file cannot be read, or a newer asyncrl wrote it.
    """
    found = _read_json(folder, MANIFEST)
    if isinstance(found, dict) and found.get("format", FORMAT) != FORMAT:
        what = f"checkpoint {folder} has format {found['format']}, this version of asyncrl reads {FORMAT}"
        raise CheckpointError(what, way_out="resume with the asyncrl that wrote it, or a newer one.")
    try:
        manifest = Manifest.model_validate(found)
    except ValueError as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read: {str(error).splitlines()[0]}") from error
    with ThreadPoolExecutor(thread_name_prefix="sha256") as hashing:
        reading = {name: hashing.submit(_size_and_digest, folder / name) for name in manifest.files}
        for name, entry in manifest.files.items():
            try:
                read = reading[name].result()
            except OSError as error:
                hashing.shutdown(wait=False, cancel_futures=True)
                raise _unreadable(folder, name, error) from error
            if read != (written := (entry.size, entry.sha256)):
                hashing.shutdown(wait=False, cancel_futures=True)
                (size, digest), (had, was) = read, written
                raise _damaged(folder, f"{name} has {size} bytes of sha256 {digest}, and had {had} of {was}")
    if manifest.version != version:
        raise _damaged(folder, f"it is of version {manifest.version}, and was renamed by hand")
    return Whole(version, folder, _read_json(folder, CONTROLLER))


def _size_and_digest(path: Path) -> tuple[int, str]:
    return path.stat().st_size, sha256_of(path)


def _read_json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(folder, name, error) from error
    except ValueError as error:
        raise _damaged(folder, f"{name} cannot be read: {error}") from error


def _unreadable(folder: Path, name: str, error: OSError) -> CheckpointError:
    """A file that is not there is damage; one that the system does not read may be whole."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return _damaged(folder, f"{name} cannot be read: {error.strerror}")
    return CheckpointError(
        f"checkpoint {folder} cannot be read: {name}: {error.strerror or error}",
        rule="a checkpoint counts as damaged only if a file was read and is wrong",
        way_out=f"{CHECK_DISK} If it is lost, rename it to damaged_{folder.name}: an older one is taken.",
    )


def _damaged(folder: Path, why: str) -> CheckpointDamaged:
    """It was read, and is not what was written."""
    return CheckpointDamaged(
        f"checkpoint {folder} is damaged: {why}",
        rule="a checkpoint is used only if every file is as its manifest says",
        way_out="an older one is taken if there is one; else copy the folder back, or start a new run.",
    )
