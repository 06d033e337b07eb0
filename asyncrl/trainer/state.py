"""What a trainer needs to go on as if it had never stopped: saved beside training, loaded exactly. Knows no
batch.

That is the float32 master weights and AdamW's moments by parameter name, the counts that stand in Progress,
and each rank's random generators of torch. The learning rate is a function of these counts, the initial
weights of a KL penalty are those of model.path; neither is saved. With adapters (trainer.lora) the weights
below them are not saved either. The folder is complete or not there:

    __R_N.distcp    the shards that rank R wrote, by torch.distributed.checkpoint (DCP)
    .metadata       where each shard of each tensor lies: DCP's index, a pickle
    state.json      what the tensors belong to, size and SHA-256 of the other files, which are hashed while
                    they are written; asyncrl/checkpoints/manifest.py takes them over

DCP lays shards out anew: what N ranks have saved, M ranks load. The same bits come out of the same number of
ranks. It does not check what it reads: the files were compared with the manifest of their checkpoint, against
damage. A manifest can be forged like a file, so the index is unpickled with DCP's own classes alone, and
tensors are read with weights_only.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from asyncrl.checkpoints.manifest import SUMS, FileEntry
from asyncrl.config import LoraConfig
from asyncrl.files import HashingFile, sync
from asyncrl.http import Refused
from asyncrl.trainer.model.parts import MasterWeights
from asyncrl.trainer.offload import local_of
from asyncrl.trainer.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
INDEX = ".metadata"
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


class Progress(BaseModel):
    """The counts of a TrainStep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy_version: int = 0
    num_optimizer_steps: int = 0
    num_skipped_in_a_row: int = 0


class TrainerManifest(BaseModel):
    """state.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: str
    dtype: str
    lora: dict[str, Any] | None
    world_size: int
    shapes: dict[str, list[int]]
    optimizer_names: list[str]
    has_cuda_rng: bool
    progress: Progress
    learning_rate: float
    torch: str
    files: dict[str, FileEntry] = {}


@dataclass(frozen=True)
class PendingSave:
    """A save whose copy is made and whose files are being written. `held_s`: seconds for which training stood
    still.
    """

    held_s: float
    written: Future[None]

    def wait(self) -> None:
        """Return when the folder is complete. Raises Refused if it could not be written, and then it is not
        there.
        """
        self.written.result()


class TrainerState:
    """Saves and loads the weights and the optimizer that it is given. Made on all ranks at once, and called
    on all of them.

    Life:       begin_save -> PendingSave.wait -> begin_save ...: one at a time, since its copy lies in
                buffers that are used again. A save whose process dies leaves .NAME.unfinished, never a NAME.
    Invariant:  a load that is refused because of what the folder is or holds has changed nothing.
    """

    def __init__(
        self,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        *,
        model_path: str,
        dtype: torch.dtype,
        device: torch.device,
        lora: LoraConfig | None = None,
    ) -> None:
        self._masters, self._optimizer, self._device = masters, optimizer, device
        self._model_path, self._dtype = model_path, str(dtype).removeprefix("torch.")
        self._lora = None if lora is None else lora.model_dump(mode="json")
        self._ranks = ranks.beside()
        self._host: dict[str, Tensor] = {}
        self._pending: PendingSave | None = None
        self._writer = ThreadPoolExecutor(1, "state")
        # DCP warns whenever it runs without a process group. Not on the writing thread: filters are global.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning
        )

    def begin_save(
        self, progress: Progress, path: Path, content_of: Callable[[Tensor], Tensor] = lambda local: local
    ) -> PendingSave:
        """Copy everything to host memory, and have it written to `path`, which is new, while training goes
        on. Raises Refused.

        `content_of` finds the values of a local tensor that are not in it (offload.py).
        """
        if self._pending is not None:
            wait([self._pending.written])
        started = time.perf_counter()
        live = self._live(self._stepped(), self._own_rng())
        self._copy(live, content_of)
        manifest = self._manifest(progress)
        held_s = time.perf_counter() - started
        written = self._writer.submit(self._write, path, live, manifest)
        self._pending = PendingSave(held_s, written)
        return self._pending

    def load(self, path: Path) -> Progress:
        """Overwrite weights, optimizer and random generators with those of a saved folder; returns its
        counts. Raises Refused if it is not complete, or is of another model.
        """
        manifest = self._ranks.agree(lambda: self._fitting_manifest(path))
        rng = self._own_rng() if self._ranks.rank < manifest.world_size else {}
        if not manifest.has_cuda_rng:
            rng.pop("cuda", None)
        moments = {
            name: self._moments(master)
            for name, master in self._masters.named.items()
            if name in manifest.optimizer_names
        }
        live = self._live(moments, rng)
        planner = _TensorPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        group = {"process_group": self._ranks.group, "no_dist": self._ranks.group is None}
        with _dcp_errors(path):
            dcp_load(live, storage_reader=_Reader(path), planner=planner, **group)
        self._set_moments(moments, live["adamw.step"].tolist(), manifest.learning_rate)
        self._masters.write_back()
        for kind in rng:
            generator_state = live[f"rng.{kind}.{self._ranks.rank}"]
            if kind == "cpu":
                torch.set_rng_state(generator_state)
            else:
                torch.cuda.set_rng_state(generator_state, self._device)
        return manifest.progress

    def _write(self, path: Path, live: dict[str, Tensor], manifest: TrainerManifest) -> None:
        """On the writing thread: the copies, laid out over the ranks as `live` is, which is not read."""
        unfinished = path.with_name(f".{path.name}.unfinished")
        group = {"process_group": self._ranks.group, "no_dist": self._ranks.group is None}
        writer = FileSystemWriter(unfinished, sync_files=True, per_thread_copy_ahead=0)
        writer.fs = hashed = _HashedFiles()
        try:
            self._ranks.agree(lambda: self._begin(path, unfinished))
            with _dcp_errors(path):
                dcp_save(live, storage_writer=writer, planner=_HostPlanner(self._host), **group)
            files = {
                name: FileEntry(**entry)
                for own in self._ranks.gather(hashed.entries)
                for name, entry in own.items()
            }
            whole = manifest.model_copy(update={"files": files})
            self._ranks.agree(lambda: self._finish(path, unfinished, whole))
        finally:
            if self._ranks.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)

    def _begin(self, path: Path, unfinished: Path) -> None:
        if self._ranks.is_first:
            with _file_errors(path):
                if path.exists():
                    raise FileExistsError("it is there already, and a state is written into a new folder")
                shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
                unfinished.mkdir(parents=True)

    def _finish(self, path: Path, unfinished: Path, manifest: TrainerManifest) -> None:
        if self._ranks.is_first:
            with _file_errors(path):
                (unfinished / SUMS).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
                sync(unfinished / SUMS)
                sync(unfinished)
                unfinished.rename(path)
                sync(path.parent)

    def _stepped(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each weight that has been stepped on."""
        states = {name: self._optimizer.state.get(master) for name, master in self._masters.named.items()}
        return {name: state for name, state in states.items() if state}

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of one weight, to be overwritten; made as AdamW makes it if there is none."""
        if state := self._optimizer.state.get(master):
            return dict(state)
        group = self._optimizer.param_groups[0]
        step_device = master.device if group.get("fused") or group.get("capturable") else "cpu"
        return {
            "step": torch.zeros((), dtype=torch.float32, device=step_device),
            **{moment: torch.zeros_like(master).detach() for moment in MOMENTS},
        }

    def _set_moments(
        self, moments: dict[str, dict[str, Tensor]], steps: list[float], learning_rate: float
    ) -> None:
        for name, steps_taken in zip(sorted(moments), steps, strict=True):
            moments[name]["step"].fill_(steps_taken)
        for name, master in self._masters.named.items():
            if name in moments:
                self._optimizer.state[master] = moments[name]
            else:
                self._optimizer.state.pop(master, None)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def _own_rng(self) -> dict[str, Tensor]:
        """Random generators of this rank."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _live(self, moments: dict[str, dict[str, Tensor]], rng: dict[str, Tensor]) -> dict[str, Tensor]:
        """All that lies in the folder, by its name there."""
        steps = [moments[name]["step"] for name in sorted(moments)]
        return {
            **{f"weights.{name}": master.detach() for name, master in self._masters.named.items()},
            **{
                f"adamw.{moment}.{name}": state[moment]
                for name, state in moments.items()
                for moment in MOMENTS
            },
            "adamw.step": torch.stack(steps).float() if steps else torch.zeros(0),
            **{f"rng.{kind}.{self._ranks.rank}": state for kind, state in rng.items()},
        }

    @torch.no_grad()
    def _copy(self, live: dict[str, Tensor], content_of: Callable[[Tensor], Tensor]) -> None:
        """Copy this rank's shards into the host buffers, which are made the first time."""
        is_cuda = self._device.type == "cuda"
        for name, tensor in live.items():
            local = local_of(tensor)
            buffer = self._host.get(name)
            if buffer is None or buffer.shape != local.shape:
                buffer = self._host[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=is_cuda)
            buffer.copy_(content_of(local), non_blocking=is_cuda)
        if is_cuda:
            torch.cuda.synchronize(self._device)

    def _manifest(self, progress: Progress) -> TrainerManifest:
        return TrainerManifest(
            model_path=self._model_path,
            dtype=self._dtype,
            lora=self._lora,
            world_size=self._ranks.size,
            shapes=self._shapes(),
            optimizer_names=sorted(self._stepped()),
            has_cuda_rng=self._device.type == "cuda",
            progress=progress,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            torch=torch.__version__,
        )

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(master.shape) for name, master in self._masters.named.items()}

    def _fitting_manifest(self, path: Path) -> TrainerManifest:
        manifest = read_manifest(path)
        shapes, saved, difference, rule = self._shapes(), manifest.shapes, "", "names and shapes are the same"
        if manifest.lora != self._lora:
            rule = "adapters are saved without the weights below them"
            difference = f"holds {_trained(manifest.lora)}, and this run trains {_trained(self._lora)}"
        elif differing := sorted(name for name in {*shapes, *saved} if shapes.get(name) != saved.get(name)):
            first = differing[0]
            difference = (
                f"is of another model: {len(differing)} weights differ, e.g. {first} is "
                f"{saved.get(first, 'missing')} there and {shapes.get(first, 'missing')} here"
            )
        if difference:
            way_out = f"start with the configuration of the run that wrote it (model {manifest.model_path})."
            raise Refused(422, f"{path} {difference}", rule=rule, way_out=way_out)
        return manifest


def read_manifest(path: Path) -> TrainerManifest:
    """Raises Refused if there is none, or it cannot be read."""
    try:
        return TrainerManifest.model_validate_json((path / SUMS).read_bytes())
    except (OSError, ValidationError) as error:
        raise Refused(
            422,
            f"{path / SUMS} cannot be read: {error}",
            rule="a folder without it is no saved state",
            way_out="give a complete one.",
        ) from error


class _HashedFiles(FileSystem):
    """The files of this rank, hashed while DCP writes them, from start to end: their FileEntry by name."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with HashingFile(Path(path)) as file:
            yield cast(io.IOBase, file)
        self.entries[Path(path).name] = {"size": file.num_bytes, "sha256": file.sha256}

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
    """Unpickles nothing but an index of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / INDEX).open("rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{INDEX} holds a {module}.{name}, which no index does")
        return super().find_class(module, name)


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(
            507,
            f"cannot write the trainer's state to {path}: {error}",
            way_out="check the disk and its rights.",
        ) from error


@contextmanager
def _dcp_errors(path: Path) -> Iterator[None]:
    """DCP answers a failure on one rank on all of them, with all that they raised."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        while not isinstance(reason, OSError) and reason.__context__ is not None:
            reason = reason.__context__  # torch's writer tells of a write that failed as of a wrong position
        raise Refused(
            507,
            f"cannot write or read {path}: {type(reason).__name__} on rank {rank}: {str(reason)[:300]}",
            way_out="check the disk; a folder of another version of torch may not be readable.",
        ) from error


def _trained(lora: dict[str, object] | None) -> str:
    if lora is None:
        return "all weights"
    return f"adapters (rank {lora['rank']}, alpha {lora['alpha']}, targets {lora['targets']})"
