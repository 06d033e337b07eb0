"""Digests of task data, saved so that a resumed run reads the same data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter, ValidationError

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
from asyncrl.config import TaskConfig

DATA_PIN = "data.json"
ROWS_AT_ONCE = 10_000
Digests = Mapping[str, str]
"""xxh3 of 128 bits in hex, by file or data set."""
_SAVED = TypeAdapter(dict[str, dict[str, str]])


def digest_of_file(path: Path) -> str:
    """Return the digest of a file's bytes. Raises ConfigError."""
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(what, way_out="check the file and its rights.") from error


def digest_of_rows(rows: Any) -> str:
    """Return the digest of a datasets.Dataset, independent of files and shards."""
    digest = xxhash.xxh3_128()
    digest.update(str(rows.features.arrow_schema.remove_metadata()).encode())
    for table in rows.with_format("arrow").iter(ROWS_AT_ONCE):
        for batch in table.replace_schema_metadata(None).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def whole_digest(digests: Digests) -> str:
    one, *others = digests.values() or [""]
    return f"xxh3:{xxhash.xxh3_128_hexdigest(''.join([one, *others]).encode()) if others else one}"


def check_digest(config: TaskConfig, digests: Digests) -> None:
    if config.digest is not None and config.digest != (found := whole_digest(digests)):
        raise ConfigError(
            f"task.digest={config.digest}, and the data of {', '.join(digests)} have the digest {found}",
            rule="task.digest fixes the data",
            way_out=f"put the data back, or set task.digest={found}.",
        )


class DataPin:
    """Data that a run began with; construction compares."""

    def __init__(self, run_dir: Path, digests: Mapping[str, Digests], *, is_free: bool = False) -> None:
        """`digests`: by task. `is_free`: accept any data. Raises ConfigError."""
        self.path = run_dir / DATA_PIN
        self._digests = {name: dict(files) for name, files in digests.items() if files}
        saved = {} if is_free or not self.path.exists() else self._read()
        changed = list[str]()
        for name in sorted(saved.keys() & self._digests.keys()):
            before = saved[name]
            now = self._digests[name]
            if list(before.values()) != list(now.values()):  # only file names may change
                files = sorted({file for file, _ in before.items() ^ now.items()})
                changed.append(", ".join(files) or f"the order of {', '.join(now)}")
        if changed:
            raise ConfigError(
                f"the task's data have changed since this run began: {'; '.join(changed)}",
                rule="a resumed run continues with its data",
                way_out="restore the files, or accept them with --allow-change task.digest.",
            )

    def write(self) -> None:
        if self._digests:
            write_whole(self.path, json.dumps(self._digests, indent=1) + "\n")

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            return _SAVED.validate_json(self.path.read_bytes())
        except (OSError, ValidationError) as error:
            what = f"the saved digests {self.path} cannot be read: {str(error).splitlines()[0]}"
            way_out = "restore the file, or accept the data with --allow-change task.digest."
            raise ConfigError(what, way_out=way_out) from error
