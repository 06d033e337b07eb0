"""Convert a checkpoint's weights into a model folder on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.files import open_as, whole_folder
from asyncrl.base.http import Refused
from asyncrl.config import LoraConfig
from asyncrl.trainer.model.loading import load_tokenizer, loading
from asyncrl.trainer.model.lora import ADAPTER, save_adapter
from asyncrl.trainer.state import read_state, read_weights
from asyncrl.weights.adapters import merge
from asyncrl.weights.export import in_export_dtype, named_weights
from asyncrl.weights.tensor_files import SUFFIXES, adapted_modules, dtype_name

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
            shapes = f"{saved.get(name)} in {state} and {there.get(name)} in the model that it began with"
            way_out = "restore the model that the run began with."
            raise Refused(422, f"the weight {name} is {shapes}", way_out=way_out)
