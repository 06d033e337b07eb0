"""A model from its folder: whole, or the shards of a rank.

A model that is sharded never lies whole in a rank: it is made on `meta` (meta_model), cut, and filled with
this rank's rows of each tensor (fill). Only a folder that transformers has to convert, like one of .bin
files, is loaded whole by each rank and then cut.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from asyncrl.config import TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.trainer_client import TrainerSpec

log = logging.getLogger("asyncrl.trainer")

STATE_BYTES = 12
"""Bytes a parameter beside its float32 weight: gradient and two moments of AdamW."""


@contextmanager
def loading(folder: str | Path) -> Iterator[None]:
    """What cannot be loaded is a ConfigError."""
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
    """The model whole, with float32 master weights, dropout off, all parameters trained; under adapters in
    the dtype of the forward pass. One to be sharded stays in host memory until its shards go to the device.
    """
    is_adapted = spec.trainer.lora is not None
    with loading(spec.model_path):
        model, info = AutoModelForCausalLM.from_pretrained(
            spec.model_path,
            dtype=dtype if is_adapted else torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, by name
        )
    missing = [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]
    _refuse_others(spec.model_path, missing, info["unexpected_keys"])
    if not is_adapted:  # gradients and optimizer state of adapters are small beside the weights
        _check_memory(model, device, spec.trainer)
    for parameter in model.parameters():  # an offload cannot give the memory of a mapped file up
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    # dropout would make the trainer's logprobs differ from the engine's; gradients flow all the same
    model.eval()
    return (model if is_sharded else model.to(device)).requires_grad_(True)


def _refuse_others(folder: str | Path, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise ConfigError unless the tensors of a folder are those of the model."""
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
    """As load_model makes it, with parameters on `meta`; buffers are those of the model, in host memory."""
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
    """Each parameter of a module that is made meanwhile goes to `meta`: one at a time is in memory. A model
    that is made on `meta` as a whole would lack what is in no file, like the frequencies of a rotary
    embedding.
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


class StoredWeights:
    """The tensors of a folder of safetensors files, by the names of a model: read when they are asked for,
    and only the rows that are.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        """Reads the files' heads. Raises ConfigError where a tensor is missing, too many, or of another shape
        than in `model`, OSError and what else a broken file raises.
        """
        self._files: dict[str, Any] = {}
        """Of each tensor: the open file, and its name in there."""
        tied: dict[int, list[str]] = {}
        wanted = model.state_dict(keep_vars=True)
        for name, tensor in wanted.items():
            tied.setdefault(id(tensor), []).append(name)
        found, prefix = dict[str, Any](), f"{model.base_model_prefix}."
        for path in _files_of(folder):
            file = safe_open(path, framework="pt")
            for stored in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                name = prefix + stored if stored not in wanted and prefix + stored in wanted else stored
                found[name] = (file, stored)
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
        others = found.keys() - wanted.keys()
        unexpected = [name for name in others if not any(re.search(one, name) for one in ignored)]
        missing = [names[0] for names in tied.values() if found.keys().isdisjoint(names)]
        _refuse_others(folder, missing, unexpected)
        for names in tied.values():
            first, *twins = [name for name in names if name in found]
            self._files |= dict.fromkeys(names, found[first])
            shape, expected = self._slice(first).get_shape(), [*wanted[first].shape]
            if shape != expected:
                what = f"{first} of {folder} has shape {shape}, and the model's is {expected}"
                way_out = "put the config.json of these weights there."
                raise ConfigError(what, rule="config.json is of the weights beside it", way_out=way_out)
            for twin in twins:
                pair = [found[name][0].get_tensor(found[name][1]) for name in (first, twin)]
                if not torch.equal(*pair):
                    what = f"{first} and {twin} of {folder} differ, and its config.json ties them"
                    raise ConfigError(what, way_out="set tie_word_embeddings to false there.")

    def _slice(self, name: str) -> Any:
        file, stored = self._files[name]
        return file.get_slice(stored)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """These rows, as they are stored, in memory that is the file's."""
        rows: Tensor = self._slice(name)[start:stop]
        return rows

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        file, stored = self._files[name]
        tensor: Tensor = file.get_tensor(stored)
        return tensor


def _files_of(folder: Path) -> list[Path]:
    """Those that transformers reads; none if there are no safetensors files."""
    if (one := folder / "model.safetensors").is_file():
        return [one]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]


def stored_weights(model: Any, spec: TrainerSpec) -> StoredWeights | None:
    """None where transformers has to convert what is stored. Raises ConfigError."""
    folder, name = Path(spec.model_path), type(model).__name__
    with loading(spec.model_path):
        if not _files_of(folder):
            why = "it has no safetensors files"
        elif getattr(model.config, "quantization_config", None):
            why = "its weights are quantized"
        elif get_model_conversion_mapping(model, add_legacy=False):
            why = f"transformers converts what is stored of a {name}"
        else:
            return StoredWeights(model, folder)
    log.warning("each rank loads the whole of %s into host memory before it takes its shard: %s", folder, why)
    return None


@torch.no_grad()
def fill(policy: Policy, stored: StoredWeights, device: torch.device) -> None:
    """Give each parameter on `meta` its shard on `device`, and each persistent buffer its content: tensor by
    tensor, each rank its own rows. Parameters that are elsewhere, as new adapters are, stay.
    """
    made, state = dict[int, nn.Parameter](), dict[str, nn.Parameter]()
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, DTensor) or not parameter.to_local().is_meta:
            continue
        if id(parameter) not in made:
            rank, size = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
            num_rows = -(-len(parameter) // size)  # of each shard but the last ones
            start, stop = (min(edge * num_rows, len(parameter)) for edge in (rank, rank + 1))
            local = torch.empty((stop - start, *parameter.shape[1:]), dtype=parameter.dtype, device=device)
            if stop > start:
                local.copy_(stored.rows(_stored_name(name), start, stop))
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
            tensor.copy_(stored.whole(_stored_name(name)))
    # Tied parameters are one object on both sides, and FSDP takes what it finds before the first pass.
    policy.load_state_dict(state, strict=False, assign=True)


def _stored_name(name: str) -> str:
    """Of a parameter of a policy, in a file: without what the policy and an adapter have put around it."""
    return name.removeprefix("model.").replace(".base_layer.", ".")


def load_tokenizer(folder: str | Path, chat_template: str | Path | None) -> Any:
    """The tokenizer of a model, with the chat template of that file if there is one. Raises OSError or
    ValueError if it cannot be read.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def _check_memory(model: nn.Module, device: torch.device, config: TrainerConfig) -> None:
    """Refuse what cannot fit before it is allocated. On CUDA the weights themselves are still to come, a
    shard to each device.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cuda" and not config.cpu_offload:
        shard = -(-num_parameters // config.world_size)
        needed_bytes, free_bytes = shard * (STATE_BYTES + 4), torch.cuda.mem_get_info(device)[0]
    else:  # the shards of all ranks lie in the memory of one host
        needed_bytes, free_bytes = num_parameters * STATE_BYTES, psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"the trainer needs {needed_bytes / 2**30:.1f} GiB for gradients and optimizer state of "
            f"{num_parameters / 1e6:.0f} M parameters, and {free_bytes / 2**30:.1f} GiB are free",
            rule=f"{STATE_BYTES} bytes a parameter beside the float32 weights, activations not counted",
            way_out="set trainer.lora, take a smaller model or more memory, or raise trainer.world_size.",
        )
