"""Load a model whole, or as shards that rank 0 scatters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from asyncrl.base.errors import ConfigError
from asyncrl.base.host import available_memory
from asyncrl.config import TrainerConfig
from asyncrl.trainer.trainer_client import TrainerSpec

STATE_BYTES = 12
"""Bytes per parameter: gradient and two AdamW moments."""


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


def load_model(spec: TrainerSpec, dtype: torch.dtype) -> Any:
    """Load the whole model into host memory, in float32 or, under adapters, in `dtype`. Raises
    ConfigError.
    """
    folder = spec.model_path
    with loading(folder):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32 if spec.trainer.lora is None else dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    if missing := sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]):
        raise ConfigError(
            f"the weights of {folder} lack {len(missing)} tensors, e.g. {missing[0]}",
            rule="transformers would fill them with random numbers",
            way_out="complete the folder; model.scratch makes a model with random weights on purpose.",
        )
    if unexpected := sorted(info["unexpected_keys"]):
        raise ConfigError(
            f"the weights of {folder} have {len(unexpected)} tensors that its config.json does not use, e.g. "
            f"{unexpected[0]}",
            rule="without them it would be another model than the stored one",
            way_out="restore the config.json of these weights, or remove the tensors.",
        )
    for parameter in model.parameters():  # an offload cannot free a mapped file
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    return model.eval()  # dropout would change logprobs


def meta_model(spec: TrainerSpec, dtype: torch.dtype) -> Any:
    """Build the model on `meta`, with real buffers: no file has rotary frequencies."""
    folder = Path(spec.model_path)
    with loading(folder), torch.random.fork_rng([]), init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(folder)
        used = torch.float32 if spec.trainer.lora is None else dtype
        model = AutoModelForCausalLM.from_config(config, dtype=used)
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    model.tie_weights()  # the context has replaced tied parameters
    return model.eval()


@torch.no_grad()
def scatter(policy: nn.Module, whole: nn.Module | None, device: torch.device) -> None:
    """Fill `policy.model`, sharded on `meta`, from rank 0's `whole` model. Collective."""
    sources = {} if whole is None else whole.state_dict(keep_vars=True)
    made = dict[int, nn.Parameter]()
    state = dict[str, nn.Parameter]()
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor)
        if id(parameter) not in made:
            mesh = parameter.device_mesh
            if whole is None:
                source = torch.empty(parameter.shape, dtype=parameter.dtype, device=mesh.device_type)
            else:
                source = sources[name.removeprefix("model.")].detach()
                source = source.to(mesh.device_type, parameter.dtype, copy=True)
            sharded = DTensor.from_local(
                distribute_tensor(source, mesh, parameter.placements).to_local().to(device),
                mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            made[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
        state[name] = made[id(parameter)]
    for name, tensor in policy.state_dict(keep_vars=True).items():
        if not isinstance(tensor, nn.Parameter):
            if whole is not None:
                tensor.copy_(sources[name.removeprefix("model.")])
            dist.broadcast(tensor, 0)
    policy.load_state_dict(state, strict=False, assign=True)


def load_tokenizer(folder: str | Path, chat_template: str | Path | None) -> Any:
    """Load a tokenizer. Raises OSError or ValueError."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def check_memory(model: nn.Module, device: torch.device, config: TrainerConfig) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cuda" and not config.cpu_offload:
        needed_bytes = -(-num_parameters // config.world_size) * (STATE_BYTES + 4)
        free_bytes = torch.cuda.mem_get_info(device)[0]
    else:
        needed_bytes = num_parameters * STATE_BYTES
        free_bytes = available_memory()
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"the trainer needs {needed_bytes / 2**30:.1f} GiB for gradients and optimizer state of "
            f"{num_parameters / 1e6:.0f} M parameters, and {free_bytes / 2**30:.1f} GiB are free",
            rule=f"{STATE_BYTES} bytes per parameter in addition to the float32 weights and activations",
            way_out="set trainer.lora, use a smaller model or more memory, or raise trainer.world_size.",
        )
