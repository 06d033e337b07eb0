"""The manifest of a checkpoint: the size and sha256 of every file, so that half a checkpoint is never taken
for a whole one.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from asyncrl.errors import CheckpointDamaged, CheckpointError
from asyncrl.files import sha256_of, sync, sync_tree

MANIFEST = "manifest.json"
FORMAT = 1


class FileEntry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    sha256: str


class ManifestFormat(BaseModel):
    """All that is asked of a manifest before its format is known."""

    model_config = ConfigDict(frozen=True)

    format: int = FORMAT


class Manifest(ManifestFormat):
    """What a whole checkpoint consists of. `version`: batches trained when it was made; `files` by relative
    path.
    """

    version: int
    files: dict[str, FileEntry]


def write_manifest(folder: Path, version: int) -> Manifest:
    """Sync every file of `folder` to disk and write the manifest over them, last of all. Raises OSError."""
    sync_tree(folder)
    files = {
        path.relative_to(folder).as_posix(): FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(version=version, files=files)
    path = folder / MANIFEST
    path.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sync(path)
    sync(folder)
    return manifest


def check_manifest(folder: Path) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest.

    Raises CheckpointDamaged that names what is wrong or missing, and CheckpointError if it cannot be told: a
    file cannot be read, or a newer asyncrl wrote it.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        if (number := ManifestFormat.model_validate_json(text).format) > FORMAT:
            raise CheckpointError(
                f"checkpoint {folder} has format {number}, this version of asyncrl reads {FORMAT}",
                way_out="resume with the asyncrl that wrote it, or a newer one.",
            )
        manifest = Manifest.model_validate_json(text)
    except OSError as error:
        raise unreadable(folder, MANIFEST, error) from error
    except ValueError as error:
        raise damaged(folder, f"its {MANIFEST} cannot be read: {str(error).splitlines()[0]}") from error
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            if (size := path.stat().st_size) != entry.size:
                raise damaged(folder, f"{name} has {size} bytes instead of {entry.size}")
            digest = sha256_of(path)
        except OSError as error:
            raise unreadable(folder, name, error) from error
        if digest != entry.sha256:
            raise damaged(folder, f"{name} has sha256 {digest[:12]} instead of {entry.sha256[:12]}")
    return manifest


def unreadable(folder: Path, name: str, error: OSError) -> CheckpointError:
    """A file that is not there is damage; one that the system does not read may be whole."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return damaged(folder, f"{name} cannot be read: {error.strerror}")
    return CheckpointError(
        f"checkpoint {folder} cannot be read: {name}: {error.strerror or error}",
        rule="a checkpoint counts as damaged only if a file was read and is wrong",
        way_out="check its disk, its rights and the limit of open files, then start again; if it is lost, "
        f"rename it to damaged_{folder.name}: an older one is taken if there is one.",
    )


def damaged(folder: Path, why: str) -> CheckpointDamaged:
    """It was read, and is not what was written."""
    return CheckpointDamaged(
        f"checkpoint {folder} is damaged: {why}",
        rule="a checkpoint is used only if every file is as its manifest says",
        way_out="an older one is taken if there is one; else copy the folder back, or start a new run.",
    )
