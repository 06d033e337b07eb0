"""Keeps an exported weights file while the eval engine has still to read it. Knows files; opens none."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from asyncrl.errors import RoomError
from asyncrl.types import WeightManifest


class FileHold:
    """A second name (hard link) for one exported file, under `folder` on the same file system.

    The trainer deletes its own old exports by their names; the bytes stay as long as any name is left. No byte is
    copied, so that keeping takes no time; shared memory holds one export more while a file is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, manifest: WeightManifest) -> WeightManifest:
        """The same weights under a name of ours. Raises RoomError if the file is gone, or cannot be linked."""
        path = self._folder / f"eval-{manifest.version}.safetensors"
        try:
            os.link(manifest.path, path)
        except OSError as error:
            raise RoomError(
                "evaluation", f"the weights of policy_version {manifest.version} cannot be kept for the eval engine: {error}",
                rule="the staging folder is on a file system with hard links", way_out="use /dev/shm, or a POSIX file system as TMPDIR.",
            ) from error  # fmt: skip
        return replace(manifest, path=str(path))

    def release(self, manifest: WeightManifest) -> None:
        """Give up what keep() returned; idempotent."""
        Path(manifest.path).unlink(missing_ok=True)
