"""Trainer state of a checkpoint: saved in parallel with training, restored exactly.

    __R_N.distcp    shards of rank R: float32 master weights, optimizer state, random generators
    .metadata       index of torch.distributed.checkpoint (DCP), a pickle
    state.json      tensors and Progress

N ranks save, M ranks load. Load only checkpoints that you trust: DCP unpickles the index.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.files import open_as, whole_folder
from asyncrl.base.http import Refused
from asyncrl.config import LoraConfig
from asyncrl.trainer.build_model import load_tokenizer, loading
from asyncrl.trainer.lora import ADAPTER, save_adapter
from asyncrl.trainer.offload import HostMemory, local_of
from asyncrl.trainer.optimizer import MOMENTS, MasterWeights, new_state
from asyncrl.trainer.ranks import Ranks
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights.adapters import merge
from asyncrl.weights.export import (
    LazyWeights,
    after_what_was_begun,
    cut,
    entries_of,
    in_export_dtype,
    named_weights,
)
from asyncrl.weights.ipc import lay_out, views
from asyncrl.weights.tensor_files import SUFFIXES, adapted_modules, dtype_name

READ_BYTES = 2**30
STATE = "state.json"
FLAT: dict[str, Any] = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class Progress(BaseModel, frozen=True):
    policy_version: int = 0
    num_optimizer_steps: int = 0
    num_skipped_in_a_row: int = 0


class SavedState(BaseModel, frozen=True):
    model_path: str
    lora: dict[str, Any] | None
    world_size: int
    shapes: dict[str, list[int]]
    optimizer_names: list[str]
    has_cuda_rng: bool
    progress: Progress


class TrainerState:
    """Saves and loads weights and optimizer, on all ranks together.

    Life: begin_save -> `copying` ends, then sources may change -> `pending` ends -> begin_save ...
    Invariant: a refused load changes nothing.
    """

    def __init__(
        self,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        spec: TrainerSpec,
        device: torch.device,
    ) -> None:
        self._masters = masters
        self._optimizer = optimizer
        self._device = device
        self._model_path = spec.model_path
        lora = spec.trainer.lora
        self._lora = None if lora is None else lora.model_dump(mode="json", exclude={"merge"})
        self._ranks = ranks.with_own_group()
        self._group: dict[str, Any] = {
            "process_group": self._ranks.group,
            "no_dist": self._ranks.group is None,
        }
        self._host: dict[str, Tensor] = {}
        self._memory = HostMemory(torch.device("cpu") if spec.trainer.cpu_offload else device)
        self._is_lent = False
        self.copying: Future[None] | None = None
        self.pending: Future[None] | None = None
        self._copier = ThreadPoolExecutor(1, "copy state")
        self._writer = ThreadPoolExecutor(1, "state")
        # DCP warns without a process group. Not on the writing thread: filters are global.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning
        )

    def begin_save(
        self, progress: Progress, path: Path, content_of: Callable[[Tensor], Tensor]
    ) -> Future[None]:
        """Copy the state during the next pass, then write it to the new folder `path`. The Future raises
        Refused.
        """
        if self.pending is not None:
            wait([self.pending])
        stepped = {
            name: state
            for name, master in self._masters.named.items()
            if (state := self._optimizer.state.get(master))
        }
        live = self._live(stepped, self._own_rng())
        self.copying = self._copier.submit(self._copy, live, content_of, after_what_was_begun(self._device))
        manifest = SavedState(
            model_path=self._model_path,
            lora=self._lora,
            world_size=self._ranks.size,
            shapes=self._shapes(),
            optimizer_names=sorted(stepped),
            has_cuda_rng=self._device.type == "cuda",
            progress=progress,
        )
        self.pending = self._writer.submit(self._write, path, live, manifest, self.copying)
        return self.pending

    def wait_lent(self) -> None:
        """Wait until no borrowed memory is written; call it after `copying`."""
        if self._is_lent and self.pending is not None:
            wait([self.pending])

    def load(self, path: Path) -> Progress:
        """Restore the state and return the counts. Raises Refused."""
        manifest = self._ranks.agree(lambda: self._fitting_manifest(path))
        rng = self._own_rng() if self._ranks.rank < manifest.world_size else {}
        if not manifest.has_cuda_rng:
            rng.pop("cuda", None)
        moments = dict[str, dict[str, Tensor]]()
        for name in manifest.optimizer_names:
            master = self._masters.named[name]
            moments[name] = dict(self._optimizer.state.get(master) or new_state(master))
        live = self._live(moments, rng)
        with _errors(path):
            reader = FileSystemReader(path)
            dcp_load(live, storage_reader=reader, planner=DefaultLoadPlanner(**FLAT), **self._group)
        for name, steps_taken in zip(sorted(moments), live["optimizer.step"].tolist(), strict=True):
            moments[name]["step"].fill_(steps_taken)
        for name, master in self._masters.named.items():
            self._optimizer.state.pop(master, None)
            if name in moments:
                self._optimizer.state[master] = moments[name]
        self._masters.write_back()
        if rng:
            torch.set_rng_state(live[f"rng.cpu.{self._ranks.rank}"])
        if "cuda" in rng:
            torch.cuda.set_rng_state(live[f"rng.cuda.{self._ranks.rank}"], self._device)
        return manifest.progress

    def _write(
        self, path: Path, live: dict[str, Tensor], manifest: SavedState, copying: Future[None]
    ) -> None:
        try:
            # a rank without a copy would let the others wait in DCP
            self._ranks.agree(lambda: _wait_copied(copying))
            with _errors(path):
                writer = FileSystemWriter(path, sync_files=False, per_thread_copy_ahead=0)
                dcp_save(live, storage_writer=writer, planner=_HostPlanner(self._host), **self._group)
                if self._ranks.is_first:
                    _refuse_incomplete(path)
                    (path / STATE).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        finally:
            if self._memory.is_short:
                self._host = {}
                self._memory.free()

    def _own_rng(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _live(self, moments: dict[str, dict[str, Tensor]], rng: dict[str, Tensor]) -> dict[str, Tensor]:
        live = {f"weights.{name}": master.detach() for name, master in self._masters.named.items()}
        for name, state in moments.items():
            live |= {f"optimizer.{moment}.{name}": state[moment] for moment in MOMENTS}
        steps = [moments[name]["step"] for name in sorted(moments)]
        live["optimizer.step"] = torch.stack(steps).float() if steps else torch.zeros(0)
        return live | {f"rng.{kind}.{self._ranks.rank}": state for kind, state in rng.items()}

    @torch.no_grad()
    def _copy(
        self,
        live: dict[str, Tensor],
        content_of: Callable[[Tensor], Tensor],
        reading: AbstractContextManager[Any],
    ) -> None:
        is_cuda = self._device.type == "cuda"
        with reading:
            locals_ = {name: local_of(tensor) for name, tensor in live.items()}
            contents = {name: content_of(local) for name, local in locals_.items()}
            here = {name: local for name, local in locals_.items() if contents[name] is local}
            self._is_lent = len(here) < len(locals_)
            self._host = {}
            placed, num_bytes = lay_out(entries_of(LazyWeights(here), None))
            places = views(placed, self._memory.of(num_bytes))
            for name, content in contents.items():
                # DCP copies parts of larger tensors again
                self._host[name] = torch.from_numpy(places.get(name, content).numpy())
                if name in places:
                    self._host[name].copy_(content, non_blocking=is_cuda)
            if is_cuda:
                torch.cuda.current_stream(self._device).synchronize()

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(master.shape) for name, master in self._masters.named.items()}

    def _fitting_manifest(self, path: Path) -> SavedState:
        manifest = read_state(path)
        _read_index(path)
        if manifest.lora != self._lora:
            what = f"{path} has trainer.lora={manifest.lora}, and this run {self._lora}"
            way_out = "start with the configuration of the run that wrote it."
            raise Refused(422, what, rule="a run trains the same weights", way_out=way_out)
        _refuse_other_model(path, manifest.shapes, self._shapes())
        return manifest


def read_state(path: Path) -> SavedState:
    try:
        return SavedState.model_validate_json((path / STATE).read_bytes())
    except (OSError, ValidationError) as error:
        what = f"{path / STATE} cannot be read: {error}"
        way_out = "give the folder of a whole checkpoint, which all nodes of the trainer see."
        raise Refused(422, what, way_out=way_out) from error


def read_weights(path: Path, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole float32 master weights by name. Raises Refused."""
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    _read_index(path)
    for names in cut(sizes, READ_BYTES):
        some = {f"weights.{name}": torch.empty([*shapes[name]]) for name in names}
        with _errors(path), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            reader = FileSystemReader(path)
            dcp_load(some, storage_reader=reader, planner=DefaultLoadPlanner(**FLAT), no_dist=True)
        yield from ((name, some.pop(f"weights.{name}")) for name in names)


class _HostPlanner(DefaultSavePlanner):
    def __init__(self, host: dict[str, Tensor]) -> None:
        super().__init__(**FLAT)
        self._host = host

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._host[write_item.index.fqn]


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, UnpicklingError, CheckpointException) as error:
        reason: BaseException = error
        if isinstance(error, CheckpointException):
            reason, _ = next(iter(error.failures.values()))
        while not isinstance(reason, OSError) and reason.__context__ is not None:
            reason = reason.__context__  # torch's writer reports a failed write as a wrong position
        what = f"cannot write or read {path}: {type(reason).__name__}: {str(reason)[:300]}"
        way_out = "check the disk; a folder of another version of torch may not be readable."
        raise Refused(507, what, way_out=way_out) from error


def _read_index(path: Path) -> Metadata:
    """Read the index. Raises Refused with the reason, which DCP hides."""
    with _errors(path):
        return FileSystemReader(path).read_metadata()


def _refuse_incomplete(path: Path) -> None:
    wanted = {Path(place.relative_path).name for place in _read_index(path).storage_data.values()}
    if missing := sorted(name for name in wanted if not (path / name).is_file()):
        what = f"{path} lacks {', '.join(missing)}, which other ranks have written"
        rule = "all ranks write their shards of a checkpoint into one folder"
        way_out = "put the run directory on a file system that all nodes of the trainer share."
        raise Refused(507, what, rule=rule, way_out=way_out)


def _wait_copied(copying: Future[None]) -> None:
    try:
        copying.result()
    except (OSError, MemoryError, RuntimeError) as error:
        what = f"cannot copy the state to host memory: {type(error).__name__}: {str(error)[:300]}"
        raise Refused(507, what, way_out="free host memory; the next checkpoint tries again.") from error


Shapes = Mapping[str, list[int]]


def save_folder(
    model: Any, weights: dict[str, Tensor], tokenizer: Any, dtype: torch.dtype, path: Path
) -> None:
    with whole_folder(path) as unfinished:
        model.save_pretrained(unfinished, state_dict=weights)
        config_file = unfinished / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        # save_pretrained records the master weights' dtype instead of the state_dict's.
        config["dtype"] = dtype_name(dtype)
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(unfinished)
        open_as(unfinished, config_file)


def save_model(
    state: Path, base: Path, path: Path, tell: Callable[[str], None], *, dtype: str, chat_template: str | None
) -> None:
    """Write a Hugging Face folder in `dtype`, adapters merged. Raises Refused, ConfigError, OSError,
    SafetensorError.
    """
    disable_progress_bar()
    saved = read_state(state)
    of_dtype = getattr(torch, dtype)
    tell(f"loading the model that the run began with, in {dtype}")
    with loading(base):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=of_dtype)
        tokenizer = load_tokenizer(base, chat_template)
    parameters = dict(model.named_parameters())
    shapes = {name: list(one.shape) for name, one in parameters.items()}
    if saved.lora is None:
        _refuse_other_model(state, saved.shapes, shapes)
        tell(f"reading {sum(4 * one.numel() for one in parameters.values()) / 1e9:.2f} GB of weights")
        for name, tensor in read_weights(state, saved.shapes):
            parameters[name].data = tensor.to(parameters[name].dtype)
    else:
        adapters = _adapters(state, saved.shapes, of_dtype)
        lora = LoraConfig(**saved.lora)
        for module in adapted_modules(adapters):
            name = f"{module}.weight"
            lora_A, lora_B = (adapters[module + suffix] for suffix in SUFFIXES)
            wanted = {name: [len(lora_B), lora_A.shape[1]]}
            _refuse_other_model(state, wanted, {name: shapes[name]} if name in shapes else {})
            parameters[name].data = merge(parameters[name].data, lora_A, lora_B, lora.alpha / lora.rank)
    tell("writing the model")
    save_folder(model, in_export_dtype(named_weights(model), of_dtype), tokenizer, of_dtype, path)


def save_peft(
    state: Path,
    base: Path,
    path: Path,
    name: str,
    revision: str | None,
    *,
    dtype: str,
    chat_template: str | None,
) -> None:
    """Write adapters as a peft folder on the model `name`. Raises like save_model."""
    saved = read_state(state)
    assert saved.lora is not None, "the run trains adapters"
    adapters = _adapters(state, saved.shapes, getattr(torch, dtype))
    save_adapter(path, adapters, LoraConfig(**saved.lora), name, revision)
    with loading(base):
        load_tokenizer(base, chat_template).save_pretrained(path)


def _adapters(state: Path, shapes: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
    named = read_weights(state, shapes)
    return {name.replace(f".{ADAPTER}.weight", ".weight"): tensor.to(dtype) for name, tensor in named}


def _refuse_other_model(state: Path, saved: Shapes, there: Shapes) -> None:
    for name in sorted({*saved, *there}):
        if saved.get(name) != there.get(name):
            what = f"the weight {name} is {saved.get(name)} in {state} and {there.get(name)} in the model"
            raise Refused(422, what, way_out="start with the model that the run began with.")
