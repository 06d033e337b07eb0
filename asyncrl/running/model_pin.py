"""The model that a run began with, by the content of its files: a run that goes on from another one is refused.

With trainer.lora a checkpoint holds the adapters alone, so nothing else would notice. Blocks on the disk: call it in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from asyncrl.durable import write_whole
from asyncrl.errors import ConfigError
from asyncrl.running.run_folder import MODEL_PIN

PATTERNS = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "config.json", "generation_config.json",
    "tokenizer*.json", "tokenizer.model", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.*",
)  # fmt: skip
"""What weights, architecture and tokenizer are read from."""
_CHUNK_BYTES = 8 * 2**20


class PinnedFile(BaseModel):
    """One file. With the size and time that it had, it is not read again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    mtime_ns: int
    xxh3: str


class PinnedModel(BaseModel):
    """Files by name. `given`: model.path; `revision`: of a hub id, the commit that it was fetched at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    given: str | None
    revision: str | None
    files: dict[str, PinnedFile]


class ModelPin:
    """The pin of one run. Life: made (reads what the first start has written) -> check() -> read() -> write() once nothing can refuse."""

    def __init__(self, run_dir: Path, given: str | None, *, is_free: bool = False) -> None:
        """`given`: model.path, None for a model that is made from scratch. `is_free`: any model will do, and becomes the run's.

        Raises ConfigError if what was written cannot be read.
        """
        self.path, self._given = run_dir / MODEL_PIN, given
        self._pinned: PinnedModel | None = None
        self._found: PinnedModel | None = None
        try:
            if not is_free and self.path.exists():
                self._pinned = PinnedModel.model_validate_json(self.path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"{self.path} cannot be read: {str(error).splitlines()[0]}",
                rule="it says which model the run began with",
                way_out="put it back as it was, or accept the model as it is with --allow-change model.path.",
            ) from error

    def __repr__(self) -> str:
        return f"<ModelPin {self.path}, {'none yet' if self._pinned is None else f'{len(self._pinned.files)} files'}>"

    @property
    def revision(self) -> str | None:
        """The commit of the hub that the run began with; None for a new run, another model.path, or a folder."""
        return self._pinned.revision if self._pinned is not None and self._pinned.given == self._given else None

    def check(self, folder: Path) -> None:
        """Raise ConfigError that names the files if `folder` is not what the run began with.

        Reads those alone whose time differs; writes nothing.
        """
        if self._pinned is None:
            return
        before, now = self._pinned.files, _hash_all(folder, self._pinned.files)
        differing = [f"{name} has other content" for name in before.keys() & now.keys() if before[name].xxh3 != now[name].xxh3]
        differing += [f"{name} is missing" for name in before.keys() - now.keys()]
        differing += [f"{name} is new" for name in now.keys() - before.keys()]
        if differing:
            raise ConfigError(
                f"the model in {folder} is not the one that this run began with: {', '.join(sorted(differing))}",
                rule="a run goes on from the base weights and the tokenizer that it was started with",
                way_out=f"{self._way_back(folder)}, or accept these with --allow-change model.path.",
            )
        self._found = self._model(folder, now)

    def read(self, folder: Path) -> None:
        """Read a model that nothing is known of yet, all of it. May take as long as loading it."""
        if self._found is None:
            self._found = self._model(folder, _hash_all(folder, {}))

    def write(self) -> None:
        """Remember the model: the run begins, or goes on, with it. Raises OSError."""
        if self._found is not None and self._found != self._pinned:
            self._pinned = self._found
            write_whole(self.path, json.dumps(self._found.model_dump(), indent=1) + "\n")

    def _model(self, folder: Path, files: dict[str, PinnedFile]) -> PinnedModel:
        revision = folder.name if folder.parent.name == "snapshots" else None  # as the hub's cache lays it out
        return PinnedModel(given=self._given, revision=revision, files=files)

    def _way_back(self, folder: Path) -> str:
        return f"remove {folder}: it is made again from the seed" if self._given is None else "put the model's files back as they were"


def _hash_all(folder: Path, known: Mapping[str, PinnedFile]) -> dict[str, PinnedFile]:
    paths = sorted({path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()})
    try:
        return {path.name: _hash(path, known.get(path.name)) for path in paths}
    except OSError as error:
        raise ConfigError(f"cannot read the model in {folder}: {error}", way_out="restore its files.") from error


def _hash(path: Path, known: PinnedFile | None) -> PinnedFile:
    stat = path.stat()
    if known is not None and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        return known
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return PinnedFile(size=stat.st_size, mtime_ns=stat.st_mtime_ns, xxh3=digest.hexdigest())
