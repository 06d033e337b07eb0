"""The manifest of a checkpoint: the size and sha256 of every file, so that half a checkpoint is never taken for a whole one.

Knows files alone. Everything here blocks: call it in a thread.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from asyncrl.durable import sha256_of, sync
from asyncrl.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


class FileEntry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    sha256: str


class Manifest(BaseModel):
    """What a whole checkpoint consists of. `version`: batches trained when it was made; `files` by relative path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    version: int
    files: dict[str, FileEntry]


def write_manifest(folder: Path, version: int) -> Manifest:
    """Sync every file of `folder` to disk and write the manifest over them, last of all. Raises OSError."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync(path)
        files[path.relative_to(folder).as_posix()] = FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
    manifest = Manifest(version=version, files=files)
    path = folder / MANIFEST
    path.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sync(path)
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync(directory)
    return manifest


def check_manifest(folder: Path) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest. Raises CheckpointError that names what is wrong."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise _damaged(folder, f"its {MANIFEST} cannot be read: {str(error).splitlines()[0]}") from error
    if manifest.format != FORMAT:
        raise _damaged(folder, f"it has format {manifest.format}, this version of asyncrl reads {FORMAT}")
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            if (size := path.stat().st_size) != entry.size:
                raise _damaged(folder, f"{name} has {size} bytes instead of {entry.size}")
            digest = sha256_of(path)
        except OSError as error:
            raise _damaged(folder, f"{name} cannot be read: {error.strerror}") from error
        if digest != entry.sha256:
            raise _damaged(folder, f"{name} has sha256 {digest[:12]} instead of {entry.sha256[:12]}")
    return manifest


def _damaged(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} is damaged: {why}",
        rule="a checkpoint is used only if every file is as its manifest says",
        way_out="an older one is taken if there is one; else copy the folder back from where it is whole, or start a new run.",
    )
