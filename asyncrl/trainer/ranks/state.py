"""Trainer state of a checkpoint: saved in parallel with training, restored exactly.

    __R_N.distcp    shards of rank R: float32 master weights, optimizer state, random generators
    .metadata       index of torch.distributed.checkpoint (DCP), a pickle
    state.json      SavedState

With a critic, the shards have its weights and optimizer state too, named critic.* .
N ranks save, M ranks load. Load only checkpoints that you trust: DCP unpickles the
index.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import BaseModel
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.files import open_as, whole_folder
from asyncrl.base.http import Refused
from asyncrl.config.trainer_config import LoraConfig
from asyncrl.models.loading import (
    QUANTIZATION,
    RESCALE,
    add_old_keys,
    carried_over,
    load_language_model,
    loading,
    read_config,
    renamed_prefix,
    sections_of,
    ties_of,
)
from asyncrl.trainer.model.model_folder import GENERATION, TOKENIZER
from asyncrl.trainer.ranks.offload import local_of
from asyncrl.trainer.ranks.optimizer import Trained
from asyncrl.trainer.ranks.ranks import BrokenStepError, Ranks
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights.export import (
    LazyWeights,
    after_queued_work,
    entries_of,
    merge,
    named_weights,
    whole_tensors,
    write_peft,
)
from asyncrl.weights.host_memory import HostMemory
from asyncrl.weights.ipc import lay_out, views
from asyncrl.weights.tensor_files import (
    SUFFIXES,
    adapted_modules,
    dtype_name,
    of_role,
    rename_adapters,
)

STATE = "state.json"
POLICY, CRITIC = "", "critic."
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder with a tokenizer's templates besides the default one."""


class Progress(BaseModel, frozen=True):
    policy_version: int = 0
    skipped_in_a_row: dict[str, int] = {}


class SavedState(BaseModel, frozen=True):
    adapters: dict[str, LoraConfig]
    """By role (TrainerConfig.adapters)."""
    progress: Progress


class TrainerState:
    """Saves and loads weights and optimizer, on all ranks together.

    Life: begin_save -> `copying` ends, then sources may change -> `pending` ends ->
        begin_save ...
    """

    def __init__(
        self,
        models: dict[str, Trained],
        ranks: Ranks,
        spec: TrainerSpec,
        device: torch.device,
    ) -> None:
        """`models`: by the beginning of their names in a checkpoint: POLICY or CRITIC."""
        self._models = models
        self._device = device
        self._spec = spec
        # The writing thread makes collective calls while the torch thread makes others.
        # In one group they would be mistaken for each other.
        self._ranks = ranks.with_own_group()
        group = self._ranks.group
        self._group: dict[str, Any] = {"process_group": group, "no_dist": group is None}
        self._memory = HostMemory(
            # Pinned memory helps only copies from a device. With offload.by_layer the
            # shards are in host memory already.
            torch.device("cpu") if spec.trainer.offload.by_layer else device
        )
        # True if the pending write reads offloaded parts in the host memory where
        # offload() put them.
        self._is_lent = False
        self.copying: Future[dict[str, Tensor]] | None = None
        self.pending: Future[None] | None = None
        # One thread: a write begins after its copy, and writes of two checkpoints
        # cannot overtake each other.
        self._thread = ThreadPoolExecutor(1, "state")
        # DCP warns without a process group. Not on the thread: filters are global.
        warnings.filterwarnings(
            "ignore", "torch.distributed is (disabled|unavailable)", UserWarning
        )

    def begin_save(
        self, progress: Progress, path: Path, content_of: Callable[[Tensor], Tensor]
    ) -> Future[None]:
        """Copy the state during the next pass, then write it to the new folder `path`.
        The Future raises Refused.
        """
        # The host memory of the copy is used again, and the writer still reads it.
        self.wait_written()
        live = self._live()
        # On CUDA the step that made these weights may still run. The copy waits for
        # work that was launched until now, and not for the next step.
        reading = after_queued_work(self._device)
        saved = SavedState(adapters=self._spec.trainer.adapters, progress=progress)
        self.copying = self._thread.submit(self._copy, live, content_of, reading)
        self.pending = self._thread.submit(self._write, path, live, saved, self.copying)
        return self.pending

    def wait_written(self) -> None:
        """Wait until no state is written. A failure of the write is wait_save_state()'s
        to raise.
        """
        if self.pending is not None:
            wait([self.pending])

    def wait_lent(self) -> None:
        """Wait until no borrowed memory is written; call it after `copying`."""
        if self._is_lent:
            self.wait_written()

    def load(self, path: Path, bring: Callable[[str], None]) -> Progress:
        """Restore the state and return the counts. `bring` takes a model's prefix, and
        brings its parts to the device. Raises Refused, and BrokenStepError once a part
        has changed.
        """
        # A write that still runs makes collective calls on the same group, from another
        # thread: the ranks would mistake the messages of one for those of the other.
        self.wait_written()
        saved = read_state(path)
        index = _read_index(path)
        stored = _stored_sizes(index, "")
        starts = [f"{prefix}weights." for prefix in (POLICY, CRITIC)]
        here = {key: tuple(one.shape) for key, one in self._live().items()}
        # Also refuses a critic's state in a run without a critic, and the reverse: a
        # fresh critic would train the policy on other advantages, without a word.
        refuse_foreign(path, stored, here, starts)
        # One model after the other: a device may be too small for the parts of both.
        for prefix, model in self._models.items():
            bring(prefix)
            model.make_state(stored, prefix)
            # Other numbers of ranks and kinds of devices have other generators.
            known = index.state_dict_metadata
            own = (f"{prefix}weights.", f"{prefix}optimizer.")
            live = {
                key: one
                for key, one in self._live().items()
                if key.startswith(own) or (key.startswith("rng.") and key in known)
            }
            try:
                with _errors(path):
                    dcp_load(live, storage_reader=FileSystemReader(path), **self._group)
            except Refused as refused:
                # A refusal promises that nothing has changed, and the trainer keeps running.
                raise BrokenStepError(str(refused)) from refused
            # The model computes with rounded copies of the masters, which DCP has just
            # replaced.
            model.masters.write_back()
        if (cpu := live.get(f"rng.cpu.{self._ranks.rank}")) is not None:
            torch.set_rng_state(cpu)
        if (cuda := live.get(f"rng.cuda.{self._ranks.rank}")) is not None:
            torch.cuda.set_rng_state(cuda, self._device)
        return saved.progress

    def _live(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint holds, under its names there: of weights,
        not of the optimizer's numbers. Other numbers of ranks have other shards, and the
        same names.
        """
        live = dict[str, Tensor]()
        for prefix, model in self._models.items():
            live |= model.state(prefix)
        # DCP would write the tensor of one rank for a name that all ranks have.
        live[f"rng.cpu.{self._ranks.rank}"] = torch.get_rng_state()
        if self._device.type == "cuda":
            live[f"rng.cuda.{self._ranks.rank}"] = torch.cuda.get_rng_state(
                self._device
            )
        return live

    @torch.no_grad()
    def _copy(
        self,
        live: dict[str, Tensor],
        content_of: Callable[[Tensor], Tensor],
        reading: AbstractContextManager[object],
    ) -> dict[str, Tensor]:
        """Return the content of this rank's shards in host memory."""
        host = dict[str, Tensor]()
        with reading:
            locals_ = {name: local_of(tensor) for name, tensor in live.items()}
            contents = {name: content_of(local) for name, local in locals_.items()}
            here = {
                name: local
                for name, local in locals_.items()
                if contents[name] is local
            }
            # An offloaded tensor is in host memory already: DCP writes it from there.
            self._is_lent = len(here) < len(locals_)
            placed, num_bytes = lay_out(entries_of(LazyWeights(here), None))
            places = views(placed, self._memory.of(num_bytes))
            for name, content in contents.items():
                # DCP copies parts of larger tensors again
                host[name] = torch.from_numpy(places.get(name, content).numpy())
                if name in places:
                    host[name].copy_(content, non_blocking=self._device.type == "cuda")
            # The copies have only begun. Once `copying` ends, the optimizer may
            # overwrite their sources.
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return host

    def _write(
        self,
        path: Path,
        live: dict[str, Tensor],
        saved: SavedState,
        copying: Future[dict[str, Tensor]],
    ) -> None:
        try:
            # a rank without a copy would let the others wait in DCP
            host = self._ranks.agree(lambda: _result_of(copying))
            with _errors(path):
                # No fsync here: the controller syncs the whole checkpoint once, before
                # it gets its name (Checkpoints.finish). No copy ahead: the tensors are
                # in host memory already.
                writer = FileSystemWriter(
                    path, sync_files=False, per_thread_copy_ahead=0
                )
                dcp_save(
                    live,
                    storage_writer=writer,
                    planner=_HostPlanner(host),
                    **self._group,
                )
                if self._ranks.is_first:
                    # Without a shared file system each node has its own shards, and DCP
                    # notices nothing. This would be found at the resume, too late.
                    _refuse_incomplete(path)
                    (path / STATE).write_text(
                        saved.model_dump_json(indent=1) + "\n", encoding="utf-8"
                    )
        finally:
            self._memory.free_if_short()


class _HostPlanner(DefaultSavePlanner):
    """Writes the copies of the tensors that the state consists of."""

    def __init__(self, host: dict[str, Tensor]) -> None:
        super().__init__()
        self._host = host

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._host[write_item.index.fqn]


def read_state(path: Path) -> SavedState:
    return SavedState.model_validate_json((path / STATE).read_bytes())


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, UnpicklingError, CheckpointException) as error:
        reason: BaseException = error
        # DCP wraps what each rank raised. One rank's reason is enough.
        if isinstance(error, CheckpointException):
            reason, _ = next(iter(error.failures.values()))
        while not isinstance(reason, OSError) and reason.__context__ is not None:
            # torch's writer reports a failed write as a wrong position
            reason = reason.__context__
        what = (
            f"cannot write or read {path}: {type(reason).__name__}: {str(reason)[:300]}"
        )
        way_out = (
            "check the disk; a folder of another version of torch may not be readable."
        )
        raise Refused(507, what, way_out=way_out) from error


def _read_index(path: Path) -> Metadata:
    with _errors(path):
        return FileSystemReader(path).read_metadata()


def _stored_sizes(index: Metadata, start: str) -> dict[str, tuple[int, ...]]:
    """Return the sizes of stored tensors by their names behind `start`."""
    return {
        key.removeprefix(start): tuple(stored.size)
        for key, stored in index.state_dict_metadata.items()
        if key.startswith(start) and isinstance(stored, TensorStorageMetadata)
    }


def refuse_foreign(
    path: Path,
    saved: Mapping[str, tuple[int, ...]],
    here: Mapping[str, tuple[int, ...]],
    starts: Sequence[str],
) -> None:
    """Raise Refused for a state of other weights, before any of them changes. `starts`:
    of the names that are compared.
    """
    others = sorted(
        key for key, _ in saved.items() ^ here.items() if key.startswith((*starts,))
    )
    if others:
        first = others[0]
        raise Refused(
            422,
            f"{path} is the state of another model: {len({*others})} weights differ, such as {first} "
            f"(saved: {saved.get(first)}, here: {here.get(first)})",
            rule="a state has the names and sizes of all trained weights",
            way_out="resume with the model, the adapters and the critic of the state, or start a new "
            "run with model.path set to an export of this one.",
        )


def _refuse_incomplete(path: Path) -> None:
    wanted = {
        Path(place.relative_path).name
        for place in _read_index(path).storage_data.values()
    }
    if missing := sorted(name for name in wanted if not (path / name).is_file()):
        what = f"{path} lacks {', '.join(missing)}, which other ranks have written"
        rule = "all ranks write their shards of a checkpoint into one folder"
        way_out = "put the run directory on a file system that all nodes of the trainer share."
        raise Refused(507, what, rule=rule, way_out=way_out)


def _result_of(copying: Future[dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        return copying.result()
    # Of any kind: the other ranks wait for this rank's answer.
    except Exception as error:
        what = f"cannot copy the state to host memory: {type(error).__name__}: {str(error)[:300]}"
        raise Refused(
            507, what, way_out="free host memory; the next checkpoint tries again."
        ) from error


# ---- model folders


def save_folder(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    base: Path,
    path: Path,
    *,
    dtype: torch.dtype,
    template: str | Path | None,
) -> None:
    """Write a folder like `base`, with these weights of its language model, in `dtype`.

    All else is the base folder's: config.json aside from dtype, ties and quantisation;
    the tokenizer; tensors of other parts. So every reader of the base folder, like
    transformers 4 or vLLM, reads it alike. `template`: a Jinja file in place of the
    folder's.
    """
    found = ties_of(model)
    # An adapter on a tied head makes two weights of one.
    is_untied = bool(found.keys() & weights.keys())
    ties = {
        name: weights[first]
        for name, first in found.items()
        if first in weights and name not in weights
    }
    # transformers may hold weights in another form than the checkpoint, for example
    # experts stacked into one tensor. Write what the base folder's readers expect.
    aliases = revert_weight_conversion(model, dict(ties))
    stored = revert_weight_conversion(model, weights)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    others = carried_over(base, stored.keys() | aliases.keys(), ignored)
    is_declared = model.config.tie_word_embeddings and not is_untied
    if not is_declared:  # a second pair of the model may be tied
        stored |= {name: tensor.clone() for name, tensor in aliases.items()}
    with whole_folder(path) as unfinished:
        unfinished.mkdir()
        write_shards({**others, **stored}, unfinished)
        config = written_config(base, dtype, is_tied=is_declared)
        config_file = unfinished / "config.json"
        config_file.write_text(
            json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        copy_files(base, unfinished, template, [*TOKENIZER, *GENERATION])
        open_as(unfinished, config_file)


def write_shards(tensors: dict[str, Tensor], path: Path) -> None:
    """Write safetensors files, and an index of several. Raises OSError,
    SafetensorError.
    """
    split = split_torch_state_dict_into_shards(tensors)
    for name, own in split.filename_to_tensors.items():
        save_file(
            {one: tensors[one].contiguous() for one in own},
            path / name,
            metadata={"format": "pt"},
        )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (path / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )


def written_config(base: Path, dtype: torch.dtype, *, is_tied: bool) -> dict[str, Any]:
    """Return config.json of `base` for plain weights in `dtype`."""
    config = read_config(base)
    # An empty entry, so that the loop below sets it even in a config without one.
    config.setdefault("dtype", "")
    for section in sections_of(config):
        section["tie_word_embeddings"] = is_tied
        section |= {
            key: dtype_name(dtype) for key in ("dtype", "torch_dtype") if key in section
        }
        section.pop(QUANTIZATION, None)
        if RESCALE in section:
            section[RESCALE] = False
    add_old_keys(config)
    return config


def copy_files(
    base: Path, path: Path, template: str | Path | None, patterns: Sequence[str]
) -> None:
    """Copy files byte for byte: a tokenizer that transformers loads and saves may split
    texts otherwise. Only a new template, and the names of the base folder's own code,
    change a file.
    """
    for source in {source for pattern in patterns for source in base.glob(pattern)}:
        if template is None or not source.name.startswith("chat_template"):
            shutil.copyfile(source, path / source.name)
    changed: dict[str, str] = {}
    named = base / NAMED_TEMPLATES
    if template is not None:
        shutil.copyfile(template, path / "chat_template.jinja")
        # llama.cpp's converter and older versions of transformers read only this key.
        changed = {"chat_template": Path(template).read_text(encoding="utf-8")}
    elif named.is_dir():
        shutil.copytree(named, path / NAMED_TEMPLATES)
    for file in path.glob("*config.json"):
        before = json.loads(file.read_bytes())
        # Of code that is not copied: readers that trust it would fail.
        after = {key: before[key] for key in before if key != "auto_map"}
        if file.name == "tokenizer_config.json":
            after |= changed
        if after != before:
            text = json.dumps(after, indent=2, ensure_ascii=False)
            file.write_text(text + "\n", encoding="utf-8")


def save_model(
    state: Path,
    base: Path,
    path: Path,
    tell: Callable[[str], None],
    *,
    dtype: str,
    chat_template: str | None,
    role: str = "",
) -> None:
    """Write a Hugging Face folder in `dtype`, the adapter of `role` merged. Raises Refused,
    ConfigError, OSError, SafetensorError.
    """
    disable_progress_bar()
    of_dtype = getattr(torch, dtype)
    tell(f"loading the model that the run began with, in {dtype}")
    with loading(base):
        model = load_language_model(base, dtype=of_dtype)
    plain = named_weights(model)
    lora = read_state(state).adapters.get(role)
    if lora is None:
        parameters = {
            name: parameter.data for name, parameter in model.named_parameters()
        }
        num_bytes = 4 * sum(one.numel() for one in parameters.values())
        tell(f"reading {num_bytes / 1e9:.2f} GB of weights")
        _read_weights(state, parameters)
    else:
        adapters = _read_adapters(state, role, of_dtype)
        for module in adapted_modules(adapters):
            # A tied head is not in `plain`. Its embedding has no adapter.
            base_weight = model.get_parameter(f"{module}.weight").detach()
            lora_A, lora_B = (adapters[module + suffix] for suffix in SUFFIXES)
            plain[f"{module}.weight"] = merge(base_weight, lora_A, lora_B, lora.scale)
    tell("writing the model")
    weights = dict(whole_tensors(plain, of_dtype))
    save_folder(
        model,
        weights,
        base,
        path,
        dtype=of_dtype,
        template=chat_template,
    )


def save_peft(
    state: Path,
    base: Path,
    path: Path,
    model: Mapping[str, str | None],
    *,
    dtype: str,
    chat_template: str | None,
    role: str = "",
) -> None:
    """Write the adapter of `role` as a peft folder. `model`: name and revision of the base
    model in its config. Raises like save_model.
    """
    lora = read_state(state).adapters[role]
    with loading(base):
        names = names_in_whole_model(base)
    adapters = rename_adapters(
        _read_adapters(state, role, getattr(torch, dtype)), names
    )
    with whole_folder(path) as unfinished:
        unfinished.mkdir()
        write_peft(
            adapters,
            lora.scale,
            unfinished,
            **model,
            inference_mode=True,
        )
        copy_files(base, unfinished, chat_template, TOKENIZER)
        open_as(unfinished, unfinished / "adapter_config.json")


def names_in_whole_model(base: Path) -> dict[str, str]:
    """Return the names of the text part's parameters in the class that config.json
    names, by their names in a lone language model. peft looks for layers there. Raises
    transformers' errors.

    Example, Gemma 3: model.layers.0.mlp.up_proj.weight is in
    Gemma3ForConditionalGeneration model.language_model.layers.0.mlp.up_proj.weight.
    """
    if len(sections_of(read_config(base))) == 1:
        return {}
    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        whole = getattr(transformers, config.architectures[0])(config)
    names = [name for name, _ in whole.named_parameters()]
    return {
        re.sub(prefix, ours, name): name
        for prefix, ours in renamed_prefix(names).items()
        for name in names
        if re.match(prefix, name)
    }


def _read_weights(path: Path, into: dict[str, Tensor]) -> None:
    """Fill tensors of any dtype with the master weights of these names. Raises Refused."""
    named: dict[str, object] = {
        f"weights.{name}": tensor for name, tensor in into.items()
    }
    with _errors(path), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp_load(named, storage_reader=FileSystemReader(path), no_dist=True)


def _read_adapters(path: Path, role: str, dtype: torch.dtype) -> dict[str, Tensor]:
    start = f"{role}/" if role else ""
    adapters = {
        name.removeprefix(start): torch.empty(size, dtype=dtype)
        for name, size in _stored_sizes(_read_index(path), "weights.").items()
        if name.startswith(start)
    }
    _read_weights(path, of_role(role, adapters))
    return adapters
