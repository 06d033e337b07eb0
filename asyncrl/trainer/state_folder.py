"""The folder of a saved trainer state: complete or not at all. Knows tensors by name; what they are for, it
does not know.

    __R_N.distcp    the shards that rank R wrote, by torch.distributed.checkpoint (DCP)
    .metadata       where each shard of each tensor lies: DCP's index, a pickle
    state.json      the manifest: what the tensors belong to, size and SHA-256 of the other files, which are
    hashed while they are written

DCP does not check what it reads, so every file is compared with the manifest first. That is against damage,
not against malice: a manifest can be forged like a file. The index is unpickled with DCP's own classes alone
and tensors are read with weights_only; still, open only folders in run directories that the user named.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from asyncrl.files import HashingFile, sha256_of, sync
from asyncrl.http import Refused

T = TypeVar("T")
MANIFEST, INDEX = "state.json", ".metadata"
INDEX_CLASSES = {
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # its home in Python 3.13
    "torch": ("Size", "float32", "uint8"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.serialization": ("_get_layout",),
}
"""All that the pickle of an index of float32 and uint8 tensors names, by module."""


class StateError(Refused):
    """A state cannot be written or read; says which folder and why."""

    def __init__(self, error: str, *, rule: str = "", way_out: str = "", status: int = 409) -> None:
        super().__init__(status, error, rule=rule, way_out=way_out)


class FileEntry(BaseModel):
    """What a file is compared with before it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: int
    sha256: str


class Manifest(BaseModel):
    """state.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    model_path: str
    dtype: str
    lora: dict[str, Any] | None
    world_size: int
    shapes: dict[str, list[int]]
    optimizer_names: list[str]
    has_cuda_rng: bool
    policy_version: int
    num_optimizer_steps: int
    num_skipped_in_a_row: int
    learning_rate: float
    torch: str
    files: dict[str, FileEntry] = {}
    digest: str = ""

    def own_digest(self) -> str:
        """SHA-256 of all the rest."""
        return hashlib.sha256(self.model_dump_json(exclude={"digest"}).encode()).hexdigest()


class SaveGroup:
    """The trainer's processes as they write or read a folder, on a process group of their own: training uses
    its own beside it.

    Made on all ranks at once, where there is more than one.
    """

    def __init__(self) -> None:
        is_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if is_many else None
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if is_many else (0, 1)

    def __repr__(self) -> str:
        return f"<SaveGroup {self.rank} of {self.size}>"

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work` returns on each rank, by rank. Raises StateError on all ranks if it fails on one."""
        answer: tuple[T | None, tuple[int, dict[str, str]] | None]
        try:
            answer = work(), None
        except StateError as error:
            answer = None, (error.status, error.body.model_dump())
        except OSError as error:
            answer = (
                None,
                (
                    507,
                    {
                        "error": f"cannot read or write the trainer's state: {error}",
                        "way_out": "check the disk and its rights.",
                    },
                ),
            )
        answers: list[Any] = [answer]
        if self.group is not None:
            answers = [None] * self.size
            dist.all_gather_object(answers, answer, group=self.group)
        for _, failure in answers:
            if failure is not None:
                status, body = failure
                raise StateError(status=status, **body)
        return [value for value, _ in answers]


def ignore_single_process_warning() -> None:
    """DCP warns whenever it runs without a process group, which is meant here. Not on the writing thread:
    filters are global.
    """
    warnings.filterwarnings(
        "ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning
    )


def check_new(path: Path) -> None:
    """Raises StateError if something is there already."""
    if path.exists():
        raise StateError(
            f"{path} exists already",
            rule="a state is written into a new folder",
            way_out="give another path, or remove it.",
        )


def write_folder(
    path: Path, live: dict[str, Tensor], host: dict[str, Tensor], manifest: Manifest, ranks: SaveGroup
) -> None:
    """Write the values in `host`, laid out over the ranks as `live` is, which is not read. Raises
    StateError.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")

    def begin() -> None:
        if ranks.rank == 0:
            check_new(path)
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            unfinished.mkdir(parents=True)

    def end() -> None:
        if ranks.rank == 0:
            whole = manifest.model_copy(
                update={"files": {name: entry for own in files for name, entry in own.items()}}
            )
            whole = whole.model_copy(update={"digest": whole.own_digest()})
            with (unfinished / MANIFEST).open("w", encoding="utf-8") as file:
                file.write(whole.model_dump_json(indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            sync(unfinished)
            unfinished.rename(path)
            sync(path.parent)

    writer = FileSystemWriter(unfinished, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = hashed = _HashedFiles()
    try:
        ranks.together(begin)
        _call_dcp(
            path,
            lambda: dcp_save(
                live,
                storage_writer=writer,
                planner=_HostPlanner(host),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            ),
        )
        files = ranks.together(lambda: hashed.entries)
        ranks.together(end)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """Raises StateError if there is none, or it is damaged."""
    file = path / MANIFEST
    try:
        manifest = Manifest.model_validate_json(file.read_bytes())
    except FileNotFoundError as error:
        raise StateError(
            f"there is no {file}",
            rule="a folder without it is no saved state",
            way_out="give a complete one.",
        ) from error
    except (OSError, ValidationError) as error:
        raise _damaged(file, str(error)) from error
    if manifest.digest != manifest.own_digest():
        raise _damaged(file, "its digest is another")
    return manifest


def check_files(path: Path, manifest: Manifest, ranks: SaveGroup) -> None:
    """Compare each file with the manifest, each rank its share. Raises StateError on all ranks if one is
    missing or damaged.
    """

    def check_own_share() -> None:
        for name in sorted(manifest.files)[ranks.rank :: ranks.size]:
            try:
                found = _entry(path / name)
            except OSError as error:
                raise _damaged(path / name, str(error)) from error
            if found != (expected := manifest.files[name]):
                raise _damaged(
                    path / name,
                    f"{found.num_bytes} bytes, SHA-256 {found.sha256[:16]}; written "
                    f"were {expected.num_bytes}, "
                    f"{expected.sha256[:16]}",
                )

    ranks.together(check_own_share)


def read_tensors(path: Path, live: dict[str, Tensor], manifest: Manifest, ranks: SaveGroup) -> None:
    """Overwrite `live` with what was saved, by whatever number of ranks. Check the files first. Raises
    StateError.
    """
    ignore_single_process_warning()
    reader, planner = (
        _Reader(path, frozenset(manifest.files)),
        _TensorPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    _call_dcp(
        path,
        lambda: dcp_load(
            live,
            storage_reader=reader,
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.group is None,
        ),
    )


class _HashedFiles(FileSystem):
    """The files of this rank, hashed while DCP writes them, from start to end."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with HashingFile(Path(path)) as file:
            yield cast(io.IOBase, file)
        self.entries[Path(path).name] = FileEntry(num_bytes=file.num_bytes, sha256=file.sha256)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class _HostPlanner(DefaultSavePlanner):
    """Takes the layout from the live tensors and the values from their copies."""

    def __init__(self, host: dict[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._host = host

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._host[write_item.index.fqn]


class _TensorPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")  # DCP would unpickle it


class _Reader(FileSystemReader):
    """Unpickles nothing but an index, whose shards lie in the files of the manifest."""

    def __init__(self, path: Path, files: frozenset[str]) -> None:
        super().__init__(path)
        self._folder, self._files = path, files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (self._folder / INDEX).open("rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        if unknown := {info.relative_path for info in metadata.storage_data.values()} - self._files:
            raise ValueError(f"{INDEX} names files that {MANIFEST} does not: {sorted(unknown)[:3]}")
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{INDEX} holds a {module}.{name}, which no index does")
        return super().find_class(module, name)


def _call_dcp(path: Path, work: Callable[[], object]) -> None:
    """DCP answers a failure on one rank on all of them, with all that they raised."""
    try:
        work()
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise StateError(
            f"cannot write or read {path}: {type(reason).__name__} on rank {rank}: {str(reason)[:300]}",
            way_out="check the disk; a folder that was written by another version of torch may not be "
            "readable.",
            status=507,
        ) from error


def _damaged(file: Path, what: str) -> StateError:
    return StateError(
        f"{file} is damaged: {what}",
        rule=f"files are as {MANIFEST} says",
        way_out="take an older state.",
        status=422,
    )


def _entry(file: Path) -> FileEntry:
    return FileEntry(num_bytes=file.stat().st_size, sha256=sha256_of(file))
