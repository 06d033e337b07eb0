"""Digests of task data: printed, named in the config, and saved so that a resumed run reads the same data."""

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
"""File in the run directory with the digests of the run's data."""
ROWS_AT_ONCE = 10_000
Digests = Mapping[str, str]
"""xxh3 of 128 bits in hex, by file, or by data set and split."""
_SAVED = TypeAdapter(dict[str, dict[str, str]])


def digest_of_file(path: Path) -> str:
    """Return the digest of a file's bytes, always read again, because unchanged size and time prove nothing.
    Raises ConfigError.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(what, way_out="check the file and its rights.") from error


def digest_of_rows(rows: Any) -> str:
    """Return the digest of names, types and values of a datasets.Dataset, independent of files and shards."""
    digest = xxhash.xxh3_128()
    digest.update(str(rows.features.arrow_schema.remove_metadata()).encode())
    for table in rows.with_format("arrow").iter(ROWS_AT_ONCE):
        for batch in table.replace_schema_metadata(None).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def whole_digest(digests: Digests) -> str:
    """Return the digest of all data of a task, as in task.digest; a single file's is unchanged."""
    one, *others = digests.values() or [""]
    return f"xxh3:{xxhash.xxh3_128_hexdigest(''.join([one, *others]).encode()) if others else one}"


def check_digest(config: TaskConfig, digests: Digests) -> None:
    """Raise ConfigError if the data differ from task.digest."""
    if config.digest is not None and config.digest != (found := whole_digest(digests)):
        raise ConfigError(
            f"task.digest={config.digest}, and the data of {', '.join(digests)} have the digest {found}",
            rule="a task with a digest is read from these data and from no others",
            way_out=f"put the data back, or set task.digest={found}.",
        )


class DataPin:
    """Data that a run began with.

    Life: made, which compares -> write() once nothing can refuse.
    """

    def __init__(self, run_dir: Path, found: Mapping[str, Digests], *, is_free: bool = False) -> None:
        """`found`: digests by task. `is_free`: accept any data as the run's.

        Raises ConfigError that lists differences, or if the saved digests are unreadable.
        """
        self.path, self._found = run_dir / DATA_PIN, {name: dict(one) for name, one in found.items() if one}
        before = {} if is_free or not self.path.exists() else self._read()
        differing = [
            f"{file} {what}"
            for name in before.keys() & self._found.keys()
            for file, what in _differences(before[name], self._found[name])
        ]
        if differing:
            raise ConfigError(
                f"the data are not those that this run began with: {'; '.join(sorted(differing))}",
                rule="a run goes on with the data that it was started with",
                way_out="put the files back as they were, or accept these with --allow-change task.digest.",
            )

    def write(self) -> None:
        """Save the digests. Raises OSError."""
        if self._found:
            write_whole(self.path, json.dumps(self._found, indent=1) + "\n")

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            return _SAVED.validate_json(self.path.read_bytes())
        except (OSError, ValidationError) as error:
            what = f"the digests of the data {self.path} cannot be read: {str(error).splitlines()[0]}"
            way_out = "put it back as it was, or accept the data as they are with --allow-change task.digest."
            raise ConfigError(what, way_out=way_out) from error


def _differences(before: Digests, now: Digests) -> list[tuple[str, str]]:
    """Return (file, difference). Only file names may change."""
    if list(before.values()) == list(now.values()):
        return []
    both = [
        (file, f"had the digest xxh3:{before[file]}, and has xxh3:{now[file]}")
        for file in before.keys() & now.keys()
        if before[file] != now[file]
    ]
    gone = [(file, "is not read any more") for file in before.keys() - now.keys()]
    new = [(file, "was not read then") for file in now.keys() - before.keys()]
    return both + gone + new or [("the files", "are in another order")]
