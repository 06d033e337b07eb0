"""Load a model from its folder: whole, or a rank's shards.

A sharded model is never whole in a rank: it is made on `meta` (meta_model), sharded, and filled with this
rank's rows of each tensor (fill), including stacked experts. Only folders with converted tensors or .bin
files are loaded whole by each rank and then sharded.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from asyncrl.base.errors import ConfigError
from asyncrl.base.host import available_memory
from asyncrl.config import TrainerConfig
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights.tensor_files import StoredPiece, stored_views

log = logging.getLogger("asyncrl.trainer")

STATE_BYTES = 12
"""Bytes per parameter in addition to its float32 weight: gradient and two moments of AdamW."""


@contextmanager
def loading(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"cannot load the model {folder}: {reason}",
            rule="model.path is a Hugging Face folder or hub id of a causal language model",
            way_out="correct model.path; a hub id needs the network or a filled cache.",
        ) from error


def load_model(spec: TrainerSpec, device: torch.device, dtype: torch.dtype, *, is_sharded: bool) -> Any:
    """Load the whole model with float32 master weights, dropout off, all parameters trained; under adapters
    in the forward pass's dtype. With `is_sharded` it stays in host memory.
    """
    is_adapted = spec.trainer.lora is not None
    with loading(spec.model_path):
        model, info = AutoModelForCausalLM.from_pretrained(
            spec.model_path,
            dtype=dtype if is_adapted else torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    missing = [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]
    _refuse_others(spec.model_path, missing, info["unexpected_keys"])
    if not is_adapted:
        _check_memory(model, device, spec.trainer)
    for parameter in model.parameters():  # an offload cannot free a mapped file
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    # dropout would change logprobs
    model.eval()
    return (model if is_sharded else model.to(device)).requires_grad_(True)


def _refuse_others(folder: str | Path, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise ConfigError if the folder's tensors differ from the model's."""
    if lacking := sorted(missing):
        raise ConfigError(
            f"the weights of {folder} lack {len(lacking)} tensors, e.g. {lacking[0]}",
            rule="transformers would fill them with random numbers, in every process with others",
            way_out="complete the folder; model.scratch makes a model with random weights on purpose.",
        )
    if others := sorted(unexpected):
        raise ConfigError(
            f"the weights of {folder} have {len(others)} tensors that its config.json has no place for, "
            f"e.g. {others[0]}",
            rule="left out, they would make another model than the one that is stored",
            way_out="put the config.json of these weights there, or remove the tensors.",
        )


def meta_model(spec: TrainerSpec, device: torch.device, dtype: torch.dtype) -> Any:
    """Build the model of load_model with parameters on `meta` and real buffers in host memory."""
    is_adapted = spec.trainer.lora is not None
    with loading(spec.model_path), torch.random.fork_rng([]), _parameters_on_meta():
        config = AutoConfig.from_pretrained(spec.model_path)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype if is_adapted else torch.float32)
        if model.can_generate() and Path(spec.model_path, "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(spec.model_path)
    if not is_adapted:
        _check_memory(model, device, spec.trainer)
    return model.eval().requires_grad_(True)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create each parameter on `meta` inside the context, so that only one is in memory. A model created
    entirely on `meta` would lack buffers that are in no file, like rotary frequencies.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Cut(NamedTuple):
    """A stored tensor as a piece of a model tensor, and the rows that contain it: one after another along the
    first dimension, or all in one row.
    """

    name: str
    piece: StoredPiece
    rows: range


def _cuts_of(model: Any) -> dict[str, list[_Cut]] | None:
    wanted = model.state_dict(keep_vars=True)
    found = stored_views(model, wanted)
    cuts = {
        name: [_Cut(stored, piece, _rows_of(piece, wanted[name])) for stored, piece in pieces.items()]
        for name, pieces in found.items()
    }
    is_whole = cuts.keys() == wanted.keys() and all(one.rows for some in cuts.values() for one in some)
    return cuts if is_whole else None


def _cut_of_all(name: str, tensor: Tensor) -> _Cut:
    stride = torch.empty(tensor.shape, device="meta").stride()
    return _Cut(name, StoredPiece(tuple(tensor.shape), stride, 0), range(*tensor.shape[:1] or (1,)))


def _rows_of(piece: StoredPiece, tensor: Tensor) -> range:
    row_size = max(1, math.prod(tensor.shape[1:]))
    first, column = divmod(piece.start, row_size)
    is_by_row = piece.stride[:1] == (row_size,)
    steps = [(size - 1) * stride for size, stride in zip(piece.shape, piece.stride, strict=True)]
    if column + sum(steps[is_by_row:]) >= row_size:
        return range(0)
    return range(first, first + (piece.shape[0] if is_by_row else 1))


class StoredWeights:
    """Tensors of safetensors files under a model's names, read on access and only in the requested rows,
    stacked experts included.
    """

    def __init__(self, model: Any, folder: Path, cuts: Mapping[str, list[_Cut]]) -> None:
        """Read the files' headers; tensors are as in `cuts` or in `model`. Raises OSError and errors of
        broken files.
        """
        self._folder, self._cuts = folder, dict[str, list[_Cut]]()
        self._files: dict[str, Any] = {}
        self._twins: list[list[str]] = []
        self.missing: list[str] = []
        wanted, tied = model.state_dict(keep_vars=True), dict[int, list[str]]()
        for name, tensor in wanted.items():
            tied.setdefault(id(tensor), []).append(name)
        known = {*wanted, *(cut.name for some in cuts.values() for cut in some)}
        for path in _files_of(folder):
            file = safe_open(path, framework="pt")
            for stored in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                longer = f"{model.base_model_prefix}.{stored}"
                name = longer if stored not in known and longer in known else stored
                self._files[name] = (file, stored)
        for names in tied.values():
            for name in names:
                if all(cut.name in self._files for cut in cuts[name]):
                    self._cuts[name] = cuts[name]
                elif name in self._files:
                    self._cuts[name] = [_cut_of_all(name, wanted[name])]
            twins = [name for name in names if name in self._cuts]
            if twins:
                self._cuts |= {name: self._cuts[twins[0]] for name in names if name not in twins}
                self._twins += [twins][: len(twins) - 1]
            else:
                self.missing += [cut.name for cut in cuts[names[0]] if cut.name not in self._files]
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        used = {cut.name for some in (*cuts.values(), *self._cuts.values()) for cut in some}
        others = self._files.keys() - used
        self.unexpected = [name for name in others if not any(re.search(one, name) for one in ignored)]

    def check(self) -> None:
        """Raise ConfigError for missing, unexpected, misshapen or contradictory tensors."""
        _refuse_others(self._folder, self.missing, self.unexpected)
        for cut in (cut for some in self._cuts.values() for cut in some):
            shape, expected = self._slice(cut).get_shape(), [*cut.piece.shape]
            if shape != expected:
                what = f"{cut.name} of {self._folder} has shape {shape}, and the model's is {expected}"
                way_out = "put the config.json of these weights there."
                raise ConfigError(what, rule="config.json is of the weights beside it", way_out=way_out)
        for first, *twins in self._twins:
            for twin in twins:
                pairs = zip(self._cuts[first], self._cuts[twin], strict=True)
                if not all(torch.equal(self._whole(one), self._whole(other)) for one, other in pairs):
                    what = f"{first} and {twin} of {self._folder} differ, and its config.json ties them"
                    raise ConfigError(what, way_out="set tie_word_embeddings to false there.")

    def copy_rows(self, name: str, start: int, rows: Tensor) -> None:
        """Fill contiguous `rows` of a tensor from row `start` on, reading mapped files."""
        row_size = math.prod(rows.shape[1:])
        for cut in self._cuts[name]:
            low, high = max(cut.rows.start, start), min(cut.rows.stop, start + len(rows))
            if low >= high:
                continue
            first, is_by_row = cut.rows.start, cut.piece.shape[:1] == (len(cut.rows),)
            part = self._slice(cut)[low - first : high - first] if is_by_row else self._whole(cut)
            offset = (low - start) * row_size + cut.piece.start - first * row_size
            rows.as_strided(part.shape, cut.piece.stride, rows.storage_offset() + offset).copy_(part)

    def _slice(self, cut: _Cut) -> Any:
        file, stored = self._files[cut.name]
        return file.get_slice(stored)

    def _whole(self, cut: _Cut) -> Tensor:
        file, stored = self._files[cut.name]
        tensor: Tensor = file.get_tensor(stored)
        return tensor


def _files_of(folder: Path) -> list[Path]:
    if (one := folder / "model.safetensors").is_file():
        return [one]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]


def stored_weights(model: Any, spec: TrainerSpec) -> StoredWeights | None:
    """Return the stored weights, or None if transformers must compute tensors. Raises ConfigError."""
    folder, why = Path(spec.model_path), f"transformers converts what is stored of a {type(model).__name__}"
    with loading(spec.model_path):
        if not _files_of(folder):
            why = "it has no safetensors files"
        elif getattr(model.config, "quantization_config", None):
            why = "its weights are quantized"
        elif (cuts := _cuts_of(model)) is not None:
            stored = StoredWeights(model, folder, cuts)
            is_converted = bool(get_model_conversion_mapping(model, add_legacy=False))
            # Unexpected and missing tensors may mean another conversion.
            if not (is_converted and stored.missing and stored.unexpected):
                stored.check()
                return stored
    log.warning("each rank loads the whole of %s into host memory before it takes its shard: %s", folder, why)
    return None


@torch.no_grad()
def fill(policy: Policy, stored: StoredWeights, device: torch.device) -> None:
    """Fill parameters on `meta` with this rank's rows on `device`, and persistent buffers, tensor by tensor.
    Other parameters, like new adapters, stay.
    """
    made, state = dict[int, nn.Parameter](), dict[str, nn.Parameter]()
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, DTensor) or not parameter.to_local().is_meta:
            continue
        if id(parameter) not in made:
            rank, size = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
            num_rows = -(-len(parameter) // size)
            start, stop = (min(edge * num_rows, len(parameter)) for edge in (rank, rank + 1))
            local = torch.empty((stop - start, *parameter.shape[1:]), dtype=parameter.dtype, device=device)
            stored.copy_rows(_stored_name(name), start, local)
            sharded = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            made[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
        state[name] = made[id(parameter)]
    for name, tensor in policy.state_dict(keep_vars=True).items():
        if not isinstance(tensor, nn.Parameter):
            whole = torch.empty(tensor.shape or (1,), dtype=tensor.dtype)
            stored.copy_rows(_stored_name(name), 0, whole)
            tensor.copy_(whole.view(tensor.shape))
    # Tied parameters are one object on both sides; FSDP uses the parameters at the first pass.
    policy.load_state_dict(state, strict=False, assign=True)


def _stored_name(name: str) -> str:
    return name.removeprefix("model.").replace(".base_layer.", ".")


def load_tokenizer(folder: str | Path, chat_template: str | Path | None) -> Any:
    """Load a model's tokenizer, optionally with a chat template from a file. Raises OSError or ValueError."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def _check_memory(model: nn.Module, device: torch.device, config: TrainerConfig) -> None:
    """Raise ConfigError if memory is short, before allocation. On CUDA the weights themselves are still to
    come.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cuda" and not config.cpu_offload:
        shard = -(-num_parameters // config.world_size)
        needed_bytes, free_bytes = shard * (STATE_BYTES + 4), torch.cuda.mem_get_info(device)[0]
    else:
        needed_bytes, free_bytes = num_parameters * STATE_BYTES, available_memory()
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"the trainer needs {needed_bytes / 2**30:.1f} GiB for gradients and optimizer state of "
            f"{num_parameters / 1e6:.0f} M parameters, and {free_bytes / 2**30:.1f} GiB are free",
            rule=f"{STATE_BYTES} bytes a parameter beside the float32 weights, activations not counted",
            way_out="set trainer.lora, take a smaller model or more memory, or raise trainer.world_size.",
        )
