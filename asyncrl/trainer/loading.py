"""Turns a TrainerSpec into a model, an optimizer and functions. Knows the spec; knows no batch.

Every failure here is a ConfigError with the way out: it happens before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config import TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.spec import TrainerSpec

STATE_BYTES = 12
"""Bytes a parameter beside its float32 weight: gradient and two moments of AdamW."""


def resolve_device(spec: TrainerSpec) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of forward pass and exports that the spec's `auto` stand for."""
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "the trainer is to run on CUDA, but torch sees no CUDA device",
            way_out="set placement.trainer=cpu, or install a CUDA build of torch.",
        )
    is_cuda = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
    dtype = ("bfloat16" if is_cuda else "float32") if spec.dtype == "auto" else spec.dtype
    return torch.device("cuda" if is_cuda else "cpu"), getattr(torch, dtype)


def load_model(spec: TrainerSpec, device: torch.device, *, is_sharded: bool = False) -> Any:
    """The model with float32 master weights, dropout off, all parameters trained; under adapters in the dtype of the forward pass.

    One to be sharded stays whole in host memory, in every rank, until its shards go to the device.
    """
    is_adapted = spec.trainer.lora is not None
    dtype = resolve_device(spec)[1] if is_adapted else torch.float32
    try:
        model, info = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"cannot load the model {spec.model_path}: {_first_line(error)}",
            rule="model.path is a Hugging Face folder or hub id of a causal language model",
            way_out="correct model.path; a hub id needs the network or a filled cache.",
        ) from error
    if missing := sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]):
        raise ConfigError(
            f"the weights of {spec.model_path} lack {len(missing)} tensors of a {type(model).__name__}, e.g. {missing[0]}",
            rule="transformers would fill them with random numbers, in every process with others",
            way_out="complete the folder; model.scratch makes a model with random weights on purpose.",
        )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if not is_adapted:  # gradients and optimizer state of adapters are small beside the weights
        _check_memory(num_parameters, device, spec.trainer)
    model.eval()  # dropout would make the trainer's logprobs differ from the engine's; gradients flow all the same
    return (model if is_sharded else model.to(device)).requires_grad_(True)


def load_tokenizer(spec: TrainerSpec) -> Any:
    """The model's tokenizer, with spec.chat_template if there is one. Raises OSError or ValueError if it cannot be read."""
    tokenizer = AutoTokenizer.from_pretrained(spec.model_path)
    if spec.chat_template is not None:
        tokenizer.chat_template = Path(spec.chat_template).read_text(encoding="utf-8")
    return tokenizer


def make_optimizer(weights: Iterable[torch.Tensor], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW, fused; weight decay on matrices alone, not on norms and biases. The learning rate is set before each step."""
    parameters = list(weights)
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def _check_memory(num_parameters: int, device: torch.device, config: TrainerConfig) -> None:
    """Refuse what cannot fit before it is allocated. On CUDA the weights themselves are still to be moved, a shard to each device."""
    if device.type == "cuda" and not config.cpu_offload:
        shard = -(-num_parameters // config.world_size)
        needed_bytes, free_bytes = shard * (STATE_BYTES + 4), torch.cuda.mem_get_info(device)[0]
    else:  # the shards of all ranks lie in the memory of one host
        needed_bytes, free_bytes = num_parameters * STATE_BYTES, psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"the trainer needs {needed_bytes / 2**30:.1f} GiB for gradients and optimizer state "
            f"of {num_parameters / 1e6:.0f} M parameters, "
            f"and {free_bytes / 2**30:.1f} GiB are free on {device.type}",
            rule=f"{STATE_BYTES} bytes a parameter beside the float32 weights, activations not counted",
            way_out="set trainer.lora, which trains adapters alone, or take a smaller model or a machine with more memory"
            + (", or raise trainer.world_size." if device.type == "cuda" else "."),
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
