"""Files that must outlive a kill or a power cut: synced, whole or not there. Knows paths alone; everything here blocks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have the kernel write a file, or the entries of a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, text: str, *, is_private: bool = False) -> None:
    """Write a file that is there as a whole or as it was, whenever the process is killed. Raises OSError.

    `is_private`: nobody but its owner may read it, at no moment.
    """
    unfinished = path.with_name(f".{path.name}.new")
    if is_private:
        unfinished.unlink(missing_ok=True)
        unfinished.touch(mode=0o600)
    unfinished.write_text(text, encoding="utf-8")
    sync(unfinished)
    unfinished.replace(path)
    sync(path.parent)
